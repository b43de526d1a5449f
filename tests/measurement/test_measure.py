"""Timing: what is really faster is called faster, what is the same is not, and the numbers add up."""

from __future__ import annotations

import gc
import json
import math
import random
import sys

import pytest
import torch
from torch import nn

from refold.errors import MeasurementFailed
from refold.measurement.timing import (
    Comparison,
    Measurement,
    Timing,
    measure,
    measure_many,
    median_interval,
    rounds_needed,
)


class Clock:
    """A clock that only candidates move: the tests do not depend on how busy the machine is."""

    def __init__(self) -> None:
        self.now = 0.0
        self.draw = random.Random(0)

    def perf_counter(self) -> float:
        self.now += 1e-7  # reading a clock costs something
        return self.now

    def sleeper(self, seconds: float):
        """A candidate that takes this long, give or take a tenth."""

        def call(x: torch.Tensor) -> torch.Tensor:
            self.now += seconds * self.draw.uniform(0.9, 1.1)
            return x

        return call


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    fake = Clock()
    monkeypatch.setattr("refold.measurement.clock.time", fake)
    monkeypatch.setattr(sys.modules["refold.measurement.timing"], "time", fake)  # the name in refold is the function
    return fake


X = torch.ones(1)


def test_what_is_faster_is_called_faster(clock: Clock):
    result = measure(clock.sleeper(0.004), clock.sleeper(0.001), X, repeats=12)
    assert result.faster and not result.slower
    low, high = result.interval
    assert 1 < low <= result.ratio <= high
    assert result.verdict == "faster"


def test_what_is_slower_is_called_slower(clock: Clock):
    result = measure(clock.sleeper(0.001), clock.sleeper(0.004), X, repeats=12)
    assert result.slower and not result.faster
    assert result.ratio < 1


def test_too_few_rounds_decide_nothing(clock: Clock):
    result = measure(clock.sleeper(0.001), clock.sleeper(0.005), X, repeats=3)
    assert result.interval == (0.0, math.inf)
    assert not result.faster and not result.slower


def test_false_alarms_are_as_rare_as_promised():
    """2,000 comparisons of one noisy, drifting thing with itself: at most the promised share is called a difference."""
    draw = random.Random(0)
    confidence, alarms, trials = 0.95, 0, 2000
    for _ in range(trials):
        drift = [1 + 0.5 * math.sin(round_ / 5) for round_ in range(31)]
        a, b = ([d * draw.lognormvariate(0, 0.1) for d in drift] for _ in range(2))
        result = Measurement(Timing("a", tuple(a), 0), Timing("b", tuple(b), 0), "cpu", 1, confidence)
        alarms += result.faster or result.slower
    # Three standard deviations of a binomial above the promised share.
    promised = trials * (1 - confidence)
    assert alarms <= promised + 3 * math.sqrt(promised)


def test_a_small_difference_is_seen_through_a_large_drift():
    """The pairing at work: 3 % under a drift of ±50 %, which the two medians alone would not show."""
    draw = random.Random(1)
    drift = [1 + 0.5 * math.sin(round_) for round_ in range(60)]
    a = tuple(1.03 * d * draw.lognormvariate(0, 0.01) for d in drift)
    b = tuple(d * draw.lognormvariate(0, 0.01) for d in drift)
    result = Measurement(Timing("a", a, 0), Timing("b", b, 0), "cpu", 1)
    assert result.faster
    assert max(b) > 2 * min(b)


@pytest.mark.parametrize("count", [8, 9, 20, 101])
def test_interval_is_the_inverted_sign_test(count: int):
    """Coverage counted over all 2^n sign patterns is what the binomial says: at least the confidence, and not idle."""
    values = list(range(count))
    low, high = median_interval([float(v) for v in values], 0.99)
    k = values.index(int(low)) + 1
    assert high == values[-k]
    outside = 2 * sum(math.comb(count, i) for i in range(k)) / 2**count
    one_more = outside + 2 * math.comb(count, k) / 2**count
    assert outside <= 0.01 < one_more


def test_rounds_needed_is_the_first_that_can_decide():
    for confidence in (0.9, 0.95, 0.99, 0.999):
        needed = rounds_needed(confidence)
        assert median_interval([2.0] * needed, confidence) == (2.0, 2.0)
        assert median_interval([2.0] * (needed - 1), confidence) == (0.0, math.inf)


def test_order_alternates_and_every_candidate_runs_in_every_round(clock: Clock):
    seen: list[str] = []

    def candidate(name: str):
        def call(x: torch.Tensor) -> None:
            seen.append(name)
            clock.now += 0.06  # long enough to be called once a round, without an untimed call before

        return call

    measure_many({"a": candidate("a"), "b": candidate("b"), "c": candidate("c")}, X, repeats=4)
    rounds = ["".join(seen[-12:][i : i + 3]) for i in range(0, 12, 3)]
    assert all(sorted(r) == ["a", "b", "c"] for r in rounds)
    assert rounds[0] == rounds[1][::-1] and rounds[2] == rounds[3][::-1] and rounds[0] != rounds[2]


def test_hopeless_candidates_leave_early_and_kept_ones_stay(clock: Clock):
    candidates = {"fast": clock.sleeper(0.001), "slow": clock.sleeper(0.006), "baseline": clock.sleeper(0.006)}
    result = measure_many(candidates, X, repeats=20, baseline="baseline")
    assert result.best == "fast"
    assert result.timings["slow"].dropped
    assert len(result.timings["slow"].seconds) == rounds_needed(0.95, 3)
    assert len(result.timings["baseline"].seconds) == len(result.timings["fast"].seconds) == 20
    assert result.speedup("fast") > 2 > result.speedup("slow")


def test_the_best_is_the_best_of_its_rounds_and_not_of_the_median() -> None:
    steady = Timing("steady", (1.0, 1.1, 4.0, 4.0, 4.1), 0.0)
    better = Timing("better", (0.9, 1.0, 3.9, 3.9, 5.0), 0.0)
    assert Comparison({"steady": steady, "better": better}, {}, "cpu", 1).best == "better"
    worse_in_most = Timing("worse", (2.0, 2.0, 3.9, 4.2, 4.2), 0.0)
    race = Comparison({"steady": steady, "worse": worse_in_most}, {}, "cpu", 1)
    assert worse_in_most.median < steady.median and race.best == "steady"


def test_more_rounds_are_counted_together_with_the_first() -> None:
    first = Comparison({n: Timing(n, (1.0, 2.0), 0.1) for n in ("a", "b", "c")}, {}, "cpu", 1, baseline="c")
    more = Comparison({"a": Timing("a", (3.0,), 0.2), "b": Timing("b", (4.0,), 0.2, dropped=True)}, {}, "cpu", 1)
    together = first.followed_by(more)
    assert [together.timings[n].seconds for n in ("a", "b", "c")] == [(1.0, 2.0, 3.0), (1.0, 2.0, 4.0), (1.0, 2.0)]
    assert together.timings["a"].first_call == 0.1 and together.timings["b"].dropped
    assert together.between("c", "a").ratios == (1.0, 1.0)  # only rounds that both ran
    assert together.among(more.timings).best == "a" and set(together.among(more.timings).timings) == {"a", "b"}


def test_a_race_that_is_decided_stops_and_one_that_is_not_goes_on(clock: Clock):
    decided = measure_many(
        {"fast": clock.sleeper(0.001), "slow": clock.sleeper(0.002)},
        X,
        time_budget=1e9,
        keep=["fast", "slow"],
        until_decided=True,
    )
    assert len(decided.timings["slow"].seconds) == rounds_needed(0.95, 2)
    level = measure_many(
        {"a": clock.sleeper(0.001), "b": clock.sleeper(0.001)}, X, time_budget=1e9, keep=["a", "b"], until_decided=True
    )
    assert len(level.timings["a"].seconds) > 4 * rounds_needed(0.95, 2)


def test_rounds_that_were_asked_for_are_run_whatever_they_take(clock: Clock):
    candidates = {"a": clock.sleeper(0.1), "b": clock.sleeper(0.1)}
    assert len(measure_many(candidates, X, time_budget=0.1).timings["a"].seconds) == 2
    assert len(measure_many(candidates, X, time_budget=0.1, at_least=7).timings["a"].seconds) == 7


def test_undecided_are_the_best_and_those_that_the_rounds_cannot_tell_from_it():
    level = Timing("level", (1.1, 0.9, 1.1, 0.9, 1.1, 0.9, 1.1, 0.9), 0)
    best = Timing("best", (0.9, 1.0, 0.9, 1.0, 0.9, 1.0, 0.9, 1.0), 0)
    slow = Timing("slow", (2.0,) * 8, 0)
    gone = Timing("gone", (0.5,) * 8, 0, dropped=True)
    timings = {timing.name: timing for timing in (level, best, slow, gone)}
    assert Comparison(timings, {}, "cpu", 1).undecided == ["best", "level"]


def test_a_candidate_that_fails_is_reported_and_the_others_are_measured(clock: Clock):
    def broken(x: torch.Tensor) -> None:
        raise ValueError("no")

    result = measure_many({"good": clock.sleeper(0.001), "broken": broken}, X, repeats=2)
    assert result.failed == {"broken": "ValueError: no"}
    assert list(result.timings) == ["good"]
    assert "broken" in str(result)
    with pytest.raises(MeasurementFailed, match="ValueError: no"):
        measure(clock.sleeper(0.001), broken, X, repeats=2)
    with pytest.raises(MeasurementFailed):
        measure_many({"broken": broken}, X)


def test_time_budget_is_kept(clock: Clock):
    result = measure(clock.sleeper(0.06), clock.sleeper(0.06), X, time_budget=0.7)
    assert sum(result.a.seconds) + sum(result.b.seconds) <= 0.7
    assert len(result.ratios) == 5  # a sixth round would not fit
    generous = measure(clock.sleeper(0.06), clock.sleeper(0.06), X, time_budget=7)
    assert len(generous.ratios) > 50
    hurried = measure(clock.sleeper(0.06), clock.sleeper(0.06), X, time_budget=0)
    assert len(hurried.ratios) == 2


def test_inputs_as_dict_tuple_or_tensor():
    linear = nn.Linear(3, 3)
    x = torch.ones(2, 3)
    for inputs in ({"input": x}, (x,), x):
        result = measure(linear, linear, inputs, repeats=2)
        assert len(result.a.seconds) == 2 and all(value > 0 for value in result.a.seconds)


def test_runs_without_gradients_unless_asked():
    modes = []

    def call(x: torch.Tensor) -> None:
        modes.append(torch.is_grad_enabled())

    measure(call, call, X, repeats=2)
    assert not any(modes)
    modes.clear()
    measure(call, call, X, repeats=2, grad=True)
    assert all(modes)
    assert torch.is_grad_enabled()


def test_first_calls_are_kept_apart_and_warming_up_goes_on_while_it_helps(clock: Clock):
    getting_faster = iter([2.0, 0.6, 0.5, 0.4, 0.3])
    calls = []

    def warms_up(x: torch.Tensor) -> None:
        calls.append(x)
        clock.now += next(getting_faster, 0.3)

    result = measure_many({"warms up": warms_up}, X, repeats=3)
    timing = result.timings["warms up"]
    assert timing.first_call == pytest.approx(2.0, rel=1e-3)
    assert timing.seconds == pytest.approx((0.3, 0.3, 0.3), rel=1e-3)


def test_nodes_are_counted():

    traced = torch.fx.symbolic_trace(nn.Linear(2, 2))
    measured = measure(traced, nn.Linear(2, 2), torch.ones(1, 2), repeats=2)
    assert measured.a.nodes == len(traced.graph.nodes) and measured.b.nodes is None


def test_peak_memory_sees_what_a_call_allocates():
    def greedy(x: torch.Tensor) -> float:
        return torch.ones(32 * 2**20).sum().item()  # 128 MiB

    result = measure_many({"greedy": greedy, "modest": lambda x: x + 1}, X, repeats=2)
    greedy_peak, modest_peak = (result.timings[name].peak_memory for name in ("greedy", "modest"))
    if greedy_peak is None or modest_peak is None:
        pytest.skip("this system does not tell the peak memory of a process")
    assert greedy_peak >= 100 * 2**20 > modest_peak


def test_prints_and_serialises(clock: Clock):
    result = measure(clock.sleeper(0.002), clock.sleeper(0.001), X, repeats=9)
    assert f"{result.ratio:.3f}×" in str(result) and result.verdict in str(result)
    data = json.loads(json.dumps(result.to_dict()))
    assert data["ratio"] == result.ratio and data["a"]["rounds"] == 9
    assert "<table>" in result._repr_html_()
    many = measure_many({"<a>": clock.sleeper(0.001), "b": clock.sleeper(0.001)}, X, repeats=2)
    assert "&lt;a&gt;" in many._repr_html_() and "<a>" not in many._repr_html_()
    assert {row["name"] for row in json.loads(json.dumps(many.to_dict()))["candidates"]} == {"<a>", "b"}


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_gpu_time_is_that_of_the_device_not_of_the_launch():
    big, small = torch.randn(4096, 4096, device="cuda"), torch.randn(64, 64, device="cuda")
    result = measure(lambda x: big @ big, lambda x: small @ small, small, repeats=12)
    assert result.device.startswith("cuda") and result.faster and result.a.peak_memory


def test_no_garbage_is_collected_while_calls_are_timed_and_only_young_one_before() -> None:
    collected: list[int] = []
    seen: list[list[int]] = []

    def note(phase: str, info: dict[str, int]) -> None:
        if phase == "start":
            collected.append(info["generation"])

    def heap_of_cycles() -> None:
        for _ in range(2000):
            cycle: list[object] = []
            cycle.append(cycle)
        seen.append(list(collected))

    gc.callbacks.append(note)
    try:
        measure_many({"a": heap_of_cycles}, (), repeats=4)
    finally:
        gc.callbacks.remove(note)
    assert len(seen) > 4 and all(each == seen[0] for each in seen)
    assert seen[0][-1] == 1 and gc.isenabled()
