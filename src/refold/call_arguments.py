"""The arguments of one call of a model, from whatever form a user gives them in."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Self

import torch
from torch import nn

from refold.errors import BadExample
from refold.nested import ARGUMENT, Opaque, copy_nested, flatten, map_tensors, tensors_in
from refold.wording import kind_of


@dataclass(frozen=True)
class CallArguments:
    """Positional and keyword arguments."""

    args: tuple[Any, ...] = ()
    kwargs: dict[str, Any] = field(default_factory=dict)

    @classmethod
    def of(cls, inputs: Inputs, name: str = "example_inputs") -> Self:
        """A dict of keyword arguments, or a tuple of positional ones; a lone tensor is one positional argument."""
        if isinstance(inputs, CallArguments):
            return cls(inputs.args, inputs.kwargs)
        if isinstance(inputs, torch.Tensor):
            return cls((inputs,))
        if isinstance(inputs, Mapping):  # a tokenizer's BatchEncoding is one
            return cls(kwargs=dict(inputs))
        if isinstance(inputs, tuple | list):
            return cls(tuple(inputs))
        raise BadExample(
            f"{name} must be a dict of keyword arguments, a tuple of positional ones or a tensor, "
            f"not {kind_of(inputs)}. {_way_out(inputs)}"
        )

    def checked(self) -> Self:
        """Refuse objects of their own kind, such as a cache that a decoder goes on with, before a call changes them."""
        try:
            flatten(self.kwargs or self.args, ARGUMENT)
        except Opaque as opaque:
            if _is_array(opaque.value):
                raise BadExample(f"{opaque}, and models take tensors: give torch.from_numpy of it.") from None
            raise BadExample(
                f"a call may write into one of the example inputs: {opaque}. Give tensors, plain values, or lists, "
                "tuples, dicts and dataclasses of them. Calls with other inputs run the original model."
            ) from None
        return self

    def given_to(self, function: Callable[..., Any]) -> Any:
        """Call a function with these arguments."""
        return function(*self.args, **self.kwargs)

    def copy(self) -> Self:
        """The same with copies of tensors, containers and plain objects, so that a call cannot write into these."""
        args, kwargs = copy_nested((self.args, self.kwargs))
        return replace(self, args=args, kwargs=kwargs)

    def map(self, change: Callable[[torch.Tensor], torch.Tensor]) -> Self:
        """The same with other tensors."""
        args, kwargs = map_tensors((self.args, self.kwargs), change)
        return replace(self, args=args, kwargs=kwargs)

    def described(self) -> str:
        """Every argument with its dtype and sizes, for a sentence."""
        named = [*map(_described, self.args), *(f"{name} {_described(value)}" for name, value in self.kwargs.items())]
        return ", ".join(named)

    @property
    def tensors(self) -> list[torch.Tensor]:
        """All tensors in them."""
        return tensors_in((self.args, self.kwargs))

    def device(self, *models: Any) -> torch.device:
        """The accelerator that a tensor, or a weight of those models that are modules, lies on; else the CPU."""
        modules = [model for model in models if isinstance(model, nn.Module)]
        weights = [tensor for module in modules for tensor in (*module.parameters(), *module.buffers())]
        devices = [tensor.device for tensor in (*weights, *self.tensors)]
        return next((device for device in devices if device.type not in ("cpu", "meta")), torch.device("cpu"))


Inputs = CallArguments | Mapping[str, Any] | Sequence[Any] | torch.Tensor


def _described(value: Any) -> str:
    if not isinstance(value, torch.Tensor):
        text = repr(value)
        return text if len(text) < 60 and "\n" not in text else kind_of(value)
    return f"{value.dtype}{list(value.shape)}".removeprefix("torch.")


def _is_array(value: Any) -> bool:
    return hasattr(value, "__array__") and not isinstance(value, torch.Tensor)


def _way_out(inputs: Any) -> str:
    """What to give in the place of something that is no call."""
    if isinstance(inputs, str | bytes):
        return 'Models take tensors, not text: give tokenizer(texts, padding=True, return_tensors="pt").'
    if _is_array(inputs):
        return "Give torch.from_numpy of it."
    if isinstance(inputs, Iterable):
        return "Give one batch of it: next(iter(...))."
    return 'Give what one call takes, such as {"input_ids": ids} or (images,).'
