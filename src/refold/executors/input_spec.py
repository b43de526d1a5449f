"""The inputs that a prepared callable was built for, and the sentence that says how another input differs."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from refold.errors import PreparationFailed, UnsupportedInput
from refold.fx_private import is_autocast_on, is_observed, is_plain
from refold.nested import CALL, STRUCTURE, Tree, flatten, same_constant

_TORCH_CONSTANTS = (torch.Size, torch.dtype, torch.device, torch.memory_format, torch.layout)
CONSTANTS = (bool, int, float, complex, str, type(None), *_TORCH_CONSTANTS)
_PLAIN_TENSORS = frozenset({torch.Tensor, torch.nn.Parameter})  # a subclass may compute anything
_NO_AUTOCAST = (None, None)


class TensorKey(NamedTuple):
    """What a tensor must be like."""

    shape: torch.Size
    dtype: torch.dtype
    device: torch.device
    layout: torch.layout


@dataclass(frozen=True)
class InputSpec:
    """Structure, constants, shapes, dtypes, devices, layouts and autocast state of a call."""

    structure: Tree
    leaves: tuple[Any, ...]
    places: tuple[int, ...]
    autocast: tuple[torch.dtype | None, ...]
    positional: int
    names: tuple[str, ...]
    is_flat: bool
    """Every argument is a leaf, so that the leaves can be had without walking the structure."""
    open_sizes: bool = False
    """Sizes may be others, and the number of dimensions the same: what sizes are taken is checked elsewhere."""

    @classmethod
    def of(cls, args: tuple[Any, ...], kwargs: dict[str, Any], *, open_sizes: bool = False) -> InputSpec:
        structure, leaves = flatten((args, kwargs), STRUCTURE)
        for leaf in leaves:
            _refuse_opaque(leaf)
        places = tuple(index for index, leaf in enumerate(leaves) if isinstance(leaf, torch.Tensor))
        keys = tuple(_key(leaf) if isinstance(leaf, torch.Tensor) else leaf for leaf in leaves)
        given = [*args, *kwargs.values()]
        is_flat = len(given) == len(leaves) and all(a is b for a, b in zip(given, leaves, strict=True))
        return cls(structure, keys, places, autocast_state(), len(args), tuple(kwargs), is_flat, open_sizes)

    @property
    def shapes(self) -> tuple[torch.Size, ...]:
        """The sizes of the call that this was made of."""
        return tuple(self.leaves[place].shape for place in self.places)

    def tensors(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[torch.Tensor]:
        """The tensors of a call in order, after checking that it is the call this was made of."""
        # written out, without helpers: this runs at every call, and after a call no code is in the processor's cache
        if not is_plain() or self.autocast != _NO_AUTOCAST:
            self._refuse_surroundings()
        if self.is_flat and len(args) == self.positional and tuple(kwargs) == self.names:
            leaves = [*args, *kwargs.values()]
        else:
            leaves = self._leaves(args, kwargs)
        for leaf, built_for in zip(leaves, self.leaves, strict=True):
            if type(leaf) in _PLAIN_TENSORS:
                try:
                    is_same = (leaf.shape, leaf.dtype, leaf.device, leaf.layout) == built_for
                    is_same = is_same or (self.open_sizes and _differ_in_sizes(leaf, built_for))
                except RuntimeError:  # a nested tensor has no shape
                    is_same = False
            else:
                is_same = leaf is built_for or same_constant(leaf, built_for)
            if not is_same:
                raise UnsupportedInput(f"It was built for {_describe(built_for)} and was given {_describe(leaf)}.")
        return leaves if len(self.places) == len(leaves) else [leaves[place] for place in self.places]

    def _refuse_surroundings(self) -> None:
        if is_observed():
            raise UnsupportedInput(
                "It is called in a transform of torch.func, in forward-mode differentiation, in a trace, or in a mode "
                "that sees every operation."
            )
        if autocast_state() != self.autocast:
            raise UnsupportedInput("Autocast is switched otherwise than when it was built.")

    def _leaves(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Any]:
        same_names = tuple(kwargs) == self.names or kwargs.keys() == set(self.names)
        if len(args) != self.positional or not same_names:
            raise UnsupportedInput(f"It was built for {self._call()} and was called with {_call(len(args), kwargs)}.")
        if self.is_flat:
            return [*args, *map(kwargs.__getitem__, self.names)]
        structure, leaves = flatten((args, {name: kwargs[name] for name in self.names}), STRUCTURE)
        if structure != self.structure:
            raise UnsupportedInput(f"An argument is nested otherwise: {structure} instead of {self.structure}.")
        return leaves

    def _call(self) -> str:
        return _call(self.positional, self.names)


def example(
    args: tuple[Any, ...], kwargs: dict[str, Any], *, open_sizes: bool = False
) -> tuple[InputSpec, Tree, list[torch.Tensor]]:
    """The spec of an example call, its tree, and copies of its tensors.

    Copies, because a compiler that sees one tensor twice builds for inputs that are one and the same.
    """
    spec = InputSpec.of(args, kwargs, open_sizes=open_sizes)
    tree, tensors = flatten((args, kwargs), CALL)
    return spec, tree, [tensor.detach().clone() for tensor in tensors]


def autocast_state() -> tuple[torch.dtype | None, torch.dtype | None]:
    """What autocast casts to on CPUs and on GPUs; None where it is off."""
    if not is_autocast_on():
        return _NO_AUTOCAST
    cpu = torch.get_autocast_dtype("cpu") if torch.is_autocast_enabled("cpu") else None
    return cpu, torch.get_autocast_dtype("cuda") if torch.is_autocast_enabled("cuda") else None


def refuse_gradients(tensors: list[torch.Tensor], weights: list[torch.Tensor]) -> None:
    """Raise where the caller expects gradients, which a callable built for inference cannot give."""
    if not torch.is_grad_enabled():
        return
    if any(tensor.requires_grad for tensor in tensors) or any(weight.requires_grad for weight in weights):
        raise UnsupportedInput("It was built for inference and gradients are asked for. Call it under torch.no_grad().")


def _call(positional: int, names: Iterable[str]) -> str:
    return " and ".join([f"{positional} positional arguments", *names])


def _refuse_opaque(leaf: Any) -> None:
    if isinstance(leaf, torch.Tensor) and leaf.is_nested:
        raise PreparationFailed("A nested tensor among the arguments has no shape that a call could be compared with.")
    if type(leaf) in _PLAIN_TENSORS:
        return
    if not isinstance(leaf, CONSTANTS):
        raise PreparationFailed(f"A {type(leaf).__name__} among the arguments can be neither a tensor nor a constant.")


def _key(tensor: torch.Tensor) -> TensorKey:
    return TensorKey(tensor.shape, tensor.dtype, tensor.device, tensor.layout)


def _differ_in_sizes(tensor: torch.Tensor, built_for: Any) -> bool:
    """Whether a tensor is like another in all but its sizes."""
    return (
        isinstance(built_for, TensorKey)
        and _key(tensor)._replace(shape=built_for.shape) == built_for
        and (tensor.dim() == len(built_for.shape))
    )


def _describe(leaf: Any) -> str:
    if isinstance(leaf, torch.Tensor):
        if leaf.is_nested:
            return "a nested tensor"
        leaf = _key(leaf) if type(leaf) in _PLAIN_TENSORS else leaf
    if isinstance(leaf, TensorKey):
        kind = "" if leaf.layout is torch.strided else f"{str(leaf.layout).removeprefix('torch.')} "
        return f"a {kind}{leaf.dtype} tensor of shape {tuple(leaf.shape)} on {leaf.device}"
    return repr(leaf) if isinstance(leaf, CONSTANTS) else f"a {type(leaf).__name__}"
