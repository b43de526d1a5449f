"""Partial capture: where a model cannot be captured as one graph, its largest parts are, and replace them in a shell.

A shell is a copy of the model's structure that shares every parameter and every module that is not replaced. The eager
model is not touched.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, suppress
from functools import partial
from typing import Any

import torch
from torch import nn

from refold import fx_private
from refold.capture.captured import Captured, record_of
from refold.capture.forward_call import bind_call
from refold.capture.fused_encoder import agree, has_fast_path, watching_masks
from refold.capture.model_state import SWITCHES, switched
from refold.capture.module_calls import above, is_leaf
from refold.capture.proof import difference, run
from refold.capture.summary import report_of_parts
from refold.errors import CaptureError
from refold.nested import ARGUMENT, Opaque, flatten, rebuild

REPORT = "refold_capture_report"  # a plain attribute of the shell: it survives deepcopy and pickle
Capture = Callable[[nn.Module, Sequence[Any], Mapping[str, Any]], Captured]
Calls = dict[str, tuple[tuple[Any, ...], dict[str, Any]]]  # the arguments of the first call of each module, by path


def capture_parts(
    model: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any], capture: Capture, why: CaptureError
) -> nn.Module:
    """A shell of the model with the largest parts that can be captured in place of their eager selves."""
    with switched(model):
        calls = _record_calls(model, args, kwargs)
        parts = _that_fit(model, args, kwargs, dict(_largest_parts(model, calls, capture)))
        if not parts:
            raise CaptureError(f"No part of the model could be captured either. {why}") from why
        shell = stitch(model, parts)
    reports = {path: record_of(part).report for path, part in parts.items()}
    setattr(shell, REPORT, report_of_parts(model, reports, str(why)))
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
        calls = _record_calls(model, args, kwargs)
    if path not in calls:
        raise CaptureError(
            f"{type(model).__name__} did not call its submodule {path!r} on these inputs, or called it with objects "
            "that cannot go into a graph. Give the submodule and its own inputs to refold.trace."
        )
    return capture(part, *calls[path])


def _record_calls(model: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Calls:
    """Run the model once and record with what each of its parts was called."""
    call, leaves = bind_call(model, args, kwargs, SWITCHES)
    calls: Calls = {}
    with ExitStack() as stack:
        for path, module in model.named_modules():
            if path and not is_leaf(module) and not isinstance(module, torch.jit.ScriptModule):  # it takes no hooks
                observe = partial(_observe, calls, path)
                stack.enter_context(module.register_forward_pre_hook(observe, with_kwargs=True))
        run(model, call, leaves)
    return calls


def _observe(calls: Calls, path: str, _module: nn.Module, args: Any, kwargs: Any) -> None:
    if path in calls:
        return
    with suppress(Opaque):
        tree, found = flatten((tuple(args), dict(kwargs)), ARGUMENT)
        calls[path] = rebuild(tree, [v.detach().clone() if isinstance(v, torch.Tensor) else v for v in found])


def _largest_parts(model: nn.Module, calls: Calls, capture: Capture) -> Iterator[tuple[str, Captured]]:
    """From the top down: where a part cannot be captured, the parts inside it are tried."""
    hopeless: set[type] = set()
    waiting = [*model.named_children()][::-1]
    while waiting:
        path, module = waiting.pop()
        if is_leaf(module) or not any(True for _ in module.parameters()):
            continue
        if path in calls and type(module) not in hopeless:
            try:
                captured = capture(module, *calls[path])
            except CaptureError:
                hopeless.add(type(module))
            else:
                yield path, captured
                continue
        waiting += [(f"{path}.{name}", child) for name, child in module.named_children()][::-1]


def _that_fit(
    model: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any], parts: dict[str, Captured]
) -> dict[str, Captured]:
    """All parts where the shell gives the model's own result, else those that do so one by one."""
    call, leaves = bind_call(model, args, kwargs, SWITCHES)
    expected = run(model, call, leaves)

    def fits(some: Mapping[str, Captured]) -> bool:
        try:
            same = not difference(expected.result, run(stitch(model, some), call, leaves, watched=model).result)
            return same and (not has_fast_path(model) or fits_fast_path(some))
        except Exception:  # a part that is called in a way it was not captured for
            return False

    def fits_fast_path(some: Mapping[str, Captured]) -> bool:
        with watching_masks(model, hide=True):
            fused = run(model, call, leaves, fast_path=True)
            return agree(fused, run(stitch(model, some), call, leaves, watched=model, fast_path=True))

    if fits(parts):
        return parts
    kept: dict[str, Captured] = {}
    for path, part in parts.items():
        if fits(kept | {path: part}):
            kept[path] = part
    return kept


def stitch(model: nn.Module, parts: Mapping[str, nn.Module]) -> nn.Module:
    """A copy of the structure above the parts, with the parts in place; everything else is shared."""
    shells = {"": _shell_of(model)}
    for path, part in parts.items():
        for holder in reversed([*above(path)]):
            if holder not in shells:
                shells[holder] = _shell_of(model.get_submodule(holder))
                shells[""].set_submodule(holder, shells[holder])
        shells[""].set_submodule(path, part)
    return shells[""]


def _shell_of(module: nn.Module) -> nn.Module:
    """Another object of the same class with the same parameters, buffers, settings and children."""
    return fx_private.module_like(type(module), fx_private.with_own_containers(vars(module)))
