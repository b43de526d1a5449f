"""What generated graphs call where plain torch has no function that fits."""

from __future__ import annotations

import sys
from typing import Any

import torch
import torch.nn.functional as F
from torch.overrides import handle_torch_function, has_torch_function


def linear_with_batch_norm(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor,
    scale: torch.Tensor,
    shift: torch.Tensor,
    linear_first: bool,
) -> torch.Tensor:
    """A linear layer with a batch norm (`y = scale·x + shift` per channel) folded into it, for an input whose rank the
    graph does not tell. On (N, C) the folded layer is the whole computation. On (N, C, L) the batch norm's channels are
    axis 1 and the layer's features the last one: there the scale is taken out of the weight again and applied where it
    belongs."""
    tensors = (x, weight, bias, scale, shift)
    if has_torch_function(tensors):  # traced symbolically, as unpickling does: one call in the graph
        return handle_torch_function(linear_with_batch_norm, tensors, *tensors, linear_first)
    if x.dim() == 2:
        return F.linear(x, weight, bias)
    along = (-1,) + (1,) * (x.dim() - 2)
    if linear_first:
        plain = (F.linear(x, weight, bias) - shift) / scale
        return plain * scale.reshape(along) + shift.reshape(along)
    plain_weight = weight / scale
    normed = x * scale.reshape(along) + shift.reshape(along)
    return F.linear(normed, plain_weight, bias - plain_weight @ shift)


def class_named(module: str, name: str) -> Any:
    """The class of this name."""
    found: Any = sys.modules[module]
    for part in name.split("."):
        found = getattr(found, part)
    return found


def new_object(module: str, name: str, attributes: dict[str, Any]) -> Any:
    """A new object of the class of this name, with these attributes. (In words that torch.compile can follow.)"""
    made = object.__new__(class_named(module, name))
    for key, value in attributes.items():
        object.__setattr__(made, key, value)
    return made


def return_type(name: str, values: tuple[Any, ...]) -> Any:
    """What torch gives several values in, such as ``torch.return_types.topk``."""
    return getattr(torch.return_types, name)(values)
