"""The page about what was measured: each benchmark with its own first line, and tables of the results there are."""

from __future__ import annotations

import ast
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from generated_text import table, write

BENCHMARKS = Path(__file__).parent.parent / "benchmarks"


def write_measured_page(path: Path) -> None:
    """Write the text that the page about measurements includes."""
    sections = [section(name, tell) for name, tell in SECTIONS.items()]
    write(path, "\n\n".join([scripts(), *filter(None, sections), pages(path.parent.parent)]) + "\n")


def scripts() -> str:
    """Every script in benchmarks/ that can be run, with the first line of its docstring."""
    rows = []
    for script in sorted(BENCHMARKS.glob("*.py")):
        text = script.read_text(encoding="utf-8")
        if "__main__" in text:
            about = (ast.get_docstring(ast.parse(text)) or "").splitlines()[0]
            rows.append((f"`benchmarks/{script.name}`", about))
    return table(("script", "what it does"), rows)


def pages(folder: Path) -> str:
    """Links to the pages that the scripts wrote themselves, as far as they are there."""
    names = [name for name in ("benchmarks", "zoo") if (folder / f"{name}.md").exists()]
    missing = "The tables of models and of the zoo are made by `benchmarks/models.py` and `benchmarks/zoo.py`."
    return "\n".join(["```{toctree}", *names, "```"]) if names else missing


def section(name: str, tell: Callable[[Any], Iterator[str]]) -> str:
    """What one result file says; nothing where there is none, or where it has another shape."""
    file = BENCHMARKS / "results" / f"{name}.json"
    if not file.exists():
        return ""
    try:
        return "\n\n".join(tell(json.loads(file.read_text(encoding="utf-8"))))
    except (KeyError, TypeError, AttributeError):
        return ""


def weights(found: dict[str, Any]) -> Iterator[str]:
    """LoRA rounds, corrections and loading, from benchmarks/weights.py."""
    facts = ", ".join(f"{name} {value}" for name, value in found["machine"].items())
    yield "## Weights"
    yield f"From `benchmarks/weights.py` ({facts})."
    yield "Merging and unmerging a LoRA adapter again and again; weights that came back with other bits:"
    rows = [
        (
            dtype,
            str(r["rounds"]),
            *(f"{r[f'{who}_weights_changed']:,} of {r['weights']:,}" for who in ("refold", "peft")),
        )
        for dtype, r in found["lora"].items()
    ]
    yield table(("dtype", "rounds", "Refold", f"PEFT {next(iter(found['lora'].values()))['peft_version']}"), rows)
    yield "Folding and unfolding all batch norms of a ResNet-50:"
    rows = [(dtype, *shares(r), str(r["tensors_that_differ_after_undo"])) for dtype, r in found["resnet50"].items()]
    yield table(("dtype", "folded weights", "corrections", "all that is held", "tensors that differ after undo"), rows)
    yield "The most extra memory of doing that, of three rounds, counted at every malloc and free:"
    peaks = [(dtype, *megabytes(r)) for dtype, r in found["resnet50"].items()]
    yield table(("dtype", "folding", "unfolding", "the largest layer and the corrections"), peaks)
    load = found["bert_base_load"]
    yield (
        f"Loading an original checkpoint into a folded BERT-base takes {load['ratio']:.2f} times as long as "
        f"`load_state_dict` of the plain model, the very first time {load['first_load_ratio']:.2f} times."
    )


def megabytes(row: dict[str, Any]) -> tuple[str, ...]:
    """Peaks and their limit."""
    values = (*row["peak_extra_bytes"].values(), row["peak_limit_bytes"])
    return tuple(f"{value / 1e6:.2f} MB" for value in values)


def shares(row: dict[str, Any]) -> tuple[str, str, str]:
    """The folded weights, and what is held to restore them as a share of that."""
    return f"{row['folded_bytes'] / 1e6:.1f} MB", f"{row['corrections_share']:.1%}", f"{row['held_share']:.1%}"


def faults(found: dict[str, Any]) -> Iterator[str]:
    """Injected faults, from benchmarks/faults.py."""
    rows = [(name, f"{entry['lines tried']:,}", str(len(entry["damaged"]))) for name, entry in found.items()]
    yield "## Faults"
    yield (
        "From `benchmarks/faults.py`: every executed line of every rewrite was made to fail, on the way there and "
        "back, with an exception and with Ctrl-C."
    )
    yield table(("rewrite", "faults injected", "that left a trace"), rows)


def verification(found: dict[str, Any]) -> Iterator[str]:
    """Both error rates of the verification, from benchmarks/verify.py."""
    summary = found["summary"]
    names = {"verify": "`refold.verify`", "end_to_end": "whole model in float64", "allclose": "`torch.allclose`"}
    rows = [(name, f"{summary['false_alarms'][key]:,}", f"{summary['missed'][key]:,}") for key, name in names.items()]
    alarms, misses = f"{summary['right_rewrites']:,} right rewrites", f"{summary['planted_defects']:,} planted defects"
    yield "## Verification"
    yield (
        f"From `benchmarks/verify.py`: rewrites in three dtypes, right ones and ones with a planted mistake of one of "
        f"{summary['kinds_of_defects']} kinds."
    )
    yield table(("method", f"alarms on {alarms}", f"missed of {misses}"), rows)
    if "mended_since" in summary:
        yield f"Mended since: {summary['mended_since']}."


def core(found: dict[str, Any]) -> Iterator[str]:
    """Cost per node, cost of recording and memory, from benchmarks/core.py; as far as it ran."""
    facts = ", ".join(f"{name} {value}" for name, value in found["machine"].items())
    yield "## The core"
    yield f"From `benchmarks/core.py` ({facts})."
    if "linear" in found:
        yield "Transforming and reversing graphs of 1,000 and of 20,000 nodes:"
        yield named_rows("transformation", found["linear"])
    if "recording" in found:
        yield "What recording adds to the edit itself:"
        yield named_rows("transformation", found["recording"])
    if "memory" in found:
        yield "Merging linears, in bytes:"
        yield table(("what", "bytes"), [(name, f"{value:,}") for name, value in found["memory"].items()])


def less_work(found: dict[str, Any]) -> Iterator[str]:
    """Work left out against the best of all rivals, from benchmarks/less_work.py; as far as it ran."""
    machine = found["machine"]
    on_gpu = any("back_to_back" in row for row in found["rows"].values())
    versions = ", ".join(f"{name} {machine['versions'][name]}" for name in ("torch", "transformers"))
    yield "## Less work, on a GPU" if on_gpu else "## Less work"
    yield (
        f"From `benchmarks/less_work.py` ({machine['device']}, {versions}"
        + (", bfloat16). " if on_gpu else f", {next(iter(found['rows'].values()))['threads']} threads). ")
        + "Models marked with * were held out: nothing was tried on them while the rewrites were written. Rivals: "
        + ", ".join(
            dict.fromkeys(name for row in found["rows"].values() for name in row["contenders"] if name != "refold")
        )
        + f". {found.get('note', '')}".rstrip()
    )
    rows = [less_work_row(name, row, on_gpu) for name, row in found["rows"].items()]
    single = "over the best, a call waited for" if on_gpu else "over the best rival"
    head = (
        "work",
        "real tokens",
        single,
        "the best rival",
        "over eager",
        *(["over the best, back to back"] if on_gpu else []),
    )
    yield table(head, rows)


def less_work_row(name: str, row: dict[str, Any], on_gpu: bool) -> tuple[str, ...]:
    """One model on one kind of batches."""
    best, eager = row["over_best"]["of all"], row["over_best"]["eager"]
    low, high = best["interval"]
    mark = "*" if row["held_out"] else ""
    ratio = f"{best['ratio']:.2f}× [{low:.2f}, {high:.2f}]"
    cells = (name + mark, f"{row['real_tokens']:.0%}", ratio, best["rival"], f"{eager['ratio']:.2f}×")
    return (*cells, f"{row['back_to_back']['over_best']:.2f}×") if on_gpu else cells


def mixed_sizes(found: dict[str, Any]) -> Iterator[str]:
    """Batches of mixed sizes in one process, from benchmarks/mixed_sizes.py; as far as it ran."""
    machine = found["machine"]
    yield f"## Mixed sizes ({machine['device']})"
    yield (
        f"From `benchmarks/mixed_sizes.py` (torch {machine['versions']['torch']}): batches of 1 to 16 rows of up to 8 "
        "to 256 tokens, padded, or full. Every way takes any size; seconds for all batches."
    )
    rows = []
    for name, row in found["rows"].items():
        best = row["over_best"]["of all"]
        seconds = ", ".join(f"{way} {timing['median_s']:.3g}" for way, timing in row["contenders"].items())
        rows.append((name + ("*" if row["held_out"] else ""), seconds, f"{best['ratio']:.2f}×", best["rival"]))
    yield table(("model", "seconds", "over the best rival", "which is"), rows)


def scale(found: dict[str, Any]) -> Iterator[str]:
    """Plans without weights and checkpoints as a stream, from benchmarks/scale.py; as far as it ran."""
    machine = found["machine"]
    versions = ", ".join(f"{name} {value}" for name, value in machine["versions"].items() if name == "torch")
    yield "## Beyond one machine"
    yield f"From `benchmarks/scale.py` ({machine['device']}, {machine['cores']} cores, {versions})."
    if "plan" in found:
        yield (
            "A Llama of the shape of 70 B captured on the meta device, with the plan of `MergeLinears` (one thread; "
            "where others use the machine, the processor's own seconds say what the work costs):"
        )
        rows = [
            (
                *(
                    str(row["layers"]),
                    f"{row['parameters'] / 1e9:.1f} B",
                    f"{row['seconds']:.1f}",
                    f"{row['cpu_seconds']:.1f}",
                ),
                *(f"{row['cpu_seconds'] / row['layers']:.3f}", f"{row['megabytes']:.0f} MB"),
            )
            for row in found["plan"]["rows"]
        ]
        yield table(
            ("layers", "parameters", "seconds", "of the processor", "of the processor, a layer", "peak memory"), rows
        )
    if "convert" in found:
        yield conversion(found["convert"])
    if "kills" in found:
        kills = found["kills"]
        yield (
            f"Killed (`kill -9`) at random moments of a conversion and started again: {kills['identical']} of "
            f"{kills['times']} results are identical to one that was not killed."
        )


def conversion(found: dict[str, Any]) -> str:
    """A checkpoint converted and back, beside cp."""
    rows = [
        (
            *(f"{row[name]:.1f}" for name in ("cp", "there", "back")),
            f"{row['load']:.0f}" if "load" in row else "not noted",
        )
        for row in found["rounds"]
    ]
    head = ("`cp -r`, seconds", "`--to vllm`", "`--to hf`", "processes that wanted the cores")
    same = "the very files come back" if found["same_files"] else "the files differ"
    return (
        f"{found['bytes'] / 1e9:.1f} GB of shards copied, converted and converted back in turn, each until all is on "
        f"the disk; {same}, and the peak memory is {found['peak_megabytes']:.0f} MB (bound: "
        f"{found['peak_bound_megabytes']:.0f} MB). "
        f"A conversion reads, hashes both sides and writes, so it needs processors where `cp` waits for the disk:\n\n"
        + table(head, rows)
    )


def named_rows(name: str, rows: dict[str, dict[str, Any]]) -> str:
    """A table with one row for each entry, and its own keys as columns."""
    head = (name, *next(iter(rows.values())))
    return table(head, [(key, *(str(value) for value in row.values())) for key, row in rows.items()])


SECTIONS: dict[str, Callable[[Any], Iterator[str]]] = {
    "less_work_cpu": less_work,
    "less_work_gpu": less_work,
    "mixed_sizes_cpu": mixed_sizes,
    "mixed_sizes_gpu": mixed_sizes,
    "core": core,
    "verify": verification,
    "weights": weights,
    "faults": faults,
    "scale": scale,
}
