"""FoldConstants: what is the same in every run is computed once and kept as a buffer."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch.fx import GraphModule, Node

from refold.examples import attention_layers
from refold.fx_private import find_tensor, storage_of
from refold.graph.aliasing import aliases
from refold.graph.constants import Constants
from refold.graph.layout import needs_layout, readers_behind
from refold.graph.targets import name_of
from refold.graph.values import count_elements, example_value
from refold.graph.view import GraphView
from refold.rewrite.editor import Editor
from refold.rewrite.refusal import Refuse
from refold.rewrite.rule import Example, ReversibleRewrite, Site

_FREE = {"expand", "expand_as", "broadcast_to", "getattr", "getitem", "device", "sym_size"}
"""Calls that cost nothing, and whose results may be much larger than what they are made from."""
_GROWTH, _SMALL = 4, 1 << 22
"""What is made from weights may take so many times their bytes, or so many bytes."""


@dataclass(frozen=True, kw_only=True, repr=False)
class FoldConstants(ReversibleRewrite):
    """Evaluate what depends on no input once, and keep the result as a buffer that no checkpoint holds.

    `f(c₁, c₂, …)` with constant cᵢ becomes `c = f(c₁, c₂, …)`.

    Constants are numbers, tensors made from them (`arange`, `full`), lifted constants and buffers outside the
    checkpoint. Buffers move with the module, so the graph can still change device. Parameters are not folded, because
    training would no longer reach them; with `parameters=True`, for inference, they are too. Checkpoints of the
    original load all the same with `refold.load_original_state_dict`, which computes what depends on them again; once
    such a weight is changed in another way, the reverse refuses. A view of a weight stays a view, and what takes more
    than four times the bytes of its weights and more than 4 MiB is not kept, but what it is made from.
    Random numbers are never folded, nor what is written into, leaves the graph, or takes more than `limit` bytes.
    """

    kind: ClassVar[str] = "graph"
    parameters: bool = False
    limit: int = 1 << 25

    @classmethod
    def examples(cls) -> Iterable[Example]:
        return [attention_layers.positions(), attention_layers.rotary()]

    def match(self, view: GraphView, node: Node) -> Site | None:
        constants = view.analysis(Constants, parameters=self.parameters)
        if node.op == "get_attr" or _is_free(node, constants) or not _is_needed(node, constants):
            return None
        if any(n.op == "get_attr" and self.transformed(n) for n in view.needed_for(node, ())):
            return None  # it is made from what was too large, or free, when that was folded
        self._check_size(example_value(node))
        for alias, reader in aliases(view.gm, node):
            if reader.op == "output":
                raise Refuse(f"{alias.name} leaves the graph, where somebody may write into it")
        value = constants.value(node)
        _check_plain(view.gm, value)
        self._check_size(value)
        _check_layout(view.gm, node, value)
        what = f"{node.name} is a constant of shape {tuple(value.shape)}"
        return Site((node,), what, (value, constants.weights_of(node)))

    def _check_size(self, value: torch.Tensor | None) -> None:
        if value is not None and count_elements(value) * value.element_size() > self.limit:
            raise Refuse(f"it takes more than {self.limit} bytes")

    def rewrite(self, site: Site, edit: Editor) -> None:
        node, (value, weights) = site.nodes[0], site.detail
        fetch = edit.fetch(node, edit.constant(node.name, value, weights))
        edit.mark(fetch)
        edit.replace_uses(node, fetch)
        edit.erase_unused([node])


def _is_needed(node: Node, constants: Constants) -> bool:
    """Whether a node is a constant that something reads which is none, maybe through calls that are free."""
    return node in constants.nodes and any(
        user not in constants.nodes or (_is_free(user, constants) and _is_needed(user, constants))
        for user in node.users
    )


def _is_free(node: Node, constants: Constants) -> bool:
    """Whether a constant is better made in every run: from weights, by a view, or where it is much larger than they."""
    if name_of(node) in _FREE or node not in constants.weighted:
        return name_of(node) in _FREE
    value = constants.value(node)
    if not isinstance(value, torch.Tensor) or value.is_meta:
        return False
    weights = [find_tensor(constants.gm, name) for name in constants.weights_of(node)]
    if any(weight is not None and storage_of(weight) == storage_of(value) for weight in weights):
        return True
    made_from = sum(weight.numel() * weight.element_size() for weight in weights if weight is not None)
    return value.numel() * value.element_size() > max(_GROWTH * made_from, _SMALL)


def _check_plain(gm: GraphModule, value: Any) -> None:
    if not isinstance(value, torch.Tensor):
        raise Refuse("it is not a tensor, or cannot be computed here")
    tensors = [*gm.parameters(), *gm.buffers()]
    has_values = not value.is_meta or (tensors and all(tensor.is_meta for tensor in tensors))  # or none has any
    if not has_values or value.layout != torch.strided or value.is_quantized:
        raise Refuse("it is not a plain tensor with values")


def _check_layout(gm: GraphModule, node: Node, value: torch.Tensor) -> None:
    """A copy lies in memory in the same order of axes, but values that were repeated by a stride of 0 are laid out."""
    if all(stride != 0 or size < 2 for size, stride in zip(value.shape, value.stride(), strict=True)):
        return
    for reader in readers_behind(gm, node):
        if needs_layout(gm, reader):
            raise Refuse(f"it repeats values in memory, and {reader.name} may depend on that")
