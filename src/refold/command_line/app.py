"""The commands of `refold` and their options; the work is done elsewhere."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from refold._version import __version__
from refold.command_line import options
from refold.command_line.errors import MEANINGS, ExitCode
from refold.command_line.folders import Named
from refold.command_line.inputs import Sizes
from refold.command_line.running import run
from refold.command_line.screen import Screen
from refold.command_line.subject import Wanted, prepare
from refold.command_line.usage import Command, Group

_EXIT_CODES = "\n\n".join(f"{int(code)}  {meaning}" for code, meaning in MEANINGS.items())

app = typer.Typer(
    name="refold",
    cls=Group,
    help="Make a PyTorch model faster by rewriting its graph, and always get the original back, bit for bit.",
    epilog=f"Exit codes:\n\n{_EXIT_CODES}",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)

TIME_BUDGET = 300.0


def _show_version(wanted: bool) -> None:
    if wanted:
        typer.echo(__version__)
        raise typer.Exit


_Version = Annotated[
    bool,
    typer.Option("--version", metavar="", help="Show the version and exit.", is_eager=True, callback=_show_version),
]


@app.callback()
def refold(version: _Version = False) -> None:
    """Make a PyTorch model faster by rewriting its graph, and always get the original back, bit for bit."""


@app.command(cls=Command)
def optimize(
    model: options.Model,
    out: Annotated[Path, typer.Option(metavar="DIR", help="The folder to write.")],
    overwrite: options.Overwrite = False,
    level: options.Level = "default",
    pipeline: options.Pipeline = None,
    backend: options.Backend = "auto",
    time_budget: options.TimeBudget = TIME_BUDGET,
    inputs: options.InputsFrom = None,
    batch: options.Batch = None,
    sequence_length: options.SequenceLength = None,
    image_size: options.ImageSize = None,
    device: options.Device = None,
    dtype: options.Dtype = None,
    threads: options.Threads = None,
    json: options.AsJson = False,
    debug: options.Debug = False,
) -> int:
    """Rewrite MODEL, keep what is right and faster here, and write a folder with the result and a report."""
    from refold.command_line.optimizing import Order, optimize_model

    sizes = Sizes(batch, sequence_length, image_size)
    order = Order(out, overwrite, level, pipeline, backend, time_budget or None)
    wanted = Wanted(model, inputs, sizes, device, dtype, threads)
    return run(lambda screen: optimize_model(screen, wanted, order), as_json=json, debug=debug)


@app.command(cls=Command)
def explain(
    model: options.Model,
    transformation: Annotated[
        str | None, typer.Argument(metavar="TRANSFORMATION", help="Only this one (refold list names them).")
    ] = None,
    level: options.Level = "default",
    pipeline: options.Pipeline = None,
    inputs: options.InputsFrom = None,
    batch: options.Batch = None,
    sequence_length: options.SequenceLength = None,
    image_size: options.ImageSize = None,
    device: options.Device = None,
    dtype: options.Dtype = None,
    everything: options.All = False,
    json: options.AsJson = False,
    debug: options.Debug = False,
) -> int:
    """Say what would be rewritten in MODEL, and why the rest is left alone. Nothing is written."""
    from refold.command_line.choosing import chosen
    from refold.command_line.explaining import explain_model

    wanted = Wanted(model, inputs, Sizes(batch, sequence_length, image_size), device, dtype)

    def work(screen: Screen) -> None:
        steps = chosen(level, pipeline, transformation)
        explain_model(screen, prepare(wanted), steps, everything=everything)

    return run(work, as_json=json, debug=debug)


@app.command("list", cls=Command)
def list_(
    transformation: Annotated[
        str | None, typer.Argument(metavar="TRANSFORMATION", help="Only this one, with all of its documentation.")
    ] = None,
    json: options.AsJson = False,
    debug: options.Debug = False,
) -> int:
    """Show every transformation with its algebra, kind and promises; and the examples and executors there are."""
    from refold.command_line.listing import list_transformations

    return run(lambda screen: list_transformations(screen, transformation), as_json=json, debug=debug)


@app.command(cls=Command)
def show(
    folder: options.Folder,
    model: options.NamedModel = None,
    inputs: options.InputsFrom = None,
    everything: options.All = False,
    json: options.AsJson = False,
    debug: options.Debug = False,
) -> int:
    """Show what was done to the model in DIR, as lines that begin with + (added), - (removed) or ~ (changed)."""
    from refold.command_line.showing import show_folder

    named = Named(model, inputs)
    return run(lambda screen: show_folder(screen, folder, named, everything=everything), as_json=json, debug=debug)


@app.command(cls=Command)
def verify(
    folder: options.Folder,
    model: options.NamedModel = None,
    inputs: options.InputsFrom = None,
    device: options.Device = None,
    threads: options.Threads = None,
    everything: options.All = False,
    json: options.AsJson = False,
    debug: options.Debug = False,
) -> int:
    """Check the model in DIR again: every rewrite in float64, and every output against the original."""
    from refold.command_line.verifying import verify_folder

    def work(screen: Screen) -> ExitCode:
        return verify_folder(screen, folder, Named(model, inputs, device), threads, everything=everything)

    return run(work, as_json=json, debug=debug)


@app.command(cls=Command)
def undo(
    folder: options.Folder,
    out: Annotated[Path | None, typer.Option(metavar="DIR", help="Write there instead of changing DIR itself.")] = None,
    changes: Annotated[int | None, typer.Option(min=1, help="Undo only the latest so many changes (all).")] = None,
    overwrite: options.Overwrite = False,
    model: options.NamedModel = None,
    inputs: options.InputsFrom = None,
    json: options.AsJson = False,
    debug: options.Debug = False,
) -> int:
    """Undo the rewrites of the model in DIR and check that every weight is, bit for bit, what it was."""
    from refold.command_line.undoing import undo_folder

    def work(screen: Screen) -> ExitCode:
        return undo_folder(screen, folder, Named(model, inputs), out, changes, overwrite)

    return run(work, as_json=json, debug=debug)


@app.command(cls=Command)
def bench(
    model: options.Model,
    level: options.Level = "default",
    pipeline: options.Pipeline = None,
    time_budget: options.TimeBudget = 2 * TIME_BUDGET,
    inputs: options.InputsFrom = None,
    batch: options.Batch = None,
    sequence_length: options.SequenceLength = None,
    image_size: options.ImageSize = None,
    device: options.Device = None,
    dtype: options.Dtype = None,
    threads: options.Threads = None,
    json: options.AsJson = False,
    debug: options.Debug = False,
) -> int:
    """Time MODEL as it is, by everything that is installed here, and by refold: in turn, in one table."""
    from refold.command_line.benching import bench_model

    wanted = Wanted(model, inputs, Sizes(batch, sequence_length, image_size), device, dtype, threads)
    return run(
        lambda screen: bench_model(screen, wanted, level, pipeline, time_budget or None), as_json=json, debug=debug
    )


@app.command(cls=Command)
def bisect(
    folder: options.Folder,
    check: Annotated[str, typer.Option(metavar="COMMAND", help="Exits with 0 if the model is good. See below.")],
    model: options.NamedModel = None,
    inputs: options.InputsFrom = None,
    json: options.AsJson = False,
    debug: options.Debug = False,
) -> int:
    """Find the change that breaks your own check, by undoing halves.

    COMMAND is run with the folder of a candidate in the environment variable REFOLD_FOLDER, and in place of {} where
    that stands in the command. It exits with 0 for good and with 1 to 124 for bad; anything else stops the search.
    In Python, refold.cli.open_model(folder) gives the candidate, and refold.cli.open_inputs(folder) its inputs.
    """
    from refold.command_line.bisecting import bisect_folder

    named = Named(model, inputs)
    return run(lambda screen: bisect_folder(screen, folder, check, named), as_json=json, debug=debug)
