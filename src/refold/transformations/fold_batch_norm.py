"""FoldBatchNorm: a batch norm beside any convolution or linear layer becomes part of it."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Any, ClassVar

from torch.fx import Node

from refold.attention import same_size
from refold.edit import Editor
from refold.folding import fold, largest_first, must_wait, why_not_foldable, why_read_by_others
from refold.match import (
    Call,
    GraphView,
    Match,
    example_value,
    match_batch_norm,
    match_conv,
    match_conv_transpose,
    match_linear,
    rank_of,
)
from refold.operations.batch_norm import FoldBatchNorm as FoldMap
from refold.purity import name_of
from refold.rewrite import Example, Rewrite, Site, Skip
from refold.settings import Keep
from refold.weight_operations import FoldBatchNormBeforeConvolution, FoldBatchNormInTransposed


@dataclass(frozen=True)
class Pair:
    """A batch norm and the layer it goes into: how they stand, and for convolutions over how many dimensions."""

    layer: Call
    norm: Call
    place: str
    """'behind' the layer, 'before' it, or 'flattened': behind it with a reshape to rows in between."""
    kind: str
    dims: int = 0

    @property
    def features(self) -> int:
        """The channels of the layer that the batch norm must have."""
        if self.kind == "transposed":
            return int(self.layer.weight.shape[1] * self.groups)
        return int(self.layer.weight.shape[1 if self.place == "before" else 0])

    @property
    def groups(self) -> int:
        """The groups of the convolution."""
        return int(self.layer.settings.get("groups", 1))


@dataclass(frozen=True, kw_only=True, repr=False)
class FoldBatchNorm(Rewrite):
    """Fold batch norms into the convolutions (plain and transposed, over 1 to 3 dimensions) and linear layers beside
    them. With `s = γ/√(σ²+ε)` and `t = β − s·μ`:

    behind the layer:  `W' = s·W`, `b' = s·b + t`      (s runs over the output channels);
    before the layer:  `W' = W·s`, `b' = b + Σ W·t`    (s runs over the input channels).

    Before a convolution this is exact only where nothing is padded with zeros, since the zeros were not normalised.
    Behind a linear layer, a reshape to rows between the two is seen through. Computed in float64 and rounded once; the
    originals come back by `W = W'/s` and a stored correction, bit for bit.

    Where the graph notes no ranks (a plain symbolic trace), a BatchNorm1d beside a Conv1d is left alone: without a
    batch it would run over the length.
    """

    kind: ClassVar[str] = "parametric"
    keep: Keep = "correction"

    @classmethod
    def examples(cls) -> Iterable[Example]:
        from refold import examples

        return [examples.norms_behind(), examples.norms_before(), examples.norm_of_rows()]

    def find(self, view: GraphView) -> Iterable[Site | Skip]:
        return largest_first(self._found(view), lambda site: site.detail.layer.weight)

    def _found(self, view: GraphView) -> Iterator[Site | Skip]:
        taken: set[Node] = set()
        gone: set[Node] = set()
        for node in view.nodes:
            norm = _match_norm(view, node)
            if norm is None:
                continue
            if isinstance(norm, str):
                yield Skip(node, norm)
                continue
            chosen = self._choose(view, norm, taken, gone)
            if isinstance(chosen, str):
                yield Skip(node, chosen)
                continue
            taken.add(chosen.layer.node)
            gone.add(node)
            yield Site((chosen.layer.node, node), f"folded {node.name} into {chosen.layer.node.name}", chosen)

    def _choose(self, view: GraphView, norm: Call, taken: set[Node], gone: set[Node]) -> Pair | str:
        """The layer that a batch norm goes into, or why there is none, as a sentence."""
        reasons: list[str] = []
        for pair in _neighbours(view, norm):
            reason = pair if isinstance(pair, str) else _why_not(view, pair)
            if isinstance(pair, Pair) and must_wait(pair.layer, norm, taken, gone):
                reason = "its neighbour is folded already"  # the next round sees it again
            if reason is None and isinstance(pair, Pair):
                return pair
            reasons.append(str(reason))
        return reasons[0] if reasons else "no convolution or linear layer stands directly before or behind it"

    def rewrite(self, site: Site, edit: Editor) -> None:
        pair: Pair = site.detail
        norm, operation = pair.norm, _operation(pair)
        if pair.place == "flattened":  # the rows take the norm's place, so that it stands behind the layer itself
            norm.node.replace_all_uses_with(norm.input, propagate_meta=False)
            norm.node.replace_input_with(norm.input, pair.layer.node)
            norm = replace(norm, input=pair.layer.node)
        self.mark_as_transformed(fold(edit, pair.layer, norm, operation, self.keep))


def _operation(pair: Pair) -> FoldMap:
    eps = float(pair.norm.settings["eps"])
    channel, first = (1, "norm") if pair.place == "before" else (0, "linear")
    if pair.kind == "transposed":
        return FoldBatchNormInTransposed(eps, channel, first, groups=pair.groups)
    if pair.kind == "conv" and pair.place == "before":
        return FoldBatchNormBeforeConvolution(eps, channel, first, dims=pair.dims)
    guard = pair.kind == "linear" and pair.place != "flattened" and rank_of(pair.norm.input) is None
    return FoldMap(eps, channel, first, guard)


def _match_norm(view: GraphView, node: Node) -> Match:
    found = (match_batch_norm(view, node, dims) for dims in (1, 2, 3))
    return next((norm for norm in found if norm is not None), None)


def _neighbours(view: GraphView, norm: Call) -> Iterator[Pair | str]:
    yield from _layers(view, norm.input, norm, "behind")
    source = norm.input.args[0] if norm.input.args else None
    if name_of(norm.input) in ("flatten", "view", "reshape") and isinstance(source, Node):
        yield from _rows_of(view, source, norm)
    if len(norm.node.users) == 1:
        yield from _layers(view, next(iter(norm.node.users)), norm, "before")


def _layers(view: GraphView, node: Node, norm: Call, place: str) -> Iterator[Pair | str]:
    matches: list[tuple[str, int, Match]] = [("linear", 0, match_linear(view, node))]
    matches += [("conv", dims, match_conv(view, node, dims)) for dims in (1, 2, 3)]
    matches += [("transposed", dims, match_conv_transpose(view, node, dims)) for dims in (1, 2, 3)]
    for kind, dims, call in matches:
        if isinstance(call, str):
            yield f"{node.name} is left alone: {call}"
        elif call is not None:
            yield Pair(_with_settings(view, call), norm, place, kind, dims)


def _with_settings(view: GraphView, call: Call) -> Call:
    """The call with groups and padding among its settings, also where a module holds them."""
    if call.path is None:
        return call
    module: Any = view.module(call.path)
    names = ("groups", "padding", "padding_mode")
    return replace(call, settings={name: getattr(module, name) for name in names if hasattr(module, name)})


def _rows_of(view: GraphView, source: Node, norm: Call) -> Iterator[Pair | str]:
    """A linear layer whose output is made one row for each place before it is normalised."""
    call = match_linear(view, source)
    if not isinstance(call, Call):
        return
    before, after = example_value(source), example_value(norm.input)
    if before is None or after is None or after.dim() != 2 or not same_size(before.shape[-1], after.shape[-1]):
        yield "the reshape between it and the linear layer is not surely one to rows"
    else:
        yield Pair(call, norm, "flattened", "linear")


# --- refusals ----------------------------------------------------------------------------------------------------


def _why_not(view: GraphView, pair: Pair) -> str | None:
    reason = _why_not_exact(view, pair)
    if reason is not None:
        return reason
    if pair.norm.operands["running_var"].tensor.numel() != pair.features:
        return "it has another number of channels than the layer beside it"
    first, second = (pair.norm, pair.layer) if pair.place == "before" else (pair.layer, pair.norm)
    reason = _why_read_elsewhere(pair) if pair.place == "flattened" else why_read_by_others(first, second)
    return reason or why_not_foldable(view, pair.layer, pair.norm, _operation(pair))


def _why_not_exact(view: GraphView, pair: Pair) -> str | None:
    rank = rank_of(pair.norm.input)
    if pair.kind == "linear":
        return None if pair.place == "flattened" else _why_not_linear(pair, rank)
    if rank is not None and rank != pair.dims + 2:
        return f"it runs over axis 1 of a {rank}-D value, which is not the channel axis of the convolution"
    if rank is None and not _tells_rank(view, pair):
        return "the rank of its input is not known"
    return _why_not_before(pair) if pair.place == "before" else None


def _tells_rank(view: GraphView, pair: Pair) -> bool:
    """BatchNorm2d and 3d take values of one rank, with a batch; BatchNorm1d and the function take others too."""
    if pair.norm.path is None or pair.dims == 1:
        return False
    return match_batch_norm(view, pair.norm.node, pair.dims) is not None


def _why_not_linear(pair: Pair, rank: int | None) -> str | None:
    if rank is not None and rank != 2:
        return f"it runs over axis 1 of a {rank}-D value, and the linear layer over the last"
    gamma = pair.norm.operands.get("gamma")
    if rank is None and gamma is not None and not gamma.tensor.is_meta and bool((gamma.tensor == 0).any()):
        return "the rank of its input is not known, and one of its scales is 0"
    return _why_not_input(pair) if pair.place == "before" else None


def _why_not_before(pair: Pair) -> str | None:
    if pair.kind == "transposed":
        return (
            "at its borders a transposed convolution adds up fewer products, so a shift before it is no bias behind it"
        )
    padding, mode = pair.layer.settings.get("padding", 0), pair.layer.settings.get("padding_mode", "zeros")
    padded = padding != "valid" if isinstance(padding, str) else any(_as_list(padding))
    if padded and mode == "zeros":
        return "the convolution behind it pads with zeros, which were not normalised"
    if pair.groups != 1:
        return "the convolution behind it is grouped"
    return _why_not_input(pair)


def _why_not_input(pair: Pair) -> str | None:
    return None if pair.layer.input is pair.norm.node else "it is not the input of the layer behind it"


def _as_list(value: Any) -> list[Any]:
    return list(value) if isinstance(value, list | tuple) else [value]


_READS_SHAPE = {"reshape_as": 1, "view_as": 1, "expand_as": 1, "sym_size": 0, "size": 0}


def _why_read_elsewhere(pair: Pair) -> str | None:
    """The layer's output may be read by the rows, and by calls that look at its shape only."""
    node, rows = pair.layer.node, pair.norm.input
    if list(rows.users) != [pair.norm.node]:
        return f"{rows.name} is also read by others"
    for user in node.users:
        place = _READS_SHAPE.get(name_of(user))
        only_shape = place is not None and [i for i, a in enumerate(user.args) if a is node] == [place]
        if user is not rows and not only_shape:
            return f"the output of {node.name} is also read by {user.name}"
    return None
