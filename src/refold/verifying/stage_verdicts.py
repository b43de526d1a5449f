"""Judge all sites of one change: representatives of every kind by running them, all of them by their weights."""

from __future__ import annotations

from collections.abc import Sequence

from refold.transformation import Transformation
from refold.verifying.calls import Call, fewer_rows, variants
from refold.verifying.drawing import Values
from refold.verifying.exact import Origins
from refold.verifying.extracting import collect, digest, tensors_used
from refold.verifying.judging import Judge
from refold.verifying.results import SiteVerdict, Verification
from refold.verifying.sites import Cutter, OutputChanged, Site
from refold.verifying.stages import Stage

_WIDENINGS = 3


def judge_stage(stage: Stage, calls: Sequence[Call], transformation: Transformation | None, seed: int) -> Verification:
    """The verdicts on every site of one change."""
    try:
        cutter = Cutter(stage)
        sites = list(cutter.sites())
    except OutputChanged:
        return Verification(problems=(f"{stage.change.label} gives the output another structure",))
    return _Stage(stage, cutter, list(calls), Origins(stage, transformation), seed).judge(sites)


class _Stage:
    def __init__(self, stage: Stage, cutter: Cutter, calls: list[Call], origins: Origins, seed: int) -> None:
        self.stage, self.cutter, self.calls, self.origins, self.seed = stage, cutter, calls, origins, seed
        self.judge_of = Judge(stage, origins, seed)
        self.notes: list[str] = []
        self.problems: list[str] = []
        self.accepted: list[Call] | None = None

    def judge(self, sites: list[Site]) -> Verification:
        """All sites; one that is wrong is judged once more together with readers that lose nothing of its results."""
        verdicts = self._judge_all(sites)
        absorbed: frozenset[str] = frozenset()
        while True:
            more = frozenset(n for s in sites if not verdicts[s].right for n in s.followers) - absorbed
            if not more:
                break
            absorbed |= more
            sites = list(self.cutter.sites(absorbed))
            verdicts |= self._judge_all([s for s in sites if s not in verdicts])
        found = tuple(verdicts[s] for s in sites)
        return Verification(found, (), tuple(self.problems), tuple(self.notes))

    def _judge_all(self, sites: list[Site]) -> dict[Site, SiteVerdict]:
        kinds: dict[str, list[Site]] = {}
        for site in sites:
            kinds.setdefault(digest(self.stage, site), []).append(site)
        chosen = [site for alike in kinds.values() for site in self._representatives(alike)]
        values = self._collect(chosen)
        if sites and not self.accepted:
            self.notes.append(f"the module before {self.stage.change.label} fails on the given inputs itself")
        verdicts = {site: self._judge_one(site, values[site]) for site in chosen if values.get(site)}
        for alike in kinds.values():
            self._judge_rest(alike, verdicts)
        return verdicts

    def _representatives(self, alike: list[Site]) -> list[Site]:
        """The first and the last of sites of one kind; all of them where no weight map vouches for their weights."""
        if any(self._tensors(site)[1] for site in alike):
            return alike
        return list(dict.fromkeys([alike[0], alike[-1]]))

    def _tensors(self, site: Site) -> tuple[set[str], set[str]]:
        sides = ((self.stage.before, site.before), (self.stage.after, site.after))
        before, after = (tensors_used(gm, [n for n in gm.graph.nodes if n.name in names]) for gm, names in sides)
        return self.origins.sort(after, before.values())

    def _judge_one(self, site: Site, values: list[Values]) -> SiteVerdict:
        verdict = self.judge_of.judge(site, values)
        mapped, fresh = self._tensors(site)
        if verdict.right or verdict.draw == "the real values" or mapped or fresh:
            return verdict
        return self._in_context(site, verdict)

    def _in_context(self, site: Site, verdict: SiteVerdict) -> SiteVerdict:
        """A rewrite without weights that is wrong on drawn values only may rest on what its inputs can be: draw the
        values further up then, and let the model compute them."""
        for _ in range(_WIDENINGS):
            wider = self.cutter.widened(site)
            if wider is None:
                return verdict
            site = wider
            values = self._collect([site]).get(site)
            again = self.judge_of.judge(site, values) if values else verdict
            if again.right:
                return again
        return verdict

    def _judge_rest(self, alike: list[Site], verdicts: dict[Site, SiteVerdict]) -> None:
        for site in alike:
            if site in verdicts:
                continue
            like = next((verdicts[s] for s in alike if s in verdicts), None)
            defect = self.origins.defect(self._tensors(site)[0])
            right = not defect and like is not None and like.right
            sentence = defect or (f"the same rewrite as {like.site}" if like is not None else "it could not be run")
            verdicts[site] = SiteVerdict(
                site.name,
                self.stage.change.label,
                right,
                sentence,
                way="weights compared, same graph as one that was run",
            )

    def _collect(self, sites: list[Site]) -> dict[Site, list[Values]]:
        """The values that reach each site, in every call that the module accepts."""
        found: dict[Site, list[Values]] = {site: [] for site in sites}
        if not sites:
            return found
        if self.accepted is not None:
            runs = [values for call in self.accepted if (values := self._run(sites, call)) is not None]
        else:
            runs = self._first_runs(sites)
        for values in runs:
            for site, each in zip(sites, values, strict=True):
                found[site].append(each)
        return found

    def _first_runs(self, sites: list[Site]) -> list[list[Values]]:
        """The given calls, or their first rows, and others like them: which ones does the module take?"""
        self.accepted, runs = [], []

        def tried(call: Call) -> bool:
            values = self._run(sites, call)
            if values is None:
                return False
            assert self.accepted is not None
            self.accepted.append(call)
            runs.append(values)
            return True

        for call in self.calls:
            any(tried(each) for each in (fewer_rows(call), call))
        for choices in [v for first in self.accepted[:1] for v in variants(first, self.seed)]:
            any(tried(call) for call in choices)
        return runs

    def _run(self, sites: list[Site], call: Call) -> list[Values] | None:
        try:
            return collect(self.stage, sites, call, self.seed)
        except Exception:  # sizes or values that the model does not take say nothing about the rewrite
            return None
