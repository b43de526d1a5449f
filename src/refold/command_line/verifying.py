"""`refold verify`: check a saved model again."""

from __future__ import annotations

from pathlib import Path

from rich.console import RenderableType

from refold.command_line.errors import ExitCode, WrongInput
from refold.command_line.folders import Named, open_folder
from refold.command_line.progress import told
from refold.command_line.screen import Screen
from refold.command_line.subject import use_threads
from refold.command_line.tables import Column, table
from refold.verify import Verification, verify

_MOST_ROWS = 12
_OUTPUT_COLUMNS: list[str | Column] = [
    "output",
    "grade",
    Column("error", number=True),
    Column("the original's", number=True),
    "note",
]


def verify_folder(screen: Screen, folder: Path, named: Named, threads: int | None, *, everything: bool) -> ExitCode:
    """Say whether every rewrite is right, and what the outputs cost in accuracy."""
    use_threads(threads)
    with told(screen) as tell:
        tell(f"loading {folder}", 0.0)
        opened = open_folder(folder, named)
        if opened.inputs is None:
            raise WrongInput(f"{folder} does not hold its inputs. Give them: --inputs FILE.py:FUNCTION.")
        tell("verifying in float64", 0.3)
        found = verify(opened.graph_module, opened.inputs)
    most = None if everything else _MOST_ROWS
    screen.show({"folder": str(folder)} | found.to_dict(), *_tables(found, most), _sentence(found))
    return ExitCode.DONE if found.right else ExitCode.NO


def _sentence(found: Verification) -> str:
    return f"{'Right' if found.right else 'WRONG'}: {found.sentence}"


def _tables(found: Verification, most: int | None) -> list[RenderableType | str]:
    wrong = [site for site in found.sites if not site.right]
    right = [site for site in found.sites if site.right]
    shown = wrong + right[:most]
    rows = [("right" if site.right else "WRONG", site.change, site.site, site.sentence) for site in shown]
    if len(shown) < len(found.sites):
        rows.append(("right", "", f"{len(found.sites) - len(shown)} more (--all shows them)", ""))
    parts: list[RenderableType | str] = []
    if rows:
        parts += [table("rewritten places", ["", "change", "place", "why"], rows), ""]
    if found.outputs:
        outputs = [(o.name, o.grade, f"{o.error:.3g}", f"{o.baseline:.3g}", o.sentence) for o in found.outputs]
        parts += [table("outputs against float64", _OUTPUT_COLUMNS, outputs), ""]
    return parts + [f"problem: {problem}" for problem in found.problems] + [f"note: {note}" for note in found.notes]
