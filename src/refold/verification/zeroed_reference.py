"""What a change that zeroes padding is compared with: the graph before it, with the same zeros in its outputs."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from torch.fx import GraphModule, Node
from torch.fx.node import map_arg

from refold.graph.layout import hands_out
from refold.patterns.packing.token_operators import OPERATORS
from refold.record.copies import working_copy
from refold.rewrite.transformation import Transformation
from refold.verification.stages import Stage


def zeroes_padding(stage: Stage, transformation: Transformation | None) -> bool:
    """Whether a change puts zeros at padding into outputs, and the transformation says that it changes what is
    computed: of one that promises to preserve it, zeros are a defect."""
    if transformation is None or transformation.preserves_computation:
        return False
    return any(_is_zeroed(node) and node.name in stage.change.created for node in stage.after.graph.nodes)


def zeroed_stage(stage: Stage) -> Stage:
    """The same change with zeros on both sides."""
    return replace(stage, before=with_zeros_of(stage.after, stage.before))


def with_zeros_of(after: GraphModule, before: GraphModule) -> GraphModule:
    """A copy of the graph before a change whose outputs are zeros where the graph after it writes zeros at padding."""
    copy = working_copy(before)
    named = {node.name: node for node in copy.graph.nodes}
    pending = [tuple(next(iter(gm.graph.find_nodes(op="output"))) for gm in (copy, after))]
    while pending:
        old, new = pending.pop()
        operands, zeroed = _operands(old), _operands(new)
        if len(operands) != len(zeroed):
            continue  # another structure, which is told elsewhere
        for a, b in dict(zip(operands, zeroed, strict=True)).items():
            if _is_zeroed(b) and not _is_zeroed(a):
                _put_zeros(copy, old, a, b, named)
            elif a.op == b.op == "call_function" and hands_out(a) and hands_out(b):
                pending.append((a, b))
    copy.recompile()
    return copy


def _put_zeros(gm: GraphModule, holder: Node, value: Node, like: Node, named: dict[str, Node]) -> None:
    """Let an object that is given out hold a value with zeros, by the mask that another graph reads them from."""
    _, mask, *dims = like.args
    if not isinstance(mask, Node) or mask.op != "placeholder" or mask.name not in named:
        return
    with gm.graph.inserting_before(holder):
        zeros = gm.graph.call_function(OPERATORS.zero_padding.default, (value, named[mask.name], *dims))
    holder.replace_input_with(value, zeros)


def _is_zeroed(node: Node) -> bool:
    return node.target is OPERATORS.zero_padding.default


def _operands(node: Node) -> list[Node]:
    """All that a node reads, as often as it does."""
    found: list[Node] = []

    def take(operand: Node) -> Any:
        found.append(operand)
        return operand

    map_arg((node.args, node.kwargs), take)
    return found
