"""refold.optimize: used like the model, right for every input, and the model itself again on demand."""

from __future__ import annotations

import contextlib
import copy
import inspect
import pickle
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.fx import GraphModule

import refold
from refold.call_arguments import CallArguments
from refold.errors import BadExample, RefoldError
from refold.executors import Plain, catalogue
from refold.measurement.timing import Comparison, Measurement, Timing
from refold.optimization import choice, progress, report_building, steps
from refold.optimization.budget import Budget
from refold.optimization.job import Job
from refold.optimization.job_stages import optimize
from refold.optimization.progress import silent
from refold.optimization.watch import Watch
from refold.record.stack import history
from refold.rewrite.transformation import ReversibleTransformation


class Attention(nn.Module):
    """Three linears on one input, a batch norm behind a convolution, and something to reach by name."""

    def __init__(self) -> None:
        super().__init__()
        self.config = {"width": 16}
        self.query, self.key, self.value = (nn.Linear(16, 16) for _ in range(3))
        self.drop = nn.Dropout(0.5)
        self.conv = nn.Conv1d(16, 16, 3, padding=1)
        self.norm = nn.BatchNorm1d(16)

    def forward(self, x: torch.Tensor, scale: float = 4.0) -> dict[str, torch.Tensor]:
        scores = self.query(x) @ self.key(x).transpose(-1, -2) / scale
        mixed = self.drop(scores.softmax(-1)) @ self.value(x)
        return {"mixed": mixed, "normed": self.norm(self.conv(mixed.transpose(1, 2)))}

    def describe(self) -> str:
        return "an attention"


def make_model() -> Attention:
    torch.manual_seed(0)
    model = Attention().eval()
    with torch.no_grad():
        model.norm.running_mean.normal_()
        model.norm.running_var.uniform_(0.5, 2.0)
        model.norm.weight.normal_()
    return model


def bits(model: nn.Module) -> dict[str, torch.Tensor]:
    return {name: tensor.clone() for name, tensor in model.state_dict().items()}


def assert_same_bits(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> None:
    assert list(a) == list(b)
    assert all(torch.equal(a[name], b[name]) for name in a)


def error_against_float64(got: dict[str, torch.Tensor], model: nn.Module, x: torch.Tensor) -> float:
    with torch.no_grad():
        truth = copy.deepcopy(model).double()(x.double())
    return max(float((got[k].double() - truth[k]).abs().max() / truth[k].abs().max()) for k in truth)


@pytest.fixture(scope="module")
def optimized():
    model = make_model()
    before, parameters = bits(model), list(model.parameters())
    x = torch.randn(2, 5, 16)
    reference = copy.deepcopy(model)
    return optimize(model, (x,), backend="plain", progress=False), model, before, parameters, x, reference


def test_it_computes_the_same_as_accurately(optimized):
    fast, _, _, _, x, reference = optimized
    with torch.no_grad():
        eager = reference(x)
    assert error_against_float64(fast(x), reference, x) <= 4 * error_against_float64(eager, reference, x) + 2**-24


def test_the_rewrites_fired(optimized):
    fast = optimized[0]
    kept = {card.name: len(card.sites) for card in fast.report.steps if card.status == "kept"}
    assert kept.get("MergeLinears") == 1 or any(
        card.name == "MergeLinears" and card.status == "taken back" for card in fast.report.steps
    )
    assert "FoldBatchNorm" in {card.name for card in fast.report.steps}
    assert len(refold.history(fast.graph_module)) == len(kept)


def test_it_is_used_like_the_model(optimized):
    fast, model, _, _, x, _ = optimized
    assert isinstance(fast, nn.Module)
    assert fast.config is model.config and fast.describe() == "an attention"
    assert inspect.signature(fast.forward) == inspect.signature(model.forward)
    assert type(fast(x)) is dict and list(fast(x)) == ["mixed", "normed"]
    assert list(fast.state_dict()) == list(model.state_dict())
    assert [id(p) for p in fast.parameters()] == [id(p) for p in model.parameters()]
    with pytest.raises(AttributeError):
        _ = fast.no_such_thing


def test_inputs_of_another_type_run_the_original(optimized):
    fast, x = optimized[0], optimized[4]
    other = x.to(torch.bfloat16)
    with torch.no_grad(), pytest.raises(RuntimeError):
        fast(other)
    assert any("ran the original" in note for note in fast.report.notes) and fast.fallbacks


def test_another_constant_is_another_signature(optimized):
    fast, _, _, _, x, reference = optimized
    with torch.no_grad():
        assert torch.equal(fast(x, scale=2.0)["mixed"], reference(x, scale=2.0)["mixed"])


def test_gradients_of_inputs_are_given(optimized):
    fast, _, _, _, x, reference = optimized
    mine, its = x.clone().requires_grad_(), x.clone().requires_grad_()
    fast(mine)["mixed"].sum().backward()
    reference(its)["mixed"].sum().backward()
    assert torch.equal(mine.grad, its.grad)


def test_copies_and_pickles_are_the_original(optimized):
    fast, _, before, _, _, _ = optimized
    assert_same_bits(bits(copy.deepcopy(fast)), before)
    assert type(pickle.loads(pickle.dumps(fast))) is Attention


def test_restore_gives_the_model_back():
    model = make_model()
    before, parameters, x = bits(model), list(model.parameters()), torch.randn(2, 5, 16)
    with torch.no_grad():
        reference = model(x)["normed"].clone()
    fast = optimize(model, {"x": x}, backend="plain", progress=False)
    assert fast.restore() is model
    assert_same_bits(bits(model), before)
    assert all(a is b for a, b in zip(model.parameters(), parameters, strict=True))
    with torch.no_grad():
        assert torch.equal(model(x)["normed"], reference)
        assert torch.equal(fast(x)["normed"], reference)
    storages = {p.untyped_storage().data_ptr() for p in model.parameters()}
    assert len(storages) == len(parameters), "every parameter has memory of its own again"


def test_changed_weights_are_never_served_stale():
    model, x = make_model(), torch.randn(2, 5, 16)
    fast = optimize(model, (x,), backend="plain", progress=False)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.1)
        eager = copy.deepcopy(model)(x)
    assert error_against_float64(fast(x), model, x) <= 4 * error_against_float64(eager, model, x) + 2**-24


def test_training_mode_and_casting_run_the_original():
    model, x = make_model(), torch.randn(2, 5, 16)
    fast = optimize(model, (x,), backend="plain", progress=False)
    fast.train()
    assert model.training
    fast.eval()
    fast.double()
    assert fast(x.double())["mixed"].dtype == torch.float64
    assert any("moved or cast" in note for note in fast.notes)


class ScaleWrong(ReversibleTransformation):
    """A transformation that claims to preserve the computation, and does not."""

    preserves_computation = True

    def transform(self, graph_module):
        for node in graph_module.graph.nodes:
            if node.target is torch.ops.aten.div.Tensor:
                node.args = (node.args[0], node.args[1] * 1.001)
        return graph_module


def test_a_wrong_rewrite_is_taken_back():
    model, x = make_model(), torch.randn(2, 5, 16)
    with torch.no_grad():
        expected = model(x)["mixed"].clone()
    fast = optimize(model, (x,), backend="plain", pipeline=[ScaleWrong()], progress=False)
    (card,) = fast.report.steps
    assert card.status == "taken back" and card.verification is not None and card.verification.ok is False
    assert torch.equal(fast(x)["mixed"], expected)


def test_safe_keeps_only_what_is_bit_identical():
    model, x = make_model(), torch.randn(2, 5, 16)
    with torch.no_grad():
        expected = {k: v.clone() for k, v in model(x).items()}
    fast = optimize(model, (x,), level="safe", backend="plain", progress=False)
    assert all(torch.equal(fast(x)[k], expected[k]) for k in expected)


def test_a_model_that_cannot_be_captured_still_runs():
    class Steered(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x * 2 if float(x.sum()) > 0 else x * 3

    fast = optimize(Steered().eval(), (torch.ones(3),), backend="plain", progress=False)
    assert torch.equal(fast(-torch.ones(3)), -3 * torch.ones(3))


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"level": "fast"}, "level must be one of"),
        ({"effort": "much"}, "effort must be one of quick"),
        ({"sizes": "all"}, "sizes must be"),
        ({"backend": "abacus"}, "no executor called"),
        ({"pipeline": [refold.MergeLinears]}, "MergeLinears()"),
        ({"pipeline": refold.MergeLinears}, "MergeLinears()"),
        ({"pipeline": 3}, "a refold.Transformation is needed, and a int was given"),
    ],
)
def test_wrong_settings_are_named(change, words):
    with pytest.raises(RefoldError, match=words.replace("(", r"\(").replace(")", r"\)")):
        optimize(make_model(), (torch.randn(2, 5, 16),), progress=False, **change)


def test_training_mode_and_odd_inputs_are_refused():
    with pytest.raises(RefoldError, match="training mode"):
        optimize(make_model().train(), (torch.randn(2, 5, 16),), progress=False)
    with pytest.raises(RefoldError, match="example_inputs must be"):
        optimize(make_model(), 3, progress=False)
    with pytest.raises(RefoldError, match=r"a torch\.nn\.Module is needed, and a str was given"):
        optimize("model", (torch.ones(1),))  # type: ignore[arg-type]
    with pytest.raises(RefoldError, match="the class Linear was given"):
        optimize(nn.Linear, (torch.ones(1),))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("pipeline", "names"),
    [
        (refold.MergeLinears(), ["MergeLinears"]),
        (refold.compose(refold.RemoveNoOps(), refold.compose(refold.MergeLinears())), ["RemoveNoOps", "MergeLinears"]),
    ],
    ids=["single", "composed"],
)
def test_a_single_transformation_and_a_composition_are_pipelines(pipeline, names):
    fast = optimize(make_model(), (torch.randn(2, 5, 16),), backend="plain", pipeline=pipeline, progress=False)
    assert [step.name for step in fast.report.steps] == names


def test_an_executor_that_cannot_be_used_is_refused_before_any_work() -> None:
    told: list[str] = []
    with pytest.raises(RefoldError, match="the executor cuda_graph cannot be used here: a CUDA graph needs"):
        optimize(
            make_model(), (torch.randn(2, 5, 16),), backend="cuda_graph", progress=lambda what, _: told.append(what)
        )
    assert told == []


def test_progress_is_shown_as_a_bar_where_it_is_wanted(monkeypatch):
    pytest.importorskip("rich")
    steps_shown: list[str] = []

    @contextlib.contextmanager
    def bar(console):
        yield lambda what, done: steps_shown.append(what)

    monkeypatch.setattr(progress, "progress_bar", bar)
    given = {"example_inputs": (torch.randn(2, 5, 16),), "backend": "plain", "effort": "quick", "pipeline": []}
    optimize(make_model(), **given, progress=False)
    optimize(make_model(), **given)  # there is no terminal
    assert steps_shown == []
    optimize(make_model(), **given, progress=True)
    assert "capturing" in steps_shown


def test_progress_is_reported():
    reports: list[tuple[str, float]] = []
    optimize(
        make_model(),
        (torch.randn(2, 5, 16),),
        backend="plain",
        progress=lambda what, done: reports.append((what, done)),
    )
    assert [done for _, done in reports] == sorted(done for _, done in reports)
    assert any("MergeLinears" in what for what, _ in reports)


class DislikesRewrites(Plain):
    """Runs a module as it is, but takes its time over one that was rewritten."""

    name = "dislikes-rewrites"

    def prepare(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Callable[..., Any]:
        rewritten = isinstance(module, GraphModule) and len(history(module)) > 0

        def run(*args: Any, **kwargs: Any) -> Any:
            if rewritten:
                time.sleep(0.002)
            return module(*args, **kwargs)

        return run


def test_rewrites_that_the_chosen_executor_runs_slower_are_taken_back(monkeypatch):
    monkeypatch.setattr(steps, "_measured", lambda *_: None)  # of layers this small, the noise decides
    monkeypatch.setattr(catalogue, "BUILT_IN", (*catalogue.BUILT_IN, DislikesRewrites()))
    model, x = make_model(), torch.randn(2, 5, 16)
    fast = optimize(model, (x,), backend="dislikes-rewrites", progress=False)
    cards = {card.name: card for card in fast.report.steps}
    assert cards["MergeLinears"].status == "taken back" and "without the rewrites" in cards["MergeLinears"].note
    assert len(history(fast.graph_module)) == 0
    assert all(step.status != "kept" for step in fast.report.steps)
    with torch.no_grad():
        assert all(torch.equal(a, b) for a, b in zip(fast(x).values(), model(x).values(), strict=True))
    plain = {card.name: card for card in optimize(model, (x,), backend="plain", progress=False).report.steps}
    assert plain["MergeLinears"].status == "kept"


class Slowing(ReversibleTransformation):
    """Computes the same, but takes its time."""

    preserves_computation = True

    def transform(self, graph_module: GraphModule) -> GraphModule:
        node = next(n for n in graph_module.graph.nodes if n.op == "call_function")
        with graph_module.graph.inserting_before(node):
            graph_module.graph.call_function(wait)
        return graph_module


def wait() -> None:
    time.sleep(0.03)


def test_what_is_slower_is_taken_back_even_where_a_call_takes_longer_than_the_time_for_measuring(monkeypatch):
    monkeypatch.setattr(steps, "_MEASURE_SECONDS", 0.01)
    x = torch.randn(2, 5, 16)
    report = optimize(make_model(), (x,), backend="plain", pipeline=[Slowing()], progress=False).report
    assert report.steps[0].status == "taken back" and "slower" in report.steps[0].note


def group_normed(offset: float) -> nn.Module:
    """Images whose mean is far from zero: torch's group norm of channels-last images loses their variance."""
    model = nn.Sequential(nn.Conv2d(3, 32, 3), nn.GroupNorm(4, 32), nn.ReLU(), nn.Conv2d(32, 8, 3, bias=False))
    norm, last = nn.BatchNorm2d(8), nn.ReLU()
    with torch.no_grad():
        model[0].bias.add_(offset)
        norm.running_var.uniform_(0.5, 2)
    return nn.Sequential(*model, norm, last).eval()


def test_a_step_that_makes_the_outputs_worse_is_taken_back_and_those_behind_it_are_not(monkeypatch):
    monkeypatch.setattr(steps, "_measured", lambda *_: None)
    x, pipeline = torch.randn(2, 3, 32, 32), [refold.ChannelsLast(), refold.FoldBatchNorm(), refold.RemoveNoOps()]
    model = group_normed(0.0)
    cards = optimize(model, (x,), backend="plain", pipeline=pipeline, progress=False).report.steps
    assert [card.status for card in cards] == ["kept", "kept", "no match"]
    model = group_normed(300.0)
    reference = copy.deepcopy(model)
    fast = optimize(model, (x,), backend="plain", pipeline=pipeline, progress=False)
    cards = fast.report.steps
    assert [card.status for card in cards] == ["taken back", "kept", "no match"]
    assert "worse with it: output" in cards[0].note and cards[0].note in str(fast.report)
    assert fast.report.exactness.grade == "same error class" and cards[1].verification.grade == "right"
    with torch.no_grad():
        exact = copy.deepcopy(reference).double()(x.double())
        assert (fast(x) - exact).abs().max() < 10 * (reference(x) - exact).abs().max()
    assert fast.restore() is model
    for name, tensor in reference.state_dict().items():
        assert torch.equal(tensor, model.state_dict()[name])


@pytest.mark.parametrize(("slowdown", "status"), [(1.002, "kept"), (1.03, "taken back")])
def test_a_difference_that_luck_with_memory_makes_too_does_not_take_a_rewrite_back(monkeypatch, slowdown, status):
    """On a GPU rounds repeat so well that a thousandth is beyond their noise, either way, for a rewrite that changes
    no kernel. A pool that was taken back for it cost the compiler, which was not asked then, a factor of ten."""

    def measured(a: Any, b: Any, *_: Any, **__: Any) -> Measurement:
        seconds = tuple(1.0 + i / 1e5 for i in range(20))
        slowed = tuple(s * slowdown for s in seconds)
        return Measurement(Timing("a", seconds, 1.0), Timing("b", slowed, 1.0), "cuda", 1)

    monkeypatch.setattr(steps, "measure", measured)
    x = torch.randn(2, 5, 16)
    report = optimize(make_model(), (x,), backend="plain", pipeline=[refold.MergeLinears()], progress=False).report
    assert measured(None, None).slower and report.steps[0].status == status


def test_a_slow_call_leaves_time_for_the_other_steps():
    x = torch.randn(2, 5, 16)
    gm = refold.trace(make_model(), x, dynamic=False)
    with gm.graph.inserting_before(next(n for n in gm.graph.nodes if n.op != "placeholder")):
        gm.graph.call_function(wait)
    gm.recompile()
    report = optimize(gm, (x,), backend="plain", time_budget=2.0, progress=False).report
    kept = [card for card in report.steps if card.status == "kept"]
    assert kept and all(card.gain is None for card in kept)


def test_too_few_rounds_tell_nothing():
    few = Measurement(Timing("a", (1.0, 1.0), 1.0), Timing("b", (1.2, 1.1), 1.0), "cpu", 1)
    ratio = report_building._ratio(few)
    assert ratio.low == pytest.approx(1 / 1.2) and ratio.high == 1.0


def test_weights_that_are_assigned_are_used():
    model, other = Attention().eval(), Attention().eval()
    x = torch.randn(2, 5, 16)
    optimized = optimize(model, (x,), backend="compile-freezing", progress=False)
    optimized.load_state_dict(other.state_dict(), assign=True)
    with torch.no_grad():
        assert torch.equal(optimized(x)["normed"], other(x)["normed"])
    assert any("replaced" in note for note in optimized.report.notes)


def test_executors_that_are_level_are_timed_once_more_among_themselves(monkeypatch: pytest.MonkeyPatch):
    def compared(**seconds: tuple[float, ...]) -> Comparison:
        timings = {name: Timing(name, samples, 0.0) for name, samples in seconds.items()}
        return Comparison(timings, {}, "cpu", 1)

    pools = []

    def measured(pool: dict[str, object], inputs: object, **_: object) -> Comparison:
        pools.append(set(pool))
        return compared(lucky=(1.1,) * 8, level=(1.0,) * 8)

    monkeypatch.setattr(choice, "measure_many", measured)
    first = compared(lucky=(0.9, 1.0) * 4, level=(1.1, 0.9) * 4, slow=(2.0,) * 8)
    candidates = dict.fromkeys(first.timings, lambda: None)
    job = Job(nn.Identity(), CallArguments(), (), "default", "auto", "max", Budget(None), silent)
    together, winner = choice._winner(job, first, candidates)
    assert winner == "level" and pools == [{"lucky", "level"}]
    assert {name: len(timing.seconds) for name, timing in together.timings.items()} == {
        "lucky": 16,
        "level": 16,
        "slow": 8,
    }
    decided = compared(lucky=(0.9,) * 8, level=(1.1,) * 8)
    assert choice._winner(job, decided, candidates) == (decided, "lucky")
    assert len(pools) == 1


class Noisy(nn.Module):
    """Draws random numbers in eval mode; whether they count is a setting."""

    def __init__(self, counts: bool):
        super().__init__()
        self.layer, self.counts = nn.Linear(4, 4), counts

    def forward(self, x):
        noise = torch.rand(())
        return self.layer(x) + (noise if self.counts else 0)


def test_a_model_that_is_not_deterministic_is_run_as_it_is():
    model, x = Noisy(True).eval(), torch.randn(2, 4)
    state = torch.get_rng_state()
    optimized = optimize(model, (x,), time_budget=3, progress=False)
    assert torch.equal(state, torch.get_rng_state())
    assert "draws random numbers" in optimized.report.notes[0] and "draws random numbers" in str(optimized.report)
    torch.manual_seed(1)
    expected = model(x)
    torch.manual_seed(1)
    assert torch.equal(optimized(x), expected) and not optimized.notes
    assert optimized.restore() is model
    with pytest.raises(refold.errors.RefoldError, match="draws random numbers"):
        optimize(model, (x,), backend="plain", progress=False)


def test_random_numbers_without_effect_leave_a_model_deterministic():
    optimized = optimize(Noisy(False).eval(), (torch.randn(2, 4),), backend="plain", progress=False, time_budget=3)
    assert optimized.graph_module is not None


class Goes(nn.Module):
    """Goes on with a list of its own kind, and writes into it."""

    def forward(self, x, past):
        past.seen.append(x)
        return x + len(past.seen)


class Past:
    def __init__(self):
        self.seen = []


def test_an_input_that_a_call_may_write_into_is_refused_untouched():
    past, x = Past(), torch.randn(3)
    with pytest.raises(BadExample, match=r"write into one of the example inputs: past is a .*Past"):
        optimize(Goes().eval(), {"x": x, "past": past}, time_budget=3, progress=False)
    assert past.seen == []


class MayGo(nn.Module):
    def forward(self, x, past=None):
        return x * 2 if past is None else Goes()(x, past)


def test_a_call_with_such_an_input_runs_the_original():
    model, past, x = MayGo().eval(), Past(), torch.randn(3)
    optimized = optimize(model, {"x": x}, backend="plain", time_budget=3, progress=False)
    assert torch.equal(optimized(x=x, past=past), x + 1) and torch.equal(optimized(x=x, past=past), x + 2)
    assert "ran the original" in optimized.notes[0]
    assert torch.equal(optimized(x=x), x * 2) and len(past.seen) == 2


@pytest.mark.parametrize("frozen", [False, True])
def test_weights_that_were_made_in_inference_mode(frozen):
    with torch.inference_mode():
        model = nn.Sequential(nn.Conv2d(3, 4, 1), nn.BatchNorm2d(4), nn.Dropout(), nn.Flatten(), nn.Linear(4, 4)).eval()
    if frozen:
        model.requires_grad_(False)
    x = torch.randn(2, 3, 1, 1)
    optimized = optimize(model, (x,), backend="plain", time_budget=60, progress=False)
    assert history(optimized.graph_module)
    with torch.no_grad():
        torch.testing.assert_close(optimized(x), model(x))
    assert optimized.restore() is model


@pytest.mark.parametrize("seconds", [0, -1.0, float("nan")])
def test_a_time_budget_that_is_none_is_refused(seconds):
    with pytest.raises(RefoldError, match="time_budget must be a positive number"):
        optimize(make_model(), (torch.randn(2, 5, 16),), time_budget=seconds)


class SlowToPrepare(Plain):
    name = "slow-to-prepare"
    prepared = 0

    def prepare(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Callable[..., Any]:
        type(self).prepared += 1
        return super().prepare(module, args, kwargs)


def test_no_executor_is_begun_with_less_time_than_tracing_took(monkeypatch):
    """Each traces the model again; neither is the winner prepared once more for the graph without rewrites."""
    monkeypatch.setattr(catalogue, "BUILT_IN", (Plain(), SlowToPrepare()))
    monkeypatch.setattr(Budget, "left", property(lambda self: self.capturing / 2))
    x = torch.randn(2, 5, 16)
    report = optimize(make_model(), (x,), time_budget=100, progress=False).report
    assert {row.name: row.why for row in report.executors}["slow-to-prepare"].startswith("preparing it takes about")
    assert SlowToPrepare.prepared == 0
    optimize(make_model(), (x,), backend="slow-to-prepare", time_budget=100, progress=False)
    assert SlowToPrepare.prepared == 1


def test_a_budget_without_a_limit_is_always_enough():
    budget = Budget(None)
    budget.captured()
    assert budget.left == Budget(float("inf")).left == float("inf") and budget.used == 0


def test_executors_are_timed_as_they_will_be_called(monkeypatch):
    def check_long(watch: Watch) -> None:
        time.sleep(0.005)

    monkeypatch.setattr(Watch, "why_changed", check_long)
    report = optimize(make_model(), (torch.randn(2, 5, 16),), backend="plain", progress=False).report
    timings = {bar.name: bar.median for bar in report.timings}
    assert timings["plain"] > 0.005 > timings["original"]
