"""Modules whose parameters are sharded. `fully_shard` (FSDP2) manages the very parameters that the modules had when it
was called, so it is told when a rewrite, or undoing one, gave them others; it gathers them around every call.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import nn

from refold import fx_private
from refold.errors import RefoldError
from refold.fingerprint import is_sharded
from refold.graph.targets import find_module


def check_whole(module: nn.Module, cannot: str, instead: str, error: type[RefoldError] = RefoldError) -> None:
    """Raise if any weight of a module is sharded: what cannot be done then, and what to do instead."""
    names = [path or "the model" for path, inner in module.named_modules() if is_fully_sharded(inner)]
    names += [name for name, tensor in fx_private.named_tensors(module).items() if is_sharded(tensor)]
    if names:
        raise error(f"{names[0]} is sharded, and {cannot}. {instead}")


def is_fully_sharded(module: nn.Module) -> bool:
    """Whether `fully_shard` was called on a module itself."""
    kind = _fsdp_class()
    return kind is not None and isinstance(module, kind)


def _fsdp_class() -> type | None:
    """The class that `fully_shard` adds to those of a module; None where nobody can have called it."""
    return getattr(sys.modules.get("torch.distributed.fsdp"), "FSDPModule", None)


def show_shards(gm: nn.Module) -> None:
    """Let modules hold their sharded parameters: after a call they may still hold the gathered ones."""
    for module in gm.modules() if _fsdp_class() is not None else ():
        if is_fully_sharded(module):
            module.reshard()  # type: ignore[operator]


def check_removable(gm: nn.Module, label: str, tensors: Iterable[str]) -> None:
    """Raise if undoing a change, which removes these tensors, would remove modules that FSDP groups for themselves."""
    for path in dict.fromkeys(name.rpartition(".")[0] for name in tensors):
        module = find_module(gm, path) if path else None
        if module is not None and is_fully_sharded(module):
            raise RefoldError(
                f"{path} was given to fully_shard by itself, and undoing {label} would remove it, which FSDP "
                f"does not allow. Take the weights with refold.original_state_dict(gm), or shard it as one group."
            )


def manage_parameters(gm: Any) -> None:
    """Let FSDP manage the parameters that the modules have now. Can be called again."""
    if not is_fully_sharded(gm):
        return
    for name in {"__call__", "_wrapped_call"} & vars(type(gm)).keys():
        delattr(type(gm), name)  # compiling a graph puts them on FSDP's class, where they call themselves forever
    groups = fx_private.fsdp_groups(gm)
    before = [managed for group in groups for managed in group.fsdp_params]
    live: dict[int, list[tuple[nn.Module, str, Any]]] = {}  # a tied parameter lies in several places
    for entry in _own_parameters(gm):
        live.setdefault(id(entry[2]), []).append(entry)
    stay = {id(m.sharded_param): m for m in before if fx_private.fsdp_place(m) in _places(live, m.sharded_param)}
    new = [(_group_of(entries[0][2], groups), entries) for key, entries in live.items() if key not in stay]
    if not new and len(stay) == len(before):
        return
    made = [(group, fx_private.fsdp_param(group, entries)) for group, entries in new]
    gone = [managed for managed in before if stay.get(id(managed.sharded_param)) is not managed]
    for group in groups:
        group.fsdp_params = [m for m in group.fsdp_params if not any(m is other for other in gone)]
        group.fsdp_params += [managed for its_group, managed in made if its_group is group]
        group._init_mp_dtypes()
        fx_private.hook_states_again(group)
    for group, entries in new:
        fx_private.remove_fsdp_hooks(entries[0][0], group.fsdp_params)
    for managed in gone:
        vars(managed).clear()  # a module that was removed, and may come back, still has its hook


def _places(live: dict[int, list[tuple[nn.Module, str, Any]]], tensor: Any) -> set[tuple[int, str]]:
    return {(id(module), key) for module, key, _ in live.get(id(tensor), ())}


def _group_of(tensor: Any, groups: list[Any]) -> Any:
    """The group that can manage a new parameter: the one on its mesh."""
    found = next((group for group in groups if group.mesh_info.mesh == tensor.device_mesh), None)
    if found is None:
        raise RefoldError(
            f"a new weight of shape {list(tensor.shape)} is sharded by FSDP and by tensor parallelism at once, and "
            f"FSDP cannot be given such a parameter later. Rewrite before parallelize_module and fully_shard; "
            f"refold.original_state_dict and load_original_state_dict work on what was rewritten before."
        )
    return found


def _own_parameters(module: nn.Module) -> Iterator[tuple[nn.Module, str, torch.Tensor]]:
    """The sharded parameters below a module, those of modules aside that were given to `fully_shard` themselves."""
    for key, tensor in fx_private.table(module, "_parameters").items():
        if is_sharded(tensor):
            yield module, key, tensor
    for child in fx_private.table(module, "_modules").values():
        if isinstance(child, nn.Module) and not is_fully_sharded(child):
            yield from _own_parameters(child)
