"""The inputs of a model: from its configuration and the sizes given, from the user's function, or from a folder."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn

from refold.call_arguments import CallArguments
from refold.capture.example_inputs import DummyInputs, usual_input_names
from refold.command_line.model_sources import SourceModel
from refold.command_line.options import NO_SIZES, Sizes
from refold.command_line.user_code import call, load_function
from refold.errors import NeedsInputs, WrongInput
from refold.wording import kind_of

FILE = "inputs.safetensors"
BATCH = 1
LENGTH = 128
_LIMITS = ("max_position_embeddings", "n_positions", "max_target_positions")


class SizedInputs(DummyInputs):
    """Inputs of the sizes that the options give."""

    def __init__(self, model: nn.Module, sizes: Sizes, usual_image_size: int) -> None:
        super().__init__(model, sizes.batch or BATCH, _length(model, sizes))
        self.sizes = sizes
        self.usual_image_size = usual_image_size

    def image_size(self) -> tuple[int, int]:
        if self.sizes.image is not None:
            return self.sizes.image, self.sizes.image
        fixed = self.setting("image_size", "img_size", "crop_size") is not None
        return super().image_size() if fixed else (self.usual_image_size, self.usual_image_size)


def inputs_for(given: SourceModel, sizes: Sizes, function: str | None) -> CallArguments:
    """The inputs to optimize for."""
    if function is not None:
        _refuse_sizes(sizes, "--inputs")
        maker = load_function(function, "--inputs")
        return _as_call(call(maker, function, *([given.model] if _takes_one(maker) else [])), function)
    if given.inputs is not None:
        _refuse_sizes(sizes, f"{given.source.name}, which gives its own inputs,")
        return _as_call(given.inputs, given.source.name)
    if given.source.kind == "timm":
        return _images(given.model, sizes)
    return _from_configuration(given.model, SizedInputs(given.model, sizes, given.image_size))


def placed(inputs: CallArguments, device: torch.device, dtype: torch.dtype | None) -> CallArguments:
    """The inputs on a device, and floating-point ones in the model's dtype."""
    return inputs.map(lambda t: t.to(device, dtype if dtype is not None and t.is_floating_point() else t.dtype))


def _refuse_sizes(sizes: Sizes, what: str) -> None:
    if sizes != NO_SIZES:
        raise WrongInput(f"--batch, --sequence-length and --image-size do not go with {what}: that decides.")


def _as_call(made: Any, text: str) -> CallArguments:
    """What a user's function returned, as the arguments of a call."""
    if not isinstance(made, torch.Tensor | Mapping | tuple | list):
        kinds = "a dict of keyword arguments, a tuple of positional ones or a tensor"
        raise WrongInput(f"{text} must return {kinds} as inputs; it returned {kind_of(made)}.")
    return CallArguments.of(made).checked()


def _takes_one(function: Callable[..., Any]) -> bool:
    """Whether a function wants the model."""
    try:
        parameters = inspect.signature(function).parameters.values()
    except (TypeError, ValueError):
        return False
    return any(p.default is p.empty and p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD) for p in parameters)


def _images(model: nn.Module, sizes: Sizes) -> CallArguments:
    channels, *usual = (getattr(model, "pretrained_cfg", None) or {}).get("input_size", (3, 224, 224))
    shape = (sizes.image, sizes.image) if sizes.image else usual
    images = torch.randn(sizes.batch or BATCH, channels, *shape, generator=torch.Generator().manual_seed(0))
    return CallArguments((images,))


def _from_configuration(model: nn.Module, dummies: SizedInputs) -> CallArguments:
    names = usual_input_names(model)
    parameters = inspect.signature(model.forward).parameters
    if "input_ids" in names and "attention_mask" in parameters:
        names.append("attention_mask")  # tokenizers give one, so real calls have it
    try:
        return CallArguments(kwargs={name: dummies.make(name) for name in dict.fromkeys(names)})
    except NeedsInputs as reason:
        raise WrongInput(f"{str(reason).split('. ')[0]}. Give them: --inputs FILE.py:FUNCTION.") from None


def _length(model: nn.Module, sizes: Sizes) -> int:
    config = getattr(model, "config", None)
    limits = [getattr(config, name, None) for name in _LIMITS]
    most = min((limit for limit in limits if isinstance(limit, int) and limit > 0), default=None)
    if sizes.length is not None and most is not None and sizes.length > most:
        raise WrongInput(f"--sequence-length {sizes.length} is too long: {type(model).__name__} takes at most {most}.")
    length = sizes.length or LENGTH
    return length if most is None else min(length, most)


# --- in a folder ---------------------------------------------------------------------------------------------------


class NotPlain(Exception):
    """An input that is neither a tensor nor plain data."""


def store_inputs(inputs: CallArguments, folder: Path) -> Any:
    """Write the tensors of inputs; the return value says how they are nested. `NotPlain` where it cannot be said."""
    from safetensors.torch import save_file

    tensors: dict[str, torch.Tensor] = {}
    form = _form(inputs.kwargs or inputs.args, tensors)
    own = {name: t.detach().cpu().clone(memory_format=torch.contiguous_format) for name, t in tensors.items()}
    save_file(own, folder / FILE)
    return form


def _form(value: Any, tensors: dict[str, torch.Tensor]) -> Any:
    if isinstance(value, torch.Tensor):
        name = str(len(tensors))
        tensors[name] = value
        return {"tensor": name}
    if type(value) in (list, tuple):
        return {type(value).__name__: [_form(v, tensors) for v in value]}
    if type(value) is dict and all(isinstance(key, str) for key in value):
        return {"dict": {key: _form(v, tensors) for key, v in value.items()}}
    if value is None or type(value) in (bool, int, float, str):
        return {"value": value}
    raise NotPlain(f"an input is {kind_of(value)}")


def restore_inputs(form: Any, folder: Path, device: torch.device) -> CallArguments:
    """The inputs that a folder holds."""
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    try:
        tensors = {name: tensor.to(device) for name, tensor in load_file(folder / FILE).items()}
        inputs = _filled(form, tensors)
    except (OSError, SafetensorError, KeyError, TypeError, ValueError, RecursionError) as error:
        raise WrongInput(f"The inputs in {folder} cannot be read: {type(error).__name__}: {error}.") from None
    if not isinstance(inputs, dict | tuple):
        raise WrongInput(f"The inputs in {folder} are those of no call.")
    return CallArguments.of(inputs)


def _filled(form: Any, tensors: dict[str, torch.Tensor]) -> Any:
    ((kind, content),) = form.items()
    if kind == "tensor":
        return tensors[content]
    if kind in ("list", "tuple"):
        items = [_filled(item, tensors) for item in content]
        return items if kind == "list" else tuple(items)
    if kind == "dict":
        return {str(key): _filled(item, tensors) for key, item in content.items()}
    if kind == "value" and (content is None or isinstance(content, bool | int | float | str)):
        return content
    raise ValueError(f"{kind!r} is no form of an input")
