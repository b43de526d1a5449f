"""Optimized models in servers: many threads, an event loop, workers that are forked and workers that are spawned."""

from __future__ import annotations

import asyncio
import multiprocessing
import os
import signal
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from torch import nn

import refold
from refold.optimization.optimized_module import OptimizedModule

SIZES = range(2, 10)


def served() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4)).eval()


def optimized(model: nn.Module) -> Any:
    return refold.optimize(model, (torch.randn(3, 8),), effort="quick", backend="plain", on_fallback="raise")


def request(rows: int) -> torch.Tensor:
    return torch.randn(rows, 8, generator=torch.Generator().manual_seed(rows))


@pytest.fixture(scope="module")
def server() -> Iterator[tuple[Any, dict[int, torch.Tensor]]]:
    """An optimized model, and what it must answer for requests of several sizes."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # before anything is computed here, so that processes can be forked from this one
    model = served()
    with torch.no_grad():
        answers = {rows: model(request(rows)) for rows in SIZES}
    yield optimized(model), answers
    torch.set_num_threads(threads)


def is_right(fast: Any, answers: dict[int, torch.Tensor], rows: int) -> bool:
    return torch.allclose(fast(request(rows)), answers[rows], atol=1e-5)


def test_eight_threads_get_their_own_answers(server: Any) -> None:
    fast, answers = server
    before, start = fast.report.calls.fast, threading.Barrier(8)

    def serve(rows: int) -> bool:
        start.wait()
        return all(is_right(fast, answers, rows) for _ in range(20))

    with ThreadPoolExecutor(8) as pool:
        assert all(pool.map(serve, SIZES))
    assert fast.report.calls.fast == before + 160


def test_an_event_loop_with_an_executor(server: Any) -> None:
    fast, answers = server

    async def serve() -> list[torch.Tensor]:
        loop = asyncio.get_running_loop()
        with ThreadPoolExecutor(4) as pool:
            return await asyncio.gather(*(loop.run_in_executor(pool, fast, request(rows)) for rows in SIZES))

    for rows, found in zip(SIZES, asyncio.run(serve()), strict=True):
        assert torch.allclose(found, answers[rows], atol=1e-5) and not found.requires_grad


@pytest.mark.skipif(not hasattr(os, "fork"), reason="this system does not fork")
def test_a_forked_worker_uses_what_was_prepared_before(server: Any) -> None:
    """As gunicorn does with `preload_app`: prepared once, and used by workers that are forked from there."""
    fast, answers = server
    before = fast.report.calls.fast
    child = os.fork()
    if child == 0:
        signal.alarm(30)
        right = all(is_right(fast, answers, rows) for rows in SIZES) and fast.report.calls.fast == before + len(SIZES)
        os._exit(0 if right else 1)
    assert os.waitpid(child, 0)[1] == 0
    assert fast.report.calls.fast == before  # each process counts its own calls
    assert is_right(fast, answers, 5)


def work(model: nn.Module, answers: dict[int, torch.Tensor], said: Any) -> None:
    """What a spawned worker does: it gets the original, and prepares it by itself."""
    torch.set_num_threads(1)
    arrived = type(model) is nn.Sequential
    fast = optimized(model)
    said.send((arrived, all(is_right(fast, answers, rows) for rows in SIZES), fast.report.calls.fast))


def test_a_spawned_worker_gets_the_original_and_prepares_it(server: Any) -> None:
    fast, answers = server
    assert isinstance(fast, OptimizedModule)
    context = multiprocessing.get_context("spawn")
    here, there = context.Pipe()
    child = context.Process(target=work, args=(fast, answers, there))
    child.start()
    there.close()
    found = here.recv()
    child.join()
    assert child.exitcode == 0 and found == (True, True, len(SIZES))
