"""Small models and values on which engines are known to give something else than torch, or to read foreign memory."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

NAN, INF, BIG = math.nan, math.inf, 2**40


class Function(nn.Module):
    """A model of one function; `table` is a weight that it may read."""

    def __init__(self, function: Callable[..., Any]) -> None:
        super().__init__()
        self.function = function
        self.table = nn.Parameter(torch.linspace(-1, 1, 40).reshape(10, 4))

    def forward(self, *tensors: torch.Tensor) -> Any:
        return self.function(self.table, *tensors)


@dataclass(frozen=True)
class Probe:
    """A function of a table of 10 rows and some tensors, an example of ordinary values, and the values to try."""

    name: str
    function: Callable[..., Any]
    example: tuple[torch.Tensor, ...]
    values: tuple[torch.Tensor, ...]


def f(*values: float) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.float32)


def i(*values: int) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int64)


def b(*values: bool) -> torch.Tensor:
    return torch.tensor(values)


_X = torch.linspace(-2, 2, 16).reshape(4, 4)
_SPECIAL = f(NAN, INF, -INF, -0.0, 1.0, -1.0, 0.0, 3.0).reshape(2, 4)
_PLAIN = torch.linspace(-1, 2, 8).reshape(2, 4)
_IMAGE = torch.linspace(-1, 1, 32).reshape(1, 2, 4, 4)
_Q = torch.linspace(-1, 1, 24).reshape(1, 2, 3, 4)


def _with(value: float, tensor: torch.Tensor, place: int = 5) -> torch.Tensor:
    changed = tensor.clone()
    changed.view(-1)[place] = value
    return changed


def _indices() -> list[Probe]:
    """Indices out of range, negative ones, and ones that wrap when they are cut to 32 bits."""
    one, row = i(1, 2, 3), f(1, 2, 3)
    functions: dict[str, Callable[..., Any]] = {
        "embedding": lambda w, x: F.embedding(x, w),
        "index": lambda w, x: w[x],
        "index_select": lambda w, x: w.index_select(0, x),
        "gather": lambda w, x: w.gather(0, x[:, None].expand(-1, 4)),
        "take": lambda w, x: w.take(x),
        "scatter": lambda w, x: torch.zeros(10).scatter(0, x, torch.ones(3)),
        "index_add": lambda w, x: torch.zeros(10, 4).index_add(0, x, torch.ones(3, 4)),
        "one_hot": lambda w, x: F.one_hot(x, 10),
        "computed": lambda w, x: F.embedding(x * 2 + 1, w),
        "cast": lambda w, x: w[x.to(torch.int32).to(torch.int64)],
    }
    probes = []
    for name, function in functions.items():
        for what, values in {"too large": i(1, 2, 40), "negative": i(-1, 2, 3), "wraps": i(1, 2, 2**32 + 1)}.items():
            probes.append(Probe(f"{name}, {what}", function, (one,), (values,)))
    probes.append(Probe("index from floats, NaN", lambda w, x: w[x.to(torch.int64)], (row,), (f(1, NAN, 2),)))
    probes.append(Probe("index from floats, large", lambda w, x: w[x.to(torch.int64)], (row,), (f(1, 1e9, 2),)))
    return probes


def _integers() -> list[Probe]:
    a, d = i(7, 5, 3, 9), i(2, 3, 4, 5)
    negative, by = i(-7, 7, -7, 9), i(2, -2, -3, 5)
    return [
        Probe("integer sum beyond 32 bits", lambda w, x, y: x + y, (a, d), (i(BIG, 1, 2, 3), d)),
        Probe("integer product beyond 32 bits", lambda w, x, y: x * y, (a, d), (i(70000, 1, 2, 3), i(70000, 1, 2, 3))),
        Probe("integer comparison beyond 32 bits", lambda w, x, y: x > y, (a, d), (i(BIG, 1, 2, 3), d)),
        Probe("integer equality beyond 32 bits", lambda w, x, y: x == y, (a, d), (i(2**32 + 2, 3, 4, 5), d)),
        Probe("integer sum of all beyond 32 bits", lambda w, x: x.sum(), (a,), (i(2**31 - 1, 2**31 - 1, 2, 3),)),
        Probe("running sum beyond 32 bits", lambda w, x: x.cumsum(0), (a,), (i(2**31 - 1, 2**31 - 1, 2, 3),)),
        Probe("maximum beyond 32 bits", lambda w, x: x.max(), (a,), (i(BIG, 1, 2, 3),)),
        Probe("floor division of negatives", lambda w, x, y: x // y, (a, d), (negative, by)),
        Probe("truncating division", lambda w, x, y: torch.div(x, y, rounding_mode="trunc"), (a, d), (negative, by)),
        Probe("remainder of negatives", lambda w, x, y: x % y, (a, d), (negative, by)),
        Probe("fmod of negatives", lambda w, x, y: torch.fmod(x, y), (a, d), (negative, by)),
        Probe("floor division by a number", lambda w, x: x // 2, (a,), (negative,)),
        Probe("remainder by a number", lambda w, x: x % 3, (a,), (negative,)),
        Probe("integer division by zero", lambda w, x, y: x // y, (a, d), (a, i(2, 0, 4, 5))),
        Probe("remainder by zero", lambda w, x, y: x % y, (a, d), (a, i(2, 0, 4, 5))),
        Probe("true division of large integers", lambda w, x, y: x / y, (a, d), (i(BIG, 1, 2, 3), d)),
        Probe("integers as floats", lambda w, x: x.to(torch.float32), (a,), (i(BIG, -BIG, 2, 3),)),
        Probe("integers as booleans", lambda w, x: x.to(torch.bool), (a,), (i(2**32, -1, 0, 3),)),
        Probe("narrowed integers", lambda w, x: x.to(torch.int8), (a,), (i(300, -300, 0, 3),)),
        Probe("bitwise and", lambda w, x, y: x & y, (a, d), (i(BIG + 5, -1, 2, 3), i(-1, BIG, 2, 3))),
        Probe(
            "boolean logic", lambda w, x, y: x ^ y, (b(True, False), b(True, True)), (b(False, False), b(True, False))
        ),
        Probe("sum of booleans", lambda w, x: x.sum(), (b(True, False, True),), (b(True, True, True),)),
    ]


def _specials() -> list[Probe]:
    """NaN and infinities through operators of all kinds."""
    unary: dict[str, Callable[..., Any]] = {
        "relu": torch.relu,
        "relu6": F.relu6,
        "clamp": lambda x: x.clamp(-1, 1),
        "leaky_relu": F.leaky_relu,
        "gelu": F.gelu,
        "silu": F.silu,
        "sigmoid": torch.sigmoid,
        "tanh": torch.tanh,
        "exp": torch.exp,
        "sign": torch.sign,
        "abs": torch.abs,
        "round": torch.round,
        "hardswish": F.hardswish,
        "softmax": lambda x: x.softmax(-1),
        "log_softmax": lambda x: x.log_softmax(-1),
        "max": lambda x: x.max(),
        "amax": lambda x: x.amax(-1),
        "amin": lambda x: x.amin(-1),
        "argmax": lambda x: x.argmax(-1),
        "sum": lambda x: x.sum(-1),
        "mean": lambda x: x.mean(-1),
        "layer_norm": lambda x: F.layer_norm(x, (4,)),
        "isnan": torch.isnan,
        "equal to itself": lambda x: x == x,
        "comparison": lambda x: x > 0,
        "as boolean": lambda x: x.to(torch.bool),
        "where": lambda x: torch.where(x > 0, x, -x),
        "sort": lambda x: x.sort(-1)[0],
        "cumsum": lambda x: x.cumsum(-1),
        "nan_to_num": torch.nan_to_num,
    }
    probes = [
        Probe(f"{name} of NaN and infinities", lambda w, x, g=g: g(x), (_PLAIN,), (_SPECIAL,))
        for name, g in unary.items()
    ]
    probes += [
        Probe("maximum with NaN", lambda w, x, y: torch.maximum(x, y), (_PLAIN, _PLAIN), (_SPECIAL, _PLAIN)),
        Probe("minimum with NaN", lambda w, x, y: torch.minimum(x, y), (_PLAIN, _PLAIN), (_PLAIN, _SPECIAL)),
        Probe("max_pool of NaN", lambda w, x: F.max_pool2d(x, 2), (_IMAGE,), (_with(NAN, _IMAGE),)),
        Probe("max_pool of -inf", lambda w, x: F.max_pool2d(x, 2), (_IMAGE,), (torch.full_like(_IMAGE, -INF),)),
        Probe("avg_pool of NaN", lambda w, x: F.avg_pool2d(x, 2), (_IMAGE,), (_with(NAN, _IMAGE),)),
        Probe("adaptive max_pool", lambda w, x: F.adaptive_max_pool2d(x, 1), (_IMAGE,), (_with(NAN, _IMAGE),)),
        Probe("matmul with inf", lambda w, x: w @ x, (_X,), (_with(INF, _X),)),
        Probe("zero times inf", lambda w, x: x * 0.0, (_PLAIN,), (_SPECIAL,)),
        Probe("minus itself", lambda w, x: x - x, (_PLAIN,), (_SPECIAL,)),
        Probe("relu of a quotient", lambda w, x, y: torch.relu(x / y), (_PLAIN, _PLAIN + 9), (_PLAIN * 0, _PLAIN * 0)),
        Probe("relu of a logarithm", lambda w, x: torch.relu(torch.log(x)), (_PLAIN + 2,), (_PLAIN,)),
        Probe("clamp of a root", lambda w, x: torch.sqrt(x).clamp(0, 1), (_PLAIN + 2,), (_PLAIN,)),
        Probe(
            "relu of an overflow", lambda w, x: torch.relu(x * 1e30 * 1e30 - x * 1e30 * 1e30), (_PLAIN * 0,), (_PLAIN,)
        ),
        Probe("max of powers", lambda w, x: (x**0.5).amax(-1), (_PLAIN + 2,), (_PLAIN,)),
        Probe("negative zero", lambda w, x: 1 / x, (_PLAIN + 2,), (f(-0.0, 0.0, 1, 2).repeat(2, 1),)),
        Probe("division by zero", lambda w, x: x / (x - x), (f(1, NAN, 2),), (f(0, 1, -1),)),
    ]
    return probes


def _masks() -> list[Probe]:
    """Rows that may look at nothing."""
    opened, closed = torch.ones(1, 3, dtype=torch.int64), torch.zeros(1, 3, dtype=torch.int64)

    def attend(w: torch.Tensor, q: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        return F.scaled_dot_product_attention(q, q, q, attn_mask=mask[:, None, None].to(torch.bool))

    def add(w: torch.Tensor, q: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        hidden = torch.zeros(1, 1, 1, 3).masked_fill(mask[:, None, None] == 0, -INF)
        return F.scaled_dot_product_attention(q, q, q, attn_mask=hidden)

    def fill(w: torch.Tensor, q: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        return (q @ q.transpose(-1, -2)).masked_fill(mask[:, None, None] == 0, -INF).softmax(-1) @ q

    def causal(w: torch.Tensor, q: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        allowed = torch.ones(3, 3, dtype=torch.bool).tril() & mask[:, None, None].to(torch.bool)
        return F.scaled_dot_product_attention(q, q, q, attn_mask=allowed)

    def mean(w: torch.Tensor, q: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        return (q[:, 0] * mask[..., None]).sum(1) / mask.sum(-1, keepdim=True)

    functions = {"attention": attend, "added −inf": add, "filled −inf": fill, "causal": causal, "masked mean": mean}
    cases = [(f"{n}, closed rows", g, closed) for n, g in functions.items()]
    cases += [(f"{n}, left padding", g, torch.tensor([[0, 1, 1]])) for n, g in functions.items()]
    return [Probe(name, function, (_Q, opened), (_Q, mask)) for name, function, mask in cases]


def _types() -> list[Probe]:
    """Other types: they are computed in them, not in wider or narrower ones."""
    wide = _PLAIN.double() / 3
    return [
        Probe("float64 sum", lambda w, x: x + 1e-12, (wide,), (wide * 7,)),
        Probe("float64 product", lambda w, x: x @ x.mT, (wide,), (wide * 7,)),
        Probe("float64 beyond float32", lambda w, x: x * 1e200, (wide,), (wide * 7,)),
        Probe("float to int, out of range", lambda w, x: x.to(torch.int32), (_PLAIN,), (_PLAIN * 1e6,)),
        Probe(
            "uint8 wraps",
            lambda w, x: x + x,
            (torch.ones(3, dtype=torch.uint8),),
            (torch.full((3,), 200, dtype=torch.uint8),),
        ),
        Probe(
            "int8 wraps",
            lambda w, x: x * x,
            (torch.ones(3, dtype=torch.int8),),
            (torch.full((3,), 100, dtype=torch.int8),),
        ),
        Probe("float16 overflow", lambda w, x: x * x, (_PLAIN.half(),), (_PLAIN.half() * 1000,)),
        Probe(
            "rounding half to even",
            lambda w, x: x.round(),
            (_PLAIN,),
            (f(0.5, 1.5, 2.5, -0.5, -1.5, 3.5, 4.5, 5.5).reshape(2, 4),),
        ),
    ]


PROBES = (*_indices(), *_integers(), *_specials(), *_masks(), *_types())
