"""`refold bisect`: find the change that breaks a user's own check, by undoing halves."""

from __future__ import annotations

import os
import subprocess
import tempfile
from collections.abc import Callable
from pathlib import Path

from torch.fx import GraphModule

from refold.command_line.errors import ExitCode, WrongInput
from refold.command_line.folders import About, Named, Opened, fill_folder, finish_folder, open_folder
from refold.command_line.screen import Screen
from refold.errors import RefoldError
from refold.history import history, undo
from refold.saving import save
from refold.verifying.stages import working_copy

VARIABLE = "REFOLD_FOLDER"
_LAST_BAD = 124


class CheckFailed(RefoldError):
    """The user's check gives no answer that can be used."""


def bisect_folder(screen: Screen, folder: Path, command: str, named: Named) -> ExitCode:
    """Search for the first change with which the check fails."""
    if not command.strip():
        raise WrongInput("--check is empty: it must be the command that says whether a candidate is good.")
    opened = open_folder(folder, named)
    changes = history(opened.graph_module)
    labels = [change.label for change in changes]

    def good(kept: int) -> bool:
        passed = _check(opened, kept, command)
        screen.tell(f"with the first {kept} of {len(labels)} changes: {'good' if passed else 'bad'}")
        return passed

    if good(len(labels)):
        screen.show({"culprit": None}, f"The check passes on {folder} as it is: there is nothing to find.")
        return ExitCode.DONE
    if not labels or not good(0):
        raise CheckFailed("The check fails with every change undone as well, so no rewrite is the cause.")
    number = first_bad(len(labels), good)
    lines = changes[number - 1].describe()
    data = {"culprit": labels[number - 1], "number": number, "of": len(labels), "lines": lines}
    head = f"Change {number} of {len(labels)} breaks the check: {labels[number - 1]}"
    way_out = f"Undo down to it: refold undo {folder} --changes {len(labels) - number + 1} --out DIR"
    screen.show(data, head, *(f"   {line}" for line in lines[:12]), way_out)
    return ExitCode.NO


def first_bad(count: int, good: Callable[[int], bool]) -> int:
    """The smallest number of changes with which it is bad; none is known to be good, and all are known to be bad."""
    low, high = 0, count
    while high - low > 1:
        middle = (low + high) // 2
        if good(middle):
            low = middle
        else:
            high = middle
    return high


def _check(opened: Opened, kept: int, command: str) -> bool:
    """Run the check on a candidate that has only the first changes."""
    gm = working_copy(opened.graph_module)
    surplus = len(history(gm)) - kept
    if surplus:
        undo(gm, surplus)
    with tempfile.TemporaryDirectory(prefix="refold-bisect-") as home:
        place = Path(home) / "candidate"
        _write(opened, gm, place)
        return _passes(command, place)


def _write(opened: Opened, gm: GraphModule, place: Path) -> None:
    if opened.about is None:
        save(gm, place)
        return
    about = About(**vars(opened.about))
    fill_folder(place, gm, about, opened.inputs)
    finish_folder(place, about)


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
