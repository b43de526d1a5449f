"""Judge one site: run both sides alone, in float64, on real and drawn values, and compare."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.fx import GraphModule

from refold.aliasing import written_by
from refold.verifying.arithmetic import SLACK, UNIT, Arithmetic, spread
from refold.verifying.calls import quietly
from refold.verifying.comparing import Difference, both_finite, compare, flat, pooled
from refold.verifying.drawing import SPECIAL, Values, cropped, draws
from refold.verifying.exact import Origins
from refold.verifying.extracting import Extract, extract, install, seeded
from refold.verifying.leaves import map_tensors
from refold.verifying.results import SiteVerdict
from refold.verifying.sites import Site
from refold.verifying.stages import Stage, wide_copy

_TINY = torch.finfo(torch.float64).tiny


@dataclass(frozen=True)
class Trial:
    """What became of both sides on one set of values."""

    draw: str
    difference: Difference
    ran: bool = True


class Judge:
    """Judges the sites of one stage."""

    def __init__(self, stage: Stage, origins: Origins, seed: int) -> None:
        self.stage = stage
        self.origins = origins
        self.seed = seed

    def judge(self, site: Site, values: Sequence[Values]) -> SiteVerdict:
        """The verdict on a site, given the values that reach it in one or more runs of the model. Every kind of value
        is drawn for the first run; for the others (other sizes) the real and normal ones do."""
        before, after = extract(self.stage, site)
        known = [t for _, t in _named(before.module)]
        mapped, fresh = self.origins.sort(after.tensors, known)
        defect = self.origins.defect(mapped)
        if defect:
            return self._verdict(site, Difference(defect), way="stored weights compared with their weight map")
        native = self._native(before, after, values[0])
        if native.difference.sentence:
            return self._verdict(site, native.difference, native.draw, way="run as it is")
        if fresh:
            return self._judge_fresh(site, before, after, mapped, fresh, values)
        if _writes(before.module) and self._equal_bits(before, after, values):
            return self._verdict(site, Difference(), way="run as it is, equal bits")
        exact = self.origins.wide(mapped)
        return self._worst(site, self._try_all(before, after, exact, values), "run in float64")

    # --- the three ways ----------------------------------------------------------------------------------------------

    def _judge_fresh(
        self, site: Site, before: Extract, after: Extract, mapped: set[str], fresh: set[str], values: Sequence[Values]
    ) -> SiteVerdict:
        """Tensors that no weight map accounts for: equal bits prove them; else the transformation is applied again in
        float64; else they are taken as stored, and as many roundings are allowed as a fold of them takes."""
        if self._equal_bits(before, after, values):
            return self._verdict(site, Difference(), way="run as it is, equal bits")
        again = self.origins.applied_again(fresh)
        if again is not None:
            if not self.origins.gives_the_same(fresh):
                sentence = f"{', '.join(sorted(fresh))}: applied again, the transformation stores other values"
                return self._verdict(site, Difference(sentence), way="applied again")
            exact = self.origins.wide(mapped) | again
            return self._worst(site, self._try_all(before, after, exact, values), "applied again in float64")
        stored = [t for name, t in _named(after.module) if name in fresh and t.is_floating_point()]
        unit = max((torch.finfo(t.dtype).eps / 2 for t in stored), default=0.0)
        roundings = unit * (1 + len(before.tensors))
        trials = self._try_all(before, after, self.origins.wide(mapped), values, roundings)
        names = ", ".join(sorted(fresh))
        return self._worst(site, trials, f"run in float64, {names} as stored, to within {stored[0].dtype} rounding")

    def _try_all(
        self,
        before: Extract,
        after: Extract,
        exact: dict[str, torch.Tensor],
        values: Sequence[Values],
        extra: float = 0.0,
    ) -> list[Trial]:
        wide = (wide_copy(before.module), wide_copy(after.module))
        install(wide[1], exact)
        small = [cropped(real) for real in values]
        if any(a is not b for a, b in zip(small, values, strict=True)):
            trials = self._trials(wide, small, extra)
            if trials[0].ran and not trials[-1].difference.sentence:
                return trials
        return self._trials(wide, values, extra)  # sizes may be written into the graph: then only its own ones count

    def _trials(self, sides: tuple[nn.Module, nn.Module], values: Sequence[Values], extra: float) -> list[Trial]:
        trials: list[Trial] = []
        for number, real in enumerate(values):
            for draw, inputs in draws(real, self.seed + number):
                trials.append(self._try(sides, draw, inputs, extra))
                if trials[-1].difference.sentence:
                    return trials
                if number and draw == "normal values":
                    break
        return trials

    def _try(self, sides: tuple[nn.Module, nn.Module], draw: str, inputs: Values, extra: float) -> Trial:
        modes = (Arithmetic(), Arithmetic())
        try:
            with modes[0]:
                old = self._run(sides[0], inputs)
        except Exception:  # values that the original cannot take tell nothing about the rewrite
            return Trial(draw, Difference(), ran=False)
        try:
            with modes[1]:
                new = self._run(sides[1], inputs)
        except Exception as error:
            return Trial(draw, Difference(f"it raises {type(error).__name__}: {_first_line(error)}"))

        roundings = UNIT * max(mode.terms for mode in modes)
        unit = roundings + extra
        moved: list[list[Any]] = []

        def bounds() -> list[Any]:
            for module, base in zip(sides, (old, new), strict=True):
                moved.append(spread(partial(self._run, module, inputs), base, self.seed))
            return [_bound(unit, roundings, *each) for each in zip(*moved, old, new, strict=True)]

        if draw == SPECIAL:
            old, new = both_finite(old, new)
        difference = compare(old, new, bounds)
        if extra and moved and not difference.sentence:
            joint = [None if a is None else a + b for a, b in zip(*moved, strict=True)]
            difference = max(difference, pooled(old, new, joint, unit), key=lambda d: d.ratio)
        return Trial(draw, difference)

    def _native(
        self, before: Extract, after: Extract, real: Values, *, every_draw: bool = False, bits: bool = False
    ) -> Trial:
        """Both sides as they are: same shapes and dtypes, no new exception and, if asked for, the same bits."""
        for draw, inputs in draws(real, self.seed, wide=False):
            try:
                old = self._run(before.module, inputs)
            except Exception:  # the original cannot take these values either
                continue
            try:
                new = self._run(after.module, inputs)
            except Exception as error:
                return Trial(draw, Difference(f"it raises {type(error).__name__}: {_first_line(error)}"))
            old, new = (old, new) if bits else both_finite(old, new)
            allowed = [_allowed(o, 0.0 if bits else torch.inf) for o in old]
            difference = compare(old, new, partial(list, allowed))
            if difference.sentence and draw != SPECIAL:
                return Trial(draw, difference)
            if not every_draw:
                break
        return Trial("", Difference())

    def _equal_bits(self, before: Extract, after: Extract, values: Sequence[Values]) -> bool:
        """Whether both sides give the same bits on every draw. Where something is written in place this is asked first:
        a cast that is none gives back its input itself, but in float64 it is one, and makes a copy."""
        trials = [self._native(before, after, each, every_draw=True, bits=True) for each in values]
        return not any(trial.difference.sentence for trial in trials)

    def _run(self, module: nn.Module, inputs: Values) -> list[Any]:
        """The results, and after them the inputs that the run wrote into."""
        own = map_tensors(list(inputs.values()), torch.Tensor.clone)
        seeded(self.seed)
        results = flat(quietly(module, *own))
        return results + flat(own)

    # --- saying it ---------------------------------------------------------------------------------------------------

    def _worst(self, site: Site, trials: list[Trial], way: str) -> SiteVerdict:
        ran = [trial for trial in trials if trial.ran]
        if not ran:
            return self._verdict(site, Difference("it could not be run: the original cannot take any of the values"))
        worst = max(ran, key=lambda trial: trial.difference.ratio)
        return self._verdict(site, worst.difference, worst.draw, way, len(ran))

    def _verdict(self, site: Site, found: Difference, draw: str = "", way: str = "", tried: int = 0) -> SiteVerdict:
        on = f" on {draw}" if draw else ""
        if found.sentence:
            sentence = found.sentence + on
        elif found.deviation:
            sentence = f"equal up to rounding on {tried} sets of values ({way})"
        else:
            sentence = f"exactly equal on {tried} sets of values" if tried else way
        label = self.stage.change.label
        return SiteVerdict(site.name, label, not found.sentence, sentence, found.deviation, found.bound, draw, way)


def _writes(module: GraphModule) -> bool:
    return any(written_by(module, node) for node in module.graph.nodes)


def _named(module: nn.Module) -> list[tuple[str, torch.Tensor]]:
    return [*module.named_parameters(remove_duplicate=False), *module.named_buffers(remove_duplicate=False)]


def _first_line(error: Exception) -> str:
    return (str(error).splitlines() or ["no message"])[0]


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
