"""Random small models of every layer kind of torch.nn, in every arrangement: one after the other, several on one input,
on a learned query, with shared weights, called twice, as functions.

(Annotations are real classes here, not strings: torch cannot unpickle the graph of a model whose annotations are.)
"""

import copy
import random
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.utils import prune

from refold.examples import Example, seeded

Shape = tuple[int, ...]
Draw = Callable[[random.Random, Shape], nn.Module]
"""Makes a layer for a value of a shape (batch, channels, space)."""
_MOST_NUMBERS = 4000
_TRIES = 40
SIZES: dict[int, Shape] = {2: (3, 4), 3: (2, 4, 6), 4: (2, 4, 5, 6), 5: (2, 4, 3, 4, 4)}
"""The shapes that models begin with."""


# --- layers --------------------------------------------------------------------------------------------------------


def _of(name: str, dims: int) -> Any:
    return getattr(nn, f"{name}{dims}d")


def _groups(rng: random.Random, *channels: int) -> int:
    return rng.choice([g for g in range(1, min(channels) + 1) if all(c % g == 0 for c in channels)])


def _convolution(rng: random.Random, shape: Shape) -> nn.Module:
    dims, inner, outer = len(shape) - 2, shape[1], rng.choice([1, 2, 4, 6, 8])
    kernel = tuple(rng.choice([1, 2, 3]) for _ in range(dims))
    mode = rng.choice(["zeros", "zeros", "zeros", "reflect", "replicate", "circular"])
    stride = rng.choice([1, 1, 2])
    rules: list[Any] = [0, 1, tuple(rng.choice([0, 1, 2]) for _ in range(dims))]
    padding = rng.choice([*rules, "valid", "same"] if stride == 1 else rules)
    settings = {"groups": _groups(rng, inner, outer), "padding_mode": mode, "bias": rng.random() < 0.6}
    dilation = rng.choice([1, 1, 2])
    return _of("Conv", dims)(inner, outer, kernel, stride, padding, dilation, **settings)


def _transposed(rng: random.Random, shape: Shape) -> nn.Module:
    dims, inner, outer = len(shape) - 2, shape[1], rng.choice([1, 2, 4, 6, 8])
    stride, kernel = rng.choice([1, 2]), rng.choice([1, 2, 3])
    settings = {"groups": _groups(rng, inner, outer), "bias": rng.random() < 0.6, "dilation": rng.choice([1, 1, 2])}
    return _of("ConvTranspose", dims)(inner, outer, kernel, stride, rng.choice([0, 1]), stride - 1, **settings)


def _batch_norm(rng: random.Random, shape: Shape) -> nn.Module:
    affine, tracked = rng.random() < 0.7, rng.random() < 0.8
    return _of("BatchNorm", max(1, len(shape) - 2))(shape[1], affine=affine, track_running_stats=tracked)


def _instance_norm(rng: random.Random, shape: Shape) -> nn.Module:
    affine, tracked = rng.random() < 0.5, rng.random() < 0.5
    return _of("InstanceNorm", len(shape) - 2)(shape[1], affine=affine, track_running_stats=tracked)


def _other_norm(rng: random.Random, shape: Shape) -> nn.Module:
    tail = shape[rng.randrange(1, len(shape)) :]
    group = nn.GroupNorm(_groups(rng, shape[1]), shape[1], affine=rng.random() < 0.7)
    norms: list[nn.Module] = [nn.LayerNorm(tail, elementwise_affine=rng.random() < 0.7), nn.RMSNorm(tail), group]
    return rng.choice([*norms, nn.LayerNorm(shape[-1], bias=False), nn.LocalResponseNorm(2)])


def _linear(rng: random.Random, shape: Shape) -> nn.Module:
    return nn.Linear(shape[-1], rng.choice([1, 3, 4, 8]), bias=rng.random() < 0.6)


def _activation(rng: random.Random, shape: Shape) -> nn.Module:
    plain = ["ReLU", "ReLU6", "ELU", "SELU", "CELU", "GELU", "SiLU", "Mish", "Hardswish", "Hardtanh", "Hardsigmoid"]
    plain += ["LeakyReLU", "LogSigmoid", "Sigmoid", "Tanh", "Tanhshrink", "Softplus", "Softshrink", "Softsign"]
    found: list[nn.Module] = [getattr(nn, rng.choice(plain))() for _ in range(6)]
    found += [nn.PReLU(), nn.PReLU(shape[1]), nn.Threshold(0.1, 0.2), nn.Softmax(-1), nn.LogSoftmax(1), nn.Softmin(-1)]
    return rng.choice([*found, nn.RReLU(), nn.ReLU(inplace=True), nn.GELU("tanh"), nn.GLU(1), nn.Softmax2d()])


def _dropout(rng: random.Random, shape: Shape) -> nn.Module:
    dims = max(1, min(3, len(shape) - 2))
    kinds = [nn.Dropout(0.3), nn.Dropout(0.0), nn.Dropout(0.3, inplace=True), nn.AlphaDropout(), nn.Identity()]
    return rng.choice([*kinds, nn.FeatureAlphaDropout(), _of("Dropout", dims)(0.2)])


def _pool(rng: random.Random, shape: Shape) -> nn.Module:
    dims = len(shape) - 2
    kinds = [_of("MaxPool", dims)(2, 1, 1), _of("MaxPool", dims)(2, ceil_mode=True), _of("AdaptiveAvgPool", dims)(2)]
    average = _of("AvgPool", dims)(2, rng.choice([1, 2]), rng.choice([0, 1]), rng.random() < 0.3, rng.random() < 0.5)
    kinds += [average, average, _of("AdaptiveMaxPool", dims)(1), _of("AdaptiveAvgPool", dims)(1)]
    whole = _of("AvgPool", dims)(shape[2:] if dims > 1 else shape[2])
    return rng.choice([*kinds, whole, _of("LPPool", dims)(2, 2), _First(_of("MaxPool", dims)(2, return_indices=True))])


def _pad(rng: random.Random, shape: Shape) -> nn.Module:
    dims = len(shape) - 2
    amounts: Any = rng.choice([1, 0, tuple(rng.choice([0, 1, 2]) for _ in range(2 * dims)), (1, 1) * dims])
    name = rng.choice(["ZeroPad", "ZeroPad", "ConstantPad", "ReflectionPad", "ReplicationPad", "CircularPad"])
    return _of(name, dims)(amounts, *([rng.choice([0.0, 1.5])] if name == "ConstantPad" else []))


def _resized(rng: random.Random, shape: Shape) -> nn.Module:
    modes = {3: ["linear"], 4: ["bilinear", "bicubic"], 5: ["trilinear"]}
    kinds: list[nn.Module] = [nn.Upsample(scale_factor=2), nn.Upsample(scale_factor=1.5, mode="nearest-exact")]
    kinds += [nn.Upsample(scale_factor=2, mode=rng.choice(modes[len(shape)]), align_corners=rng.random() < 0.5)]
    kinds += [nn.PixelShuffle(2), nn.PixelUnshuffle(2), nn.ChannelShuffle(2), nn.Unfold(2), nn.ReflectionPad1d(1)]
    return rng.choice([*kinds, nn.UpsamplingNearest2d(scale_factor=2), nn.UpsamplingBilinear2d(scale_factor=2)])


def _reshaped(rng: random.Random, shape: Shape) -> nn.Module:
    return rng.choice([nn.Flatten(rng.choice([1, 2])), nn.Unflatten(1, (1, shape[1])), nn.Unflatten(-1, (-1, 2))])


def _recurrent(rng: random.Random, shape: Shape) -> nn.Module:
    kind = rng.choice([nn.RNN, nn.GRU, nn.LSTM])
    batch_first, both_ways, depth = rng.random() < 0.5, rng.random() < 0.3, rng.choice([1, 2])
    return _First(kind(shape[-1], 4, depth, batch_first=batch_first, bidirectional=both_ways))


def _attention(rng: random.Random, shape: Shape) -> nn.Module:
    width, heads = shape[-1], _groups(rng, shape[-1])
    batch_first, norm_first = rng.random() < 0.5, rng.random() < 0.5
    encoder = nn.TransformerEncoderLayer(width, heads, 5, batch_first=batch_first, norm_first=norm_first)
    decoder = nn.TransformerDecoderLayer(width, heads, 5, batch_first=batch_first)
    attention = _OnItself(nn.MultiheadAttention(width, heads, bias=rng.random() < 0.5, batch_first=batch_first))
    kinds = [encoder, _OnBoth(decoder), attention, _Attended(width, heads), nn.TransformerEncoder(encoder, 2)]
    return rng.choice(kinds)


def _cell(rng: random.Random, shape: Shape) -> nn.Module:
    cells: list[nn.Module] = [nn.RNNCell(shape[-1], 4), nn.GRUCell(shape[-1], 4), _First(nn.LSTMCell(shape[-1], 4))]
    return rng.choice([*cells, _OnBoth(nn.Bilinear(shape[-1], shape[-1], 3)), _OnBoth(nn.CosineSimilarity(0))])


class _First(nn.Module):
    """The first result of a layer that has several."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(x)[0]


class _OnItself(_First):
    """Attention of a value to itself."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(x, x, x, need_weights=False)[0]


class _OnBoth(_First):
    """A layer of two inputs."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(x, x)


class _Attended(nn.Module):
    """Attention by hand, with a mask that is a buffer."""

    mask: torch.Tensor

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.q, self.k, self.v = (nn.Linear(width, width) for _ in range(3))
        self.heads, self.width = heads, width
        self.register_buffer("mask", torch.ones(16, 16, dtype=torch.bool).tril())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = (m(x).unflatten(-1, (self.heads, -1)).transpose(1, 2) for m in (self.q, self.k, self.v))
        scores = (q @ k.transpose(-1, -2)) / 2.5
        mask = self.mask[: x.size(1), : x.size(1)]
        return (scores.masked_fill(~mask, -1e9).softmax(-1) @ v).transpose(1, 2).reshape(x.shape)


# --- functions and integers ------------------------------------------------------------------------------------------


class _Functional(nn.Module):
    """A convolution of any kind, or a linear layer, with its batch norm, as functions of fetched parameters."""

    mean: torch.Tensor
    var: torch.Tensor

    def __init__(self, layer: Any, norm: bool) -> None:
        super().__init__()
        self.with_norm = norm
        self.weight, self.bias = layer.weight, layer.bias
        self.transposed, self.dims = "Transpose" in type(layer).__name__, layer.weight.dim() - 2
        width = layer.weight.shape[1] * layer.groups if self.transposed else layer.weight.shape[0]
        self.register_buffer("mean", torch.randn(width))
        self.register_buffer("var", torch.rand(width) + 0.5)
        self.gamma = nn.Parameter(torch.randn(width))
        self.settings: dict[str, Any] = {}
        if self.dims:
            self.settings = {"stride": layer.stride, "groups": layer.groups, "dilation": layer.dilation}
            self.settings["padding"] = layer.padding

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        name = f"conv{'_transpose' if self.transposed else ''}{self.dims}d" if self.dims else "linear"
        x = getattr(F, name)(x, self.weight, self.bias, **self.settings)
        return F.batch_norm(x, self.mean, self.var, self.gamma, None, False) if self.with_norm else x


def _functional(rng: random.Random, shape: Shape) -> nn.Module:
    draws = [_linear] if len(shape) == 2 else [_linear, _convolution, _transposed]
    return _Functional(rng.choice(draws)(rng, shape), rng.random() < 0.6)


_FORMS: dict[int, tuple[Callable[[torch.Tensor, torch.Tensor], torch.Tensor], ...]] = {
    2: (
        lambda x, w: F.linear(input=x, weight=w),
        lambda x, w: F.linear(x, w[0]),
        lambda x, w: F.linear(x, w * 2, bias=w.sum(1)),
        lambda x, w: torch.addmm(w[0], x, w.t(), beta=2, alpha=0.5),
        lambda x, w: torch.addmm(x[:, :1], x, w.t()),
        lambda x, w: F.batch_norm(x, w[0], w[1] * w[1], eps=x.shape[0] * 1e-3),
        lambda x, w: F.batch_norm(x, None, None, training=True),
        lambda x, w: x.div(x.size(0)) + torch.div(x, 2, rounding_mode="floor") + 1 / (x * x + 1) + x.divide(other=3),
        lambda x, w: F.dropout(x, p=0.0) + F.dropout(input=x, training=False) + F.dropout(x, x.shape[0] * 0.1, False),
        lambda x, w: F.linear(w, w)[:1] + F.linear(w, w, w[0])[:1] + x[:1],
    ),
    4: (
        lambda x, w: F.conv2d(x, w, None, [1], [1]),
        lambda x, w: F.conv2d(input=x, weight=w, padding="same") + F.conv2d(x, w, padding=(1, 1)),
        lambda x, w: F.conv2d(F.pad(x, (1, 1, 1, 1)), w, stride=x.size(0)),
        lambda x, w: F.conv2d(F.pad(x, [x.size(0) - 1] * 4), w) + F.conv2d(F.pad(x, (1, 1)), w, padding=(1, 0)),
        lambda x, w: F.conv2d(F.pad(x, (1, 1, 1, 1, 0, 0), value=0), w) + F.conv2d(F.pad(x, (-1, -1)), w).sum(),
        lambda x, w: F.conv2d(F.pad(input=x, pad=(1, 1, 1, 1), mode="reflect"), w),
        lambda x, w: F.conv2d(F.pad(x[0], (1, 1, 1, 1)), w),
        lambda x, w: F.conv2d(x[0], w, bias=w.sum((1, 2, 3))) + F.conv2d(x[0], w),
        lambda x, w: F.conv_transpose2d(x, w, stride=(2,), output_padding=x.size(0) - 1),
        lambda x, w: F.conv_transpose2d(input=x, weight=w, groups=2, bias=None, dilation=2),
        lambda x, w: F.batch_norm(F.conv_transpose2d(x, w), w.mean((0, 2, 3)), w.var((0, 2, 3))),
        lambda x, w: F.avg_pool2d(x, [2]) + F.avg_pool2d(x, 2, stride=x.size(0), divisor_override=3),
        lambda x, w: F.avg_pool2d(x, x.shape[-2:]) + F.avg_pool2d(x, kernel_size=tuple(x.shape[2:]), ceil_mode=True),
        lambda x, w: F.adaptive_avg_pool2d(x, (1, None)) + F.adaptive_avg_pool2d(x[0], 1) + x.mean((2, 3), True),
        lambda x, w: F.scaled_dot_product_attention(x, x, x, is_causal=True, scale=x.size(0) * 0.1),
        lambda x, w: F.scaled_dot_product_attention(query=x, key=x, value=x, attn_mask=x @ x.mT),
        lambda x, w: torch.softmax(x @ x.transpose(2, 3) / 2 + torch.zeros(()), dim=-1) @ x,
        lambda x, w: (
            x * torch.sigmoid(x) + 0.5 * x * (1 + torch.erf(x / 1.4142135623730951)) + F.silu(x, inplace=False)
        ),
    ),
}
"""Calls of functions in unusual forms: by keyword, with one number for all axes, with computed settings or weights."""


class _Form(nn.Module):
    """One of these calls, on a parameter of the module's own."""

    def __init__(self, rank: int, place: int, width: int) -> None:
        super().__init__()
        self.rank, self.place = rank, place
        self.weight = nn.Parameter(torch.randn((width, width) if rank == 2 else (width, width, 3, 3)))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return _FORMS[self.rank][self.place](x, self.weight)


def _form(rng: random.Random, shape: Shape) -> nn.Module:
    return _Form(len(shape), rng.randrange(len(_FORMS[len(shape)])), shape[1])


class _Integers(nn.Module):
    """A branch of integers beside the numbers: positions of the largest, looked up in a table, and a mask."""

    def __init__(self, size: int, kind: str) -> None:
        super().__init__()
        self.table = nn.EmbeddingBag(size, 3) if kind == "bag" else nn.Embedding(size, 3, padding_idx=0)
        self.kind = kind

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        found = x.flatten(1).argsort(-1) % self.table.num_embeddings
        rows = self.table(found).flatten(1) if self.kind == "bag" else self.table(found + 0).mean(1)
        half = found.sum(-1, keepdim=True) // 2 + found.sum(-1, keepdim=True) / 2
        return torch.where(half > 3, rows, rows / 3.7)


def _integers(rng: random.Random, shape: Shape) -> nn.Module:
    return _Integers(rng.choice([2, 5]), rng.choice(["bag", "plain"]))


# --- arrangements ----------------------------------------------------------------------------------------------------


class _Parallel(nn.Module):
    """Several layers on one input, or on a tensor of the module's own, their results side by side."""

    def __init__(self, layers: list[nn.Module], query: torch.Tensor | None = None) -> None:
        super().__init__()
        self.layers = nn.ModuleList(layers)
        if isinstance(query, nn.Parameter):
            self.query = query
        else:
            self.register_buffer("query", query)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        source = x if self.query is None else self.query
        found = torch.cat([layer(source).flatten(1) for layer in self.layers], 1)
        return found if self.query is None else found.sum() + x


class _Twice(_First):
    """A layer that is called twice."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(x) + self.layer(x * 0.5)


def _tie(layers: list[nn.Module]) -> None:
    """Let layers share the first one's parameters where they have the same shapes."""
    first = dict(layers[0].named_parameters(recurse=False))
    for layer in layers[1:]:
        for name, parameter in list(layer.named_parameters(recurse=False)):
            if name in first and first[name].shape == parameter.shape:
                setattr(layer, name, first[name])


def _oddly(rng: random.Random, draw: Draw) -> Draw:
    """Layers with something about their weights or their calls that a rule must see."""

    def odd(module: nn.Module) -> None:
        weight = getattr(module, "weight", None)
        kind = rng.choice(["norm", "prune", "hook", "frozen", "strided", "zero", "tensor", "forward"])
        if kind == "hook":
            module.register_forward_hook(_unchanged)
        elif kind == "forward":
            module.forward = module.forward
        elif kind == "norm" and weight is not None and weight.dim() > 1:
            nn.utils.parametrizations.weight_norm(module)
        elif kind == "prune" and weight is not None:
            prune.random_unstructured(module, "weight", 0.3)
        elif kind == "frozen":
            module.requires_grad_(False)
        elif weight is not None and weight.dim() > 1 and kind in ("strided", "zero"):
            weight.data = weight.data.mT.contiguous().mT if kind == "strided" else weight.data * 0
        elif weight is not None and kind == "tensor":
            del module.weight
            module.register_buffer("weight", weight.detach().clone())

    def draw_odd(rng: random.Random, shape: Shape) -> nn.Module:
        layer = draw(rng, shape)
        for module in list(layer.modules()):
            if not list(module.children()) and rng.random() < 0.7:
                odd(module)
        return layer

    return draw_odd


def _unchanged(module: nn.Module, args: Any, output: Any) -> None:
    """A hook that changes nothing."""


def _arranged(rng: random.Random, shape: Shape, draw: Draw) -> nn.Module:
    how = rng.choice(
        ["one", "one", "normed", "normed", "normed", "padded", "parallel", "alike", "query", "twice", "tied"]
    )
    if how == "one":
        return draw(rng, shape)
    if how == "padded":
        pad = _pad(rng, shape)
        return nn.Sequential(pad, draw(rng, tuple(_try(pad, torch.randn(shape)).shape)))
    if how == "twice":
        return _Twice(draw(rng, shape))
    if how == "normed":
        return _normed(rng, draw(rng, shape), shape)
    layers = [draw(rng, shape) for _ in range(rng.choice([2, 3]))]
    if how == "alike":
        layers = [layers[0], *(copy.deepcopy(layers[0]) for _ in layers[1:])]
    if how == "tied":
        _tie(layers)
    if how != "query":
        return _Parallel(layers)
    query = torch.randn(rng.choice([shape, (1, *shape[1:])]))
    return _Parallel(layers[: rng.choice([1, 2])], nn.Parameter(query) if rng.random() < 0.5 else query)


def _normed(rng: random.Random, layer: nn.Module, shape: Shape) -> nn.Module:
    """A layer and a batch norm of any rank that fits, before or behind it."""
    if rng.random() < 0.4:
        return nn.Sequential(_batch_norm(rng, shape), layer)
    return nn.Sequential(layer, _batch_norm(rng, tuple(_try(layer, torch.randn(shape)).shape)))


EVERYWHERE: dict[str, Draw] = {
    "linear": _linear,
    "batch norm": _batch_norm,
    "other norm": _other_norm,
    "activation": _activation,
    "dropout": _dropout,
    "reshape": _reshaped,
    "function": _functional,
    "integers": _integers,
}
IN_SPACE: dict[str, Draw] = {
    "convolution": _convolution,
    "transposed convolution": _transposed,
    "instance norm": _instance_norm,
    "pool": _pool,
    "pad": _pad,
    "resize": _resized,
}
DRAWS: dict[int, dict[str, Draw]] = {
    2: EVERYWHERE | {"cell": _cell, "form": _form},
    3: EVERYWHERE | IN_SPACE | {"recurrent": _recurrent, "attention": _attention},
    4: EVERYWHERE | IN_SPACE | {"form": _form},
    5: EVERYWHERE | IN_SPACE,
}
"""What can be drawn for a value, by its rank and by the kind of layer."""
_WITH_WEIGHTS = ("linear", "convolution", "transposed convolution", "function", "form")
"""Kinds that are drawn more often: most rules are about them."""


def _try(layer: nn.Module, value: torch.Tensor) -> torch.Tensor:
    """What a layer gives, in float64 as in float32, without a trace on it."""
    with torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        copy.deepcopy(layer).double().eval()(value.double())
        found: torch.Tensor = copy.deepcopy(layer).eval()(value.clone())
    return found


def _fitting_layer(rng: random.Random, value: torch.Tensor) -> tuple[nn.Module, torch.Tensor] | None:
    """A random layer that a value fits, and what it gives; None if none was found."""
    draws = DRAWS.get(value.dim(), {})
    kinds = sorted([*draws, *(kind for kind in _WITH_WEIGHTS for _ in range(3) if kind in draws)])
    for _ in range(_TRIES if draws else 0):
        draw = draws[rng.choice(kinds)]
        try:
            draw = _oddly(rng, draw) if rng.random() < 0.3 else draw
            layer = _arranged(rng, tuple(value.shape), draw)
            found = _try(layer, value)
        except (RuntimeError, ValueError, IndexError, AssertionError, NotImplementedError, TypeError, AttributeError):
            continue  # what torch itself does not run is no model
        if found.is_floating_point() and 0 < found.numel() <= _MOST_NUMBERS and bool(found.isfinite().all()):
            return layer, found
    return None


def random_model(seed: int, length: int = 3) -> Example:
    """A model of random layers, in training mode now and then, and an input for it."""
    rng = random.Random(seed)

    def make() -> Example:
        start = value = torch.randn(SIZES[rng.choice(sorted(SIZES))])
        layers: list[nn.Module] = []
        for _ in range(rng.randint(1, length)):
            found = _fitting_layer(rng, value)
            if found is None:
                break
            layers.append(found[0])
            value = found[1]
        return nn.Sequential(*layers).train(rng.random() < 0.1), (start,)

    return seeded(make, seed)


LAZY: tuple[Callable[[], nn.Module], ...] = (
    lambda: nn.LazyLinear(3),
    lambda: nn.LazyConv2d(3, 2),
    lambda: nn.LazyConvTranspose2d(3, 2),
    lambda: nn.LazyBatchNorm2d(),
    lambda: nn.LazyInstanceNorm2d(affine=True),
)
"""Layers whose weights have no shape before they are first called."""


def lazy_models() -> Iterator[Example]:
    """Lazy layers alone, before and behind others, and several on one input."""
    for lazy in LAZY:
        image = (torch.randn(2, 4, 5, 4),)
        yield nn.Sequential(lazy()).eval(), image
        yield nn.Sequential(nn.Conv2d(4, 4, 1), lazy(), nn.BatchNorm2d(4)).eval(), image
        yield nn.Sequential(nn.BatchNorm2d(4), lazy(), nn.LazyBatchNorm2d()).eval(), image
        yield _Parallel([lazy(), lazy(), nn.Linear(4, 3), nn.Linear(4, 3)]).eval(), image
