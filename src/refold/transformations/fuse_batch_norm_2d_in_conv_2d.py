"""FuseBatchNorm2dInConv2d: a batch norm behind a convolution becomes part of it."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import ClassVar

from refold.examples import Example, exported, layers
from refold.graph.view import Call, GraphView
from refold.patterns.batch_norm_pairs import FoldRule, Pair, layers_at
from refold.rewrite.operators import CONVOLUTION
from refold.rewrite.refusal import Refuse


@dataclass(frozen=True, kw_only=True, repr=False)
class FuseBatchNorm2dInConv2d(FoldRule):
    """Fold a BatchNorm2d that follows a Conv2d into the convolution's weight and bias.

    With `s = γ/√(σ²+ε)`:  `W' = s·W`, `b' = s·(b − μ) + β`  (b = 0 where the convolution has none).

    Computed in float64 and rounded once. The originals come back by `W = W'/s` and a stored correction, bit for bit;
    `keep="original"` keeps references to them instead. Weights trained while folded are carried back: W through W'/s,
    the bias into β.
    """

    norm_dims: ClassVar[int | None] = 2

    @classmethod
    def examples(cls) -> Iterable[Example]:
        return [layers.conv_norm(), exported(layers.conv_norm())]

    def neighbours(self, view: GraphView, norm: Call) -> Iterator[Pair | Refuse]:
        yield from layers_at(view, norm.input, norm, "behind", CONVOLUTION, dims=2)
        yield Refuse(f"its input {norm.input.name} is not a 2-D convolution")
