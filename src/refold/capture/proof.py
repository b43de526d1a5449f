"""The proof: a captured graph must give the model's own result, bit for bit, on the example and on other sizes, and its
calls must have the same side effects."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import nullcontext
from typing import Any

import torch
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from refold.capture.export_program import without_fast_path
from refold.capture.forward_call import ForwardCall
from refold.capture.model_state import ModelState, untouched, untouched_random_state
from refold.capture.size_rules import Dim, SizeRules
from refold.errors import CaptureMismatch, NeverCapturable
from refold.fx_private import named_tensors
from refold.nested import RESULT, flatten, same_shape
from refold.wording import first_line

_INPUT = "input "  # before the index of an input among the names of what a call changed


@dataclasses.dataclass
class CallResult:
    """What one call gave, and its side effects: all that it changed in the model and in the tensors it was given, by
    name, as it was afterwards."""

    result: tuple[Any, list[Any]]
    effects: dict[str, Any]


def run(
    module: nn.Module,
    call: ForwardCall,
    leaves: Sequence[torch.Tensor],
    watched: nn.Module | None = None,
    fast_path: bool = False,
) -> CallResult:
    """One call, without gradients and with everything it touched put back."""
    return run_calls(module, call, [leaves], watched, fast_path)[0]


def run_calls(
    module: nn.Module,
    call: ForwardCall,
    examples: Sequence[Sequence[torch.Tensor]],
    watched: nn.Module | None = None,
    fast_path: bool = False,
) -> list[CallResult]:
    """Calls one after the other, each from the same random state: later ones see the side effects of earlier ones."""
    model = module if watched is None else watched  # a model may be an empty container, which counts as false
    ran: list[CallResult] = []
    with untouched(model) as before, torch.no_grad(), nullcontext() if fast_path else without_fast_path():
        for leaves in examples:
            state = ModelState(model) if ran else before
            given = [leaf.detach().clone() for leaf in leaves]
            args, kwargs = call.rebuild(given)
            with untouched_random_state(model):
                # a buffer that is given back as it is would be put back under the caller's hands
                result = _owned(module(*args, **kwargs))
            overwritten = state.overwritten(model)
            if overwritten:
                raise NeverCapturable(f"its forward writes into the parameter {overwritten[0]}")
            written = {i: new for i, new in enumerate(given) if not same_values(new, leaves[i])}
            ran.append(CallResult(result, state.changes() | {f"{_INPUT}{i}": new for i, new in written.items()}))
    return ran


def _owned(result: Any) -> tuple[Any, list[Any]]:
    tree, flat = flatten(result, RESULT, left_out=[])
    return tree, [value.clone() if isinstance(value, torch.Tensor) else value for value in flat]


@dataclasses.dataclass
class Comparison:
    """What one comparison found: an empty ``why`` means equal; ``eager_failed`` that the model itself cannot do it.

    ``effects``: the side effects of the model's call. ``skipped``: nothing was run, since such a call is refused.
    """

    why: str
    eager_failed: bool = False
    skipped: bool = False
    effects: Mapping[str, Any] = dataclasses.field(default_factory=dict)


def compare(model: nn.Module, captured: nn.Module, call: ForwardCall, leaves: Sequence[torch.Tensor]) -> Comparison:
    """Run both on the same tensors, from the same random state, and compare every tensor of the result, and the
    side effects."""
    try:
        expected = run(model, call, leaves)
    except NeverCapturable:
        raise
    except Exception as error:
        return Comparison(f"the model itself fails: {first_line(error)}", eager_failed=True)
    try:
        got = run(captured, call, leaves, watched=model)
    except Exception as error:
        return Comparison(f"the graph fails: {first_line(error)}")
    why = _difference_of_calls(model, expected, got)
    if not why or _only_kernels_differ(model, captured, call, leaves):
        return Comparison("", effects=expected.effects)
    again = run(model, call, leaves)
    not_repeated = difference(expected.result, again.result)
    return Comparison(f"{why}; the model itself does not repeat its results" if not_repeated else why)


def _difference_of_calls(model: nn.Module, expected: CallResult, got: CallResult) -> str:
    """The first difference of two calls, as words: in the result, or in the side effects that a graph can have."""
    return difference(expected.result, got.result) or _effects_difference(model, expected.effects, got.effects)


def _effects_difference(model: nn.Module, expected: Mapping[str, Any], got: Mapping[str, Any]) -> str:
    attributes = _attributes_in(model, expected)
    for name in dict.fromkeys((*expected, *got)):
        if name in attributes and name not in got:
            continue
        if name not in got:
            return f"a call changes {name}, and the graph does not"
        if name not in expected:
            return f"the graph changes {name}, and a call does not"
        why = value_difference(expected[name], got[name])
        if why:
            return f"{name}, which a call changes, {why}"
    return ""


def _attributes_in(model: nn.Module, effects: Mapping[str, Any]) -> list[str]:
    """Those of the changed names that are neither tensors of the model nor inputs: no graph can set them."""
    tensors = named_tensors(model)
    return [name for name in effects if name not in tensors and not name.startswith(_INPUT)]


def _only_kernels_differ(
    model: nn.Module, captured: nn.Module, call: ForwardCall, leaves: Sequence[torch.Tensor]
) -> bool:
    """Whether both agree bit for bit once attention runs on the same kernel. Tracing makes masks explicit that the
    eager model leaves out, and on a GPU torch picks the attention kernel by whether there is a mask."""
    if not any(leaf.is_cuda for leaf in leaves):
        return False
    with sdpa_kernel(SDPBackend.MATH):
        expected = run(model, call, leaves)
        return not _difference_of_calls(model, expected, run(captured, call, leaves, watched=model))


def difference(expected: Any, got: Any) -> str:
    """The first difference of two results, as words; empty where there is none."""
    (tree, one), (other_tree, other) = expected, got
    if len(one) != len(other) or not same_shape(tree, other_tree, same_classes=True):
        return f"the result has another structure ({len(other)} tensors instead of {len(one)})"
    for index, (a, b) in enumerate(zip(one, other, strict=True)):
        why = value_difference(a, b)
        if why:
            return f"result {index} {why}"
    return ""


def value_difference(a: Any, b: Any) -> str:
    """How the second value differs from the first, as words; empty where it does not."""
    if not isinstance(a, torch.Tensor) or not isinstance(b, torch.Tensor):
        return "" if a is b or a == b else f"is {b} instead of {a}"
    if a.shape != b.shape or a.dtype != b.dtype:
        return f"is {b.dtype} {tuple(b.shape)} instead of {a.dtype} {tuple(a.shape)}"
    if same_values(a, b):
        return ""
    gap = (a.double() - b.double()).abs() if not a.is_complex() else (a - b).abs()
    return f"differs by {gap.nan_to_num().max().item():.3g}"


def same_values(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Equal in every element; NaN equals NaN. Tensors on the meta device have no elements to compare."""
    if one.shape != other.shape:
        return False
    if one.is_meta or other.is_meta:
        return True
    return torch.equal(one, other) or bool(((one == other) | ((one != one) & (other != other))).all())


@dataclasses.dataclass
class Trials:
    """Other sizes that gave the model's own result, and the rules for sizes that come of all that were tried."""

    rules: SizeRules
    tried: list[str]


def try_sizes(
    compare_at: Callable[[Sequence[torch.Tensor]], Comparison], rules: SizeRules, leaves: Sequence[Any]
) -> Trials:
    """Try another batch size, then another size of every other group of dimensions that vary together; where one gives
    the model's own result, sizes 1 and 0 too. A group that does not is fixed."""
    trials = Trials(rules, ["the example"])
    for symbols, dims in size_groups(rules):
        size = rules.inputs[dims[0][0]].example[dims[0][1]]

        def at(other: int, dims: Sequence[Dim] = dims) -> Comparison:
            resized = resize(leaves, dims, other)
            complaint = trials.rules.complaint(resized)
            outcome = Comparison(complaint, skipped=True) if complaint else compare_at(resized)
            i, dim = dims[0]
            trials.tried += [] if outcome.why else [f"{rules.inputs[i].name}.shape[{dim}] = {other}"]
            return dataclasses.replace(outcome, why=outcome.why and f"at size {other} {outcome.why}")

        why = _first_why(at, ([size - 1] if dims[0][1] and size > 2 else []) + [size + 1, size * 2])
        if why:
            trials.rules = trials.rules.fixed(symbols, why)
            continue
        for small in (1, 0) if size > 1 else (0,):
            outcome = at(small)
            if outcome.why and not outcome.skipped:
                trials.rules = trials.rules.from_size(symbols, small + 1, outcome.why)
                break
    return trials


def prove_shapes(
    model: nn.Module, captured: nn.Module, call: ForwardCall, leaves: Sequence[torch.Tensor], rules: SizeRules
) -> tuple[Trials, list[str]]:
    """The proof where there are no values, on the meta device: structure, shapes and dtypes, on the example and on
    other sizes; and what that leaves unproven."""
    note = "there are no values on the meta device: structure, shapes and dtypes alone were compared"
    outcome = compare(model, captured, call, leaves)
    if outcome.eager_failed:  # a model that looks at values in Python runs only where there are some
        run(captured, call, leaves, watched=model)
        return Trials(rules, ["nothing"]), [f"{note}, and only while it was exported, as {outcome.why}"]
    if outcome.why:
        raise CaptureMismatch(f"the captured graph is not the model: {outcome.why}")
    trials = try_sizes(lambda resized: compare(model, captured, call, resized), rules, leaves)
    return Trials(trials.rules, ["nothing"]), [f"{note}, on {', '.join(trials.tried)}"]


def has_no_values(model: nn.Module) -> bool:
    """Whether a model is on the meta device, if only in part."""
    return any(tensor.is_meta for tensor in named_tensors(model).values())


def _first_why(at: Callable[[int], Comparison], sizes: Sequence[int]) -> str:
    """The outcome of the first comparison that says something about the graph, or of the last that does not."""
    for size in sizes:
        outcome = at(size)
        if not outcome.eager_failed and not outcome.skipped:
            break
    return outcome.why


def size_groups(rules: SizeRules) -> list[tuple[set[str], list[Dim]]]:
    """Open dimensions that vary together: those of one symbol, and first ones of an equal size."""
    groups: dict[Any, tuple[set[str], list[Dim]]] = {}
    alias: dict[str, Any] = {}
    for i, rule in enumerate(rules.inputs):
        for dim, symbol in enumerate(rule.sizes):
            if isinstance(symbol, int) or not rule.example[dim]:
                continue
            key = alias.setdefault(symbol, ("batch" if dim == 0 else "other", rule.example[dim]))
            symbols, dims = groups.setdefault(key, (set(), []))
            symbols.add(symbol)
            dims.append((i, dim))
    return sorted(groups.values(), key=lambda group: group[1][0][1])


def resize(leaves: Sequence[torch.Tensor], dims: Sequence[Dim], size: int) -> list[torch.Tensor]:
    """The example with some dimensions made longer by repeating, or shorter by cutting."""
    resized = list(leaves)
    for i, dim in dims:
        places = torch.arange(size, device=resized[i].device) % leaves[i].shape[dim]
        resized[i] = resized[i].index_select(dim, places)
    return resized


def check_side_effects(
    model: nn.Module,
    captured: nn.Module,
    call: ForwardCall,
    leaves: Sequence[torch.Tensor],
    effects: Mapping[str, Any],
    fixed: Collection[Any],
) -> list[str]:
    """Notes on side effects that calls of the graph do not have; raises where they cannot replace calls of the model.

    ``effects``: those of the first call. ``fixed``: the indices of inputs whose values must stay as they are.
    """
    other = [leaf if i in fixed else _other_values(leaf) for i, leaf in enumerate(leaves)]
    try:
        # a model that was called on the example before may change nothing when it is called on it again
        effects = {**effects, **run_calls(model, call, [other])[0].effects}
        calls = [other, leaves, leaves]
    except Exception:  # not every model takes other values
        calls = [leaves, leaves]
    if not effects:
        return []
    expected, got = run_calls(model, call, calls), run_calls(captured, call, calls, watched=model)
    attributes = _attributes_in(model, effects)
    why = _difference_of_calls(model, expected[-2], got[-2]) or _difference_of_calls(model, expected[-1], got[-1])
    if why:
        names = ", ".join(attributes or effects)
        raise NeverCapturable(f"its calls change {names}, and a later call of the graph is not the model's: {why}")
    going_on = [name for name in attributes if name in expected[-1].effects]
    if going_on:
        raise NeverCapturable(
            f"every call of the model changes {', '.join(going_on)}, which a graph cannot; a registered buffer can be "
            "changed by both"
        )
    following = [name for name in attributes if name in expected[-2].effects]
    return [f"calls of the model set {name}, those of the graph do not" for name in following]


def _other_values(leaf: torch.Tensor) -> torch.Tensor:
    """An input of the same kind with other values: numbers in another order, masks as they are."""
    if leaf.dtype == torch.bool or not leaf.dim():
        return leaf
    if not leaf.is_floating_point():
        return leaf.flip(-1)
    return 0.75 * leaf.flip(list(range(leaf.dim())))
