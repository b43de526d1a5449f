"""How the inputs of a call lie in memory. What was captured or compiled trusts that they lie as the example did: where
that was contiguous, a capture has dropped `contiguous()`, and generated code counts with the strides."""

from __future__ import annotations

import torch
from torch import nn

from .signature import UnsupportedInput
from .tree import Layout


class Strides:
    """The strides of an example, given to the tensors of every call: by a copy, where they lie otherwise."""

    def __init__(self, tensors: list[torch.Tensor], *, written: bool) -> None:
        """`written` says that the code writes into its inputs: a copy would be written to instead."""
        self._strides = [tensor.stride() if tensor.layout is torch.strided else None for tensor in tensors]
        self._numbers = [tensor.is_floating_point() or tensor.is_complex() for tensor in tensors]
        self._written = written

    def fit(self, tensors: list[torch.Tensor]) -> bool:
        """Whether all lie as the example did, and hold their numbers as they are. It is asked at every call."""
        for tensor, stride, is_number in zip(tensors, self._strides, self._numbers, strict=True):
            if stride is not None and (tensor.stride() != stride or (is_number and _is_lazy(tensor))):
                return False
        return True

    def given_to(self, tensors: list[torch.Tensor]) -> list[torch.Tensor]:
        """The same numbers, lying as the example did."""
        return [self._laid_out(tensor, stride) for tensor, stride in zip(tensors, self._strides, strict=True)]

    def _laid_out(self, tensor: torch.Tensor, stride: tuple[int, ...] | None) -> torch.Tensor:
        if stride is None:
            return tensor
        if not _is_lazy(tensor) and _same_but_for_ones(tensor, stride):
            return tensor if tensor.stride() == stride else tensor.as_strided(tensor.shape, stride)
        if self._written:
            raise UnsupportedInput("It writes into its inputs, and one of them lies otherwise in memory.")
        return torch.empty_strided(tensor.shape, stride, dtype=tensor.dtype, device=tensor.device).copy_(tensor)


def _is_lazy(tensor: torch.Tensor) -> bool:
    """Whether its numbers are yet to be negated or conjugated."""
    return tensor.is_neg() or tensor.is_conj()


def _same_but_for_ones(tensor: torch.Tensor, stride: tuple[int, ...]) -> bool:
    """Along a dimension of size 1 nobody walks, so its stride does not matter."""
    return all(size == 1 or a == b for size, a, b in zip(tensor.shape, tensor.stride(), stride, strict=True))


def writes_into_inputs(module: nn.Module, layout: Layout, tensors: list[torch.Tensor]) -> bool:
    """Whether the module, when it is called, writes into one of its inputs. It is called once, on copies."""
    with torch.inference_mode(False), torch.no_grad():  # tensors made in inference mode do not count their writes
        copies = [tensor.clone() for tensor in tensors]
        versions = [tensor._version for tensor in copies]
        args, kwargs = layout.fill(copies)
        module(*args, **kwargs)
        return versions != [tensor._version for tensor in copies]
