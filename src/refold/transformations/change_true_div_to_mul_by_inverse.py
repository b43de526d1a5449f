"""ChangeTrueDivToMulByInverse: division by a constant becomes multiplication by its inverse."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import ClassVar

from torch.fx import Node

from refold.examples import Example, attention_layers, exported, layers
from refold.graph.view import GraphView
from refold.patterns.discontinuities import jump_behind
from refold.rewrite.editor import Editor
from refold.rewrite.operators import Division, match_division
from refold.rewrite.refusal import Refuse
from refold.rewrite.rule import ReversibleRewrite, Site

# Divisor and inverse must both be normal numbers of the narrowest arithmetic that torch computes in (float32).
_SMALLEST, _LARGEST = 2.0**-126, 2.0**126


@dataclass(frozen=True, kw_only=True, repr=False)
class ChangeTrueDivToMulByInverse(ReversibleRewrite):
    """Multiply by the inverse of a constant instead of dividing by it.

    `y = x / c`  becomes  `y = x · (1/c)`.

    The result differs by at most two roundings (by none where c is a power of two), so a quotient that goes into
    `floor`, a comparison or another operator that jumps stays one. The constant itself is kept in the record and comes
    back as it was written: 49 as 49, not as 49.0.
    """

    kind: ClassVar[str] = "graph"

    @classmethod
    def examples(cls) -> Iterable[Example]:
        return [attention_layers.attention(), layers.functional(), exported(attention_layers.attention())]

    def match(self, view: GraphView, node: Node) -> Site | None:
        division = match_division(node)
        if division is None:
            return None
        divisor = division.divisor
        if divisor == 0 or not math.isfinite(divisor):
            raise Refuse(f"it divides by {divisor}")
        if not _SMALLEST <= abs(divisor) <= _LARGEST:
            raise Refuse(f"{divisor} or its inverse is not a normal number")
        jump = None if math.frexp(divisor)[0] in (0.5, -0.5) else jump_behind(view.gm, node)
        if jump is not None:
            raise Refuse(f"{jump.name} reads the quotient and may jump where it differs by one rounding")
        return Site((node,), f"{node.name}: / {divisor} -> * {1 / divisor}", division)

    def rewrite(self, site: Site, edit: Editor) -> None:
        division: Division = site.detail
        node = division.node
        node.target, node.args, node.kwargs = division.product, (division.numerator, 1 / division.divisor), {}
        edit.mark(node)
