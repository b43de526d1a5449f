"""`refold convert`: the safetensors files of a folder in another layout, and back again."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from refold.command_line.console import Console, progress
from refold.conversion import Conversion, Plan, convert, read_plan
from refold.conversion.job_run import Advance
from refold.errors import WrongInput
from refold.wording import counted

_MOST_NAMES = 12
_SECONDS_A_LINE = 5.0


@dataclass(frozen=True)
class ConvertOptions:
    """Where to convert to, and how."""

    to: str | None
    origin: str | None
    plan: Path | None
    pipeline: Path | None
    original: bool
    verify: bool
    jobs: int


def convert_folder(console: Console, source: Path, out: Path, how: ConvertOptions, everything: bool) -> None:
    """Convert, and show what became of which tensors."""
    if sum([how.to is not None, how.plan is not None, how.pipeline is not None, how.original]) != 1:
        raise WrongInput("Say where to convert to in one way: --to, --pipeline, --plan or --original.")
    plan = _given_plan(source, how)
    with _advance(console) as advance:
        done = convert(
            source,
            out,
            to=how.to,
            origin=how.origin,
            plan=plan,
            original=how.original,
            verify=how.verify,
            jobs=how.jobs,
            advance=advance,
        )
    if done.ranks.leads:
        console.show(_plain(done, source, out), *_lines(done, out, None if everything else _MOST_NAMES))


def _given_plan(source: Path, how: ConvertOptions) -> Plan | None:
    if how.pipeline is None:
        return None if how.plan is None else read_plan(how.plan)
    from refold.command_line.checkpoint_plan import plan_of_pipeline

    return plan_of_pipeline(source, how.pipeline)


def _plain(done: Conversion, source: Path, out: Path) -> dict[str, Any]:
    return {
        "source": str(source),
        "folder": str(out),
        "from": done.origin,
        "to": done.to,
        "plan": done.plan.to_plain(),
        "passed": list(done.passed),
        "incomplete": done.incomplete,
        "left_out": list(done.left_out),
        "bytes": done.bytes_written,
        "largest_group": done.largest_group,
        "checksums": {"source": done.checksums.source, "result": done.checksums.result},
        "was_there": done.was_there,
        "verified": done.verified,
        "same_as_original": done.same_as_original,
    }


def _lines(done: Conversion, out: Path, most: int | None) -> Iterator[str]:
    yield f"{'Taken back' if done.back else 'Done'}, {done.origin} to {done.to}:"
    yield str(done.plan)
    passed = [name for name in done.passed if name not in done.incomplete]
    yield from _named("as they are, because no row explains them", passed, most)
    yield from _named("as they are", [f"{name} ({why})" for name, why in done.incomplete.items()], most)
    yield from _named("left out", list(done.left_out), most)
    if done.same_as_original is not None:
        yield (
            "Every file of the original is there again, byte for byte."
            if done.same_as_original
            else "The tensors are not those of the original: they were changed since."
        )
    if done.was_there:
        yield f"{out} was there already, and every file of it and of the source has the checksum that it notes."
    elif done.verified:
        yield "Verified: taken back from what was written, every tensor has the bits of the source."
    yield f"{done.bytes_written:,} bytes in {out}."


def _named(what: str, names: list[str], most: int | None) -> Iterator[str]:
    if names:
        shown = names[:most]
        more = f" and {len(names) - len(shown)} more (--all shows them)" if len(names) > len(shown) else ""
        yield f"{counted(len(names), 'name')} {what}: {', '.join(shown)}{more}"


@contextmanager
def _advance(console: Console) -> Iterator[Advance]:
    """Bytes and time left: a bar on a terminal, else a line every few seconds."""
    with progress(console) as show:
        yield _telling(show, 0.1 if console.err.is_terminal else _SECONDS_A_LINE)


def _telling(show: Callable[[str, float], None], interval: float) -> Advance:
    start = last = time.monotonic()
    first: int | None = None

    def advance(done: int, total: int) -> None:
        nonlocal last, first
        now = time.monotonic()
        first = done if first is None else first
        if now - last < interval and done < total:
            return
        last = now
        speed = (done - first) / max(now - start, 1e-9)
        left = f", {(total - done) / speed:.0f} s left" if speed else ""
        show(f"{done / 1e9:.1f} of {total / 1e9:.1f} GB{left}", done / max(total, 1))

    return advance
