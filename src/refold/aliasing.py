"""Which nodes write in place, and which values may share memory: what a rewrite asks before it moves or joins calls."""

from __future__ import annotations

import operator
from collections.abc import Iterable, Iterator
from functools import cache
from typing import Any

import torch
from torch import nn
from torch.fx import GraphModule, Node

from refold import fx_private
from refold.arguments import named_arguments
from refold.known_code import is_known_function, is_known_module, only_holds
from refold.tensor_memory import overlap, tensors_of_node

aten = torch.ops.aten

_INPLACE = (
    "iadd", "isub", "imul", "itruediv", "ifloordiv", "imod", "ipow", "imatmul", "iand", "ior", "ixor", "ilshift",
    "irshift", "iconcat",
)  # fmt: skip
_INPLACE_OPERATORS: set[Any] = {getattr(operator, name) for name in _INPLACE} | {operator.setitem, setattr}
_INPLACE_METHODS = {f"__{name}__" for name in _INPLACE} | {"__setitem__", "resize", "resize_as"}
_RESHAPES = {"resize", "resize_as", "rename_", "setattr"}
_MODE_SWITCHES = {"_set_grad_enabled", "_enter_autocast", "_exit_autocast"}
_MODE_SWITCHES |= {"_enter_inference_mode", "_exit_inference_mode"}

# Functions and methods that return their argument, or a view of it, always or sometimes. Everything else of torch makes
# a new tensor; what is not of torch may do anything.
_MAY_RETURN_ARGUMENT = {
    "view", "reshape", "view_as", "reshape_as", "transpose", "permute", "t", "expand", "expand_as", "squeeze",
    "unsqueeze", "flatten", "unflatten", "contiguous", "to", "type", "type_as", "float", "half", "double", "bfloat16",
    "int", "long", "short", "byte", "char", "bool", "chalf", "cfloat", "cdouble", "detach", "narrow", "select", "slice",
    "split", "split_with_sizes", "chunk", "tensor_split", "hsplit", "vsplit", "dsplit", "unbind", "swapaxes",
    "swapdims", "movedim", "moveaxis", "diagonal", "as_strided", "real", "imag", "conj", "view_as_real",
    "view_as_complex", "resolve_conj", "resolve_neg", "ravel", "cpu", "cuda", "dropout", "dropout1d", "dropout2d",
    "dropout3d", "alpha_dropout", "feature_dropout", "feature_alpha_dropout", "getitem", "getattr", "unfold",
    "broadcast_to", "broadcast_tensors", "atleast_1d", "atleast_2d", "atleast_3d", "adjoint", "mT", "mH", "T", "H",
    "data", "positive", "identity", "numpy", "pin_memory", "alias", "lift_fresh", "requires_grad_", "__getitem__",
    "values", "indices", "einsum", "pos", "__pos__", "as_tensor", "asarray", "sum_to_size", "meshgrid",
    "cartesian_prod", "conj_physical", "unsafe_chunk", "unsafe_split", "unsafe_split_with_sizes", "_unsafe_view",
    "coalesce", "as_subclass", "rename", "refine_names", "align_to", "align_as", "__iter__", "storage",
    "untyped_storage", "xpu",
}  # fmt: skip
_RETURNING_MODULES: tuple[type[nn.Module], ...] = (
    nn.Identity,
    nn.Flatten,
    nn.Unflatten,
    nn.Dropout,
    nn.Dropout1d,
    nn.Dropout2d,
    nn.Dropout3d,
)
_RETURNING_MODULES += (nn.AlphaDropout, nn.FeatureAlphaDropout, nn.Sequential, nn.ModuleList)


def written_by(gm: GraphModule, node: Node) -> list[Node]:
    """The nodes whose values a node writes into, or may: nobody knows what functions and modules of others do."""
    first = [a for a in node.args[:1] if isinstance(a, Node)]
    if node.op == "call_method" and not hasattr(torch.Tensor, str(node.target)):
        return node.all_input_nodes
    if node.op == "call_method":
        return first if _is_inplace_name(str(node.target)) else _out(node)
    if node.op == "call_module":
        return node.all_input_nodes if _module_writes(gm, str(node.target)) else []
    if node.op != "call_function":
        return []
    if isinstance(node.target, torch._ops.OpOverload):
        return [*_written_by_schema(node), *_moved_state(node)]
    if only_holds(node.target):
        return []
    if not is_known_function(node.target):
        return node.all_input_nodes
    if _works_in_place(node):
        return first or node.all_input_nodes
    return [*_out(node), *_moved_state(node)]


def _is_inplace_name(name: str) -> bool:
    return name in _INPLACE_METHODS or (name.endswith("_") and not name.endswith("__") and name != "requires_grad_")


def _works_in_place(node: Node) -> bool:
    """Whether a function writes into its first argument and returns it: by its name, or because it is told to."""
    return _is_inplace_function(node.target) or named_arguments(node).get("inplace", False) is not False


def _is_inplace_function(function: Any) -> bool:
    """By its name; but in Python's operator module a trailing underscore only keeps off a keyword: `and_`, `or_`."""
    name = getattr(function, "__name__", "").split(".")[0]
    return function in _INPLACE_OPERATORS or (_is_inplace_name(name) and getattr(operator, name, None) is not function)


def _out(node: Node) -> list[Node]:
    out = node.kwargs.get("out")
    return [n for n in (out if isinstance(out, tuple | list) else [out]) if isinstance(n, Node)]


def changes_shape_in_place(node: Node) -> bool:
    """Whether a call changes the shape, the strides or the memory of its argument itself, as `t_` and `resize_` do."""
    if node.op not in ("call_function", "call_method"):
        return False
    name = node.target if isinstance(node.target, str) else getattr(node.target, "__name__", "").split(".")[0]
    return name in _RESHAPES or has_tag(name, torch.Tag.inplace_view)


@cache
def has_tag(name: str, tag: torch.Tag) -> bool:
    """Whether a form of torch's operator of this name has a tag."""
    packet = getattr(torch.ops.aten, name, None)
    return packet is not None and any(tag in getattr(packet, overload).tags for overload in packet.overloads())


def _moved_state(node: Node) -> list[Node]:
    """What a function writes though its schema does not say so: the running statistics of a norm that takes those of
    its input, and the table of an embedding that renormalises it."""
    given = named_arguments(node)
    moved: list[Any] = [given.get("weight")] if given.get("max_norm") is not None else []
    if given.get("training", given.get("use_input_stats", False)) is not False:
        moved += [given.get("running_mean"), given.get("running_var")]
    return [n for n in moved if isinstance(n, Node)]


def _module(gm: GraphModule, node: Node) -> nn.Module | None:
    try:
        return gm.get_submodule(str(node.target))
    except AttributeError:
        return None


def _module_writes(gm: GraphModule, path: str) -> bool:
    """Torch's own modules write only where they say so; of others nobody knows."""
    try:
        module = gm.get_submodule(path)
    except AttributeError:
        return True
    return not is_known_module(module) or any(getattr(m, "inplace", False) for m in module.modules())


def own_tensors_written(module: nn.Module) -> Iterator[torch.Tensor]:
    """The tensors of its own that a module writes when it is called, or may: of unknown code all that it has."""
    if not is_known_module(module):
        yield from (*module.parameters(), *module.buffers())
        return
    for m in module.modules():
        counts = getattr(m, "running_mean", None) is not None and (m.training or not m.track_running_stats)
        if counts or (m.training and hasattr(m, "n_power_iterations")):  # a norm, or a spectral norm's estimate
            yield from m.buffers(recurse=False)
        if getattr(m, "max_norm", None) is not None:  # an embedding that renormalises its table
            yield from m.parameters(recurse=False)


def _written_by_schema(node: Node) -> list[Node]:
    written = fx_private.written_arguments(node.target, node.args, node.kwargs)
    flat = [x for w in written for x in (w if isinstance(w, tuple | list) else [w])]
    return [x for x in flat if isinstance(x, Node)]


def makes_fresh(gm: GraphModule, node: Node) -> bool:
    """Whether a node's value is sure to have memory of its own."""
    if node.op == "call_module":
        module = _module(gm, node)
        if module is None or not is_known_module(module) or getattr(module, "inplace", False):
            return False
        return not isinstance(module, _RETURNING_MODULES)
    if node.op == "call_method":
        name = str(node.target)
        return hasattr(torch.Tensor, name) and name not in _MAY_RETURN_ARGUMENT and not _is_inplace_name(name)
    if node.op != "call_function":
        return False
    name = getattr(node.target, "__name__", "").split(".")[0]
    if name in _MAY_RETURN_ARGUMENT:
        return False
    if not is_known_function(node.target) or isinstance(node.target, type) or _works_in_place(node) or _out(node):
        return False
    if isinstance(node.target, torch._ops.OpOverload):
        return not fx_private.returns_alias(node.target)
    home = getattr(node.target, "__module__", None)
    joins_lists = home == "_operator" and any(isinstance(a, tuple | list) for a in node.args)
    return home != "builtins" and not joins_lists  # `max` and `tuple` hand their arguments on


def memory_roots(gm: GraphModule, *nodes: Node) -> set[Node]:
    """The nodes in whose memory the values of some nodes may lie: follow everything that may return its argument."""
    pending, seen = list(nodes), set(nodes)
    while pending:
        current = pending.pop()
        for n in [] if makes_fresh(gm, current) else current.all_input_nodes:
            if n not in seen:
                seen.add(n)
                pending.append(n)
    return seen


def writes_to(gm: GraphModule, value: Node, writers: list[Node]) -> Node | None:
    """The first of some nodes that may write into a value's memory."""
    mine = memory_roots(gm, value) if writers else set()
    return next((node for node in writers if written_memory(gm, [node]) & mine), None)


def written_memory(gm: GraphModule, writers: Iterable[Node]) -> set[Node]:
    """Every value in whose memory some nodes write, or may. A tensor of the module is known by the bytes that it lies
    in, whatever its name: whoever fetches it, a view of it, or calls a module that holds it, counts."""
    writers = list(writers)
    found = memory_roots(gm, *(target for node in writers for target in written_by(gm, node)))
    written = [tensor for node in found if node.op == "get_attr" for tensor in tensors_of_node(gm, node)]
    for module in (_module(gm, node) for node in writers if node.op == "call_module"):
        written += own_tensors_written(module) if module is not None else ()
    if not written:
        return found
    holders = (node for node in gm.graph.nodes if node.op in ("get_attr", "call_module"))
    return found | {node for node in holders if overlap(tensors_of_node(gm, node), written)}


def switches_mode(node: Node) -> bool:
    """Whether a node switches gradients, autocast or inference mode for all that follows."""
    return node.op == "call_function" and getattr(node.target, "__name__", "") in _MODE_SWITCHES


def gradient_eras(nodes: Iterable[Node]) -> dict[Node, int]:
    """How often gradients were switched on or off before each node."""
    eras: dict[Node, int] = {}
    switches = 0
    for node in nodes:
        switches += switches_mode(node) and "autocast" not in getattr(node.target, "__name__", "")
        eras[node] = switches
    return eras
