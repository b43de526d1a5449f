"""Raising: the ATen nodes of one call of a leaf module become one call_module of that module, at its own path.

A subclass of a torch.nn class that does more than its base is split: the base's operator becomes a call of a module of
the base class over the same parameters, and the rest stays as it is.
"""

from __future__ import annotations

import dataclasses
import operator
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import fx, nn

from refold.fx_private import module_like, named_tensors, with_own_containers
from refold.graph.arguments import named_arguments, per_axis
from refold.graph.purity import has_effect

_aten = torch.ops.aten
_CONTAINERS = (nn.Sequential, nn.ModuleList, nn.ModuleDict, nn.Identity)
_CONVS = (nn.Conv1d, nn.Conv2d, nn.Conv3d)
_BASE_OPS: dict[type[nn.Module], Any] = {
    nn.Linear: _aten.linear.default,
    nn.Conv1d: _aten.conv1d.default,
    nn.Conv2d: _aten.conv2d.default,
    nn.Conv3d: _aten.conv3d.default,
    nn.BatchNorm1d: _aten.batch_norm.default,
    nn.BatchNorm2d: _aten.batch_norm.default,
    nn.BatchNorm3d: _aten.batch_norm.default,
    nn.LayerNorm: _aten.layer_norm.default,
    nn.GroupNorm: _aten.group_norm.default,
    nn.Embedding: _aten.embedding.default,
}

Tensors = dict[str, torch.Tensor]


@dataclasses.dataclass(frozen=True)
class NotRaised:
    """A leaf module that stays as ATen ops, and why."""

    path: str
    type: str
    why: str

    def __str__(self) -> str:
        return f"{self.path} ({self.type}): {self.why}"


@dataclasses.dataclass
class Raised:
    """What raising did: the paths that are module calls now, those that are not, and the base-class modules in place of
    those which were split."""

    modules: list[str] = dataclasses.field(default_factory=list)
    refused: list[NotRaised] = dataclasses.field(default_factory=list)
    split: dict[str, nn.Module] = dataclasses.field(default_factory=dict)


def raise_modules(graph: fx.Graph, model: nn.Module) -> Raised:
    """Replace the nodes of every leaf call by one call_module, in one pass over the graph; before that, the base
    operators of subclasses. What a split module holds belongs to the rest of it and is not raised."""
    tensors = named_tensors(model)
    raised = Raised(split=_split_subclasses(graph, model, tensors))
    for path, nodes in _calls(graph, model, is_leaf):
        module = model.get_submodule(path)
        is_held = any(holder in raised.split for holder in above(path))
        if not is_held and not _outputs(nodes) and not any(map(has_effect, nodes)):
            _erase(graph, nodes)
            continue
        why = "it is held by a module that was split" if is_held else _raise_call(graph, module, path, nodes, tensors)
        if why:
            raised.refused.append(NotRaised(path, type(module).__name__, why))
        else:
            raised.modules.append(path)
    return raised


def is_leaf(module: nn.Module) -> bool:
    """torch.fx's own rule (a class of torch.nn), narrowed to modules that hold no others."""
    own_class = type(module).__module__.startswith("torch.nn.modules") and type(module) not in _CONTAINERS
    return own_class and next(module.children(), None) is None


def above(path: str) -> Iterator[str]:
    """The paths of the modules around a path, from the inside out."""
    while "." in path:
        path = path.rpartition(".")[0]
        yield path


def _calls(
    graph: fx.Graph, model: nn.Module, wanted: Callable[[nn.Module], bool]
) -> Iterator[tuple[str, list[fx.Node]]]:
    """Every call of a wanted module: its path, and the nodes in order. A second call of one module is its own."""
    paths = {path for path, module in model.named_modules(remove_duplicate=False) if path and wanted(module)}
    calls: dict[tuple[str, str], list[fx.Node]] = {}
    for node in graph.nodes:
        stack = node.meta.get("nn_module_stack")
        if node.op != "call_function" or not stack:
            continue
        key, (path, _cls) = next(reversed(stack.items()))  # the innermost module
        path = path.split("@")[0]
        if path in paths:
            calls.setdefault((key, path), []).append(node)
    for (_key, path), nodes in calls.items():
        yield path, nodes


def _outputs(nodes: list[fx.Node]) -> list[fx.Node]:
    """Those of the nodes that others read."""
    members = set(nodes)
    return [n for n in nodes if any(user not in members for user in n.users)]


def _erase(graph: fx.Graph, nodes: list[fx.Node]) -> None:
    for node in reversed(nodes):
        graph.erase_node(node)


def _raise_call(graph: fx.Graph, module: nn.Module, path: str, nodes: list[fx.Node], tensors: Tensors) -> str:
    """Make one call_module of these nodes, or say why it cannot be."""
    members, outputs = set(nodes), _outputs(nodes)
    own = {id(t) for t in (*module.parameters(), *module.buffers())}
    sources = dict.fromkeys(source for node in nodes for source in node.all_input_nodes if source not in members)
    others = [n for n in sources if n.op != "get_attr" or id(tensors.get(str(n.target))) not in own]
    inputs = list(filter(_is_tensor, others))
    why = _why_not(module, nodes, inputs, outputs)
    if why:
        return why
    with graph.inserting_before(nodes[0]):
        call = graph.call_module(path, tuple(inputs))
    call.meta = dict(outputs[0].meta)
    outputs[0].replace_all_uses_with(call, delete_user_cb=lambda user: user not in members)
    _erase(graph, nodes)
    return ""


def _is_tensor(node: fx.Node) -> bool:
    return isinstance(node.meta.get("val"), torch.Tensor) or node.op == "get_attr"


def _why_not(module: nn.Module, nodes: list[fx.Node], inputs: list[fx.Node], outputs: list[fx.Node]) -> str:
    """Why this call cannot be one call_module with one tensor in and one out; empty where it can."""
    if not outputs:
        return "its result is not read, but it has an effect"
    if any(not _is_tensor(n) for n in outputs):
        return "a size computed inside it is used outside"
    if len(outputs) > 1 or outputs[0].target is operator.getitem:
        return f"it gives {len(outputs)} values; only modules with one result are raised"
    if len(inputs) != 1:
        return f"it takes {len(inputs)} tensors; only modules with one input are raised"
    if isinstance(module, nn.modules.conv._ConvTransposeNd) and _given_output_size(module, nodes):
        return "it was called with an output_size"
    return ""


def _given_output_size(module: Any, nodes: list[fx.Node]) -> bool:
    """Whether output_padding in the graph differs from the module's own."""
    own = tuple(module.output_padding)
    given = [named_arguments(node).get("output_padding", own) for node in nodes]
    return any(per_axis(padding, len(own)) != own for padding in given)


def _split_subclasses(graph: fx.Graph, model: nn.Module, tensors: Tensors) -> dict[str, nn.Module]:
    """Replace the base operators of subclasses by calls of base-class modules; returns the module for each path."""
    split: dict[str, nn.Module] = {}
    for path, nodes in _calls(graph, model, lambda m: _base_of(m) is not None):
        module = model.get_submodule(path)
        base = _base_of(module)
        assert base is not None
        for node in nodes:
            if node.target is not _BASE_OPS[base] or not _is_base_call(node, module, base, tensors):
                continue
            if path not in split:
                split[path] = _as_base_class(module, base)
            with graph.inserting_before(node):
                call = graph.call_module(path, (node.args[1] if base is nn.Embedding else node.args[0],))
            call.meta = dict(node.meta)
            node.replace_all_uses_with(call)
            graph.erase_node(node)
    return split


def _base_of(module: nn.Module) -> type[nn.Module] | None:
    """The torch.nn class that a subclass extends; None for the class itself, and where modules that the subclass holds
    have tensors: those must keep their names."""
    base = next((c for c in type(module).__mro__ if c in _BASE_OPS), None)
    holds_tensors = any(True for child in module.children() for _ in (*child.parameters(), *child.buffers()))
    return None if base is type(module) or holds_tensors else base


def _is_base_call(node: fx.Node, module: Any, base: type[nn.Module], tensors: Tensors) -> bool:
    """Whether this op is what a module of the base class with this one's settings would do."""
    given = named_arguments(node)

    def reads(argument: str, tensor: torch.Tensor | None) -> bool:
        value = given.get(argument)
        if value is None or tensor is None:
            return value is None and tensor is None
        return isinstance(value, fx.Node) and value.op == "get_attr" and tensors.get(str(value.target)) is tensor

    if not reads("weight", module.weight) or not ("bias" not in given or reads("bias", module.bias)):
        return False
    if base in _CONVS:
        return _same_convolution(module, given)
    if base is nn.LayerNorm:
        return tuple(given["normalized_shape"]) == tuple(module.normalized_shape) and given["eps"] == module.eps
    if base is nn.GroupNorm:
        return given["num_groups"] == module.num_groups and given["eps"] == module.eps
    if base is nn.Embedding:
        return module.max_norm is None
    if base is nn.Linear:
        return True
    statistics = reads("running_mean", module.running_mean) and reads("running_var", module.running_var)
    return statistics and given["eps"] == module.eps and not given["training"] and not module.training


def _same_convolution(module: Any, given: dict[str, Any]) -> bool:
    if module.padding_mode != "zeros" or not isinstance(module.padding, tuple) or given["groups"] != module.groups:
        return False
    dims = len(module.kernel_size)
    return all(per_axis(given[k], dims) == tuple(getattr(module, k)) for k in ("stride", "padding", "dilation"))


def _as_base_class(module: nn.Module, base: type[nn.Module]) -> nn.Module:
    """A module of the base class with the same settings and the same parameter and buffer objects, no copies."""
    attributes = with_own_containers(vars(module))
    attributes["_modules"] = {name: None for name, child in attributes["_modules"].items() if child is None}
    return module_like(base, attributes)
