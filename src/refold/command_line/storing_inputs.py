"""Inputs as plain data: tensors in a safetensors file, and the way they are nested as JSON."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from refold.command_line.errors import WrongInput
from refold.command_line.wording import kind_of
from refold.optimizing.calls import Inputs

FILE = "inputs.safetensors"


class NotPlain(Exception):
    """An input that is neither a tensor nor plain data."""


def store_inputs(inputs: Inputs, folder: Path) -> Any:
    """Write the tensors of inputs; the return value says how they are nested. `NotPlain` where it cannot be said."""
    from safetensors.torch import save_file

    tensors: dict[str, torch.Tensor] = {}
    form = _form(inputs, tensors)
    own = {name: t.detach().cpu().clone(memory_format=torch.contiguous_format) for name, t in tensors.items()}
    save_file(own, folder / FILE)
    return form


def _form(value: Any, tensors: dict[str, torch.Tensor]) -> Any:
    if isinstance(value, torch.Tensor):
        name = str(len(tensors))
        tensors[name] = value
        return {"tensor": name}
    if type(value) in (list, tuple):
        return {type(value).__name__: [_form(v, tensors) for v in value]}
    if type(value) is dict and all(isinstance(key, str) for key in value):
        return {"dict": {key: _form(v, tensors) for key, v in value.items()}}
    if value is None or type(value) in (bool, int, float, str):
        return {"value": value}
    raise NotPlain(f"an input is {kind_of(value)}")


def restore_inputs(form: Any, folder: Path, device: torch.device) -> Inputs:
    """The inputs that a folder holds."""
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    try:
        tensors = {name: tensor.to(device) for name, tensor in load_file(folder / FILE).items()}
        inputs = _filled(form, tensors)
    except (OSError, SafetensorError, KeyError, TypeError, ValueError, RecursionError) as error:
        raise WrongInput(f"The inputs in {folder} cannot be read: {type(error).__name__}: {error}.") from None
    if not isinstance(inputs, dict | tuple):
        raise WrongInput(f"The inputs in {folder} are those of no call.")
    return inputs


def _filled(form: Any, tensors: dict[str, torch.Tensor]) -> Any:
    ((kind, content),) = form.items()
    if kind == "tensor":
        return tensors[content]
    if kind in ("list", "tuple"):
        items = [_filled(item, tensors) for item in content]
        return items if kind == "list" else tuple(items)
    if kind == "dict":
        return {str(key): _filled(item, tensors) for key, item in content.items()}
    if kind == "value" and (content is None or isinstance(content, bool | int | float | str)):
        return content
    raise ValueError(f"{kind!r} is no form of an input")
