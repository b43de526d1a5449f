"""PoolByMean: an average pool with one window over the whole input becomes a mean."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch.fx import Node

from refold.examples import Example, layers
from refold.graph.values import example_value, proves_shapes
from refold.graph.view import Call, GraphView
from refold.rewrite.editor import Editor
from refold.rewrite.operators import AVERAGE_POOL
from refold.rewrite.refusal import Refuse
from refold.rewrite.rule import ReversibleRewrite, Site


@dataclass(frozen=True, kw_only=True, repr=False)
class PoolByMean(ReversibleRewrite):
    """Pool the whole of an input by a mean, which every backend does in one pass.

    `avg_pool(x, k) = mean(x, its last d axes)`  where `k ≥` the input's size along each of them, without padding.

    Some models pool with a window far larger than any input (1280 × 1280 over 7 × 7, cut off by `ceil_mode`). Compilers
    that take the window at its word spend a second in it. The sizes must be known for every run: those of a captured
    graph are.
    """

    kind: ClassVar[str] = "graph"

    @classmethod
    def examples(cls) -> Iterable[Example]:
        return [layers.pooled()]

    def match(self, view: GraphView, node: Node) -> Site | None:
        call = AVERAGE_POOL.match(view, node)
        if call is None:
            return None
        _check_one_window(call)
        return Site((node,), f"{node.name}: its window covers the whole input", call)

    def rewrite(self, site: Site, edit: Editor) -> None:
        call: Call = site.detail
        mean = edit.call(call.node, torch.ops.aten.mean.dim, call.input, list(range(-call.dims, 0)), True)
        edit.replace_uses(call.node, mean)
        edit.erase(call.node)


def _check_one_window(call: Call) -> None:
    dims, window = call.dims, call.settings["kernel_size"]
    if window is None:
        raise Refuse("its arguments are not understood")
    if any(size != 0 for size in call.settings["padding"]):
        raise Refuse("it pads its input")
    if call.settings["divisor_override"] is not None:
        raise Refuse("it divides by a number of its own")
    read, made = example_value(call.input), example_value(call.node)
    if read is None or not proves_shapes(read) or not read.is_floating_point() or read.dim() < dims:
        raise Refuse("the size of its input is not known for every run")
    sizes = read.shape[-dims:]
    if not all(isinstance(size, int) for size in (*sizes, *window)):
        raise Refuse("the size of its input is not fixed")
    if any(own < size for own, size in zip(window, sizes, strict=True)):
        raise Refuse("its window does not cover the whole input")
    if made is None or any(size != 1 for size in made.shape[-dims:]):
        raise Refuse("it has more than one window")
