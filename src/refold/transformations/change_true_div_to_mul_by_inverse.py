"""ChangeTrueDivToMulByInverse: division by a constant becomes multiplication by its inverse."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import ClassVar

from refold.division import Division, match_division
from refold.edit import Editor
from refold.match import GraphView
from refold.rewrite import Example, ReversibleRewrite, Site, Skip

# Divisor and inverse must both be normal numbers of the narrowest arithmetic that torch computes in (float32).
_SMALLEST, _LARGEST = 2.0**-126, 2.0**126


@dataclass(frozen=True, kw_only=True, repr=False)
class ChangeTrueDivToMulByInverse(ReversibleRewrite):
    """Multiply by the inverse of a constant instead of dividing by it.

    `y = x / c`  becomes  `y = x · (1/c)`.

    The result differs by at most two roundings (by none where c is a power of two). The constant itself is kept in the
    record and comes back as it was written: 49 as 49, not as 49.0.
    """

    kind: ClassVar[str] = "graph"

    @classmethod
    def examples(cls) -> Iterable[Example]:
        from refold.testing import models

        return [models.attention(), models.functional(), models.exported(models.attention())]

    def find(self, view: GraphView) -> Iterator[Site | Skip]:
        for node in view.nodes:
            division = match_division(view, node)
            if division is None:
                continue
            reason = division if isinstance(division, str) else _why_not(division)
            if reason is not None:
                yield Skip(node, reason)
            elif isinstance(division, Division):
                yield Site((node,), f"{node.name}: / {division.divisor} -> * {1 / division.divisor}", division)

    def rewrite(self, site: Site, edit: Editor) -> None:
        division: Division = site.detail
        node = division.node
        node.target, node.args, node.kwargs = division.product, (division.numerator, 1 / division.divisor), {}
        self.mark_as_transformed(node)


def _why_not(division: Division) -> str | None:
    divisor = division.divisor
    if divisor == 0 or not math.isfinite(divisor):
        return f"it divides by {divisor}"
    if not _SMALLEST <= abs(divisor) <= _LARGEST:
        return f"{divisor} or its inverse is not a normal number"
    return None
