"""How exact a contender is: its error against a float64 run of the eager model, beside the error of eager itself."""

from __future__ import annotations

import copy
from typing import Any

import torch
from suite import Inputs
from torch import nn
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree


class EverythingInDouble(TorchFunctionMode):
    """Models cast to float32 inside (norms, rotary angles); a float64 reference must not be rounded there."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.Tensor.float:
            func = torch.Tensor.double
        args, kwargs = pytree.tree_map_only(torch.dtype, _widen, (args, kwargs or {}))
        return func(*args, **kwargs)


def _widen(dtype: torch.dtype) -> torch.dtype:
    return torch.float64 if dtype.is_floating_point else dtype


def reference(model: nn.Module, inputs: Inputs) -> list[torch.Tensor]:
    """The outputs of the eager model in float64."""
    double = copy.deepcopy(model).double()
    wide = {name: value.double() if value.is_floating_point() else value for name, value in inputs.items()}
    default = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        with torch.no_grad(), EverythingInDouble():
            return float_leaves(double(**wide))
    finally:
        torch.set_default_dtype(default)


def float_leaves(output: Any) -> list[torch.Tensor]:
    """The floating-point tensors of an output in order, whatever holds them."""
    leaves = [torch.as_tensor(leaf) for leaf in pytree.tree_leaves(output) if leaf is not None]
    return [leaf for leaf in leaves if leaf.is_floating_point()]


def relative_error(output: Any, expected: list[torch.Tensor]) -> float | None:
    """The largest relative error over the outputs, in the Euclidean norm; None where the outputs are others."""
    got = float_leaves(output)
    if [leaf.shape for leaf in got] != [leaf.shape for leaf in expected]:
        return None
    return max(_error(mine, its) for mine, its in zip(got, expected, strict=True))


def _error(mine: torch.Tensor, its: torch.Tensor) -> float:
    difference = torch.linalg.vector_norm(mine.to(its.device).double() - its)
    return (difference / torch.linalg.vector_norm(its)).item()
