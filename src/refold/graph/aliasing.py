"""Which nodes write in place, and which values may share memory: checked before calls are moved or joined."""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable, Iterator
from functools import cache
from typing import Any

import torch
from torch import nn
from torch.fx import GraphModule, Node

from refold import fx_private
from refold.graph.arguments import named_arguments
from refold.graph.targets import called_name, find_module, is_known_function, is_known_module, only_holds

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
# a new tensor; unknown code may do anything.
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
_DROPOUT = nn.modules.dropout._DropoutNd
_RETURNING_MODULES = (nn.Identity, nn.Flatten, nn.Unflatten, _DROPOUT, nn.Sequential, nn.ModuleList)


def written_by(gm: GraphModule, node: Node) -> list[Node]:
    """The nodes whose values a node writes into, or may: unknown code may write into all of its inputs."""
    first = [a for a in node.args[:1] if isinstance(a, Node)]
    if node.op == "call_method" and not hasattr(torch.Tensor, str(node.target)):
        return node.all_input_nodes
    if node.op == "call_method":
        return first if _is_inplace_name(str(node.target)) else _out(node)
    if node.op == "call_module":
        return node.all_input_nodes if _module_writes(find_module(gm, str(node.target))) else []
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
    """Whether a function writes into its first argument and returns it: by its name, or by its setting `inplace`."""
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
    name = called_name(node)
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


def _module_writes(module: nn.Module | None) -> bool:
    """Torch's own modules write only where they say so; unknown code may."""
    if module is None or not is_known_module(module):
        return True
    return any(getattr(m, "inplace", False) for m in module.modules())


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
        module = find_module(gm, str(node.target))
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


def follow(start: Iterable[Node], behind: Callable[[Node], Iterable[Node]]) -> Iterator[Node]:
    """All nodes that are reached from some others, each once and without these."""
    pending = list(start)
    seen = set(pending)
    while pending:
        for node in behind(pending.pop()):
            if node not in seen:
                seen.add(node)
                pending.append(node)
                yield node


def memory_roots(gm: GraphModule, *nodes: Node) -> set[Node]:
    """The nodes in whose memory the values of some nodes may lie: follow everything that may return its argument."""
    return {*nodes, *follow(nodes, lambda n: () if makes_fresh(gm, n) else n.all_input_nodes)}


def writes_to(gm: GraphModule, value: Node, writers: list[Node]) -> Node | None:
    """The first of some nodes that may write into a value's memory."""
    mine = memory_roots(gm, value) if writers else set()
    return next((node for node in writers if written_memory(gm, [node]) & mine), None)


def written_memory(gm: GraphModule, writers: Iterable[Node]) -> set[Node]:
    """Every value in whose memory some nodes write, or may. A tensor of the module is known by the bytes that it lies
    in, whatever its name: every node counts that fetches it, or a view of it, or calls a module that holds it."""
    writers = list(writers)
    found = memory_roots(gm, *(target for node in writers for target in written_by(gm, node)))
    written = [tensor for node in found if node.op == "get_attr" for tensor in tensors_of_node(gm, node)]
    for module in (find_module(gm, str(node.target)) for node in writers if node.op == "call_module"):
        written += own_tensors_written(module) if module is not None else ()
    if not written:
        return found
    holders = (node for node in gm.graph.nodes if node.op in ("get_attr", "call_module"))
    return found | {node for node in holders if overlap(tensors_of_node(gm, node), written)}


def switches_mode(node: Node) -> bool:
    """Whether a node switches gradients, autocast or inference mode for all that follows."""
    return node.op == "call_function" and getattr(node.target, "__name__", "") in _MODE_SWITCHES


def switches_gradients(node: Node) -> bool:
    """Whether a node switches gradients on or off for all that follows."""
    return switches_mode(node) and "autocast" not in getattr(node.target, "__name__", "")


def tensors_of_node(gm: GraphModule, node: Node) -> list[torch.Tensor]:
    """The tensors of the module that a node fetches, or that the module which it calls or fetches has."""
    owner, _, key = str(node.target).rpartition(".")
    found = getattr(find_module(gm, owner), key, None)
    if isinstance(found, nn.Module):
        return [*found.parameters(), *found.buffers()]
    return [found] if isinstance(found, torch.Tensor) else []


def overlap(some: Iterable[torch.Tensor], others: Iterable[torch.Tensor]) -> bool:
    """Whether any of some tensors shares a byte with one of others."""
    left, right = ([e for e in map(fx_private.extent_of, tensors) if e is not None] for tensors in (some, others))
    return any(a[0] == b[0] and a[1] <= b[2] and b[1] <= a[2] for a in left for b in right)


def tied_by_memory(module: nn.Module) -> dict[int, str]:
    """Of each tensor, by its id, that shares bytes with another tensor of the module: the other's name."""
    tensors = [*module.named_parameters(), *module.named_buffers()]
    extents = ((fx_private.extent_of(tensor), name, id(tensor)) for name, tensor in tensors)
    found: dict[int, str] = {}
    widest, widest_name, widest_id = (0, 0, -1), "", 0
    for extent, name, key in sorted((extent, name, key) for extent, name, key in extents if extent is not None):
        if extent[0] == widest[0] and extent[1] <= widest[2]:
            found |= {key: widest_name, widest_id: name}
        if extent[0] != widest[0] or extent[2] > widest[2]:
            widest, widest_name, widest_id = extent, name, key
    return found


def aliases(gm: GraphModule, node: Node) -> Iterator[tuple[Node, Node]]:
    """(value, reader) for a value and everything that may be a view of it."""

    def views(value: Node) -> list[Node]:
        return [reader for reader in value.users if reader.op != "output" and not makes_fresh(gm, reader)]

    return ((value, reader) for value in (node, *follow([node], views)) for reader in value.users)


def leaves_graph(gm: GraphModule, values: set[Node], besides: Node | None = None) -> bool:
    """Whether the memory of some values leaves the graph, other than through one node."""
    start = values - {besides}

    def readers(value: Node) -> Iterable[Node]:
        return value.users if value in start or not (value is besides or makes_fresh(gm, value)) else ()

    return any(reader.op == "output" for reader in follow(start, readers))
