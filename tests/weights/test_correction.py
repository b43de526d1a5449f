"""The correction of a prediction: exact for any bits, small where the prediction is nearly right."""

from __future__ import annotations

import dataclasses
import zlib

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from refold.fingerprint import same_bits
from refold.weights.correction import Correction, CorrectionEncoder, apply_correction, correct_in_place

DTYPES = [torch.float32, torch.float16, torch.bfloat16, torch.float64, torch.float8_e4m3fn]
INTS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def correction_of(true: torch.Tensor, predicted: torch.Tensor) -> Correction:
    coder = CorrectionEncoder(true)
    coder.add(predicted)
    return coder.finish()


def any_bits(count: int, dtype: torch.dtype, seed: int) -> torch.Tensor:
    """Numbers of any bits: NaNs with payloads, infinities, subnormals, both zeros."""
    words = INTS[dtype.itemsize]
    info = torch.iinfo(words)
    generator = torch.Generator().manual_seed(seed)
    high = info.max if words is torch.int64 else info.max + 1
    bits = torch.randint(info.min, high, (count,), generator=generator, dtype=torch.int64).to(words)
    return bits.view(dtype)


def steps(tensor: torch.Tensor, by: torch.Tensor) -> torch.Tensor:
    """Numbers some ulps away, computed on the line of all floats."""
    words = tensor.view(INTS[tensor.element_size()])
    high = torch.iinfo(words.dtype).max
    line = torch.where(words < 0, words ^ high, words) + by.to(words.dtype)
    return torch.where(line < 0, line ^ high, line).view(tensor.dtype)


@given(st.integers(0, 40), st.sampled_from(DTYPES), st.integers(0, 2**31), st.integers(0, 2**31))
@settings(max_examples=100, deadline=None)
def test_any_prediction_of_anything(count: int, dtype: torch.dtype, a: int, b: int) -> None:
    true, predicted = any_bits(count, dtype, a), any_bits(count, dtype, b)
    kept = predicted.clone()
    assert same_bits(apply_correction(predicted, correction_of(true, predicted)), true)
    assert same_bits(predicted, kept)


@given(st.lists(st.sampled_from([-2, -1, 0, 1, 2]), min_size=1, max_size=60), st.sampled_from(DTYPES[:4]))
@settings(max_examples=100, deadline=None)
def test_few_ulps_around_zero_and_elsewhere(deltas: list[int], dtype: torch.dtype) -> None:
    start = torch.tensor([0.0, -0.0, 1.0, -1.5] * len(deltas), dtype=dtype)[: len(deltas)]
    true = steps(start, torch.tensor(deltas))
    correction = correction_of(true, start)
    assert same_bits(apply_correction(start, correction), true)
    assert bool(correction.positions) == any(abs(d) > 1 for d in deltas)
    assert bool(correction.symbols) == any(abs(d) == 1 for d in deltas)


def test_more_than_one_piece_and_pieces_of_any_size() -> None:
    torch.manual_seed(0)
    true = torch.randn(23_456)
    predicted = steps(true, torch.randint(-2, 3, true.shape))
    coder = CorrectionEncoder(true)
    for piece in predicted.split([1, 7_000, 3, 9_999, 6_453]):
        coder.add(piece)
    correction = coder.finish()
    assert correction == correction_of(true, predicted)
    assert same_bits(apply_correction(predicted, correction), true)
    work = predicted.clone()
    assert correct_in_place(work, correction) is work and same_bits(work, true)


def test_it_is_small() -> None:
    torch.manual_seed(0)
    true = torch.randn(100_000)
    right = correction_of(true, true.clone())
    assert right.nbytes == 0
    wrong = torch.where(torch.rand(true.shape) < 0.11, 1, 0)  # 89 % of elements need no correction
    nearly = correction_of(true, steps(true, wrong))
    assert 0 < nearly.nbytes * 8 < 0.9 * true.numel()


def test_rows_and_columns() -> None:
    torch.manual_seed(0)
    true = torch.randn(12, 30).t()
    predicted = steps(true.contiguous(), torch.ones(30, 12, dtype=torch.int32))
    assert same_bits(apply_correction(predicted, correction_of(true, predicted)), true)


@pytest.mark.parametrize("part", ["symbols", "values", "positions"])
def test_one_that_lies_about_its_size_is_refused(part: str) -> None:
    torch.manual_seed(0)
    long, short = torch.randn(50_000), torch.randn(100)
    big = correction_of(
        long, steps(long, torch.randint(-1, 2, long.shape)) if part == "symbols" else torch.randn(50_000)
    )
    small = correction_of(short, torch.randn(100))
    with pytest.raises((ValueError, RuntimeError, IndexError)):
        apply_correction(short, dataclasses.replace(small, **{part: getattr(big, part)}))


def test_one_that_expands_without_end_is_refused() -> None:
    coder = zlib.compressobj(9, zlib.DEFLATED, -15)
    bomb = coder.compress(bytes(1 << 24)) + coder.flush()
    with pytest.raises(ValueError, match="longer than the weights"):
        apply_correction(torch.randn(10), Correction(bomb, b"", b""))
    with pytest.raises(ValueError, match="longer than the weights"):
        apply_correction(torch.randn(10), Correction(b"", zlib.compress(bytes(1 << 24)), b""))
