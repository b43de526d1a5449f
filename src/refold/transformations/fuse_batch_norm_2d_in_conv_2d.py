"""FuseBatchNorm2dInConv2d: a batch norm behind a convolution becomes part of it."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import ClassVar

from refold.edit import Editor
from refold.folding import fold, largest_first, why_not_foldable
from refold.match import Call, GraphView, match_batch_norm, match_conv
from refold.rewrite import Example, Rewrite, Site, Skip
from refold.settings import Keep


@dataclass(frozen=True, kw_only=True, repr=False)
class FuseBatchNorm2dInConv2d(Rewrite):
    """Fold a BatchNorm2d that follows a Conv2d into the convolution's weight and bias.

    With `s = γ/√(σ²+ε)`:  `W' = s·W`, `b' = s·(b − μ) + β`  (b = 0 where the convolution has none).

    Computed in float64 and rounded once. The originals come back by `W = W'/s` and a stored correction, bit for bit;
    `keep="original"` keeps references to them instead. Weights trained while folded are carried back: W through W'/s,
    the bias into β.
    """

    kind: ClassVar[str] = "parametric"
    keep: Keep = "correction"

    @classmethod
    def examples(cls) -> Iterable[Example]:
        from refold.testing import models

        return [models.conv_norm(), models.exported(models.conv_norm())]

    def find(self, view: GraphView) -> Iterable[Site | Skip]:
        return largest_first(self._found(view), lambda site: site.detail[0].weight)

    def _found(self, view: GraphView) -> Iterator[Site | Skip]:
        for node in view.nodes:
            norm = match_batch_norm(view, node, dims=2)
            if norm is None:
                continue
            conv = match_conv(view, norm.input, dims=2) if isinstance(norm, Call) else None
            reason = _why_not(view, conv, norm)
            if reason is not None:
                yield Skip(node, reason)
            elif isinstance(conv, Call):
                yield Site((conv.node, node), f"folded {node.name} into {conv.node.name}", (conv, norm))

    def rewrite(self, site: Site, edit: Editor) -> None:
        conv, norm = site.detail
        self.mark_as_transformed(fold(edit, conv, norm, channel=0, keep=self.keep))


def _why_not(view: GraphView, conv: Call | str | None, norm: Call | str) -> str | None:
    if isinstance(norm, str):
        return norm
    if conv is None:
        return f"its input {norm.input.name} is not a 2-D convolution"
    if isinstance(conv, str):
        return f"the convolution {norm.input.name} is left alone: {conv}"
    if norm.operands["running_var"].tensor.numel() != conv.weight.shape[0]:
        return "the convolution and the batch norm differ in channels"
    return why_not_foldable(view, conv, norm, first=conv)
