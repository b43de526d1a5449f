"""Example inputs: what a user hands over, as the arguments of a call."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from refold.capturing.trees import Opaque, flatten
from refold.errors import RefoldError


class BadExample(RefoldError, TypeError):
    """The example inputs cannot be used to call the model."""


Inputs = dict[str, Any] | tuple[Any, ...]


def as_call(example_inputs: Any) -> Inputs:
    """A dict of keyword arguments, or a tuple of positional ones; a lone tensor is one positional argument."""
    if isinstance(example_inputs, torch.Tensor):
        return (example_inputs,)
    if isinstance(example_inputs, Mapping):  # a tokenizer's BatchEncoding is one
        return _checked(dict(example_inputs))
    if isinstance(example_inputs, tuple | list):
        return _checked(tuple(example_inputs))
    raise BadExample(
        f"example_inputs must be a dict of keyword arguments, a tuple of positional ones or a tensor, "
        f"not a {type(example_inputs).__name__}."
    )


def _checked(inputs: Inputs) -> Inputs:
    """Refuse objects of their own kind, such as a cache that a decoder goes on with, before any call changes them."""
    try:
        flatten(inputs, [])
    except Opaque as opaque:
        raise BadExample(
            f"a call may write into one of the example inputs: {opaque}. Give tensors, plain values, or lists, tuples, "
            "dicts and dataclasses of them. Calls with other inputs run the original model."
        ) from None
    return inputs


def split(inputs: Inputs) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Positional and keyword arguments."""
    return ((), inputs) if isinstance(inputs, dict) else (inputs, {})


def device_of_call(model: torch.nn.Module, inputs: Inputs) -> torch.device:
    """Where the model runs: where its first parameter is, else where its first input is."""
    tensors = [*model.parameters(), *model.buffers()]
    tensors += [v for v in (inputs.values() if isinstance(inputs, dict) else inputs) if isinstance(v, torch.Tensor)]
    return tensors[0].device if tensors else torch.device("cpu")
