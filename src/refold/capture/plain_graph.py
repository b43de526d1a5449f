"""From an exported program to a plain graph: own arguments, parameters by name, regions inlined, checks left out."""

from __future__ import annotations

import dataclasses
import operator
from collections.abc import Sequence
from typing import Any

import torch
from torch import fx
from torch.export.graph_signature import InputKind, OutputKind

from refold.capture.export_program import PREFIX, Exported
from refold.capture.forward_call import ForwardCall, emit
from refold.errors import CaptureError

CONSTANTS = "constants"  # the child of the captured module that holds tensors which the model does not own

_aten = torch.ops.aten
_CHECKS = {
    _aten._assert_tensor_metadata.default,
    _aten._assert_scalar.default,
    _aten._assert_async.msg,
    _aten._assert_async.default,
    _aten.sym_constrain_range.default,
    _aten.sym_constrain_range_for_size.default,
    torch._check,
    torch._assert,
}
_OWN = {InputKind.PARAMETER, InputKind.BUFFER}
_GRAD_REGION, _AUTOCAST_REGION = 1, 4  # which argument of such a node is its graph
_WRITES = {OutputKind.BUFFER_MUTATION, OutputKind.USER_INPUT_MUTATION}


def unlift(exported: Exported, call: ForwardCall) -> tuple[fx.Graph, dict[str, Any]]:
    """The exported program as a graph that is called as the model is and gives what the model gives, and the objects
    that it reads which are not the model's."""
    copier = _Copier(exported.program)
    outputs = copier.copy_program(call.add_placeholders(copier.graph))
    copier.graph.output(emit(exported.output, outputs, copier.graph))
    return copier.graph, copier.constants


class _Copier:
    """Copies nodes into a new graph; ``env`` has the new value of each old node."""

    def __init__(self, program: torch.export.ExportedProgram) -> None:
        self.program = program
        self.graph = fx.Graph()
        self.constants: dict[str, Any] = {}
        self.attributes: dict[str, fx.Node] = {}

    def copy_program(self, leaves: Sequence[fx.Node]) -> list[Any]:
        """Copy the program; returns what it gives. ``leaves``: the nodes for its tensor inputs."""
        signature = self.program.graph_signature
        waiting = iter(leaves)
        env: dict[fx.Node, Any] = {}
        holders: dict[str, Any] = {}
        for node, spec in zip(self.program.graph.find_nodes(op="placeholder"), signature.input_specs, strict=True):
            if spec.kind is InputKind.USER_INPUT:
                env[node] = next(waiting)
                env[node].meta.update(self._meta(node))
            else:
                env[node] = self._held(spec, node)
            holders |= {spec.target: env[node], spec.arg.name: env[node]}
        return self._write_back(signature.output_specs, holders, self._copy_nodes(self.program.graph_module, env))

    def _held(self, spec: Any, node: fx.Node) -> _Attribute:
        """A parameter, buffer or constant of the program."""
        if spec.kind in _OWN:
            return _Attribute(spec.target.removeprefix(PREFIX), None, node)
        if spec.kind is not InputKind.CONSTANT_TENSOR:
            raise CaptureError(
                f"The exported program takes a {spec.kind} named {spec.target}, which a graph cannot hold."
            )
        return self._adopt(spec.target, self.program.constants[spec.target], node)

    def _adopt(self, name: str, value: Any, node: fx.Node) -> _Attribute:
        """A constant or nested graph of the program, to be held by the captured module."""
        target = f"{CONSTANTS}.{name.replace('.', '_')}"
        while target in self.constants and self.constants[target] is not value:
            target += "_"
        self.constants[target] = value
        return _Attribute(target, value, node)

    def _copy_nodes(self, owner: fx.GraphModule, env: dict[fx.Node, Any]) -> Any:
        """Copy one graph (the program or a region of it); returns what its output node holds."""
        for node in owner.graph.nodes:
            if node.op == "output":
                return fx.map_arg(node.args[0], lambda n: self._value(env[n]))
            if node.op != "placeholder":
                env[node] = self._copy_node(node, owner, env)
        raise AssertionError("an exported graph ends with an output node")

    def _copy_node(self, node: fx.Node, owner: fx.GraphModule, env: dict[fx.Node, Any]) -> Any:
        if node.op == "get_attr":
            return self._adopt(str(node.target), operator.attrgetter(str(node.target))(owner), node)
        if node.target in _CHECKS and not node.users:
            return None
        fresh = _aten.lift_fresh_copy.default  # of `torch.tensor(...)`: there are no gradients to cut off
        if node.target is _aten.detach_.default and node.all_input_nodes[0].target is fresh:
            return env[node.all_input_nodes[0]]
        inlined = _position_of_region(node)
        if inlined is not None:
            return self._inline(node, env, inlined)
        if node.target is operator.getitem and isinstance(env[node.args[0]], (tuple, list)):  # type: ignore[index]
            return env[node.args[0]][node.args[1]]  # type: ignore[index]
        alone = _joined_to_nothing(node)
        if alone is None:
            copied = self.graph.node_copy(node, lambda n: self._value(env[n]))
        else:
            layout: dict[str, Any] = {"memory_format": torch.contiguous_format}
            copied = self.graph.call_function(_aten.clone.default, (self._value(env[alone]),), layout)
        copied.meta = self._meta(node)
        return copied

    def _inline(self, node: fx.Node, env: dict[fx.Node, Any], position: int) -> Any:
        inner = env[node.args[position]].value  # type: ignore[index]
        outside = [self._value(env[a]) if isinstance(a, fx.Node) else a for a in node.args[position + 1 :]]
        inside = dict(zip(inner.graph.find_nodes(op="placeholder"), outside, strict=True))
        results = self._copy_nodes(inner, inside)
        without_grad = position == _GRAD_REGION and not node.args[0]
        if not without_grad or not any(_needs_grad(a) for a in node.args):
            return results
        return fx.map_arg(results, lambda n: self._detached(n))

    def _detached(self, node: fx.Node) -> fx.Node:
        """What leaves a no_grad region carries no gradient."""
        value = node.meta.get("val")
        if not isinstance(value, torch.Tensor) or not value.is_floating_point():
            return node
        detached = self.graph.call_function(_aten.detach.default, (node,))
        # without the stack of modules: it belongs to the region, not to the module that made the value
        detached.meta = {k: v for k, v in node.meta.items() if k != "nn_module_stack"}
        return detached

    def _value(self, value: Any) -> Any:
        """The node for a value; a parameter's get_attr is written where it is first read."""
        if not isinstance(value, _Attribute):
            return value
        if value.target not in self.attributes:
            node = self.graph.get_attr(value.target)
            node.meta = self._meta(value.node)
            self.attributes[value.target] = node
        return self.attributes[value.target]

    def _meta(self, node: fx.Node) -> dict[str, Any]:
        """A node's meta, with the modules named as the model names them."""
        meta = {k: v for k, v in node.meta.items() if k in ("val", "stack_trace", "tensor_meta")}
        stack = node.meta.get("nn_module_stack")
        if stack:
            own = {k: (f"{path}.", cls) for k, (path, cls) in stack.items() if f"{path}.".startswith(PREFIX)}
            meta["nn_module_stack"] = {k: (path.removeprefix(PREFIX)[:-1], cls) for k, (path, cls) in own.items()}
        return meta

    def _write_back(self, specs: Sequence[Any], holders: dict[str, Any], results: Any) -> list[Any]:
        """Values that the program gives back only to be written into a buffer or an input are written there."""
        outputs = []
        for spec, value in zip(specs, results, strict=True):
            if spec.kind in _WRITES:
                self.graph.call_function(_aten.copy_.default, (self._value(holders[spec.target]), value))
            elif spec.kind is OutputKind.USER_OUTPUT:
                outputs.append(value)
        return outputs


@dataclasses.dataclass(frozen=True)
class _Attribute:
    """Something the module holds; its get_attr node is made at the first use."""

    target: str
    value: Any
    node: fx.Node


def _position_of_region(node: fx.Node) -> int | None:
    """Which argument is the nested graph of a no_grad or disabled-autocast block; an enabled autocast changes what its
    ops do and is kept."""
    name = getattr(node.target, "__name__", "")
    if name == "wrap_with_set_grad_enabled":
        return _GRAD_REGION
    return _AUTOCAST_REGION if name == "wrap_with_autocast" and not node.args[2] else None


def _joined_to_nothing(node: fx.Node) -> fx.Node | None:
    """The only tensor of a `cat` that holds anything, as where a cache is empty yet: the result is a copy of it."""
    if node.target is not _aten.cat.default or not isinstance(node.args[0], (list, tuple)):
        return None
    parts = [part for part in node.args[0] if isinstance(part, fx.Node) and part.meta["val"].shape != (0,)]
    if len(parts) != 1 or len(node.args[0]) == 1 or parts[0].meta["val"].dtype != node.meta["val"].dtype:
        return None
    return parts[0]


def _needs_grad(argument: Any) -> bool:
    """Whether gradients may flow into an argument: buffers and lifted constants never require any."""
    value = argument.meta.get("val") if isinstance(argument, fx.Node) else None
    if not isinstance(value, torch.Tensor) or not value.is_floating_point():
        return False
    return value.requires_grad or argument.op != "placeholder" or not argument.name.startswith(("b_", "c_"))
