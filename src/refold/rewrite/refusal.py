"""Refusals: a match that ends with a sentence, and the checks that end one."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

import torch
from torch import nn
from torch.fx import Node
from torch.nn.modules.lazy import LazyModuleMixin

from refold import fx_private
from refold.fingerprint import is_sharded
from refold.graph.aliasing import aliases, writes_to, written_by
from refold.graph.layout import tells_layout
from refold.graph.view import Call, GraphView
from refold.record.sharded_modules import is_fully_sharded

_T = TypeVar("_T")


class Refuse(Exception):
    """Raised while a rule looks at a place that almost fits: the place is left alone, and the sentence says why."""

    def __init__(self, reason: str) -> None:
        super().__init__(reason)
        self.reason = reason


def attempt(function: Callable[..., _T], *args: object) -> _T | Refuse:
    """What a function returns, or the refusal that it raises: for rules that have another place to look at."""
    try:
        return function(*args)
    except Refuse as refusal:
        return refusal.with_traceback(None)


def holds(check: Callable[..., object], *args: object) -> bool:
    """Whether a check does not refuse."""
    return not isinstance(attempt(check, *args), Refuse)


def plain(module: nn.Module, kinds: tuple[type, ...]) -> None:
    """Refuse a module that is not exactly what its class says."""
    if isinstance(module, LazyModuleMixin) and module.has_uninitialized_params():
        raise Refuse("it is lazy, and its weights have no shape before it is called for the first time")
    if is_fully_sharded(module):
        raise Refuse("it was given to fully_shard by itself (rewrite before that, or shard the whole graph)")
    if type(module) not in kinds:
        raise Refuse(f"it is a {type(module).__name__}, a subclass with a forward of its own")
    if fx_private.has_hooks(module):
        sharded = any(map(is_sharded, fx_private.table(module, "_parameters").values()))
        by_torch = " (as parallelize_module does: rewrite before that)" if sharded else ""
        raise Refuse(f"hooks are registered on it{by_torch}")
    if "forward" in module.__dict__:
        raise Refuse("its forward was replaced")
    extra = list(fx_private.table(module, "_modules"))
    if extra:
        raise Refuse(f"it has children of its own ({', '.join(extra)})")
    loose = [name for name, value in module.__dict__.items() if isinstance(value, torch.Tensor)]
    if loose:  # they hide parameters and buffers of the same name, and no state dict has them
        raise Refuse(f"its {' and '.join(loose)} is neither a parameter nor a buffer")


def computable(role: str, tensor: torch.Tensor) -> None:
    """Refuse a tensor that cannot be computed with freely."""
    if type(tensor) not in (torch.Tensor, nn.Parameter) and not is_sharded(tensor):
        raise Refuse(f"its {role} is a {type(tensor).__name__}")
    if tensor.is_quantized or tensor.layout != torch.strided:
        raise Refuse(f"its {role} is quantized or sparse")
    if not tensor.is_floating_point():
        raise Refuse(f"its {role} has dtype {tensor.dtype}")


def own(view: GraphView, call: Call) -> None:
    """Refuse a call whose tensors are not its own alone, each in one role."""
    roles: dict[str, str] = {}
    for role, operand in call.operands.items():
        if operand.name in roles:
            raise Refuse(f"its {role} is also its {roles[operand.name]}")
        roles[operand.name] = role
        others = [name for name in view.tensor_names[id(operand.tensor)] if name != operand.name]
        if others:
            raise Refuse(f"its {role} is also registered as {', '.join(others)}")
        for reader in view.readers(operand):
            own_fetch = reader.op == "get_attr" and list(reader.users) == [call.node]
            if own_fetch and reader is call.input:
                raise Refuse(f"its {role} is also its input")
            if reader is not call.node and not own_fetch:
                raise Refuse(f"its {role} is also read by {reader.name}")


def only_reader(first: Node, second: Node) -> None:
    """Refuse a value that others than the second node read."""
    others = [user.name for user in first.users if user is not second]
    if others:
        raise Refuse(f"the output of {first.name} is also read by {', '.join(others)}")


def unchanged_between(view: GraphView, value: Node, at: Node, later: Node) -> None:
    """Refuse to read a value at a later node than before, where it is written into or a mode is switched until then."""
    writer = writes_to(view.gm, value, view.writers_between(at, later))
    if writer is not None:
        raise Refuse(f"{writer.name} writes into {value.name} before {later.name}")
    for switch in view.mode_switches_between(at, later):
        raise Refuse(f"{switch.name} switches modes before {later.name}")


def movable(view: GraphView, call: Call) -> None:
    """Refuse tensors that cannot become parts of larger ones and come back as they lay."""
    for role, operand in call.operands.items():
        if id(operand.tensor) in view.tied:
            raise Refuse(f"its {role} shares memory with {view.tied[id(operand.tensor)]}")
        if not operand.tensor.is_contiguous():
            raise Refuse(f"its {role} does not lie row by row in memory")


def sliceable(view: GraphView, node: Node) -> None:
    """Refuse a value that must have memory of its own, and cannot be a slice of another one."""
    for value, reader in aliases(view.gm, node):
        if value in written_by(view.gm, reader):
            raise Refuse(f"{reader.name} writes into its output in place")
        if tells_layout(reader):
            raise Refuse(f"{reader.name} depends on the memory layout of its output")
