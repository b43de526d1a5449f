"""How a saved module was captured, as plain data, and capturing it again from the user's model."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.fx
from torch import nn
from torch.fx import GraphModule

from refold import fx_private
from refold.call_arguments import CallArguments, Inputs
from refold.capture.captured import CaptureRecord, record_of
from refold.capture.tracing import trace
from refold.errors import CaptureError, SaveError
from refold.nested import Branch, Constant, Tree
from refold.rewrite.description import is_plain
from refold.saving.store import dtype_name, dtype_of

Model = nn.Module | Callable[[], nn.Module]
_MOST_VALUES = 4096  # of an input that control flow depends on


def describe_capture(gm: GraphModule) -> dict[str, Any]:
    """How a module came about: by refold.trace (with the shapes of its inputs), by torch.fx, or by other means."""
    try:
        record = record_of(gm)
    except CaptureError:
        plain = fx_private.tracer_class(gm) in (None, torch.fx.Tracer)
        return {"method": "symbolic_trace" if plain else "other"}
    how = {"method": "trace", "training": record.report.training, "asked": record.report.asked}
    places = {argument.name for argument in record.call.arguments[: record.call.positional]}
    inputs = []
    for argument in record.call.arguments:
        if not argument.given or argument.by_switch:  # what capture itself added it adds again
            continue
        entry = _describe_input(argument.tree, record)
        if entry is None:
            return how | {"inputs": None}
        inputs.append(entry | {"name": argument.name, "positional": argument.name in places})
    return how | {"inputs": inputs}


def _describe_input(tree: Tree, record: CaptureRecord) -> dict[str, Any] | None:
    """An input as plain data: the shape and dtype of a tensor, also its values if the graph holds for those only; plain
    values, and lists, tuples and dicts of such. None for anything else."""
    if isinstance(tree, Constant):
        return {"value": tree.value} if is_plain(tree.value) else None
    if isinstance(tree, Branch):
        return _describe_container(tree, record)
    rule, fixed = record.sizes.inputs[tree.index], record.fixed.values.get(tree.index)
    entry = {"shape": list(rule.example), "dtype": dtype_name(rule.dtype)}
    if fixed is None:
        return entry
    exact = fixed.numel() <= _MOST_VALUES and not fixed.is_complex() and bool(fixed.isfinite().all())
    return entry | {"values": fixed.tolist()} if exact else None


def _describe_container(tree: Branch, record: CaptureRecord) -> dict[str, Any] | None:
    if tree.cls not in (list, tuple, dict) or not all(isinstance(key, str) for key in tree.keys or ()):
        return None
    entries = [_describe_input(child, record) for child in tree.children]
    if None in entries:
        return None
    return {tree.cls.__name__: entries if tree.keys is None else dict(zip(tree.keys, entries, strict=True))}


def capture_again(how: Mapping[str, Any], model: Model | None, example_inputs: Inputs | None) -> GraphModule:
    """The graph of the user's model, captured in the way that was recorded."""
    method = how.get("method")
    if model is None or method not in ("symbolic_trace", "trace"):
        raise SaveError(
            f"the saved module was captured by {method!r}: capture your model in the same way and hand the result "
            f"over: refold.load(folder, graph_module=gm)."
        )
    if method == "symbolic_trace":
        return torch.fx.symbolic_trace(made(model, "meta"))
    own = made(model, None)
    if own is not model:
        own.train(how.get("training") is True)
    call = recorded_inputs(how.get("inputs"), example_inputs)
    return trace(own, *call.args, **_settings(how.get("asked")), **call.kwargs)


def _settings(recorded: Any) -> dict[str, Any]:
    """The settings of `refold.trace` that change the graph; folders of older versions have none."""
    known: Mapping[str, Any] = recorded if isinstance(recorded, Mapping) else {}
    possible: dict[str, tuple[Any, ...]] = {
        "dynamic": (False, "all"),
        "whole_result": (True,),
        "operators": ("python",),
    }
    return {name: known[name] for name, values in possible.items() if known.get(name) in values}


def made(model: Model, device: str | None) -> nn.Module:
    """The model itself, or what the given class or function makes; on the meta device where that is enough."""
    if isinstance(model, nn.Module):
        return model
    if not callable(model):
        raise SaveError(f"a model, its class or a function that makes it is needed, not {type(model).__name__}.")
    try:
        found = _made_on(model, device)
    except Exception as error:
        name = getattr(model, "__qualname__", repr(model))
        raise SaveError(
            f"{name} could not make the model: {type(error).__name__}: {error}. Give the model itself, or a function "
            f"without arguments that makes it."
        ) from error
    if not isinstance(found, nn.Module):
        raise SaveError(f"{model!r} gave no model but {type(found).__name__}.")
    return found


def _made_on(model: Callable[[], nn.Module], device: str | None) -> nn.Module:
    if device is None:
        return model()
    try:
        with torch.device(device):
            return model()
    except (NotImplementedError, RuntimeError):  # it computes with its weights while it is made
        return model()


def recorded_inputs(recorded: Any, given: Inputs | None) -> CallArguments:
    """The call of a capture: the one that is given, or one like it."""
    if given is not None:
        return CallArguments.of(given)
    if not isinstance(recorded, list):
        raise SaveError(
            "the inputs of the capture were not recorded: pass example_inputs=(...) as refold.trace got them."
        )
    args = [_example(entry) for entry in recorded if entry.get("positional")]
    kwargs = {str(entry["name"]): _example(entry) for entry in recorded if not entry.get("positional")}
    return CallArguments(tuple(args), kwargs)


def _example(entry: Mapping[str, Any]) -> Any:
    """An input like the recorded one: ones (a mask that hides nothing, a token that exists), or random numbers; its own
    values where the graph holds for those only."""
    if "dict" in entry:
        return {str(key): _example(inner) for key, inner in entry["dict"].items()}
    if "list" in entry or "tuple" in entry:
        inside = [_example(inner) for inner in entry.get("list", entry.get("tuple"))]
        return inside if "list" in entry else tuple(inside)
    if "shape" not in entry:
        return entry.get("value")
    shape, dtype = [int(size) for size in entry["shape"]], dtype_of(entry["dtype"])
    if "values" in entry:
        return torch.tensor(entry["values"], dtype=dtype).reshape(shape)
    if dtype.is_floating_point:
        return torch.randn(shape, generator=torch.Generator().manual_seed(0)).to(dtype)
    return torch.ones(shape, dtype=dtype)
