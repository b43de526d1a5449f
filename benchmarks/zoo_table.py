"""docs/zoo.md: the shares, then families by steps with the reason for every failure."""

from __future__ import annotations

import platform
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import torch

STEPS = ("eager", "captured", "raised", "other batch", "rewritten", "verified", "undone")
Results = Mapping[str, Mapping[str, Any]]


def table(results: Results, timm_results: Results, optimized: Results, families: Sequence[str]) -> str:
    """The whole page."""
    import transformers

    tried, stopped, results = len(results), _stopped(results), _finished(results)
    lines = [
        "# The zoo",
        "",
        f"Written by `benchmarks/zoo.py --table`. transformers {transformers.__version__}, torch {torch.__version__}, "
        f"{platform.machine()}, tiny random-weight models built from their configurations: by rules that hold for all, "
        "and by entries in `benchmarks/zoo_recipes.py` where no rule can know what a family wants. Multimodal families "
        "are called with what their row says; where that is text alone, their vision tower was built but not run (many "
        "towers have rows of their own).",
        "",
        *_progress(tried, stopped, families),
        *_shares(results),
        *_optimized(optimized),
        "## Families that run eagerly",
        "",
        *_rows(results),
        "",
        "## Families that could not be built or run here",
        "",
        "| family | reason |",
        "|---|---|",
    ]
    lines += [f"| {n} | {_cell(r.get('why', ''))} |" for n, r in sorted(results.items()) if r["eager"] != "yes"]
    if timm_results:
        timm_results = _finished(timm_results)
        lines += ["", "## timm", "", "A spread of timm's models with random weights (`benchmarks/zoo.py --timm`).", ""]
        lines += [*_shares(timm_results), *_rows(timm_results), *_failed_to_run(timm_results)]
    return "\n".join(lines) + "\n"


def _optimized(results: Results) -> list[str]:
    """What became of the families in `refold.optimize`, with every one that is not as it should be."""
    ran = {n: r for n, r in _finished(results).items() if r["eager"] == "yes" and ("error" in r or "refused" in r)}
    if not ran:
        return []
    captured = {n: r for n, r in ran.items() if r.get("captured")}
    errors = [r["error"] for r in captured.values() if not isinstance(r["error"], str)]
    wrong = sorted(n for n, r in ran.items() if r.get("wrong") or isinstance(r.get("error"), str))
    sentences = [
        f"`benchmarks/zoo_optimize.py`: {len(ran)} families went through `refold.optimize` with the",
        "caches of decoders on; all rewrites that verify are kept, and the plain graph runs.",
        f"{len(captured)} were captured whole, {sum(r['kept'] > 0 for r in captured.values())} of them rewritten.",
        f"{errors.count(0)} give every output bit for bit; the largest relative difference of the others is",
        f"{max(errors, default=0):.1e} (float32).",
        f"A rewrite did not verify, or a result has another structure, in {', '.join(wrong) or 'none'}.",
        f"A call with one more row gave what the model gives in {_how_many(ran, 'other batch', 0)}, and after",
        f"`.restore()` the model was the same, bit for bit, in {_how_many(ran, 'restored', True)}.",
        f"Run as they are, with the reason in the report: {', '.join(sorted(set(ran) - set(captured))) or 'none'}.",
    ]
    return ["## Optimized", "", " ".join(sentences), ""]


def _how_many(results: Results, key: str, value: Any) -> str:
    known = [r[key] for r in results.values() if r.get(key) is not None]
    return f"{known.count(value)} of {len(known)}"


def _failed_to_run(results: Results) -> list[str]:
    failed = [f"| {n} | {_cell(r.get('why', ''))} |" for n, r in sorted(results.items()) if r["eager"] != "yes"]
    return ["", "| not run | reason |", "|---|---|", *failed] if failed else []


def _stopped(results: Results) -> dict[str, str]:
    """Families that took longer than the processor time they were given: nothing is known about them yet."""
    return {n: str(r["why"]) for n, r in results.items() if "stopped by SIGXCPU" in str(r.get("why"))}


def _finished(results: Results) -> Results:
    stopped = _stopped(results)
    return {n: r for n, r in results.items() if n not in stopped}


def _progress(tried: int, stopped: Mapping[str, str], families: Sequence[str]) -> list[str]:
    missing = len(families) - tried
    words = f"All {tried} families were tried." if missing <= 0 else ""
    if missing > 0:
        words = f"**{tried} families were tried so far; {missing} are still to come**, drawn at random. "
        words += "`benchmarks/zoo.py` goes on where it stopped."
    if stopped:
        words += f" {len(stopped)} took longer than the processor time they were given and are counted neither way: "
        words += ", ".join(f"{name} ({_limit(why)})" for name, why in sorted(stopped.items())) + "."
    return [words, ""]


def _limit(why: str) -> str:
    found = re.search(r"limits: (\d+ s)", why)
    return found[1] if found else why


def _shares(results: Results) -> list[str]:
    eager = {n: r for n, r in results.items() if r["eager"] == "yes"}
    captured = {n: r for n, r in eager.items() if r.get("captured") == "yes"}
    partial = {n: r for n, r in eager.items() if r.get("partial") == "yes"}
    rewritten = {n: r for n, r in captured.items() if "rewritten" in r}

    def those(step: str, of: Results = captured) -> Results:
        return {n: r for n, r in of.items() if r.get(step) == "yes"}

    methods = Counter(r["method"] for r in captured.values())
    return [
        "| step | models | share |",
        "|---|---|---|",
        _share("run eagerly, of those tried", eager, results),
        _share("captured whole", captured, eager),
        _share("captured whole or in part", {**captured, **partial}, eager),
        _share("raised completely, of those captured whole", those("raised"), captured),
        _share("equal to eager at another batch size, of those captured whole", those("other batch"), captured),
        _share(
            "rewritten by at least one of the five classic transformations",
            {n: r for n, r in rewritten.items() if r.get("changes")},
            rewritten,
        ),
        _share("verified after rewriting", those("verified", rewritten), rewritten),
        _share("undone bit for bit", those("undone", rewritten), rewritten),
        "",
        "Captured by: " + ", ".join(f"{name} {count}" for name, count in methods.most_common()) + ".",
        "",
        _cost(captured),
        "",
    ]


def _share(what: str, some: Results, of: Results) -> str:
    return f"| {what} | {len(some)} of {len(of)} | {100 * len(some) / max(len(of), 1):.1f} % |"


def _cost(captured: Results) -> str:
    shares = sorted(
        r["seconds"]["raise"] / r["seconds"]["export"] for r in captured.values() if r["seconds"].get("export")
    )
    if not shares:
        return ""
    middle, most = shares[len(shares) // 2], shares[-1]
    over = sum(share > 0.1 for share in shares)
    return (
        f"Raising costs {100 * middle:.1f} % of the export at the median, {100 * most:.1f} % at most "
        f"({over} of {len(shares)} above 10 %)."
    )


def _rows(results: Results) -> list[str]:
    eager = {n: r for n, r in results.items() if r["eager"] == "yes"}
    head = ["| family | inputs | " + " | ".join(STEPS[1:]) + " | remarks |", "|---|---|" + "---|" * len(STEPS)]
    return head + [_row(name, result) for name, result in sorted(eager.items())]


def _row(name: str, result: Mapping[str, Any]) -> str:
    marks = [{"yes": "yes", "no": "**no**"}.get(str(result.get(step)), "") for step in STEPS[1:]]
    if result.get("captured") == "no" and result.get("partial") == "yes":
        marks[0] = "in part"
    inputs = ", ".join(result.get("inputs", ()))
    return f"| {name} | {inputs} | " + " | ".join(marks) + f" | {_cell(_remark(result))} |"


def _remark(result: Mapping[str, Any]) -> str:
    words = [result["why"]] if "why" in result else []
    words += [f"not raised: {r}" for r in result.get("refused", [])[:2]]
    notes = result.get("notes", [])
    about_values = [n for n in notes if "fixed to its values" in n or "loop" in n]
    words += about_values
    if result.get("other batch") == "no" and not about_values:
        words += [n for n in notes if "shape[0]" in n][:1] or ["the batch size is fixed by the model"]
    if "transformers.exporters" in str(result.get("method")):
        words.append(f"by {result['method']}")
    if "why verify" in result:
        words.append(result["why verify"])
    return "; ".join(words)


def _cell(text: str) -> str:
    text = re.sub(r"/\S*/site-packages/", "", text)
    text = text.replace("|", "/").replace("\n", " ").replace("<", "&lt;")
    text = re.sub(r"([*_`\[\]])", r"\\\1", text)
    return text[:300].rstrip("\\")
