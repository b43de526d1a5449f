"""One table for each operator: its modules, functions and ATen operators seen as one kind of call.

A match gives the call with all of its settings, or None where the node is something else; it raises `Refuse` where the
node almost fits.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.fx import Node

from refold.graph.arguments import bind, per_axis
from refold.graph.values import is_number
from refold.graph.view import Call, GraphView, Operand
from refold.rewrite.refusal import Refuse, computable, plain

aten = torch.ops.aten
_OTHER_NAMES = {"self": "input", "train": "training", "output_size": "size", "scale_factors": "scale_factor"}
"""Arguments that some functions name otherwise than most."""


@dataclass(frozen=True)
class Operator:
    """An operator in all its forms: how each is called, and what is the same in all."""

    modules: Mapping[type[nn.Module], int]
    """The classes of its modules, and over how many axes of space each runs."""
    functions: Mapping[Any, tuple[tuple[str, ...], int]]
    """Its functions and ATen operators: the names of their arguments, and over how many axes (0: any)."""
    tensors: Mapping[str, str] = field(default_factory=dict)
    """The tensors it computes with: for the name of an argument or attribute the tensor's role."""
    defaults: Mapping[str, Any] = field(default_factory=dict)
    """Its settings with their defaults."""
    per_axis: frozenset[str] = frozenset()
    """Settings with one value for each axis; one number may stand for all."""
    attributes: Mapping[str, str] = field(default_factory=dict)
    """Settings that modules have under another name."""
    out_axis: int = 0
    check: Callable[[Call], None] | None = None
    """What else must be true of a call; it raises `Refuse`."""

    def match(self, view: GraphView, node: Any, dims: int | None = None) -> Call | None:
        """The call that a node makes of this operator, over so many axes of space if they are given; None for all
        other nodes and values."""
        if not isinstance(node, Node):
            return None
        if node.op == "call_module":
            call = self._match_module(view, node, dims)
        elif node.op == "call_function" and node.target in self.functions:
            call = self._match_function(view, node, dims)
        else:
            return None
        if call is None:
            return None
        for role, operand in call.operands.items():
            if role != "num_batches_tracked":
                computable(role, operand.tensor)
        if self.check is not None:
            self.check(call)
        return call

    def _match_module(self, view: GraphView, node: Node, dims: int | None) -> Call | None:
        path = str(node.target)
        module = view.module(path)
        kind = next((cls for cls in self.modules if isinstance(module, cls)), None)
        if module is None or kind is None or dims not in (None, self.modules[kind]):
            return None
        plain(module, tuple(self.modules))
        given = [*node.args, *node.kwargs.values()]
        if len(given) != 1 or (node.kwargs and set(node.kwargs) != {"input"}):
            raise Refuse("it is not called with one input")
        if not isinstance(given[0], Node):
            raise Refuse("its input is not a node")
        if self.tensors and len(view.calls[path]) > 1:
            raise Refuse("its module is called more than once")
        tensors = {name: getattr(module, name, None) for name in self.tensors}
        operands = {self.tensors[k]: Operand(f"{path}.{k}", v) for k, v in tensors.items() if v is not None}
        settings = {k: getattr(module, self.attributes.get(k, k), v) for k, v in self.defaults.items()}
        return self._call(Call(node, "module", given[0], path, operands, settings, dims=self.modules[kind]))

    def _match_function(self, view: GraphView, node: Node, dims: int | None) -> Call | None:
        names, own_dims = self.functions[node.target]
        if dims is not None and own_dims not in (0, dims):
            return None
        bound = bind(node, names)
        given = {_OTHER_NAMES.get(name, name): value for name, value in (bound or {}).items()}
        source = given.pop("input", None)
        if not isinstance(source, Node):
            raise Refuse("its arguments are not understood")
        operands: dict[str, Operand] = {}
        for name in [name for name in self.tensors if given.get(name) is not None]:
            operand = view.operand(given[name])
            if operand is None:
                raise Refuse(f"its {self.tensors[name]} is computed, not a parameter")
            operands[self.tensors[name]] = operand
        given = {name: value for name, value in given.items() if name not in self.tensors}
        kind = "aten" if isinstance(node.target, torch._ops.OpOverload) else "function"
        return self._call(
            Call(node, kind, source, None, operands, {**self.defaults, **given}, given, own_dims or dims or 0)
        )

    def _call(self, call: Call) -> Call:
        """The call with its settings spread."""
        spread = {k: per_axis(v, call.dims) for k, v in call.settings.items() if k in self.per_axis and v is not None}
        settings = call.settings | {k: v for k, v in spread.items() if not isinstance(call.settings[k], str)}
        function = next(f for f, (_, dims) in self.functions.items() if dims in (0, call.dims))
        roles = {"input": "input", **self.tensors}
        order = tuple(roles[name] for name in self.functions[function][0] if name in roles)
        return replace(call, settings=settings, out_axis=self.out_axis, function=function, order=order)


def _by_dims(*functions: Any, names: tuple[str, ...]) -> dict[Any, tuple[tuple[str, ...], int]]:
    """Functions over one, two and three axes, each with the names of its arguments."""
    return {function: (names, i % 3 + 1) for i, function in enumerate(functions)}


_WEIGHTS = {"weight": "weight", "bias": "bias"}


def _check_linear(call: Call) -> None:
    if call.weight.dim() != 2:
        raise Refuse("its weight is not a matrix")


LINEAR = Operator(
    modules={nn.Linear: 0},
    functions=dict.fromkeys((F.linear, aten.linear.default), (("input", "weight", "bias"), 0)),
    tensors=_WEIGHTS,
    check=_check_linear,
)
"""`y = x·Wᵀ + b`."""


def _check_addmm(call: Call) -> None:
    if call.weight.dim() != 2 or call.bias is None or call.bias.shape != call.weight.shape[1:]:
        raise Refuse("its weight is not a matrix with one bias for each column")


ADDMM = Operator(
    modules={},
    functions=dict.fromkeys((torch.addmm, aten.addmm.default), (("bias", "input", "weight"), 0)),
    tensors=_WEIGHTS,
    out_axis=1,
    check=_check_addmm,
)
"""`y = x·W + b` on rows: a linear layer whose weight is (in, out), as GPT-2's Conv1D."""

_CONVOLUTION_NAMES = ("input", "weight", "bias", "stride", "padding", "dilation", "groups")
CONVOLUTION = Operator(
    modules={nn.Conv1d: 1, nn.Conv2d: 2, nn.Conv3d: 3},
    functions=_by_dims(
        *(F.conv1d, F.conv2d, F.conv3d),
        *(aten.conv1d.default, aten.conv2d.default, aten.conv3d.default),
        *(aten.conv1d.padding, aten.conv2d.padding, aten.conv3d.padding),
        names=_CONVOLUTION_NAMES,
    ),
    tensors=_WEIGHTS,
    defaults={"stride": 1, "padding": 0, "dilation": 1, "groups": 1, "padding_mode": "zeros"},
    per_axis=frozenset({"stride", "padding", "dilation"}),
)
"""A convolution; the output channel is the weight's first axis."""

TRANSPOSED_CONVOLUTION = Operator(
    modules={nn.ConvTranspose1d: 1, nn.ConvTranspose2d: 2, nn.ConvTranspose3d: 3},
    functions=_by_dims(
        *(F.conv_transpose1d, F.conv_transpose2d, F.conv_transpose3d),
        *(aten.conv_transpose1d.default, aten.conv_transpose2d.input, aten.conv_transpose3d.input),
        names=("input", "weight", "bias", "stride", "padding", "output_padding", "groups", "dilation"),
    ),
    tensors=_WEIGHTS,
    defaults={**CONVOLUTION.defaults, "output_padding": 0},
    per_axis=CONVOLUTION.per_axis | {"output_padding"},
    out_axis=1,
)
"""A transposed convolution; the output channel is the weight's second axis, for each group anew."""


def _check_statistics(call: Call) -> None:
    if "running_mean" not in call.operands or "running_var" not in call.operands:
        raise Refuse("its batch norm has no running statistics")
    if call.settings["training"] is not False:
        raise Refuse("its batch norm is in training mode; call eval() first")
    if not isinstance(call.settings["eps"], int | float):
        raise Refuse("its epsilon is computed")


_NORM_NAMES = ("input", "weight", "bias", "running_mean", "running_var", "training", "momentum", "eps", "cudnn_enabled")
BATCH_NORM = Operator(
    modules={nn.BatchNorm1d: 1, nn.BatchNorm2d: 2, nn.BatchNorm3d: 3},
    functions={
        F.batch_norm: (("input", "running_mean", "running_var", "weight", "bias", "training", "momentum", "eps"), 0),
        torch.batch_norm: (_NORM_NAMES, 0),
        aten.batch_norm.default: (_NORM_NAMES, 0),
    },
    tensors={"weight": "gamma", "bias": "beta"}
    | {name: name for name in ("running_mean", "running_var", "num_batches_tracked")},
    defaults={"training": False, "eps": 1e-5},
    check=_check_statistics,
)
"""A batch norm that runs on its recorded statistics."""

_POOL_NAMES = ("input", "kernel_size", "stride", "padding", "ceil_mode", "count_include_pad", "divisor_override")
AVERAGE_POOL = Operator(
    modules={nn.AvgPool1d: 1, nn.AvgPool2d: 2, nn.AvgPool3d: 3},
    functions=_by_dims(
        *(F.avg_pool1d, F.avg_pool2d, F.avg_pool3d),
        *(aten.avg_pool1d.default, aten.avg_pool2d.default, aten.avg_pool3d.default),
        names=_POOL_NAMES,
    ),
    defaults={"kernel_size": None, "stride": None, "padding": 0, "ceil_mode": False}
    | {"count_include_pad": True, "divisor_override": None},
    per_axis=frozenset({"kernel_size", "stride", "padding"}),
)
"""A mean over windows."""

_UPSAMPLE_NAMES = ("input", "output_size", "scale_factors")
_INTERPOLATE_NAMES = ("input", "size", "scale_factor", "mode", "align_corners", "recompute_scale_factor", "antialias")
UPSAMPLE = Operator(
    modules={nn.UpsamplingNearest2d: 2, nn.Upsample: 0},
    functions={F.interpolate: (_INTERPOLATE_NAMES, 0)}
    | _by_dims(*(getattr(aten, f"upsample_nearest{i}d").vec for i in (1, 2, 3)), names=_UPSAMPLE_NAMES)
    | _by_dims(*(getattr(aten, f"_upsample_nearest_exact{i}d").vec for i in (1, 2, 3)), names=_UPSAMPLE_NAMES),
    defaults={"size": None, "scale_factor": None, "mode": "nearest"},
)
"""Values repeated or interpolated between to a larger size, along all axes but batch and channels."""

PAD = Operator(
    modules={nn.ZeroPad1d: 1, nn.ZeroPad2d: 2, nn.ZeroPad3d: 3}
    | {nn.ConstantPad1d: 1, nn.ConstantPad2d: 2, nn.ConstantPad3d: 3},
    functions={
        F.pad: (("input", "pad", "mode", "value"), 0),
        aten.pad.default: (("self", "pad", "mode", "value"), 0),
        aten.constant_pad_nd.default: (("self", "pad", "value"), 0),
    },
    defaults={"pad": None, "mode": "constant", "value": 0},
    attributes={"pad": "padding"},
)
"""Values put around others: `pad` is by how much on either side of each axis, the last axis first."""

DROPOUT = Operator(
    modules={nn.Dropout: 0},
    functions={F.dropout: (("input", "p", "training", "inplace"), 0)}
    | dict.fromkeys((torch.dropout, aten.dropout.default), (("input", "p", "train"), 0)),
    defaults={"p": 0.5, "training": True, "inplace": False},
)
"""Values set to zero at random, in training."""


@dataclass(frozen=True)
class Attention:
    """A call of scaled dot-product attention with all of its arguments."""

    node: Node
    query: Node
    key: Node
    value: Node
    attn_mask: Any = None
    dropout_p: Any = 0.0
    is_causal: Any = False
    scale: Any = None
    enable_gqa: Any = False

    def write(self, **changes: Any) -> Attention:
        """Let the node be called with other arguments; what has its default is left out."""
        new = replace(self, **changes)
        self.node.args = (new.query, new.key, new.value)
        settings = [(f.name, getattr(new, f.name), f.default) for f in fields(self)[4:]]
        self.node.kwargs = {name: value for name, value, default in settings if value != default}
        return new


_ATTENTION: set[Any] = {F.scaled_dot_product_attention, aten.scaled_dot_product_attention.default}
_ATTENTION_NAMES = tuple(f.name for f in fields(Attention))[1:]


def match_attention(node: Node) -> Attention | None:
    """The attention that a node computes; None where it is something else."""
    if node.op != "call_function" or node.target not in _ATTENTION:
        return None
    given = bind(node, _ATTENTION_NAMES)
    if given is None or not all(isinstance(given.get(name), Node) for name in _ATTENTION_NAMES[:3]):
        raise Refuse("its arguments are not understood")
    return Attention(node, **given)


@dataclass(frozen=True)
class Division:
    """`numerator / divisor` with a constant divisor; `product` is what multiplies in the same manner."""

    node: Node
    numerator: Node
    divisor: int | float
    product: Callable[..., Any] | str


_PRODUCTS: dict[Any, Any] = {operator.truediv: operator.mul, operator.itruediv: operator.imul, "__truediv__": "__mul__"}
_PRODUCTS |= dict.fromkeys((torch.div, torch.divide, torch.true_divide), torch.mul)
_PRODUCTS |= dict.fromkeys((torch.Tensor.div, torch.Tensor.true_divide), torch.Tensor.mul)
_PRODUCTS |= dict.fromkeys(("div", "divide", "true_divide"), "mul")
_PRODUCTS |= dict.fromkeys(("div_", "divide_", "true_divide_"), "mul_")
_PRODUCTS |= dict.fromkeys((aten.div.Tensor, aten.true_divide.Tensor), aten.mul.Tensor)
_PRODUCTS |= {aten.div.Scalar: aten.mul.Scalar, aten.div_.Tensor: aten.mul_.Tensor, aten.div_.Scalar: aten.mul_.Scalar}
_ROUNDED: set[Any] = {aten.div.Tensor_mode, aten.div.Scalar_mode, torch.floor_divide, operator.floordiv, "floor_divide"}


def match_division(node: Node) -> Division | None:
    """A true division of a tensor by a Python number."""
    if node.op not in ("call_function", "call_method"):
        return None
    if node.target in _ROUNDED:
        raise Refuse("it rounds its quotient")
    if node.target not in _PRODUCTS:
        return None
    given = dict(node.kwargs)
    values = [*node.args, *(given.pop(k) for k in ("other", "value") if k in given)]
    if given.pop("rounding_mode", None) is not None:
        raise Refuse("it rounds its quotient")
    if given or len(values) != 2:
        raise Refuse("its arguments are not understood")
    numerator, divisor = values
    if not isinstance(numerator, Node):
        raise Refuse("a number is divided by a tensor, not the other way round")
    if isinstance(divisor, bool) or not isinstance(divisor, int | float):
        raise Refuse("its divisor is not a constant")
    if is_number(numerator):
        raise Refuse("it divides Python numbers (sizes), where rounding matters")
    return Division(node, numerator, divisor, _PRODUCTS[node.target])
