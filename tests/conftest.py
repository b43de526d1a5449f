"""What all tests share: one thread a process (two run side by side), no decisions that are kept, and which tests are
slow.

A test is slow if it took longer than `SLOW_FROM` when durations were last written: `make durations` runs all of them
and writes `tests/slow.txt`. `make check` leaves slow tests out.
"""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch

torch.set_num_threads(1)
os.environ["REFOLD_CACHE"] = "off"  # the user's own is neither read nor written; tests of it have one of their own

SLOW_FROM = 0.35
SLOW_TESTS = Path(__file__).parent / "slow.txt"


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--write-slow", action="store_true", help=f"write the tests that take long into {SLOW_TESTS.name}")


def pytest_configure(config: pytest.Config) -> None:
    if config.getoption("--write-slow") and not hasattr(config, "workerinput"):
        config.pluginmanager.register(_Durations())


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    slow = set(SLOW_TESTS.read_text(encoding="utf-8").splitlines()) if SLOW_TESTS.exists() else set()
    for item in items:
        if item.nodeid in slow:
            item.add_marker(pytest.mark.slow)


class _Durations:
    """Adds up how long each test took, its fixtures included."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self.seconds[report.nodeid] = self.seconds.get(report.nodeid, 0.0) + report.duration

    def pytest_sessionfinish(self) -> None:
        slow = sorted(nodeid for nodeid, seconds in self.seconds.items() if seconds > SLOW_FROM)
        SLOW_TESTS.write_text("".join(f"{nodeid}\n" for nodeid in slow), encoding="utf-8")
