"""Decomposed attention: matmul, scale, mask, softmax, matmul; found from its softmax in both directions."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.fx import Node

from refold import fx_private
from refold.graph.arguments import argument, axis_order
from refold.graph.purity import drops_nothing
from refold.graph.targets import called_name
from refold.graph.values import example_value, rank_of, same_size, same_sizes
from refold.graph.view import GraphView
from refold.patterns.masks.bounds import MaskBounds
from refold.patterns.masks.formulas import Unknown
from refold.patterns.masks.interpretation import MaskFormulas
from refold.patterns.masks.verdict import proven
from refold.patterns.no_ops import NoOp, check_recorded_dtypes, match_no_op
from refold.rewrite.refusal import Refuse, attempt, plain, unchanged_between

_PRODUCTS = {"matmul", "bmm", "__matmul__"}
_CASTS = {"to", "_to_copy", "float", "type_as", "half", "bfloat16", "type"}
_DROPOUTS = {"dropout", "alias", "clone"}
_SOFTMAXES = {"softmax", "_softmax", "_safe_softmax"}


@dataclass(frozen=True)
class DecomposedAttention:
    """`softmax(scale·query·keysᵀ + mask)·value` in single steps; `keys` is what the query is multiplied with.

    The operands are read from the nodes when they are needed: another rewrite may have replaced them since."""

    sums: tuple[tuple[Node, int], ...]
    """The additions of masks, and which of its arguments the mask is."""
    scale: float
    softmax: Node
    nodes: tuple[Node, ...]

    @property
    def scores(self) -> Node:
        """The product of query and keys."""
        return self.nodes[0]

    @property
    def last(self) -> Node:
        """The product with the values."""
        return self.nodes[-1]

    @property
    def operands(self) -> tuple[Node, Node, Node]:
        """Query, keys and value."""
        return (*self.scores.args[:2], self.last.args[1])  # type: ignore[return-value]

    @property
    def masks(self) -> tuple[Node, ...]:
        """What is added to the scores."""
        return tuple(node.args[index] for node, index in self.sums)  # type: ignore[misc]

    @property
    def key(self) -> Node | None:
        """The keys before they were transposed, where they were."""
        keys = self.operands[1]
        order = axis_order(called_name(keys), keys, rank_of(keys))
        source, rank = argument(keys, 0, "input"), len(order or ())
        return source if order == [*range(rank - 2), rank - 1, rank - 2] and isinstance(source, Node) else None


class _NoAttention(Exception):
    """A softmax is not part of attention at all."""


def match_decomposed(view: GraphView, node: Node) -> DecomposedAttention | None:
    """The attention around a softmax, if there is any; refuses one that cannot be followed."""
    if not _is_softmax(view, node) or not isinstance(node.args[0], Node):
        return None
    try:
        last, behind = _follow(view, node)
        scores, sums, scale, before = _trace_back(node.args[0], node)
    except _NoAttention:
        return None
    if not all(isinstance(n, Node) for n in (*scores.args, last.args[1])):
        return None
    found = DecomposedAttention(sums, scale, node, (scores, *before, node, *behind, last))
    if not set(found.nodes).isdisjoint((*found.operands, *found.masks)):
        raise Refuse("its scores or weights are also operands of it")
    if node.op == "call_module":
        plain(view.gm.get_submodule(str(node.target)), (nn.Softmax,))
    return found


def _is_softmax(view: GraphView, node: Node) -> bool:
    if not node.args:
        return False
    if node.op == "call_module":
        module = view.module(str(node.target))
        return isinstance(module, nn.Softmax) and _is_last(module.dim, node)
    plain = called_name(node) in _SOFTMAXES and node.kwargs.get("out") is None
    return plain and _is_last(argument(node, 1, "dim"), node)


def _is_last(dim: Any, node: Node) -> bool:
    rank = rank_of(node)
    return dim == -1 or (isinstance(dim, int) and rank is not None and dim == rank - 1)


# --- forwards: dropout and casts, then the product with the values ---------------------------------------------------


def _follow(view: GraphView, softmax: Node) -> tuple[Node, list[Node]]:
    current = softmax
    passed: list[Node] = []
    while True:
        users = list(current.users)
        product = next((user for user in users if _is_product(user) and user.args[0] is current), None)
        if product is not None:
            others = [user.name for user in users if user is not product]
            if others:
                raise Refuse(f"its attention weights are also read by {', '.join(others)}")
            return product, passed
        if len(users) != 1 or not _passes(view, users[0], current):
            raise _NoAttention
        current = users[0]
        passed.append(current)


def _is_product(node: Node) -> bool:
    return called_name(node) in _PRODUCTS and len(node.args) == 2 and not node.kwargs


def _passes(view: GraphView, node: Node, value: Node) -> bool:
    """Whether a node hands on what it is given, but for its dtype."""
    if not node.args or node.args[0] is not value:
        return False
    if node.op == "call_module":
        module = view.module(str(node.target))
        if isinstance(module, nn.Dropout | nn.Identity) and fx_private.has_hooks(module):
            raise Refuse(f"hooks are registered on {node.target}, which its attention weights pass")
        return isinstance(attempt(match_no_op, view, node), NoOp)
    name = called_name(node)
    return name in _CASTS or (name in _DROPOUTS and (name != "dropout" or drops_nothing(node)))


# --- backwards: mask and scale, then the product of query and keys ---------------------------------------------------


def _trace_back(node: Node, softmax: Node) -> tuple[Node, tuple[tuple[Node, int], ...], float, list[Node]]:
    sums: tuple[tuple[Node, int], ...] = ()
    scale = 1.0
    passed: list[Node] = []
    reader = softmax
    while not _is_product(node):
        if list(node.users) != [reader]:
            raise _refusal(node, f"{node.name}, of its scores, is also read by others")
        reader, name, factor = node, called_name(node), _factor(node)
        passed.insert(0, node)
        if factor is not None:
            scale *= factor
            node = _first(node)
        elif name in ("add", "add_"):
            index = _index_of_mask(node)
            if scale != 1.0:
                raise Refuse("its mask is scaled with its scores")
            sums = ((node, index), *sums)
            node = node.args[1 - index]  # type: ignore[assignment]
        elif name in _CASTS or name in ("alias", "contiguous"):
            node = _first(node)
        else:
            raise _refusal(node, _why_strange(node, name))
    if list(node.users) != [reader]:
        raise Refuse(f"{node.name}, its scores, is also read by others")
    return node, sums, scale, passed


_SCALES = {"mul", "mul_", "div", "div_", "truediv", "true_divide"}


def _factor(node: Node) -> float | None:
    """What a node multiplies its input with, if that is a number and all that it does."""
    if called_name(node) not in _SCALES or len(node.args) + len(node.kwargs) != 2:
        return None
    number = argument(node, 1, "other")
    if not isinstance(number, int | float) or isinstance(number, bool):
        return None
    return float(number) if called_name(node).startswith("mul") else 1 / number if number else 0.0


def _refusal(node: Node, reason: str) -> Exception:
    """What to raise at a node that is not followed: a reason only where a softmax at least looks like attention."""
    return Refuse(reason) if _leads_to_product(node) else _NoAttention()


def _why_strange(node: Node, name: str) -> str:
    if name.startswith("masked_fill") or name == "where":
        return f"{name} masks its scores, and where a whole row is masked fused attention gives 0 instead"
    if name in _SCALES and node.kwargs.get("rounding_mode") is None:
        return "the scale of its scores is computed"
    return f"{name or node.target} changes its scores"


def _leads_to_product(node: Node) -> bool:
    """Whether there is a product a few calls back."""
    for _ in range(6):
        if _is_product(node):
            return True
        inputs = [n for n in node.args if isinstance(n, Node)]
        node = next((n for n in inputs if _is_product(n)), inputs[0]) if inputs else node
    return False


def _first(node: Node) -> Node:
    if not node.args or not isinstance(node.args[0], Node):
        raise _NoAttention
    return node.args[0]


def _index_of_mask(node: Node) -> int:
    """Which summand of `scores + mask` the mask is."""
    if len(node.args) != 2 or node.kwargs or not all(isinstance(a, Node) for a in node.args):
        raise _refusal(node, f"{called_name(node)} changes its scores")
    if _leads_only_to_scores(node.args[0]):
        return 1
    if called_name(node) == "add" and _leads_only_to_scores(node.args[1]):
        return 0
    raise _NoAttention


_STEPS = _SCALES | {"add", "add_"} | _CASTS


def _leads_only_to_scores(node: Any, depth: int = 8) -> bool:
    if not isinstance(node, Node) or depth == 0:
        return False
    if _is_product(node):
        return True
    if called_name(node) not in _STEPS:
        return False
    summands = node.args[:2] if called_name(node) == "add" else node.args[:1]
    return any(_leads_only_to_scores(n, depth - 1) for n in summands)


# --- refusals --------------------------------------------------------------------------------------------------------


def check_fusible(view: GraphView, found: DecomposedAttention) -> None:
    """Refuse decomposed attention that cannot become one call."""
    if not found.scale > 0 or not math.isfinite(found.scale):
        raise Refuse(f"its scores are scaled by {found.scale}")
    operands = [example_value(n) for n in found.operands]
    steps = [example_value(n) for n in found.nodes]
    if any(t is None for t in (*operands, *steps)):
        raise Refuse("the sizes of its operands are not recorded")
    _check_operands(*operands)  # type: ignore[arg-type]
    _check_steps(operands[0], steps)  # type: ignore[arg-type]
    for node in found.operands[:2]:
        unchanged_between(view, node, found.scores, found.last)
    for mask, (at, _) in zip(found.masks, found.sums, strict=True):
        unchanged_between(view, mask, at, found.last)
    if found.masks:
        _check_masks(view, found, operands[0], steps[0])  # type: ignore[arg-type]


def _check_operands(query: torch.Tensor, keys: torch.Tensor, value: torch.Tensor) -> None:
    if not query.dim() == keys.dim() == value.dim() or query.dim() not in (3, 4):
        raise Refuse(f"its operands have {query.dim()}, {keys.dim()} and {value.dim()} dimensions")
    if not all(same_sizes(query.shape[:-2], other.shape[:-2]) for other in (keys, value)):
        raise Refuse("its operands differ in batch or heads")
    if not query.dtype == keys.dtype == value.dtype:
        raise Refuse("its operands differ in dtype")
    if not query.is_floating_point():
        raise Refuse("it does not compute with real numbers")


def _check_steps(query: torch.Tensor, steps: list[torch.Tensor]) -> None:
    """Between the products, numbers may be more exact than the query's, not less."""
    for step in steps:
        if torch.promote_types(query.dtype, step.dtype) != step.dtype:
            raise Refuse(f"its scores or weights are rounded to {step.dtype}")
    if any(step.device != query.device for step in steps):
        raise Refuse("its scores or weights change the device")


def _check_masks(view: GraphView, found: DecomposedAttention, query: torch.Tensor, scores: torch.Tensor) -> None:
    dtypes = {t.dtype for t in (*view.gm.parameters(), *view.gm.buffers()) if t.is_floating_point()}
    if dtypes != {torch.float64}:  # no dtype has more numbers, so that no mask has become narrower
        check_recorded_dtypes(view)
    for node in found.masks:
        mask = example_value(node)
        if mask is None:
            raise Refuse("the sizes of its mask are not recorded")
        if mask.dtype != query.dtype:
            raise Refuse(f"its mask is of {mask.dtype} and its query of {query.dtype}")
        if mask.dim() < 2 or mask.dim() > scores.dim() or not _broadcasts(mask, scores):
            raise Refuse("its mask is not as wide as its scores")
    try:
        _check_bounded(view, found.masks, query.dtype)
    except Refuse:
        _check_bounded(view, [mask for mask in found.masks if not _is_open(view, mask)], query.dtype)


def _broadcasts(mask: torch.Tensor, scores: torch.Tensor) -> bool:
    sizes = zip(reversed(mask.shape), reversed(scores.shape), strict=False)
    return all(same_size(m, s) or str(m) == "1" for m, s in sizes)


def _check_bounded(view: GraphView, masks: Sequence[Node], dtype: torch.dtype) -> None:
    """A row that −∞ masks as a whole is NaN after softmax and 0 in fused attention: it must not come about.

    No row is masked as a whole by a sum of masks that are bounded from below, nor by one of them that is causal."""
    total = torch.zeros((), dtype=dtype)
    for mask in masks:
        total += view.analysis(MaskBounds).of(mask)[0]
        if not total > -math.inf:
            raise Refuse("its masks may add up to −∞ for a whole row")


def _is_open(view: GraphView, mask: Node) -> bool:
    """Whether a mask is proven to leave something open in each row: all of it, or as a causal one."""
    value = view.analysis(MaskFormulas).of(mask)
    return not isinstance(value, Unknown) and proven(value) is not None
