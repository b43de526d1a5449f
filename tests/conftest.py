"""What all tests share: one thread a process (two run side by side), no decisions that are kept, nothing done again and
again that is the same each time, and which tests are slow.

A test is slow if it took more than `SLOW_FROM` seconds of processor time, with its fixtures and the processes that it
started, when that was last written: `make durations` runs all tests and writes `tests/slow.txt`. `make check` leaves
slow tests out. Processor time and not the clock, because others may use the machine meanwhile.
"""

from __future__ import annotations

import contextlib
import functools
import gc
import os
import resource
import time
from collections.abc import Generator
from pathlib import Path

import pytest
import torch

torch.set_num_threads(1)
os.environ["REFOLD_CACHE"] = "off"  # the user's own is neither read nor written; tests of it have one of their own

SLOW_FROM = 0.14
SLOW_TESTS = Path(__file__).parent / "slow.txt"
LONGEST = ("tests/distributed/", "tests/examples/")  # run first: nothing would be left to run beside them at the end


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--write-slow", action="store_true", help=f"write the tests that take long into {SLOW_TESTS.name}")


def pytest_configure(config: pytest.Config) -> None:
    _look_up_onnx_operators_once()
    if config.getoption("--write-slow") and not hasattr(config, "workerinput"):
        config.pluginmanager.register(_Durations())


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    items.sort(key=lambda item: not item.nodeid.startswith(LONGEST))
    slow = set(SLOW_TESTS.read_text(encoding="utf-8").splitlines()) if SLOW_TESTS.exists() else set()
    for item in items:
        if item.nodeid in slow:
            item.add_marker(pytest.mark.slow)


def _look_up_onnx_operators_once() -> None:
    """torch looks up all operators of ONNX in every export, which takes longer than a small model does."""
    with contextlib.suppress(ImportError, AttributeError):  # another version of torch does so elsewhere
        from torch.onnx._internal._lazy_import import onnxscript_apis as apis

        apis.get_torchlib_ops = functools.cache(lambda: type(apis).__getattr__(apis, "get_torchlib_ops")())


def pytest_collection_finish() -> None:
    gc.callbacks.append(_Garbage.time_collection)
    _Garbage.keep_what_is_there()


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_protocol(item: pytest.Item) -> Generator[None, object, object]:
    item.stash[_BEGAN] = _processor_time()
    done = yield
    if _Garbage.spent > _Garbage.cost:
        _Garbage.keep_what_is_there()
    return done


class _Garbage:
    """Every job that is measured collects garbage, and looks through all that was imported and remembered since the
    process began: in the end that took longer than all else. What outlives a test is looked at no more, until looking
    at the rest has taken as long as it takes to look through everything again: else what died since would stay."""

    began = 0.0
    spent = 0.0
    cost = 0.0

    @classmethod
    def time_collection(cls, phase: str, info: dict[str, int]) -> None:
        if phase == "start":
            cls.began = time.perf_counter()
        elif info["generation"] == 2:
            cls.spent += time.perf_counter() - cls.began

    @classmethod
    def keep_what_is_there(cls) -> None:
        cls.spent = 0.0
        gc.unfreeze()
        gc.collect()
        gc.freeze()
        cls.cost, cls.spent = cls.spent, 0.0


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    report = yield
    if report.when == "teardown":
        report.processor_time = _processor_time() - item.stash[_BEGAN]
    return report


_BEGAN = pytest.StashKey[float]()


def _processor_time() -> float:
    """Seconds that this process and those that it waited for have computed."""
    used = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(each.ru_utime + each.ru_stime for each in used)


class _Durations:
    """Notes which tests took long."""

    def __init__(self) -> None:
        self.slow: set[str] = set()

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if getattr(report, "processor_time", 0.0) > SLOW_FROM:
            self.slow.add(report.nodeid)

    def pytest_sessionfinish(self) -> None:
        SLOW_TESTS.write_text("".join(f"{nodeid}\n" for nodeid in sorted(self.slow)), encoding="utf-8")
