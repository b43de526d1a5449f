"""Calls with other switches than the example's are prepared on request, and all kinds of calls share the weights."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn

import refold
from refold.errors import FellBack, RefoldError
from refold.optimization.optimized_module import OptimizedModule

X, MASK = torch.randn(3, 5, 16), torch.ones(3, 5)
QUICK = {"backend": "plain", "effort": "quick", "progress": False}


class Net(nn.Module):
    """Its result has another form for other switches, as those of transformers do."""

    def __init__(self) -> None:
        super().__init__()
        self.query, self.key, self.out = nn.Linear(16, 16), nn.Linear(16, 16), nn.Linear(16, 4)

    def forward(
        self, x: torch.Tensor, mask: torch.Tensor | None = None, hidden: bool = False, return_dict: bool = True
    ) -> Any:
        state = self.query(x) * self.key(x)
        if mask is not None:
            state = state * mask.unsqueeze(-1)
        found = {"y": self.out(state), "state": state} if hidden else {"y": self.out(state)}
        return found if return_dict else tuple(found.values())


CALLS: list[dict[str, Any]] = [
    {"x": X, "mask": MASK},
    {"x": X, "mask": MASK, "hidden": True},
    {"x": X, "mask": MASK, "return_dict": False},
    {"x": X},
]
IDS = ["as the example", "another output", "a tuple", "without the mask"]


@pytest.fixture(scope="module")
def made() -> tuple[OptimizedModule, nn.Module]:
    """An optimized model that is prepared for all of these calls, and a model like it."""
    torch.manual_seed(0)
    model = Net().eval()
    alone = copy.deepcopy(model)
    return refold.optimize(model, CALLS, **QUICK), alone


@pytest.fixture(autouse=True)
def nothing_falls_back_unheard() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.simplefilter("error", FellBack)
        yield


def same(found: Any, expected: Any) -> bool:
    if isinstance(expected, dict):
        return list(found) == list(expected) and same(tuple(found.values()), tuple(expected.values()))
    return len(found) == len(expected) and all(
        torch.allclose(a, b, atol=1e-5) for a, b in zip(found, expected, strict=True)
    )


def merged_at(fast: OptimizedModule) -> set[int]:
    """Where the joint weights of all kinds lie."""
    weights = [weight for kind in fast._kinds for weight in kind.prepared.graph_module.parameters()]
    found = [weight.data_ptr() for weight in weights if weight.shape == (32, 16)]
    assert len(found) == len(fast._kinds)
    return set(found)


@pytest.mark.parametrize("call", CALLS, ids=IDS)
def test_a_list_of_calls_of_several_kinds_is_prepared_for(call: Any, made: tuple[OptimizedModule, nn.Module]) -> None:
    fast, alone = made
    fewer = {name: value[:2] if isinstance(value, torch.Tensor) else value for name, value in call.items()}
    before = fast.report.calls.fast
    with torch.no_grad():
        assert same(fast(**call), alone(**call)) and same(fast(**fewer), alone(**fewer))
        assert same(fast(*call.values()), alone(*call.values())) if "return_dict" not in call else True
    assert fast.report.calls.fast - before >= 2


def test_all_kinds_share_the_memory_of_merged_weights(made: tuple[OptimizedModule, nn.Module]) -> None:
    fast, _ = made
    assert len(fast._kinds) == len(CALLS)
    assert merged_at(fast) == {fast.original.query.weight.data_ptr()}


def test_every_kind_follows_weights_that_are_written() -> None:
    fast, alone = prepared(CALLS[1])
    with torch.no_grad():
        for model in (fast.original, alone):
            model.key.weight.mul_(3)
        assert all(same(fast(**call), alone(**call)) for call in CALLS[:2])
    assert fast.report.calls.fast == 2


def prepared(*calls: dict[str, Any]) -> tuple[OptimizedModule, nn.Module]:
    torch.manual_seed(0)
    model = Net().eval()
    alone = copy.deepcopy(model)
    fast = refold.optimize(model, CALLS[0], **QUICK)
    for call in calls:
        assert fast.prepare(**call) is fast
    return fast, alone


def test_the_report_says_what_else_it_is_prepared_for(made: tuple[OptimizedModule, nn.Module]) -> None:
    fast, _ = made
    notes = "\n".join(fast.report.notes)
    assert "Calls with hidden=True: run by plain." in notes and "Calls without mask: run by plain." in notes
    kinds = len(fast._kinds)
    fast.prepare(X[:2], MASK[:2])
    assert len(fast._kinds) == kinds, "such calls run fast already"


def test_what_was_not_prepared_for_is_told_with_the_way_out() -> None:
    fast, alone = prepared()
    with pytest.warns(FellBack, match=r"without hidden\. Give such a call to \.prepare\(\.\.\.\) once"):
        assert same(fast(**CALLS[1]), alone(**CALLS[1]))
    fast.prepare(**CALLS[1])(**CALLS[1])
    assert fast.report.calls.fast == 1


def test_restoring_gives_the_model_back_whatever_kinds_there_were() -> None:
    fast, alone = prepared(CALLS[1])
    model, parameters = fast.original, dict(fast.original.named_parameters())
    assert fast.restore() is model
    assert all(parameter is parameters[name] for name, parameter in model.named_parameters())
    assert all(torch.equal(value, model.state_dict()[name]) for name, value in alone.state_dict().items())
    assert model.query.weight.untyped_storage().nbytes() == model.query.weight.nbytes
    with pytest.raises(RefoldError, match=r"call \.refresh\(\) first"):
        fast.prepare(**CALLS[1])
    assert "restored" in fast.refresh()[0]
    assert all(same(fast(**call), alone(**call)) for call in CALLS[:2]) and fast.report.calls.fast == 2


def test_refreshing_prepares_all_kinds_anew_and_they_share_weights_again() -> None:
    fast, alone = prepared(CALLS[1])
    for model in (fast.original, alone):
        model.out = copy.deepcopy(model.out)
        model.out.weight.data.mul_(2)
    assert fast.refresh()
    assert all(same(fast(**call), alone(**call)) for call in CALLS[:2])
    assert len(merged_at(fast)) == 1 and fast.report.calls.fast == 2


class Gated(nn.Module):
    """Only one kind of call has layers to merge."""

    def __init__(self) -> None:
        super().__init__()
        self.query, self.key = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: torch.Tensor, gate: bool = False) -> torch.Tensor:
        return self.query(x) * self.key(x) if gate else self.query(x)


def test_what_one_kind_merges_is_no_change_to_another() -> None:
    torch.manual_seed(0)
    model, x = Gated().eval(), torch.randn(3, 4)
    fast = refold.optimize(model, [{"x": x}, {"x": x, "gate": True}], **QUICK)
    with torch.no_grad():
        assert fast.refresh() == []
        for scale in (3.0, 0.5):
            model.query.weight.mul_(scale)
            fast.refresh()
            assert fast.refresh() == [], "made anew, no kind has changed what another one reads"
            for gate in (False, True):
                assert torch.allclose(fast(x, gate), copy.deepcopy(model)(x, gate), atol=1e-5)
    assert (fast.report.calls.fast, fast.report.calls.original) == (4, 0)


def test_every_kind_follows_a_move() -> None:
    fast, alone = prepared(CALLS[1])
    with pytest.warns(FellBack, match="moved or cast"):
        fast.double()
    alone.double()
    for call in CALLS[:2]:
        call = {name: value.double() if isinstance(value, torch.Tensor) else value for name, value in call.items()}
        assert same(fast(**call), alone(**call))
    assert fast.report.calls.fast == 2


def test_what_fails_leaves_the_others_as_they_are() -> None:
    fast, alone = prepared(CALLS[1])
    with pytest.raises(RefoldError, match="fails on the example"):
        fast.prepare(X[..., :3], MASK)
    assert all(same(fast(**call), alone(**call)) for call in CALLS[:2]) and fast.report.calls.fast == 2
    with pytest.raises(RefoldError, match=r"call \.eval\(\) first"):
        fast.train().prepare(X)


class Branching(nn.Module):
    """Short rows are computed otherwise, so that one graph takes one kind of rows."""

    def __init__(self) -> None:
        super().__init__()
        self.long, self.short = nn.Linear(4, 3), nn.Linear(4, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.long(x.mean(1)) if x.shape[1] > 5 else self.short(x.sum(1))


def test_sizes_that_one_graph_does_not_take_are_a_kind_of_their_own() -> None:
    torch.manual_seed(0)
    model = Branching().eval()
    long, short = torch.randn(2, 8, 4), torch.randn(2, 3, 4)
    fast = refold.optimize(model, [long, short], **QUICK)
    for x in (long, short, torch.randn(3, 9, 4), torch.randn(3, 4, 4)):
        with torch.no_grad():
            assert torch.equal(fast(x), model(x))
    assert fast.report.calls.fast == 4
    assert "Calls of these other sizes: run by plain." in fast.report.notes


def test_at_most_eight_kinds() -> None:
    calls = [{"x": X, "mask": MASK.to(dtype), "hidden": hidden} for dtype in DTYPES for hidden in (False, True)]
    with pytest.raises(RefoldError, match="10 kinds of calls are too many: 8 at most"):
        refold.optimize(Net().eval(), calls, **QUICK)


DTYPES = (torch.float32, torch.int64, torch.int32, torch.int16, torch.uint8)


def test_a_wrong_call_in_the_list_is_found_before_the_long_work() -> None:
    with pytest.raises(RefoldError, match="'hiden' is no argument of it; did you mean 'hidden'"):
        refold.optimize(Net().eval(), [CALLS[0], {"x": X, "hiden": True}], **QUICK)


# --- autocast and inference mode -----------------------------------------------------------------------------------


def bf16() -> Any:
    return torch.autocast("cpu", dtype=torch.bfloat16)


def test_it_is_prepared_for_autocast_where_the_example_is_given_under_it() -> None:
    torch.manual_seed(0)
    model = Net().eval()
    alone = copy.deepcopy(model)
    with bf16():
        fast = refold.optimize(model, CALLS[0], **QUICK)
    with bf16(), torch.no_grad():
        found, expected = fast(**CALLS[0])["y"], alone(**CALLS[0])["y"]
    assert found.dtype == expected.dtype == torch.bfloat16 and torch.equal(found, expected)
    with pytest.warns(FellBack, match="Autocast is switched otherwise"):
        assert fast(**CALLS[0])["y"].dtype == torch.float32
    assert (fast.report.calls.fast, fast.report.calls.original) == (1, 1)
    with torch.no_grad():
        fast.original.out = copy.deepcopy(fast.original.out)
    assert fast.refresh(), "outside of autocast"
    with bf16(), torch.no_grad():
        assert torch.equal(fast(**CALLS[0])["y"], expected)
    assert fast.report.calls.fast == 2


def test_one_model_is_prepared_for_both() -> None:
    fast, alone = prepared()
    with bf16():
        fast.prepare(**CALLS[0])
        found, expected = fast(**CALLS[0])["y"], alone(**CALLS[0])["y"]
    assert torch.equal(found, expected) and found.dtype == torch.bfloat16
    assert same(fast(**CALLS[0]), alone(**CALLS[0])) and fast.report.calls.fast == 2
    assert "under autocast to bfloat16" in "\n".join(fast.report.notes)


def test_in_inference_mode() -> None:
    torch.manual_seed(0)
    model = Net().eval()
    alone = copy.deepcopy(model)
    with torch.inference_mode():
        inside = {name: value.clone() for name, value in CALLS[0].items()}
        fast = refold.optimize(model, inside, **QUICK)
        found = fast(**inside)["y"]
        assert found.is_inference() and torch.allclose(found, alone(**inside)["y"], atol=1e-5)
    assert same(fast(**CALLS[0]), alone(**CALLS[0])), "and outside of it"
    assert fast.report.calls.fast == 2 and fast.report.calls.original == 0
    assert any(step.status == "kept" for step in fast.report.steps)
    fast.restore().train()(X)["y"].sum().backward()
