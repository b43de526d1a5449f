"""A bar in a notebook, where no terminal is."""

from __future__ import annotations

import sys
from types import SimpleNamespace

import pytest

from refold.optimization.progress import shown, silent


class ZMQInteractiveShell:
    """What IPython calls the shell of a notebook."""


class TerminalInteractiveShell:
    """What it calls the one on a terminal."""


@pytest.fixture
def notebook(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "IPython", SimpleNamespace(get_ipython=ZMQInteractiveShell))


@pytest.mark.usefixtures("notebook")
def test_a_notebook_shows_a_bar_that_goes_away(capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("tqdm")
    with shown(None) as report:
        report("preparing plain", 0.25)
        report("timing the executors", 0.9)
    said = capsys.readouterr().err
    assert " 25%|" in said or " 90%|" in said
    assert "timing the executors" in said and said.rstrip(" ").endswith("\r")


@pytest.mark.usefixtures("notebook")
def test_no_bar_where_none_is_wanted_and_none_without_tqdm(monkeypatch: pytest.MonkeyPatch) -> None:
    with shown(False) as report:
        assert report is silent
    monkeypatch.setitem(sys.modules, "tqdm.auto", None)
    with shown(None) as report:
        assert report is silent


def test_a_shell_on_a_terminal_is_no_notebook(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "IPython", SimpleNamespace(get_ipython=TerminalInteractiveShell))
    with shown(None) as report:  # pytest's stderr is no terminal
        assert report is silent
