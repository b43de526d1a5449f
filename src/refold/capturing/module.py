"""The captured module: a GraphModule that refuses calls and casts which its graph would get wrong."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any, cast

import torch
from torch import fx, nn

from refold.capturing.calling import REQUIRED, Argument, Calling
from refold.capturing.errors import BakedIn, CaptureError, InputMismatch
from refold.capturing.fixed_values import FixedValues
from refold.capturing.report import CaptureReport
from refold.capturing.sizes import SizeRules
from refold.capturing.storing import StoredNode, load_graph, store_graph
from refold.capturing.trees import Constant, Leaf, Opaque, flatten, same_shape

RECORD = "refold.capture"


class Original:
    """Holds the eager model, out of sight of ``parameters()`` and ``state_dict()``; not pickled, shared by copies."""

    def __init__(self, model: nn.Module | None) -> None:
        self.model = model

    def __reduce__(self) -> tuple[Any, ...]:
        return Original, (None,)

    def __deepcopy__(self, memo: dict[int, Any]) -> Original:
        return self  # a copy of the graph was still captured from that model; copying it would double the weights


@dataclasses.dataclass
class Record:
    """What a captured module knows about its capture."""

    report: CaptureReport
    calling: Calling
    sizes: SizeRules
    original: Original
    unread: dict[str, torch.Tensor]
    dtype_reason: str
    mode_reason: str
    fixed: FixedValues = dataclasses.field(default_factory=FixedValues)
    accepted: set[Any] = dataclasses.field(default_factory=set)

    def check(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Refuse inputs the graph was not captured for; sizes that were seen before cost one lookup."""
        tensors = self._tensors(args, kwargs)
        if tensors is None:
            return
        key = tuple((t.shape, t.dtype) if isinstance(t, torch.Tensor) else None for t in tensors)
        complaint = "" if key in self.accepted else self.sizes.complaint(tensors, any_float=not self.dtype_reason)
        complaint = complaint or self._other_values(tensors)
        if complaint:
            raise InputMismatch(
                f"{self.report.model} was called with inputs its captured graph cannot take: {complaint}. Capture it "
                "again with such an example (refold.trace), or use the original model."
            )
        self.accepted.add(key)

    def other_values(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> str | None:
        """Which input that steers the model's code has other values than at capture, as words; None where none has."""
        if not self.fixed.values:
            return None
        try:
            tensors = self._tensors(args, kwargs)
        except InputMismatch as mismatch:
            return str(mismatch)
        return None if tensors is None else self._other_values(tensors) or None

    def _other_values(self, tensors: list[Any]) -> str:
        return self.fixed.complaint(tensors, [rule.name for rule in self.sizes.inputs]) if self.fixed.values else ""

    def _tensors(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Any] | None:
        """The tensors of a call in their order; None for a call that Python's own TypeError says best what is wrong."""
        arguments = self.calling.arguments
        if len(args) > len(arguments) or not kwargs.keys() <= {a.name for a in arguments}:
            return None
        tensors: list[Any] = []
        for place, argument in enumerate(arguments):
            value = args[place] if place < len(args) else kwargs.get(argument.name, argument.default)
            if value is REQUIRED:
                return None
            _collect(argument, value, tensors)
        return tensors


def _collect(argument: Argument, value: Any, tensors: list[Any]) -> None:
    """Append the tensors of one argument; a value that is none must be as it was at capture."""
    if isinstance(argument.tree, Leaf):
        tensors.append(value)
        return
    try:
        tree = Constant(value) if isinstance(argument.tree, Constant) else flatten(value, tensors, argument.name)
    except Opaque as opaque:
        raise InputMismatch(f"The captured graph cannot take this argument: {opaque}.") from opaque
    if not argument.is_as_captured(value) and not same_shape(tree, argument.tree):
        was = argument.tree.value if isinstance(argument.tree, Constant) else "of another structure"
        raise InputMismatch(
            f"The argument {argument.name!r} was {was!r} at capture and is written into the graph; it cannot be "
            f"{_short(value)} now. Capture the model again with that value (refold.trace)."
        )


def _short(value: Any) -> str:
    if isinstance(value, torch.Tensor):
        return f"a tensor of shape {tuple(value.shape)}"
    text = repr(value)
    return text if len(text) < 60 else f"a {type(value).__name__}"


class Captured(fx.GraphModule):
    """A torch.fx.GraphModule whose inputs, dtype and mode are guarded by what its graph has written into it."""

    @property
    def _record(self) -> Record | None:
        return self.meta.get(RECORD)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        # tracers see the graph alone: the check is Python and would only be in their way
        if not torch.compiler.is_compiling() and not torch.jit.is_tracing():
            _check_call(self, args, kwargs)
        return super().__call__(*args, **kwargs)

    def train(self, mode: bool = True) -> Captured:
        record = self._record
        if record is not None and mode != record.report.training and record.mode_reason:
            wanted = "train" if mode else "eval"
            raise BakedIn(
                f"This graph was captured in {'train' if record.report.training else 'eval'} mode, and that is written "
                f"into it: {record.mode_reason}. Call model.{wanted}() on the original model and capture it again."
            )
        return super().train(mode)

    def _apply(self, fn: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True) -> Captured:
        record = self._record
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


def _check_call(module: fx.GraphModule, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    record = module.meta.get(RECORD)
    if record is not None and not any(isinstance(a, fx.Proxy) for a in (*args, *kwargs.values())):
        record.check(args, kwargs)


def has_fixed_values(module: nn.Module) -> bool:
    """Whether a captured graph stands for its model only while inputs that steer the model's code keep their values."""
    record = _record_of(module)
    return record is not None and bool(record.fixed.values)


def other_fixed_values(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> str | None:
    """Why a captured graph does not stand for the model in this call: an input that steers the model's code has other
    values than at capture. None where it does, and for modules that were not captured. Quick; it raises nothing."""
    record = _record_of(module)
    return None if record is None else record.other_values(args, kwargs)


def _record_of(module: nn.Module) -> Record | None:
    return module.meta.get(RECORD) if isinstance(module, fx.GraphModule) else None


def _refuse_cast(module: nn.Module, fn: Callable[[torch.Tensor], torch.Tensor], reason: str) -> None:
    """Ask the function what it would do to an empty tensor of each floating dtype of the module."""
    tensors = [*module.parameters(), *module.buffers()]
    for dtype in {t.dtype for t in tensors if t.is_floating_point()}:
        become = fn(torch.empty(0, dtype=dtype)).dtype
        if become != dtype:
            raise BakedIn(
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


def _revive(class_name: str, nodes: list[StoredNode], body: dict[str, Any]) -> Captured:
    """Unpickle: the graph node for node, the module's own attributes as they were."""
    captured = empty_captured(class_name)
    vars(captured).update(body)
    captured.graph = load_graph(nodes)
    return captured


def empty_captured(class_name: str) -> Captured:
    """A captured module without anything in it yet."""
    return Captured(nn.Module(), fx.Graph(), class_name=class_name)


def record_of(module: nn.Module) -> Record:
    """The record of a captured module."""
    record = getattr(module, "meta", {}).get(RECORD) if isinstance(module, fx.GraphModule) else None
    if record is None:
        raise CaptureError(
            f"This {type(module).__name__} carries no record of a capture: it did not come from refold.trace, or was "
            "re-traced since."
        )
    return record
