"""FoldConstants: what is the same in every run is computed once and kept as a buffer."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import nn
from torch.fx import GraphModule, Node

from refold import recording
from refold.constants import Constants
from refold.edit import Editor
from refold.layout import needs_layout, readers_behind
from refold.match import GraphView, example_value
from refold.purity import erase_dead, name_of
from refold.rewrite import Example, ReversibleRewrite, Site, Skip
from refold.slicing import aliases
from refold.weights import constant_record

_FREE = {"expand", "expand_as", "broadcast_to", "getattr", "getitem", "device", "sym_size"}
"""Calls that cost nothing, and whose results may be much larger than what they are made from."""


@dataclass(frozen=True, kw_only=True, repr=False)
class FoldConstants(ReversibleRewrite):
    """Evaluate what depends on no input once, and keep the result as a buffer that no checkpoint holds.

    `f(c₁, c₂, …)` with constant cᵢ becomes `c = f(c₁, c₂, …)`.

    Constants are numbers, tensors made from them (`arange`, `full`), lifted constants and buffers outside the
    checkpoint. Buffers move with the module, so the graph can still change device. Parameters are not folded, because
    training would no longer reach them; with `parameters=True`, for inference, they are too. Checkpoints of the
    original load all the same with `refold.load_original_state_dict`, which computes what depends on them again.
    Random numbers are never folded, nor what is written into, leaves the graph, or takes more than `limit` bytes.
    """

    kind: ClassVar[str] = "graph"
    parameters: bool = False
    limit: int = 1 << 25

    @classmethod
    def examples(cls) -> Iterable[Example]:
        from refold import examples

        return [examples.positions(), examples.rotary()]

    def find(self, view: GraphView) -> Iterator[Site | Skip]:
        constants = Constants(view, parameters=self.parameters)
        wanted = _wanted(view, constants)
        on_paper = _is_on_paper(view.gm)
        for node in view.nodes:
            if node not in wanted or node.op == "get_attr" or name_of(node) in _FREE:
                continue
            reason = self._why_not(view, node)
            value = constants.value(node) if reason is None else None
            if reason is None:
                reason = self._why_not_kept(value, on_paper) or _why_layout_matters(view.gm, node, value)
            if reason is not None:
                yield Skip(node, reason)
                continue
            assert isinstance(value, torch.Tensor)
            yield Site(
                (node,),
                f"{node.name} is a constant of shape {tuple(value.shape)}",
                (node, value, node in constants.weighted),
            )

    def _why_not(self, view: GraphView, node: Node) -> str | None:
        noted = example_value(node)
        if noted is not None and _nbytes(noted) > self.limit:
            return f"it takes more than {self.limit} bytes"
        for value, reader in aliases(view.gm, node):
            if reader.op == "output":
                return f"{value.name} leaves the graph, where somebody may write into it"
        return None

    def _why_not_kept(self, value: object, on_paper: bool) -> str | None:
        if not isinstance(value, torch.Tensor):
            return "it is not a tensor, or cannot be computed here"
        if (value.is_meta and not on_paper) or value.layout != torch.strided or value.is_quantized:
            return "it is not a plain tensor with values"
        return f"it takes more than {self.limit} bytes" if _nbytes(value) > self.limit else None

    def rewrite(self, site: Site, edit: Editor) -> None:
        node, value, weighted = site.detail
        path = _keep(edit, node.name, value)
        if not weighted:
            recording.current().maps.append(constant_record(path, value))
        fetch = edit.fetch(node, path)
        self.mark_as_transformed(fetch)
        edit.replace_uses(node, fetch)
        erase_dead(edit, [node])


def _is_on_paper(gm: nn.Module) -> bool:
    """Whether a module has no values at all (it lies on the meta device): its constants have none either."""
    tensors = [*gm.parameters(), *gm.buffers()]
    return bool(tensors) and all(tensor.is_meta for tensor in tensors)


def _wanted(view: GraphView, constants: Constants) -> set[Node]:
    """The constants that something reads which is none, also through calls that are free."""
    wanted: set[Node] = set()
    for node in reversed(view.nodes):
        if node not in constants.nodes:
            continue
        if any(user not in constants.nodes or (user in wanted and name_of(user) in _FREE) for user in node.users):
            wanted.add(node)
    return wanted


def _why_layout_matters(gm: GraphModule, node: Node, value: Any) -> str | None:
    """Why a copy will not do: its axes lie in memory in the same order, but values that were repeated by a stride of 0
    are laid out."""
    if all(stride != 0 or size < 2 for size, stride in zip(value.shape, value.stride(), strict=True)):
        return None
    reader = next((r for r in readers_behind(gm, node) if needs_layout(gm, r)), None)
    return None if reader is None else f"it repeats values in memory, and {reader.name} may depend on that"


def _keep(edit: Editor, name: str, value: torch.Tensor) -> str:
    """Keep a constant as a buffer that no checkpoint holds."""
    path = edit.free_path(f"constants.{name}")
    owner, _, key = path.rpartition(".")
    edit.container(owner).register_buffer(key, value.detach().clone(), persistent=False)
    return path


def _nbytes(tensor: torch.Tensor) -> int:
    sizes = [size for size in tensor.shape if isinstance(size, int)]
    return torch.Size(sizes).numel() * tensor.element_size() if len(sizes) == tensor.dim() else 0
