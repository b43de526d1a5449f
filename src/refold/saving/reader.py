"""Read a saved folder: capture the user's model, replay the recipe without weights, then let the weights in."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.fx import GraphModule

from refold import fx_private
from refold.call_arguments import Inputs
from refold.errors import SaveError
from refold.fingerprint import fingerprint
from refold.fx_private import tensor_places
from refold.record.copies import meta_copy
from refold.record.stack import History, attach, check_graph_module, history
from refold.rewrite.replay import checked_names, replay, set_modes, set_names
from refold.saving.capture_recipe import Model, capture_again
from refold.saving.folder import checked_files, parsed
from refold.saving.node_digests import difference_from, node_names
from refold.saving.records import meta_tensor, record_from_plain, spec_from_plain
from refold.saving.store import Store, safetensors
from refold.saving.writer import RECIPE, held_places

OPTIMIZED = "optimized.json"
"""In the folder of an optimized model, in place of a recipe."""


def load(
    folder: str | os.PathLike[str],
    model: Model | None = None,
    *,
    example_inputs: Inputs | None = None,
    graph_module: GraphModule | None = None,
    device: str = "cpu",
) -> GraphModule:
    """The module that `refold.save` put into a folder, with its history: everything can be undone, bit for bit.

    The graph is never read from the folder. It is captured again from `model` (a model, its class, or a function that
    makes it; its weights are not looked at and not touched) as it was before saving, or handed over as `graph_module`;
    then the saved recipe is replayed and the outcome compared. `example_inputs` are only needed where the original
    capture had inputs that were no plain tensors. Only transformations that are known here are run.
    """
    safetensors()
    files = checked_files(Path(folder))
    if OPTIMIZED in files:
        raise SaveError(f"{folder} holds an optimized model and no graph: refold.load(folder, model) gives it back.")
    if RECIPE not in files:
        raise SaveError(f"{folder} is no saved model: it has no {RECIPE}.")
    recipe = parsed(files[RECIPE].read_bytes(), files[RECIPE])
    try:
        captured = graph_module if graph_module is not None else capture_again(recipe["capture"], model, example_inputs)
        store = Store.reading(files, recipe["placed"], device)
        return _rebuilt(check_graph_module(captured), recipe, store)
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise SaveError(f"{files[RECIPE]} does not fit together: {type(error).__name__}: {error}.") from error


def _rebuilt(captured: GraphModule, recipe: dict[str, Any], store: Store) -> GraphModule:
    gm = meta_copy(captured)
    _fit_base(gm, recipe["base"])
    replay(gm, recipe["steps"])
    where = difference_from(recipe["nodes"], gm)
    if where is not None:
        raise SaveError(f"the replayed recipe gives another graph than the one that was saved: {where}.")
    _fill(gm, recipe, store)
    set_modes(gm, recipe["training"])
    return gm


# --- before the replay ---------------------------------------------------------------------------------------------


def _fit_base(gm: GraphModule, base: Mapping[str, Any]) -> None:
    """Check that the captured graph is the one that was saved, and give it the names, dtypes and modes it had."""
    names = checked_names(base["names"])
    where = difference_from(base["nodes"], gm)
    if where is not None:
        raise SaveError(
            f"the model's graph is not the one that was saved: {where}. The model's code or configuration differs, or "
            f"it was captured in another way or with other inputs."
        )
    if node_names(gm) != names:
        fx_private.rename_nodes(gm.graph, names)
    set_names(gm, _checked_counts(base["counts"]), checked_names(base["taken"]))
    set_modes(gm, base["training"])
    _fit_tensors(gm, base["tensors"])


def _checked_counts(counts: Mapping[str, Any]) -> dict[str, int]:
    """Counters of base names: words such as `and`, which no node can be called, get a number behind them."""
    for name in counts:
        if not isinstance(name, str) or not name.isidentifier():
            raise SaveError(f"the recipe counts the name {name!r}, which is no identifier: refused.")
    return {name: int(count) for name, count in counts.items()}


def _fit_tensors(gm: GraphModule, saved: Mapping[str, Any]) -> None:
    places = list(tensor_places(gm))
    missing, extra = saved.keys() - {name for name, _, _ in places}, {name for name, _, _ in places} - saved.keys()
    if missing or extra:
        names = ", ".join(sorted(missing or extra)[:5])
        raise SaveError(
            f"the model {'lacks' if missing else 'has'} {names}, which the saved one {'had' if missing else 'had not'}."
        )
    tied: dict[int, torch.Tensor] = {}
    for name, table, key in places:
        spec = spec_from_plain(saved[name])
        if tuple(table[key].shape) != spec.shape:
            raise SaveError(f"{name} has the shape {tuple(table[key].shape)}, and {spec.shape} was saved.")
        table[key] = tied.setdefault(int(saved[name]["tie"]), meta_tensor(spec))


# --- after the replay ----------------------------------------------------------------------------------------------


class _Filler:
    """Gives tensors out by their keys; one key is one object, so that ties are ties again."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._made: dict[tuple[str, bool], torch.Tensor] = {}

    def tensor(self, name: str, facts: Mapping[str, Any]) -> torch.Tensor:
        key, is_parameter = str(facts["key"]), bool(facts["parameter"])
        if (key, is_parameter) not in self._made:
            value = self._store.get(key)
            if fingerprint(value) != facts["print"]:
                raise SaveError(f"{name} does not have the bits that were saved.")
            made = nn.Parameter(value, requires_grad=bool(facts["requires_grad"])) if is_parameter else value
            self._made[key, is_parameter] = made
        return self._made[key, is_parameter]


def _fill(gm: GraphModule, recipe: Mapping[str, Any], store: Store) -> None:
    filler, past = _Filler(store), history(gm)
    _fill_places(list(tensor_places(gm)), recipe["tensors"], filler)
    changes = []
    for change, records, held in zip(past.changes, recipe["records"], recipe["held"], strict=True):
        _fill_places(list(held_places(change)), held, filler)
        maps = tuple(record_from_plain(d, r, store) for d, r in zip(records, change.maps, strict=True))
        changes.append(replace(change, maps=maps))
    attach(gm, History(tuple(changes), past.initial_order, past.expected))


def _fill_places(places: list[tuple[str, dict[str, Any], str]], saved: Mapping[str, Any], filler: _Filler) -> None:
    names = {name for name, _, _ in places}
    if names != set(saved):
        raise SaveError(f"the saved tensors are not those of the module: {', '.join(sorted(names ^ set(saved))[:5])}.")
    for name, table, key in places:
        tensor = filler.tensor(name, saved[name])
        if tensor.shape != table[key].shape:
            raise SaveError(f"{name} was saved with another shape than the replay gives it.")
        table[key] = tensor
