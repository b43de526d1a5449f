"""What becomes of a value that turns from a tensor of its own into a slice of a larger one, and how that is called."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from torch.fx import GraphModule, Node

from refold.aliasing import makes_fresh, written_by
from refold.layout import NEED_LAYOUT, VIEWS, hands_out, has_dtype, is_foreign, make_reshape
from refold.match import Call, GraphView


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
        if reader.target in NEED_LAYOUT or (reader.target in VIEWS and has_dtype(reader)):
            return f"{reader.name} depends on the memory layout of its output"
    return None


def make_views_reshapes(gm: GraphModule, node: Node) -> None:
    """A slice cannot always be viewed in another shape, but always be reshaped. What leaves the graph is made whole. So
    is what code that is not torch's may read, or a view of it: such code meets the layout that it met before."""
    found = list(aliases(gm, node))
    for value, reader in found:
        if reader.target in VIEWS:
            make_reshape(reader)
        elif value is node and hands_out(reader):
            _read_contiguous(node, reader)
    make_whole_for_others(gm, node, [reader for _, reader in found])


def make_whole_for_others(gm: GraphModule, node: Node, readers: Iterable[Node]) -> None:
    """Let all that read a value read a contiguous copy, if there is code among these readers that is not torch's."""
    if any(is_foreign(gm, reader) and not hands_out(reader) for reader in readers):
        for reader in [user for user in node.users if not _is_contiguous_call(user)]:
            _read_contiguous(node, reader)


def _is_contiguous_call(node: Node) -> bool:
    return node.op == "call_method" and node.target == "contiguous"


def _read_contiguous(node: Node, reader: Node) -> None:
    existing = next(filter(_is_contiguous_call, node.users), None)
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


def why_not_movable(call: Call, tied: dict[int, str]) -> str | None:
    """Why a tensor cannot become a part of a larger one and come back as it lay."""
    for role, operand in call.operands.items():
        if id(operand.tensor) in tied:
            return f"its {role} shares memory with {tied[id(operand.tensor)]}"
        if not operand.tensor.is_contiguous():
            return f"its {role} does not lie row by row in memory"
    return None
