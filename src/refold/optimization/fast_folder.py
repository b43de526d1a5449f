"""A folder that holds an optimized model: its weights, what was decided for it and how it was asked for, never code."""

from __future__ import annotations

import copy
import os
import warnings
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn

from refold.call_arguments import CallArguments, Inputs
from refold.errors import BadDecision, PreparedAnew, SaveError
from refold.fingerprint import fingerprint
from refold.fx_private import named_tensors, tensor_places
from refold.optimization.decision import Decision
from refold.optimization.job_stages import optimize_as_decided
from refold.optimization.keeping import NOT_USED, fingerprint_of_weights
from refold.optimization.optimized_module import OptimizedModule
from refold.optimization.preparation import Preparation
from refold.optimization.surroundings import Surroundings
from refold.optimization.variants import Kind
from refold.rewrite.description import recipe_of
from refold.rewrite.registry import transformation_from
from refold.saving.capture_recipe import Model, describe_capture, made, recorded_inputs
from refold.saving.folder import checked_files, parsed, plain_json, replaced, write_bytes
from refold.saving.reader import OPTIMIZED
from refold.saving.store import Store, safetensors

_SCHEMA, _VERSION = "refold.optimized", 1


# --- writing -------------------------------------------------------------------------------------------------------


def save_optimized(fast: OptimizedModule, folder: str | os.PathLike[str], shard_bytes: int) -> None:
    """Write an optimized model into a folder, which is replaced as one."""
    prepared, by = fast.prepared, fast._preparation
    if prepared is None or by is None:
        raise SaveError("the model was restored, moved or given up since it was optimized; optimize it again first.")
    if prepared.decision is None:
        why = " ".join(prepared.report.notes)
        raise SaveError(f"there is no decision to save for this model. {why} Save its graph: fast.graph_module.")
    safetensors()
    store, weights = Store(), fingerprint_of_weights(fast.original)
    decision = prepared.decision
    data = {
        "schema": _SCHEMA,
        "version": _VERSION,
        # with weights that are not those that were verified, everything is verified when it is loaded
        "decision": decision.with_weights(weights if decision.weights == weights else "").to_text(),
        "settings": _settings(by) | {"on_fallback": fast._fallbacks.policy},
        "inputs": describe_capture(prepared.graph_module).get("inputs") if prepared.graph_module is not None else None,
        "surroundings": by.surroundings.plain,
        "kinds": [described for kind in fast._kinds[1:] if (described := _described(kind)) is not None],
        "others": [[list(tensor.shape) for tensor in call.tensors] for call in by.others],
        "tensors": {
            name: {"key": store.put(name, tensor), "requires_grad": tensor.requires_grad, "print": fingerprint(tensor)}
            for name, tensor in named_tensors(fast.original).items()
        },
    }
    with replaced(Path(folder)) as fresh:
        data["placed"] = store.write(fresh, shard_bytes)
        write_bytes(fresh / OPTIMIZED, plain_json(data))


def _described(kind: Kind) -> dict[str, Any] | None:
    """One more kind of calls as plain data; None, and a warning, where it cannot be told."""
    gm = None if kind.prepared is None else kind.prepared.graph_module
    inputs = None if gm is None else describe_capture(gm).get("inputs")
    if inputs is None or not kind.is_told_by_its_calls:
        warnings.warn(
            f"Calls {kind.name} are not saved: prepare for them again where the folder is loaded.", stacklevel=5
        )
        return None
    return {"inputs": inputs, "surroundings": kind.preparation.surroundings.plain}


def _settings(by: Preparation) -> dict[str, Any]:
    """How it was asked for, as plain data."""
    job = by.job
    recipes = [recipe_of(each) for each in job.pipeline]
    if not by.is_usual and None in recipes:
        raise SaveError("a transformation of the pipeline has settings that are not plain data, so it cannot be saved.")
    return {
        "level": job.level,
        "pipeline": None if by.is_usual else recipes,
        "backend": job.backend,
        "effort": job.effort,
        "time_budget": None if by.seconds is None else str(by.seconds),
        "sizes": "open" if job.open_sizes else "example",
        "outputs": None if job.outputs is None else list(job.outputs.wanted),
        "padding": job.padding,
        "max_memory": job.max_memory,
    }


# --- reading -------------------------------------------------------------------------------------------------------


def load_optimized(folder: Path, model: Model | None, example_inputs: Inputs | None, device: str) -> OptimizedModule:
    """The optimized model of a folder, with its weights."""
    if model is None:
        raise SaveError(f"{folder} holds an optimized model: give the model, its class or a function that makes it.")
    safetensors()
    files = checked_files(folder)
    data = parsed(files[OPTIMIZED].read_bytes(), files[OPTIMIZED])
    if data.get("schema") != _SCHEMA or data.get("version") != _VERSION:
        raise SaveError(f"{files[OPTIMIZED]} was written by another version of Refold.")
    try:
        decision, notes = _decision(data["decision"])
        settings = _settings_from(data["settings"])
        own = _with_weights(model, data["tensors"], Store.reading(files, data["placed"], device))
        calls = list(_calls(data, example_inputs, own))
        surroundings = Surroundings.from_plain(data.get("surroundings", {}))
        further = list(_further_kinds(data.get("kinds", []), calls[0].device(own)))
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise SaveError(f"{files[OPTIMIZED]} does not fit together: {type(error).__name__}: {error}.") from error
    with surroundings.entered():
        fast, more = optimize_as_decided(decision, own, calls, **settings)
    for around, call in further:
        with around.entered():
            fast.prepare_calls([call])
    for note in (*notes, *more):
        warnings.warn(note, PreparedAnew, stacklevel=4)
    return fast


def _decision(text: str) -> tuple[Decision | None, list[str]]:
    """What was decided; or none, and why: another version of Refold may have told it in another way."""
    try:
        return Decision.from_text(text.encode()), []
    except BadDecision as reason:
        return None, [f"{NOT_USED}, because {reason}."]


def _settings_from(data: Mapping[str, Any]) -> dict[str, Any]:
    names = ("level", "pipeline", "backend", "effort", "time_budget", "sizes", "outputs", "padding", "on_fallback")
    found = {name: data[name] for name in (*names, "max_memory")}
    if found["pipeline"] is not None:
        found["pipeline"] = [transformation_from(recipe) for recipe in found["pipeline"]]
    if found["time_budget"] is not None:
        found["time_budget"] = float(found["time_budget"])
    return found


def _calls(data: Mapping[str, Any], given: Inputs | None, model: nn.Module) -> Iterator[CallArguments]:
    """Calls like those that it was optimized for: of their sizes, with other values."""
    first = recorded_inputs(data["inputs"], given)
    device = CallArguments().device(model)
    first = first if given is not None else first.map(lambda tensor: tensor.to(device))
    yield first
    for shapes in data["others"]:
        left = iter(shapes)
        yield first.map(lambda tensor: _like(tensor, next(left)))  # noqa: B023 - used up at once


def _further_kinds(
    kinds: Sequence[Mapping[str, Any]], device: torch.device
) -> Iterator[tuple[Surroundings, CallArguments]]:
    """Calls of the other kinds that it was prepared for, and what was switched on around them."""
    for kind in kinds:
        call = recorded_inputs(kind["inputs"], None).map(lambda tensor: tensor.to(device))
        yield Surroundings.from_plain(kind["surroundings"]), call


def _like(tensor: torch.Tensor, shape: Sequence[int]) -> torch.Tensor:
    """A tensor of the same kind: random numbers, or ones, which are true and in every table."""
    filled = torch.rand if tensor.is_floating_point() else torch.ones
    return filled([int(size) for size in shape], dtype=tensor.dtype, device=tensor.device)


def _with_weights(model: Model, saved: Mapping[str, Any], store: Store) -> nn.Module:
    """The model with the weights that were saved. A model that was given has them, or stays as it is: then it is a copy
    that gets them."""
    own = made(model, None)
    own = own if own is model else own.eval()
    places = list(tensor_places(own))
    names = {name for name, _, _ in places}
    if names != set(saved):
        differ = ", ".join(sorted(names ^ set(saved))[:5])
        raise SaveError(f"the model is not the one that was saved: one of them has no {differ}.")
    if own is model:
        if all(fingerprint(table[key]) == saved[name]["print"] for name, table, key in places):
            return own
        own = copy.deepcopy(own, {id(table[key]): table[key] for _, table, key in places})
        places = list(tensor_places(own))
    found: dict[str, torch.Tensor] = {}
    for name, table, key in places:
        facts = saved[name]
        if facts["key"] not in found:
            found[facts["key"]] = _tensor(name, table[key], facts, store)
        table[key] = found[facts["key"]]
    return own


def _tensor(name: str, old: torch.Tensor, facts: Mapping[str, Any], store: Store) -> torch.Tensor:
    value = store.get(facts["key"])
    if value.shape != old.shape or value.dtype != old.dtype:
        was, now = (f"{tensor.dtype} {tuple(tensor.shape)}" for tensor in (value, old))
        raise SaveError(f"{name} was saved as {was}, and the model has {now}.")
    if fingerprint(value) != facts["print"]:
        raise SaveError(f"{name} does not have the bits that were saved.")
    value = value if old.is_meta else value.to(old.device)
    return nn.Parameter(value, requires_grad=bool(facts["requires_grad"])) if isinstance(old, nn.Parameter) else value
