"""What a verification found: a verdict for every site, an error for every output, and one answer."""

from __future__ import annotations

import html
from dataclasses import asdict, dataclass, field
from typing import Any

GRADES = ("bit-identical", "same error class", "worse")


@dataclass(frozen=True)
class SiteVerdict:
    """One rewritten place: whether it computes the same as before, in float64."""

    site: str
    change: str
    right: bool
    sentence: str
    deviation: float = 0.0
    """The largest difference between both sides, where it comes nearest to its bound (or goes beyond it)."""
    bound: float = 0.0
    """How large a difference float64 rounding can make there."""
    sample: str = ""
    way: str = "run in float64"

    def __str__(self) -> str:
        return f"{'right' if self.right else 'WRONG'}  {self.site} ({self.change}): {self.sentence}"


@dataclass(frozen=True)
class OutputVerdict:
    """One output: root-mean-square errors against a float64 run of the original."""

    name: str
    grade: str
    error: float
    baseline: float
    limit: float
    sentence: str = ""

    def __str__(self) -> str:
        text = f"{self.name}: {self.grade} (error {self.error:.3g}, original {self.baseline:.3g})"
        return f"{text}; {self.sentence}" if self.sentence else text


@dataclass(frozen=True)
class Verification:
    """The answers to two questions: is the rewrite right, and what does it cost in accuracy?"""

    sites: tuple[SiteVerdict, ...] = ()
    outputs: tuple[OutputVerdict, ...] = ()
    problems: tuple[str, ...] = ()
    """What is wrong with the whole: it raises, its output has another structure, its history gives something else."""
    notes: tuple[str, ...] = field(default=())
    """What could not be evaluated, and why; nothing here is blamed on the rewrite."""

    @property
    def right(self) -> bool:
        """Whether every site computes the same as before, and the whole does not fail."""
        return not self.problems and all(site.right for site in self.sites)

    def __bool__(self) -> bool:
        return self.right

    @property
    def grade(self) -> str:
        """The worst grade of all outputs; 'wrong' if the rewrite is not right."""
        if not self.right:
            return "wrong"
        grades = [output.grade for output in self.outputs]
        return max(grades, key=GRADES.index, default="not measured" if self.sites else GRADES[0])

    @property
    def sentence(self) -> str:
        """The whole in one sentence."""
        found = self.sentence_of_sites
        return f"{found}; the outputs are {self.grade}" if self.outputs and self.right else found

    @property
    def sentence_of_sites(self) -> str:
        """What is wrong, or how many places were rewritten."""
        if self.problems:
            return self.problems[0]
        wrong = [site for site in self.sites if not site.right]
        if wrong:
            return f"{len(wrong)} of {len(self.sites)} rewritten sites are wrong: {wrong[0].site}: {wrong[0].sentence}"
        many = f"{len(self.sites)} rewritten site{'s' if len(self.sites) != 1 else ''}"
        return f"{many} right" if self.sites else "nothing was rewritten"

    def __str__(self) -> str:
        head = f"{'right' if self.right else 'WRONG'}, {self.grade}: {self.sentence}"
        lines = [f"  problem: {p}" for p in self.problems] + [f"  {site}" for site in self.sites]
        lines += [f"  {output}" for output in self.outputs] + [f"  note: {note}" for note in self.notes]
        return "\n".join([head, *lines])

    def _repr_html_(self) -> str:
        rows = [("site", s.site, "right" if s.right else "wrong", s.sentence) for s in self.sites]
        rows += [("output", o.name, o.grade, f"error {o.error:.3g}, original {o.baseline:.3g}") for o in self.outputs]
        rows += [("problem", "", "wrong", p) for p in self.problems] + [("note", "", "", n) for n in self.notes]
        body = "".join("<tr>" + "".join(f"<td>{html.escape(cell)}</td>" for cell in row) + "</tr>" for row in rows)
        return f"<table><caption>{html.escape(self.sentence)}</caption>{body}</table>"

    def to_dict(self) -> dict[str, Any]:
        """Plain data for JSON."""
        return {"right": self.right, "grade": self.grade, "sentence": self.sentence, **asdict(self)}

    def joined(self, other: Verification) -> Verification:
        """Both together."""
        return Verification(
            (*self.sites, *other.sites),
            (*self.outputs, *other.outputs),
            (*self.problems, *other.problems),
            (*self.notes, *other.notes),
        )
