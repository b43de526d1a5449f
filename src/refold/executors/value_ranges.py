"""Between which numbers the values of an exported program lie, for inputs between given bounds.

Interval arithmetic over ATen operators, and plain evaluation of what depends on no input. What layers with weights make
of finite numbers counts as finite and at most `DATA`: numbers of the data are taken not to overflow. An operator that
has no rule may give anything.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Iterator, Mapping
from itertools import product
from typing import Any, NamedTuple, Protocol

import torch
from torch.fx import Graph, Node
from torch.fx.node import map_aggregate

from refold.graph.arguments import argument
from refold.graph.targets import name_of
from refold.patterns.rule_table import RuleTable

DATA = 1e6
_SMALL = 2**20  # elements: larger constants are not evaluated


class Program(Protocol):
    """An exported program, or the same at other sizes."""

    @property
    def graph(self) -> Graph: ...
    @property
    def graph_signature(self) -> Any: ...
    @property
    def state_dict(self) -> dict[str, Any]: ...
    @property
    def constants(self) -> dict[str, Any]: ...


class Range(NamedTuple):
    """The least and the greatest number of a value, and whether all are finite."""

    low: float
    high: float
    finite: bool = True

    def within(self, low: float, high: float) -> bool:
        """Whether all lie between two numbers."""
        return self.finite and low <= self.low and self.high <= high


ANYTHING = Range(-math.inf, math.inf, False)
Get = Callable[[Any], Range]


class ValueRanges:
    """The ranges of all values of a program. `inputs` gives those of its inputs, or the tensors that they are."""

    def __init__(
        self,
        exported: Program,
        inputs: Mapping[str, Range | torch.Tensor],
        held: dict[str, Range] | None = None,
    ) -> None:
        """`held` keeps the ranges of weights, which take the longest, for the same program with other inputs."""
        self._exported, self._inputs, self._held = exported, inputs, {} if held is None else held
        self._ranges: dict[Node, Any] = {}
        self.known: dict[Node, Any] = {}
        """What depends on no input, evaluated."""
        self.unrounded: dict[Node, Range] = {}
        """Ranges of integers as they would be if their type had no end."""
        self._sharing: dict[Node, list[Node]] = {}
        for node in exported.graph.nodes:
            if node.op != "output":
                self._ranges[node] = self._find(node)
                self._share(node)

    def of(self, value: Any) -> Range:
        """The range of a node, of a number, or of everything in a list."""
        if isinstance(value, Node):
            found = self._ranges[value]
            return found if isinstance(found, Range) else hull(found)
        if isinstance(value, torch.Tensor):
            return range_of(value)
        if isinstance(value, list | tuple):
            return hull([self.of(part) for part in value if part is not None])
        if isinstance(value, bool | int | float):
            return Range(value, value, math.isfinite(value))
        return ANYTHING

    def _find(self, node: Node) -> Any:
        if node.op == "placeholder":
            return self._of_input(node)
        known = self._evaluated(node)
        if known is not None:
            self.known[node] = known
            return range_of(known)
        recorded = node.meta.get("val")
        if node.target is operator.getitem:
            parts = self._ranges[node.args[0]]  # type: ignore[index]
            return parts[node.args[1]] if isinstance(parts, list) else parts  # type: ignore[index]
        rule = rule_for(node)
        if rule is None:
            return _of_type(recorded)
        try:
            found = rule(node, self.of)
        except (ArithmeticError, AttributeError, LookupError, RuntimeError, TypeError, ValueError):
            return _of_type(recorded)  # an unusual form of a call
        if not isinstance(found, Range):
            return found
        return self._clipped(node, found, recorded)

    def _share(self, node: Node) -> None:
        """What is written into a value changes all that may share its memory."""
        first = node.args[0] if node.args and isinstance(node.args[0], Node) else None
        group = self._sharing.get(first) if first is not None and shares_memory(node) else None
        self._sharing[node] = group = [] if group is None else group
        group.append(node)
        if not writes(node):
            return
        written = hull([self.of(other) for other in group])
        self._ranges |= dict.fromkeys(group, written)
        if node not in self.known:
            for other in group:
                self.known.pop(other, None)

    def _of_input(self, node: Node) -> Range:
        given = self._inputs.get(node.name)
        if isinstance(given, Range):
            return given
        tensor = given if given is not None else held_by(self._exported, node)
        if tensor is None:
            return _of_type(node.meta.get("val"))
        if tensor.numel() <= _SMALL:
            self.known[node] = tensor.detach().clone()  # the program may write into it
        if given is not None:
            return range_of(tensor)
        if node.name not in self._held:
            self._held[node.name] = range_of(tensor)
        return self._held[node.name]

    def _evaluated(self, node: Node) -> Any:
        recorded = node.meta.get("val")
        if isinstance(recorded, int):  # a size
            return recorded
        if node.op != "call_function" or any(n not in self.known for n in node.all_input_nodes):
            return None
        if not isinstance(recorded, torch.Tensor) or not all(type(size) is int for size in recorded.shape):
            return None  # of a size that depends on values
        if recorded.numel() > _SMALL:
            return None
        if torch.Tag.nondeterministic_seeded in getattr(node.target, "tags", ()):
            return None
        try:
            with torch.no_grad():
                args, kwargs = map_aggregate((node.args, node.kwargs), lambda n: self.known.get(n, n))  # type: ignore
                return node.target(*args, **kwargs)  # type: ignore[operator]
        except (ArithmeticError, LookupError, RuntimeError, TypeError, ValueError):
            return None

    def _clipped(self, node: Node, found: Range, recorded: Any) -> Range:
        """The range in the recorded type: floats overflow to infinity there, integers start again."""
        if not isinstance(recorded, torch.Tensor):
            return found
        if recorded.dtype == torch.bool:
            return Range(0, 1)
        if recorded.is_floating_point():
            most = torch.finfo(recorded.dtype).max
            return found if -most <= found.low and found.high <= most else found._replace(finite=False)
        if recorded.is_complex():
            return found
        self.unrounded[node] = found
        whole = _of_type(recorded)
        return found if found.within(whole.low, whole.high) else whole


def held_by(exported: Program, node: Node) -> torch.Tensor | None:
    """The parameter, buffer or constant that a placeholder stands for; None for an input."""
    signature = exported.graph_signature
    name = signature.inputs_to_parameters.get(node.name) or signature.inputs_to_buffers.get(node.name)
    if name is not None:
        found = exported.state_dict.get(name)
        return found if found is not None else exported.constants.get(name)
    name = signature.inputs_to_lifted_tensor_constants.get(node.name)
    return None if name is None else exported.constants.get(name)


def range_of(value: Any) -> Any:
    """The range of a tensor; of several, their ranges."""
    if isinstance(value, list | tuple):
        return [range_of(part) for part in value]
    if not isinstance(value, torch.Tensor) or value.is_complex() or value.layout is not torch.strided:
        return ANYTHING
    if value.numel() == 0:
        return Range(0, 1)
    if value.dtype == torch.bool:
        return Range(int(value.all()), int(value.any()))
    low, high = (end.item() for end in value.detach().aminmax())
    finite = math.isfinite(low) and math.isfinite(high)
    return Range(low, high) if finite else ANYTHING


def hull(parts: Any) -> Range:
    """The least range that holds some others."""
    lows, highs, finite = zip(*parts, strict=True)
    return Range(min(lows), max(highs), all(finite))


def _of_type(recorded: Any) -> Range:
    if isinstance(recorded, torch.Tensor):
        if recorded.dtype == torch.bool:
            return Range(0, 1)
        if not recorded.is_floating_point() and not recorded.is_complex():
            info = torch.iinfo(recorded.dtype)
            return Range(info.min, info.max)
        return ANYTHING
    return Range(-(2**63), 2**63 - 1) if isinstance(recorded, torch.SymInt) else ANYTHING


# --- operators -------------------------------------------------------------------------------------------------------

_RULES: RuleTable[Callable[[Node, Get], Any]] = RuleTable()


def rule_for(node: Node) -> Callable[[Node, Get], Any] | None:
    """What is known of what a node makes of its operands; writing it into the first one makes no difference."""
    return _RULES.named(bare_name(node))


def bare_name(node: Node) -> str:
    """The name of an operator, without the mark of those that write into their first operand."""
    name = name_of(node)
    return name[:-1] if writes(node) else name


def writes(node: Node) -> bool:
    """Whether an operator writes into its first operand."""
    name = name_of(node)
    return name.endswith("_") and not name.endswith("__")


def shares_memory(node: Node) -> bool:
    """Whether the result may lie in the memory of the first operand."""
    return writes(node) or bare_name(node) in MOVING or bare_name(node) in ("to", "type_as", "getitem")


def operands(node: Node) -> Iterator[Node]:
    """The tensors that a node reads."""
    return (n for n in node.all_input_nodes if isinstance(n.meta.get("val"), torch.Tensor))


MOVING = frozenset(
    {
        *("view", "_unsafe_view", "reshape", "expand", "expand_as", "unsqueeze", "squeeze", "transpose", "permute"),
        *("flatten", "unflatten", "slice", "select", "narrow", "split", "split_with_sizes", "chunk", "unbind", "t"),
        *("numpy_T", "mT", "movedim", "swapaxes", "clone", "contiguous", "alias", "detach", "detach_", "dropout"),
        *("lift_fresh_copy", "repeat", "tile", "flip", "roll", "pixel_shuffle", "pixel_unshuffle", "diagonal"),
        *("unfold", "view_as", "reshape_as", "broadcast_to", "tensor_split", "feature_dropout", "alpha_dropout"),
        *("unsafe_split", "unsafe_chunk", "squeeze_copy", "cat", "concat", "concatenate", "stack", "hstack", "vstack"),
        *("expand_copy", "view_copy", "meshgrid", "broadcast_tensors", "rot90", "as_strided"),
    }
)
"""What only moves elements: it computes nothing that an engine could compute otherwise."""

_TAKING = (
    *("index", "index_select", "gather", "masked_select", "sort", "amax", "amin", "median", "max_pool1d", "max_pool2d"),
    *("max_pool3d", "adaptive_max_pool1d", "adaptive_max_pool2d", "avg_pool1d", "avg_pool2d", "adaptive_avg_pool1d"),
    *("adaptive_avg_pool2d", "mean", "upsample_nearest1d", "upsample_nearest2d", "upsample_bilinear2d", "take"),
    *("upsample_linear1d", "unsafe_index", "_unsafe_index", "repeat_interleave"),
    *("index_put", "scatter", "index_copy", "index_fill", "masked_scatter", "slice_scatter", "select_scatter"),
)


@_RULES(*MOVING, *_TAKING)
def _taken(node: Node, get: Get) -> Any:
    """Elements of the first operand, or averages of them; where something is written into it, of that as well."""
    if (
        "scatter" in bare_name(node)
        or "put" in bare_name(node)
        or "copy" in bare_name(node)
        or "fill" in bare_name(node)
    ):
        return hull([get(n) for n in operands(node)] + [get(a) for a in node.args if isinstance(a, int | float)])
    found = get(node.args[0])
    return found if "pool" not in bare_name(node) or "max" in bare_name(node) else hull([found, Range(0, 0)])


@_RULES("topk", "max", "min", "sort", "cummax", "cummin", "kthvalue")
def _with_indices(node: Node, get: Get) -> Any:
    """(values, indices) of an axis; the values alone where there is no axis."""
    values = get(node.args[0])
    recorded = node.meta.get("val")
    if isinstance(recorded, torch.Tensor):
        others = [get(a) for a in node.args[1:2]]
        return hull([values, *others])
    sizes = node.args[0].meta["val"].shape  # type: ignore[union-attr]
    return [values, Range(0, max(1, *sizes) - 1)]


@_RULES("argmax", "argmin", "argsort", "nonzero", "nonzero_numpy")
def _places(node: Node, get: Get) -> Range:
    sizes = node.args[0].meta["val"].shape  # type: ignore[union-attr]
    whole = argument(node, 1, "dim") is None
    return Range(0, (math.prod(sizes) if whole and "arg" in bare_name(node) else max(1, *sizes)) - 1)


@_RULES("full", "full_like", "new_full")
def _filled(node: Node, get: Get) -> Range:
    return get(argument(node, 2 if bare_name(node) == "new_full" else 1, "fill_value"))


@_RULES("zeros", "zeros_like", "new_zeros", "ones", "ones_like", "new_ones", "one_hot", "bool", "empty_permuted")
def _of_one(node: Node, get: Get) -> Range:
    return Range(0, 1)


_FALSE_OR_TRUE = (
    *("eq", "ne", "lt", "le", "gt", "ge", "isnan", "isinf", "isfinite", "logical_not", "logical_and", "logical_or"),
    *("logical_xor", "any", "all", "__and__", "__or__", "__xor__", "bitwise_and", "bitwise_or", "bitwise_xor"),
    *("bitwise_not", "isin", "signbit"),
)


@_RULES(*_FALSE_OR_TRUE)
def _logical(node: Node, get: Get) -> Range:
    return _of_type(node.meta.get("val"))


_SCALES = {"sigmoid": (0.0, 1.0), "softmax": (0.0, 1.0), "_softmax": (0.0, 1.0), "hardsigmoid": (0.0, 1.0)}
_SCALES |= dict.fromkeys(("tanh", "sin", "cos", "erf", "sign", "hardtanh", "sgn"), (-1.0, 1.0))
_SCALES |= {"relu6": (0.0, 6.0), "atan": (-2.0, 2.0), "softmin": (0.0, 1.0)}


@_RULES(*(name for name in _SCALES if name != "hardtanh"))
def _bounded(node: Node, get: Get) -> Range:
    return Range(*_SCALES[bare_name(node)], get(node.args[0]).finite)


@_RULES("relu", "tril", "triu", "leaky_relu", "prelu", "hardtanh", "masked_fill", "constant_pad_nd", "pad", "where")
def _or_other(node: Node, get: Get) -> Range:
    """Elements of the first operand, or something between it and zero, or what is filled in."""
    name = bare_name(node)
    if name == "where":
        condition, one, other = get(node.args[0]), get(node.args[1]), get(node.args[2])
        return one if condition.low == 1 else other if condition.high == 0 else hull([one, other])
    if name == "relu":
        low, high, finite = get(node.args[0])
        return Range(max(low, 0), max(high, 0), finite)
    if name == "hardtanh":
        return Range(argument(node, 1, "min_val", -1), argument(node, 2, "max_val", 1), get(node.args[0]).finite)
    if name == "masked_fill":
        kept, filled = get(node.args[0]), get(node.args[2])
        return kept if get(node.args[1]).high == 0 else hull([kept, filled])
    if name in ("constant_pad_nd", "pad"):
        value = node.args[2] if name == "constant_pad_nd" and len(node.args) > 2 else argument(node, 3, "value")
        return hull([get(node.args[0]), get(value or 0)])
    return hull([get(node.args[0]), Range(0, 0)])


@_RULES("clamp", "clamp_min", "clamp_max", "clip")
def _clamped(node: Node, get: Get) -> Range:
    low, high, finite = get(node.args[0])
    name = bare_name(node)
    least = None if name == "clamp_max" else argument(node, 1, "min")
    most = argument(node, 1, "max") if name == "clamp_max" else argument(node, 2, "max") if "min" not in name else None
    if least is not None:
        low, high = (max(end, get(least).low) for end in (low, high))
    if most is not None:
        low, high = (min(end, get(most).high) for end in (low, high))
    return Range(low, high, finite)


@_RULES("maximum", "minimum")
def _chosen(node: Node, get: Get) -> Range:
    pick = max if bare_name(node) == "maximum" else min
    (a, b, first), (c, d, second) = get(node.args[0]), get(node.args[1])
    return Range(pick(a, c), pick(b, d), first and second)


@_RULES("floor", "ceil", "round", "trunc", "frac", "fix")
def _rounded(node: Node, get: Get) -> Range:
    low, high, finite = get(node.args[0])
    return Range(low - 1, high + 1, finite)


@_RULES("to", "_to_copy", "type_as", "float", "long", "int", "double", "half", "bfloat16", "scalar_tensor", "item")
def _cast(node: Node, get: Get) -> Range:
    """A float that is not finite after all becomes any integer: what is computed in floats bounds no index."""
    source = getattr(node.args[0], "meta", {}).get("val")
    recorded = node.meta.get("val")
    from_float = isinstance(source, torch.Tensor) and source.is_floating_point()
    is_whole = isinstance(recorded, torch.Tensor) and not recorded.is_floating_point()
    return _of_type(recorded) if from_float and is_whole else get(node.args[0])


_ARITHMETIC: dict[str, Callable[[float, float, float], float]] = {
    "add": lambda a, b, alpha: a + b * alpha,
    "sub": lambda a, b, alpha: a - b * alpha,
    "rsub": lambda a, b, alpha: b - a * alpha,
    "mul": lambda a, b, alpha: a * b,
    "neg": lambda a, b, alpha: -a,
}


@_RULES(*_ARITHMETIC)
def _linear(node: Node, get: Get) -> Range:
    name = bare_name(node)
    a, b, alpha = get(node.args[0]), get(argument(node, 1, "other", 0)), get(argument(node, 2, "alpha", 1))
    ends = [_ARITHMETIC[name](*end) for end in product(a[:2], b[:2], alpha[:2])]
    low, high = min(ends), max(ends)
    if name == "mul" and node.args[0] is node.args[1]:
        low = max(0, low)
    return Range(low, high, a.finite and b.finite) if low == low and high == high else ANYTHING


@_RULES("div", "divide", "true_divide", "floor_divide", "reciprocal")
def _quotient(node: Node, get: Get) -> Range:
    a, b = get(node.args[0]), get(argument(node, 1, "other"))
    if bare_name(node) == "reciprocal":
        a, b = Range(1, 1), a
    if b.low <= 0 <= b.high:
        return _of_type(node.meta.get("val"))
    rounding = 0 if bare_name(node) != "floor_divide" and node.kwargs.get("rounding_mode") is None else 1
    ends = [x / y for x, y in product(a[:2], b[:2])]
    return Range(min(ends) - rounding, max(ends) + rounding, a.finite and b.finite)


@_RULES("remainder", "fmod", "__mod__")
def _rest(node: Node, get: Get) -> Range:
    a, b = get(node.args[0]), get(node.args[1])
    most = max(abs(b.low), abs(b.high))
    low = 0 if b.low > 0 and (a.low >= 0 or bare_name(node) != "fmod") else -most
    return Range(low, most, a.finite and b.finite and not b.low <= 0 <= b.high)


@_RULES("abs", "square", "sqrt", "rsqrt", "log", "log2", "log10", "log1p", "exp", "exp2", "expm1", "pow")
def _curve(node: Node, get: Get) -> Range:
    """What grows with the size of its operand; not finite where it is called outside its domain."""
    name, (low, high, finite) = bare_name(node), get(node.args[0])
    least, most = (0, max(abs(low), abs(high))) if low <= 0 <= high else sorted((abs(low), abs(high)))
    if name == "abs":
        return Range(least, most, finite)
    if name == "square" or (name == "pow" and node.args[1] in (2, 2.0)):
        return Range(least * least, most * most, finite)
    if name == "sqrt":
        return Range(math.sqrt(max(low, 0)), math.sqrt(max(high, 0)), finite and low >= 0)
    if name == "rsqrt":
        return Range(high**-0.5, low**-0.5, finite) if low > 0 else ANYTHING
    if name.startswith("log"):
        shift = 1 if name == "log1p" else 0
        if low + shift <= 0:
            return ANYTHING
        ends = [math.log(end + shift) / math.log(base) for end in (low, high) for base in (2, math.e, 10)]
        return Range(min(ends), max(ends), finite)
    if name == "pow":
        return _power(node, low, high, finite)
    base = 2.0 if name == "exp2" else math.e
    return Range(-1.0 if name == "expm1" else 0.0, base ** min(high, 700), finite)


def _power(node: Node, low: float, high: float, finite: bool) -> Range:
    exponent = node.args[1]
    if not isinstance(exponent, int | float) or (low < 0 and exponent != int(exponent)) or (exponent < 0 and low <= 0):
        return ANYTHING
    ends = [float(low) ** exponent, float(high) ** exponent, *([0.0] if low <= 0 <= high else [])]
    return Range(min(ends), max(ends), finite)


@_RULES("sum", "cumsum")
def _total(node: Node, get: Get) -> Range:
    low, high, finite = get(node.args[0])
    source, made = node.args[0].meta["val"], node.meta["val"]  # type: ignore[union-attr]
    along = argument(node, 1, "dim")
    steps = source.shape[along] if isinstance(along, int) and source.shape else 1
    count = source.numel() // max(1, made.numel()) if bare_name(node) == "sum" else max(1, steps)
    return Range(min(low, low * count), max(high, high * count), finite)


_LAYERS = (
    *("linear", "matmul", "mm", "bmm", "mv", "addmm", "baddbmm", "einsum", "conv1d", "conv2d", "conv3d", "bilinear"),
    *(
        "conv_transpose1d",
        "conv_transpose2d",
        "conv_transpose3d",
        "convolution",
        "batch_norm",
        "layer_norm",
        "rms_norm",
    ),
    *("group_norm", "instance_norm", "native_layer_norm", "scaled_dot_product_attention", "gelu", "silu", "hardswish"),
    *("mish", "elu", "selu", "celu", "log_softmax", "_log_softmax", "logsumexp", "glu", "var", "std", "dot", "outer"),
    *("cumprod", "prod", "upsample_bicubic2d", "lstm", "gru", "rnn_tanh", "rnn_relu", "tanhshrink", "softsign", "lerp"),
    *(
        "index_add",
        "scatter_add",
        "addcmul",
        "logaddexp",
        "softshrink",
        "hardshrink",
        "asinh",
        "sinc",
        "atan2",
        "_fused",
    ),
    *(
        "scatter_reduce",
        "threshold",
        "embedding",
        "_native_batch_norm_legit_no_training",
        "fused_rms_norm",
        "diff",
        "rms_norm",
    ),
)
_NOT_NEGATIVE = ("softplus", "linalg_vector_norm", "norm", "cdist", "pairwise_distance")


@_RULES(*_LAYERS, *_NOT_NEGATIVE)
def _layer(node: Node, get: Get) -> Range:
    """Numbers of the data: finite where all operands are."""
    finite = all(get(n).finite for n in operands(node) if n.meta["val"].is_floating_point())
    if bare_name(node) == "embedding":
        return get(node.args[0])
    recorded = node.meta.get("val")
    if isinstance(recorded, torch.Tensor) and not recorded.is_floating_point():
        return _of_type(recorded)
    most = DATA
    if isinstance(recorded, torch.Tensor) and recorded.dtype == torch.float16:
        most = 1e4
    return Range(0.0 if bare_name(node) in _NOT_NEGATIVE else -most, most, finite)


@_RULES("gelu", "silu", "hardswish", "mish", "logsigmoid", "log_sigmoid")
def _gated(node: Node, get: Get) -> Range:
    """x times something from 0 to 1, which falls below zero by less than 1."""
    low, high, finite = get(node.args[0])
    return Range(max(low, -1.0), max(high, 0.0), finite)


@_RULES("arange", "linspace", "eye")
def _evenly(node: Node, get: Get) -> Range:
    return hull([get(a) for a in node.args if isinstance(a, int | float | Node)] + [Range(0, 1)])
