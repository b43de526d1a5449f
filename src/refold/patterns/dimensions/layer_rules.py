"""What the values of layers follow: called as modules, functions or operators, they do the same."""

from __future__ import annotations

from typing import Any

from torch import nn
from torch.fx import Node

from refold.graph.arguments import argument, per_axis
from refold.patterns.dimensions.sized_calls import (
    MIXES,
    RULES,
    Dims,
    Followed,
    NotUnderstood,
    SizedCall,
    join,
    recorded_sizes,
)
from refold.rewrite.operators import CONVOLUTION, DROPOUT, LINEAR

_ELEMENTWISE = (
    nn.Identity, nn.GELU, nn.ReLU, nn.ReLU6, nn.SiLU, nn.Tanh, nn.Sigmoid, nn.Hardtanh, nn.Hardswish, nn.Hardsigmoid,
    nn.LeakyReLU, nn.Mish, nn.ELU, nn.CELU, nn.SELU, nn.Softplus, nn.Softsign, nn.LogSigmoid, nn.Threshold,
    nn.Tanhshrink, nn.Hardshrink, nn.Softshrink, *DROPOUT.modules,
)  # fmt: skip
_POOLS: dict[type[nn.Module], int] = {nn.Upsample: 0}
_POOLS |= {cls: i + 1 for name in ("AvgPool", "MaxPool", "AdaptiveAvgPool", "AdaptiveMaxPool")
           for i, cls in enumerate(getattr(nn, f"{name}{n}d") for n in (1, 2, 3))}  # fmt: skip


def followed_by_module(call: SizedCall, module: nn.Module) -> Followed:
    """What the value of a module of torch follows in its input."""
    inputs = call.node.all_input_nodes
    if len(inputs) != 1 or len(call.node.args) + len(call.node.kwargs) != 1:
        raise NotUnderstood
    return {inputs[0]: _of_module(call, module, inputs[0])}


def _of_module(call: SizedCall, module: Any, given: Node) -> Dims:
    kind, rank = type(module), call.rank
    if kind in _ELEMENTWISE:
        return call.kept(given, range(rank))
    if kind in LINEAR.modules:
        return call.kept(given, [*range(rank - 1), MIXES])
    if kind is nn.Embedding and module.max_norm is None:
        return call.kept(given, [*range(rank - 1), None])
    if kind in (nn.LayerNorm, nn.RMSNorm):
        return normed(call, given, len(module.normalized_shape))
    if kind in (nn.Softmax, nn.LogSoftmax) and module.dim is not None:
        return mixed_along(call, given, [module.dim])
    if kind in CONVOLUTION.modules:
        settings = [getattr(module, name) for name in ("kernel_size", "stride", "padding")]
        return convolved(call, given, CONVOLUTION.modules[kind], *settings)
    if isinstance(module, nn.modules.batchnorm._BatchNorm):
        return batch_normed(call, given, module.training or module.running_mean is None)
    if kind is nn.GroupNorm:
        return call.kept(given, [0, *[MIXES] * (rank - 1)])
    if kind in _POOLS:
        return call.kept(given, _outside(rank, _POOLS[kind]))
    raise NotUnderstood


def _outside(rank: int, axes: int) -> list[Any]:
    """All dimensions but the axes of space (0: all behind the second) follow."""
    axes = axes or rank - 2
    return [*range(rank - axes), *[MIXES] * axes]


def mixed_along(call: SizedCall, given: Any, dims: Any) -> Dims:
    """All dimensions but some follow those of one operand."""
    mixed = {d % call.rank for d in dims}
    return call.kept(given, [MIXES if d in mixed else d for d in range(call.rank)])


def normed(call: SizedCall, given: Any, over: int) -> Dims:
    """A norm over the last dimensions."""
    return call.kept(given, [*range(call.rank - over), *[MIXES] * over])


def batch_normed(call: SizedCall, given: Any, over_batch: bool) -> Dims:
    """A batch norm: element by element with recorded statistics, and over all but the channels without."""
    return call.kept(given, [d if d == 1 or not over_batch else MIXES for d in range(call.rank)])


def convolved(call: SizedCall, given: Any, axes: int, kernel: Any, stride: Any, padding: Any) -> Dims:
    """A convolution: along an axis where the kernel covers one element, and takes each, it follows."""
    dims: list[Any] = [*range(call.rank - axes - 1), MIXES]
    if padding == "valid" or (padding == "same" and all(k == 1 for k in per_axis(kernel, axes))):
        padding = 0
    if isinstance(padding, str):
        return call.kept(given, [*dims, *[MIXES] * axes])
    settings = zip(*(per_axis(value, axes) for value in (kernel, stride, padding)), strict=True)
    alone = [one == (1, 1, 0) for one in settings]
    return call.kept(given, dims + [len(dims) + i if single else MIXES for i, single in enumerate(alone)])


# --- functions and operators ---------------------------------------------------------------------------------------


def _rest(call: SizedCall, given: Any, dims: Dims) -> Followed:
    """The same, and that the other tensors (weights) are not followed."""
    others = {n: (MIXES,) * call.rank for n in call.node.all_input_nodes if recorded_sizes(n) is not None}
    return others | {given: dims}


def _first(call: SizedCall) -> Any:
    return argument(call.node, 0, "input")


@RULES("linear")
def _linear(call: SizedCall) -> Followed:
    given, weight = _first(call), argument(call.node, 1, "weight")
    bias = argument(call.node, 2, "bias")
    if len({given, weight, bias} - {None}) < (2 if bias is None else 3) or len(call.sizes_of(weight)) != 2:
        raise NotUnderstood
    found = {given: call.kept(given, [*range(call.rank - 1), MIXES])}
    found |= call.follows(weight, bias, dims=(None,) * (call.rank - 1) + (0,))
    return found


@RULES("embedding")
def _embedding(call: SizedCall) -> Followed:
    """ATen takes the table first, torch.nn.functional the indices; the table alone is of real numbers."""
    if len(call.node.args) < 2:
        raise NotUnderstood
    if getattr(call.node.target, "__module__", "") == "torch.nn.functional":
        indices, table = call.node.args[:2]
    else:
        table, indices = call.node.args[:2]
    return join_two(
        (table, (None,) * (call.rank - 1) + (1,)), (indices, call.kept(indices, [*range(call.rank - 1), None]))
    )


def join_two(*parts: tuple[Any, Dims]) -> Followed:
    """What two different operands say."""
    nodes = [node for node, _ in parts]
    if len(set(nodes)) < len(nodes):
        raise NotUnderstood
    return dict(parts)


@RULES("layer_norm", "rms_norm")
def _layer_norm(call: SizedCall) -> Followed:
    shape = argument(call.node, 1, "normalized_shape")
    over = len(shape) if isinstance(shape, list | tuple) else 1
    found = _rest(call, _first(call), normed(call, _first(call), over))
    for index, name in ((2, "weight"), (3, "bias")):
        found |= call.follows(argument(call.node, index, name), dims=(None,) * (call.rank - over) + tuple(range(over)))
    return found


@RULES("batch_norm")
def _batch_norm(call: SizedCall) -> Followed:
    is_functional = getattr(call.node.target, "__module__", "") == "torch.nn.functional"
    training = argument(call.node, 5, "training", False)
    no_statistics = argument(call.node, 1 if is_functional else 3, "running_mean") is None
    given = _first(call)
    return _rest(call, given, batch_normed(call, given, training is not False or no_statistics))


@RULES("group_norm", "native_group_norm", "instance_norm")
def _group_norm(call: SizedCall) -> Followed:
    return _rest(call, _first(call), call.kept(_first(call), [0, *[MIXES] * (call.rank - 1)]))


@RULES("conv1d", "conv2d", "conv3d")
def _convolution(call: SizedCall) -> Followed:
    given, weight = _first(call), call.sizes_of(argument(call.node, 1, "weight"))
    stride, padding = (
        argument(call.node, index, name, value) for index, name, value in ((3, "stride", 1), (4, "padding", 0))
    )
    return _rest(call, given, convolved(call, given, len(weight) - 2, list(weight[2:]), stride, padding))


@RULES(
    *(f"{pool}{n}d" for pool in ("avg_pool", "max_pool", "adaptive_avg_pool", "adaptive_max_pool") for n in (1, 2, 3))
)
def _pool(call: SizedCall) -> Followed:
    axes = int(str(getattr(call.node.target, "__name__", call.node.target)).split(".")[0][-2])
    return _rest(call, _first(call), call.kept(_first(call), _outside(call.rank, axes)))


@RULES("scaled_dot_product_attention")
def _attention(call: SizedCall) -> Followed:
    query, key, value = (argument(call.node, index, name) for index, name in enumerate(("query", "key", "value")))
    mask = argument(call.node, 3, "attn_mask")
    lead = call.rank - 2
    parts: list[Followed] = []
    for operand, last in ((query, (lead, None)), (key, (None, None)), (value, (None, lead + 1))):
        given = call.sizes_of(operand)
        if len(given) != call.rank:
            raise NotUnderstood
        parts.append({operand: (*_leading(call, operand, lead), *last)})
    if isinstance(mask, Node):
        keys = call.sizes_of(key)[-2]
        parts.append({mask: (*call.broadcast(mask, (*call.sizes[:-1], keys))[:-1], None)})
    return join(parts)


def _leading(call: SizedCall, operand: Any, lead: int) -> Dims:
    return call.broadcast(operand, (*call.sizes[:lead], *call.sizes_of(operand)[lead:]))[:lead]
