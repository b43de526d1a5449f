"""One view of linear, convolution and batch norm, whether called as modules, functions or ATen operators.

A matcher answers with the call it found, with a sentence that says why an almost fitting node is left alone, or with
None where the node is something else.
"""

from __future__ import annotations

import operator
from bisect import bisect_left
from collections import defaultdict
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.fx import GraphModule, Node

from refold import fx_private
from refold.aliasing import switches_mode, written_by

aten = torch.ops.aten


@dataclass(frozen=True)
class Operand:
    """A tensor that the module owns, by its full name."""

    name: str
    tensor: torch.Tensor


@dataclass(frozen=True)
class Call:
    """A node that computes with parameters: `kind` is 'module', 'function' or 'aten'; `path` names the module."""

    node: Node
    kind: str
    input: Node
    path: str | None
    operands: dict[str, Operand]
    settings: dict[str, Any] = field(default_factory=dict)

    @property
    def weight(self) -> torch.Tensor:
        """The weight."""
        return self.operands["weight"].tensor

    @property
    def bias(self) -> torch.Tensor | None:
        """The bias, if there is one."""
        return self.operands["bias"].tensor if "bias" in self.operands else None


Match = Call | str | None


class GraphView:
    """A graph module with the questions that matchers ask, each answered in one pass over the graph."""

    def __init__(self, gm: GraphModule) -> None:
        self.gm = gm
        self.nodes = list(gm.graph.nodes)
        self.position = {node: i for i, node in enumerate(self.nodes)}

    @cached_property
    def calls(self) -> dict[str, list[Node]]:
        """The nodes that call the module at a path, or fetch the attribute of that name."""
        found: dict[str, list[Node]] = defaultdict(list)
        for node in self.nodes:
            if node.op in ("call_module", "get_attr"):
                found[str(node.target)].append(node)
        return found

    @cached_property
    def writers(self) -> list[int]:
        """The positions of nodes that write in place."""
        return [i for i, node in enumerate(self.nodes) if written_by(self.gm, node)]

    def writers_between(self, start: Node, stop: Node) -> list[Node]:
        """The nodes between two others that write in place."""
        return [self.nodes[i] for i in self._between(self.writers, start, stop)]

    @cached_property
    def mode_switches(self) -> list[int]:
        """The positions of nodes that switch gradients, autocast or inference mode."""
        return [i for i, node in enumerate(self.nodes) if switches_mode(node)]

    def mode_switches_between(self, start: Node, stop: Node) -> list[Node]:
        """Nodes between two others that switch a mode."""
        return [self.nodes[i] for i in self._between(self.mode_switches, start, stop)]

    def _between(self, positions: list[int], start: Node, stop: Node) -> list[int]:
        low, high = (bisect_left(positions, self.position[node]) for node in (start, stop))
        return positions[low:high]

    @cached_property
    def tensor_names(self) -> dict[int, list[str]]:
        """Every name under which a tensor is registered."""
        found: dict[int, list[str]] = defaultdict(list)
        for path, module in fx_private.walk_modules(self.gm):
            if isinstance(module, torch.jit.ScriptModule):
                continue
            prefix = path + "." if path else ""
            for table in ("_parameters", "_buffers"):
                for key, tensor in fx_private.table(module, table).items():
                    if tensor is not None:
                        found[id(tensor)].append(prefix + key)
        return found

    def module(self, path: str) -> nn.Module | None:
        """The module at a path."""
        try:
            return self.gm.get_submodule(path)
        except AttributeError:
            return None

    def operand(self, node: Any) -> Operand | None:
        """The tensor that a get_attr node fetches."""
        if not isinstance(node, Node) or node.op != "get_attr":
            return None
        path, _, key = str(node.target).rpartition(".")
        owner = self.module(path)
        if owner is None or isinstance(owner, torch.jit.ScriptModule):
            return None
        for table in ("_parameters", "_buffers"):
            tensor = fx_private.table(owner, table).get(key)
            if tensor is not None:
                return Operand(str(node.target), tensor)
        return None

    def readers(self, operand: Operand) -> list[Node]:
        """Every node that reads a tensor: by fetching it, or by calling or fetching a module that holds it."""
        found = [node for name in self.tensor_names[id(operand.tensor)] for node in self.reached_by(name)]
        return list(dict.fromkeys(found))

    def reached_by(self, name: str) -> list[Node]:
        """Every node that calls or fetches what has this name, or a module that holds it."""
        parts = name.split(".")
        return [node for i in range(len(parts)) for node in self.calls.get(".".join(parts[: i + 1]), ())]

    def why_shared(self, call: Call) -> str | None:
        """Why the tensors of a call are not its own alone, each in one role, as a sentence; None if they are."""
        roles: dict[str, str] = {}
        for role, operand in call.operands.items():
            if operand.name in roles:
                return f"its {role} is also its {roles[operand.name]}"
            roles[operand.name] = role
            names = self.tensor_names[id(operand.tensor)]
            others = [name for name in names if name != operand.name]
            if others:
                return f"its {role} is also registered as {', '.join(others)}"
            for reader in self.readers(operand):
                own_fetch = reader.op == "get_attr" and list(reader.users) == [call.node]
                if own_fetch and reader is call.input:
                    return f"its {role} is also its input"
                if reader is not call.node and not own_fetch:
                    return f"its {role} is also read by {reader.name}"
        return None

    def numbers(self, node: Any) -> bool:
        """Whether a value is certainly a Python number (a size), not a tensor."""
        return isinstance(node, Node) and _is_number(node, 0)

    def value(self, node: Any) -> torch.Tensor | None:
        """The example value that capture or shape propagation noted on a node."""
        return example_value(node)


def example_value(node: Any) -> torch.Tensor | None:
    """The (fake) tensor noted on a node by capture, if any."""
    value = node.meta.get("val", node.meta.get("example_value")) if isinstance(node, Node) else None
    return value if isinstance(value, torch.Tensor) else None


def proves_shapes(noted: torch.Tensor) -> bool:
    """Whether noted sizes hold for every run: an export guards them, an example that was run through does not."""
    mode = getattr(noted, "fake_mode", None)
    return mode is not None and mode.shape_env is not None


def rank_of(node: Any) -> int | None:
    """The number of dimensions of a node's value, where it was noted."""
    value = example_value(node)
    if value is not None:
        return value.dim()
    noted = node.meta.get("tensor_meta") if isinstance(node, Node) else None
    shape = getattr(noted, "shape", None)
    return None if shape is None else len(shape)


_NUMBER_METHODS = {
    "size",
    "dim",
    "ndimension",
    "numel",
    "nelement",
    "item",
    "tolist",
    "stride",
    "__len__",
    "element_size",
}
_NUMBER_ATTRIBUTES = {"shape", "ndim", "nbytes", "itemsize"}
_ARITHMETIC = {
    getattr(operator, n) for n in ("add", "sub", "mul", "floordiv", "truediv", "mod", "pow", "neg", "getitem")
}
_NUMBER_FUNCTIONS: set[Any] = {len, int, float, round, max, min, torch.numel, aten.sym_size.int, aten.sym_numel.default}


def _is_number(node: Node, depth: int) -> bool:
    value = node.meta.get("val", node.meta.get("example_value"))
    if value is not None:
        return isinstance(value, int | float) or fx_private.is_number_class(value)
    if node.type in (int, float):
        return True
    if node.op == "call_method":
        return node.target in _NUMBER_METHODS
    if node.op != "call_function":
        return False
    if node.target is getattr:
        return node.args[1] in _NUMBER_ATTRIBUTES
    if node.target in _NUMBER_FUNCTIONS or getattr(node.target, "__module__", "") == "math":
        return True
    inputs = node.all_input_nodes
    return node.target in _ARITHMETIC and bool(inputs) and depth < 20 and all(_is_number(n, depth + 1) for n in inputs)


# --- eligibility -------------------------------------------------------------------------------------------------


def why_not_plain(module: nn.Module, kinds: tuple[type, ...]) -> str | None:
    """Why a module is not exactly what its class says, as a sentence; None if it is."""
    if type(module) not in kinds:
        return f"it is a {type(module).__name__}, a subclass with a forward of its own"
    if fx_private.has_hooks(module):
        return "hooks are registered on it"
    if "forward" in module.__dict__:
        return "its forward was replaced"
    extra = list(fx_private.table(module, "_modules"))
    if extra:
        return f"it has children of its own ({', '.join(extra)})"
    return None


def why_odd_tensor(tensor: torch.Tensor) -> str | None:
    """Why a tensor cannot be computed with freely, as a sentence."""
    if type(tensor) not in (torch.Tensor, nn.Parameter):
        return f"is a {type(tensor).__name__}"
    if tensor.is_quantized or tensor.layout != torch.strided:
        return "is quantized or sparse"
    if not tensor.is_floating_point():
        return f"has dtype {tensor.dtype}"
    return None


def _module_call(view: GraphView, node: Node, kinds: tuple[type, ...], roles: dict[str, str]) -> Match:
    """A call of a module of one of these classes; `roles` maps its tensors' attribute names to roles."""
    module = view.module(str(node.target))
    if module is None or not isinstance(module, kinds):
        return None
    reason = why_not_plain(module, kinds)
    if reason is not None:
        return reason
    given = [*node.args, *node.kwargs.values()]
    if len(given) != 1 or (node.kwargs and set(node.kwargs) != {"input"}):
        return "it is not called with one input"
    if not isinstance(given[0], Node):
        return "its input is not a node"
    operands = {}
    for attribute, role in roles.items():
        tensor = getattr(module, attribute, None)
        if tensor is not None:
            operands[role] = Operand(f"{node.target}.{attribute}", tensor)
    call = Call(node, "module", given[0], str(node.target), operands)
    return (
        _with_sound_tensors(call) if len(view.calls[str(node.target)]) == 1 else "its module is called more than once"
    )


def _with_sound_tensors(call: Call) -> Match:
    for role, operand in call.operands.items():
        reason = why_odd_tensor(operand.tensor) if role != "num_batches_tracked" else None
        if reason is not None:
            return f"its {role} {reason}"
    return call


def bind(node: Node, names: tuple[str, ...]) -> dict[str, Any] | None:
    """A call's arguments by name; None if it has arguments of other names."""
    if len(node.args) > len(names) or not set(node.kwargs) <= set(names):
        return None
    return dict(zip(names, node.args, strict=False)) | dict(node.kwargs)


def per_axis(value: Any, dims: int) -> tuple[Any, ...]:
    """A setting for each of some axes; one number may stand for all of them."""
    if not isinstance(value, tuple | list):
        return (value,) * dims
    return tuple(value) * dims if len(value) == 1 else tuple(value)


def _function_call(view: GraphView, node: Node, names: tuple[str, ...], roles: dict[str, str]) -> Match:
    """A call of a function whose tensors are fetched by get_attr."""
    given = bind(node, names)
    if given is None or not isinstance(given.get("input"), Node):
        return "its arguments are not understood"
    operands = {}
    for name, role in roles.items():
        if given.get(name) is None:
            continue
        operand = view.operand(given[name])
        if operand is None:
            return f"its {role} is computed, not a parameter"
        operands[role] = operand
    settings = {k: v for k, v in given.items() if k not in roles and k != "input"}
    kind = "aten" if isinstance(node.target, torch._ops.OpOverload) else "function"
    return _with_sound_tensors(Call(node, kind, given["input"], None, operands, settings))


# --- linear ------------------------------------------------------------------------------------------------------

_LINEAR: set[Any] = {F.linear, aten.linear.default}


def match_linear(view: GraphView, node: Node) -> Match:
    """`y = x·Wᵀ + b`."""
    roles = {"weight": "weight", "bias": "bias"}
    if node.op == "call_module":
        return _module_call(view, node, (nn.Linear,), roles)
    if node.op != "call_function" or node.target not in _LINEAR:
        return None
    call = _function_call(view, node, ("input", "weight", "bias"), roles)
    return "its weight is not a matrix" if isinstance(call, Call) and call.weight.dim() != 2 else call


_ADDMM: set[Any] = {torch.addmm, aten.addmm.default}


def match_addmm(view: GraphView, node: Node) -> Match:
    """`y = x·W + b` on rows: a linear layer whose weight is (in, out), as GPT-2's Conv1D; `settings['out']` is 1."""
    if node.op != "call_function" or node.target not in _ADDMM:
        return None
    if len(node.args) != 3 or node.kwargs:
        return "its arguments are not understood"
    call = _function_call(view, node, ("bias", "input", "weight"), {"weight": "weight", "bias": "bias"})
    if not isinstance(call, Call) or call.bias is None:
        return call if isinstance(call, str) else None
    if call.weight.dim() != 2 or call.bias.shape != call.weight.shape[1:]:
        return "its weight is not a matrix with one bias for each column"
    return replace(call, settings={"out": 1})


# --- convolution -------------------------------------------------------------------------------------------------

CONV_NAMES = ("input", "weight", "bias", "stride", "padding", "dilation", "groups")
_CONV: dict[Any, int] = {F.conv1d: 1, F.conv2d: 2, F.conv3d: 3}
_CONV |= {getattr(aten, f"conv{n}d").default: n for n in (1, 2, 3)}
_CONV |= {getattr(aten, f"conv{n}d").padding: n for n in (1, 2, 3)}
_CONV_MODULES: dict[int, type[nn.Module]] = {1: nn.Conv1d, 2: nn.Conv2d, 3: nn.Conv3d}


def match_conv(view: GraphView, node: Node, dims: int = 2) -> Match:
    """A convolution over `dims` spatial dimensions; the output channel is the weight's first axis."""
    roles = {"weight": "weight", "bias": "bias"}
    if node.op == "call_module":
        return _module_call(view, node, (_CONV_MODULES[dims],), roles)
    if node.op != "call_function" or _CONV.get(node.target) != dims:
        return None
    return _function_call(view, node, CONV_NAMES, roles)


_TRANSPOSED_NAMES = ("input", "weight", "bias", "stride", "padding", "output_padding", "groups", "dilation")
_TRANSPOSED: dict[Any, int] = {F.conv_transpose1d: 1, F.conv_transpose2d: 2, F.conv_transpose3d: 3}
_TRANSPOSED |= {aten.conv_transpose1d.default: 1, aten.conv_transpose2d.input: 2, aten.conv_transpose3d.input: 3}
_TRANSPOSED_MODULES: dict[int, type[nn.Module]] = {1: nn.ConvTranspose1d, 2: nn.ConvTranspose2d, 3: nn.ConvTranspose3d}


def match_conv_transpose(view: GraphView, node: Node, dims: int = 2) -> Match:
    """A transposed convolution; the output channel is the weight's second axis, for each group anew."""
    roles = {"weight": "weight", "bias": "bias"}
    if node.op == "call_module":
        return _module_call(view, node, (_TRANSPOSED_MODULES[dims],), roles)
    if node.op != "call_function" or _TRANSPOSED.get(node.target) != dims:
        return None
    return _function_call(view, node, _TRANSPOSED_NAMES, roles)


# --- batch norm --------------------------------------------------------------------------------------------------

_BN_MODULES: dict[int, type[nn.Module]] = {1: nn.BatchNorm1d, 2: nn.BatchNorm2d, 3: nn.BatchNorm3d}
_BN_ROLES = {"weight": "gamma", "bias": "beta", "running_mean": "running_mean", "running_var": "running_var"}
_BN_ATEN = ("input", "weight", "bias", "running_mean", "running_var", "training", "momentum", "eps", "cudnn_enabled")
_BN_F = ("input", "running_mean", "running_var", "weight", "bias", "training", "momentum", "eps")
_BN: dict[Any, tuple[str, ...]] = {
    F.batch_norm: _BN_F,
    torch.batch_norm: _BN_ATEN,
    aten.batch_norm.default: _BN_ATEN,
}


def match_batch_norm(view: GraphView, node: Node, dims: int = 2) -> Match:
    """A batch norm that runs on its recorded statistics; `settings['eps']` holds its epsilon."""
    if node.op == "call_module":
        call = _module_call(
            view, node, (_BN_MODULES[dims],), _BN_ROLES | {"num_batches_tracked": "num_batches_tracked"}
        )
        if isinstance(call, Call):
            module = view.gm.get_submodule(str(node.target))
            call = replace(call, settings={"training": module.training, "eps": module.eps})
    elif node.op == "call_function" and node.target in _BN:
        call = _function_call(view, node, _BN[node.target], _BN_ROLES)
    else:
        return None
    return _usable_statistics(call) if isinstance(call, Call) else call


def _usable_statistics(call: Call) -> Match:
    if "running_mean" not in call.operands or "running_var" not in call.operands:
        return "its batch norm has no running statistics"
    if call.settings.get("training", False) is not False:
        return "its batch norm is in training mode; call eval() first"
    if not isinstance(call.settings.setdefault("eps", 1e-5), int | float):
        return "its epsilon is computed"
    return call
