"""Which inputs an engine gives torch's results for: the weakest guard under which all that its operators need holds."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch.fx import Node

from refold.errors import PreparationFailed
from refold.executors.guards import Bounds, Guard, Open, OpenMask
from refold.executors.indices import index_limits, reads_anywhere
from refold.executors.semantics import FINITE, NARROW, OPEN, POSITIVE, Answer
from refold.executors.value_ranges import DATA, MOVING, Program, Range, ValueRanges, bare_name, rule_for
from refold.graph.arguments import argument

_WHOLE = 2**24  # beyond, integers that an engine computes as float32 are not exact
_SHORT = 2**15
_LEAST_LIMIT = 1e4  # of floats: what images, sounds and features stay below
_DIVISIONS = ("div", "floor_divide", "remainder", "fmod", "__mod__")
_LEVELS = range(5)  # indices; floats; integers; short ones; masks of ones


@dataclass(frozen=True)
class Input:
    """One tensor that an exported program takes."""

    place: int
    name: str
    example: torch.Tensor

    @property
    def is_float(self) -> bool:
        return self.example.is_floating_point()

    @property
    def is_mask(self) -> bool:
        """Whether it may be a mask: zeros and ones in rows."""
        example = self.example
        if example.is_floating_point() or example.is_complex() or example.numel() == 0:
            return False
        return bool(((example == 0) | (example == 1)).all())

    @property
    def limit(self) -> float:
        """What floats are to stay below, by far more than those of the example do."""
        low, high = (end.item() for end in self.example.detach().aminmax()) if self.example.numel() else (0, 0)
        most = max(_LEAST_LIMIT, 16 * max(abs(low), abs(high)))
        return min(most, torch.finfo(self.example.dtype).max / 16) if most == most else _LEAST_LIMIT


def inputs_of(exported: Program, tensors: list[torch.Tensor]) -> list[Input]:
    """The inputs of a program, with the example that it was exported with."""
    names = [str(name) for name in exported.graph_signature.user_inputs]
    return [Input(place, name, tensor) for place, (name, tensor) in enumerate(zip(names, tensors, strict=True))]


def weakest_guard(
    exported: Program, inputs: list[Input], answers: Mapping[Node, Answer], held: dict[str, Range]
) -> Guard:
    """The guard with the fewest conditions under which an engine gives what torch gives; raises where there is none.
    `held` keeps the ranges of the weights."""
    indices, problem = _index_inputs(exported), ""
    for answer in answers.values():
        if answer.refused:
            raise PreparationFailed(f"It computes {answer.name} otherwise than torch: {answer.refused}.")
    for level in _LEVELS:
        known = {each.name: found for each in inputs if (found := _range(each, indices, level)) is not None}
        ranges = ValueRanges(exported, known, held)
        problem = next(_problems(exported, ranges, answers), "")
        if not problem:
            guard = tuple(condition for each in inputs for condition in _conditions(each, known.get(each.name)))
            return (*guard, *_open_masks(exported, inputs, known, answers, held))
    raise PreparationFailed(problem)


def why_not_at(
    exported: Program, guard: Guard, inputs: list[Input], answers: Mapping[str, Answer], held: dict[str, Range]
) -> str | None:
    """Why a guard does not do where the program has other sizes; None if it does. `answers` by the names of nodes."""
    bounds = {inputs[each.place].name: each for each in guard if isinstance(each, Bounds)}
    known: dict[str, Range | torch.Tensor] = {name: Range(each.low, each.high) for name, each in bounds.items()}
    opened = [each.place for each in guard if isinstance(each, OpenMask) and each.positions == "all"]
    known |= {inputs[place].name: Range(1, 1) for place in opened}
    there = {node: answers[node.name] for node in exported.graph.nodes if node.name in answers}
    return next(_problems(exported, ValueRanges(exported, known, held), there), None)


def index_guard(exported: Program, inputs: list[Input]) -> Guard:
    """Bounds of the inputs that are indices."""
    indices = _index_inputs(exported)
    return tuple(Bounds(each.place, *indices[each.name][:2]) for each in inputs if each.name in indices)


def _conditions(each: Input, known: Range | torch.Tensor | None) -> Iterator[Bounds | OpenMask]:
    if isinstance(known, torch.Tensor):
        yield OpenMask(each.place, "all")
    elif known is not None and each.example.dtype != torch.bool:
        yield Bounds(each.place, known.low, known.high)


def _range(each: Input, indices: Mapping[str, Range], level: int) -> Range | torch.Tensor | None:
    """What an input is bound to at a level; None for what it is not."""
    if each.is_float:
        return Range(-each.limit, each.limit) if level >= 1 else None
    if each.example.is_complex():
        return None
    if each.is_mask and level >= 4:
        return torch.ones_like(each.example)
    if each.name in indices:
        return indices[each.name]
    if level < 2 or each.example.dtype == torch.bool:
        return None
    if each.is_mask:
        return Range(0, 1)
    most = min(_WHOLE if level < 3 else _SHORT, torch.iinfo(each.example.dtype).max)
    least = max(-most, torch.iinfo(each.example.dtype).min)
    return Range(least if level < 3 else 0, most)


def _index_inputs(exported: Program) -> dict[str, Range]:
    """The inputs whose elements are used as indices as they are, with the places that there are."""
    found: dict[str, Range] = {}
    for node in exported.graph.nodes:
        for index, size in index_limits(node).items() if node.op == "call_function" else ():
            source = _source(index)
            if source is not None:
                high = min(size - 1, found[source.name].high) if source.name in found else size - 1
                found[source.name] = Range(0, high)
    return found


def _source(node: Node) -> Node | None:
    """The input that the elements of a value are taken from as they are."""
    while node.op == "call_function":
        if bare_name(node) not in MOVING | {"to", "type_as"} or not isinstance(node.args[0], Node):
            return None
        node = node.args[0]
        if node.meta["val"].is_floating_point():
            return None
    return node if node.op == "placeholder" else None


def _problems(exported: Program, ranges: ValueRanges, answers: Mapping[Node, Answer]) -> Iterator[str]:
    """What may happen in a program that an engine does otherwise than torch, or that is not safe."""
    for node in exported.graph.nodes:
        if node.op != "call_function" or node in ranges.known:
            continue
        yield from unsafe(node, ranges)
        answer = answers.get(node)
        for need, how in answer.needs.items() if answer is not None else ():
            if not _holds(need, node, ranges):
                yield f"It computes {bare_name(node)} otherwise than torch ({how}), which {node.name} may meet."


def unsafe(node: Node, ranges: ValueRanges) -> Iterator[str]:
    """Why a node may read outside of a tensor, or divide an integer by zero."""
    name = bare_name(node)
    for index, size in index_limits(node).items():
        if not ranges.of(index).within(0, size - 1):
            yield f"{node.name} ({name}) reads at indices that are computed, and nothing bounds them below {size}."
    moving = [n for n in node.all_input_nodes if n not in ranges.known]
    if reads_anywhere(node) and any(n is not node.args[0] for n in moving):
        yield f"{node.name} ({name}) reads where its operands say, and nothing bounds that."
    whole = [n for n in moving if _is_whole(n)]
    if whole and rule_for(node) is None and not name.startswith("_assert"):
        yield f"Nothing is known of {node.name} ({name}), which may read where its integers say."
    if name in _DIVISIONS and _is_whole(node) and len(node.args) > 1:
        divisor = ranges.of(node.args[1])
        if divisor.low <= 0 <= divisor.high:
            yield f"{node.name} ({name}) may divide an integer by zero."


def _is_whole(node: Node) -> bool:
    recorded = node.meta.get("val")
    if not isinstance(recorded, torch.Tensor) or recorded.dtype == torch.bool:
        return False
    return not recorded.is_floating_point() and not recorded.is_complex()


def _holds(need: str, node: Node, ranges: ValueRanges) -> bool:
    values = [n for n in node.all_input_nodes if isinstance(n.meta.get("val"), torch.Tensor)]
    if need == POSITIVE:
        return all(ranges.of(n).low >= 0 for n in values if _is_whole(n))
    if need == NARROW:
        return all(_is_narrow(n, ranges.of(n)) for n in values) and _is_narrow(node, ranges.unrounded.get(node))
    if need == FINITE:
        floats = [ranges.of(n) for n in values if n.meta["val"].is_floating_point()]
        if not _is_whole(node):
            return all(found.finite for found in (*floats, ranges.of(node)))
        most = min(DATA, torch.iinfo(node.meta["val"].dtype).max)
        return all(found.within(max(-most, torch.iinfo(node.meta["val"].dtype).min), most) for found in floats)
    return True  # open rows are another matter


def _is_narrow(node: Node, found: Range | None) -> bool:
    if not _is_whole(node):
        return True
    info = torch.iinfo(node.meta["val"].dtype)
    if found is None:
        return info.bits < 64
    return found.within(max(info.min, -_WHOLE), min(info.max, _WHOLE))


# --- masks -----------------------------------------------------------------------------------------------------------


def _open_masks(
    exported: Program,
    inputs: list[Input],
    known: Mapping[str, Any],
    answers: Mapping[Node, Answer],
    held: dict[str, Range],
) -> Iterator[OpenMask]:
    """Conditions on masks under which no row of attention is closed."""
    attending = [node for node, answer in answers.items() if OPEN in answer.needs]
    masks = {argument(node, 3, "attn_mask") for node in attending}
    given = [each for each in inputs if each.is_mask and each.example.dim() and each.name not in _constant(known)]
    if not masks:
        return
    positions: tuple[Open, ...] = ("some", "first", "all")
    for rung in positions:
        if all(_are_open(exported, {**known, **trial}, masks, held) for trial in _trials(given, rung)):
            yield from (OpenMask(each.place, rung) for each in given)
            return
    how = answers[attending[0]].needs[OPEN]
    raise PreparationFailed(f"It computes attention otherwise than torch ({how}), which {attending[0].name} may meet.")


def _constant(known: Mapping[str, Any]) -> set[str]:
    return {name for name, value in known.items() if isinstance(value, torch.Tensor)}


def _trials(given: list[Input], rung: Open) -> Iterator[dict[str, torch.Tensor]]:
    """Masks with as few open positions as a rung allows, and those with all."""
    yield {each.name: torch.ones_like(each.example) for each in given}
    if rung == "all" or not given:
        return
    width = max(each.example.shape[-1] for each in given)
    for place in (0,) if rung == "first" else {0, width // 2, width - 1}:
        trial = {each.name: torch.zeros_like(each.example) for each in given}
        for mask in trial.values():
            mask[..., min(place, mask.shape[-1] - 1)] = 1
        yield trial


def _are_open(exported: Program, known: Mapping[str, Any], masks: set[Any], held: dict[str, Range]) -> bool:
    """Whether every row of every mask has an open position, for these inputs."""
    ranges = ValueRanges(exported, known, held)
    found = [ranges.known.get(mask) for mask in masks]
    return all(isinstance(mask, torch.Tensor) and bool(mask.any(-1).all()) for mask in found)
