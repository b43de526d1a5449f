"""The correction that makes an inverse computed in floating point exact, bit for bit, in a few per cent of the bytes.

A prediction of the true weights is nearly always right or wrong by one unit in the last place. The difference in ulps,
one of -1, 0, +1, is packed five to a byte (3⁵ = 243) and entropy-coded; the rest is kept raw, with its positions.
"""

from __future__ import annotations

import zlib
from dataclasses import dataclass

import torch

from refold.fingerprint import flat_bytes, raw_bytes

_INT = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_PLACES = torch.tensor([1, 3, 9, 27, 81], dtype=torch.uint8)


@dataclass(frozen=True)
class Residue:
    """What must be added, in ulps, to a prediction."""

    symbols: bytes
    positions: bytes
    values: bytes

    @property
    def nbytes(self) -> int:
        """The bytes that this correction occupies."""
        return len(self.symbols) + len(self.positions) + len(self.values)


def correct_by(true: torch.Tensor, predicted: torch.Tensor) -> Residue:
    """The residue that turns `predicted` into `true`; both have the same dtype and shape."""
    delta = _ordered(true) - _ordered(predicted)
    far = (delta < -1) | (delta > 1)
    where = far.nonzero().reshape(-1)
    small = torch.where(far, torch.zeros_like(delta), delta).to(torch.int8)
    steps = torch.diff(where, prepend=where.new_zeros(1))
    values = _words(true)[where]
    return Residue(_pack(small), _squeeze(steps), _squeeze(values))


def apply_residue(predicted: torch.Tensor, residue: Residue) -> torch.Tensor:
    """The true weights: the prediction, corrected."""
    count = predicted.numel()
    small = _unpack(residue.symbols, count).to(predicted.device)
    words = _ordered(predicted)
    words += small.to(words.dtype)
    words = _disordered(words)
    where = torch.cumsum(_expand(residue.positions, torch.int64, count), 0)
    if where.numel():
        words[where.to(words.device)] = _expand(residue.values, words.dtype, count).to(words.device)
    return words.view(predicted.dtype).reshape(predicted.shape)


def _words(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().contiguous().reshape(-1).view(_INT[tensor.element_size()])


def _ordered(tensor: torch.Tensor) -> torch.Tensor:
    """Integers in the order of the floats: neighbours differ by one."""
    return _flip(_words(tensor))


def _disordered(words: torch.Tensor) -> torch.Tensor:
    return _flip(words)


def _flip(words: torch.Tensor) -> torch.Tensor:
    """Sign-magnitude to two's complement and back (it is its own inverse)."""
    info = torch.iinfo(words.dtype)
    return torch.where(words < 0, words ^ info.max, words)


def _pack(symbols: torch.Tensor) -> bytes:
    """-1, 0, +1 five to a byte, then Huffman; all zeros (a scale that is a power of two) cost nothing."""
    if not bool(symbols.any()):
        return b""
    digits = (symbols + 1).to(torch.uint8).cpu()
    digits = torch.nn.functional.pad(digits, (0, -digits.numel() % 5), value=1).reshape(-1, 5)
    packed = (digits * _PLACES).sum(1, dtype=torch.uint8)
    coder = zlib.compressobj(9, zlib.DEFLATED, -15, 9, zlib.Z_HUFFMAN_ONLY)
    return coder.compress(_bytes(packed)) + coder.flush()


def _unpack(packed: bytes, count: int) -> torch.Tensor:
    if not packed:
        return torch.zeros(count, dtype=torch.int8)
    body = torch.frombuffer(_inflate(packed, -(-count // 5), -15), dtype=torch.uint8)
    digits = (body[:, None] // _PLACES) % 3
    return digits.reshape(-1)[:count].to(torch.int8) - 1


def _squeeze(values: torch.Tensor) -> bytes:
    return zlib.compress(_bytes(values.cpu()), 6) if values.numel() else b""


def _expand(packed: bytes, dtype: torch.dtype, count: int) -> torch.Tensor:
    """At most `count` numbers."""
    if not packed:
        return torch.empty(0, dtype=dtype)
    return torch.frombuffer(_inflate(packed, count * dtype.itemsize, 15), dtype=dtype)


def _inflate(packed: bytes, limit: int, window: int) -> bytearray:
    """Decompress at most that many bytes: a correction from a file may lie about its size."""
    coder = zlib.decompressobj(window)
    body = bytearray(coder.decompress(packed, limit))
    if not coder.eof and coder.decompress(coder.unconsumed_tail, 1):
        raise ValueError("a stored correction is longer than the weights that it corrects")
    return body


def _bytes(tensor: torch.Tensor) -> bytes:
    return bytes(raw_bytes(flat_bytes(tensor)))
