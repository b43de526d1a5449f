"""How fast two (or many) ways to run the same model are: interleaved, paired by round, with the spread.

A machine drifts: clocks change, neighbours come and go. So the candidates take turns, the order is turned round
between rounds, and a comparison uses only the ratio of two times of the same round. The interval of the median ratio
comes from its order statistics (an inverted sign test): it assumes no distribution and needs no percentage picked by
hand.
"""

from __future__ import annotations

import html
import math
import statistics
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch

from refold.call_arguments import CallArguments, Inputs
from refold.errors import MeasurementFailed
from refold.measurement.clock import (
    Call,
    peak_memory,
    seconds_of,
    shortest_sample,
    without_collector,
)

# Shorter calls are preceded by an untimed one: what ran before them leaves cold caches and spinning threads behind.
_SETTLE_BELOW = 0.05
_WARM_UP_CALLS = 3  # one compiles, one records a CUDA graph, one is the first to replay it
_MOST_ROUNDS = 200


@dataclass(frozen=True)
class Timing:
    """What was measured of one candidate; `seconds[i]` is the time of a call in round i."""

    name: str
    seconds: tuple[float, ...]
    first_call: float
    peak_memory: int | None = None
    nodes: int | None = None
    dropped: bool = False

    @property
    def median(self) -> float:
        return statistics.median(self.seconds)

    @property
    def quartiles(self) -> tuple[float, float]:
        if len(self.seconds) < 2:
            return self.median, self.median
        low, _, high = statistics.quantiles(self.seconds, n=4, method="inclusive")
        return low, high

    @property
    def spread(self) -> float:
        """Median absolute deviation of the samples, in seconds."""
        middle = self.median
        return statistics.median(abs(value - middle) for value in self.seconds)

    def followed_by(self, later: Timing) -> Timing:
        """Together with more rounds."""
        return replace(self, seconds=self.seconds + later.seconds, dropped=later.dropped)

    def to_dict(self) -> dict[str, Any]:
        low, high = self.quartiles
        return {
            "name": self.name,
            "median_s": self.median,
            "quartiles_s": [low, high],
            "spread_s": self.spread,
            "rounds": len(self.seconds),
            "first_call_s": self.first_call,
            "peak_memory_bytes": self.peak_memory,
            "nodes": self.nodes,
            "dropped_early": self.dropped,
        }


@dataclass(frozen=True)
class Measurement:
    """Two candidates compared. `ratio` above 1 says that `b` is faster than `a`, by that factor."""

    a: Timing
    b: Timing
    device: str
    threads: int
    confidence: float = 0.99

    @property
    def ratios(self) -> tuple[float, ...]:
        return tuple(mine / its for mine, its in zip(self.a.seconds, self.b.seconds, strict=False))

    @property
    def ratio(self) -> float:
        return statistics.median(self.ratios)

    @property
    def interval(self) -> tuple[float, float]:
        """Where the median ratio lies, at `confidence`; (0, inf) when there are too few rounds to tell."""
        return median_interval(self.ratios, self.confidence)

    @property
    def faster(self) -> bool:
        """Whether b is faster than a, beyond the noise."""
        return self.interval[0] > 1

    @property
    def slower(self) -> bool:
        """Whether b is slower than a, beyond the noise."""
        return self.interval[1] < 1

    @property
    def verdict(self) -> str:
        return "faster" if self.faster else "slower" if self.slower else "no difference beyond the noise"

    def to_dict(self) -> dict[str, Any]:
        low, high = self.interval
        return {
            "a": self.a.to_dict(),
            "b": self.b.to_dict(),
            "ratio": self.ratio,
            "interval": [low, high if math.isfinite(high) else None],
            "confidence": self.confidence,
            "verdict": self.verdict,
            "device": self.device,
            "threads": self.threads,
        }

    def __str__(self) -> str:
        low, high = self.interval
        lines = [f"{self.a.name} → {self.b.name}: {self.ratio:.3f}× [{low:.3f}, {high:.3f}], {self.verdict}"]
        lines.append(f"  {self.confidence:.0%} interval of the median of {len(self.ratios)} rounds, on {self.device}")
        lines += [f"  {_describe(timing)}" for timing in (self.a, self.b)]
        return "\n".join(lines)

    def _repr_html_(self) -> str:
        low, high = self.interval
        caption = f"{self.ratio:.3f}× [{low:.3f}, {high:.3f}], {self.verdict}, on {self.device}"
        return _table(caption, [(self.a, ""), (self.b, f"{self.ratio:.3f}×")])


@dataclass(frozen=True)
class Comparison:
    """Many candidates measured in turn, fastest first when printed. `failed` says why some could not run."""

    timings: dict[str, Timing]
    failed: dict[str, str]
    device: str
    threads: int
    confidence: float = 0.95
    baseline: str | None = None

    @property
    def best(self) -> str:
        """The fastest of those that were not dropped: in the median round, against the mean of its round. A round is
        slow or fast for all of them."""
        alive = [timing for timing in self.timings.values() if not timing.dropped]
        means = [statistics.fmean(together) for together in zip(*(timing.seconds for timing in alive), strict=False)]

        def share(timing: Timing) -> float:
            return statistics.median(mine / mean for mine, mean in zip(timing.seconds, means, strict=False))

        return min(alive, key=share).name

    @property
    def undecided(self) -> list[str]:
        """The best candidate, and those that may be as fast for all that the rounds can tell."""
        best = self.best
        alive = [timing.name for timing in self.timings.values() if not timing.dropped]
        return [best, *(name for name in alive if name != best and not self.between(name, best).faster)]

    def between(self, a: str, b: str) -> Measurement:
        """The two candidates compared over the rounds that both ran."""
        return Measurement(self.timings[a], self.timings[b], self.device, self.threads, self.confidence)

    def among(self, names: Collection[str]) -> Comparison:
        """These candidates alone."""
        return replace(self, timings={name: self.timings[name] for name in names}, baseline=None)

    def followed_by(self, other: Comparison) -> Comparison:
        """Together with more rounds of some of the candidates."""
        more = {name: self.timings[name].followed_by(timing) for name, timing in other.timings.items()}
        return replace(self, timings=self.timings | more)

    def speedup(self, name: str) -> float:
        """How many times faster than the baseline (the first candidate when none was named)."""
        return self.between(self.baseline or next(iter(self.timings)), name).ratio

    @property
    def ranked(self) -> list[Timing]:
        return sorted(self.timings.values(), key=lambda timing: timing.median)

    def to_dict(self) -> dict[str, Any]:
        rows = [timing.to_dict() | {"speedup": self.speedup(timing.name)} for timing in self.ranked]
        return {
            "candidates": rows,
            "failed": self.failed,
            "best": self.best,
            "baseline": self.baseline or next(iter(self.timings)),
            "device": self.device,
            "threads": self.threads,
        }

    def __str__(self) -> str:
        lines = [f"{self.speedup(timing.name):7.3f}×  {_describe(timing)}" for timing in self.ranked]
        return "\n".join(lines + [f"   failed  {name}: {reason}" for name, reason in self.failed.items()])

    def _repr_html_(self) -> str:
        return _table(f"on {self.device}", [(timing, f"{self.speedup(timing.name):.3f}×") for timing in self.ranked])


def measure(
    a: Callable[..., Any],
    b: Callable[..., Any],
    inputs: Inputs,
    *,
    repeats: int | None = None,
    time_budget: float = 10.0,
    confidence: float = 0.99,
    grad: bool = False,
    memory: bool = True,
) -> Measurement:
    """Time a and b in turn on the same inputs: a dict of keyword arguments, a tuple of positional ones, or one tensor.

    `repeats` is the number of rounds; without it, as many as fit in `time_budget` seconds.
    Gradients are off unless `grad=True`: this times inference. `memory=False` saves the call that peak memory takes.
    """
    given = tuple(getattr(candidate, "__name__", type(candidate).__name__) for candidate in (a, b))
    names = given if given[0] != given[1] else ("a", "b")
    comparison = measure_many(
        dict(zip(names, (a, b), strict=True)),
        inputs,
        repeats=repeats,
        time_budget=time_budget,
        confidence=confidence,
        grad=grad,
        memory=memory,
        keep=names,
    )
    for name, reason in comparison.failed.items():
        raise MeasurementFailed(f"{name} cannot be timed: it raised {reason}. Call it once to see why.")
    return comparison.between(*names)


def measure_many(
    candidates: Mapping[str, Callable[..., Any]],
    inputs: Inputs,
    *,
    repeats: int | None = None,
    time_budget: float = 30.0,
    confidence: float = 0.95,
    grad: bool = False,
    memory: bool = True,
    keep: Collection[str] = (),
    baseline: str | None = None,
    at_least: int = 2,
    until_decided: bool = False,
) -> Comparison:
    """Time many candidates in turn. Those that cannot win any more leave early, except the names in `keep`.

    The budget covers the rounds; the first calls (which may compile) are timed apart and are not counted. Warming up
    takes no longer than the rounds, so a call of many seconds gets fewer untimed ones. There are `at_least` so many
    rounds, whatever they take; `until_decided` stops once the fastest is known beyond the noise.
    """
    patience = math.inf if repeats else time_budget / max(1, len(candidates))
    arguments = CallArguments.of(inputs, "inputs")
    device = arguments.device(*candidates.values())
    runs, failed = {}, {}
    with torch.set_grad_enabled(grad), without_collector(device):
        for name, candidate in candidates.items():
            try:
                runs[name] = _Run.warmed_up(name, candidate, arguments, device, patience, memory)
            except Exception as error:
                failed[name] = f"{type(error).__name__}: {error}"
        if not runs:
            raise MeasurementFailed(f"None of the candidates could run: {failed}.")
        rounds = _Rounds(repeats, time_budget, at_least, until_decided, confidence)
        _take_turns(list(runs.values()), rounds, {*keep, baseline})
    timings = {name: run.timing() for name, run in runs.items()}
    return Comparison(timings, failed, str(device), torch.get_num_threads(), confidence, baseline)


def median_interval(values: Sequence[float], confidence: float) -> tuple[float, float]:
    """A distribution-free interval for the median: the k-th smallest and k-th largest value.

    k is the largest with P(Binomial(n, ½) < k) ≤ (1 − confidence) / 2. No such k: nothing can be said.
    """
    count = len(values)
    ordered = sorted(values)
    tail, k = 0.0, 0
    while k < count:
        tail += math.comb(count, k) / 2**count
        if tail > (1 - confidence) / 2:
            break
        k += 1
    return (ordered[k - 1], ordered[-k]) if k else (0.0, math.inf)


def rounds_needed(confidence: float, comparisons: int = 1) -> int:
    """The fewest rounds after which anything can be said at all: comparisons · 2^(1 − n) ≤ 1 − confidence."""
    return math.ceil(1 + math.log2(comparisons / (1 - confidence)))


@dataclass
class _Run:
    """A candidate on its way through the rounds."""

    name: str
    call: Call
    device: torch.device
    first_call: float
    per_sample: int
    settle: bool
    nodes: int | None
    peak_memory: int | None
    samples: list[float] = field(default_factory=list)
    dropped: bool = False

    @classmethod
    def warmed_up(
        cls,
        name: str,
        candidate: Callable[..., Any],
        arguments: CallArguments,
        device: torch.device,
        patience: float,
        memory: bool,
    ) -> _Run:
        call = partial(arguments.given_to, candidate)
        first = seconds_of(call, 1, device)
        seen = [seconds_of(call, 1, device)]
        # too few calls yet, or still getting faster: not warm
        while sum(seen) < patience and (len(seen) < _WARM_UP_CALLS - 1 or seen[-1] < min(seen[:-1])):
            seen.append(seconds_of(call, 1, device))
        fastest = max(min(seen), 1e-9)
        per_sample = max(1, math.ceil(shortest_sample(device) / fastest))
        nodes = len(candidate.graph.nodes) if isinstance(candidate, torch.fx.GraphModule) else None
        peak = peak_memory(call, device) if memory else None
        return cls(name, call, device, first, per_sample, fastest < _SETTLE_BELOW, nodes, peak)

    def sample(self) -> None:
        if self.settle:
            self.call()
        self.samples.append(seconds_of(self.call, self.per_sample, self.device))

    def timing(self) -> Timing:
        return Timing(self.name, tuple(self.samples), self.first_call, self.peak_memory, self.nodes, self.dropped)


@dataclass(frozen=True)
class _Rounds:
    """When to stop."""

    repeats: int | None
    time_budget: float
    at_least: int
    until_decided: bool
    confidence: float


def _take_turns(runs: list[_Run], rounds: _Rounds, protected: Collection[str | None]) -> None:
    """Sample every candidate once a round, until the rounds or the seconds are used up, or all is said."""
    start = time.perf_counter()
    patience = rounds_needed(rounds.confidence, len(runs))
    for done in range(1, (rounds.repeats or _MOST_ROUNDS) + 1):
        alive = [run for run in runs if not run.dropped]
        for run in _order(alive, done - 1):
            run.sample()
        elapsed = time.perf_counter() - start
        if rounds.repeats is None and done >= rounds.at_least and elapsed * (done + 1) / done > rounds.time_budget:
            return
        if done >= patience:
            _drop_hopeless(alive, protected)
            if rounds.until_decided and _is_decided(alive, rounds.confidence):
                return


def _is_decided(runs: list[_Run], confidence: float) -> bool:
    """Whether the fastest is faster than each of the others, beyond the noise."""
    leader = min(runs, key=lambda run: statistics.median(run.samples))
    ratios = [
        [its / mine for its, mine in zip(r.samples, leader.samples, strict=True)] for r in runs if r is not leader
    ]
    return all(median_interval(values, confidence)[0] > 1 for values in ratios)


def _order(runs: list[_Run], index: int) -> list[_Run]:
    """Rotated every second round and turned round every other: each candidate meets each place and each predecessor."""
    shift = (index // 2) % len(runs)
    turned = runs[shift:] + runs[:shift]
    return turned[::-1] if index % 2 else turned


def _drop_hopeless(runs: list[_Run], protected: Collection[str | None]) -> None:
    """Drop each candidate that never was as fast as the leader's median: by chance, that has probability 2^−rounds."""
    leader = min(statistics.median(run.samples) for run in runs)
    for run in runs:
        run.dropped = run.name not in protected and min(run.samples) > leader


def _describe(timing: Timing) -> str:
    low, high = timing.quartiles
    text = f"{timing.name}: {timing.median * 1e3:.3f} ms [{low * 1e3:.3f}, {high * 1e3:.3f}]"
    text += f", {len(timing.seconds)} rounds"
    if timing.dropped:
        text += " (left early)"
    if timing.peak_memory is not None:
        text += f", peak {timing.peak_memory / 2**20:.1f} MiB"
    return text + (f", {timing.nodes} nodes" if timing.nodes is not None else "")


def _table(caption: str, rows: Sequence[tuple[Timing, str]]) -> str:
    head = "<tr><th>candidate</th><th>speed-up</th><th>median ms</th><th>quartiles ms</th><th>first call s</th></tr>"
    body = ""
    for timing, speedup in rows:
        low, high = (f"{value * 1e3:.3f}" for value in timing.quartiles)
        cells = (timing.name, speedup, f"{timing.median * 1e3:.3f}", f"{low} – {high}", f"{timing.first_call:.2f}")
        body += "<tr>" + "".join(f"<td>{html.escape(cell)}</td>" for cell in cells) + "</tr>"
    return f"<table><caption>{html.escape(caption)}</caption>{head}{body}</table>"
