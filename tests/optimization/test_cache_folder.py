"""The folder of kept decisions: private, whole files or none, one process at a time, of limited size."""

from __future__ import annotations

import errno
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from refold.optimization import cache_folder
from refold.optimization.cache_folder import CacheFolder, cache_of_user, usual_place
from refold.optimization.compiled_code import compiled_code_in

KEYS = [f"{number:032x}" for number in range(4)]
ONE, TWO, THREE, _ = KEYS


@pytest.fixture
def folder(tmp_path: Path) -> CacheFolder:
    return CacheFolder(tmp_path / "decisions")


def test_what_is_written_is_read(folder: CacheFolder) -> None:
    assert folder.read(ONE) is None and folder.entries() == []
    folder.write(ONE, "first")
    folder.write(ONE, "second")
    assert folder.read(ONE) == b"second" and folder.read(TWO) is None
    assert [entry.key for entry in folder.entries()] == [ONE]
    assert folder.path.stat().st_mode & 0o777 == 0o700
    assert folder.clear() == 1 and folder.entries() == [] and list(folder.path.iterdir()) == []


def test_where_it_lies(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("REFOLD_CACHE", str(tmp_path))
    assert cache_of_user() == CacheFolder(tmp_path / "decisions")
    monkeypatch.setenv("REFOLD_CACHE", "")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    monkeypatch.setattr(sys, "platform", "linux")
    assert usual_place() == tmp_path / "xdg" / "refold"
    monkeypatch.setattr(Path, "home", lambda: Path("/nowhere"))
    monkeypatch.setattr(sys, "platform", "darwin")
    assert usual_place() == Path("/nowhere/Library/Caches/refold")


def opened(folder: CacheFolder) -> None:
    folder.path.chmod(0o755)


def linked(folder: CacheFolder) -> None:
    folder.path.rename(folder.path.with_name("elsewhere"))
    folder.path.symlink_to(folder.path.with_name("elsewhere"))


@pytest.mark.parametrize("spoil", [opened, linked])
def test_a_folder_that_is_not_the_users_alone_is_not_used(
    folder: CacheFolder, spoil: Callable[[CacheFolder], None]
) -> None:
    folder.write(ONE, "text")
    spoil(folder)
    for use in (lambda: folder.read(ONE), lambda: folder.write(ONE, "other"), folder.entries, folder.clear):
        with pytest.raises(OSError):
            use()
    assert folder.compiled(ONE) is None
    with folder.locked(ONE, 1.0, pytest.fail) as had_to_wait:
        assert not had_to_wait


def test_the_owner_is_checked(folder: CacheFolder, monkeypatch: pytest.MonkeyPatch) -> None:
    folder.write(ONE, "text")
    owner = os.getuid()
    monkeypatch.setattr(os, "getuid", lambda: owner + 1)
    with pytest.raises(PermissionError, match="belongs to another user"):
        folder.read(ONE)


def test_least_recently_used_entries_go_first(folder: CacheFolder, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cache_folder, "LIMIT", 2500)
    for place, key in enumerate((ONE, TWO)):
        folder.write(key, "x" * 1000)
        os.utime(folder.entry(key).text, (place, place))
    compiled = folder.compiled(TWO)
    assert compiled is not None
    assert folder.read(ONE) is not None  # now it is the one that was used last
    folder.write(THREE, "x" * 1000)
    assert {entry.key for entry in folder.entries()} == {ONE, THREE}
    large = folder.compiled(ONE)
    assert large is not None
    large.mkdir()
    (large / "code.so").write_bytes(b"x" * 3000)  # what compilers keep counts
    folder.write(TWO, "x")
    assert {entry.key for entry in folder.entries()} == {TWO, THREE}


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EROFS])
def test_a_full_disk_leaves_the_old_text(folder: CacheFolder, monkeypatch: pytest.MonkeyPatch, code: int) -> None:
    folder.write(ONE, "old")

    def refuse(*_: object) -> None:
        raise OSError(code, os.strerror(code))

    with monkeypatch.context() as patch:
        patch.setattr(os, "replace", refuse)
        with pytest.raises(OSError):
            folder.write(ONE, "new")
    assert folder.read(ONE) == b"old"
    assert [path.name for path in folder.entry(ONE).folder.iterdir()] == ["decision.json"]


CHILD = """
import importlib.util, os, pathlib, signal, sys, time, types
sys.path.insert(0, {sources!r})
for name in ("refold", "refold.saving", "refold.optimization"):  # torch is not needed here, and takes seconds
    package = types.ModuleType(name)
    package.__path__ = [str(pathlib.Path({sources!r}, *name.split(".")))]
    sys.modules[name] = package
from refold.optimization.cache_folder import CacheFolder
folder = CacheFolder(pathlib.Path({path!r}))
{body}
"""
KILLED = "os.replace = lambda *_: os.kill(os.getpid(), signal.SIGKILL)\nfolder.write({key!r}, 'new')"
HOLDS = "with folder.locked({key!r}, 1.0, print):\n    print('held', flush=True)\n    time.sleep({seconds})"


def child(folder: CacheFolder, body: str) -> subprocess.Popen[str]:
    """Another process that uses the folder."""
    sources = str(Path(cache_folder.__file__).parents[2])
    text = CHILD.format(sources=sources, path=str(folder.path), body=body)
    return subprocess.Popen([sys.executable, "-c", text], stdout=subprocess.PIPE, text=True)


def test_a_process_that_is_killed_while_it_writes_leaves_the_old_text(folder: CacheFolder) -> None:
    folder.write(ONE, "old")
    process = child(folder, KILLED.format(key=ONE))
    process.communicate()
    assert process.returncode == -signal.SIGKILL
    assert len(list(folder.entry(ONE).folder.iterdir())) == 2
    assert folder.read(ONE) == b"old"
    folder.write(ONE, "new")
    assert [path.name for path in folder.entry(ONE).folder.iterdir()] == ["decision.json"]


@pytest.mark.skipif(os.name == "nt", reason="there are no such locks")
def test_a_second_process_waits_for_the_first(folder: CacheFolder) -> None:
    process, told = child(folder, HOLDS.format(key=ONE, seconds=60)), []
    assert process.stdout is not None and process.stdout.readline() == "held\n"
    with folder.locked(TWO, 1.0, pytest.fail) as had_to_wait:
        assert not had_to_wait
    start = time.monotonic()
    with folder.locked(ONE, 0.2, lambda: told.append(1)) as had_to_wait:  # not for ever
        assert had_to_wait and told == [1] and time.monotonic() - start >= 0.2
    process.kill()  # whatever ends it, its lock is free then
    process.communicate()
    with folder.locked(ONE, 10.0, pytest.fail) as had_to_wait:
        assert not had_to_wait


def test_compilers_keep_their_code_in_the_entry(folder: CacheFolder, monkeypatch: pytest.MonkeyPatch) -> None:
    name = "TORCHINDUCTOR_CACHE_DIR"
    monkeypatch.delenv(name, raising=False)
    monkeypatch.delenv("TRITON_CACHE_DIR", raising=False)
    with compiled_code_in(folder.compiled(ONE)):
        assert os.environ[name] == str(folder.entry(ONE).compiled)
    assert name not in os.environ
    monkeypatch.setenv(name, "/of/the/user")
    with compiled_code_in(folder.compiled(ONE)):
        assert os.environ[name] == "/of/the/user"
    with compiled_code_in(None):
        assert os.environ[name] == "/of/the/user"
