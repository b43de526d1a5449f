"""Original checkpoints go into a folded model and come out of it; every wrong one is reported as torch reports it."""

from __future__ import annotations

import copy
import re
from typing import Any

import pytest
import torch
from saving_models import everything, mixed
from torch import nn

import refold
from refold.checkpoints.checkpoint_load import load_original_state_dict
from refold.checkpoints.original_state import original_state_dict, to_folded, to_original
from refold.errors import CheckpointMismatch, WeightsChanged
from refold.fingerprint import same_bits
from refold.testing.equivalence import deviations

X = torch.randn(2, 3, 8, 8, generator=torch.Generator().manual_seed(0))


def pair(dtype: torch.dtype = torch.float32, **settings: Any) -> tuple[torch.fx.GraphModule, torch.fx.GraphModule]:
    """A folded module and the same one never folded."""
    plain = torch.fx.symbolic_trace(mixed(0, dtype))
    gm = copy.deepcopy(plain)
    if settings:
        refold.FuseBatchNorm2dInConv2d(**settings)(gm)
    else:
        everything()(gm)
    assert refold.history(gm)
    return gm, plain


def checkpoint(seed: int = 5) -> dict[str, Any]:
    return copy.deepcopy(torch.fx.symbolic_trace(mixed(seed)).state_dict())


def assert_holds(gm: torch.fx.GraphModule, expected: dict[str, Any]) -> None:
    found = original_state_dict(gm)
    assert list(found) == list(expected)
    for name, tensor in expected.items():
        assert same_bits(found[name], tensor), name


def everything_of(gm: torch.fx.GraphModule) -> dict[str, Any]:
    return {"code": gm.code, "history": refold.history(gm), **{n: t.clone() for n, t in gm.state_dict().items()}}


def assert_untouched(gm: torch.fx.GraphModule, before: dict[str, Any]) -> None:
    now = everything_of(gm)
    assert now.keys() == before.keys() and now["history"] is before["history"] and now["code"] == before["code"]
    assert all(same_bits(now[n], t) for n, t in before.items() if isinstance(t, torch.Tensor))


# --- out of a folded model -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_a_folded_model_saves_as_the_original(dtype: torch.dtype) -> None:
    gm, plain = pair(dtype)
    assert_holds(gm, plain.state_dict())
    assert original_state_dict(gm)._metadata == plain.state_dict()._metadata  # type: ignore[attr-defined]
    plain.load_state_dict(original_state_dict(gm))
    assert original_state_dict(gm)["o.weight"].data_ptr() == original_state_dict(gm)["tied.weight"].data_ptr()


def test_without_a_history_it_is_torchs_own() -> None:
    gm = torch.fx.symbolic_trace(mixed())
    assert_holds(gm, gm.state_dict())
    new = checkpoint()
    load_original_state_dict(gm, new)
    assert all(torch.equal(t, new[n]) for n, t in gm.state_dict().items())


def test_trained_weights_are_in_it() -> None:
    gm, _ = pair(torch.float64)
    with torch.no_grad():
        for parameter in gm.parameters():
            parameter.mul_(1.25)
    expected = copy.deepcopy(gm)
    refold.undo(expected, None)
    assert_holds(gm, expected.state_dict())


def test_what_has_no_inverse_is_refused() -> None:
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4)).eval()
    nn.init.zeros_(model[1].weight)
    gm = torch.fx.symbolic_trace(model)
    refold.FuseBatchNorm2dInConv2d()(gm)
    with torch.no_grad():
        gm.get_parameter("0.weight").add_(1)
    with pytest.raises(WeightsChanged, match=r"0\.weight"):
        original_state_dict(gm)


# --- into a folded model -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
@pytest.mark.parametrize("keep", [None, "correction", "original"])
def test_an_original_checkpoint_loads_and_undo_gives_it_back(dtype: torch.dtype, keep: str | None) -> None:
    gm, plain = pair(dtype, **({"keep": keep} if keep else {}))
    parameters, addresses = list(gm.parameters()), [p.data_ptr() for p in gm.parameters()]
    new = checkpoint()
    given = copy.deepcopy(new)
    outcome = load_original_state_dict(gm, new)
    assert outcome == plain.load_state_dict(new)
    assert all(a is b for a, b in zip(parameters, gm.parameters(), strict=True))
    assert addresses == [p.data_ptr() for p in gm.parameters()]
    assert all(torch.equal(new[n], given[n]) for n in new), "the checkpoint itself was written to"
    again = copy.deepcopy(plain)
    refold.FuseBatchNorm2dInConv2d(keep=keep)(again) if keep else everything()(again)
    for name, tensor in again.state_dict().items():
        assert same_bits(gm.state_dict()[name], tensor), name
    assert_holds(gm, plain.state_dict())
    for tensor in new.values():
        tensor.zero_()  # nothing of the checkpoint may be held by reference
    refold.undo(gm, None)
    assert gm.code == plain.code
    assert all(same_bits(tensor, plain.state_dict()[n]) for n, tensor in gm.state_dict().items())


def test_loading_again_and_again_and_after_training() -> None:
    gm, plain = pair()
    for seed in (5, 6, 7):
        with torch.no_grad():
            gm.conv.weight.add_(1)
        load_original_state_dict(gm, checkpoint(seed))
        assert_holds(gm, checkpoint(seed))
    plain.load_state_dict(checkpoint(7))
    clone = copy.deepcopy(gm)
    del gm
    refold.undo(clone, None)
    assert all(same_bits(tensor, plain.state_dict()[n]) for n, tensor in clone.state_dict().items())


def test_two_maps_in_a_row() -> None:
    """Merged first, then the bias joins the weight: the checkpoint passes both."""

    class Heads(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.q, self.k = nn.Linear(4, 3), nn.Linear(4, 5)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.q(x).sum() * self.k(x)

    gm = torch.fx.symbolic_trace(Heads())
    refold.MergeLinears()(gm)
    refold.FuseBiasInLinear()(gm)
    assert [list(r.map.sources.values()) for c in refold.history(gm) for r in c.maps][-1][0].endswith("merged.weight")
    new = {name: torch.randn_like(tensor) for name, tensor in Heads().state_dict().items()}
    load_original_state_dict(gm, new)
    assert_holds(gm, new)
    refold.undo(gm, None)
    assert all(torch.equal(t, new[n]) for n, t in gm.state_dict().items())


def test_after_a_cast_the_checkpoint_is_cast_too() -> None:
    gm, plain = pair()
    gm.half()
    plain.half()
    load_original_state_dict(gm, checkpoint())
    plain.load_state_dict(checkpoint())
    refold.undo(gm, None)
    for name, tensor in plain.state_dict().items():
        assert same_bits(gm.state_dict()[name], tensor), name


def test_tied_weights_load_as_one() -> None:
    gm, _ = pair()
    load_original_state_dict(gm, checkpoint())
    assert gm.o.weight is gm.tied.weight and torch.equal(gm.o.weight, checkpoint()["o.weight"])


# --- wrong checkpoints ---------------------------------------------------------------------------------------------

WRONG: dict[str, Any] = {
    "a plain key is missing": lambda sd: sd.pop("o.bias"),
    "a folded key is missing": lambda sd: sd.pop("bn.running_var"),
    "a merged key is missing": lambda sd: sd.pop("k.weight"),
    "keys nobody knows": lambda sd: sd.update({"conv.scale": torch.ones(1), "zzz": torch.ones(2)}),
    "a plain shape": lambda sd: sd.update({"o.bias": torch.ones(9)}),
    "a folded shape": lambda sd: sd.update({"conv.weight": torch.ones(8, 3, 5, 5)}),
    "a merged shape": lambda sd: sd.update({"q.weight": torch.ones(5, 8)}),
    "the folded names": lambda sd: (sd.clear(), sd.update(pair()[0].state_dict())),
    "all of it": lambda sd: (sd.pop("bn.weight"), sd.update({"q.bias": torch.ones(1), "more": torch.ones(1)})),
}


@pytest.mark.parametrize("name", WRONG)
def test_a_wrong_checkpoint_gets_torchs_report_and_changes_nothing(name: str) -> None:
    gm, plain = pair()
    wrong = checkpoint()
    WRONG[name](wrong)
    with pytest.raises(RuntimeError) as expected:
        plain.load_state_dict(wrong)
    before = everything_of(gm)
    with pytest.raises(CheckpointMismatch) as found:
        load_original_state_dict(gm, wrong)
    assert str(found.value).startswith(str(expected.value).replace(type(plain).__name__, type(gm).__name__))
    assert isinstance(found.value, RuntimeError) and isinstance(found.value, refold.RefoldError)
    assert_untouched(gm, before)


@pytest.mark.parametrize(
    "name", ["a plain key is missing", "a folded key is missing", "a merged key is missing", "keys nobody knows"]
)
def test_not_strict_loads_the_rest(name: str) -> None:
    gm, plain = pair()
    partial = checkpoint()
    WRONG[name](partial)
    assert load_original_state_dict(gm, partial, strict=False) == plain.load_state_dict(partial, strict=False)
    assert_holds(gm, plain.state_dict())


def test_shapes_are_checked_even_if_not_strict() -> None:
    gm, _ = pair()
    before = everything_of(gm)
    wrong = checkpoint() | {"q.weight": torch.ones(5, 8)}
    with pytest.raises(CheckpointMismatch, match=re.escape("size mismatch for q.weight")):
        load_original_state_dict(gm, wrong, strict=False)
    assert_untouched(gm, before)


def test_an_empty_checkpoint_that_is_not_strict_changes_nothing() -> None:
    gm, plain = pair()
    before = {n: t.clone() for n, t in gm.state_dict().items()}
    outcome = load_original_state_dict(gm, {}, strict=False)
    assert outcome == plain.load_state_dict({}, strict=False) and len(outcome.missing_keys) > 10
    assert all(same_bits(t, before[n]) for n, t in gm.state_dict().items())


class RawFold(refold.Transformation):
    """Somebody's own fold without a weight map."""

    def __init__(self, factor: Any = 2) -> None:
        self.factor = factor

    def transform(self, graph_module: torch.fx.GraphModule) -> torch.fx.GraphModule:
        factor = self.factor() if callable(self.factor) else self.factor
        graph_module.o.bias = nn.Parameter(graph_module.o.bias.detach() * factor)
        return graph_module


def test_weights_made_without_a_map_are_made_again_from_the_checkpoint() -> None:
    gm = torch.fx.symbolic_trace(mixed())
    plain = copy.deepcopy(gm)
    everything()(gm)
    RawFold()(gm)
    bias = gm.o.bias
    assert refold.history(gm)[-1].fingerprints and len(refold.history(gm)) > 2
    outcome = load_original_state_dict(gm, checkpoint())
    assert outcome == plain.load_state_dict(checkpoint())
    assert gm.o.bias is bias and torch.equal(bias, checkpoint()["o.bias"] * 2)
    assert_holds(gm, checkpoint())
    refold.undo(gm, None)
    assert gm.code == plain.code and torch.equal(gm(X), plain(X))


def test_what_cannot_be_made_again_is_refused_not_left_unset() -> None:
    gm = RawFold(lambda: 2)(torch.fx.symbolic_trace(mixed()))
    before = everything_of(gm)
    with pytest.raises(CheckpointMismatch, match=r"made o\.bias without saying .* not plain data"):
        load_original_state_dict(gm, checkpoint())
    assert_untouched(gm, before)


class FoldIfPositive(refold.Transformation):
    """A fold without a weight map that looks at the weights to decide."""

    def transform(self, graph_module: torch.fx.GraphModule) -> torch.fx.GraphModule:
        if bool((graph_module.o.bias > 0).all()):
            graph_module.o.bias = nn.Parameter(graph_module.o.bias.detach() * 2)
        return graph_module


def test_a_checkpoint_that_leads_to_another_rewrite_is_refused() -> None:
    model = mixed()
    nn.init.ones_(model.o.bias)
    gm = FoldIfPositive()(torch.fx.symbolic_trace(model))
    before = everything_of(gm)
    with pytest.raises(CheckpointMismatch, match="does not do again what it did"):
        load_original_state_dict(gm, checkpoint() | {"o.bias": -torch.ones_like(model.o.bias)})
    assert_untouched(gm, before)
    load_original_state_dict(gm, checkpoint() | {"o.bias": 3 * torch.ones_like(model.o.bias)})
    assert bool((gm.o.bias == 6).all())


class DropBias(refold.Transformation):
    """Removes a tensor that nothing replaces."""

    def transform(self, graph_module: torch.fx.GraphModule) -> torch.fx.GraphModule:
        graph_module.o.register_parameter("bias", None)
        return graph_module


def test_removed_weights_are_loaded_into_the_record() -> None:
    gm = torch.fx.symbolic_trace(mixed())
    plain = copy.deepcopy(gm)
    DropBias()(gm)
    assert_holds(gm, plain.state_dict())
    load_original_state_dict(gm, checkpoint())
    assert_holds(gm, checkpoint())
    refold.undo(gm)
    assert torch.equal(gm.o.bias, checkpoint()["o.bias"])


def test_a_failure_while_it_is_computed_changes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    gm, _ = pair()
    before = everything_of(gm)
    from refold.checkpoints import checkpoint_load as module

    for error in (MemoryError, KeyboardInterrupt):
        monkeypatch.setattr(module, "remember", lambda *_, _error=error, **__: (_ for _ in ()).throw(_error()))
        with pytest.raises(error):
            load_original_state_dict(gm, checkpoint())
        assert_untouched(gm, before)


def test_an_interrupt_while_weights_are_written_comes_when_all_are(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = {"n": 0}
    real = torch.Tensor.copy_

    def copy_(self: torch.Tensor, value: torch.Tensor, *rest: Any) -> torch.Tensor:
        calls["n"] += 1
        if calls["n"] == 3:
            raise KeyboardInterrupt
        return real(self, value, *rest)

    gm, _ = pair()
    monkeypatch.setattr(torch.Tensor, "copy_", copy_)
    with pytest.raises(KeyboardInterrupt):
        load_original_state_dict(gm, checkpoint())
    monkeypatch.undo()
    assert calls["n"] > 3
    assert_holds(gm, checkpoint())


# --- averages ------------------------------------------------------------------------------------------------------


def test_an_average_of_weights_goes_both_ways() -> None:
    gm, plain = pair(torch.float64)
    average = {name: tensor.detach().clone() for name, tensor in plain.state_dict().items()}
    average |= {name: average[name] * 0.9 for name in average if average[name].is_floating_point() and "bn" not in name}
    folded = to_folded(gm, average)
    assert set(folded) == set(gm.state_dict())
    back = to_original(gm, folded)
    plain.load_state_dict(average)
    reference = copy.deepcopy(plain)
    plain.load_state_dict({name: back[name] for name in average})
    gm.load_state_dict(folded)
    for found in (plain, gm):
        assert not list(deviations(reference, found, (X.double(),)))


def test_an_averaged_model_can_be_undone_itself() -> None:
    gm, plain = pair()
    ema = torch.optim.swa_utils.AveragedModel(gm, multi_avg_fn=torch.optim.swa_utils.get_ema_multi_avg_fn(0.5))
    ema.update_parameters(gm)
    refold.undo(ema.module, None)
    assert ema.module.code == plain.code
    for name, tensor in plain.state_dict().items():
        assert same_bits(ema.module.state_dict()[name], tensor), name


def test_a_hook_on_loading_does_its_work() -> None:
    gm, plain = pair()
    for module in (gm, plain):  # what a hook does to a checkpoint is done
        module.get_submodule("o").register_load_state_dict_pre_hook(_halve_bias)
    load_original_state_dict(gm, checkpoint())
    plain.load_state_dict(checkpoint())
    assert_holds(gm, plain.state_dict())
    assert torch.equal(original_state_dict(gm)["o.bias"], checkpoint()["o.bias"] / 2)


def _halve_bias(module: nn.Module, state_dict: dict[str, Any], prefix: str, *rest: Any) -> None:
    state_dict[prefix + "bias"] = state_dict[prefix + "bias"] / 2


# --- checkpoints of the model that was captured -----------------------------------------------------------------------


class Tied(nn.Module):
    """A tie of which the graph reads one name, and a parameter that it never reads."""

    def __init__(self) -> None:
        super().__init__()
        self.shared, self.left, self.right = nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4)
        self.right.weight = self.shared.weight
        self.mask = nn.Parameter(torch.randn(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.left(x) * 2 + self.right(x) / 3


@pytest.mark.parametrize("fold", [False, True])
def test_a_checkpoint_of_the_eager_model_goes_in_and_comes_out_whole(fold: bool) -> None:
    model, other = Tied(), Tied()
    gm = refold.trace(copy.deepcopy(model), torch.randn(2, 4))
    if fold:
        refold.ChangeTrueDivToMulByInverse()(gm)
        refold.MergeLinears()(gm)
    assert model.load_state_dict(original_state_dict(gm)).missing_keys == []
    load_original_state_dict(gm, other.state_dict())
    found = original_state_dict(gm)
    assert found.keys() == other.state_dict().keys()
    assert all(torch.equal(found[name], tensor) for name, tensor in other.state_dict().items())
    x = torch.randn(2, 4, dtype=torch.float64)
    assert not list(deviations(refold.trace(other.double(), x), gm.double(), (x,)))


def test_a_wrong_checkpoint_of_the_eager_model_loads_nothing() -> None:
    gm = refold.trace(Tied(), torch.randn(2, 4))
    before = {name: tensor.clone() for name, tensor in original_state_dict(gm).items()}
    assert "mask" in before
    for wrong, told in (
        ({"mask": torch.ones(4)}, "size mismatch for mask"),
        ({"left.bias": torch.ones(3)}, "left.bias"),
    ):
        with pytest.raises(CheckpointMismatch, match=told):
            load_original_state_dict(gm, Tied().state_dict() | wrong)
    assert_holds(gm, before)
    load_original_state_dict(gm, gm.state_dict())  # what the captured module itself gives is enough
