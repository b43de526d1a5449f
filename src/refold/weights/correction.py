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
_PIECE = 5 << 12
_PLACES = torch.tensor([1, 3, 9, 27, 81], dtype=torch.uint8)


@dataclass(frozen=True)
class Correction:
    """What must be added, in ulps, to a prediction."""

    symbols: bytes
    positions: bytes
    values: bytes

    @property
    def nbytes(self) -> int:
        """The bytes that this correction occupies."""
        return len(self.symbols) + len(self.positions) + len(self.values)


class CorrectionEncoder:
    """Makes the correction for a tensor from a prediction that comes piece by piece."""

    def __init__(self, true: torch.Tensor) -> None:
        self._true = _words(true)
        self._place = 0
        self._left: torch.Tensor | None = None
        self._far: list[torch.Tensor] = []
        self._any = False
        self._coder = zlib.compressobj(9, zlib.DEFLATED, -9, 8, zlib.Z_HUFFMAN_ONLY)
        self._symbols: list[bytes] = []

    def add(self, predicted: torch.Tensor) -> None:
        """Take the next piece of the prediction."""
        for words in _words(predicted).split(_PIECE):
            stop = self._place + words.numel()
            delta = _flip(self._true[self._place : stop]) - _flip(words)
            far = (delta < -1) | (delta > 1)
            if bool(far.any()):
                self._far.append(far.nonzero().reshape(-1) + self._place)
            self._code(delta.to(torch.int8).masked_fill_(far, 0))
            self._place = stop

    def _code(self, symbols: torch.Tensor, *, last: bool = False) -> None:
        """Pack whole groups of five; what is left over waits for the next piece."""
        if self._left is not None:
            symbols = torch.cat([self._left, symbols])
        whole = symbols.numel() if last else symbols.numel() // 5 * 5
        self._left = symbols[whole:].clone()
        symbols = symbols[:whole]
        self._any = self._any or bool(symbols.any())
        if whole:
            self._symbols.append(self._coder.compress(_bytes(_pack(symbols))))

    def finish(self) -> Correction:
        """The correction; all zeros (a scale that is a power of two) cost nothing."""
        self._code(torch.empty(0, dtype=torch.int8, device=self._true.device), last=True)
        where = torch.cat(self._far) if self._far else torch.empty(0, dtype=torch.int64)
        steps = torch.diff(where, prepend=where.new_zeros(1))
        self._symbols.append(self._coder.flush())
        del self._coder  # its buffers are larger than what it made
        symbols = b"".join(self._symbols) if self._any else b""
        return Correction(symbols, _squeeze(steps), _squeeze(self._true[where]))


def apply_correction(predicted: torch.Tensor, correction: Correction) -> torch.Tensor:
    """The true weights: the prediction, corrected."""
    return correct_in_place(predicted.clone(memory_format=torch.contiguous_format), correction)


def correct_in_place(predicted: torch.Tensor, correction: Correction) -> torch.Tensor:
    """The same, written over the prediction, which must be contiguous."""
    words, count = _words(predicted), predicted.numel()
    stream = _Inflating(correction.symbols, -(-count // 5), -15) if correction.symbols else None
    for start in range(0, count if stream else 0, _PIECE):
        part = words[start : start + _PIECE]
        assert stream is not None
        small = _unpack(stream.read(-(-part.numel() // 5)), part.numel()).to(part.device)
        part.copy_(_flip(_flip(part) + small.to(part.dtype)))
    where = torch.cumsum(_expand(correction.positions, torch.int64, count), 0)
    if where.numel():
        words[where.to(words.device)] = _expand(correction.values, words.dtype, count).to(words.device)
    return predicted


def _words(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().contiguous().reshape(-1).view(_INT[tensor.element_size()])


def _flip(words: torch.Tensor) -> torch.Tensor:
    """Sign-magnitude to two's complement and back (it is its own inverse)."""
    info = torch.iinfo(words.dtype)
    return torch.where(words < 0, words ^ info.max, words)


def _pack(symbols: torch.Tensor) -> torch.Tensor:
    """-1, 0, +1 five to a byte."""
    digits = (symbols + 1).to(torch.uint8).cpu()
    digits = torch.nn.functional.pad(digits, (0, -digits.numel() % 5), value=1).reshape(-1, 5)
    return (digits * _PLACES).sum(1, dtype=torch.uint8)


def _unpack(packed: bytes, count: int) -> torch.Tensor:
    body = torch.frombuffer(bytearray(packed), dtype=torch.uint8)
    digits = (body[:, None] // _PLACES) % 3
    return digits.reshape(-1)[:count].to(torch.int8) - 1


def _squeeze(values: torch.Tensor) -> bytes:
    if not values.numel():
        return b""
    coder = zlib.compressobj(6, zlib.DEFLATED, 12, 6)  # a small window: there is little to find again in these numbers
    return coder.compress(_bytes(values.cpu())) + coder.flush()


def _expand(packed: bytes, dtype: torch.dtype, count: int) -> torch.Tensor:
    """At most `count` numbers."""
    if not packed:
        return torch.empty(0, dtype=dtype)
    limit = count * dtype.itemsize
    body = _Inflating(packed, limit, 15).read(limit)
    return torch.frombuffer(bytearray(body), dtype=dtype)


class _Inflating:
    """Decompresses at most that many bytes: a correction from a file may lie about its size."""

    def __init__(self, packed: bytes, limit: int, window: int) -> None:
        self._coder = zlib.decompressobj(window)
        self._waiting = packed
        self._left = limit

    def read(self, size: int) -> bytes:
        """The next bytes."""
        found = self._coder.decompress(self._waiting, size) if size else b""
        self._waiting = self._coder.unconsumed_tail
        self._left -= len(found)
        if self._left <= 0 and not self._coder.eof and self._coder.decompress(self._waiting, 1):
            raise ValueError("a stored correction is longer than the weights that it corrects")
        return found


def _bytes(tensor: torch.Tensor) -> bytes:
    return bytes(raw_bytes(flat_bytes(tensor)))
