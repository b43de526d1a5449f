"""Evaluate all sites of one change: representatives of every kind by running them, all of them by their weights."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from contextlib import nullcontext

from refold.rewrite.transformation import Transformation
from refold.verification.discrete_draws import NAMES
from refold.verification.extraction import Collector, digest, discrete_values, tensors_used
from refold.verification.integer_uses import IntegerUses
from refold.verification.origins import Origins
from refold.verification.samples import REAL, NamedCall, Values
from refold.verification.site_verdicts import SiteEvaluation
from refold.verification.sites import ComparedSite, OutputChanged, SiteFinder
from refold.verification.stages import Stage
from refold.verification.varied_calls import VariedCalls, fewer_rows
from refold.verification.verdicts import SiteVerdict, Verification


def evaluate_stage(
    stage: Stage, calls: Sequence[NamedCall], transformation: Transformation | None, seed: int
) -> Verification:
    """The verdicts on every site of one change."""
    try:
        finder = SiteFinder(stage)
        sites = list(finder.sites())
    except OutputChanged:
        return Verification(problems=(f"{stage.change.label} gives the output another structure",))
    return _StageEvaluation(stage, finder, list(calls), Origins(stage, transformation), seed).evaluate(sites)


class _StageEvaluation:
    def __init__(self, stage: Stage, finder: SiteFinder, calls: list[NamedCall], origins: Origins, seed: int) -> None:
        self.stage, self.finder, self.calls, self.origins, self.seed = stage, finder, calls, origins, seed
        self.evaluation = SiteEvaluation(stage, origins, seed)
        self.notes: list[str] = []
        self.accepted: list[NamedCall] | None = None
        self.discrete: set[str] | None = None

    def evaluate(self, sites: list[ComparedSite]) -> Verification:
        """All sites; a wrong one is evaluated once more together with readers that lose nothing of its results."""
        verdicts = self._evaluate_all(sites)
        absorbed: frozenset[str] = frozenset()
        while True:
            more = frozenset(n for s in sites if not verdicts[s].right for n in s.followers) - absorbed
            if not more:
                break
            absorbed |= more
            sites = list(self.finder.sites(absorbed))
            verdicts |= self._evaluate_all([s for s in sites if s not in verdicts])
        found = tuple(verdicts[s] for s in sites)
        return Verification(found, notes=tuple(self.notes))

    def _evaluate_all(self, sites: list[ComparedSite]) -> dict[ComparedSite, SiteVerdict]:
        kinds: dict[str, list[ComparedSite]] = {}
        for site in sites:
            kinds.setdefault(digest(self.stage, site), []).append(site)
        chosen = [site for alike in kinds.values() for site in self._representatives(alike)]
        values = self._collect(chosen)
        if sites and not self.accepted:
            self.notes.append(f"the module before {self.stage.change.label} fails on the given inputs itself")
        verdicts = {site: self._evaluate_one(site, values[site]) for site in chosen if values.get(site)}
        for alike in kinds.values():
            self._evaluate_rest(alike, verdicts)
        return verdicts

    def _representatives(self, alike: list[ComparedSite]) -> list[ComparedSite]:
        """The first and the last of sites of one kind; all of them where no weight map vouches for their weights."""
        if any(self._tensors(site)[1] for site in alike):
            return alike
        return list(dict.fromkeys([alike[0], alike[-1]]))

    def _tensors(self, site: ComparedSite) -> tuple[set[str], set[str]]:
        sides = ((self.stage.before, site.before), (self.stage.after, site.after))
        before, after = (tensors_used(gm, [n for n in gm.graph.nodes if n.name in names]) for gm, names in sides)
        return self.origins.sort(after, before.values())

    def _evaluate_one(self, site: ComparedSite, values: list[Values]) -> SiteVerdict:
        """A rewrite without weights that is wrong on sampled values only may rest on what its inputs can be: sample the
        values further up then, and let the model compute them."""
        verdict = self.evaluation.evaluate(site, values)
        if verdict.right or verdict.sample == REAL or (verdict.sample not in NAMES and any(self._tensors(site))):
            return verdict
        for larger in self.finder.enlargements(site, self._is_discrete):
            values = self._collect([larger])[larger]
            again = self.evaluation.evaluate(larger, values) if values else verdict
            if again.right:
                return again
        return verdict

    def _evaluate_rest(self, alike: list[ComparedSite], verdicts: dict[ComparedSite, SiteVerdict]) -> None:
        for site in alike:
            if site in verdicts:
                continue
            like = next((verdicts[s] for s in alike if s in verdicts), None)
            defect = self.origins.defect(self._tensors(site)[0])
            right = not defect and like is not None and like.right
            sentence = defect or (f"the same rewrite as {like.site}" if like is not None else "it could not be run")
            way = "weights compared, same graph as one that was run"
            verdicts[site] = SiteVerdict(site.name, self.stage.change.label, right, sentence, way=way)

    def _collect(self, sites: list[ComparedSite]) -> dict[ComparedSite, list[Values]]:
        """The values that reach each site, in every call that the module accepts."""
        found: dict[ComparedSite, list[Values]] = {site: [] for site in sites}
        if not sites:
            return found
        collector = Collector(self.stage, sites)
        if self.accepted is None:
            self.accepted, runs = self._first_runs(collector)
        else:
            runs = [values for call in self.accepted if (values := self._run(collector, call)) is not None]
        for values in runs:
            for site, each in zip(sites, values, strict=True):
                found[site].append(each)
        return found

    def _first_runs(self, collector: Collector) -> tuple[list[NamedCall], list[list[Values]]]:
        """The given calls, or their first rows, and others like the first one: which ones does the module take?"""
        accepted: list[NamedCall] = []
        runs: list[list[Values]] = []

        uses: list[IntegerUses] = []

        def take(calls: Iterable[NamedCall]) -> None:
            for call in calls:
                watched = None if accepted else IntegerUses(call.tensors)
                values = self._run(collector, call, watched)
                if values is not None:
                    accepted.append(call)
                    runs.append(values)
                    uses.extend([watched] if watched is not None else [])
                    return

        for call in self.calls:
            take((fewer_rows(call), call))
        for choices in VariedCalls(self.stage.before, accepted[0], uses[0], self.seed) if accepted else ():
            take(choices)
        return accepted, runs

    def _is_discrete(self, name: str) -> bool:
        """Whether a node of the module before gives a mask or integers."""
        if self.discrete is None:
            self.discrete = discrete_values(self.stage, self.accepted[0], self.seed) if self.accepted else set()
        return name in self.discrete

    def _run(self, collector: Collector, call: NamedCall, watched: IntegerUses | None = None) -> list[Values] | None:
        try:
            with watched or nullcontext():
                return collector.run(call, self.seed)
        except Exception:  # sizes or values that the model does not take say nothing about the rewrite
            return None
