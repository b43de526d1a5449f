"""The captured module: a GraphModule that refuses calls and casts which its graph would get wrong."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any, cast

import torch
from torch import fx, nn

from refold.capture.forward_call import REQUIRED, Argument, ForwardCall
from refold.capture.size_rules import SizeRules
from refold.capture.specialised import FixedValues
from refold.capture.summary import CaptureReport
from refold.errors import CaptureError, FixedByCapture, InputMismatch
from refold.nested import Constant, Leaf, Opaque, flatten_argument, same_shape
from refold.record.nodes import StoredGraph, load_graph, store_graph

RECORD = "refold.capture"
_MOST_KNOWN = 10_000  # sizes of calls that are remembered


class Original:
    """Holds the eager model, out of sight of ``parameters()`` and ``state_dict()``; not pickled, shared by copies."""

    def __init__(self, model: nn.Module | None) -> None:
        self.model = model

    def __reduce__(self) -> tuple[Any, ...]:
        return Original, (None,)

    def __deepcopy__(self, memo: dict[int, Any]) -> Original:
        return self  # a copy of the graph was still captured from that model; copying it would double the weights


@dataclasses.dataclass
class CaptureRecord:
    """What a captured module knows about its capture."""

    report: CaptureReport
    call: ForwardCall
    sizes: SizeRules
    original: Original
    unread: dict[str, torch.Tensor]
    dtype_reason: str
    mode_reason: str
    fixed: FixedValues
    accepted: set[Any] = dataclasses.field(default_factory=set)

    def refusal(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> str:
        """Why the graph is not the model in this call; empty where it is. Sizes that were seen before cost a lookup."""
        if not self._fits(args, kwargs):
            names = ", ".join(argument.name for argument in self.call.arguments)
            return f"the graph takes the arguments {names}"
        tensors: list[Any] = []
        for index, argument in enumerate(self.call.arguments):
            value = args[index] if index < len(args) else kwargs.get(argument.name, argument.default)
            why = _collect(argument, value, tensors)
            if why:
                return why
        key = tuple((t.shape, t.dtype) if isinstance(t, torch.Tensor) else None for t in tensors)
        if key not in self.accepted:
            why = self.sizes.complaint(tensors, any_float=not self.dtype_reason)
            if why:
                return why
            if len(self.accepted) >= _MOST_KNOWN:
                self.accepted.clear()
            self.accepted.add(key)
        return self.fixed.complaint(tensors, self.sizes.inputs)

    def leaves(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Any]:
        """The tensors of a call that the graph takes, in the order of the rules for their sizes."""
        tensors: list[Any] = []
        for index, argument in enumerate(self.call.arguments):
            _collect(
                argument, args[index] if index < len(args) else kwargs.get(argument.name, argument.default), tensors
            )
        return tensors

    def check(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Refuse inputs the graph was not captured for."""
        refusal = self.refusal(args, kwargs)
        if refusal and self._fits(args, kwargs):  # else Python's own TypeError says best what is wrong
            raise InputMismatch(
                f"{self.report.model} was called with inputs its captured graph cannot take: {refusal}. Capture it "
                "again with such an example (refold.trace), or use the original model."
            )

    def _fits(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
        """Whether a call fits the graph's own signature."""
        names = [argument.name for argument in self.call.arguments]
        missing = (a for a in self.call.arguments[len(args) :] if a.default is REQUIRED and a.name not in kwargs)
        return len(args) <= len(names) and kwargs.keys() <= set(names[len(args) :]) and not any(missing)


def _collect(argument: Argument, value: Any, tensors: list[Any]) -> str:
    """Append the tensors of one argument. A value that is none must be as it was at capture: what is wrong if not."""
    if isinstance(argument.tree, Leaf):
        tensors.append(value)
        return ""
    if value is argument.default and (argument.by_switch or not argument.given):
        return ""
    try:
        tree = (
            Constant(value) if isinstance(argument.tree, Constant) else flatten_argument(value, tensors, argument.name)
        )
    except Opaque as opaque:
        return f"no graph takes such an argument: {opaque}"
    if same_shape(tree, argument.tree):
        return ""
    was = repr(argument.tree.value) if isinstance(argument.tree, Constant) else "of another structure"
    return (
        f"the argument {argument.name!r} was {was} at capture, which is written into the graph; it cannot be "
        f"{_short(value)} now"
    )


def _short(value: Any) -> str:
    if isinstance(value, torch.Tensor):
        return f"a tensor of shape {tuple(value.shape)}"
    text = repr(value)
    return text if len(text) < 60 else f"a {type(value).__name__}"


class Captured(fx.GraphModule):
    """A torch.fx.GraphModule whose inputs, dtype and mode are guarded by what its graph is specialised to."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        # tracers see the graph alone: the check is Python and would only be in their way
        if not torch.compiler.is_compiling() and not torch.jit.is_tracing():
            record = _find_record(self)
            if record is not None and not any(isinstance(a, fx.Proxy) for a in (*args, *kwargs.values())):
                record.check(args, kwargs)
        return super().__call__(*args, **kwargs)

    def train(self, mode: bool = True) -> Captured:
        record = _find_record(self)
        if record is not None and mode != record.report.training and record.mode_reason:
            wanted = "train" if mode else "eval"
            raise FixedByCapture(
                f"This graph was captured in {'train' if record.report.training else 'eval'} mode, and that is written "
                f"into it: {record.mode_reason}. Call model.{wanted}() on the original model and capture it again."
            )
        return super().train(mode)

    def _apply(self, fn: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True) -> Captured:
        record = _find_record(self)
        if record is not None and record.dtype_reason:
            _refuse_cast(self, fn, record.dtype_reason)
        return super()._apply(fn, recurse)

    def __deepcopy__(self, memo: dict[int, Any]) -> Captured:
        copied = cast(Captured, super().__deepcopy__(memo))
        _make_non_persistent(copied, _non_persistent(self))
        _name_again(copied, self, memo)
        return copied

    def __reduce__(self) -> tuple[Any, ...]:
        body = {k: v for k, v in vars(self).items() if k != "_graph"}
        return _revive, (type(self).__name__, store_graph(self.graph), body)


def why_refused(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> str | None:
    """Why a captured graph cannot stand for its model in this call, as half a sentence that names the argument and the
    dimension, and the line of the model that fixed it; None where it can, and for modules that were not captured.

    It only looks at sizes, dtypes and plain values, and raises nothing: a few microseconds a call. Values of tensors
    are compared where capture fixed them (`refold.capture_report` says so).
    """
    record = _find_record(module)
    return None if record is None else record.refusal(args, kwargs) or None


def _find_record(module: nn.Module) -> CaptureRecord | None:
    return module.meta.get(RECORD) if isinstance(module, fx.GraphModule) else None


def _refuse_cast(module: nn.Module, fn: Callable[[torch.Tensor], torch.Tensor], reason: str) -> None:
    """Ask the function what it would do to an empty tensor of each floating dtype of the module."""
    tensors = [*module.parameters(), *module.buffers()]
    for dtype in {t.dtype for t in tensors if t.is_floating_point()}:
        become = fn(torch.empty(0, dtype=dtype)).dtype
        if become != dtype:
            raise FixedByCapture(
                f"This graph was captured in {dtype} and cannot become {become}: {reason}. Nothing was changed. Cast "
                "before capture: convert the original model and its inputs, then call refold.trace again."
            )


def _non_persistent(module: nn.Module) -> tuple[str, ...]:
    """Buffers of the module itself (not of its children) that a state_dict leaves out."""
    kept = module.state_dict(keep_vars=True)
    return tuple(name for name, _ in module.named_buffers(recurse=False) if name not in kept)


def _make_non_persistent(module: nn.Module, names: tuple[str, ...]) -> None:
    """GraphModule registers its own buffers anew when it is copied, and forgets which were not persistent."""
    for name in names:
        buffer = getattr(module, name)
        delattr(module, name)
        module.register_buffer(name, buffer, persistent=False)


def _name_again(copied: nn.Module, module: nn.Module, memo: dict[int, Any]) -> None:
    """Give children their second names back: torch copies one that has two names, of which the graph reads only one,
    under that one."""
    own = dict(copied._modules)
    if own.keys() >= module._modules.keys():
        return
    copied._modules.clear()
    copied._modules.update({name: own.get(name, memo.get(id(child))) for name, child in module._modules.items()})
    copied._modules.update(own)


def _revive(class_name: str, nodes: StoredGraph, body: dict[str, Any]) -> Captured:
    """Unpickle: the graph node for node, the module's own attributes as they were."""
    captured = empty_captured(class_name)
    vars(captured).update(body)
    captured.graph = load_graph(nodes)
    return captured


def empty_captured(class_name: str) -> Captured:
    """A captured module without anything in it yet."""
    return Captured(nn.Module(), fx.Graph(), class_name=class_name)


def record_of(module: nn.Module) -> CaptureRecord:
    """The record of a captured module."""
    record = _find_record(module)
    if record is None:
        raise CaptureError(
            f"This {type(module).__name__} carries no record of a capture: it did not come from refold.trace, or was "
            "re-traced since."
        )
    return record
