"""The watch over a model: whether what was built from it still computes what the model does.

All that is registered is checked at every call: where each parameter and buffer lies and how often it was written into,
the modules and their modes, their hooks, and the adapters that are active, disabled or merged. Everything else is
frozen when something is built: plain attributes, configurations, globals, code, and what is written through `.data`.

A rewritten graph holds the model's own tensors, or merged ones that share their memory: weights that are written in
place there are followed. Weights that were folded, made part of a constant, or packed by an engine are copies, and
their in-place counters must stand still.
"""

from __future__ import annotations

import copy
import functools
import weakref
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from itertools import chain
from operator import attrgetter, is_, itemgetter, methodcaller
from typing import Any

import torch
from torch import nn
from torch.fx import GraphModule
from torch.nn.modules import module as torch_modules
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook

from refold import fx_private
from refold.fingerprint import same_bits
from refold.fx_private import named_tensors
from refold.record.containers import same_items
from refold.record.stack import history
from refold.weights import Concatenate, Constant

_Pairs = list[tuple[torch.Tensor, torch.Tensor]]

_HOOKS = ("_forward_pre_hooks", "_forward_hooks")
_TABLES = (*fx_private.TABLES, *_HOOKS)
_HOOKS_OF_ALL = ("_global_forward_pre_hooks", "_global_forward_hooks")
_HARMLESS = ("transformers.", "refold.")  # hooks that read hidden states and stay; hooks by which calls wait
_ADAPTER_STATE = ("active_adapter", "active_adapters", "disable_adapters", "merged_adapters")  # as PEFT names them

WEIGHTS_CHANGED = "weights of the original were changed since it was optimized"
ADAPTERS_CHANGED = "an adapter of the original was chosen, disabled or merged since it was optimized"

_training = attrgetter("training")
_tables_in = itemgetter(*_TABLES)
_values = methodcaller("values")


class Watch:
    """Compares a model with what it was. It runs at every call, so it is quick: few steps of the interpreter, however
    many modules and weights there are.

    The memory that is read is held to the end, also when the weights move elsewhere."""

    def __init__(self, weights: list[torch.Tensor], gm: GraphModule | None, *, reads_live_weights: bool) -> None:
        """`reads_live_weights` says that what was built reads the graph's (without one: the model's) tensors at every
        call, from where they lay when it was built."""
        _count_fused_steps()
        self._weights = weights
        self._held = _followed(weights, gm) if reads_live_weights else []
        followed = {id(weight) for weight, _ in self._held}
        self._record_weights([weight for weight in weights if id(weight) not in followed])
        self._record_modules([])

    @property
    def copied(self) -> list[torch.Tensor]:
        """The weights of which what was built holds copies."""
        return list(self._copied)

    def watch_modules(self, model: nn.Module) -> Watch:
        """Compare the modules of a model, too, with what they are now."""
        self._record_modules(list(model.modules()))
        return self

    def _record_weights(self, copied: list[torch.Tensor]) -> None:
        self._copied = copied
        self._addresses = fx_private.addresses_of(self._weights)
        self._versions = fx_private.versions_of(copied)
        self._freed: list[Any] = []  # an address says nothing any more when its memory was freed and given out again
        self._storages = [weakref.ref(storage, self._freed.append) for storage in _storages(self._weights)]

    def _record_modules(self, modules: list[nn.Module]) -> None:
        self._modules, self._modes = modules, list(map(_training, modules))
        self._attributes = [vars(module) for module in modules if not isinstance(module, torch.jit.ScriptModule)]
        self._tables = list(chain.from_iterable(map(_tables_in, self._attributes)))
        of_parts = [attributes[name] for attributes in self._attributes for name in fx_private.TABLES]
        of_hooks = [attributes[name] for attributes in self._attributes for name in _HOOKS]
        self._parts = _Tables(of_parts)
        self._hooks = _Tables(of_hooks + [vars(torch_modules)[name] for name in _HOOKS_OF_ALL if modules])
        self._adapters = [(module, name) for module in modules for name in _ADAPTER_STATE if _has_state(module, name)]
        self._adapter_states = list(map(copy.copy, self._states_of_adapters()))

    def why_changed(self) -> str | None:
        """Why the model is not what it was; None if it is."""
        if not self._has_same_weights():
            return WEIGHTS_CHANGED
        has_same_tables = all(map(is_, chain.from_iterable(map(_tables_in, self._attributes)), self._tables))
        if not (has_same_tables and self._parts.are_same()):
            return "a parameter, buffer or module of the original was replaced since it was optimized"
        if list(map(_training, self._modules)) != self._modes:
            return "a module of the original was put into another mode since it was optimized"
        if not self._hooks.are_same() and not self._hooks.differ_harmlessly():
            return "a hook was added to the original or taken away since it was optimized"
        if self._adapters and self._states_of_adapters() != self._adapter_states:
            return ADAPTERS_CHANGED
        return None

    def _has_same_weights(self) -> bool:
        if self._freed or fx_private.addresses_of(self._weights) != self._addresses:
            return False
        return fx_private.versions_of(self._copied) == self._versions

    def _states_of_adapters(self) -> list[Any]:
        states = (getattr(module, name, None) for module, name in self._adapters)
        return [[state] if isinstance(state, str) else state for state in states]  # PEFT gives one name in either form

    def _follow_moved_weights(self) -> None:
        """Accept other addresses. Memory that was shared is a copy from now on; a copy of the same values is still
        current."""
        if self._has_same_weights() or fx_private.versions_of(self._copied) != self._versions:
            return
        parted = any(fx_private.address_of(weight) != fx_private.address_of(held) for weight, held in self._held)
        if not parted or all(same_bits(weight, held) for weight, held in self._held):
            self._record_weights(self._weights if parted else self._copied)


@contextmanager
def moving_weights(watches: Iterable[Watch]) -> Iterator[None]:
    """Merge or undo another graph of a model inside: that may give the weights other memory with the same contents,
    which is no change to watches that found them unchanged before."""
    current = [watch for watch in watches if watch._has_same_weights()]
    try:
        yield
    finally:
        for watch in current:
            watch._follow_moved_weights()


class _Tables:
    """Tables of modules, and what they held."""

    def __init__(self, tables: list[dict[Any, Any]]) -> None:
        self._all = tables
        self._record()

    def _record(self) -> None:
        self._empty = [table for table in self._all if not table]
        self._filled = [table for table in self._all if table]
        self._held = [table.copy() for table in self._filled]
        self._lengths = list(map(len, self._held))
        self._keys = list(chain.from_iterable(self._held))
        self._values = list(chain.from_iterable(map(_values, self._held)))

    def are_same(self) -> bool:
        """Whether they hold the very objects that they held, under the same keys in the same order. (The record is
        flat: what it consists of is not in the processor's cache after a call.)"""
        if any(self._empty) or list(map(len, self._filled)) != self._lengths:
            return False
        if list(chain.from_iterable(self._filled)) != self._keys:
            return False
        return all(map(is_, chain.from_iterable(map(_values, self._filled)), self._values))

    def differ_harmlessly(self) -> bool:
        """Whether they differ in hooks that only read; such a difference is no difference from then on."""
        held = {id(table): former for table, former in zip(self._filled, self._held, strict=True)}
        for table in self._all:
            if not same_items(_that_matter(table), _that_matter(held.get(id(table), {}))):
                return False
        self._record()
        return True


def _that_matter(hooks: dict[Any, Any]) -> dict[Any, Any]:
    return {key: hook for key, hook in hooks.items() if not str(getattr(hook, "__module__", "")).startswith(_HARMLESS)}


def _has_state(module: nn.Module, name: str) -> bool:
    """Whether an attribute says something about adapters; models of transformers have methods of these names."""
    return hasattr(module, name) and not callable(getattr(module, name))


def _storages(tensors: list[torch.Tensor]) -> Iterator[torch.UntypedStorage]:
    for tensor in tensors:
        if fx_private.storage_of(tensor) is not None:
            yield tensor.untyped_storage()


@functools.cache
def _count_fused_steps() -> None:
    register_optimizer_step_post_hook(_count_fused_step)


def _count_fused_step(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
    """Fused optimizers write weights without counting it in them, so it is counted here."""
    for group in optimizer.param_groups:
        if group.get("fused"):
            torch.autograd.graph.increment_version([weight for weight in group["params"] if weight.grad is not None])


def read_in_eval(model: nn.Module) -> list[torch.Tensor]:
    """The parameters and buffers whose values count in eval mode: how many batches a batch norm saw does not."""
    norms = [module for module in model.modules() if isinstance(module, nn.modules.batchnorm._NormBase)]
    counters = {id(norm.num_batches_tracked) for norm in norms}
    tensors = {id(tensor): tensor for tensor in (*model.parameters(), *model.buffers())}
    return [tensor for key, tensor in tensors.items() if key not in counters]


def _followed(weights: list[torch.Tensor], gm: GraphModule | None) -> _Pairs:
    """The weights that lie in the memory of the graph's tensors, each with a hold on that memory. Buffers are not among
    them if the graph has constants: those may have been computed from a buffer that the graph also reads."""
    if gm is None:
        return [(weight, weight.detach()) for weight in weights]
    changes = history(gm)
    operations = {type(record.map.operation) for change in changes for record in change.maps}
    if not operations <= {Concatenate, Constant} or any(change.fingerprints for change in changes):
        return []
    memory: dict[int, list[tuple[int, int]]] = {}
    for tensor in named_tensors(gm).values():
        storage = fx_private.storage_of(tensor)
        if storage is not None:
            memory.setdefault(storage, []).append(fx_private.span_of(tensor))
    candidates = [w for w in weights if Constant not in operations or isinstance(w, nn.Parameter)]
    return [(weight, weight.detach()) for weight in candidates if _lies_in(memory, weight)]


def _lies_in(memory: dict[int, list[tuple[int, int]]], weight: torch.Tensor) -> bool:
    storage = fx_private.storage_of(weight)
    if storage not in memory:
        return False
    first, last = fx_private.span_of(weight)
    return any(start <= first and last <= stop for start, stop in memory[storage])
