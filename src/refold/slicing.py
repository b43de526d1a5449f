"""What becomes of a value that turns from a tensor of its own into a slice of a larger one, and how that is called."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch.fx import GraphModule, Node

from refold.aliasing import makes_fresh, written_by
from refold.layout import NEED_LAYOUT, VIEWS, is_foreign
from refold.match import GraphView


def aliases(gm: GraphModule, node: Node) -> Iterator[tuple[Node, Node]]:
    """(value, reader) for a value and everything that may be a view of it."""
    pending, seen = [node], {node}
    while pending:
        value = pending.pop()
        for reader in value.users:
            yield value, reader
            if reader.op != "output" and reader not in seen and not makes_fresh(gm, reader):
                seen.add(reader)
                pending.append(reader)


def why_not_sliceable(view: GraphView, node: Node) -> str | None:
    """Why a node's value must keep memory of its own, as a sentence; None if a slice will do."""
    for value, reader in aliases(view.gm, node):
        if value in written_by(view.gm, reader):
            return f"{reader.name} writes into its output in place"
        if reader.target in NEED_LAYOUT or (reader.target in VIEWS and _has_dtype(reader)):
            return f"{reader.name} depends on the memory layout of its output"
    return None


def make_views_reshapes(gm: GraphModule, node: Node) -> None:
    """A slice cannot always be viewed in another shape, but always be reshaped; what leaves the graph is made whole."""
    for value, reader in list(aliases(gm, node)):
        if reader.target in VIEWS:
            reader.target = VIEWS[reader.target]
        elif value is node and (reader.op == "output" or is_foreign(gm, reader)):
            _read_contiguous(node, reader)


def _has_dtype(node: Node) -> bool:
    return any(isinstance(a, torch.dtype) for a in [*node.args, *node.kwargs.values()])


def _read_contiguous(node: Node, reader: Node) -> None:
    existing = next((u for u in node.users if u.op == "call_method" and u.target == "contiguous"), None)
    if existing is None:
        with node.graph.inserting_after(node):
            existing = node.graph.call_method("contiguous", (node,))
        existing.meta = {k: v for k, v in node.meta.items() if k in ("val", "tensor_meta")}
    reader.replace_input_with(node, existing)


def merged_path(names: list[str]) -> str:
    """`a.b.q`, `a.b.k` -> `a.b.q_k_merged`: under the deepest path they share, named after their own names."""
    split = [name.split(".") for name in names]
    shared = 0
    while all(len(parts) > shared + 1 and parts[shared] == split[0][shared] for parts in split):
        shared += 1
    own = "_".join("_".join(parts[shared:]) for parts in split[:4])
    more = f"_and_{len(split) - 4}_more" if len(split) > 4 else ""
    return ".".join([*split[0][:shared], f"{own}{more}_merged"])
