"""`refold undo`: take rewrites of a saved model back, and check that every bit is what it was."""

from __future__ import annotations

from pathlib import Path

from refold.command_line.errors import ExitCode, WrongInput
from refold.command_line.folders import Named, Opened, differing, fill_folder, finish_folder, open_folder
from refold.command_line.screen import Screen
from refold.command_line.wording import counted
from refold.command_line.writing import check_place, new_folder
from refold.history import history, undo
from refold.saving import save


def undo_folder(
    screen: Screen, folder: Path, named: Named, out: Path | None, changes: int | None, overwrite: bool
) -> ExitCode:
    """Undo the latest changes (all of them, where no number is given) and write the folder again, or another one."""
    place = folder if out is None else out
    if out is not None:
        check_place(out, overwrite)
    opened = open_folder(folder, named)
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
        _write(opened, place, overwrite or out is None)
    left = len(history(gm))
    data = {"folder": str(place), "undone": labels[::-1], "left": left, "compared": compared, "different": different}
    screen.show(data, *(f"undone: {label}" for label in labels[::-1]), _sentence(place, left, compared, different))
    return ExitCode.NO if different else ExitCode.DONE


def _compared(opened: Opened) -> tuple[list[str], int]:
    """Weights that differ from the original's, where everything was undone and the original's bits are known."""
    if opened.about is None or history(opened.graph_module):
        return [], 0
    return differing(opened.graph_module, opened.about.original)


def _write(opened: Opened, place: Path, overwrite: bool) -> None:
    """The report is left behind: it speaks of rewrites that this model does not have."""
    if opened.about is None:
        save(opened.graph_module, place)
        return
    with new_folder(place, overwrite) as fresh:
        about = opened.about
        about.run = {key: value for key, value in about.run.items() if key != "report"} | {"undone": True}
        fill_folder(fresh, opened.graph_module, about, opened.inputs)
        finish_folder(fresh, about)


def _sentence(place: Path, left: int, compared: int, different: list[str]) -> str:
    if different:
        names = ", ".join(different[:5])
        return f"{len(different)} of {compared} tensors are not what they were ({names}); {place} was not written."
    if left:
        return f"{place} holds the model with {counted(left, 'change')} left."
    checked = f"all {compared} tensors are bit for bit what they were" if compared else "every change is undone"
    return f"{place} holds the original: {checked}."
