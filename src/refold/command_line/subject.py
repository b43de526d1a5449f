"""What a command works on: a model in its place, its inputs, and where both come from."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.fx import GraphModule

from refold.capture import trace
from refold.capturing.fresh import fresh_call
from refold.capturing.restoring import untouched
from refold.command_line.errors import WrongInput
from refold.command_line.inputs import NO_SIZES, Sizes, inputs_for, placed
from refold.command_line.models import Source, load_model
from refold.optimizing.calls import Inputs, split

DTYPES = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16, "float64": torch.float64}


@dataclass(frozen=True)
class Wanted:
    """What the options say about the model and its inputs."""

    model: str
    inputs: str | None = None
    sizes: Sizes = NO_SIZES
    device: str | None = None
    dtype: str | None = None
    threads: int | None = None


@dataclass
class Subject:
    """A model and inputs for it, on one device."""

    model: nn.Module
    inputs: Inputs
    source: Source
    device: torch.device

    @property
    def dtype(self) -> str:
        """The dtype of the weights, as a word."""
        found = next((p.dtype for p in self.model.parameters() if p.is_floating_point()), torch.float32)
        return str(found).removeprefix("torch.")

    def capture(self) -> GraphModule:
        """The model as a graph for these inputs."""
        args, kwargs = split(self.inputs)
        with torch.no_grad():
            return trace(self.model, *args, dynamic=False, **kwargs)

    def describe(self) -> dict[str, Any]:
        """For JSON."""
        return {
            "model": self.source.name,
            "class": type(self.model).__name__,
            "device": str(self.device),
            "dtype": self.dtype,
            "threads": torch.get_num_threads(),
            "inputs": _shapes(self.inputs),
        }


def prepare(wanted: Wanted) -> Subject:
    """Load the model and make its inputs."""
    device = chosen_device(wanted.device)
    use_threads(wanted.threads)
    dtype = chosen_dtype(wanted.dtype)
    loaded = load_model(wanted.model)
    inputs = inputs_for(loaded, wanted.sizes, wanted.inputs)
    model = loaded.model.to(device=device, dtype=dtype).eval().requires_grad_(False)
    subject = Subject(model, placed(inputs, device, dtype), loaded.source, device)
    check_runs(subject.model, subject.inputs)
    return subject


def check_runs(model: nn.Module, inputs: Inputs) -> None:
    """Run the model once as it is: where it fails by itself, no capture has to find that out. Nothing is left behind in
    the model or in the inputs."""
    args, kwargs = fresh_call(*split(inputs))
    try:
        with untouched(model), torch.no_grad():
            model(*args, **kwargs)
    except (Exception, SystemExit) as error:
        named = isinstance(inputs, dict)
        shapes = ", ".join(f"{name} {shape}" if named else shape for name, shape in _shapes(inputs).items())
        raise WrongInput(
            f"{type(model).__name__} does not run on these inputs ({shapes}): {type(error).__name__}: {error}"
        ) from error


def chosen_device(name: str | None) -> torch.device:
    """The device that is asked for, if there is one; the CPU where nobody asks."""
    try:
        device = torch.device(name or "cpu")
    except RuntimeError:
        raise WrongInput(f"--device {name} is not understood: it must be cpu, cuda, or cuda:NUMBER.") from None
    if device.type == "cpu":
        return device
    try:
        torch.empty(1, device=device)
    except Exception:
        raise WrongInput(f"--device {name} cannot be used: torch finds no such device here.") from None
    return device


def chosen_dtype(name: str | None) -> torch.dtype | None:
    """The dtype of that name; None leaves the model as it is."""
    if name is not None and name not in DTYPES:
        raise WrongInput(f"--dtype must be one of {', '.join(DTYPES)}, not {name!r}.")
    return None if name is None else DTYPES[name]


def use_threads(number: int | None) -> None:
    """Let torch use that many threads."""
    if number is not None:
        torch.set_num_threads(number)


def _shapes(inputs: Inputs) -> dict[str, Any]:
    named = inputs.items() if isinstance(inputs, dict) else enumerate(inputs)
    return {str(name): _shape(value) for name, value in named}


def _shape(value: Any) -> Any:
    return (
        f"{value.dtype}{list(value.shape)}".removeprefix("torch.") if isinstance(value, torch.Tensor) else repr(value)
    )
