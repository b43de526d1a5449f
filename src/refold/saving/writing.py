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
from refold.change import Change, join_path
from refold.fingerprint import fingerprint
from refold.history import check_graph_module, history
from refold.hollow import named_tensors, tensor_places
from refold.keeping import Husk
from refold.saving.capturing import describe_capture
from refold.saving.digest import first_difference, node_digests, node_names
from refold.saving.errors import SaveError, safetensors
from refold.saving.folder import plain_json, replaced, write_bytes
from refold.saving.records import record_to_plain
from refold.saving.replay import base_of, modes, names_of, replay, set_names, steps_of
from refold.saving.store import Store, dtype_name

RECIPE = "recipe.json"
SHARD_BYTES = 5 * 10**9


def save(gm: GraphModule, folder: str | os.PathLike[str], *, shard_bytes: int = SHARD_BYTES) -> None:
    """Save a module so that `refold.load` gives it back with its history: weights as safetensors, the way to its graph
    as a JSON recipe. The graph itself is not stored, nor is anything else that could run.

    The folder is written beside its place and put there as one; whatever happens, it is the old one or the new one.
    Before anything is written the recipe is tried: a module that could not be loaded again is refused.
    """
    check_graph_module(gm)
    safetensors()
    store = Store()
    recipe = _recipe(gm, store)
    with replaced(Path(folder)) as fresh:
        recipe["placed"] = store.write(fresh, shard_bytes)
        write_bytes(fresh / RECIPE, plain_json(recipe))


def _recipe(gm: GraphModule, store: Store) -> dict[str, Any]:
    base, steps = base_of(gm), steps_of(gm)
    counts, taken = names_of(gm)
    set_names(base, counts, taken)
    recipe: dict[str, Any] = {
        "versions": {"refold": __version__, "torch": torch.__version__, "python": platform.python_version()},
        "capture": describe_capture(gm),
        "base": _describe_base(base) | {"counts": counts, "taken": taken},
        "steps": steps,
        "nodes": node_digests(gm, names=False),
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
    tensors = {}
    for name, tensor in named_tensors(base).items():
        tensors[name] = {
            "shape": list(tensor.shape),
            "dtype": dtype_name(tensor.dtype),
            "requires_grad": tensor.requires_grad,
            "parameter": isinstance(tensor, nn.Parameter),
            "tie": ties.setdefault(id(tensor), len(ties)),
        }
    return {
        "names": node_names(base),
        "nodes": node_digests(base, names=False),
        "tensors": tensors,
        "training": modes(base),
    }


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
    found = node_digests(base, names=False)
    if found != recipe["nodes"] or named_tensors(base).keys() != named_tensors(gm).keys():
        where = first_difference(recipe["nodes"], found, node_names(base))
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
    elif isinstance(value, Husk):
        for entries in value.tables.values():
            for name, entry in list(entries.items()):
                yield from _places_in(entries, name, entry, join_path(label, name))
    elif isinstance(value, nn.Module):
        yield from ((join_path(label, name), inner, k) for name, inner, k in list(tensor_places(value)))
