"""Whether a model still is what it was when something was built from it: the same parts, in the same modes, with the
same hooks and switches.

Torch tells whoever asks about every parameter, buffer and module that is registered, so nothing has to be looked at
until it does. Modes are plain attributes; they are looked at, in the modules whose results depend on them.
"""

from __future__ import annotations

import weakref
from collections.abc import Collection, Iterator
from operator import attrgetter, is_
from typing import Any

import torch
from torch import nn
from torch.nn.modules import module as registrations
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook

from refold.optimizing.switches import Switches
from refold.purity import MODES_MATTER

_MODAL = (*MODES_MATTER, nn.modules.batchnorm._NormBase)
_training = attrgetter("training")


class Sameness:
    """Asked at every call of an optimized model, so it is quick."""

    def __init__(self, model: nn.Module, written: Collection[str] = ()) -> None:
        """`written` are the attributes, by their paths, that calls of the model write."""
        self._model = model
        self._switches = Switches(model, written)
        self._parts = _parts(model)
        self._modal = [module for module in model.modules() if isinstance(module, _MODAL)]
        self._modes = list(map(_training, self._modal))
        self._first = next(_first_parameters(model), None)
        self._has_same_parts = True
        _news.watch(model)
        self._seen = _news.count

    def why_not(self) -> str | None:
        """Why the model is not what it was; None if it is."""
        count = _news.count
        if self._seen != count:
            now = _parts(self._model)
            self._has_same_parts = len(now) == len(self._parts) and all(map(is_, now, self._parts))
            self._seen = count  # only now: other threads ask too
        if not self._has_same_parts:
            return "a parameter, buffer or module of the original was replaced since it was optimized"
        if list(map(_training, self._modal)) != self._modes:
            return "a module of the original was put into another mode since it was optimized"
        if self._first is not None and not self._first.is_there():
            return "the parameters of the original were swapped, cast or moved since it was optimized"
        return self._switches.why_not()


class _First:
    """The first parameter of a model: what swaps, casts or moves all of them does it to this one too."""

    def __init__(self, table: dict[str, Any], name: str) -> None:
        self._table, self._name, self._tensor = table, name, table[name]
        self._kind = (self._tensor.dtype, self._tensor.device)

    def is_there(self) -> bool:
        tensor = self._table.get(self._name)
        return tensor is self._tensor and (tensor.dtype, tensor.device) == self._kind


def _first_parameters(model: nn.Module) -> Iterator[_First]:
    for module in model.modules():
        table = module.__dict__.get("_parameters") or {}
        yield from (_First(table, name) for name, tensor in table.items() if tensor is not None)


def _parts(model: nn.Module) -> list[Any]:
    return [*model.modules(), *model.parameters(), *model.buffers()]


class _News:
    """How often something was registered in a module that somebody watches."""

    def __init__(self) -> None:
        self.count = 0
        self._watched: weakref.WeakValueDictionary[int, nn.Module] = weakref.WeakValueDictionary()
        self._listens = False

    def watch(self, model: nn.Module) -> None:
        if not self._listens:
            self._listens = True
            registrations.register_module_parameter_registration_hook(self._registered)
            registrations.register_module_buffer_registration_hook(self._registered)
            registrations.register_module_module_registration_hook(self._registered)
            register_optimizer_step_post_hook(_count_fused_step)
        for module in model.modules():
            self._watched[id(module)] = module

    def _registered(self, module: nn.Module, name: str, value: Any) -> None:
        if self._watched.get(id(module)) is module:
            self.count += 1


def _count_fused_step(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
    """Fused optimizers write weights without counting it in them, and nobody would notice."""
    for group in optimizer.param_groups:
        if group.get("fused"):
            torch.autograd.graph.increment_version([weight for weight in group["params"] if weight.grad is not None])


_news = _News()
