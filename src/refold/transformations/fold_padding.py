"""FoldPadding: zeros that are put around an image before a convolution become the convolution's own padding."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import ClassVar

from torch.fx import Node

from refold.examples import Example, layers
from refold.graph.view import Call, GraphView
from refold.rewrite.editor import Editor
from refold.rewrite.operators import CONVOLUTION, PAD
from refold.rewrite.refusal import Refuse, unchanged_between
from refold.rewrite.rule import ReversibleRewrite, Site


@dataclass(frozen=True, kw_only=True, repr=False)
class FoldPadding(ReversibleRewrite):
    """Let convolutions pad their input themselves, which costs them nothing; padding it before makes a copy of it.

    `conv(pad(x, p), W, padding=q) = conv(x, W, padding=p + q)`  where zeros are padded, as many on either side.

    Models that were made for TensorFlow's rule of padding pad apart, because that rule may ask for more zeros on one
    side; a convolution of torch cannot do that, and such a pad is left alone.
    """

    kind: ClassVar[str] = "graph"

    @classmethod
    def examples(cls) -> Iterable[Example]:
        return [layers.padded(), layers.exported_padded()]

    def match(self, view: GraphView, node: Node) -> Site | None:
        pad = PAD.match(view, node)
        if pad is None:
            return None
        _check_zeros(pad)
        conv = next((call for user in node.users if (call := CONVOLUTION.match(view, user)) is not None), None)
        if conv is None or conv.input is not node:
            raise Refuse("no convolution reads it")
        others = [reader.name for reader in view.reached_by(conv.path) if reader is not conv.node] if conv.path else []
        if others:
            raise Refuse(f"the convolution behind it is also run by {', '.join(others)}")
        unchanged_between(view, pad.input, node, conv.node)
        padding = _together(pad, conv)
        return Site((node, conv.node), f"{conv.node.name} pads by itself: {padding}", (pad, conv, padding))

    def rewrite(self, site: Site, edit: Editor) -> None:
        pad, conv, padding = site.detail
        edit.replace_layer(conv, {"padding": padding if conv.path else list(padding)}, input=pad.input)
        edit.erase(pad.node)


def _check_zeros(pad: Call) -> None:
    amounts = pad.settings["pad"]
    if not isinstance(amounts, list | tuple):
        raise Refuse("its arguments are not understood")
    if pad.settings["mode"] != "constant" or pad.settings["value"] not in (None, 0):
        raise Refuse("it pads with something else than zeros")
    if not all(isinstance(amount, int) for amount in amounts) or len(amounts) % 2:
        raise Refuse("how much it pads is computed")
    if any(amount < 0 for amount in amounts):
        raise Refuse("it cuts something off")
    if amounts[::2] != amounts[1::2]:
        raise Refuse("it pads more on one side than on the other, which a convolution cannot")
    if len(pad.node.users) > 1:
        raise Refuse("others read what it pads as well")


def _together(pad: Call, conv: Call) -> tuple[int, ...]:
    """The padding of the convolution and that before it in one."""
    sizes, amounts = conv.settings["padding"], pad.settings["pad"]
    if conv.settings["padding_mode"] != "zeros":
        raise Refuse("the convolution behind it pads with something else than zeros")
    if sizes == "valid":  # which is another word for none
        sizes = (0,) * conv.dims
    if not all(isinstance(size, int) for size in sizes):
        raise Refuse("the convolution behind it pads by a rule")
    if any(amounts[2 * conv.dims :]):
        raise Refuse("it pads channels or batches")
    more = tuple(amounts[: 2 * conv.dims : 2][::-1])
    return tuple(a + b for a, b in zip(sizes, (0,) * (conv.dims - len(more)) + more, strict=True))
