"""FoldBatchNorm: a batch norm next to any convolution or linear layer becomes part of it."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from torch.fx import Node

from refold.examples import Example, layers
from refold.graph.targets import name_of
from refold.graph.values import example_value, same_size
from refold.graph.view import Call, GraphView
from refold.patterns.batch_norm_pairs import FoldRule, Pair, check_rank, layers_at
from refold.rewrite.operators import CONVOLUTION, LINEAR, TRANSPOSED_CONVOLUTION
from refold.rewrite.refusal import Refuse, attempt

_READS_SHAPE = {"reshape_as": 1, "view_as": 1, "expand_as": 1, "sym_size": 0, "size": 0}
"""Calls that read only the shape of one argument, and which one."""


@dataclass(frozen=True, kw_only=True, repr=False)
class FoldBatchNorm(FoldRule):
    """Fold batch norms into the convolutions (plain and transposed, over 1 to 3 dimensions) and linear layers next to
    them. With `s = γ/√(σ²+ε)` and `t = β − s·μ`:

    behind the layer:  `W' = s·W`, `b' = s·b + t`      (s runs over the output channels);
    before the layer:  `W' = W·s`, `b' = b + Σ W·t`    (s runs over the input channels).

    Before a convolution this is exact only where nothing is padded with zeros, since the zeros were not normalised.
    Behind a linear layer, a reshape to rows between the two is seen through. Computed in float64 and rounded once; the
    originals come back by `W = W'/s` and a stored correction, bit for bit.

    Where the graph has no recorded ranks (a plain symbolic trace), a BatchNorm1d next to a Conv1d is left alone:
    without a batch it would run over the length.
    """

    @classmethod
    def examples(cls) -> Iterable[Example]:
        return [layers.norms_behind(), layers.norms_before(), layers.norm_of_rows()]

    def neighbours(self, view: GraphView, norm: Call) -> Iterator[Pair | Refuse]:
        operators = (LINEAR, CONVOLUTION, TRANSPOSED_CONVOLUTION)
        yield from layers_at(view, norm.input, norm, "behind", *operators)
        source = norm.input.args[0] if norm.input.args else None
        if name_of(norm.input) in ("flatten", "view", "reshape") and isinstance(source, Node):
            linear = attempt(LINEAR.match, view, source)
            if isinstance(linear, Call):
                yield Pair(linear, norm, "flattened")
        if len(norm.node.users) == 1:
            yield from layers_at(view, next(iter(norm.node.users)), norm, "before", *operators)
        yield Refuse("no convolution or linear layer stands directly before or behind it")

    def check_exact(self, pair: Pair) -> None:
        if pair.place == "flattened":
            _check_rows(pair)
            return
        check_rank(pair)
        if pair.place == "before" and pair.layer.dims > 0:
            _check_no_zeros_at_borders(pair)


def _check_no_zeros_at_borders(pair: Pair) -> None:
    if pair.is_transposed:
        raise Refuse(
            "at its borders a transposed convolution adds up fewer products, so a shift before it is no bias behind it"
        )
    settings = pair.layer.settings
    padding = settings["padding"]
    padded = padding != "valid" if isinstance(padding, str) else any(padding)
    if padded and settings["padding_mode"] == "zeros":
        raise Refuse("the convolution behind it pads with zeros, which were not normalised")
    if settings["groups"] != 1:
        raise Refuse("the convolution behind it is grouped")


def _check_rows(pair: Pair) -> None:
    """Between the layer and its batch norm stands one reshape to rows, and nothing else reads the values there; calls
    that look at the shape of the layer's output only may stay."""
    layer, rows, norm = pair.layer.node, pair.norm.input, pair.norm.node
    before, after = example_value(layer), example_value(rows)
    if before is None or after is None or after.dim() != 2 or not same_size(before.shape[-1], after.shape[-1]):
        raise Refuse("the reshape between it and the linear layer is not surely one to rows")
    if list(rows.users) != [norm]:
        raise Refuse(f"{rows.name} is also read by others")
    for user in layer.users:
        place = _READS_SHAPE.get(name_of(user))
        only_shape = place is not None and [i for i, arg in enumerate(user.args) if arg is layer] == [place]
        if user is not rows and not only_shape:
            raise Refuse(f"the output of {layer.name} is also read by {user.name}")
