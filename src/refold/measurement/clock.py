"""What a call costs, in seconds and in bytes, on the device it runs on."""

from __future__ import annotations

import ctypes
import gc
import itertools
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

Call = Callable[[], Any]

# A sample lasts at least this many times what reading the clock costs (or resolves), so the clock is below 0.1 % of it.
_CLOCK_SHARE = 1000
_CUDA_EVENT_RESOLUTION = 0.5e-6


def seconds_of(call: Call, times: int, device: torch.device) -> float:
    """The seconds that one call takes, as the mean over so many."""
    if device.type == "cuda":
        return _seconds_cuda(call, times, device)
    _synchronize(device)
    start = time.perf_counter()
    for _ in range(times):
        call()
    _synchronize(device)
    return (time.perf_counter() - start) / times


def _synchronize(device: torch.device) -> None:
    if device.type != "cpu":
        torch.accelerator.synchronize()


def _seconds_cuda(call: Call, times: int, device: torch.device) -> float:
    """Device events around the calls, on an idle device: what the launches cost is counted as well."""
    with torch.cuda.device(device):
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        torch.cuda.synchronize()
        begin.record()
        for _ in range(times):
            call()
        end.record()
        torch.cuda.synchronize()
        return begin.elapsed_time(end) / 1e3 / times


def shortest_sample(device: torch.device) -> float:
    """The seconds that a sample must last for the clock not to matter."""
    if device.type == "cuda":
        return _CLOCK_SHARE * _CUDA_EVENT_RESOLUTION
    ticks = [time.perf_counter() for _ in range(100)]
    return _CLOCK_SHARE * statistics.median(later - now for now, later in itertools.pairwise(ticks))


def peak_memory(call: Call, device: torch.device) -> int | None:
    """Bytes that one call needs above what was there before it; None where the system does not tell."""
    if device.type == "cuda":
        before = torch.cuda.memory_allocated(device)
        torch.cuda.reset_peak_memory_stats(device)
        call()
        return torch.cuda.max_memory_allocated(device) - before
    try:
        _give_back_free_memory()
        Path("/proc/self/clear_refs").write_text("5")  # resets the high-water mark of this process
        before = _status("VmRSS")
        call()
        return max(_status("VmHWM") - before, 0)
    except (OSError, KeyError, TypeError):  # TypeError: no such library handle on Windows
        return None


def used_memory(device: torch.device) -> int | None:
    """Bytes that this process has in use on the host, or that are in use on a GPU; None where the system does not
    tell."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        torch.cuda.empty_cache()
        free, total = torch.cuda.mem_get_info(device)
        return total - free
    try:
        gc.collect()
        _give_back_free_memory()
        return _status("VmRSS")
    except (OSError, KeyError, TypeError):  # as above
        return None


def _give_back_free_memory() -> None:
    """Memory that the allocator kept from earlier calls would hide what the next one needs."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)  # glibc only
    if trim is not None:
        trim(0)


def _status(key: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    table = dict(line.split(":", 1) for line in lines if ":" in line)
    return int(table[key].split()[0]) * 1024


@contextmanager
def without_collector(device: torch.device) -> Iterator[None]:
    """Garbage is collected before, not during: a collection would be charged to the call that happens to run. All of it
    where it may hold memory of a device, which runs short sooner; elsewhere what is young, since going through all
    that a process has imported takes longer than most measurements."""
    was_enabled = gc.isenabled()
    gc.collect(1 if device.type == "cpu" else 2)
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()
