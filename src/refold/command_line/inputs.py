"""The inputs of a model: from its own configuration and the sizes asked for, or from the user's function."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from refold.capturing.dummy_inputs import DummyInputs, usual_input_names
from refold.capturing.errors import NeedsInputs
from refold.command_line.errors import WrongInput
from refold.command_line.models import Loaded
from refold.command_line.user_code import call, load_function
from refold.command_line.wording import kind_of
from refold.optimizing.calls import Inputs, as_call

BATCH = 1
LENGTH = 128
_LIMITS = ("max_position_embeddings", "n_positions", "max_target_positions")


@dataclass(frozen=True)
class Sizes:
    """How large the inputs are, where they are made from a configuration."""

    batch: int | None = None
    length: int | None = None
    image: int | None = None


NO_SIZES = Sizes()


class SizedInputs(DummyInputs):
    """Inputs of the sizes asked for."""

    def __init__(self, model: nn.Module, sizes: Sizes, usual_image_size: int) -> None:
        super().__init__(model, sizes.batch or BATCH, _length(model, sizes))
        self.sizes = sizes
        self.usual_image_size = usual_image_size

    def image_size(self) -> tuple[int, int]:
        if self.sizes.image is not None:
            return self.sizes.image, self.sizes.image
        fixed = self.setting("image_size", "img_size", "crop_size") is not None
        return super().image_size() if fixed else (self.usual_image_size, self.usual_image_size)


def inputs_for(loaded: Loaded, sizes: Sizes, function: str | None) -> Inputs:
    """Inputs to optimize for."""
    if function is not None:
        _refuse_sizes(sizes, "--inputs")
        return _from_function(loaded.model, function)
    if loaded.inputs is not None:
        _refuse_sizes(sizes, f"{loaded.source.name}, which gives its own inputs,")
        return _as_call(loaded.inputs, loaded.source.name)
    if loaded.source.kind == "timm":
        return _images(loaded.model, sizes)
    return _from_configuration(loaded.model, SizedInputs(loaded.model, sizes, loaded.image_size))


def placed(inputs: Inputs, device: torch.device, dtype: torch.dtype | None) -> Inputs:
    """The inputs on a device, and floating-point ones in the model's dtype."""
    moved: Inputs = _placed(inputs, device, dtype)
    return moved


def _placed(value: Any, device: torch.device, dtype: torch.dtype | None) -> Any:
    if isinstance(value, torch.Tensor):
        return value.to(device, dtype if dtype is not None and value.is_floating_point() else value.dtype)
    if type(value) in (list, tuple):
        return type(value)(_placed(v, device, dtype) for v in value)
    if type(value) is dict:
        return {k: _placed(v, device, dtype) for k, v in value.items()}
    return value


def _refuse_sizes(sizes: Sizes, what: str) -> None:
    if sizes != NO_SIZES:
        raise WrongInput(f"--batch, --sequence-length and --image-size do not go with {what}: that decides.")


def _from_function(model: nn.Module, text: str) -> Inputs:
    function = load_function(text, "--inputs")
    made = call(function, text, *([model] if _takes_one(function) else []))
    return _as_call(made, text)


def _as_call(made: Any, text: str) -> Inputs:
    """What a user's function returned, as the arguments of a call."""
    if not isinstance(made, torch.Tensor | Mapping | tuple | list):
        kinds = "a dict of keyword arguments, a tuple of positional ones or a tensor"
        raise WrongInput(f"{text} must return {kinds} as inputs; it returned {kind_of(made)}.")
    return as_call(made)


def _takes_one(function: Callable[..., Any]) -> bool:
    """Whether a function wants the model."""
    try:
        parameters = inspect.signature(function).parameters.values()
    except (TypeError, ValueError):
        return False
    return any(p.default is p.empty and p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD) for p in parameters)


def _images(model: nn.Module, sizes: Sizes) -> Inputs:
    channels, *usual = (getattr(model, "pretrained_cfg", None) or {}).get("input_size", (3, 224, 224))
    shape = (sizes.image, sizes.image) if sizes.image else usual
    return (torch.randn(sizes.batch or BATCH, channels, *shape, generator=torch.Generator().manual_seed(0)),)


def _from_configuration(model: nn.Module, dummies: SizedInputs) -> Inputs:
    names = usual_input_names(model)
    parameters = inspect.signature(model.forward).parameters
    if "input_ids" in names and "attention_mask" in parameters:
        names.append("attention_mask")  # tokenizers give one, so real calls have it
    try:
        return {name: dummies.make(name) for name in dict.fromkeys(names)}
    except NeedsInputs as reason:
        raise WrongInput(f"{str(reason).split('. ')[0]}. Give them: --inputs FILE.py:FUNCTION.") from None


def _length(model: nn.Module, sizes: Sizes) -> int:
    config = getattr(model, "config", None)
    limits = [getattr(config, name, None) for name in _LIMITS]
    most = min((limit for limit in limits if isinstance(limit, int) and limit > 0), default=None)
    if sizes.length is not None and most is not None and sizes.length > most:
        raise WrongInput(f"--sequence-length {sizes.length} is too long: {type(model).__name__} takes at most {most}.")
    wanted = sizes.length or LENGTH
    return wanted if most is None else min(wanted, most)
