"""What is proven about a mask: it lets everything through, it is causal, or its condition always holds."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch.fx import Node

from refold.graph.targets import name_of
from refold.graph.values import example_value, same_size
from refold.graph.view import GraphView
from refold.patterns.masks.formulas import Assumption, Unknown, why_unknown
from refold.patterns.masks.interpretation import MaskFormulas
from refold.patterns.masks.operands import Value
from refold.rewrite.refusal import Refuse


@dataclass(frozen=True)
class Verdict:
    """What is proven: 'all' is let through, 'causal', or 'chosen' where the condition of `where` always holds."""

    kind: str
    where: Node | None = None


def find_verdict(view: GraphView, mask: Node) -> Verdict:
    """What a mask is proven to be; refuses one that is not."""
    value = view.analysis(MaskFormulas).of(mask)
    kind = proven(value) if isinstance(value, Value) else None
    if kind is not None:
        return Verdict(kind)
    where = _always_chosen(view, mask)
    if where is not None:
        return Verdict("chosen", where)
    reason = value.reason if isinstance(value, Unknown) else why_unknown(value.element)
    raise Refuse(f"its mask {mask.name} is not proven to be trivial: {reason or 'it is neither full nor causal'}")


def proven(value: Value) -> str | None:
    """Whether a mask lets everything through ('all') or is causal ('causal'); None if neither is proven."""
    sizes = {i - value.rank: size for i, size in enumerate(value.shape) if isinstance(size, int)}
    if _lets_through(Assumption(sizes).value(value.element), value.dtype):
        return "all"
    seen = Assumption(sizes, "seen").value(value.element)
    ahead = Assumption(sizes, "ahead").value(value.element)
    if not _lets_through(seen, value.dtype):
        return None
    if _lets_through(ahead, value.dtype):
        return "all"
    return "causal" if _blocks(ahead, value.dtype) else None


def _lets_through(value: bool | float | None, dtype: torch.dtype) -> bool:
    return value is True if dtype == torch.bool else value is not None and dtype.is_floating_point and value == 0


def _blocks(value: bool | float | None, dtype: torch.dtype) -> bool:
    if dtype == torch.bool or value is None or not dtype.is_floating_point:
        return value is False and dtype == torch.bool
    return value == -math.inf or value <= torch.finfo(dtype).min


def _always_chosen(view: GraphView, mask: Node) -> Node | None:
    """The node of a mask `where(condition, x, y)` whose condition is proven to hold everywhere."""
    where = copies_behind(mask)[-1]
    if where.op != "call_function" or name_of(where) != "where" or len(where.args) != 3:
        return None
    condition, chosen, _ = where.args
    if not isinstance(condition, Node) or not isinstance(chosen, Node):
        return None
    truth, made, given = view.analysis(MaskFormulas).of(condition), example_value(where), example_value(chosen)
    if not isinstance(truth, Value) or proven(truth) != "all" or made is None or given is None:
        return None
    fits = made.dtype == given.dtype and all(map(same_size, made.shape[-2:], given.shape[-2:]))
    return where if fits and given.dim() >= 2 else None


def copies_behind(mask: Node) -> list[Node]:
    """A mask, what it is a copy of, and so on."""
    found = [mask]
    while found[-1].op in ("call_function", "call_method") and name_of(found[-1]) in ("contiguous", "clone", "alias"):
        found.append(found[-1].args[0])  # type: ignore[arg-type]
    return found
