"""What the dimensions of a node's value follow in each of its inputs, proven from what it calls."""

from __future__ import annotations

from torch import nn
from torch.fx import Node

from refold.graph.targets import is_known_module, runs_unknown_code
from refold.graph.view import GraphView
from refold.patterns.dimensions import dimension_rules, layer_rules  # noqa: F401  (they enter the rules)
from refold.patterns.dimensions.layer_rules import followed_by_module
from refold.patterns.dimensions.sized_calls import (
    MIXES,
    RULES,
    Dims,
    Followed,
    NotUnderstood,
    SizedCall,
    recorded_sizes,
)

__all__ = ["MIXES", "Dims", "Followed", "followed_dims"]


def followed_dims(view: GraphView, node: Node) -> Followed | None:
    """For each tensor that a node reads, one entry for each dimension d of the node's value (each value, where it gives
    several): k, where index i along d is computed from index i along dimension k of the input alone, both of one size;
    None, where the input is read in the same way at every index along d (it is broadcast there); MIXES otherwise.

    A dimension of the input that no entry names is read as a whole, or at places that the node chooses. None as the
    answer means that nothing is known: what is called is unknown code or has no rule, sizes were not proven by capture,
    or memory of the node or of an input is written in place. Sizes are symbols: they are equal where that is proven.
    """
    sizes = recorded_sizes(node)
    if sizes is None or any(n in view.written for n in (node, *node.all_input_nodes)):
        return None
    call = SizedCall(view, node, sizes)
    try:
        return _followed(call)
    except NotUnderstood:
        return None


def _followed(call: SizedCall) -> Followed | None:
    node = call.node
    if node.op in ("placeholder", "get_attr"):
        return {}
    if node.op == "call_module":
        module = call.view.module(str(node.target))
        return followed_by_module(call, module) if isinstance(module, nn.Module) and is_known_module(module) else None
    if node.op not in ("call_function", "call_method") or runs_unknown_code(call.view.gm, node) or "out" in node.kwargs:
        return None
    rule = RULES.of(node)
    return None if rule is None else rule(call)
