"""The commands of `refold` with their options. What does the work is imported when a command runs: torch takes long."""

from __future__ import annotations

import logging
import math
import os
import sys
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import typer
from typer.core import TyperCommand, TyperGroup

from refold._version import __version__
from refold.command_line import options
from refold.command_line.console import Console, ready_streams
from refold.command_line.execution import ExitCode, log_error, run, unread
from refold.command_line.options import FolderOptions, OptimizeOptions, Request, Sizes


class _UsualSigns:
    """Help in the usual signs: MODEL for what must be given, [NAME] for what may be, and nothing behind a switch."""

    def collect_usage_pieces(self, ctx: Any) -> list[str]:
        pieces: list[str] = super().collect_usage_pieces(ctx)  # type: ignore[misc]
        return [piece.strip("{}") for piece in pieces]

    def get_params(self, ctx: Any) -> list[Any]:
        params: list[Any] = super().get_params(ctx)  # type: ignore[misc]
        for param in params:
            if getattr(param, "is_flag", False):
                param.metavar = ""
        return params


class Command(_UsualSigns, TyperCommand):
    """One command."""


class Group(_UsualSigns, TyperGroup):
    """`refold` itself."""


_EXIT_CODES = "\n\n".join(f"{int(code)}  {code.meaning}" for code in ExitCode)

app = typer.Typer(
    name="refold",
    cls=Group,
    help="Make a PyTorch model faster by rewriting its graph, and always get the original back, bit for bit.",
    epilog=f"Exit codes:\n\n{_EXIT_CODES}",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
)

TIME_BUDGET = 600.0


def _show_version(given: bool) -> None:
    if given:
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
    effort: options.Effort = "default",
    time_budget: options.TimeBudget = None,
    max_memory: options.MaxMemory = None,
    inputs: options.InputsFrom = None,
    batch: options.Batch = None,
    sequence_length: options.SequenceLength = None,
    image_size: options.ImageSize = None,
    device: options.Device = None,
    dtype: options.Dtype = None,
    threads: options.Threads = None,
    json: options.AsJson = False,
    quiet: options.Quiet = False,
    debug: options.Debug = False,
) -> int:
    """Rewrite MODEL, keep what is right and faster here, and write a folder with the result and a report."""
    from refold.command_line.optimize_command import optimize_model

    request = Request(model, inputs, Sizes(batch, sequence_length, image_size), device, dtype, threads)
    seconds = math.inf if time_budget == 0 else time_budget
    how = OptimizeOptions(out, overwrite, level, pipeline, backend, effort, seconds, max_memory)
    return run(optimize_model, request, how, as_json=json, quiet=quiet, debug=debug)


@app.command(cls=Command)
def explain(
    model: options.Model,
    transformation: Annotated[
        str | None,
        typer.Argument(
            metavar="TRANSFORMATION",
            help="Only this one (refold list names them).",
            autocompletion=options.transformation_names,
        ),
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
    from refold.command_line.explain_command import explain_model

    request = Request(model, inputs, Sizes(batch, sequence_length, image_size), device, dtype)
    return run(explain_model, request, level, pipeline, transformation, everything, as_json=json, debug=debug)


@app.command("list", cls=Command)
def list_(
    transformation: Annotated[
        str | None,
        typer.Argument(
            metavar="TRANSFORMATION",
            help="Only this one, with all of its documentation.",
            autocompletion=options.transformation_names,
        ),
    ] = None,
    json: options.AsJson = False,
    debug: options.Debug = False,
) -> int:
    """Show every transformation with its algebra, kind and promises; and the examples and executors there are."""
    from refold.command_line.list_command import list_transformations

    return run(list_transformations, transformation, as_json=json, debug=debug)


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
    from refold.command_line.folder_commands import show_folder

    return run(show_folder, folder, FolderOptions(model, inputs), everything, as_json=json, debug=debug)


@app.command(cls=Command)
def verify(
    folder: options.Folder,
    model: options.NamedModel = None,
    inputs: options.InputsFrom = None,
    device: options.Device = None,
    threads: options.Threads = None,
    everything: options.All = False,
    json: options.AsJson = False,
    quiet: options.Quiet = False,
    debug: options.Debug = False,
) -> int:
    """Check the model in DIR again: every rewrite in float64, and every output against the original."""
    from refold.command_line.folder_commands import verify_folder

    said = FolderOptions(model, inputs, device)
    return run(verify_folder, folder, said, threads, everything, as_json=json, quiet=quiet, debug=debug)


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
    from refold.command_line.folder_commands import undo_folder

    said = FolderOptions(model, inputs)
    return run(undo_folder, folder, said, out, changes, overwrite, as_json=json, debug=debug)


@app.command(cls=Command)
def bench(
    model: options.Model,
    level: options.Level = "default",
    pipeline: options.Pipeline = None,
    time_budget: options.TimeBudget = TIME_BUDGET,
    inputs: options.InputsFrom = None,
    batch: options.Batch = None,
    sequence_length: options.SequenceLength = None,
    image_size: options.ImageSize = None,
    device: options.Device = None,
    dtype: options.Dtype = None,
    threads: options.Threads = None,
    json: options.AsJson = False,
    quiet: options.Quiet = False,
    debug: options.Debug = False,
) -> int:
    """Time MODEL as it is, by everything that is installed here, and by refold: in turn, in one table."""
    from refold.command_line.bench_command import bench_model

    request = Request(model, inputs, Sizes(batch, sequence_length, image_size), device, dtype, threads)
    return run(bench_model, request, level, pipeline, time_budget or None, as_json=json, quiet=quiet, debug=debug)


@app.command(cls=Command)
def bisect(
    folder: options.Folder,
    check: Annotated[str, typer.Option(metavar="COMMAND", help="Exits with 0 if the model is good. See below.")],
    model: options.NamedModel = None,
    inputs: options.InputsFrom = None,
    json: options.AsJson = False,
    quiet: options.Quiet = False,
    debug: options.Debug = False,
) -> int:
    """Find the change that breaks your own check, by undoing halves.

    COMMAND is run with the folder of a candidate in the environment variable REFOLD_FOLDER, and in place of {} where
    that stands in the command. It exits with 0 for good and with 1 to 124 for bad; anything else stops the search.
    In Python, refold.cli.open_model(folder) gives the candidate, and refold.cli.open_inputs(folder) its inputs.
    """
    from refold.command_line.folder_commands import bisect_folder

    return run(bisect_folder, folder, check, FolderOptions(model, inputs), as_json=json, quiet=quiet, debug=debug)


@app.command(cls=Command)
def cache(
    clear: Annotated[bool, typer.Option("--clear", help="Delete everything that is kept.")] = False,
    json: options.AsJson = False,
    debug: options.Debug = False,
) -> int:
    """Show the decisions that refold.optimize keeps for later processes, and where; or delete them.

    The environment variable REFOLD_CACHE names another folder; "off" turns it off.
    """
    from refold.command_line.cache_command import show_cache

    return run(show_cache, clear, as_json=json, debug=debug)


@app.command("new-rule", cls=Command)
def new_rule(
    name: Annotated[str, typer.Argument(metavar="NAME", help="The class to write, such as FoldLayerScale.")],
    out: Annotated[Path, typer.Option(metavar="DIR", help="The folder to write into.")] = Path("."),
    json: options.AsJson = False,
    debug: options.Debug = False,
) -> int:
    """Write the file of a new transformation and its test, both working, to go on from."""
    from refold.command_line.new_rule_command import write_new_rule

    return run(write_new_rule, name, out, as_json=json, debug=debug)


@app.command(cls=Command)
def convert(
    source: Annotated[Path, typer.Argument(metavar="SRC", help="A folder of safetensors files.")],
    out: Annotated[Path, typer.Option(metavar="DIR", help="The folder to write; it must not be there yet.")],
    to: Annotated[
        str | None, typer.Option(metavar="LAYOUT", help="hf, vllm, or a YAML file with a table of your own.")
    ] = None,
    origin: Annotated[
        str | None, typer.Option("--from", metavar="LAYOUT", help="The layout of SRC, where it does not say it (hf).")
    ] = None,
    plan: Annotated[
        Path | None, typer.Option(metavar="FILE", help="A plan that refold.plan made and saved, instead of a layout.")
    ] = None,
    pipeline: Annotated[
        Path | None, typer.Option(metavar="FILE", help="A pipeline file (YAML); SRC must be a transformers folder.")
    ] = None,
    original: options.Original = False,
    verify: options.Verify = False,
    jobs: Annotated[int, typer.Option(min=1, help="Files that are worked on at once.")] = 4,
    everything: options.All = False,
    json: options.AsJson = False,
    debug: options.Debug = False,
) -> int:
    """Convert the checkpoint in SRC into another layout, as a stream: a few tensors are in memory at a time.

    Started again after it was stopped, it goes on from what is done. A folder that it wrote is converted back by
    `--to hf`, or `--original`, to the very files it was made from. Under torchrun the files are divided among the
    processes: torchrun --nproc-per-node 4 -m refold convert SRC --out DIR --to vllm.
    """
    from refold.command_line.convert_command import ConvertOptions, convert_folder

    how = ConvertOptions(to, origin, plan, pipeline, original, verify, jobs)
    return run(convert_folder, source, out, how, everything, as_json=json, debug=debug)


# --- one command, run ---------------------------------------------------------------------------------------------

# typer has a click of its own in some versions; what it raises for wrong usage is the base of this in all of them
UsageError: Any = typer.BadParameter.__base__


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command."""
    _quieten()
    ready_streams()
    try:
        return _run(list(sys.argv[1:] if arguments is None else arguments))
    except (typer.Abort, KeyboardInterrupt):
        return int(ExitCode.INTERRUPTED)
    except BrokenPipeError:
        return unread()
    except SystemExit as left:  # typer ends so after a completion; it and rich where their help is not read to its end
        return int(ExitCode.DONE) if not left.code else unread()


def _run(arguments: list[str]) -> int:
    try:
        return int(app(args=arguments, standalone_mode=False) or 0)
    except UsageError as error:
        if type(error).__name__ != "NoArgsIsHelpError":  # the help was shown already
            command = error.ctx.command_path if error.ctx is not None else "refold"
            sentence = f"{error.format_message()} ({command} --help says more)"
            log_error(Console(as_json="--json" in arguments), ExitCode.WRONG_INPUT, sentence)
        return int(ExitCode.WRONG_INPUT)


def _quieten() -> None:
    """Silence other packages: what matters is in errors, and --debug shows where they come from."""
    os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    warnings.simplefilter("ignore")
    for name in ("torch", "torch.onnx", "onnxscript", "onnx_ir", "transformers", "huggingface_hub"):
        logging.getLogger(name).setLevel(logging.CRITICAL)  # what they log as an error, they also raise
