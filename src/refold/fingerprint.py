"""A fingerprint of a tensor's bits: the same on every device and in every process, changed by any write.

Version counters are not enough to know that weights were changed: writes through `.data` do not count there.
"""

from __future__ import annotations

import ctypes
import hashlib
import sys
from typing import Any

import torch
from torch.nn.parameter import is_lazy

_CHUNK = 1 << 26


def is_sharded(tensor: object) -> bool:
    """Whether a tensor is a DTensor, of which a process holds a part. (Where there is one, its module is loaded.)"""
    kind = getattr(sys.modules.get("torch.distributed.tensor"), "DTensor", None)
    return kind is not None and isinstance(tensor, kind)


def fingerprint(tensor: torch.Tensor) -> str:
    """The tensor's dtype, shape and a 128-bit hash of its bits, as one short string. A sharded tensor is gathered, so
    that it has the same one as when it is whole, and the same on every rank."""
    if is_lazy(tensor):
        return f"{tensor.dtype}:lazy"
    head = f"{str(tensor.dtype).removeprefix('torch.')}{list(tensor.shape)}".replace(" ", "")
    if tensor.is_meta:
        return f"{head}:meta"
    digest = hashlib.blake2b(digest_size=16)
    tensor = _whole(tensor)
    for chunk in flat_bytes(tensor).split(_CHUNK):
        digest.update(raw_bytes(chunk.cpu()))
    return f"{head}:{digest.hexdigest()}"


def same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Whether two tensors agree in dtype, shape and every bit (NaN payloads and the sign of zero included). Of sharded
    tensors that lie alike, each rank compares its own shards."""
    if a.dtype != b.dtype or a.shape != b.shape or a.is_meta != b.is_meta:
        return False
    if is_sharded(a) or is_sharded(b):
        return _same_shards(a, b)
    if a.is_meta or a.numel() == 0:
        return True
    if a.device == b.device and a.data_ptr() == b.data_ptr() and a.stride() == b.stride():
        return True
    left, right = flat_bytes(a), flat_bytes(b)
    return bool(torch.equal(left, right.to(left.device)))


def _whole(tensor: Any) -> torch.Tensor:
    whole: torch.Tensor = tensor.detach().full_tensor() if is_sharded(tensor) else tensor
    return whole


def _same_shards(a: Any, b: Any) -> bool:
    if not (is_sharded(a) and is_sharded(b)) or (a.device_mesh, a.placements) != (b.device_mesh, b.placements):
        return False
    return same_bits(a.detach().to_local(), b.detach().to_local())


def flat_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """A tensor's bytes in the order of its elements, as a flat uint8 tensor (a copy only where it must be)."""
    flat = tensor.detach().resolve_conj().resolve_neg().contiguous().reshape(-1)
    if flat.stride(0) != 1:  # a single element counts as contiguous whatever its stride
        flat = flat.as_strided(flat.shape, (1,))
    return flat.view(torch.uint8)


def raw_bytes(flat: torch.Tensor) -> memoryview:
    """The memory of a flat uint8 tensor on the CPU, without numpy; the view keeps the tensor alive."""
    if flat.numel() == 0:
        return memoryview(b"")
    memory = (ctypes.c_ubyte * flat.numel()).from_address(flat.data_ptr())
    memory.owner = flat  # type: ignore[attr-defined]
    return memoryview(memory).cast("B")
