"""Graphs that were given to `fully_shard` (FSDP2): it manages the very parameters that the modules had then, so it is
told when a rewrite, or undoing one, gave the modules others. It gathers all of them around every call.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

from refold import fx_private
from refold.fingerprint import is_sharded


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
        stay = []
        for managed in group.fsdp_params:
            place = fx_private.fsdp_place(managed)
            if place in live and live[place][2] is managed.sharded_param:
                stay.append(managed)
                del live[place]
            else:
                vars(managed).clear()  # a module that was removed, and may come back, still has its hook
        group.fsdp_params = stay + [fx_private.fsdp_param(group, *place) for place in live.values()]
        if live:
            group._init_mp_dtypes()
            for module, _, _ in live.values():
                fx_private.remove_fsdp_hooks(module, group.fsdp_params)


def _own_parameters(module: nn.Module) -> Iterator[tuple[nn.Module, str, torch.Tensor]]:
    """The sharded parameters below a module, those of modules aside that were given to `fully_shard` themselves."""
    for key, tensor in fx_private.table(module, "_parameters").items():
        if is_sharded(tensor):
            yield module, key, tensor
    for child in fx_private.table(module, "_modules").values():
        if isinstance(child, nn.Module) and not is_fully_sharded(child):
            yield from _own_parameters(child)
