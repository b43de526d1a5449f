"""Write a folded module into a folder: weights, records and the recipe that leads to its graph."""

from __future__ import annotations

import os
import platform
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.fx import GraphModule

from refold._version import __version__
from refold.errors import SaveError
from refold.fingerprint import fingerprint
from refold.fx_private import join_path, named_tensors, tensor_places
from refold.record.change import Change
from refold.record.sharded_modules import check_whole
from refold.record.stack import check_graph_module, history
from refold.record.stored_modules import StoredModule
from refold.rewrite.replay import base_of, modes, names_of, replay, set_names, steps_of
from refold.saving.capture_recipe import describe_capture
from refold.saving.folder import plain_json, replaced, write_bytes
from refold.saving.node_digests import difference_from, node_digests, node_names
from refold.saving.records import record_to_plain, spec_to_plain
from refold.saving.store import Store, safetensors
from refold.weights.maps import TensorSpec

RECIPE = "recipe.json"
SHARD_BYTES = 5 * 10**9


def save(gm: GraphModule, folder: str | os.PathLike[str], *, shard_bytes: int = SHARD_BYTES) -> None:
    """Save a module so that `refold.load` gives it back with its history: weights as safetensors, the way to its graph
    as a JSON recipe. The graph itself is not stored, nor is anything else that could run.

    What Refold wrote into the folder before is replaced as one: whatever happens, it holds the old module or the new
    one. Other files in it stay as they are; one that has a name that is needed is an error. A module that could not be
    loaded again is refused: the recipe is tried before anything is written.
    """
    with replaced(Path(folder)) as fresh:
        write_module(gm, fresh, shard_bytes)


def write_module(gm: GraphModule, folder: Path, shard_bytes: int = SHARD_BYTES) -> None:
    """Write the weights and the recipe of a module into a folder that is being replaced."""
    check_graph_module(gm)
    check_whole(
        gm,
        "a folder holds whole weights",
        "Save refold.original_state_dict(gm) with torch.distributed.checkpoint; a process that has the same graph "
        "whole can load that, and save the folder.",
        SaveError,
    )
    safetensors()
    store = Store()
    recipe = _recipe(gm, store)
    recipe["placed"] = store.write(folder, shard_bytes)
    write_bytes(folder / RECIPE, plain_json(recipe))


def _recipe(gm: GraphModule, store: Store) -> dict[str, Any]:
    base, steps = base_of(gm), steps_of(gm)
    counts, taken = names_of(gm)
    set_names(base, counts, taken)
    recipe: dict[str, Any] = {
        "versions": {"refold": __version__, "torch": torch.__version__, "python": platform.python_version()},
        "capture": describe_capture(gm),
        "base": _describe_base(base) | {"counts": counts, "taken": taken},
        "steps": steps,
        "nodes": node_digests(gm),
        "training": modes(gm),
    }
    _rehearse(gm, base, recipe)
    recipe["tensors"] = {name: _describe_tensor(name, t, store) for name, t in named_tensors(gm).items()}
    recipe["records"] = [
        [record_to_plain(record, store, f"refold.{i}.{j}") for j, record in enumerate(change.maps)]
        for i, change in enumerate(history(gm))
    ]
    recipe["held"] = [
        {
            label: _describe_tensor(f"refold.{i}.held.{label}", table[key], store)
            for label, table, key in held_places(change)
        }
        for i, change in enumerate(history(gm))
    ]
    return recipe


def _describe_base(base: GraphModule) -> dict[str, Any]:
    ties: dict[int, int] = {}
    tensors = {
        name: spec_to_plain(TensorSpec.of(tensor)) | {"tie": ties.setdefault(id(tensor), len(ties))}
        for name, tensor in named_tensors(base).items()
    }
    return {"names": node_names(base), "nodes": node_digests(base), "tensors": tensors, "training": modes(base)}


def _describe_tensor(name: str, tensor: torch.Tensor, store: Store) -> dict[str, Any]:
    return {
        "key": store.put(name, tensor),
        "requires_grad": tensor.requires_grad,
        "parameter": isinstance(tensor, nn.Parameter),
        "print": fingerprint(tensor),
    }


def _rehearse(gm: GraphModule, base: GraphModule, recipe: dict[str, Any]) -> None:
    """Refuse to save what could not be loaded: the recipe must lead to this very graph."""
    replay(base, recipe["steps"])
    where = difference_from(recipe["nodes"], base)
    if where is None and named_tensors(base).keys() != named_tensors(gm).keys():
        where = "its tensors are others"
    if where is not None:
        raise SaveError(
            f"this module cannot be saved as a recipe: doing its changes again gives another graph ({where}). It was "
            f"edited by hand, or a transformation depends on more than its settings. Nothing was written."
        )


def held_places(change: Change) -> Iterator[tuple[str, dict[str, Any], str]]:
    """(label, table, key) of every tensor that a change keeps because no weight map gives it back."""
    for (path, _table), entry in change.tables.items():
        for key, value in entry.before.items():
            yield from _places_in(entry.before, key, value, join_path(path, key))


def _places_in(table: dict[str, Any], key: str, value: Any, label: str) -> Iterator[tuple[str, dict[str, Any], str]]:
    if isinstance(value, torch.Tensor):
        yield label, table, key
    elif isinstance(value, StoredModule):
        for entries in value.tables.values():
            for name, entry in list(entries.items()):
                yield from _places_in(entries, name, entry, join_path(label, name))
    elif isinstance(value, nn.Module):
        yield from ((join_path(label, name), inner, k) for name, inner, k in list(tensor_places(value)))
