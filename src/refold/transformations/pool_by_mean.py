"""PoolByMean: an average pool with one window over the whole input becomes a mean."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import nn
from torch.fx import Node

from refold.edit import Editor
from refold.match import GraphView, bind, example_value, per_axis, proves_shapes, why_not_plain
from refold.rewrite import Example, ReversibleRewrite, Site, Skip

aten = torch.ops.aten
_MODULES: dict[type, int] = {nn.AvgPool1d: 1, nn.AvgPool2d: 2, nn.AvgPool3d: 3}
_FUNCTIONS: dict[Any, int] = {F.avg_pool1d: 1, F.avg_pool2d: 2, F.avg_pool3d: 3}
_FUNCTIONS |= {aten.avg_pool1d.default: 1, aten.avg_pool2d.default: 2, aten.avg_pool3d.default: 3}
_NAMES = ("input", "kernel_size", "stride", "padding", "ceil_mode", "count_include_pad", "divisor_override")


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
        from refold import examples

        return [examples.pooled()]

    def find(self, view: GraphView) -> Iterator[Site | Skip]:
        for node in view.nodes:
            found = _match_whole_pool(view, node)
            if isinstance(found, str):
                yield Skip(node, found)
            elif found is not None:
                yield Site((node,), f"{node.name}: its window covers the whole input", (node, *found))

    def rewrite(self, site: Site, edit: Editor) -> None:
        node, source, dims = site.detail
        mean = edit.call(node, aten.mean.dim, source, list(range(-dims, 0)), True)
        edit.replace_uses(node, mean)
        edit.erase(node)
        self.mark_as_transformed(mean)


def _match_whole_pool(view: GraphView, node: Node) -> tuple[Node, int] | str | None:
    """What a node pools, and over how many axes; a sentence where it has other windows or cannot be understood."""
    if node.op == "call_function" and node.target in _FUNCTIONS:
        given, dims = bind(node, _NAMES), _FUNCTIONS[node.target]
    elif node.op == "call_module" and (module := _pool(view, node)) is not None:
        reason = why_not_plain(module, tuple(_MODULES))
        if reason is not None:
            return reason
        own = {name: getattr(module, name) for name in _NAMES if hasattr(module, name)}
        given, dims = (bind(node, _NAMES[:1]) or {}) | own, _MODULES[type(module)]
    else:
        return None
    if given is None or not isinstance(given.get("input"), Node) or "kernel_size" not in given:
        return "its arguments are not understood"
    return _why_not(given["input"], node, dims, given) or (given["input"], dims)


def _pool(view: GraphView, node: Node) -> nn.Module | None:
    module = view.module(str(node.target))
    return module if isinstance(module, tuple(_MODULES)) else None


def _why_not(source: Node, node: Node, dims: int, settings: dict[str, Any]) -> str | None:
    if any(size != 0 for size in per_axis(settings.get("padding", 0), dims)):
        return "it pads its input"
    if settings.get("divisor_override") is not None:
        return "it divides by a number of its own"
    noted = example_value(source)
    if noted is None or not proves_shapes(noted) or not noted.is_floating_point() or noted.dim() < dims:
        return "the size of its input is not known for every run"
    sizes = noted.shape[-dims:]
    if not all(isinstance(size, int) for size in (*sizes, *per_axis(settings["kernel_size"], dims))):
        return "the size of its input is not fixed"
    if any(window < size for window, size in zip(per_axis(settings["kernel_size"], dims), sizes, strict=True)):
        return "its window does not cover the whole input"
    made = example_value(node)
    return None if made is not None and all(size == 1 for size in made.shape[-dims:]) else "it has more than one window"
