"""The installed `refold` script: its exit codes, its streams, and what Ctrl-C and SIGTERM leave behind."""

from __future__ import annotations

import contextlib
import io
import json
import os
import re
import runpy
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

import refold
import refold_command
from refold.cli import main
from refold.command_line import console, saved_folder
from refold.command_line.execution import ExitCode, Terminated
from refold.command_line.saved_folder import ABOUT, check_place
from refold.saving import folder

SCRIPT = Path(sys.executable).with_name("refold")
PIPELINE = "refold-pipeline: 1\ntransformations: [MergeLinears]"


@pytest.fixture(autouse=True)
def interrupts_are_heard() -> Iterator[None]:
    """A shell has whatever it starts in the background ignore interrupts, and children inherit that."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before if before is not None else signal.SIG_DFL)


def start(*arguments: object, **settings: object) -> subprocess.Popen[str]:
    command = [str(SCRIPT), *map(str, arguments)]
    streams = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE} | settings
    return subprocess.Popen(command, text=True, **streams)  # type: ignore[call-overload, no-any-return]


def fork(streams: tuple[int, int], *arguments: object, **environment: str) -> int:
    """Start the command in a copy of this process, which has everything imported, and return the copy's id."""
    child = os.fork()
    if child:
        return child
    code = 99
    try:
        for place, stream in enumerate(streams, 1):
            os.dup2(stream, place)
        sys.stdout, sys.stderr = (os.fdopen(place, "w", buffering=1) for place in (1, 2))
        os.environ.update(environment)
        sys.argv, sys.modules["__main__"].__package__ = ["refold", *map(str, arguments)], ""  # as a script
        code = refold_command.main()
    except SystemExit as ended:
        code = ended.code if isinstance(ended.code, int) else 98
    finally:
        with contextlib.suppress(BaseException):
            sys.stdout.flush()
        os._exit(code)


def exit_code(child: int) -> int:
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def forked(*arguments: object, **environment: str) -> tuple[int, str, str]:
    """The exit code of a command and what it wrote to its two streams."""
    with tempfile.TemporaryFile() as out, tempfile.TemporaryFile() as err:
        code = exit_code(fork((out.fileno(), err.fileno()), *arguments, **environment))
        texts = []
        for stream in (out, err):
            stream.seek(0)
            texts.append(stream.read().decode())
    return code, texts[0], texts[1]


@pytest.fixture
def files(tmp_path: Path) -> Path:
    (tmp_path / "one.yaml").write_text(PIPELINE)
    (tmp_path / "noisy.py").write_text(
        "import torch\n"
        "from torch import nn\n"
        "def make():\n"
        "    print('hello from the factory')\n"
        "    return nn.Linear(2, 2), torch.ones(1, 2)\n"
    )
    return tmp_path


def test_help_documents_the_exit_codes() -> None:
    done = start("--help")
    out, _ = done.communicate(timeout=120)
    assert done.returncode == 0
    words = " ".join(re.sub("[│╭╰╮╯─]", " ", out).split())
    for code in ExitCode:
        assert f"{int(code)} {code.meaning}" in words
    assert "optimize" in words and "bisect" in words


def test_json_is_all_that_stdout_gets(files: Path) -> None:
    code, out, err = forked("explain", f"{files / 'noisy.py'}:make", "MergeLinears", "--json")
    assert code == 0, err
    assert json.loads(out)["transformations"][0]["name"] == "MergeLinears"
    assert "hello from the factory" in err


def test_without_typer_there_is_a_sentence() -> None:
    code = "import sys; sys.modules['typer'] = None\nfrom refold.cli import main; sys.exit(main(['list']))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert done.returncode == 2
    assert done.stderr == "refold: the command line needs typer and rich: pip install typer rich pyyaml safetensors\n"


# --- streams -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "arguments", [["list", "MergeLinears"], ["list", "MergeLinears", "--json"], ["--help"], ["nope"]]
)
def test_a_reader_that_went_away_is_no_answer(arguments: list[str]) -> None:
    reader, writer = os.pipe()
    os.close(reader)
    with tempfile.TemporaryFile() as err:
        code = exit_code(fork((writer, writer if arguments == ["nope"] else err.fileno()), *arguments))
        os.close(writer)
        err.seek(0)
        assert (code, err.read()) == (ExitCode.UNREAD, b"")


@pytest.mark.parametrize("encoding", ["ascii", "latin-1"])
def test_signs_that_the_encoding_lacks_are_written_as_escapes(encoding: str, monkeypatch: pytest.MonkeyPatch) -> None:
    streams = {
        name: io.TextIOWrapper(io.BytesIO(), encoding=encoding, errors="strict") for name in ("stdout", "stderr")
    }
    for name, stream in streams.items():
        monkeypatch.setattr(sys, name, stream)
    assert main(["list", "MergeLinears"]) == 0
    assert main(["explain", "example:→"]) == 2
    written = {}
    for name, stream in streams.items():
        stream.flush()
        written[name] = stream.buffer.getvalue().decode(encoding)  # type: ignore[attr-defined]
    assert "y\\u2081 = x" in written["stdout"]
    assert "There is no example '\\u2192'" in written["stderr"]


def test_a_closed_stdout_is_no_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stdout", None)
    assert main(["list", "MergeLinears", "--json"]) == 0


def test_a_log_gets_a_line_now_and_then(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> None:
    clock = iter([0.0, *range(100, 120)])
    monkeypatch.setattr(console.time, "monotonic", lambda: next(clock))
    monkeypatch.setenv("FORCE_COLOR", "1")  # as some CI does; it makes no terminal of a log
    with console.progress(console.Console()) as show:
        for second in range(12):
            show(f"step {second // 4}", second / 12)
    lines = capfd.readouterr().err.splitlines()
    assert lines == ["[  100 s,   0%] step 0", "[  105 s,  42%] step 1", "[  110 s,  83%] step 2"]
    with console.progress(console.Console(quiet=True)) as show:
        show("anything", 0.5)
    assert capfd.readouterr().err == ""


def test_no_colour_where_none_is_wanted(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a terminal, which a pseudo-terminal is."""
    for name in ("FORCE_COLOR", "NO_COLOR"):
        monkeypatch.delenv(name, raising=False)
    shown = {}
    for wanted in ("", "1"):
        reader, writer = os.openpty()
        child = fork((writer, writer), "--help", TERM="xterm-256color", **({"NO_COLOR": wanted} if wanted else {}))
        os.close(writer)
        shown[wanted] = read_all(reader)
        assert exit_code(child) == 0
    colours = re.compile(r"\x1b\[[0-9;]*3[0-7][0-9;]*m")
    assert colours.search(shown[""]) and not colours.search(shown["1"])


def read_all(reader: int) -> str:
    parts = []
    with contextlib.suppress(OSError):  # the other side was closed
        while part := os.read(reader, 4096):
            parts.append(part)
    os.close(reader)
    return b"".join(parts).decode()


# --- ways in -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("module", ["refold", "refold.cli"])
@pytest.mark.filterwarnings("ignore:.*found in sys.modules:RuntimeWarning")
def test_python_m_is_the_same_command(
    module: str, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["refold", "list", "MergeLinears"])
    with pytest.raises(SystemExit) as ended:
        runpy.run_module(module, run_name="__main__")
    assert ended.value.code == 0
    assert capfd.readouterr().out.startswith("MergeLinears")


@pytest.mark.parametrize(
    ("typed", "expected"),
    [
        ("refold op", ["optimize"]),
        ("refold list MergeLi", ["MergeLinears"]),
        ("refold optimize x --backend pl", ["plain"]),
    ],
)
def test_a_shell_completes_what_is_typed(typed: str, expected: list[str]) -> None:
    asked = {"_REFOLD_COMPLETE": "complete_bash", "COMP_WORDS": typed, "COMP_CWORD": str(typed.count(" "))}
    code, out, _ = forked(**asked)
    assert (code, out.split()) == (0, expected)


def test_the_version_is_told_without_torch() -> None:
    code = "import sys, refold_command; refold_command.main(); assert 'torch' not in sys.modules"
    done = subprocess.run([sys.executable, "-c", code, "--version"], capture_output=True, text=True, timeout=120)
    assert (done.returncode, done.stdout) == (0, f"{refold.__version__}\n"), done.stderr


def test_help_and_the_list_import_no_more_than_they_need() -> None:
    code = (
        "import sys, refold.command_line.app, refold.command_line.list_command\n"
        "slow = {'refold.capture.tracing', 'refold.saving', 'refold.verification', 'refold.optimization.job'}\n"
        "assert not slow & set(sys.modules), slow & set(sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize(("number", "word"), [(signal.SIGINT, "Interrupted"), (signal.SIGTERM, "Terminated")])
def test_a_signal_while_torch_is_imported(number: signal.Signals, word: str, tmp_path: Path) -> None:
    (tmp_path / "refold").mkdir()
    (tmp_path / "refold" / "__init__.py").write_text(
        "import time\n"
        "print('importing', flush=True)\n"
        "try:\n"
        "    time.sleep(60)\n"
        "except BaseException:\n"  # as some packages do
        "    time.sleep(60)\n"
    )
    way_in = Path(refold_command.__file__).parent.parent
    code = f"import sys; sys.path[:0] = [{str(tmp_path)!r}, {str(way_in)!r}]\nfrom refold_command import main\nmain()"
    process = subprocess.Popen(
        [sys.executable, "-c", code, "list"], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    assert process.stdout is not None and process.stdout.readline() == "importing\n"
    process.send_signal(number)
    _, err = process.communicate(timeout=30)
    assert (process.returncode, err) == (128 + number, f"refold: {word}: no folder was changed.\n")


def lines_of(process: subprocess.Popen[str]) -> Iterator[str]:
    assert process.stderr is not None
    return iter(process.stderr.readline, "")


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_signal_leaves_no_half_folder(number: signal.Signals, code: int, files: Path) -> None:
    fixed = ["--backend", "plain", "--pipeline", files / "one.yaml"]
    process = start("optimize", "example:tiny", "--out", files / "out", *fixed)
    assert any("loading example:tiny" in line for line in lines_of(process))
    time.sleep(0.5)
    process.send_signal(number)
    out, err = process.communicate(timeout=120)
    assert process.returncode == code, err
    assert out == "" and "no folder was changed" in err and "Traceback" not in err
    assert {path.name for path in files.iterdir()} - {"__pycache__"} == {"one.yaml", "noisy.py"}


# --- the moment of writing ---------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    home = tmp_path_factory.mktemp("made")
    (home / "one.yaml").write_text(PIPELINE)
    assert main(_optimize(home)) == 0
    return home


def _optimize(home: Path, *more: str) -> list[str]:
    fixed = ["--backend", "plain", "--time-budget", "3", "--pipeline", str(home / "one.yaml")]
    return ["optimize", "example:tiny", "--out", str(home / "tiny"), *fixed, *more]


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


@pytest.mark.parametrize("moment", ["write_module", "store_inputs", "seal", "_commit"])
def test_ctrl_c_while_writing_leaves_the_old_folder(
    moment: str, made: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    before = contents(made / "tiny")

    def interrupt(*args: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(folder if hasattr(folder, moment) else saved_folder, moment, interrupt)
    assert main(_optimize(made, "--overwrite")) == 130
    assert "no folder was changed" in capfd.readouterr().err
    assert contents(made / "tiny") == before
    assert {path.name for path in made.iterdir()} == {"tiny", "one.yaml"}


def write(place: Path, text: str, overwrite: bool = False) -> None:
    check_place(place, overwrite)
    with folder.replaced(place) as fresh:
        (fresh / "note").write_text(text)
        (fresh / ABOUT).write_text(json.dumps({"schema": saved_folder.SCHEMA, "files": ["note", folder.MANIFEST]}))


def test_only_what_refold_wrote_is_replaced(tmp_path: Path) -> None:
    place = tmp_path / "out"
    write(place, "old")
    (place / "thesis.txt").write_text("mine")
    with pytest.raises(saved_folder.WrongInput, match="give --overwrite"):
        write(place, "new")
    write(place, "new", overwrite=True)
    assert (place / "note").read_text() == "new" and (place / "thesis.txt").read_text() == "mine"
    shutil.rmtree(place)
    place.mkdir()
    (place / ABOUT).write_text("mine")
    with pytest.raises(saved_folder.WrongInput, match=r"about\.json, which Refold did not write"):
        write(place, "newer", overwrite=True)
    (place / ABOUT).unlink()
    write(place, "into an empty one")
    assert (place / "note").read_text() == "into an empty one"


def test_what_ends_a_command_has_a_code_of_its_own() -> None:
    from refold.command_line.execution import describe_error

    assert describe_error(KeyboardInterrupt())[0] == ExitCode.INTERRUPTED
    assert describe_error(Terminated())[0] == ExitCode.TERMINATED
    assert describe_error(MemoryError("too\nmuch")) == (
        ExitCode.UNEXPECTED,
        "Unexpected MemoryError: too much (--debug shows where)",
    )
    assert (
        describe_error(PermissionError(13, "Permission denied", "/root/x"))[1]
        == "/root/x cannot be used: Permission denied."
    )
