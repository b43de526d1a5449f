"""The proof: a captured graph must give the model's own result, bit for bit, on the example and on other sizes."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from typing import Any

import torch
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from refold.capturing.calling import Calling
from refold.capturing.errors import NeverCapturable
from refold.capturing.fast_path import without_fast_path
from refold.capturing.restoring import untouched, untouched_random_state
from refold.capturing.sizes import SizeRules
from refold.capturing.state import State
from refold.capturing.trees import flatten, same_shape

_INPUT = "input "  # before the place of an input among the names of what a call changed


@dataclasses.dataclass
class Outcome:
    """What one comparison found: empty ``why`` means equal; ``eager_failed`` that the model itself cannot do it.

    ``left``: what the model's call left behind in the model, by name, as it was afterwards.
    """

    why: str
    eager_failed: bool = False
    left: Mapping[str, Any] = dataclasses.field(default_factory=dict)


@dataclasses.dataclass
class Ran:
    """What one call gave, and what it left behind: in the model, and in the tensors that it was given."""

    result: tuple[Any, list[Any]]
    left: dict[str, Any]


def compare(model: nn.Module, captured: nn.Module, calling: Calling, leaves: Sequence[torch.Tensor]) -> Outcome:
    """Run both on the same tensors, from the same random state, and compare every tensor of the result, and of what
    the calls left behind."""
    try:
        expected = run(model, calling, leaves)
    except NeverCapturable:
        raise
    except Exception as error:
        return Outcome(f"the model itself fails: {_first_line(error)}", eager_failed=True)
    try:
        got = run(captured, calling, leaves, watched=model)
    except Exception as error:
        return Outcome(f"the graph fails: {_first_line(error)}")
    why = unlike(model, expected, got)
    if not why or _only_kernels_differ(model, captured, calling, leaves):
        return Outcome("", left=expected.left)
    again = run(model, calling, leaves)
    unsteady = difference(expected.result, again.result)
    return Outcome(f"{why}; the model itself does not repeat its results" if unsteady else why)


def unlike(model: nn.Module, expected: Ran, got: Ran) -> str:
    """The first difference of two calls, as words: in the result, or in what is left behind where a graph can write."""
    return difference(expected.result, got.result) or _left_unlike(model, expected.left, got.left)


def _left_unlike(model: nn.Module, expected: Mapping[str, Any], got: Mapping[str, Any]) -> str:
    attributes = attributes_left(model, expected)
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


def attributes_left(model: nn.Module, left: Mapping[str, Any]) -> list[str]:
    """Those of the changed names that are neither tensors of the model nor inputs: no graph can set them."""
    tensors = {name for name, _ in model.named_parameters(remove_duplicate=False)}
    tensors |= {name for name, _ in model.named_buffers(remove_duplicate=False)}
    return [name for name in left if name not in tensors and not name.startswith(_INPUT)]


def _only_kernels_differ(
    model: nn.Module, captured: nn.Module, calling: Calling, leaves: Sequence[torch.Tensor]
) -> bool:
    """Whether both agree bit for bit once attention runs on the same kernel. Tracing makes masks explicit that the
    eager model leaves out, and on a GPU torch picks the attention kernel by whether there is a mask."""
    if not any(leaf.is_cuda for leaf in leaves):
        return False
    with sdpa_kernel(SDPBackend.MATH):
        expected = run(model, calling, leaves)
        return not unlike(model, expected, run(captured, calling, leaves, watched=model))


def run(
    module: nn.Module,
    calling: Calling,
    leaves: Sequence[torch.Tensor],
    watched: nn.Module | None = None,
    fast_path: bool = False,
) -> Ran:
    """One call, without gradients and with everything it touched put back."""
    return run_in_a_row(module, calling, [leaves], watched, fast_path)[0]


def run_in_a_row(
    module: nn.Module,
    calling: Calling,
    examples: Sequence[Sequence[torch.Tensor]],
    watched: nn.Module | None = None,
    fast_path: bool = False,
) -> list[Ran]:
    """Calls one after the other, each from the same random state: later ones find what earlier ones left behind."""
    model = module if watched is None else watched  # a model may be an empty container, which counts as false
    ran: list[Ran] = []
    with untouched(model) as before, torch.no_grad(), nullcontext() if fast_path else without_fast_path():
        for leaves in examples:
            state = State(model) if ran else before
            given = [leaf.detach().clone() for leaf in leaves]
            args, kwargs = calling.rebuild(given)
            with untouched_random_state(model):
                # a buffer that is given back as it is would be put back under the caller's hands
                result = _owned(module(*args, **kwargs))
            overwritten = state.overwritten(model)
            if overwritten:
                raise NeverCapturable(f"its forward writes into the parameter {overwritten[0]}")
            written = {i: new for i, new in enumerate(given) if not same_values(new, leaves[i])}
            ran.append(Ran(result, state.changes() | {f"{_INPUT}{i}": new for i, new in written.items()}))
    return ran


def _owned(result: Any) -> tuple[Any, list[Any]]:
    flat: list[Any] = []
    tree = flatten(result, flat, left_out=[])
    return tree, [value.clone() if isinstance(value, torch.Tensor) else value for value in flat]


def difference(expected: Any, got: Any) -> str:
    """The first difference of two results, as words; empty where there is none."""
    (tree, one), (other_tree, other) = expected, got
    if len(one) != len(other) or not same_shape(tree, other_tree, same_classes=True):
        return f"the result has another structure ({len(other)} tensors instead of {len(one)})"
    for place, (a, b) in enumerate(zip(one, other, strict=True)):
        why = value_difference(a, b)
        if why:
            return f"result {place} {why}"
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
    """Equal in every element; NaN equals NaN."""
    if one.shape != other.shape:
        return False
    return torch.equal(one, other) or bool(((one == other) | ((one != one) & (other != other))).all())


def _first_line(error: BaseException) -> str:
    text = str(error).strip().splitlines()
    return f"{type(error).__name__}: {text[0] if text else ''}"[:300]


@dataclasses.dataclass
class Trials:
    """Which open sizes gave the model's own result at another size, and what was tried."""

    proven: set[str]
    tried: list[str]
    notes: list[str]


def try_sizes(
    compare_at: Callable[[Sequence[torch.Tensor]], Outcome], rules: SizeRules, leaves: Sequence[Any]
) -> Trials:
    """Try another batch size, then another size of every other group of dimensions that vary together."""
    trials = Trials(set(), ["the example"], [])
    for symbols, dims in _groups(rules):
        for size in _other_sizes(dims[0], rules):
            resized = _resize(leaves, dims, size)
            if rules.complaint(resized):
                continue
            outcome = compare_at(resized)
            if not outcome.why:
                trials.proven |= symbols
                trials.tried.append(_describe(rules, dims, size))
                break
            if not outcome.eager_failed:
                trials.notes.append(f"{_describe(rules, dims, size)}: {outcome.why}, so this size is fixed")
                break
    return trials


Dim = tuple[int, int]


def _groups(rules: SizeRules) -> list[tuple[set[str], list[Dim]]]:
    """Open dimensions that vary together: those of one symbol, and those that stand first with an equal size."""
    groups: dict[Any, tuple[set[str], list[Dim]]] = {}
    alias: dict[str, Any] = {}
    for i, rule in enumerate(rules.inputs):
        for dim, symbol in enumerate(rule.sizes):
            if isinstance(symbol, int):
                continue
            key = alias.setdefault(symbol, ("batch" if dim == 0 else "other", rule.example[dim]))
            symbols, dims = groups.setdefault(key, (set(), []))
            symbols.add(symbol)
            dims.append((i, dim))
    return sorted(groups.values(), key=lambda group: group[1][0][1])


def _other_sizes(dim: Dim, rules: SizeRules) -> list[int]:
    size = rules.inputs[dim[0]].example[dim[1]]
    if dim[1] == 0:
        return [size + 1, size * 2]
    return [size - 1, size + 1, size * 2] if size > 2 else [size + 1, size * 2]


def _resize(leaves: Sequence[torch.Tensor], dims: Sequence[Dim], size: int) -> list[torch.Tensor]:
    """The example with some dimensions made longer by repeating, or shorter by cutting."""
    resized = list(leaves)
    for i, dim in dims:
        places = torch.arange(size, device=resized[i].device) % leaves[i].shape[dim]
        resized[i] = resized[i].index_select(dim, places)
    return resized


def all_equal(leaf: torch.Tensor) -> torch.Tensor:
    """An input with the same value everywhere (tokens) or in every row (anything else that is no description)."""
    if leaf.dim() < 2 or not leaf.numel():
        return leaf
    one = leaf[:1] if leaf.is_floating_point() else leaf.flatten()[0]
    return one.expand(leaf.shape).contiguous()


def _describe(rules: SizeRules, dims: Sequence[Dim], size: int) -> str:
    i, dim = dims[0]
    return f"{rules.inputs[i].name}.shape[{dim}] = {size}"
