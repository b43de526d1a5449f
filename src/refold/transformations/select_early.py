"""SelectEarly: where only some places of a value are read, the others are not computed."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch.fx import Node

from refold.examples import Example, attention_layers
from refold.graph.purity import is_pure
from refold.graph.view import GraphView
from refold.patterns.dimensions.sized_calls import recorded_sizes
from refold.patterns.narrowed_calls import inputs_to_narrow, narrowed
from refold.patterns.selections import Selection, drops_dimension, selection_of
from refold.rewrite.editor import Editor
from refold.rewrite.refusal import Refuse
from refold.rewrite.rule import ReversibleRewrite, Site


@dataclass(frozen=True, kw_only=True, repr=False)
class SelectEarly(ReversibleRewrite):
    """Choose places (the first token, the last one, those that an index names) before the work and not behind it.

    `f(x)[:, i] = f(x[:, i])`  where `f` computes each place along the dimension from the same place of its inputs:
    arithmetic, norms, projections, residual additions; `attention(q, k, v, M)[i] = attention(q[i], k, v, M[i])`.

    Keys and values stay whole. Causal attention becomes the rows of its mask for the chosen queries. A classifier that
    reads its first token computes 2 of the 12 products of its last encoder layer for all tokens, and the rest for one.
    It stops where others read the whole value, where places are mixed, and where less than half would be saved.
    """

    kind: ClassVar[str] = "graph"

    @classmethod
    def examples(cls) -> Iterable[Example]:
        return [attention_layers.first_token(), attention_layers.last_token(), attention_layers.indexed_tokens()]

    def match(self, view: GraphView, node: Node) -> Site | None:
        readers = list(node.users)
        chosen = [selection_of(reader) if reader.args[:1] == (node,) else None for reader in readers]
        if node.op not in ("call_function", "call_module", "call_method") or not any(chosen):
            return None
        selection = chosen[0]
        if selection is None or any(other != selection for other in chosen):
            others = [reader.name for reader, other in zip(readers, chosen, strict=True) if other is None]
            raise Refuse(f"all of it is read by {', '.join(others)}" if others else "its readers choose differently")
        own = selection_of(node)
        if own is not None and own.dim <= selection.dim:
            return None  # two that follow each other stay in the order of their dimensions
        cuts = inputs_to_narrow(view, node, selection.dim)
        hoisted = _to_hoist(view, node, selection)
        what = f"{node.name} is computed only where it is read"
        return Site((node, *readers), what, (selection, cuts, hoisted), (*node.all_input_nodes, *hoisted))

    def rewrite(self, site: Site, edit: Editor) -> None:
        node, *readers = site.nodes
        selection, cuts, hoisted = site.detail
        for needed in hoisted:
            node.prepend(needed)
        count = next((size[selection.dim] for r in readers if not drops_dimension(r) if (size := recorded_sizes(r))), 1)
        part = narrowed(edit, node, cuts, selection, count)
        for reader in readers:
            found = part
            if drops_dimension(reader):
                found = edit.call(reader, torch.ops.aten.select.int, part, selection.dim, 0)
            edit.replace_uses(reader, found)
            edit.erase(reader)
        edit.erase(node)


def _to_hoist(view: GraphView, node: Node, selection: Selection) -> list[Node]:
    """What makes the index, as far as it stands behind a node that is to know it."""
    if selection.index is None:
        return []
    behind = [n for n in view.needed_for(selection.index, ()) if view.position[n] >= view.position[node]]
    if node in behind:
        raise Refuse("which places are read depends on it")
    if view.mode_switches or any(not is_pure(view.gm, n) or n in view.written_memory for n in behind):
        raise Refuse("which places are read is not known before it")
    return behind
