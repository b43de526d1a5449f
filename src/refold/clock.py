"""What a call costs, in seconds and in bytes, on the device it runs on."""

from __future__ import annotations

import ctypes
import gc
import itertools
import statistics
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import nn

Inputs = Mapping[str, Any] | Sequence[Any] | torch.Tensor
Call = Callable[[], Any]

# A sample lasts at least this many times what reading the clock costs (or resolves), so the clock is below 0.1 % of it.
_CLOCK_SHARE = 1000
_CUDA_EVENT_RESOLUTION = 0.5e-6


def bind(contender: Callable[..., Any], inputs: Inputs) -> Call:
    """The contender and its inputs as one call without arguments."""
    if isinstance(inputs, torch.Tensor):
        return lambda: contender(inputs)
    if isinstance(inputs, Mapping):
        return lambda: contender(**inputs)
    return lambda: contender(*inputs)


def seconds_of(call: Call, times: int, device: torch.device) -> float:
    if device.type == "cuda":
        return _seconds_cuda(call, times, device)
    synchronize = torch.accelerator.synchronize if device.type != "cpu" else _nothing
    synchronize()
    start = time.perf_counter()
    for _ in range(times):
        call()
    synchronize()
    return (time.perf_counter() - start) / times


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


def _nothing() -> None:
    return None


def shortest_sample(device: torch.device) -> float:
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


def _give_back_free_memory() -> None:
    """Memory that the allocator kept from earlier calls would hide what the next one needs."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)  # glibc only
    if trim is not None:
        trim(0)


def _status(key: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    table = dict(line.split(":", 1) for line in lines if ":" in line)
    return int(table[key].split()[0]) * 1024


def device_of(contenders: Iterable[Callable[..., Any]], inputs: Inputs) -> torch.device:
    """The accelerator that anything given lives on, else the CPU."""
    found = [tensor.device for tensor in _tensors(inputs)]
    for contender in contenders:
        if isinstance(contender, nn.Module):
            found += [tensor.device for tensor in contender.parameters()]
    return next((device for device in found if device.type not in ("cpu", "meta")), torch.device("cpu"))


def _tensors(value: Any) -> Iterator[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, Mapping):
        yield from (tensor for item in value.values() for tensor in _tensors(item))
    elif isinstance(value, (list, tuple)):
        yield from (tensor for item in value for tensor in _tensors(item))


@contextmanager
def without_collector() -> Iterator[None]:
    """Garbage is collected before, not during: a collection would be charged to whoever happens to run."""
    was_enabled = gc.isenabled()
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()
