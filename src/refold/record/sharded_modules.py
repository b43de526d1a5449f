"""Modules whose parameters are sharded. `fully_shard` (FSDP2) manages the very parameters that the modules had when it
was called, so it is told when a rewrite, or undoing one, gave them others; it gathers them around every call.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

from refold import fx_private
from refold.errors import RefoldError
from refold.fingerprint import is_sharded


def check_whole(module: nn.Module, cannot: str, instead: str, error: type[RefoldError] = RefoldError) -> None:
    """Raise if any weight of a module is sharded: what cannot be done then, and what to do instead."""
    names = [path or "the model" for path, inner in module.named_modules() if is_fully_sharded(inner)]
    names += [name for name, tensor in fx_private.named_tensors(module).items() if is_sharded(tensor)]
    if names:
        raise error(f"{names[0]} is sharded, and {cannot}. {instead}")


def is_fully_sharded(module: nn.Module) -> bool:
    """Whether `fully_shard` was called on a module itself."""
    kind = getattr(sys.modules.get("torch.distributed.fsdp"), "FSDPModule", None)
    return kind is not None and isinstance(module, kind)


def show_shards(gm: nn.Module) -> None:
    """Let modules hold their sharded parameters: after a call they may still hold the gathered ones."""
    for module in gm.modules() if is_fully_sharded(gm) else ():
        if is_fully_sharded(module):
            module.reshard()  # type: ignore[operator]


def manage_parameters(gm: Any) -> None:
    """Let FSDP manage the parameters that the modules have now. Can be called again."""
    if not is_fully_sharded(gm):
        return
    for name in {"__call__", "_wrapped_call"} & vars(type(gm)).keys():
        delattr(type(gm), name)  # compiling a graph puts them on FSDP's class, where they call themselves forever
    for group in fx_private.fsdp_groups(gm):
        live = {(id(module), key): (module, key, tensor) for module, key, tensor in _own_parameters(gm)}
        places = {id(managed): fx_private.fsdp_place(managed) for managed in group.fsdp_params}
        stay = [p for p in group.fsdp_params if places[id(p)] in live and live[places[id(p)]][2] is p.sharded_param]
        new = [live[place] for place in live if place not in {places[id(managed)] for managed in stay}]
        _check_meshes(group, new)
        before, group.fsdp_params = group.fsdp_params, stay + [fx_private.fsdp_param(group, *place) for place in new]
        for module, _, _ in new:
            fx_private.remove_fsdp_hooks(module, group.fsdp_params)
        for managed in before if new else ():
            if not any(managed is other for other in stay):
                vars(managed).clear()  # a module that was removed, and may come back, still has its hook
        if new:
            group._init_mp_dtypes()


def _check_meshes(group: Any, new: list[tuple[nn.Module, str, Any]]) -> None:
    for _, key, tensor in new:
        if tensor.device_mesh != group.mesh_info.mesh:
            raise RefoldError(
                f"a new {key} of shape {list(tensor.shape)} is sharded by FSDP and by tensor parallelism at once, and FSDP "
                f"cannot be given such a parameter later. Rewrite before parallelize_module and fully_shard; "
                f"refold.original_state_dict and load_original_state_dict work on what was rewritten before."
            )


def _own_parameters(module: nn.Module) -> Iterator[tuple[nn.Module, str, torch.Tensor]]:
    """The sharded parameters below a module, those of modules aside that were given to `fully_shard` themselves."""
    for key, tensor in fx_private.table(module, "_parameters").items():
        if is_sharded(tensor):
            yield module, key, tensor
    for child in fx_private.table(module, "_modules").values():
        if isinstance(child, nn.Module) and not is_fully_sharded(child):
            yield from _own_parameters(child)
