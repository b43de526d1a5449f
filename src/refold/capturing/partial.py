"""Partial capture: where the whole model cannot be captured, its largest parts are, and stand in its place in a shell.

A shell is a copy of the model's structure that shares every parameter and every module that is not replaced. The eager
model is not touched.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from refold.capturing.calling import bind
from refold.capturing.checking import difference, run
from refold.capturing.errors import CaptureError
from refold.capturing.module import Captured, record_of
from refold.capturing.packing import agree, has_fast_path, watching_masks
from refold.capturing.raising import is_leaf
from refold.capturing.report import CaptureReport
from refold.capturing.restoring import SWITCHES, switched
from refold.capturing.trees import Opaque, Tree, flatten, rebuild

REPORT = "refold_capture_report"  # a plain attribute of the shell: it survives deepcopy and pickle
Capture = Callable[[nn.Module, Sequence[Any], Mapping[str, Any]], Captured]


@dataclasses.dataclass
class Call:
    """The arguments of the first call of a module while the whole model ran, and how often it was called."""

    tree: Tree
    leaves: list[Any]
    times: int = 1

    def arguments(self) -> tuple[tuple[Any, ...], dict[str, Any]]:
        copies = [v.clone() if isinstance(v, torch.Tensor) else v for v in self.leaves]
        args, kwargs = rebuild(self.tree, copies)
        return args, kwargs


def capture_parts(
    model: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any], capture: Capture, why: CaptureError
) -> nn.Module:
    """A shell of the model with the largest parts that can be captured in place of their eager selves."""
    with switched(model):
        calls = record_calls(model, args, kwargs)
        parts = dict(_largest_parts(model, calls, capture))
        parts = _that_fit(model, args, kwargs, parts)
        if not parts:
            raise CaptureError(f"No part of the model could be captured either. {why}") from why
        shell = stitch(model, parts)
    setattr(shell, REPORT, _report(model, parts, why))
    return shell


def capture_submodule(
    model: nn.Module, path: str, args: Sequence[Any], kwargs: Mapping[str, Any], capture: Capture
) -> Captured:
    """The graph of one part, captured on what the whole model gives it."""
    try:
        part = model.get_submodule(path)
    except AttributeError as error:
        names = ", ".join(name for name, _ in model.named_children())
        raise CaptureError(f"{type(model).__name__} has no submodule {path!r}; it has {names}.") from error
    with switched(model):
        call = record_calls(model, args, kwargs).get(path)
    if call is None:
        raise CaptureError(
            f"{type(model).__name__} did not call its submodule {path!r} on these inputs, or called it with objects "
            "that cannot go into a graph. Give the submodule and its own inputs to refold.trace."
        )
    part_args, part_kwargs = call.arguments()
    return capture(part, part_args, part_kwargs)


def record_calls(model: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any]) -> dict[str, Call]:
    """Run the model once and note with what each of its parts was called."""
    calling, leaves = bind(model, args, kwargs, SWITCHES)
    calls: dict[str, Call] = {}
    with _listening(model, calls):
        run(model, calling, leaves)
    return calls


@contextmanager
def _listening(model: nn.Module, calls: dict[str, Call]) -> Iterator[None]:
    def note(path: str) -> Callable[..., None]:
        def hook(_module: nn.Module, args: Any, kwargs: Any) -> None:
            if path in calls:
                calls[path].times += 1
                return
            found: list[Any] = []
            try:
                tree = flatten((tuple(args), dict(kwargs)), found)
            except Opaque:
                return
            calls[path] = Call(tree, [v.detach().clone() if isinstance(v, torch.Tensor) else v for v in found])

        return hook

    handles = [
        module.register_forward_pre_hook(note(path), with_kwargs=True)
        for path, module in model.named_modules()
        if path and not is_leaf(module) and not isinstance(module, torch.jit.ScriptModule)  # it takes no hooks
    ]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def _largest_parts(model: nn.Module, calls: Mapping[str, Call], capture: Capture) -> Iterator[tuple[str, Captured]]:
    """From the top down: a part that can be captured is taken whole, one that cannot is looked into."""
    hopeless: set[type] = set()
    waiting = [(name, child) for name, child in model.named_children()][::-1]
    while waiting:
        path, module = waiting.pop()
        if is_leaf(module) or not any(True for _ in module.parameters()):
            continue
        captured = None if type(module) in hopeless else _try(module, calls.get(path), capture)
        if captured is not None:
            yield path, captured
            continue
        if path in calls:
            hopeless.add(type(module))
        waiting += [(f"{path}.{name}", child) for name, child in module.named_children()][::-1]


def _try(module: nn.Module, call: Call | None, capture: Capture) -> Captured | None:
    if call is None:
        return None
    args, kwargs = call.arguments()
    try:
        return capture(module, args, kwargs)
    except CaptureError:
        return None


def _that_fit(
    model: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any], parts: dict[str, Captured]
) -> dict[str, Captured]:
    """All parts where the shell gives the model's own result, else those that do so one by one."""
    calling, leaves = bind(model, args, kwargs, SWITCHES)
    expected = run(model, calling, leaves)

    def fits(some: Mapping[str, Captured]) -> bool:
        try:
            same = not difference(expected.result, run(stitch(model, some), calling, leaves, watched=model).result)
            return same and (not has_fast_path(model) or fits_fast_path(some))
        except Exception:  # a part that is called in a way it was not captured for
            return False

    def fits_fast_path(some: Mapping[str, Captured]) -> bool:
        with watching_masks(model, hide=True):
            fused = run(model, calling, leaves, fast_path=True)
            return agree(fused, run(stitch(model, some), calling, leaves, watched=model, fast_path=True))

    if fits(parts):
        return parts
    kept: dict[str, Captured] = {}
    for path, part in parts.items():
        if fits(kept | {path: part}):
            kept[path] = part
    return kept


def stitch(model: nn.Module, parts: Mapping[str, nn.Module]) -> nn.Module:
    """A copy of the structure above the parts, with the parts in place; everything else is shared."""
    shell = shell_of(model)
    shells: dict[str, nn.Module] = {"": shell}
    for path, part in parts.items():
        *above, last = path.split(".")
        for depth in range(1, len(above) + 1):
            here, parent = ".".join(above[:depth]), shells[".".join(above[: depth - 1])]
            if here not in shells:
                shells[here] = shell_of(parent.get_submodule(above[depth - 1]))
                parent.add_module(above[depth - 1], shells[here])
        shells[".".join(above)].add_module(last, part)
    return shell


def shell_of(module: nn.Module) -> nn.Module:
    """Another object of the same class with the same parameters, buffers, settings and children."""
    shell = type(module).__new__(type(module))
    shell.__dict__ = {k: v.copy() if isinstance(v, (dict, set)) else v for k, v in vars(module).items()}
    return shell


def parts_of(shell: nn.Module) -> dict[str, Captured]:
    """The captured parts of a model, by path."""
    return {path: module for path, module in shell.named_modules() if isinstance(module, Captured)}


def _report(model: nn.Module, parts: Mapping[str, Captured], why: CaptureError) -> CaptureReport:
    reports = {path: record_of(part).report for path, part in parts.items()}
    inside = {id(p) for path in parts for p in model.get_submodule(path).parameters()}
    sizes = {id(p): p.numel() for p in model.parameters()}
    return CaptureReport(
        model=type(model).__name__,
        method="partial",
        dynamic={},
        sizes_tried=("the example",),
        raised=tuple(f"{path}.{name}" for path, r in reports.items() for name in r.raised),
        refused=tuple(refusal for r in reports.values() for refusal in r.refused),
        twins=tuple(f"{path}.{name}" for path, r in reports.items() for name in r.twins),
        unread=(),
        regions_inlined=sum(r.regions_inlined for r in reports.values()),
        checks_dropped=sum(r.checks_dropped for r in reports.values()),
        devices_unpinned=sum(r.devices_unpinned for r in reports.values()),
        nodes=sum(r.nodes for r in reports.values()),
        training=model.training,
        notes=tuple(f"{path}: {note}" for path, r in reports.items() for note in r.notes),
        attempts=(str(why),),
        seconds={path: sum(r.seconds.values()) for path, r in reports.items()},
        parts=tuple(parts),
        share=sum(n for i, n in sizes.items() if i in inside) / max(sum(sizes.values()), 1),
    )
