"""Attention that is written out: matmul, scale, mask, softmax, matmul; found from its softmax in both directions."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.fx import Node

from refold import fx_private
from refold.arguments import argument
from refold.attention import same_size, same_sizes, why_not_read_later
from refold.index_expressions import Unknown
from refold.mask_analysis import Analysis
from refold.mask_bounds import MaskBounds
from refold.match import GraphView, example_value, rank_of, why_not_plain
from refold.no_ops import NoOp, match_no_op, noted_dtypes_hold
from refold.purity import drops_nothing, name_of

_PRODUCTS = {"matmul", "bmm", "__matmul__"}
_CASTS = {"to", "_to_copy", "float", "type_as", "half", "bfloat16", "type"}
_DROPOUTS = {"dropout", "alias", "clone"}
_SOFTMAXES = {"softmax", "_softmax", "_safe_softmax"}


@dataclass(frozen=True)
class Written:
    """Attention written out: `softmax(scale·query·keysᵀ + mask)·value`; `keys` is what the query is multiplied with.

    The operands are read from the nodes when they are asked for: another rewrite may have replaced them since."""

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
        return tuple(node.args[place] for node, place in self.sums)  # type: ignore[misc]

    @property
    def key(self) -> Node | None:
        """The keys before they were transposed, where they were."""
        return _untransposed(self.operands[1])


class _No(Exception):
    """Why a softmax is not part of attention that can be fused, as a sentence."""


def match_written(view: GraphView, node: Node) -> Written | str | None:
    """The attention around a softmax, a sentence why it is left alone, or None where there is none."""
    if not _is_softmax(view, node) or not isinstance(node.args[0], Node):
        return None
    try:
        last, behind = _follow(view, node)
        scores, sums, scale, before = _trace_back(node.args[0], node)
    except _No as reason:
        return str(reason) or None
    if not all(isinstance(n, Node) for n in (*scores.args, last.args[1])):
        return None
    found = Written(sums, scale, node, (scores, *before, node, *behind, last))
    if not set(found.nodes).isdisjoint((*found.operands, *found.masks)):
        return "its scores or weights are also operands of it"
    return _why_module(view, node) or found


def _called(node: Node) -> str:
    """The bare name of the function or method that a node calls; modules, whatever their names, have none."""
    return name_of(node) if node.op in ("call_function", "call_method") else ""


def _is_softmax(view: GraphView, node: Node) -> bool:
    if not node.args:
        return False
    if node.op == "call_module":
        module = view.module(str(node.target))
        return isinstance(module, nn.Softmax) and _is_last(module.dim, node)
    plain = _called(node) in _SOFTMAXES and node.kwargs.get("out") is None
    return plain and _is_last(argument(node, 1, "dim"), node)


def _why_module(view: GraphView, softmax: Node) -> str | None:
    module = view.module(str(softmax.target)) if softmax.op == "call_module" else None
    return why_not_plain(module, (nn.Softmax,)) if module is not None else None


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
    return _called(node) in _PRODUCTS and len(node.args) == 2 and not node.kwargs


def _passes(view: GraphView, node: Node, value: Node) -> bool:
    """Whether a node hands on what it is given, but for its dtype."""
    if not node.args or node.args[0] is not value:
        return False
    if node.op == "call_module":
        module = view.module(str(node.target))
        if isinstance(module, nn.Dropout | nn.Identity) and fx_private.has_hooks(module):
            raise _No(f"hooks are registered on {node.target}, which its attention weights pass")
        return isinstance(match_no_op(view, node), NoOp)
    name = _called(node)
    return name in _CASTS or (name in _DROPOUTS and (name != "dropout" or drops_nothing(node)))


# --- backwards: mask and scale, then the product of query and keys ---------------------------------------------------


def _trace_back(node: Node, softmax: Node) -> tuple[Node, tuple[tuple[Node, int], ...], float, list[Node]]:
    sums: tuple[tuple[Node, int], ...] = ()
    scale = 1.0
    passed: list[Node] = []
    reader = softmax
    while not _is_product(node):
        if list(node.users) != [reader]:
            raise _No("" if not _leads_to_product(node) else f"{node.name}, of its scores, is also read by others")
        reader, name, factor = node, _called(node), _factor(node)
        passed.insert(0, node)
        if factor is not None:
            scale *= factor
            node = _first(node)
        elif name in ("add", "add_"):
            place = _place_of_mask(node)
            if scale != 1.0:
                raise _No("its mask is scaled with its scores")
            sums = ((node, place), *sums)
            node = node.args[1 - place]  # type: ignore[assignment]
        elif name in _CASTS or name in ("alias", "contiguous"):
            node = _first(node)
        else:
            raise _No(_why_strange(node, name))
    if list(node.users) != [reader]:
        raise _No(f"{node.name}, its scores, is also read by others")
    return node, sums, scale, passed


_SCALES = {"mul", "mul_", "div", "div_", "truediv", "true_divide"}


def _factor(node: Node) -> float | None:
    """What a node multiplies its input with, if that is a number and all that it does."""
    if _called(node) not in _SCALES or len(node.args) + len(node.kwargs) != 2:
        return None
    number = argument(node, 1, "other")
    if not isinstance(number, int | float) or isinstance(number, bool):
        return None
    return float(number) if _called(node).startswith("mul") else 1 / number if number else 0.0


def _why_strange(node: Node, name: str) -> str:
    if not _leads_to_product(node):
        return ""
    if name.startswith("masked_fill") or name == "where":
        return f"{name} masks its scores, and where a whole row is masked fused attention gives 0 instead"
    if name in _SCALES and node.kwargs.get("rounding_mode") is None:
        return "the scale of its scores is computed"
    return f"{name or node.target} changes its scores"


def _leads_to_product(node: Node) -> bool:
    """Whether there is a product a few calls back, so that a softmax at least looks like attention."""
    for _ in range(6):
        if _is_product(node):
            return True
        inputs = [n for n in node.args if isinstance(n, Node)]
        node = next((n for n in inputs if _is_product(n)), inputs[0]) if inputs else node
    return False


def _first(node: Node) -> Node:
    if not node.args or not isinstance(node.args[0], Node):
        raise _No("")
    return node.args[0]


def _place_of_mask(node: Node) -> int:
    """Which summand of `scores + mask` the mask is."""
    if len(node.args) != 2 or node.kwargs or not all(isinstance(a, Node) for a in node.args):
        raise _No(f"{_called(node)} changes its scores" if _leads_to_product(node) else "")
    if _leads_only_to_scores(node.args[0]):
        return 1
    if _called(node) == "add" and _leads_only_to_scores(node.args[1]):
        return 0
    raise _No("")


_STEPS = _SCALES | {"add", "add_"} | _CASTS


def _leads_only_to_scores(node: Any, depth: int = 8) -> bool:
    if not isinstance(node, Node) or depth == 0:
        return False
    if _is_product(node):
        return True
    if _called(node) not in _STEPS:
        return False
    summands = node.args[:2] if _called(node) == "add" else node.args[:1]
    return any(_leads_only_to_scores(n, depth - 1) for n in summands)


def _untransposed(keys: Node) -> Node | None:
    if _called(keys) != "transpose" or not keys.args or not isinstance(keys.args[0], Node):
        return None
    rank = rank_of(keys)
    dims = keys.args[1:3]
    if len(dims) == 2 and all(isinstance(d, int) for d in dims):
        ends = {-1, -2} if rank is None else {rank - 1, rank - 2}
        given = set(dims) if rank is None else {d % rank for d in dims}  # type: ignore[operator]
        return keys.args[0] if given == ends else None
    return None


# --- refusals --------------------------------------------------------------------------------------------------------


def why_not_fusible(
    view: GraphView, found: Written, bounds: MaskBounds, analysis: Callable[[], Analysis]
) -> str | None:
    """Why attention that is written out cannot become one call, as a sentence."""
    if not found.scale > 0 or not math.isfinite(found.scale):
        return f"its scores are scaled by {found.scale}"
    noted = [example_value(n) for n in found.operands]
    steps = [example_value(n) for n in found.nodes]
    if any(t is None for t in (*noted, *steps)):
        return "the sizes of its operands are not noted"
    reason = _why_shapes(noted) or _why_steps(noted[0], steps)  # type: ignore[arg-type]
    reads = [(n, found.scores) for n in found.operands[:2]] + [(n.args[place], n) for n, place in found.sums]
    moved = (why_not_read_later(view, value, at, found.last) for value, at in reads)  # type: ignore[arg-type]
    reason = reason or next((r for r in moved if r is not None), None)
    if reason is not None or not found.masks:
        return reason
    if _may_be_narrower(view):
        return "the dtypes that capture noted no longer hold: the module was cast since"
    reasons = (_why_mask(mask, noted[0], steps[0]) for mask in found.masks)  # type: ignore[arg-type]
    return next((r for r in reasons if r is not None), None) or _why_may_block(found, bounds, analysis)


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


def _why_steps(query: torch.Tensor, steps: list[torch.Tensor]) -> str | None:
    """Between the products, numbers may be more exact than the query's, not less."""
    coarse = next((t.dtype for t in steps if torch.promote_types(query.dtype, t.dtype) != t.dtype), None)
    if coarse is not None:
        return f"its scores or weights are rounded to {coarse}"
    return None if all(t.device == query.device for t in steps) else "its scores or weights change the device"


def _why_mask(node: Node, query: torch.Tensor, scores: torch.Tensor) -> str | None:
    mask = example_value(node)
    if mask is None:
        return "the sizes of its mask are not noted"
    if mask.dtype != query.dtype:
        return f"its mask is of {mask.dtype} and its query of {query.dtype}"
    if mask.dim() < 2 or mask.dim() > scores.dim() or not _broadcasts(mask, scores):
        return "its mask is not as wide as its scores"
    return None


def _broadcasts(mask: torch.Tensor, scores: torch.Tensor) -> bool:
    sizes = zip(reversed(mask.shape), reversed(scores.shape), strict=False)
    return all(same_size(m, s) or str(m) == "1" for m, s in sizes)


def _may_be_narrower(view: GraphView) -> bool:
    """Whether masks may be of a dtype with fewer numbers than capture noted."""
    dtypes = {t.dtype for t in (*view.gm.parameters(), *view.gm.buffers()) if t.is_floating_point()}
    return dtypes != {torch.float64} and not noted_dtypes_hold(view)


def _why_may_block(found: Written, bounds: MaskBounds, analysis: Callable[[], Analysis]) -> str | None:
    """A row that −∞ masks as a whole is NaN after softmax and 0 in fused attention: it must not come about.

    No row is masked as a whole by a sum of masks that are bounded from below, nor by one of them that is causal."""
    total = torch.zeros((), dtype=example_value(found.masks[0]).dtype)  # type: ignore[union-attr]
    reasons = [_added(total, bounds.of(mask)) for mask in found.masks]
    if not any(reasons):
        return None
    total.zero_()
    open_to_all = (mask for mask in found.masks if not _is_causal(mask, analysis))
    reasons = [_added(total, bounds.of(mask)) for mask in open_to_all]
    return next((reason for reason in reasons if reason is not None), None)


def _added(total: torch.Tensor, found: tuple[float, float] | str) -> str | None:
    """Add the lower bound of a mask to that of others; why the sum may be −∞, as a sentence."""
    if isinstance(found, str):
        return found
    total += found[0]
    return None if total > -math.inf else "its masks may add up to −∞ for a whole row"


def _is_causal(mask: Node, analysis: Callable[[], Analysis]) -> bool:
    from refold.transformations.simplify_attention_mask import proven

    value = analysis().of(mask)
    return not isinstance(value, Unknown) and proven(value) is not None


# --- repeated heads --------------------------------------------------------------------------------------------------


def unrepeated(node: Node) -> tuple[Node, int] | None:
    """The keys or values before each head was repeated, and how many times; None where they were not."""
    if _called(node) == "repeat_interleave" and len(node.args) >= 2 and isinstance(node.args[0], Node):
        times, dim = node.args[1], argument(node, 2, "dim")
        return (node.args[0], times) if isinstance(times, int) and dim in (1, -3) and rank_of(node) == 4 else None
    if _called(node) not in ("reshape", "view", "flatten", "contiguous"):
        return None
    expanded = _behind_slices(argument(node, 0, "input"))
    if expanded is None or _called(expanded) != "expand":
        return None
    unsqueezed = _behind_slices(argument(expanded, 0, "input"))
    if unsqueezed is None or _called(unsqueezed) != "unsqueeze" or argument(unsqueezed, 1, "dim") not in (2, -3):
        return None
    source = _behind_slices(argument(unsqueezed, 0, "input"))
    return _repeated(source, expanded, node) if source is not None else None


def _behind_slices(node: Any) -> Node | None:
    """A node, or what it is a full slice of."""
    while isinstance(node, Node) and _called(node) == "slice" and node.args[2:] == (0, torch.iinfo(torch.int64).max):
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
