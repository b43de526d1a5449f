"""SplitUpsampling: a convolution behind nearest upsampling runs on the small image."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import ClassVar

from torch.fx import Node

from refold.examples import Example, layers
from refold.graph.view import GraphView
from refold.patterns.upsampling import as_transposed, check_precision, transposed_function, transposed_module
from refold.rewrite.description import Keep
from refold.rewrite.editor import Editor
from refold.rewrite.operators import CONVOLUTION, UPSAMPLE
from refold.rewrite.refusal import Refuse, attempt, movable, own, unchanged_between
from refold.rewrite.rule import ReversibleRewrite, Site
from refold.weights import SumTaps


@dataclass(frozen=True, kw_only=True, repr=False)
class SplitUpsampling(ReversibleRewrite):
    """Let a convolution behind nearest upsampling run on the small image, split into one small convolution for each
    place within a pixel: together they are a transposed convolution.

    Repeated `s` times, `k` taps fall on `s` neighbours that are the same number, so their weights are summed:
    `conv(up(x), W, padding=p) = convT(x, V, stride=s, padding=k−1−p)`, `V = W flipped and summed over windows of s`

    along each axis, where V has `k+s−1` taps. For doubling and 3×3 taps that leaves 4 of 9 products. It holds at the
    borders too: a tap stands in the padding exactly where its pixel does. The sums are taken in float64 and rounded
    once; W comes back by differences and a stored correction, bit for bit. A kernel that is trained while it is split
    is no longer made of such sums, and then the reverse refuses.
    """

    kind: ClassVar[str] = "parametric"
    keep: Keep = "correction"

    @classmethod
    def examples(cls) -> Iterable[Example]:
        return [layers.upsampled(), layers.exported_upsampled()]

    def match(self, view: GraphView, node: Node) -> Site | None:
        enlarged = {n: attempt(UPSAMPLE.match, view, n) for n in node.all_input_nodes}
        conv = CONVOLUTION.match(view, node) if any(enlarged.values()) else None
        up = enlarged.get(conv.input) if conv is not None else None
        if conv is None or up is None:
            return None
        if isinstance(up, Refuse):
            raise Refuse(f"the upsampling before it is left alone: {up.reason}")
        own(view, conv)
        movable(view, conv)
        scales, padding = as_transposed(up, conv)
        check_precision(conv.weight)
        unchanged_between(view, up.input, up.node, node)
        what = f"{conv.name} runs before {up.node.name}, as a transposed convolution"
        return Site((up.node, node), what, (up, conv, scales, padding))

    def rewrite(self, site: Site, edit: Editor) -> None:
        up, conv, scales, padding = site.detail
        name = conv.operands["weight"].name
        new = edit.map_weights(SumTaps(scales), {"weight": name}, {"weight": name}, self.keep)["weight"]
        settings = {"stride": list(scales), "padding": list(padding)}
        if conv.path is not None:
            edit.put_module(conv.path, transposed_module(edit.gm.get_submodule(conv.path), conv, new, settings))
            conv.node.args, conv.node.kwargs = (up.input,), {}
            edit.mark(conv.node)
        else:
            edit.replace_layer(conv, settings, names={"weight": name}, input=up.input, weight=new)
            conv.node.target = transposed_function(conv)
        edit.erase_unused([up.node])
