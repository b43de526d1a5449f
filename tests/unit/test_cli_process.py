"""The installed `refold` script: its exit codes, its streams, and what Ctrl-C and SIGTERM leave behind."""

from __future__ import annotations

import io
import json
import os
import re
import runpy
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

import refold
import refold_command
from refold.cli import main
from refold.command_line import optimizing, writing
from refold.command_line.errors import MEANINGS, ExitCode, Terminated
from refold.command_line.writing import ABOUT, new_folder

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
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, **settings)  # type: ignore[call-overload, no-any-return]


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
    for code, meaning in MEANINGS.items():
        assert f"{int(code)} {meaning}" in words
    assert "optimize" in words and "bisect" in words


def test_json_is_all_that_stdout_gets(files: Path) -> None:
    done = start("explain", f"{files / 'noisy.py'}:make", "MergeLinears", "--json")
    out, err = done.communicate(timeout=120)
    assert done.returncode == 0, err
    assert json.loads(out)["transformations"][0]["name"] == "MergeLinears"
    assert "hello from the factory" in err


def test_without_typer_there_is_a_sentence() -> None:
    code = "import sys; sys.modules['typer'] = None\nfrom refold.cli import main; sys.exit(main(['list']))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert done.returncode == 2
    assert done.stderr == "refold: the command line needs typer and rich: pip install 'refold[cli]'\n"


# --- streams -----------------------------------------------------------------------------------------------------


NOBODY_READS = """
import os, sys
from refold.cli import main
reader, writer = os.pipe()
os.close(reader)
for arguments in (["list", "MergeLinears"], ["list", "MergeLinears", "--json"], ["--help"], ["nope"]):
    child = os.fork()
    if not child:
        os.dup2(writer, 1)
        if arguments == ["nope"]:
            os.dup2(writer, 2)
        sys.exit(main(arguments))
    print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)
"""


def test_a_reader_that_went_away_is_no_answer() -> None:
    done = subprocess.run([sys.executable, "-c", NOBODY_READS], capture_output=True, text=True, timeout=120)
    assert (done.stdout, done.stderr) == (f"{ExitCode.UNREAD:d}\n" * 4, "")


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


def test_the_version_is_told_without_torch() -> None:
    code = "import sys, refold_command; refold_command.main(); assert 'torch' not in sys.modules"
    done = subprocess.run([sys.executable, "-c", code, "--version"], capture_output=True, text=True, timeout=120)
    assert (done.returncode, done.stdout) == (0, f"{refold.__version__}\n"), done.stderr


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
    assert any("capturing" in line for line in lines_of(process))
    time.sleep(0.3)
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


@pytest.mark.parametrize("moment", ["write_pipeline", "finish_folder", "fill_folder"])
def test_ctrl_c_while_writing_leaves_the_old_folder(
    moment: str, made: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    before = contents(made / "tiny")

    def interrupt(*args: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(optimizing, moment, interrupt)
    assert main(_optimize(made, "--overwrite")) == 130
    assert "no folder was changed" in capfd.readouterr().err
    assert contents(made / "tiny") == before
    assert {path.name for path in made.iterdir()} == {"tiny", "one.yaml"}


def test_ctrl_c_between_the_renames_waits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    place = tmp_path / "out"
    write(place, "old")
    rename = Path.rename

    def renamed(self: Path, target: Path) -> Path:
        os.kill(os.getpid(), signal.SIGINT)
        return rename(self, target)

    monkeypatch.setattr(Path, "rename", renamed)
    with pytest.raises(KeyboardInterrupt), new_folder(place, True) as fresh:
        fill(fresh, "new")
    assert (place / "note").read_text() == "new" and os.listdir(tmp_path) == ["out"]


def fill(folder: Path, text: str) -> None:
    (folder / "note").write_text(text)
    (folder / ABOUT).write_text(json.dumps({"schema": writing.SCHEMA, "files": ["note"]}))


def write(place: Path, text: str, overwrite: bool = False) -> None:
    with new_folder(place, overwrite) as fresh:
        fill(fresh, text)


def test_a_swap_that_fails_puts_the_old_folder_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    place = tmp_path / "out"
    write(place, "old")
    rename, calls = Path.rename, []

    def renamed(self: Path, target: Path) -> Path:
        calls.append(self)
        if len(calls) == 2:
            raise OSError("no")
        return rename(self, target)

    monkeypatch.setattr(Path, "rename", renamed)
    with pytest.raises(OSError, match="no"):
        write(place, "new", overwrite=True)
    assert (place / "note").read_text() == "old" and os.listdir(tmp_path) == ["out"]


def test_only_what_refold_wrote_is_replaced(tmp_path: Path) -> None:
    place = tmp_path / "out"
    write(place, "old")
    (place / "thesis.txt").write_text("mine")
    with pytest.raises(writing.WrongInput, match=r"also holds thesis\.txt"):
        write(place, "new", overwrite=True)
    (place / "thesis.txt").unlink()
    write(place, "new", overwrite=True)
    assert (place / "note").read_text() == "new"
    with pytest.raises(writing.WrongInput, match="give --overwrite"):
        write(place, "newer")
    (place / ABOUT).unlink()
    with pytest.raises(writing.WrongInput, match=r"exists already, and refold optimize did not write it\. Choose"):
        write(place, "newer")
    shutil.rmtree(place)
    place.mkdir()
    write(place, "into an empty one")
    assert (place / "note").read_text() == "into an empty one"


def test_what_ends_a_command_has_a_code_of_its_own() -> None:
    from refold.command_line.running import explain

    assert explain(KeyboardInterrupt())[0] == ExitCode.INTERRUPTED
    assert explain(Terminated())[0] == ExitCode.TERMINATED
    assert explain(MemoryError("too\nmuch")) == (
        ExitCode.UNEXPECTED,
        "Unexpected MemoryError: too much (--debug shows where)",
    )
    assert (
        explain(PermissionError(13, "Permission denied", "/root/x"))[1] == "/root/x cannot be used: Permission denied."
    )
