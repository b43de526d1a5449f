"""What a rewrite costs in accuracy: the errors of the original and of the rewritten model against a float64 run.

The original's error is one sample from what rounding does to this computation. More samples are made by running the
original with every operand of every operator perturbed by one rounding. The rewritten model is in the same error class
if its distance from the original is what one more such sample would give (a prediction interval of Student's t over the
logarithms), on top of the error that the original has itself.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from refold.fingerprint import same_bits
from refold.nested import named_leaves
from refold.record.copies import copy_with
from refold.verification.closeness import differ_in_kind
from refold.verification.extraction import seeded
from refold.verification.float64 import Arithmetic, OneRounding, is_rounded, to_float64
from refold.verification.samples import NamedCall, as_calls
from refold.verification.stages import float64_copy
from refold.verification.verdicts import GRADES, OutputVerdict

_RUNS = 4
# Student's t for 3 degrees of freedom: 0.1 % of samples of the same class lie beyond it.
_STUDENT = 10.21
_BEYOND = _STUDENT * math.sqrt(1 + 1 / _RUNS)


@dataclass(frozen=True)
class Graded:
    """The grade of one run, and of each of its outputs."""

    grade: str
    outputs: tuple[OutputVerdict, ...]

    @property
    def acceptable(self) -> bool:
        """Whether the outputs are no worse than what rounding does to the original itself."""
        return self.grade != GRADES[-1]


@dataclass
class OutputReference:
    """The original's outputs on one call: as they are, in float64, and how far rounding moves them."""

    model: nn.Module
    call: NamedCall
    seed: int
    outputs: dict[str, Any]
    exact: dict[str, Any] | None
    """None until it is needed: what is the same bit for bit need not be compared with anything."""
    note: str = ""
    _moves: dict[str, tuple[float, float]] | None = field(default=None, repr=False)

    @classmethod
    def of(cls, model: nn.Module, inputs: Any, seed: int = 0, *, only_if_needed: bool = False) -> OutputReference:
        """Run a model on these inputs, as it is and in float64. The model is not touched. `only_if_needed` leaves the
        float64 run until outputs are graded that are not the same bit for bit."""
        call = inputs if isinstance(inputs, NamedCall) else as_calls(inputs)[0]
        outputs = run_named(copy_with(model, torch.Tensor.detach), call, seed)
        reference = cls(model, call, seed, outputs, None)
        if not only_if_needed:
            reference._run_exactly()
        return reference

    def _run_exactly(self) -> dict[str, Any]:
        """The outputs in float64, run when they are asked for first."""
        if self.exact is None:
            self.exact = self.outputs
            try:
                with Arithmetic():
                    exact = run_named(float64_copy(self.model), self.call.map(to_float64), self.seed)
                self.exact = exact if exact.keys() == self.outputs.keys() else self.outputs
            except Exception as error:  # an operator without float64: the original itself is the reference then
                why = f"{type(error).__name__}: {error}"
                self.note = f"the original cannot be run in float64 ({why}); it is the reference itself"
        return self.exact

    def grade(self, outputs: Any) -> Graded:
        """Grade what another version of the model gave on the same inputs."""
        named = _named(outputs)
        if named.keys() != self.outputs.keys():
            missing = ", ".join(sorted(self.outputs.keys() ^ named.keys()))
            verdict = OutputVerdict(missing, GRADES[-1], math.inf, 0.0, 0.0, "one of both does not give it")
            return Graded(GRADES[-1], (verdict,))
        if self.exact is None and all(_same(self.outputs[name], value) for name, value in named.items()):
            return Graded(GRADES[0], ())
        verdicts = tuple(self._grade(name, named[name]) for name in self.outputs)
        return Graded(max((v.grade for v in verdicts), key=GRADES.index, default=GRADES[0]), verdicts)

    def _grade(self, name: str, value: Any) -> OutputVerdict:
        old, exact = self.outputs[name], self._run_exactly()[name]
        sentence = differ_in_kind(old, value)
        if sentence:
            return OutputVerdict(name, GRADES[-1], math.inf, 0.0, 0.0, sentence)
        if not is_rounded(old):
            return OutputVerdict(name, GRADES[0], 0.0, 0.0, 0.0)
        baseline, error = rms(old, exact), rms(value, exact)
        if same_bits(old, value):
            return OutputVerdict(name, GRADES[0], error, baseline, baseline)
        if error <= baseline:
            return OutputVerdict(name, GRADES[1], error, baseline, baseline)
        middle, width = self._movement(name)
        limit = baseline + math.exp(middle + _BEYOND * width)
        if error <= limit:
            return OutputVerdict(name, GRADES[1], error, baseline, limit)
        why = f"its error is beyond {limit:.3g}, the most that rounding makes of this model"
        return OutputVerdict(name, GRADES[2], error, baseline, limit, why)

    def _movement(self, name: str) -> tuple[float, float]:
        """Mean and standard deviation of the logarithm of how far one rounding of everything moves an output."""
        if self._moves is None:
            runs = [self._moved(i) for i in range(_RUNS)]
            self._moves = {n: _statistics([run[n] for run in runs]) for n in runs[0]}
        return self._moves[name]

    def _moved(self, number: int) -> dict[str, float]:
        with Arithmetic(float64=False, perturb=OneRounding(self.seed + number)):
            moved = run_named(copy_with(self.model, torch.Tensor.detach), self.call, self.seed)
        return {n: rms(moved[n], old) for n, old in self.outputs.items() if is_rounded(old)}


def _same(old: Any, value: Any) -> bool:
    """The same kind, and the same bits."""
    if not isinstance(old, torch.Tensor) or not isinstance(value, torch.Tensor):
        return not differ_in_kind(old, value)
    return not differ_in_kind(old, value) and same_bits(old, value)


def run_named(model: nn.Module, call: NamedCall, seed: int) -> dict[str, Any]:
    """Call a model with random numbers of its own; its outputs by name."""
    with torch.random.fork_rng(), torch.no_grad():
        seeded(seed)
        return _named(call.on(model))


def _named(outputs: Any) -> dict[str, Any]:
    name = "" if not isinstance(outputs, torch.Tensor) else "output"
    return dict(named_leaves(outputs, name))


def rms(value: torch.Tensor, reference: torch.Tensor) -> float:
    """The root mean square of a difference, where both are finite."""
    distance = (to_float64(value.detach()) - to_float64(reference.detach())).abs().nan_to_num(0.0, 0.0, 0.0)
    return float(distance.square().mean().sqrt()) if distance.numel() else 0.0


def _statistics(values: list[float]) -> tuple[float, float]:
    logs = [math.log(v) for v in values if v > 0]
    if len(logs) < 2:
        return (logs[0] if logs else -math.inf), 0.0
    middle = sum(logs) / len(logs)
    return middle, math.sqrt(sum((x - middle) ** 2 for x in logs) / (len(logs) - 1))
