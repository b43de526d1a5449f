"""Attention that is written out: matmul, scale, mask, softmax, matmul; found from its softmax in both directions."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.fx import Node

from refold.attention import same_size, same_sizes
from refold.index_expressions import Unknown
from refold.mask_analysis import Analysis
from refold.match import GraphView, example_value, rank_of
from refold.purity import drops_nothing, name_of

_PRODUCTS = {"matmul", "bmm", "__matmul__"}
_CASTS = {"to", "_to_copy", "float", "type_as", "half", "bfloat16", "type"}
_DROPOUTS = {"dropout", "alias", "clone"}


@dataclass(frozen=True)
class Written:
    """Attention written out: `softmax(scale·query·keysᵀ + mask)·value`; `keys` is what the query is multiplied with."""

    query: Node
    keys: Node
    value: Node
    masks: tuple[Node, ...]
    scale: float
    softmax: Node
    last: Node
    nodes: tuple[Node, ...]

    @property
    def key(self) -> Node | None:
        """The keys before they were transposed, where they were."""
        return _untransposed(self.keys)


class _No(Exception):
    """Why a softmax is not part of attention that can be fused, as a sentence."""


def match_written(view: GraphView, node: Node) -> Written | str | None:
    """The attention around a softmax, a sentence why it is left alone, or None where there is none."""
    if not _is_softmax(view, node) or not isinstance(node.args[0], Node):
        return None
    try:
        last, behind = _follow(view, node)
        scores, masks, scale, before = _trace_back(view, node.args[0], node)
    except _No as reason:
        return str(reason) or None
    query, keys = scores.args[:2]
    value = last.args[1]
    if not all(isinstance(n, Node) for n in (query, keys, value)):
        return None
    nodes = (scores, *before, node, *behind, last)
    return Written(query, keys, value, masks, scale, node, last, nodes)  # type: ignore[arg-type]


def _is_softmax(view: GraphView, node: Node) -> bool:
    if node.op == "call_module":
        module = view.module(str(node.target))
        return type(module) is nn.Softmax and _is_last(module.dim, node)
    if node.op not in ("call_function", "call_method") or name_of(node) not in ("softmax", "_softmax", "_safe_softmax"):
        return False
    return bool(node.args) and _is_last(node.args[1] if len(node.args) > 1 else node.kwargs.get("dim"), node)


def _is_last(dim: Any, node: Node) -> bool:
    rank = rank_of(node)
    return dim == -1 or (isinstance(dim, int) and rank is not None and dim == rank - 1)


# --- forwards: dropout and casts, then the product with the values ---------------------------------------------------


def _follow(view: GraphView, softmax: Node) -> tuple[Node, list[Node]]:
    current = softmax
    passed: list[Node] = []
    while True:
        users = list(current.users)
        reader = users[0] if users else None
        if reader is not None and _is_product(reader) and reader.args[0] is current:
            if len(users) > 1:
                raise _No(f"its attention weights are also read by {users[1].name}")
            return reader, passed
        if len(users) != 1 or reader is None or not _passes(view, reader, current):
            product = next((u for u in users if _is_product(u) and u.args[0] is current), None)
            others = [u.name for u in users if u is not product]
            raise _No(f"its attention weights are also read by {', '.join(others)}" if product is not None else "")
        current = reader
        passed.append(reader)


def _is_product(node: Node) -> bool:
    plain = node.op in ("call_function", "call_method") and len(node.args) == 2 and not node.kwargs
    return plain and name_of(node) in _PRODUCTS


def _passes(view: GraphView, node: Node, value: Node) -> bool:
    """Whether a node hands on what it is given, but for its dtype."""
    if not node.args or node.args[0] is not value:
        return False
    if node.op == "call_module":
        module = view.module(str(node.target))
        return type(module) in (nn.Dropout, nn.Identity) and (not module.training or type(module) is nn.Identity)  # type: ignore[union-attr]
    name = name_of(node)
    return name in _CASTS or (name in _DROPOUTS and (name != "dropout" or drops_nothing(node)))


# --- backwards: mask and scale, then the product of query and keys ---------------------------------------------------


def _trace_back(view: GraphView, node: Node, softmax: Node) -> tuple[Node, tuple[Node, ...], float, list[Node]]:
    masks: tuple[Node, ...] = ()
    scale = 1.0
    passed: list[Node] = []
    reader = softmax
    while not _is_product(node):
        if list(node.users) != [reader]:
            raise _No("" if not _leads_to_product(node) else f"{node.name}, of its scores, is also read by others")
        reader, name = node, name_of(node)
        passed.insert(0, node)
        if name in ("add", "add_") and not _is_number(node.args[1]):
            if scale != 1.0:
                raise _No("its mask is scaled with its scores")
            node, mask = _split_sum(node)
            masks = (mask, *masks)
        elif name in ("mul", "mul_", "div", "div_", "truediv", "true_divide") and _is_number(node.args[1]):
            factor = float(node.args[1])  # type: ignore[arg-type]
            scale = scale * factor if name.startswith("mul") else scale / factor if factor else 0.0
            node = _first(node)
        elif name in _CASTS or name in ("alias", "contiguous"):
            node = _first(node)
        else:
            raise _No(_why_strange(node, name))
    if list(node.users) != [reader]:
        raise _No(f"{node.name}, its scores, is also read by others")
    return node, masks, scale, passed


def _why_strange(node: Node, name: str) -> str:
    if not _leads_to_product(node):
        return ""
    if name.startswith("masked_fill") or name == "where":
        return f"{name} masks its scores, and where a whole row is masked fused attention gives 0 instead"
    if name in ("mul", "mul_", "div", "div_", "truediv"):
        return "the scale of its scores is computed"
    return f"{name} changes its scores"


def _leads_to_product(node: Node) -> bool:
    """Whether there is a product a few calls back, so that a softmax at least looks like attention."""
    for _ in range(6):
        if _is_product(node):
            return True
        inputs = [n for n in node.args if isinstance(n, Node)]
        node = next((n for n in inputs if _is_product(n)), inputs[0]) if inputs else node
    return False


def _first(node: Node) -> Node:
    if not isinstance(node.args[0], Node):
        raise _No("")
    return node.args[0]


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _split_sum(node: Node) -> tuple[Node, Node]:
    """Which summand of `scores + mask` the scores are."""
    if len(node.args) != 2 or node.kwargs or not all(isinstance(a, Node) for a in node.args):
        raise _No("")
    a, b = node.args
    if _leads_only_to_scores(a):
        return a, b  # type: ignore[return-value]
    if name_of(node) == "add" and _leads_only_to_scores(b):
        return b, a  # type: ignore[return-value]
    raise _No("")


_STEPS = {"mul", "mul_", "div", "div_", "truediv", "true_divide", "add", "add_"} | _CASTS


def _leads_only_to_scores(node: Any, depth: int = 8) -> bool:
    if not isinstance(node, Node) or depth == 0:
        return False
    if _is_product(node):
        return True
    if name_of(node) not in _STEPS:
        return False
    summands = node.args[:2] if name_of(node) == "add" else node.args[:1]
    return any(_leads_only_to_scores(n, depth - 1) for n in summands)


def _untransposed(keys: Node) -> Node | None:
    if keys.op not in ("call_function", "call_method") or not keys.args or not isinstance(keys.args[0], Node):
        return None
    rank = rank_of(keys)
    dims = keys.args[1:3]
    if name_of(keys) == "transpose" and len(dims) == 2 and all(isinstance(d, int) for d in dims):
        ends = {-1, -2} if rank is None else {rank - 1, rank - 2}
        given = set(dims) if rank is None else {d % rank for d in dims}  # type: ignore[operator]
        return keys.args[0] if given == ends else None
    return None


# --- refusals --------------------------------------------------------------------------------------------------------


def why_not_fusible(view: GraphView, found: Written, analysis: Callable[[], Analysis]) -> str | None:
    """Why attention that is written out cannot become one call, as a sentence."""
    if not found.scale > 0 or not math.isfinite(found.scale):
        return f"its scores are scaled by {found.scale}"
    operands = (found.query, found.keys, found.value)
    noted = [example_value(n) for n in operands]
    if any(t is None for t in noted):
        return "the sizes of its operands are not noted"
    reasons = (_why_mask(mask, found, noted[0], analysis) for mask in found.masks)  # type: ignore[arg-type]
    return _why_shapes(noted) or next((reason for reason in reasons if reason is not None), None)  # type: ignore[arg-type]


def _why_shapes(noted: list[torch.Tensor]) -> str | None:
    query, keys, value = noted
    if not query.dim() == keys.dim() == value.dim() or query.dim() not in (3, 4):
        return f"its operands have {query.dim()}, {keys.dim()} and {value.dim()} dimensions"
    batches = [t.shape[:-2] for t in noted]
    if not (same_sizes(batches[0], batches[1]) and same_sizes(batches[0], batches[2])):
        return "its operands differ in batch or heads"
    if not query.dtype == keys.dtype == value.dtype:
        return "its operands differ in dtype"
    if not query.is_floating_point():
        return "it does not compute with real numbers"
    return None


def _why_mask(node: Node, found: Written, query: torch.Tensor, analysis: Callable[[], Analysis]) -> str | None:
    mask, scores = example_value(node), example_value(found.nodes[0])
    if mask is None or scores is None:
        return "the sizes of its mask are not noted"
    if mask.dtype != query.dtype:
        return f"its mask is of {mask.dtype} and its query of {query.dtype}"
    if mask.dim() < 2 or mask.dim() > scores.dim() or not _broadcasts(mask, scores):
        return "its mask is not as wide as its scores"
    return _why_may_block(node, analysis)


def _broadcasts(mask: torch.Tensor, scores: torch.Tensor) -> bool:
    sizes = zip(reversed(mask.shape), reversed(scores.shape), strict=False)
    return all(same_size(m, s) or str(m) == "1" for m, s in sizes)


def _why_may_block(mask: Node, analysis: Callable[[], Analysis]) -> str | None:
    """A row that −∞ masks as a whole is NaN after softmax and 0 in fused attention: it must not come about."""
    pending, seen = [mask], {mask}
    while pending:
        node = pending.pop()
        if node.op == "placeholder" and _carries(node):
            return f"its mask is made from the input {node.target}, which may hold −∞ for a whole row"
        if any(a == -math.inf for a in node.args if isinstance(a, float)) and not _is_causal(mask, analysis):
            return f"{node.name} puts −∞ into its mask, maybe for a whole row"
        for n in node.all_input_nodes if node.op != "call_module" else ():
            if n not in seen and not _is_size_or_device(n):
                seen.add(n)
                pending.append(n)
    return None


def _is_size_or_device(node: Node) -> bool:
    return node.op != "placeholder" and (node.target is getattr or name_of(node) in ("sym_size", "size", "dim"))


def _carries(node: Node) -> bool:
    noted = example_value(node)
    return noted is None or noted.is_floating_point()


def _is_causal(mask: Node, analysis: Callable[[], Analysis]) -> bool:
    from refold.transformations.simplify_attention_mask import proven

    value = analysis().of(mask)
    return not isinstance(value, Unknown) and proven(value) is not None


# --- repeated heads --------------------------------------------------------------------------------------------------


def unrepeated(node: Node) -> tuple[Node, int] | None:
    """The keys or values before each head was repeated, and how many times; None where they were not."""
    if name_of(node) == "repeat_interleave" and len(node.args) >= 2 and isinstance(node.args[0], Node):
        times, dim = node.args[1], node.args[2] if len(node.args) > 2 else node.kwargs.get("dim")
        return (node.args[0], times) if isinstance(times, int) and dim in (1, -3) and rank_of(node) == 4 else None
    if name_of(node) not in ("reshape", "view", "flatten", "contiguous") or not node.args:
        return None
    expanded = _behind_slices(node.args[0])
    if expanded is None or name_of(expanded) != "expand":
        return None
    unsqueezed = _behind_slices(expanded.args[0])
    if unsqueezed is None or name_of(unsqueezed) != "unsqueeze" or unsqueezed.args[1] not in (2, -3):
        return None
    source = _behind_slices(unsqueezed.args[0])
    return _repeated(source, expanded, node) if source is not None else None


def _behind_slices(node: Any) -> Node | None:
    """A node, or what it is a full slice of."""
    while isinstance(node, Node) and name_of(node) == "slice" and node.args[2:4] == (0, torch.iinfo(torch.int64).max):
        node = node.args[0]
    return node if isinstance(node, Node) else None


def _repeated(source: Node, expanded: Node, result: Node) -> tuple[Node, int] | None:
    first, middle, last = example_value(source), example_value(expanded), example_value(result)
    if first is None or middle is None or last is None or (first.dim(), middle.dim(), last.dim()) != (4, 5, 4):
        return None
    batch, heads, length, width = first.shape
    times = middle.shape[2]
    if not isinstance(times, int) or not isinstance(heads, int):
        return None
    fits = same_sizes(middle.shape, (batch, heads, times, length, width))
    return (source, times) if fits and same_sizes(last.shape, (batch, heads * times, length, width)) else None
