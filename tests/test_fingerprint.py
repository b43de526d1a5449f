"""Fingerprints and comparisons of bits."""

from __future__ import annotations

import math
import struct

import pytest
import torch

from refold.fingerprint import fingerprint, same_bits

DTYPES = [torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.int8, torch.int64, torch.bool]
DTYPES += [torch.complex64, torch.float8_e4m3fn]


@pytest.mark.parametrize("dtype", DTYPES)
def test_every_dtype(dtype: torch.dtype) -> None:
    tensor = torch.arange(6).reshape(2, 3).to(dtype)
    assert fingerprint(tensor) == fingerprint(tensor.clone()) and same_bits(tensor, tensor.clone())
    assert fingerprint(tensor) != fingerprint(tensor.reshape(3, 2))


def test_layout_does_not_count_and_every_element_does() -> None:
    tensor = torch.randn(5, 7)
    assert fingerprint(tensor) == fingerprint(tensor.t().contiguous().t())
    assert fingerprint(tensor) == fingerprint(torch.cat([tensor, tensor], 1)[:, :7])
    for i in range(35):
        other = tensor.clone()
        other.view(-1)[i] = torch.nextafter(other.view(-1)[i], torch.tensor(9.0))
        assert fingerprint(other) != fingerprint(tensor) and not same_bits(other, tensor)


def test_single_elements_of_odd_stride() -> None:
    column = torch.randn(1, 5)[:, -1]
    assert fingerprint(column) == fingerprint(column.clone())
    assert fingerprint(torch.empty(0)) == fingerprint(torch.ones(3)[3:])


def test_sign_of_zero_and_payload_of_nan() -> None:
    assert not same_bits(torch.tensor([0.0]), torch.tensor([-0.0]))
    assert fingerprint(torch.tensor([0.0])) != fingerprint(torch.tensor([-0.0]))
    odd = torch.frombuffer(bytearray(struct.pack("<I", 0x7FC00001)), dtype=torch.float32)
    usual = torch.tensor([math.nan])
    assert same_bits(usual, usual.clone()) and not same_bits(odd, usual) and fingerprint(odd) != fingerprint(usual)


def test_dtype_and_device_kind_count() -> None:
    assert not same_bits(torch.zeros(2), torch.zeros(2, dtype=torch.int32))
    assert not same_bits(torch.zeros(2), torch.zeros(2, device="meta"))
    assert fingerprint(torch.zeros(2, device="meta")).endswith(":meta")


def test_a_write_through_data_is_seen() -> None:
    parameter = torch.nn.Parameter(torch.ones(3))
    mark, version = fingerprint(parameter), parameter._version
    parameter.data[1] = 2
    assert parameter._version == version and fingerprint(parameter) != mark
