"""Models whose calls cannot be compared: they draw random numbers in eval mode, write into what they are given, or
change their own state from call to call."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from refold.call_arguments import CallArguments
from refold.capture.model_state import ModelState
from refold.fx_private import join_path, version_of
from refold.nested import STRUCTURE, flatten, same_leaves
from refold.optimization.first_checks import first_call


def why_not_comparable(model: nn.Module, inputs: CallArguments) -> str | None:
    """Why two calls of a model cannot be compared; None if they can.

    One that draws random numbers can, if another call, with others, gives the same. (Kernels that add up in any order
    give something else too, without drawing.)"""
    own = inputs.copy()
    given = _structure(own)
    devices = [torch.device("cuda", i) for i in range(torch.cuda.device_count())] if torch.cuda.is_initialized() else []
    with torch.no_grad(), torch.random.fork_rng(devices=devices):
        before = _state(devices)
        first = first_call(model, own)
        draws = not all(map(torch.equal, before, _state(devices)))
        changes_arguments = _structure(own) != given
        if draws and not same_leaves(first, inputs.copy().given_to(model)):
            return "it draws random numbers, so two calls give different outputs and nothing can be compared"
    if changes_arguments:
        return "a call changes the dicts or lists among its arguments, which a graph cannot do"
    return None


def why_stateful(model: nn.Module, inputs: CallArguments) -> str | None:
    """What a second call changes in the model itself: a counter, a cache, a buffer that it writes. What the first call
    made once and for all is no such thing."""
    state, tensors = ModelState(model, parameters=False), _own_tensors(model)
    versions = {name: version_of(tensor) for name, tensor in tensors.items()}
    with torch.no_grad():
        inputs.copy().given_to(model)
    now = _own_tensors(model)
    changed = {name for name in now.keys() & tensors.keys() if now[name] is not tensors[name]}
    changed |= {name for name, version in versions.items() if version_of(tensors[name]) != version}
    names = sorted({*state.changes(), *changed})
    return f"a call changes its own state ({', '.join(names[:3])}), which later calls may read" if names else None


def _own_tensors(model: nn.Module) -> dict[str, torch.Tensor]:
    """The buffers and the tensors among the attributes of all modules. (Those made in inference mode count nothing.)"""
    found: dict[str, torch.Tensor] = {}
    for path, module in model.named_modules():
        held = {**vars(module), **dict(module.named_buffers(recurse=False))}
        tensors = {name: value for name, value in held.items() if isinstance(value, torch.Tensor)}
        found |= {join_path(path, name): tensor for name, tensor in tensors.items()}
    return found


def _structure(call: CallArguments) -> tuple[Any, list[Any]]:
    structure, leaves = flatten((call.args, call.kwargs), STRUCTURE)
    return structure, [None if isinstance(leaf, torch.Tensor) else leaf for leaf in leaves]


def _state(devices: list[torch.device]) -> list[torch.Tensor]:
    return [torch.get_rng_state(), *(torch.cuda.get_rng_state(device) for device in devices)]
