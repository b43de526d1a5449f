"""Evaluate one site: run both sides alone, in float64, on real and sampled values, and compare."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.fx import GraphModule

from refold.fx_private import registered_tensors
from refold.graph.aliasing import written_by
from refold.nested import map_tensors, tensors_in
from refold.verification.closeness import (
    Difference,
    all_finite,
    both_finite,
    compare,
    differ_in_integers,
    discrete_differ,
    flat,
    pooled,
)
from refold.verification.discrete_draws import NAMES
from refold.verification.extraction import extract, install, seeded, tensors_used
from refold.verification.float64 import (
    PROBES,
    SLACK,
    UNIT,
    Arithmetic,
    BetweenSteps,
    is_rounded,
    sensitivity,
    to_float64,
)
from refold.verification.integer_uses import IntegerUses
from refold.verification.origins import Origins
from refold.verification.samples import SPECIAL, Values, Watched, cropped, quietly, samples_of
from refold.verification.sites import ComparedSite
from refold.verification.stages import Stage, float64_copy
from refold.verification.verdicts import SiteVerdict
from refold.wording import first_line

_SMALL = (-1.0, 0.0, 1.0)
_TINY = torch.finfo(torch.float64).tiny

Sides = tuple[GraphModule, GraphModule]


@dataclass(frozen=True)
class Trial:
    """What became of both sides on one set of values."""

    sample: str
    difference: Difference
    ran: bool = True


@dataclass(frozen=True)
class SiteEvaluation:
    """Evaluates the sites of one stage."""

    stage: Stage
    origins: Origins
    seed: int

    def evaluate(self, site: ComparedSite, values: Sequence[Values]) -> SiteVerdict:
        """The verdict on a site, given the values that reach it in one or more runs of the model. Every kind of value
        is sampled for the first run; for the others (other sizes) the real and normal ones do."""
        sides = extract(self.stage, site)
        before, after = (tensors_used(side, side.graph.nodes) for side in sides)
        mapped, unknown = self.origins.sort(after, before.values())
        defect = self.origins.defect(mapped)
        if defect:
            return self._verdict(site, Difference(defect), way="stored weights compared with their weight map")
        native = self._native(sides, values[0])
        if native.difference.sentence:
            return self._verdict(site, native.difference, native.sample, way="run as it is")
        if unknown:
            return self._evaluate_unknown(site, sides, mapped, unknown, values)
        if _writes(sides[0]) and self._equal_bits(sides, values):
            return self._verdict(site, Difference(), way="run as it is, equal bits")
        exact = self.origins.in_float64(mapped)
        return self._worst(site, self._try_all(sides, exact, values), "run in float64")

    # --- the three ways ----------------------------------------------------------------------------------------------

    def _evaluate_unknown(
        self, site: ComparedSite, sides: Sides, mapped: set[str], unknown: set[str], values: Sequence[Values]
    ) -> SiteVerdict:
        """Tensors that no weight map accounts for: equal bits prove them; else the transformation is applied again in
        float64; else they are taken as stored, and as many roundings are allowed as a fold of them takes."""
        if self._equal_bits(sides, values):
            return self._verdict(site, Difference(), way="run as it is, equal bits")
        again = self.origins.applied_again(unknown)
        if again is not None:
            if not self.origins.gives_the_same(unknown):
                sentence = f"{', '.join(sorted(unknown))}: applied again, the transformation stores other values"
                return self._verdict(site, Difference(sentence), way="applied again")
            exact = self.origins.in_float64(mapped) | again
            return self._worst(site, self._try_all(sides, exact, values), "applied again in float64")
        stored = [t for n, t in registered_tensors(sides[1]).items() if n in unknown and t.is_floating_point()]
        unit = max((torch.finfo(t.dtype).eps / 2 for t in stored), default=0.0)
        roundings = unit * (1 + len(tensors_used(sides[0], sides[0].graph.nodes)))
        trials = self._try_all(sides, self.origins.in_float64(mapped), values, roundings)
        names = ", ".join(sorted(unknown))
        return self._worst(site, trials, f"run in float64, {names} as stored, to within {stored[0].dtype} rounding")

    def _try_all(
        self, sides: Sides, exact: dict[str, torch.Tensor], values: Sequence[Values], extra: float = 0.0
    ) -> list[Trial]:
        float64 = (float64_copy(sides[0]), float64_copy(sides[1]))
        install(float64[1], exact)
        small = [cropped(real) for real in values]
        if any(a is not b for a, b in zip(small, values, strict=True)):
            trials = self._trials(float64, small, extra)
            if trials[0].ran and not trials[-1].difference.sentence:
                return trials
        return self._trials(float64, values, extra)  # sizes may be written into the graph: then only its own ones count

    def _trials(self, sides: tuple[nn.Module, nn.Module], values: Sequence[Values], extra: float) -> list[Trial]:
        trials: list[Trial] = []
        for number, real in enumerate(values):
            watched = self._watch(sides, map_tensors(real, to_float64))
            for sample, inputs in samples_of(real, self.seed + number, watched, few=bool(number)):
                trials.append(self._try(sides, sample, inputs, extra))
                if trials[-1].difference.sentence:
                    return trials
        return trials

    def _watch(self, sides: Sequence[nn.Module], inputs: Values) -> Watched:
        """How a site uses its integers, and the numbers at which one of its sides has a step."""
        integers = [t for t in tensors_in(inputs) if not t.is_floating_point() and not t.is_complex()]
        modes = [IntegerUses(integers) for _ in sides]
        for module, mode in zip(sides, modes, strict=True):
            try:
                with Arithmetic(), mode:
                    self._run(module, inputs)
            except Exception:  # what becomes of such values is told where both sides are compared
                mode.close()
        numbers = set().union(*(mode.numbers for mode in modes), _SMALL) if any(m.has_steps for m in modes) else set()
        return Watched(dict(zip(map(id, integers), modes[0].uses, strict=True)), tuple(sorted(numbers)))

    def _try(self, sides: tuple[nn.Module, nn.Module], sample: str, inputs: Values, extra: float) -> Trial:
        modes = (Arithmetic(), Arithmetic())
        try:
            with modes[0]:
                old = self._run(sides[0], inputs)
        except Exception:  # values that the original cannot take tell nothing about the rewrite
            return Trial(sample, Difference(), ran=False)
        try:
            with modes[1]:
                new = self._run(sides[1], inputs)
        except Exception as error:
            return Trial(sample, Difference(f"it raises {first_line(error)}"))

        roundings = UNIT * max(mode.terms for mode in modes)
        unit = roundings + extra
        moved: list[list[Any]] = []

        def bounds() -> list[Any]:
            for module, base in zip(sides, (old, new), strict=True):
                moved.append(sensitivity(partial(self._run, module, inputs), base, self.seed))
            return [_bound(unit, roundings, *each) for each in zip(*moved, old, new, strict=True)]

        if sample == SPECIAL or any(t.is_floating_point() and t.isnan().any() for t in tensors_in(inputs)):
            old, new = both_finite(old, new)
        if discrete_differ(old, new):
            old, new = self._decided(sides, inputs, (old, new), unit)
        difference = compare(old, new, bounds)
        if extra and moved and not difference.sentence:
            joint = [None if a is None else a + b for a, b in zip(*moved, strict=True)]
            difference = max(difference, pooled(old, new, joint, unit), key=lambda d: d.ratio)
        return Trial(sample, difference)

    def _native(self, sides: Sides, real: Values, *, bits: bool = False) -> Trial:
        """Both sides as they are: same shapes and dtypes and no new exception on the first sample that the original
        takes, and the same integers on those with other integers; or (`bits`) the same bits on every sample."""
        taken = False
        for sample, inputs in samples_of(real, self.seed, self._watch(sides, real), float64=False):
            if taken and not bits and sample not in NAMES:
                continue
            try:
                old = self._run(sides[0], inputs)
            except Exception:  # the original cannot take these values either
                continue
            try:
                new = self._run(sides[1], inputs)
            except Exception as error:
                return Trial(sample, Difference(f"it raises {first_line(error)}"))
            if not bits:
                if sample in NAMES and (worse := _first_not_finite(old, new)):
                    return Trial(sample, Difference(worse))
                old, new = both_finite(old, new)
                if discrete_differ(old, new):
                    old, new = self._decided(sides, inputs, (old, new), None)
            allowed = [_allowed(o, 0.0 if bits else torch.inf) for o in old]
            difference = compare(old, new, partial(list, allowed))
            if difference.sentence and sample != SPECIAL:
                return Trial(sample, difference)
            taken = True
        return Trial("", Difference())

    def _decided(
        self, sides: Sequence[nn.Module], inputs: Values, results: tuple[list[Any], list[Any]], unit: float | None
    ) -> tuple[list[Any], list[Any]]:
        """The same results without those integers and booleans that roundings on the way to them turn over: which of
        two equal scores is the largest says nothing. With `unit` the roundings are that large, else the model's own."""
        open_at = [False] * len(results[0])
        for number in range(2 * PROBES):
            side = number % 2
            perturb = BetweenSteps(unit or _own_unit(results[0], inputs), self.seed + number)
            with Arithmetic(float64=unit is not None, perturb=perturb):
                moved = self._run(sides[side], inputs)
            for i, (m, base, other) in enumerate(zip(moved, results[side], results[1 - side], strict=True)):
                if differ_in_integers(base, other):
                    open_at[i] |= differ_in_integers(m, base) and bool(((m != base) & (base != other)).any())
        keep = [i for i, is_open in enumerate(open_at) if not is_open]
        return [results[0][i] for i in keep], [results[1][i] for i in keep]

    def _equal_bits(self, sides: Sides, values: Sequence[Values]) -> bool:
        """Whether both sides give the same bits on every sample. Where something is written in place this comes first:
        a cast that is none gives back its input itself, but in float64 it is one, and makes a copy."""
        return not any(self._native(sides, each, bits=True).difference.sentence for each in values)

    def _run(self, module: nn.Module, inputs: Values) -> list[Any]:
        """The results, and after them the inputs that the run wrote into."""
        own = map_tensors(list(inputs.values()), torch.Tensor.clone)
        seeded(self.seed)
        results = flat(quietly(module, *own))
        return results + flat(own)

    # --- saying it ---------------------------------------------------------------------------------------------------

    def _worst(self, site: ComparedSite, trials: list[Trial], way: str) -> SiteVerdict:
        ran = [trial for trial in trials if trial.ran]
        if not ran:
            return self._verdict(site, Difference("it could not be run: the original cannot take any of the values"))
        worst = max(ran, key=lambda trial: trial.difference.ratio)
        return self._verdict(site, worst.difference, worst.sample, way, len(ran))

    def _verdict(
        self, site: ComparedSite, found: Difference, sample: str = "", way: str = "", tried: int = 0
    ) -> SiteVerdict:
        on = f" on {sample}" if sample else ""
        if found.sentence:
            sentence = found.sentence + on
        elif found.deviation:
            sentence = f"equal up to rounding on {tried} sets of values ({way})"
        else:
            sentence = f"exactly equal on {tried} sets of values" if tried else way
        label = self.stage.change.label
        return SiteVerdict(site.name, label, not found.sentence, sentence, found.deviation, found.bound, sample, way)


def _own_unit(results: list[Any], inputs: Values) -> float:
    """The rounding of the coarsest floating-point dtype among values."""
    floats = [t for t in (*tensors_in(results), *tensors_in(inputs)) if t.is_floating_point()]
    return max((torch.finfo(t.dtype).eps for t in floats), default=UNIT)


def _first_not_finite(old: list[Any], new: list[Any]) -> str:
    """A sentence if a rewrite gives NaN or infinities where the original gives none."""
    pairs = [(a, b) for a, b in zip(old, new, strict=False) if is_rounded(a) and is_rounded(b)]
    if any(all_finite(a) and not all_finite(b) for a, b in pairs):
        return "it gives NaN or infinities where the original gives none"
    return ""


def _writes(module: GraphModule) -> bool:
    return any(written_by(module, node) for node in module.graph.nodes)


def _bound(unit: float, roundings: float, old_moves: Any, new_moves: Any, old: Any, new: Any) -> Any:
    """What rounding may do to each element: its sensitivity on both sides, and roundings inside of operators whose
    results do not move (a saturated softmax), which are as large as the results."""
    if old_moves is None:
        return None
    return SLACK * unit * (old_moves + new_moves) + roundings * (old.abs() + new.abs()) + _TINY


def _allowed(value: Any, bound: float) -> Any:
    if not isinstance(value, torch.Tensor):
        return None
    return torch.full(value.shape, bound, dtype=torch.float64, device=value.device)
