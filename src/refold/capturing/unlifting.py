"""From an exported program to a plain graph: own arguments, parameters by name, regions inlined, checks left out."""

from __future__ import annotations

import dataclasses
import operator
from collections.abc import Sequence
from typing import Any

import torch
from torch import fx
from torch.export.graph_signature import InputKind, OutputKind

from refold.capturing.calling import Calling, add_output
from refold.capturing.errors import CaptureError
from refold.capturing.export import Exported

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
_WRITES = {OutputKind.BUFFER_MUTATION, OutputKind.USER_INPUT_MUTATION}


@dataclasses.dataclass
class Plain:
    """A graph under construction, the objects it reads that are not the model's, and what was simplified."""

    graph: fx.Graph
    constants: dict[str, Any] = dataclasses.field(default_factory=dict)
    regions: int = 0
    checks: int = 0


def unlift(exported: Exported, calling: Calling) -> Plain:
    """The exported program as a graph that is called as the model is and gives what the model gives."""
    plain = Plain(fx.Graph())
    copier = _Copier(plain, exported)
    leaves = calling.add_placeholders(plain.graph)
    outputs = copier.copy_program(leaves)
    add_output(plain.graph, exported.output, outputs)
    return plain


class _Copier:
    """Copies nodes into the new graph; ``env`` says what stands for each old node."""

    def __init__(self, plain: Plain, exported: Exported) -> None:
        self.plain = plain
        self.graph = plain.graph
        self.program = exported.program
        self.prefix = exported.prefix + "."
        self.attributes: dict[str, fx.Node] = {}
        self.stacks: dict[tuple[str, ...], dict[str, Any]] = {}

    def copy_program(self, leaves: Sequence[fx.Node]) -> list[Any]:
        signature = self.program.graph_signature
        targets = {spec.arg.name: spec for spec in signature.input_specs}
        waiting = list(leaves)
        env: dict[fx.Node, Any] = {}
        for node in self.program.graph.find_nodes(op="placeholder"):
            spec = targets[node.name]
            env[node] = waiting.pop(0) if spec.kind is InputKind.USER_INPUT else _Attribute(*self._locate(spec), node)
            if isinstance(env[node], fx.Node):
                env[node].meta.update(self._meta(node))
        results = self._copy_nodes(self.program.graph_module, env)
        return self._write_back(signature, env, results)

    def _locate(self, spec: Any) -> tuple[str, Any]:
        """Where the captured module will hold a parameter, buffer or constant; constants are noted on the way."""
        if spec.kind in _OWN:
            return spec.target.removeprefix(self.prefix), None
        if spec.kind is not InputKind.CONSTANT_TENSOR:
            raise CaptureError(
                f"The exported program takes a {spec.kind} named {spec.target}, which a graph cannot hold."
            )
        target = f"{CONSTANTS}.{spec.target.replace('.', '_')}"
        value = self.program.constants[spec.target]
        self.plain.constants[target] = value
        return target, value

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
            return _Attribute(*self._adopt(node, owner), node)
        if node.target in _CHECKS and not node.users:
            self.plain.checks += 1
            return None
        if node.target is _aten.detach_.default and _is_fresh_constant(node.args[0]):
            return env[node.args[0]]  # type: ignore[index]
        alone = _joined_to_nothing(node)
        if alone is not None:
            layout: dict[str, Any] = {"memory_format": torch.contiguous_format}
            copied = self.graph.call_function(_aten.clone.default, (self._value(env[alone]),), layout)
            copied.meta = self._meta(node)
            return copied
        region = _region_of(node)
        if region is not None:
            return self._inline(node, owner, env, region)
        if node.target is operator.getitem and isinstance(env[node.args[0]], (tuple, list)):  # type: ignore[index]
            return env[node.args[0]][node.args[1]]  # type: ignore[index]
        copied = self.graph.node_copy(node, lambda n: self._value(env[n]))
        copied.meta = self._meta(node)
        return copied

    def _adopt(self, node: fx.Node, owner: fx.GraphModule) -> tuple[str, Any]:
        """A constant or nested graph of the program, to be held by the captured module."""
        value = operator.attrgetter(str(node.target))(owner)
        target = f"{CONSTANTS}.{str(node.target).replace('.', '_')}"
        while target in self.plain.constants and self.plain.constants[target] is not value:
            target += "_"
        self.plain.constants[target] = value
        return target, value

    def _inline(self, node: fx.Node, owner: fx.GraphModule, env: dict[fx.Node, Any], region: _Region) -> Any:
        self.plain.regions += 1
        inner = env[node.args[region.graph]].value  # type: ignore[index]
        outside = [self._value(env[a]) if isinstance(a, fx.Node) else a for a in node.args[region.graph + 1 :]]
        inside = dict(zip(inner.graph.find_nodes(op="placeholder"), outside, strict=True))
        results = self._copy_nodes(inner, inside)
        if not region.without_grad or not any(_needs_grad(a) for a in node.args):
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
            meta["nn_module_stack"] = self._own_stack(stack)
        return meta

    def _own_stack(self, stack: dict[str, Any]) -> dict[str, Any]:
        key = tuple(stack)
        if key not in self.stacks:
            own = [(k, path + ".", cls) for k, (path, cls) in stack.items() if (path + ".").startswith(self.prefix)]
            self.stacks[key] = {k: (path.removeprefix(self.prefix).rstrip("."), cls) for k, path, cls in own}
        return self.stacks[key]

    def _write_back(self, signature: Any, env: dict[fx.Node, Any], results: Any) -> list[Any]:
        """Values that the program gives back only to be written into a buffer or an input are written there."""
        holders = {spec.target: env[n] for n, spec in self._inputs(signature)}
        holders |= {spec.arg.name: env[n] for n, spec in self._inputs(signature)}
        outputs = []
        for spec, value in zip(signature.output_specs, results, strict=True):
            if spec.kind in _WRITES:
                self.graph.call_function(_aten.copy_.default, (self._value(holders[spec.target]), value))
            elif spec.kind is OutputKind.USER_OUTPUT:
                outputs.append(value)
        return outputs

    def _inputs(self, signature: Any) -> list[tuple[fx.Node, Any]]:
        return list(zip(self.program.graph.find_nodes(op="placeholder"), signature.input_specs, strict=True))


@dataclasses.dataclass(frozen=True)
class _Attribute:
    """Something the module holds; its get_attr node is made at the first use."""

    target: str
    value: Any
    node: fx.Node


@dataclasses.dataclass(frozen=True)
class _Region:
    """A nested graph that can be inlined: at which argument it stands, and whether it ran without gradients."""

    graph: int
    without_grad: bool


def _region_of(node: fx.Node) -> _Region | None:
    """no_grad and disabled-autocast blocks; an enabled autocast changes what its ops do and is kept."""
    name = getattr(node.target, "__name__", "")
    if name == "wrap_with_set_grad_enabled":
        return _Region(1, without_grad=not node.args[0])
    if name == "wrap_with_autocast" and not node.args[2]:
        return _Region(4, without_grad=False)
    return None


def _is_fresh_constant(argument: Any) -> bool:
    """`torch.tensor(...)` is exported as a constant, copied, and cut off from gradients that it does not have."""
    return isinstance(argument, fx.Node) and argument.target is _aten.lift_fresh_copy.default


def _joined_to_nothing(node: fx.Node) -> fx.Node | None:
    """The only tensor of a `cat` that holds anything, as where a cache is empty yet: the result is a copy of it."""
    if node.target is not _aten.cat.default or not isinstance(node.args[0], (list, tuple)):
        return None
    parts = [part for part in node.args[0] if isinstance(part, fx.Node) and part.meta["val"].shape != (0,)]
    if len(parts) != 1 or len(node.args[0]) == 1 or parts[0].meta["val"].dtype != node.meta["val"].dtype:
        return None
    return parts[0]


def _needs_grad(argument: Any) -> bool:
    value = argument.meta.get("val") if isinstance(argument, fx.Node) else None
    return isinstance(value, torch.Tensor) and value.is_floating_point() and not _is_constant_buffer(argument)


def _is_constant_buffer(node: fx.Node) -> bool:
    """Buffers and lifted constants never require gradients."""
    return node.op == "placeholder" and node.name.startswith(("b_", "c_")) and not node.meta["val"].requires_grad
