"""FuseBatchNorm2dInConv2d: a batch norm behind a convolution becomes part of it."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import ClassVar

from torch.fx import Node

from refold.edit import Editor
from refold.folding import fold, largest_first, must_wait, why_not_foldable, why_read_by_others
from refold.match import Call, GraphView, match_batch_norm, match_conv, rank_of
from refold.operations.batch_norm import FoldBatchNorm
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
        gone: set[Node] = set()
        for node in view.nodes:
            norm = match_batch_norm(view, node, dims=2)
            if norm is None:
                continue
            conv = match_conv(view, norm.input, dims=2) if isinstance(norm, Call) else None
            reason = _why_not(view, conv, norm, gone)
            if reason is not None:
                yield Skip(node, reason)
            elif isinstance(conv, Call):
                gone.add(node)
                yield Site((conv.node, node), f"folded {node.name} into {conv.node.name}", (conv, norm))

    def rewrite(self, site: Site, edit: Editor) -> None:
        conv, norm = site.detail
        self.mark_as_transformed(fold(edit, conv, norm, _operation(norm), self.keep))


def _operation(norm: Call) -> FoldBatchNorm:
    return FoldBatchNorm(float(norm.settings["eps"]), channel=0)


def _why_not(view: GraphView, conv: Call | str | None, norm: Call | str, gone: set[Node]) -> str | None:
    if isinstance(norm, str):
        return norm
    if conv is None:
        return f"its input {norm.input.name} is not a 2-D convolution"
    if isinstance(conv, str):
        return f"the convolution {norm.input.name} is left alone: {conv}"
    if norm.operands["running_var"].tensor.numel() != conv.weight.shape[0]:
        return "the convolution and the batch norm differ in channels"
    rank = rank_of(norm.input)
    if rank is not None and rank != 4:
        return f"it runs over axis 1 of a {rank}-D value, which is not the channel axis of the convolution"
    if rank is None and norm.path is None:  # a BatchNorm2d takes 4-D values alone, the function any
        return "the rank of its input is not known"
    if must_wait(conv, norm, set(), gone):
        return "its neighbour is folded already"  # the next round sees it again
    return why_read_by_others(conv, norm) or why_not_foldable(view, conv, norm, _operation(norm))
