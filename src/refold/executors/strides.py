"""How the inputs of a call lie in memory. What was captured or compiled trusts that they lie as the example did: where
that was contiguous, a capture has dropped `contiguous()`, and generated code counts with the strides."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn

from refold.errors import UnsupportedInput
from refold.nested import Tree, rebuild


class Strides:
    """The strides of an example, given to the tensors of every call: by a copy, where they lie otherwise. Of other
    sizes, dense ones with the dimensions in the example's order."""

    def __init__(self, tensors: list[torch.Tensor], *, written: bool) -> None:
        """`written` says that the code writes into its inputs: a copy would be written to instead."""
        self._layouts = [_Layout(tensor) if tensor.layout is torch.strided else None for tensor in tensors]
        self._numbers = [tensor.is_floating_point() or tensor.is_complex() for tensor in tensors]
        self._written = written

    def fit(self, tensors: list[torch.Tensor]) -> bool:
        """Whether all lie as the example did, and hold their numbers as they are. It runs at every call."""
        for tensor, layout, is_number in zip(tensors, self._layouts, self._numbers, strict=True):
            if layout is not None and (tensor.stride() != layout.at(tensor.shape) or (is_number and _is_lazy(tensor))):
                return False
        return True

    def given_to(self, tensors: list[torch.Tensor]) -> list[torch.Tensor]:
        """The same numbers, lying as the example did."""
        return [self._laid_out(tensor, layout) for tensor, layout in zip(tensors, self._layouts, strict=True)]

    def _laid_out(self, tensor: torch.Tensor, layout: _Layout | None) -> torch.Tensor:
        if layout is None:
            return tensor
        stride = layout.at(tensor.shape)
        if not _is_lazy(tensor) and _same_but_for_ones(tensor, stride):
            return tensor if tensor.stride() == stride else tensor.as_strided(tensor.shape, stride)
        if self._written:
            raise UnsupportedInput("It writes into its inputs, and one of them lies otherwise in memory.")
        return torch.empty_strided(tensor.shape, stride, dtype=tensor.dtype, device=tensor.device).copy_(tensor)


class _Layout:
    """How one tensor of the example lies in memory, and how one of other sizes is to lie."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self._shape, self._stride = tensor.shape, tensor.stride()
        dims = range(tensor.dim())
        order = sorted(dims, key=lambda dim: -self._stride[dim])  # the slowest first
        self._order: Sequence[int] = order if _dense(tensor.shape, order) == self._stride else dims

    def at(self, shape: torch.Size) -> tuple[int, ...]:
        """The strides of a tensor of this shape."""
        return self._stride if shape == self._shape else _dense(shape, self._order)


def _dense(shape: Sequence[int], order: Sequence[int]) -> tuple[int, ...]:
    """Strides without gaps, the dimensions in this order."""
    strides, step = [0] * len(shape), 1
    for dim in reversed(order):
        strides[dim] = step
        step *= max(1, shape[dim])
    return tuple(strides)


def _is_lazy(tensor: torch.Tensor) -> bool:
    """Whether its numbers are yet to be negated or conjugated."""
    return tensor.is_neg() or tensor.is_conj()


def _same_but_for_ones(tensor: torch.Tensor, stride: tuple[int, ...]) -> bool:
    """The stride of a dimension of size 1 does not matter."""
    return all(size == 1 or a == b for size, a, b in zip(tensor.shape, tensor.stride(), stride, strict=True))


def writes_into_inputs(module: nn.Module, tree: Tree, tensors: list[torch.Tensor]) -> bool:
    """Whether the module, when it is called, writes into one of its inputs. It is called once, on copies."""
    with torch.inference_mode(False), torch.no_grad():  # tensors made in inference mode do not count their writes
        copies = [tensor.clone() for tensor in tensors]
        versions = [tensor._version for tensor in copies]
        args, kwargs = rebuild(tree, copies)
        module(*args, **kwargs)
        return versions != [tensor._version for tensor in copies]
