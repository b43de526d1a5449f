"""Pairs of computations, alike or different by one planted defect, in models where the example inputs hide the defect.

A pair is two functions of what a model has at hand (`At`): numbers x, small integers, a mask of ones, and so on. It is
planted into several hosts: all of it given as inputs, computed further up, and captured to ATen operators.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import nn
from torch.fx import GraphModule, Node, symbolic_trace
from torch.fx.node import map_aggregate

import refold
from refold.rewrite.transformation import Transformation

ROWS, LENGTH, WORDS = 2, 8, 300


@dataclass(frozen=True)
class At:
    """What a computation has at hand; the length and the width of x are equal."""

    x: torch.Tensor
    ids: torch.Tensor
    """Integers, small and not negative in the example, and nothing else."""
    words: torch.Tensor
    """Rows of the table."""
    mask: torch.Tensor
    """1 where there is a token, which is everywhere in the example."""
    open: torch.Tensor
    """The same as booleans."""
    bias: torch.Tensor
    """The same as numbers to be added to scores."""
    order: torch.Tensor
    """A permutation of the places, the identity in the example."""
    table: torch.Tensor

    @property
    def places(self) -> torch.Tensor:
        return torch.arange(self.x.size(1), device=self.x.device)


Core = Callable[[At], torch.Tensor]
NAMES = ("x", "ids", "words", "mask", "open", "bias", "order")


class Given(nn.Module):
    """All of it is an input."""

    def __init__(self, core: Core, dtype: torch.dtype, width: int) -> None:
        super().__init__()
        self.core, self.dtype, self.table = core, dtype, nn.Parameter(torch.randn(WORDS, width))

    def forward(self, x, ids, words, mask, open, bias, order):
        return self.core(At(x, ids, words, mask, open, bias, order, self.table))


class Computed(nn.Module):
    """Masks are made of the 0/1 mask, numbers by layers, and a ReLU and a layer stand behind."""

    def __init__(self, core: Core, dtype: torch.dtype, width: int) -> None:
        super().__init__()
        self.core, self.dtype, self.table = core, dtype, nn.Parameter(torch.randn(WORDS, width))
        self.first, self.norm, self.last = nn.Linear(width, width), nn.LayerNorm(width), nn.Linear(1, 3)

    def forward(self, x, ids, words, mask, open, bias, order):
        added = (1 - mask.to(self.dtype)) * torch.finfo(self.dtype).min
        at = At(self.norm(self.first(x)), ids + 0, words * 1, mask, mask.eq(1), added, order.argsort(-1), self.table)
        found = self.core(at)
        return found, self.last(F.relu(found.to(x.dtype)).unsqueeze(-1))


def inputs(dtype: torch.dtype, width: int) -> dict[str, torch.Tensor]:
    """Inputs on which no defect shows: nothing is masked, integers are small."""
    mask = torch.ones(ROWS, LENGTH, dtype=torch.long)
    return {
        "x": torch.randn(ROWS, LENGTH, width).to(dtype),
        "ids": torch.randint(0, 4, (ROWS, LENGTH)),
        "words": torch.randint(0, 100, (ROWS, LENGTH)),
        "mask": mask,
        "open": mask.bool(),
        "bias": torch.zeros(ROWS, LENGTH, dtype=dtype),
        "order": torch.arange(LENGTH).repeat(ROWS, 1),
    }


class Replace(Transformation):
    """Puts what another graph computes first in the place of what a module computes first."""

    def __init__(self, other: GraphModule, name: str) -> None:
        self.other, self.name = other, name

    @property
    def signature(self) -> int:
        return hash(self.name)

    def transform(self, graph_module: GraphModule) -> GraphModule:
        graph, old, wanted = graph_module.graph, _first_output(graph_module), _first_output(self.other)
        have = {text: node for node, text in _texts(graph_module).items()}
        copies: dict[Node, Node] = {}
        users = list(old.users)
        for node, text in _texts(self.other).items():
            if text in have and (have[text] is old or have[text] < old):
                copies[node] = have[text]
            else:
                with graph.inserting_before(users[0]):
                    copies[node] = graph.node_copy(node, copies.__getitem__)
                if node.op == "get_attr":
                    copies[node].target = f"planted_{node.target}"
                    graph_module.register_buffer(copies[node].target, getattr(self.other, node.target))
            if node is wanted:
                break
        for user in users:
            user.replace_input_with(old, copies[wanted])
        graph.eliminate_dead_code()
        return graph_module


def _first_output(gm: GraphModule) -> Node:
    found = next(iter(reversed(gm.graph.nodes))).args[0]
    return found[0] if isinstance(found, tuple) else found


def _texts(gm: GraphModule) -> dict[Node, str]:
    """What each node computes, written out; nodes of equal texts compute the same."""
    found: dict[Node, str] = {}
    for node in gm.graph.nodes:
        value = getattr(gm, node.target) if node.op == "get_attr" else None
        told = value.tolist() if value is not None and value.numel() < 99 else ""
        given = (node.args, node.kwargs) if node.op != "placeholder" else ()
        found[node] = str((node.op, str(node.target), map_aggregate(given, lambda a: found.get(a, a)), told))
    return found


HOSTS = ("given", "computed", "captured")


Planted = tuple[GraphModule, dict[str, torch.Tensor], Replace]


def plan(host: str, before: Core, after: Core, dtype: torch.dtype, seed: int) -> Planted:
    """A graph of one computation, inputs, and what puts another computation in its place."""
    torch.manual_seed(seed)
    width = LENGTH if host != "captured" else LENGTH - 2  # capture would take equal sizes for one
    model = (Given if host == "given" else Computed)(before, dtype, width).eval().to(dtype)
    given = inputs(dtype, width)
    traced = []
    for core in (before, after):
        model.core = core
        traced.append(refold.trace(model, **given) if host == "captured" else symbolic_trace(model))
    return traced[0], given, Replace(traced[1], "planted")


def plant(
    host: str, before: Core, after: Core, dtype: torch.dtype, seed: int
) -> tuple[GraphModule, dict[str, torch.Tensor]]:
    """The graph after that, and inputs."""
    gm, given, replace = plan(host, before, after, dtype, seed)
    return replace(gm), given


def _attend(at: At, **settings: torch.Tensor | bool) -> torch.Tensor:
    return F.scaled_dot_product_attention(at.x, at.x, at.x, **settings)


def _softmax(at: At, *masks: torch.Tensor) -> torch.Tensor:
    scores = at.x @ at.x.transpose(1, 2) / 3
    for mask in masks:
        scores = scores + mask[:, None, :]
    return scores.softmax(-1) @ at.x


def _seen(at: At) -> torch.Tensor:
    return at.places[None, :] <= at.places[:, None]


def _near(at: At, width: int) -> torch.Tensor:
    return _seen(at) & (at.places[:, None] - at.places[None, :] < width)


def _pick(at: At, places: torch.Tensor) -> torch.Tensor:
    return at.x.gather(1, places[..., None].expand(-1, -1, at.x.size(-1)))


def _narrow(at: At, dtype: torch.dtype) -> torch.Tensor:
    return at.ids.to(dtype).to(torch.long)


def _put(at: At, name: str) -> torch.Tensor:
    return getattr(torch.zeros_like(at.x), name)(1, at.ids[0] % at.x.size(1), at.x)


def _ones(at: At) -> torch.Tensor:
    return at.open.to(at.x.dtype)[..., None]


WRONG: dict[str, tuple[Core, Core]] = {
    "a boolean mask is dropped": (lambda a: _attend(a, attn_mask=a.open[:, None, :]), _attend),
    "an additive mask is dropped": (lambda a: _softmax(a, a.bias), _softmax),
    "an additive mask of fused attention is dropped": (lambda a: _attend(a, attn_mask=a.bias[:, None, :]), _attend),
    "a mask is added twice": (lambda a: _softmax(a, a.bias), lambda a: _softmax(a, a.bias, a.bias)),
    "is_causal for a mask with padding": (
        lambda a: _attend(a, attn_mask=_seen(a)[None] & a.open[:, None, :]),
        lambda a: _attend(a, is_causal=True),
    ),
    "is_causal for a window": (
        lambda a: _attend(a, attn_mask=_near(a, 10)[None]),
        lambda a: _attend(a, is_causal=True),
    ),
    "is_causal for no mask": (_attend, lambda a: _attend(a, is_causal=True)),
    "a mask of keys masks queries": (
        lambda a: (a.x @ a.x.mT).masked_fill(~a.open[:, None, :], -9.0),
        lambda a: (a.x @ a.x.mT).masked_fill(~a.open[:, :, None], -9.0),
    ),
    "a mask is turned round": (
        lambda a: a.x.masked_fill(~a.open[..., None], -2.0),
        lambda a: a.x.masked_fill(a.open[..., None], -2.0),
    ),
    "another number is filled in": (
        lambda a: a.x.masked_fill(~a.open[..., None], -2.0),
        lambda a: a.x.masked_fill(~a.open[..., None], -3.0),
    ),
    "the branches of where are swapped": (
        lambda a: torch.where(a.ids[..., None] > 3, a.x, a.x * 2),
        lambda a: torch.where(a.ids[..., None] > 3, a.x * 2, a.x),
    ),
    "where is dropped": (lambda a: torch.where(a.open[..., None], a.x, a.x * 2), lambda a: a.x * 1),
    "or instead of and": (
        lambda a: a.x.masked_fill((a.open & (a.ids > 3))[..., None], 1.5),
        lambda a: a.x.masked_fill((a.open | (a.ids > 3))[..., None], 1.5),
    ),
    "exclusive or": (lambda a: (a.open | (a.ids > 3)).sum(-1), lambda a: (a.open ^ (a.ids > 3)).sum(-1)),
    "all instead of any": (lambda a: a.open.any(-1), lambda a: a.open.all(-1)),
    "a causal mask sees one further": (
        lambda a: _attend(a, attn_mask=_seen(a)[None]),
        lambda a: _attend(a, attn_mask=(a.places[None, :] <= a.places[:, None] + 1)[None]),
    ),
    "a product with a mask is dropped": (lambda a: a.x * _ones(a), lambda a: a.x + 0),
    "a masked mean is a mean": (
        lambda a: (a.x * _ones(a)).sum(1) / a.mask.sum(1, keepdim=True).clamp(min=1),
        lambda a: (a.x * _ones(a)).mean(1),
    ),
    "a least count is moved": (
        lambda a: a.x.sum(1) / a.mask.sum(1, keepdim=True).clamp(min=1),
        lambda a: a.x.sum(1) / a.mask.sum(1, keepdim=True).clamp(min=2),
    ),
    "more than one instead of any": (lambda a: a.mask.sum(-1) > 0, lambda a: a.mask.sum(-1) > 1),
    "positions count padding": (
        lambda a: F.embedding(a.mask.cumsum(-1), a.table),
        lambda a: F.embedding(a.places[None] + a.mask * 0 + 1, a.table),
    ),
    "the last place instead of the last token": (
        lambda a: _pick(a, (a.mask.sum(1, keepdim=True) - 1).clamp(min=0))[:, 0],
        lambda a: a.x[:, -1],
    ),
    "greater or equal instead of greater": (lambda a: (a.ids > 7).sum(-1), lambda a: (a.ids >= 7).sum(-1)),
    "a comparison turned round": (lambda a: a.ids > 7, lambda a: a.ids < 7),
    "a comparison of numbers takes equality": (lambda a: a.x > 0.5, lambda a: a.x >= 0.5),
    "another padding word": (
        lambda a: a.x.masked_fill((a.words == 200)[..., None], 0.0),
        lambda a: a.x.masked_fill((a.words == 201)[..., None], 0.0),
    ),
    "not equal instead of less": (lambda a: a.ids < 5, lambda a: a.ids != 5),
    "a division rounds towards zero": (
        lambda a: torch.div(a.ids, 3, rounding_mode="floor"),
        lambda a: torch.div(a.ids, 3, rounding_mode="trunc"),
    ),
    "a remainder with the other sign": (lambda a: a.ids % 5, lambda a: torch.fmod(a.ids, 5)),
    "another divisor": (lambda a: a.ids // 4, lambda a: a.ids // 5),
    "a greatest integer is moved": (lambda a: a.ids.clamp(-2, 9), lambda a: a.ids.clamp(-2, 8)),
    "a least integer is moved": (lambda a: a.ids.clamp(-3, 9), lambda a: a.ids.clamp(-2, 9)),
    "a bound of numbers is moved": (lambda a: a.x.clamp(-2, 2.25), lambda a: a.x.clamp(-2, 2.5)),
    "a clamp is dropped": (lambda a: a.ids.clamp(min=0) * 2, lambda a: a.ids * 2),
    "an absolute value is dropped": (lambda a: a.ids.abs() + 1, lambda a: a.ids + 1),
    "an index is shifted by one": (
        lambda a: F.embedding(a.words, a.table),
        lambda a: F.embedding((a.words + 1) % WORDS, a.table),
    ),
    "the last index is another one": (
        lambda a: F.embedding(a.words, a.table),
        lambda a: F.embedding(a.words.clamp(max=WORDS - 2), a.table),
    ),
    "an index through eight bits": (
        lambda a: F.embedding(a.words, a.table),
        lambda a: F.embedding(a.words.to(torch.uint8).to(torch.long), a.table),
    ),
    "a cast through eight bits": (lambda a: a.ids * 2, lambda a: _narrow(a, torch.int8) * 2),
    "a cast through sixteen bits": (lambda a: a.ids * 2, lambda a: _narrow(a, torch.int16) * 2),
    "a cast through thirty-two bits": (lambda a: a.ids * 2, lambda a: _narrow(a, torch.int32) * 2),
    "a square is dropped": (lambda a: a.open.long() * a.ids * a.ids, lambda a: a.open.long() * a.ids),
    "bits are cut off": (lambda a: a.ids & 255, lambda a: a.ids & 15),
    "the minimum instead of the maximum": (
        lambda a: torch.maximum(a.mask, a.mask.flip(1)),
        lambda a: torch.minimum(a.mask, a.mask.flip(1)),
    ),
    "the last of several greatest": (
        lambda a: a.ids.argmax(-1),
        lambda a: a.ids.size(1) - 1 - a.ids.flip(-1).argmax(-1),
    ),
    "the last of several greatest numbers": (
        lambda a: a.x.argmax(-1),
        lambda a: a.x.size(-1) - 1 - a.x.flip(-1).argmax(-1),
    ),
    "a half is rounded up": (lambda a: a.x.round(), lambda a: (a.x + 0.5).floor()),
    "the sign of zero": (lambda a: a.x.sign(), lambda a: torch.where(a.x >= 0, 1.0, -1.0).to(a.x.dtype)),
    "a permutation instead of its inverse": (lambda a: _pick(a, a.order.argsort(-1)), lambda a: _pick(a, a.order)),
    "a permutation is dropped": (lambda a: _pick(a, a.order), lambda a: a.x.clone()),
    "written over instead of added": (lambda a: _put(a, "index_add"), lambda a: _put(a, "index_copy")),
    "lengths of equal size are swapped": (
        lambda a: a.x.cumsum(1) / torch.ones_like(a.x).sum(1, keepdim=True),
        lambda a: a.x.cumsum(1) / torch.ones_like(a.x).sum(2, keepdim=True),
    ),
    "a size is written into the graph": (lambda a: a.x.sum(1) / a.x.size(1), lambda a: a.x.sum(1) / LENGTH),
    "a place is written into the graph": (lambda a: a.x[:, -1] * 1, lambda a: a.x[:, LENGTH - 1] * 1),
    "a slice one to the left": (lambda a: a.x[:, 1:] * 1, lambda a: a.x[:, :-1] * 1),
    "a slice that ends one earlier": (lambda a: a.x[:, :12].sum(1), lambda a: a.x[:, :11].sum(1)),
    "a flip is dropped": (lambda a: a.mask.flip(1) * a.mask.cumsum(1), lambda a: a.mask * a.mask.cumsum(1)),
    "rolled the other way": (lambda a: a.open.roll(1, 1), lambda a: a.open.roll(-1, 1)),
}
"""The first computes what the second does not, though the example inputs hardly show it."""

EXACT = (
    "a half is rounded up",
    "the sign of zero",
    "a comparison of numbers takes equality",
    "the last of several greatest numbers",
)
"""Defects that show where numbers are equal to the last bit, which those that layers compute never are."""

RIGHT: dict[str, tuple[Core, Core]] = {
    "masked_fill for where": (
        lambda a: torch.where(a.open[..., None], a.x, 0.0),
        lambda a: a.x.masked_fill(~a.open[..., None], 0.0),
    ),
    "a comparison negated": (lambda a: a.ids > 3, lambda a: ~(a.ids <= 3)),
    "a comparison from the other side": (lambda a: a.words > 50, lambda a: torch.full_like(a.words, 50) < a.words),
    "is_causal": (lambda a: _attend(a, attn_mask=_seen(a)[None]), lambda a: _attend(a, is_causal=True)),
    "a causal mask by tril": (
        lambda a: _attend(a, attn_mask=_seen(a)[None]),
        lambda a: _attend(a, attn_mask=torch.ones_like(a.x @ a.x.mT, dtype=torch.bool).tril()),
    ),
    "a product with a mask of 0 and 1 for where": (
        lambda a: a.x * a.mask[..., None],
        lambda a: torch.where(a.mask[..., None] == 1, a.x, 0.0),
    ),
    "not zero for one": (lambda a: a.mask == 1, lambda a: a.mask != 0),
    "a mask is no more than one": (lambda a: a.mask.clamp(0, 1) * 3, lambda a: a.mask * 3),
    "a shift for a division": (lambda a: a.ids // 4, lambda a: a.ids >> 2),
    "bits for a remainder": (lambda a: a.ids % 8, lambda a: a.ids & 7),
    "a floor of what is not negative": (
        lambda a: torch.div(a.ids % 50, 3, rounding_mode="floor"),
        lambda a: torch.div(a.ids % 50, 3, rounding_mode="trunc"),
    ),
    "a floor of an index": (
        lambda a: F.embedding(a.words, a.table).sum(-1) + torch.div(a.words, 3, rounding_mode="floor"),
        lambda a: F.embedding(a.words, a.table).sum(-1) + torch.div(a.words, 3, rounding_mode="trunc"),
    ),
    "an index through sixteen bits": (
        lambda a: F.embedding(a.words, a.table),
        lambda a: F.embedding(a.words.to(torch.int16).to(torch.long), a.table),
    ),
    "an index in thirty-two bits": (
        lambda a: F.embedding(a.words, a.table),
        lambda a: F.embedding(a.words.to(torch.int32), a.table),
    ),
    "rows for an embedding": (lambda a: F.embedding(a.words, a.table), lambda a: a.table[a.words]),
    "the inverse of the inverse": (
        lambda a: _pick(a, a.order.argsort(-1).argsort(-1).argsort(-1)),
        lambda a: _pick(a, a.order.argsort(-1)),
    ),
    "twice not": (lambda a: ~~a.open, lambda a: a.open & True),
    "de Morgan": (lambda a: ~(a.open & (a.ids > 2)), lambda a: ~a.open | (a.ids <= 2)),
    "the greatest of a row": (lambda a: a.x.max(-1).values, lambda a: a.x.amax(-1)),
    "a sum of booleans": (lambda a: a.open.sum(-1), lambda a: a.open.long().sum(-1)),
    "any as a maximum": (lambda a: a.mask.bool().any(-1), lambda a: a.mask.amax(-1) == 1),
    "a flip of a flip": (lambda a: a.ids.flip(1).flip(1), lambda a: a.ids * 1),
    "a whole slice": (lambda a: a.x[:, 0:].sum(1), lambda a: a.x.sum(1)),
    "the first of the scaled": (lambda a: (a.x * 2).argmax(-1), lambda a: (a.x * 3).argmax(-1)),
    "an equal threshold": (lambda a: a.x / 3 > 1, lambda a: a.x * (1 / 3) > 1),
    "what is greatest of a sum in another order": (
        lambda a: (a.x + a.x.flip(1) + 0.1).argmax(-1),
        lambda a: (0.1 + a.x.flip(1) + a.x).argmax(-1),
    ),
    "an additive mask for booleans": (
        lambda a: _attend(a, attn_mask=(_seen(a)[None] & a.open[:, None, :]) | a.places.eq(0)),
        lambda a: _attend(
            a,
            attn_mask=torch.zeros_like(a.x @ a.x.mT).masked_fill(
                ~((_seen(a)[None] & a.open[:, None, :]) | a.places.eq(0)), float("-inf")
            ),
        ),
    ),
    "fused attention for a finite mask": (
        lambda a: _softmax(a, (1 - a.mask.to(a.x.dtype)) * -1e4),
        lambda a: F.scaled_dot_product_attention(
            a.x, a.x, a.x, attn_mask=((1 - a.mask.to(a.x.dtype)) * -1e4)[:, None, :], scale=1 / 3
        ),
    ),
    "a sum over a mask as a product": (
        lambda a: (a.x * _ones(a)).sum(1),
        lambda a: (a.open.to(a.x.dtype)[:, None, :] @ a.x)[:, 0],
    ),
}
"""Both compute the same; some because of what the graph says about their inputs."""
