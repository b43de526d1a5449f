"""FuseBatchNorm1dInLinear: a batch norm before or behind a linear layer becomes part of it."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import ClassVar

from refold.examples import Example, exported, layers
from refold.graph.view import Call, GraphView
from refold.patterns.batch_norm_pairs import FoldRule, Pair, layers_at
from refold.rewrite.operators import LINEAR
from refold.rewrite.refusal import Refuse


@dataclass(frozen=True, kw_only=True, repr=False)
class FuseBatchNorm1dInLinear(FoldRule):
    """Fold a BatchNorm1d that follows or precedes a Linear into its weight and bias.

    With `s = γ/√(σ²+ε)` and `t = β − s·μ`:
    Linear, then norm:  `W' = s·W` (rows),    `b' = s·b + t`;
    norm, then Linear:  `W' = W·s` (columns), `b' = b + W·t`.

    Right for inputs of (N, C). On (N, C, L) a batch norm runs over axis 1 and a linear layer over the last, which is
    another computation: where the rank is recorded, such a pair is refused; where it is not (a plain symbolic
    trace knows no shapes), the folded layer checks the rank of its input when it runs and is right for both.
    """

    norm_dims: ClassVar[int | None] = 1

    @classmethod
    def examples(cls) -> Iterable[Example]:
        return [layers.linear_norm(), layers.norm_linear(), exported(layers.linear_norm())]

    def neighbours(self, view: GraphView, norm: Call) -> Iterator[Pair | Refuse]:
        yield from layers_at(view, norm.input, norm, "behind", LINEAR)
        if len(norm.node.users) == 1:
            yield from layers_at(view, next(iter(norm.node.users)), norm, "before", LINEAR)
        yield Refuse("no linear layer stands directly before or behind it")
