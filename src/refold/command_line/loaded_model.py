"""What a command works on: a model on its device, its inputs, where both come from, and the pipeline for it."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.fx import GraphModule

from refold.call_arguments import CallArguments
from refold.capture.model_state import untouched
from refold.capture.tracing import trace
from refold.command_line.model_inputs import inputs_for, placed
from refold.command_line.model_sources import Source, SourceModel, load_model
from refold.command_line.options import Request
from refold.errors import BadLevel, WrongInput
from refold.extension.pipeline_files import read_pipeline
from refold.extension.plugins import transformation_named
from refold.optimization.default_pipeline import default_pipeline, usual_for
from refold.rewrite.transformation import Transformation

DTYPES = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16, "float64": torch.float64}


@dataclass
class LoadedModel:
    """A model and inputs for it, on one device."""

    model: nn.Module
    inputs: CallArguments
    source: Source
    device: torch.device

    @property
    def dtype(self) -> str:
        """The dtype of the weights, as a word."""
        found = next((p.dtype for p in self.model.parameters() if p.is_floating_point()), torch.float32)
        return str(found).removeprefix("torch.")

    def capture(self) -> GraphModule:
        """The model as a graph, for all sizes that it leaves open."""
        with torch.no_grad():
            return trace(self.model, *self.inputs.args, dynamic="auto", **self.inputs.kwargs)

    def describe(self) -> dict[str, Any]:
        """For JSON."""
        return {
            "model": self.source.name,
            "class": type(self.model).__name__,
            "device": str(self.device),
            "dtype": self.dtype,
            "threads": torch.get_num_threads(),
            "inputs": {str(k): _shape(v) for k, v in (dict(enumerate(self.inputs.args)) | self.inputs.kwargs).items()},
        }


def prepare(request: Request) -> LoadedModel:
    """Load the model and make its inputs."""
    device, dtype = chosen_device(request.device), _chosen_dtype(request.dtype)
    use_threads(request.threads)
    found = load_model(request.model)
    inputs = placed(inputs_for(found, request.sizes, request.inputs), device, dtype)
    return ready(found, inputs, device, dtype)


def ready(found: SourceModel, inputs: CallArguments, device: torch.device, dtype: torch.dtype | None) -> LoadedModel:
    """The model on its device, after one call as it is, so that one that fails by itself is refused before it is
    captured. The call leaves nothing behind in the model or in the inputs."""
    model = found.model.to(device=device, dtype=dtype).eval().requires_grad_(False)
    try:
        with untouched(model), torch.no_grad():
            inputs.copy().given_to(model)
    except (Exception, SystemExit) as error:
        given = inputs.described()
        raise WrongInput(
            f"{type(model).__name__} does not run on these inputs ({given}): {type(error).__name__}: {error}"
        ) from error
    return LoadedModel(model, inputs, found.source, device)


def chosen_device(name: str | None) -> torch.device:
    """The device of that name, checked; the CPU where none is given."""
    try:
        device = torch.device(name or "cpu")
        torch.empty(1, device=device)
    except Exception:  # other devices raise errors of other kinds
        raise WrongInput(f"--device {name} cannot be used here: it must be cpu, cuda, or cuda:NUMBER.") from None
    return device


def _chosen_dtype(name: str | None) -> torch.dtype | None:
    """The dtype of that name; None leaves the model as it is."""
    if name is not None and name not in DTYPES:
        raise WrongInput(f"--dtype must be one of {', '.join(DTYPES)}, not {name!r}.")
    return None if name is None else DTYPES[name]


def use_threads(number: int | None) -> None:
    """Let torch use that many threads."""
    if number is not None:
        torch.set_num_threads(number)


def _shape(value: Any) -> str:
    if not isinstance(value, torch.Tensor):
        return repr(value)
    return f"{value.dtype}{list(value.shape)}".removeprefix("torch.")


def chosen_pipeline(
    level: str, file: Path | None, name: str | None = None, *, device: str | None = None, effort: str = "default"
) -> tuple[Transformation, ...]:
    """The transformations in order: the named one, those of a pipeline file, or those that are usual there."""
    if name is not None:
        return (transformation_named(name)(),)
    try:
        usual = default_pipeline(level)
    except BadLevel as reason:
        raise WrongInput(str(reason)) from None
    return usual_for(usual, chosen_device(device), effort) if file is None else read_pipeline(file)
