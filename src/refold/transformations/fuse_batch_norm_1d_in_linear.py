"""FuseBatchNorm1dInLinear: a batch norm before or behind a linear layer becomes part of it."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import ClassVar

from torch.fx import Node

from refold.edit import Editor
from refold.folding import fold, largest_first, must_wait, why_not_foldable, why_read_by_others
from refold.match import Call, GraphView, match_batch_norm, match_linear, rank_of
from refold.operations.batch_norm import FoldBatchNorm
from refold.rewrite import Example, Rewrite, Site, Skip
from refold.settings import Keep


@dataclass(frozen=True, kw_only=True, repr=False)
class FuseBatchNorm1dInLinear(Rewrite):
    """Fold a BatchNorm1d that follows or precedes a Linear into its weight and bias.

    With `s = γ/√(σ²+ε)` and `t = β − s·μ`:
    Linear, then norm:  `W' = s·W` (rows),    `b' = s·b + t`;
    norm, then Linear:  `W' = W·s` (columns), `b' = b + W·t`.

    Right for inputs of (N, C). On (N, C, L) a batch norm runs over axis 1 and a linear layer over the last, which is
    another computation: where the graph notes the rank, such a pair is refused; where it does not (a plain symbolic
    trace knows no shapes), the folded layer looks at the rank of its input when it runs and is right for both.
    """

    kind: ClassVar[str] = "parametric"
    keep: Keep = "correction"

    @classmethod
    def examples(cls) -> Iterable[Example]:
        from refold.testing import models

        return [models.linear_norm(), models.norm_linear(), models.exported(models.linear_norm())]

    def find(self, view: GraphView) -> Iterable[Site | Skip]:
        return largest_first(self._found(view), lambda site: site.detail[0].weight)

    def _found(self, view: GraphView) -> Iterator[Site | Skip]:
        taken: set[Node] = set()
        gone: set[Node] = set()
        for node in view.nodes:
            norm = match_batch_norm(view, node, dims=1)
            if norm is None:
                continue
            if isinstance(norm, str):
                yield Skip(node, norm)
                continue
            reasons: list[str] = []
            for linear in self._neighbours(view, norm):
                waits = must_wait(linear, norm, taken, gone)
                reason = "its neighbour is folded already" if waits else _why_not(view, linear, norm)
                if reason is None:
                    taken.add(linear.node)
                    gone.add(node)
                    yield Site((linear.node, node), f"folded {node.name} into {linear.node.name}", (linear, norm))
                    reasons = []
                    break
                reasons.append(reason)
            if node not in gone:
                yield Skip(node, reasons[0] if reasons else "no linear layer stands directly before or behind it")

    def _neighbours(self, view: GraphView, norm: Call) -> list[Call]:
        found = [match_linear(view, norm.input)]
        if len(norm.node.users) == 1:
            found.append(match_linear(view, next(iter(norm.node.users))))
        return [call for call in found if isinstance(call, Call)]

    def rewrite(self, site: Site, edit: Editor) -> None:
        linear, norm = site.detail
        self.mark_as_transformed(fold(edit, linear, norm, _operation(linear, norm), self.keep))


def _operation(linear: Call, norm: Call) -> FoldBatchNorm:
    guard, eps = rank_of(norm.input) is None, float(norm.settings["eps"])
    behind = norm.input is linear.node
    return FoldBatchNorm(eps, 0, "linear", guard) if behind else FoldBatchNorm(eps, 1, "norm", guard)


def _why_not(view: GraphView, linear: Call, norm: Call) -> str | None:
    operation = _operation(linear, norm)
    features = linear.weight.shape[operation.channel]
    if norm.operands["running_var"].tensor.numel() != features:
        return "it normalises another axis than the linear layer's features"
    rank = rank_of(norm.input)
    if rank is not None and rank != 2:
        return f"it runs over axis 1 of a {rank}-D value, and the linear layer over the last"
    if rank is None and _has_dead_channel(norm):
        return "the rank of its input is not known, and one of its scales is 0"
    first, second = (linear, norm) if operation.first == "linear" else (norm, linear)
    if second.input is not first.node:
        return "it is not the linear layer's input"
    return why_read_by_others(first, second) or why_not_foldable(view, linear, norm, operation)


def _has_dead_channel(norm: Call) -> bool:
    gamma = norm.operands.get("gamma")
    return gamma is not None and not gamma.tensor.is_meta and bool((gamma.tensor == 0).any())
