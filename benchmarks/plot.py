"""Make docs/benchmarks.md and one SVG a device out of the JSON files that benchmarks/models.py wrote."""

from __future__ import annotations

import html
import json
import math
from collections import Counter
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent
RESULTS = ROOT / "benchmarks" / "results"
DOCS = ROOT / "docs"
TITLES = {"cpu": "CPU, float32", "gpu": "GPU, bfloat16"}

# Left to right: name in the plot, colour, and which contender of a case it stands for.
SERIES = (
    ("best torch.compile mode", "#8a8f98"),
    ("best of ONNX Runtime and OpenVINO", "#d19a2a"),
    ("refold.optimize", "#1f6feb"),
)
BAR, GAP, LEFT, TOP, WIDTH = 9, 10, 150, 64, 760


def main() -> None:
    found = {kind: json.loads(path.read_text()) for kind in TITLES if (path := RESULTS / f"{kind}.json").exists()}
    if not found:
        raise SystemExit(f"There is no result in {RESULTS}. Run benchmarks/models.py first.")
    for kind, data in found.items():
        (DOCS / f"benchmarks-{kind}.svg").write_text(draw(TITLES[kind], data))
    (DOCS / "benchmarks.md").write_text(write_page(found))
    print(f"wrote docs/benchmarks.md and {len(found)} plots")


def best(row: dict[str, Any], series: str) -> float | None:
    """The speed-up over eager that a series has in the final of a case: the heats are short."""
    rows = {name: entry for name, entry in row["contenders"].items() if entry["final"]}
    if series == SERIES[0][0]:
        names = [name for name in rows if name.startswith("torch.compile")]
    elif series == SERIES[1][0]:
        names = [name for name in rows if name in ("onnxruntime", "openvino")]
    else:
        names = [name for name in rows if name == "refold"]
    return max((rows[name]["speedup"] for name in names), default=None)


def draw(title: str, data: dict[str, Any]) -> str:
    """Horizontal bars, grouped by case: how many times faster than eager."""
    cases = data["cases"]
    shown = [(name, colour) for name, colour in SERIES if any(best(row, name) for row in cases.values())]
    top = max((best(row, name) or 1 for row in cases.values() for name, _ in shown), default=1)
    scale = (WIDTH - LEFT - 60) / math.ceil(top)
    group = BAR * len(shown) + GAP
    height = TOP + group * len(cases) + 28
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" role="img" '
        f'aria-label="{html.escape(title)}: speed-up over eager" font-family="system-ui, sans-serif" font-size="11">',
        f'<rect width="{WIDTH}" height="{height}" fill="#ffffff"/>',
        f'<text x="12" y="20" font-size="14" font-weight="600">{html.escape(title)}: speed-up over eager</text>',
        *legend(shown),
        *grid(math.ceil(top), scale, height),
    ]
    for index, (case, row) in enumerate(cases.items()):
        parts += bars(case, row, shown, TOP + index * group, scale)
    return "\n".join([*parts, "</svg>"]) + "\n"


def legend(shown: list[tuple[str, str]]) -> list[str]:
    parts = []
    for index, (name, colour) in enumerate(shown):
        x = 12 + index * 235
        parts.append(f'<rect x="{x}" y="33" width="11" height="11" fill="{colour}"/>')
        parts.append(f'<text x="{x + 16}" y="43">{html.escape(name)}</text>')
    return parts


def grid(top: int, scale: float, height: int) -> list[str]:
    parts = []
    for value in range(top + 1):
        x = LEFT + value * scale
        strength = "#9aa0a6" if value == 1 else "#e4e6e9"
        parts.append(f'<line x1="{x:.1f}" y1="{TOP - 8}" x2="{x:.1f}" y2="{height - 20}" stroke="{strength}"/>')
        parts.append(f'<text x="{x:.1f}" y="{height - 6}" text-anchor="middle">{value}×</text>')
    return parts


def bars(case: str, row: dict[str, Any], shown: list[tuple[str, str]], y: float, scale: float) -> list[str]:
    middle = y + BAR * len(shown) / 2 + 4
    parts = [f'<text x="{LEFT - 8}" y="{middle:.1f}" text-anchor="end">{html.escape(case)}</text>']
    for index, (name, colour) in enumerate(shown):
        value = best(row, name)
        if value is None:
            continue
        place = f'x="{LEFT}" y="{y + index * BAR:.1f}" width="{value * scale:.1f}" height="{BAR - 1}"'
        label = f"{html.escape(case)}, {html.escape(name)}: {value:.2f}×"
        parts.append(f'<rect {place} fill="{colour}"><title>{label}</title></rect>')
        x = LEFT + value * scale + 4
        parts.append(f'<text x="{x:.1f}" y="{y + index * BAR + BAR - 1.5:.1f}" font-size="9">{value:.2f}</text>')
    return parts


def write_page(found: dict[str, dict[str, Any]]) -> str:
    parts = [
        "# Benchmarks",
        "",
        "Made by `benchmarks/models.py` and `benchmarks/plot.py`. Models are built from configurations with random",
        "weights. All contenders of a case run in one process and take turns; a number is the median of the ratios of",
        "all rounds. *Error* is the relative error against a float64 run of the eager model, divided by that of",
        "eager itself: 1 is as exact as eager, below 1 is more exact. A dash: it was not in the race of that case, or",
        "could not run (see below the table).",
        "",
    ]
    for kind, data in found.items():
        parts += section(kind, data)
    return "\n".join(parts) + "\n"


def section(kind: str, data: dict[str, Any]) -> list[str]:
    machine = data["machine"]
    versions = ", ".join(f"{name} {version}" for name, version in machine["versions"].items())
    return [
        f"## {TITLES[kind]}",
        "",
        f"{machine['device']}, {machine['threads']} threads of {machine['cores']} cores. {versions}, "
        f"Python {machine['python']}.",
        "",
        f"![Speed-up over eager, {TITLES[kind]}](benchmarks-{kind}.svg)",
        "",
        *means(data["cases"]),
        "",
        *rival_table(data["cases"]),
        "",
        "### All contenders: speed-up over eager (error)",
        "",
        *table(data["cases"]),
        "",
        *failures(data["cases"]),
        "",
    ]


def means(cases: dict[str, Any]) -> list[str]:
    compiled = {case: row["over_best_compile"]["ratio"] for case, row in cases.items() if "over_best_compile" in row}
    # where compiling makes a model slower, a user would leave it: eager is the rival then
    either = [min(ratio, cases[case]["contenders"]["refold"]["speedup"]) for case, ratio in compiled.items()]
    engines = [row["over_best_engine"]["ratio"] for row in cases.values() if "over_best_engine" in row]
    lines = [
        *mean_line("the best torch.compile mode", list(compiled.values())),
        *mean_line("the best of torch.compile and eager", either),
        *mean_line("the best engine", engines),
    ]
    modes = Counter(name for row in cases.values() for name in row["contenders"] if name.startswith("torch.compile"))
    run = [
        name if count == len(cases) else f"{name} ({count} of {len(cases)})" for name, count in sorted(modes.items())
    ]
    return [*lines, f"- The modes of torch.compile in this race: {', '.join(run) or 'none'}.", *earlier_races(cases)]


def earlier_races(cases: dict[str, Any]) -> list[str]:
    """Modes that take minutes to build and were not built again, with how they had done."""
    found: dict[str, list[str]] = {}
    for case, row in cases.items():
        for name, ratio in row.get("earlier", {}).items():
            found.setdefault(name, []).append(f"{case} ({ratio:.2f})")
    return [
        f"- {name} ran only in an earlier race of these cases, and took so many times as long as the best mode then: "
        f"{', '.join(where)}."
        for name, where in found.items()
    ]


def mean_line(rival: str, ratios: list[float]) -> list[str]:
    if not ratios:
        return []
    mean = math.exp(sum(map(math.log, ratios)) / len(ratios))
    return [
        f"- `refold.optimize` over {rival} of each case: geometric mean **{mean:.2f}×** over {len(ratios)} cases, "
        f"lowest {min(ratios):.2f}×, highest {max(ratios):.2f}×."
    ]


def rival_table(cases: dict[str, Any]) -> list[str]:
    rows = [row for row in cases.values() if "over_best_compile" in row]
    if not rows:
        return []
    lines = ["| case | eager ms | refold ms | over best torch.compile | over best engine |", "|---|---|---|---|---|"]
    for case, row in cases.items():
        entries = row["contenders"]
        if "refold" not in entries:
            continue
        eager, mine = (f"{entries[name]['median_s'] * 1e3:.2f}" for name in ("eager", "refold"))
        lines.append(f"| {case} | {eager} | {mine} | {against(row, 'compile')} | {against(row, 'engine')} |")
    return lines


def against(row: dict[str, Any], kind: str) -> str:
    entry = row.get(f"over_best_{kind}")
    if entry is None:
        return "–"
    low, high = entry["interval"]
    between = "too few rounds" if high is None else f"{low:.2f}, {high:.2f}"
    return f"{entry['ratio']:.2f}× [{between}] ({entry['rival']})"


def table(cases: dict[str, Any]) -> list[str]:
    names = list(dict.fromkeys(name for row in cases.values() for name in sorted(row["contenders"])))
    names.sort(key=lambda name: (name != "eager", name == "refold", name))
    lines = [f"| case | {' | '.join(names)} |", "|---" * (len(names) + 1) + "|"]
    for case, row in cases.items():
        cells = [cell(row["contenders"].get(name)) for name in names]
        lines.append(f"| {case} | {' | '.join(cells)} |")
    return lines


def cell(entry: dict[str, Any] | None) -> str:
    if entry is None:
        return "–"
    error = entry["error_over_eager"]
    return f"{entry['speedup']:.2f} ({'wrong' if error is None else f'{error:.2g}'})"


def failures(cases: dict[str, Any]) -> list[str]:
    """Why contenders could not run, each reason once."""
    reasons: dict[tuple[str, str], list[str]] = {}
    for case, row in cases.items():
        for name, reason in row["failed"].items():
            reasons.setdefault((name, reason), []).append(case)
    lines = [f"- {name} on {', '.join(where)}: `{reason}`" for (name, reason), where in reasons.items()]
    return ["Could not run:", "", *lines] if lines else []


if __name__ == "__main__":
    main()
