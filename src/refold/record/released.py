"""Large weights give their memory up as soon as they can be computed again, not only when a call is over.

A call must be able to put everything back if it fails, so the snapshot it takes holds every old weight until its end:
twice the memory of the model, for a moment. A weight that a parametric map has just replaced can be computed again from
the new one, bit for bit. If nothing but the module holds it, its memory is let go at once; it is filled again if the
call fails, or if it turns out to be alive when the call is over.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn
from torch.nn.parameter import is_lazy

from refold import fx_private
from refold.fingerprint import is_sharded
from refold.record.module_tree import ModuleTree

LARGE = 1 << 16
"""Smaller weights are not worth the trouble."""


class ReleasedMemory:
    """The weights of one module whose memory may be given up during a call, and those whose memory was."""

    def __init__(self, tree: ModuleTree | None = None) -> None:
        self._tree = tree
        self._owned = owned_alone(tree) if tree is not None else set()
        self._released: list[tuple[torch.Tensor, torch.Tensor, Callable[[], torch.Tensor]]] = []

    def release(self, tensor: torch.Tensor, compute: Callable[[], torch.Tensor]) -> None:
        """Give a weight's memory up, if it is the module's alone; `compute` gives the same bits again. Shape, dtype and
        device stay, so that they can be read after it was replaced."""
        if id(tensor) not in self._owned:
            return
        empty = torch.zeros((), dtype=tensor.dtype, device=tensor.device).expand(tensor.shape)
        self._released.append((tensor, empty, compute))
        tensor.data = empty

    def has_released(self, tensor: torch.Tensor) -> bool:
        """Whether a weight has given its memory up."""
        return any(released is tensor for released, _empty, _compute in self._released)

    def refill(self) -> None:
        """Fill every weight again: the call has failed. Can be called again."""
        while self._released:
            tensor, empty, compute = self._released[-1]
            if tensor.data_ptr() == empty.data_ptr():
                tensor.data = compute()
            self._released.pop()

    def settle(self) -> None:
        """The call is done: fill those that got another holder while it ran, or that are still in use. All others
        are about to die with the call's snapshot, which holds the last references to them and to their modules."""
        if not self._released or self._tree is None:
            return
        dying = _dying(self._tree)
        self._released = [entry for entry in self._released if id(entry[0]) not in dying]
        self.refill()


class _Counts:
    """How many references there are to a module and to a parameter that only their tables and a snapshot hold.
    Counted on a probe: how many an expression adds differs by version, and so does what a snapshot holds."""

    def __init__(self) -> None:
        root = nn.Module()
        root.child = nn.Module()
        root.child.weight = nn.Parameter(torch.empty(0))
        tree = ModuleTree(root)
        self.module = [*map(sys.getrefcount, tree.modules)][1]
        self.tensor = next(map(sys.getrefcount, tree.tensors))


def owned_alone(tree: ModuleTree) -> set[int]:
    """The large parameters that nothing refers to but one table of a module that nothing refers to but the next table,
    up to the root."""
    if not any(map(_is_large, tree.tensors)):
        return set()
    one = _Counts()
    alone = {id(t) for t, count in _counted(tree.tensors) if count == one.tensor and _is_large(t)}
    found: set[int] = set()
    mine = {""}
    for path, (module, count) in zip(tree.paths, _counted(tree.modules), strict=True):
        parent = path.rpartition(".")[0]
        if path and (count != one.module or parent not in mine):
            continue
        mine.add(path)
        found |= alone & set(map(id, module.__dict__.get("_parameters", {}).values()))
    return found


def _counted(things: list[Any]) -> Iterator[tuple[Any, int]]:
    counts = list(map(sys.getrefcount, things))
    return zip(things, counts, strict=True)


def _dying(tree: ModuleTree) -> set[int]:
    """The parameters that only the snapshot and `ReleasedMemory` hold. A module that dies is in no table any more. A
    parameter that dies is in none either, and was released; or it is still in that of a module that dies too."""
    one = _Counts()
    modules, tensors = ({id(t): count for t, count in _counted(things)} for things in (tree.modules, tree.tensors))
    found: set[int] = set()
    for place, module in enumerate(tree.modules):
        kept = tree.record(place).tables.get("_parameters", {})
        live = fx_private.table(module, "_parameters") if kept else {}
        module_dies = modules[id(module)] == one.module - 1
        for key, tensor in kept.items():
            has_it = live.get(key) is tensor
            if tensor is not None and (module_dies or not has_it) and tensors[id(tensor)] == one.tensor + has_it:
                found.add(id(tensor))
    return found


def _is_large(tensor: torch.Tensor) -> bool:
    known = not (tensor.is_meta or is_lazy(tensor) or is_sharded(tensor))
    return known and tensor.numel() * tensor.element_size() >= LARGE
