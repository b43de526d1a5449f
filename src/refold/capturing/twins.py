"""Twins: a subclass that does its base's op and something more gives that one op to a plain module over its parameters.

timm's BatchNormAct2d is a BatchNorm2d that holds its activation; Gemma's embedding is an Embedding times a scale. The
op becomes a call of a module of the base class that shares the parameters; everything else stays as it is. The twin
holds no other modules, so that a rewrite can take it out of the graph alone.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import fx, nn

from refold.capturing.raising import calls_of, names_of_tensors

_aten = torch.ops.aten
_CONVS = (nn.Conv1d, nn.Conv2d, nn.Conv3d)
_OPS: dict[type[nn.Module], Any] = {
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


def base_of(module: nn.Module) -> type[nn.Module] | None:
    """The torch.nn class that a subclass extends; None for the class itself and for everything else."""
    base = next((c for c in type(module).__mro__ if c in _OPS), None)
    return None if base is type(module) or not _stateless_inside(module) else base


def _stateless_inside(module: nn.Module) -> bool:
    """Whether the modules it holds, if any, hold no tensors: those must keep their names."""
    return not any(True for child in module.children() for _ in (*child.parameters(), *child.buffers()))


def raise_twins(graph: fx.Graph, model: nn.Module) -> dict[str, nn.Module]:
    """Replace the base ops of subclasses by calls of twins; returns the twin for each path."""
    names = names_of_tensors(model)
    twins: dict[str, nn.Module] = {}
    for (_call, path), nodes in calls_of(graph, model, lambda m: base_of(m) is not None).items():
        module = model.get_submodule(path)
        base = base_of(module)
        for node in nodes:
            if base is None or node.target is not _OPS[base] or not _is_plain(node, module, base, names):
                continue
            if path not in twins:
                twins[path] = _twin_of(module, base)
            _replace(graph, node, path)
    return twins


def _replace(graph: fx.Graph, node: fx.Node, path: str) -> None:
    value = node.args[1] if node.target is _aten.embedding.default else node.args[0]
    with graph.inserting_before(node):
        call = graph.call_module(path, (value,))
    call.meta = dict(node.meta)
    node.replace_all_uses_with(call)
    graph.erase_node(node)


def _is_plain(node: fx.Node, module: Any, base: type[nn.Module], names: dict[str, int]) -> bool:
    """Whether this op is what a module of the base class with this one's settings would do."""
    given = _named_arguments(node)

    def reads(argument: str, tensor: torch.Tensor | None) -> bool:
        value = given.get(argument)
        if value is None or tensor is None:
            return value is None and tensor is None
        return isinstance(value, fx.Node) and value.op == "get_attr" and names.get(str(value.target)) == id(tensor)

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
    return all(_spread(given[k], module) == tuple(getattr(module, k)) for k in ("stride", "padding", "dilation"))


def _spread(value: Any, module: Any) -> tuple[int, ...]:
    """One number may stand for all dimensions."""
    values = tuple(value) if isinstance(value, (list, tuple)) else (value,)
    return values * len(module.kernel_size) if len(values) == 1 else values


def _named_arguments(node: fx.Node) -> dict[str, Any]:
    arguments = node.target._schema.arguments  # type: ignore[union-attr]
    found = {a.name: a.default_value for a in arguments if a.has_default_value()}
    found |= {a.name: value for a, value in zip(arguments, node.args, strict=False)}
    return found | dict(node.kwargs)


def _twin_of(module: nn.Module, base: type[nn.Module]) -> nn.Module:
    """A module of the base class with the same settings and the same parameter and buffer objects, no copies."""
    twin = base.__new__(base)
    twin.__dict__ = {k: v.copy() if isinstance(v, (dict, set)) else v for k, v in vars(module).items()}
    for name, _ in module.named_children():
        delattr(twin, name)
    return twin
