"""The commands on a saved folder: `refold show`, `refold undo`, `refold verify` and `refold bisect`."""

from __future__ import annotations

import bisect
import os
import subprocess
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from rich.console import RenderableType
from rich.text import Text
from torch.fx import GraphModule

from refold.command_line.console import Console, printable, progress
from refold.command_line.execution import ExitCode
from refold.command_line.loaded_model import use_threads
from refold.command_line.options import FolderOptions
from refold.command_line.saved_folder import (
    Opened,
    check_place,
    described_changes,
    differing,
    open_folder,
    read_about,
    write_folder,
)
from refold.errors import CheckFailed, WrongInput
from refold.record.copies import working_copy
from refold.record.reversal import undo
from refold.record.stack import history
from refold.saving import save
from refold.verification.verdicts import Verification
from refold.verification.verifier import verify
from refold.wording import counted

VARIABLE = "REFOLD_FOLDER"
_LAST_BAD = 124
_MOST_LINES = 12
_STYLES = {"+": "green", "-": "red", "~": "yellow"}


# --- show ----------------------------------------------------------------------------------------------------------


def show_folder(console: Console, folder: Path, said: FolderOptions, everything: bool) -> None:
    """Show the changes. A folder of `refold optimize` lists them; one that `refold.save` wrote, and any for which a
    model is named, is loaded."""
    about = read_about(folder)
    if about is None or said.model is not None:
        changes = described_changes(open_folder(folder, said).graph_module)
    else:
        changes = about.changes
    most = None if everything else _MOST_LINES
    parts: list[RenderableType | str] = []
    for number, change in enumerate(changes, 1):
        parts += _lines(number, change, most)
    held = sum(change["bytes"] for change in changes)
    total = f"{counted(len(changes), 'change')}; {held:,} bytes are held so that it can all be undone."
    data, head = {"folder": str(folder), "changes": changes, "bytes_held": held}, str(folder)
    if about is not None:
        data |= {"model": about.source.to_plain(), "run": about.run}
        head = f"{folder}: {about.source.kind} {about.source.name}, {about.dtype}"
    console.show(data, head, *parts, total if changes else "Nothing is changed: this is the original.")


def _lines(number: int, change: dict[str, Any], most: int | None) -> list[RenderableType | str]:
    parts: list[RenderableType | str] = [Text(printable(f"{number}. {change['label']}"), style="bold")]
    lines = change["lines"]
    for line in lines[:most]:
        parts.append(Text(printable(f"   {line}"), style=_STYLES.get(line[:1], "dim")))
    if most is not None and len(lines) > most:
        parts.append(Text(f"   … and {len(lines) - most} more lines (--all shows them)", style="dim"))
    return parts


# --- undo ----------------------------------------------------------------------------------------------------------


def undo_folder(
    console: Console, folder: Path, said: FolderOptions, out: Path | None, changes: int | None, overwrite: bool
) -> ExitCode:
    """Undo the latest changes (all of them, where no number is given) and write the folder again, or another one."""
    place = folder if out is None else out
    if out is not None:
        check_place(out, overwrite)
    opened = open_folder(folder, said)
    gm = opened.graph_module
    before = len(history(gm))
    if not before:
        raise WrongInput(f"{folder} holds the original already: there is nothing to undo.")
    if changes is not None and changes > before:
        raise WrongInput(f"{counted(changes, 'change')} cannot be undone: {folder} holds {before}.")
    labels = [change.label for change in history(gm)][-(changes or before) :]
    undo(gm, changes)
    different, compared = _compared(opened)
    if not different:
        _write_undone(opened, place, overwrite or out is None)
    left = len(history(gm))
    data = {"folder": str(place), "undone": labels[::-1], "left": left, "compared": compared, "different": different}
    console.show(
        data, *(f"undone: {label}" for label in labels[::-1]), _undo_sentence(place, left, compared, different)
    )
    return ExitCode.NO if different else ExitCode.DONE


def _compared(opened: Opened) -> tuple[list[str], int]:
    """Weights that differ from the original's, where everything was undone and the original's bits are known."""
    if opened.about is None or history(opened.graph_module):
        return [], 0
    return differing(opened.graph_module, opened.about.original)


def _write_undone(opened: Opened, place: Path, overwrite: bool) -> None:
    """The report is left behind: it speaks of rewrites that this model does not have."""
    if opened.about is not None:
        run = {key: value for key, value in opened.about.run.items() if key != "report"}
        opened.about.run = run | {"undone": True}
    _write(opened, opened.graph_module, place, overwrite)


def _write(opened: Opened, gm: GraphModule, place: Path, overwrite: bool) -> None:
    if opened.about is None:
        save(gm, place)
    else:
        write_folder(place, gm, opened.about, opened.inputs, overwrite=overwrite)


def _undo_sentence(place: Path, left: int, compared: int, different: list[str]) -> str:
    if different:
        names = ", ".join(different[:5])
        return f"{len(different)} of {compared} tensors are not what they were ({names}); {place} was not written."
    if left:
        return f"{place} holds the model with {counted(left, 'change')} left."
    checked = f"all {compared} tensors are bit for bit what they were" if compared else "every change is undone"
    return f"{place} holds the original: {checked}."


# --- verify --------------------------------------------------------------------------------------------------------


def verify_folder(
    console: Console, folder: Path, said: FolderOptions, threads: int | None, everything: bool
) -> ExitCode:
    """Show whether every rewrite is right, and what the outputs cost in accuracy."""
    use_threads(threads)
    with progress(console) as report:
        report(f"loading {folder}", 0.0)
        opened = open_folder(folder, said)
        if opened.inputs is None:
            raise WrongInput(f"{folder} does not hold its inputs. Give them: --inputs FILE.py:FUNCTION.")
        report("verifying in float64", 0.3)
        found = verify(opened.graph_module, opened.inputs)
    sentence = f"{'Right' if found.right else 'WRONG'}: {found.sentence}"
    console.show({"folder": str(folder)} | found.to_dict(), *_verdict_lines(found, everything), sentence)
    return ExitCode.DONE if found.right else ExitCode.NO


def _verdict_lines(found: Verification, everything: bool) -> list[str]:
    """A line for each rewritten place, wrong ones first, and for each output; only a few right ones, if not all."""
    right = [str(site) for site in found.sites if site.right]
    lines = [str(site) for site in found.sites if not site.right] + (right if everything else right[:_MOST_LINES])
    if len(lines) < len(found.sites):
        lines.append(f"right  {len(found.sites) - len(lines)} more places (--all shows them)")
    lines += ["", *map(str, found.outputs)]
    return lines + [f"problem: {problem}" for problem in found.problems] + [f"note: {note}" for note in found.notes]


# --- bisect --------------------------------------------------------------------------------------------------------


def bisect_folder(console: Console, folder: Path, command: str, said: FolderOptions) -> ExitCode:
    """Search for the first change with which the check fails."""
    if not command.strip():
        raise WrongInput("--check is empty: it must be the command that says whether a candidate is good.")
    opened = open_folder(folder, said)
    changes = history(opened.graph_module)
    labels = [change.label for change in changes]

    def good(kept: int) -> bool:
        passed = _check(opened, kept, command)
        console.tell(f"with the first {kept} of {len(labels)} changes: {'good' if passed else 'bad'}")
        return passed

    if good(len(labels)):
        console.show({"culprit": None}, f"The check passes on {folder} as it is: there is nothing to find.")
        return ExitCode.DONE
    if not labels or not good(0):
        raise CheckFailed("The check fails with every change undone as well, so no rewrite is the cause.")
    number = first_bad(len(labels), good)
    lines = changes[number - 1].describe()
    data = {"culprit": labels[number - 1], "number": number, "of": len(labels), "lines": lines}
    head = f"Change {number} of {len(labels)} breaks the check: {labels[number - 1]}"
    way_out = f"Undo down to it: refold undo {folder} --changes {len(labels) - number + 1} --out DIR"
    console.show(data, head, *(f"   {line}" for line in lines[:_MOST_LINES]), way_out)
    return ExitCode.NO


def first_bad(count: int, good: Callable[[int], bool]) -> int:
    """The smallest number of changes with which it is bad; none is known to be good, and all are known to be bad."""
    return 1 + bisect.bisect_left(range(1, count), True, key=lambda number: not good(number))


def _check(opened: Opened, kept: int, command: str) -> bool:
    """Run the check on a candidate that has only the first changes."""
    gm = working_copy(opened.graph_module)
    surplus = len(history(gm)) - kept
    if surplus:
        undo(gm, surplus)
    with tempfile.TemporaryDirectory(prefix="refold-bisect-") as home:
        place = Path(home) / "candidate"
        _write(opened, gm, place, overwrite=False)
        return _passes(command, place)


def _passes(command: str, place: Path) -> bool:
    """The user's command is run by the shell, as the user would; what it prints goes to stderr."""
    done = subprocess.run(
        command.replace("{}", str(place)), shell=True, env=os.environ | {VARIABLE: str(place)}, stdout=2, check=False
    )
    if done.returncode == 0:
        return True
    if 0 < done.returncode <= _LAST_BAD:
        return False
    raise CheckFailed(
        f"The check ended with {done.returncode}, which is neither good (0) nor bad (1 to {_LAST_BAD}): "
        f"it could not be run, or it was killed."
    )
