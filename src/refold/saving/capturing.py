"""How a saved module was captured, as plain data, and capturing it again from the user's model."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.fx
from torch import nn
from torch.fx import GraphModule

from refold import fx_private
from refold.capturing.errors import CaptureError
from refold.capturing.module import record_of
from refold.capturing.trees import Constant, Leaf
from refold.match import example_value
from refold.recipes import is_plain
from refold.saving.errors import SaveError
from refold.saving.store import dtype_name, dtype_of

Model = nn.Module | Callable[[], nn.Module]


def describe_capture(gm: GraphModule) -> dict[str, Any]:
    """How a module came about: by refold.trace (with the shapes of its inputs), by torch.fx, or by other means."""
    try:
        record = record_of(gm)
    except CaptureError:
        plain = fx_private.tracer_class(gm) in (None, torch.fx.Tracer)
        return {"method": "symbolic_trace" if plain else "other"}
    nodes = {node.name: node for node in gm.graph.nodes if node.op == "placeholder"}
    how = {"method": "trace", "training": record.report.training, "asked": record.report.asked}
    inputs = []
    for place, argument in enumerate(a for a in record.calling.arguments if a.given):
        entry = _describe_input(argument, nodes.get(argument.name))
        if entry is None:
            return how | {"inputs": None}
        inputs.append(entry | {"name": argument.name, "positional": place < record.calling.positional})
    return how | {"inputs": inputs}


def _describe_input(argument: Any, node: torch.fx.Node | None) -> dict[str, Any] | None:
    if isinstance(argument.tree, Constant):
        return {"value": argument.tree.value} if is_plain(argument.tree.value) else None
    value = example_value(node)
    if not isinstance(argument.tree, Leaf) or value is None:
        return None
    return {"shape": [_hint(size) for size in value.shape], "dtype": dtype_name(value.dtype)}


def _hint(size: Any) -> int:
    return size if isinstance(size, int) else int(size.node.hint)


def capture_again(
    how: Mapping[str, Any], model: Model | None, example_inputs: Sequence[Any] | Mapping[str, Any] | None
) -> GraphModule:
    """The graph of the user's model, captured in the way that was recorded."""
    method = how.get("method")
    if model is None or method not in ("symbolic_trace", "trace"):
        raise SaveError(
            f"the saved module was captured by {method!r}: capture your model in the same way and hand the result "
            f"over: refold.load(folder, graph_module=gm)."
        )
    if method == "symbolic_trace":
        return torch.fx.symbolic_trace(_made(model, "meta"))
    from refold.capture import trace

    made = _made(model, None)
    if made is not model:
        made.train(how.get("training") is True)
    args, kwargs = _inputs(how.get("inputs"), example_inputs)
    return trace(made, *args, **_asked(how.get("asked")), **kwargs)


def _asked(recorded: Any) -> dict[str, Any]:
    """The settings of `refold.trace` that change the graph; folders of older versions have none."""
    known: Mapping[str, Any] = recorded if isinstance(recorded, Mapping) else {}
    fixed: dict[str, Any] = {"dynamic": False} if known.get("dynamic") is False else {}
    return fixed | ({"whole_result": True} if known.get("whole_result") is True else {})


def _made(model: Model, device: str | None) -> nn.Module:
    """The model itself, or what the given class or function makes; on the meta device where that is enough."""
    if isinstance(model, nn.Module):
        return model
    if not callable(model):
        raise SaveError(f"a model, its class or a function that makes it is needed, not {type(model).__name__}.")
    try:
        made = _made_on(model, device)
    except Exception as error:
        name = getattr(model, "__qualname__", repr(model))
        raise SaveError(
            f"{name} could not make the model: {type(error).__name__}: {error}. Give the model itself, or a function "
            f"without arguments that makes it."
        ) from error
    if not isinstance(made, nn.Module):
        raise SaveError(f"{model!r} gave no model but {type(made).__name__}.")
    return made


def _made_on(model: Callable[[], nn.Module], device: str | None) -> nn.Module:
    if device is None:
        return model()
    try:
        with torch.device(device):
            return model()
    except (NotImplementedError, RuntimeError):  # it computes with its weights while it is made
        return model()


def _inputs(
    recorded: Any, given: Sequence[Any] | Mapping[str, Any] | torch.Tensor | None
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    if isinstance(given, torch.Tensor):
        return (given,), {}
    if isinstance(given, Mapping):
        return (), dict(given)
    if given is not None:
        return tuple(given), {}
    if not isinstance(recorded, list):
        raise SaveError(
            "the inputs of the capture were not recorded: pass example_inputs=(...) as refold.trace got them."
        )
    args = [_example(entry) for entry in recorded if entry.get("positional")]
    return tuple(args), {str(entry["name"]): _example(entry) for entry in recorded if not entry.get("positional")}


def _example(entry: Mapping[str, Any]) -> Any:
    """An input like the recorded one: ones (a mask that hides nothing, a token that exists), or random numbers."""
    if "shape" not in entry:
        return entry.get("value")
    shape, dtype = [int(size) for size in entry["shape"]], dtype_of(entry["dtype"])
    if dtype.is_floating_point:
        return torch.randn(shape, generator=torch.Generator().manual_seed(0)).to(dtype)
    return torch.ones(shape, dtype=dtype)
