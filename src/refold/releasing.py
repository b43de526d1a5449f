"""Large weights give their memory up as soon as they can be computed again, not only when a call is over.

A call must be able to put everything back if it fails, so the photograph it takes holds every old weight until its end:
twice the memory of the model, for a moment. A weight that a parametric map has just replaced can be computed again from
the new one, bit for bit. If nobody but the module holds it, its memory is let go at once; it is filled again if the
call fails, or if it turns out to be alive when the call is over.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import nn

from refold import fx_private

_LARGE = 1 << 16
"""Smaller weights are not worth the trouble."""


class Ledger:
    """The weights of one module whose memory may be given up during a call, and those whose memory was."""

    def __init__(self, gm: nn.Module | None = None) -> None:
        self._owned = owned_alone(gm) if gm is not None else set()
        self._released: list[tuple[torch.Tensor, torch.Tensor, Callable[[], torch.Tensor]]] = []

    def release(self, tensor: torch.Tensor, compute: Callable[[], torch.Tensor]) -> None:
        """Give a weight's memory up, if it is the module's alone; `compute` gives the same bits again. Shape, dtype and
        device stay, so that whoever looks at them after it was replaced sees what was there."""
        if id(tensor) not in self._owned:
            return
        hollow = torch.zeros((), dtype=tensor.dtype, device=tensor.device).expand(tensor.shape)
        self._released.append((tensor, hollow, compute))
        tensor.data = hollow

    def refill(self) -> None:
        """Fill every weight again: the call has failed. Can be called again."""
        while self._released:
            tensor, hollow, compute = self._released[-1]
            if tensor.data_ptr() == hollow.data_ptr():
                tensor.data = compute()
            self._released.pop()

    def settle(self, photographed: Iterable[Any]) -> None:
        """The call is done: fill those that somebody took hold of while it ran, or that are still in use. All others
        are about to die with the call's photograph (records with `module` and `tables`), which holds the last
        references to them and to their modules."""
        if not self._released:
            return
        dying: set[int] = set()
        for record in photographed:
            dying |= _dying(record)
        self._released = [entry for entry in self._released if id(entry[0]) not in dying]
        self.refill()


class _Probe:
    """Holds a module as a photograph's record does."""

    __slots__ = ("module",)

    def __init__(self) -> None:
        self.module = nn.Module()


def _dying(record: Any) -> set[int]:
    """The parameters of a photographed module that only the photograph and the ledger hold. Such a module has two
    references: its own record and the table of its parent's. A parameter has three: the ledger, the list of tensors and
    the table of its record; and one more if the module itself still has it, and dies too."""
    probe, pair = _Probe(), {"tensor": nn.Parameter(torch.empty(0))}
    one_module, one_tensor = sys.getrefcount(probe.module), sys.getrefcount(pair["tensor"])
    module_dies = sys.getrefcount(record.module) == one_module + 1
    kept = record.tables.get("_parameters", {})
    live = fx_private.table(record.module, "_parameters") if kept else {}
    found: set[int] = set()
    for key in kept:
        has_it = live.get(key) is kept[key]
        if kept[key] is not None and (module_dies or not has_it):
            found |= {id(kept[key])} if sys.getrefcount(kept[key]) == one_tensor + 2 + has_it else set()
    return found


def owned_alone(gm: nn.Module) -> set[int]:
    """The large parameters that nothing refers to but one table of a module that nothing refers to but the next table,
    up to the root. Counted by comparison with a probe: how many references an expression adds differs by version."""
    probe: dict[str, Any] = {"module": nn.Module(), "tensor": nn.Parameter(torch.empty(0))}
    one_module, one_tensor = (sys.getrefcount(probe[kind]) for kind in ("module", "tensor"))
    found: set[int] = set()
    pending = [(fx_private.table(gm, "_modules"), fx_private.table(gm, "_parameters"), True)]
    while pending:
        children, parameters, mine = pending.pop()
        large = [key for key in parameters if _is_large(parameters, key)]
        found |= {id(parameters[k]) for k in large if mine and sys.getrefcount(parameters[k]) == one_tensor}
        inner = [key for key in children if key != fx_private.HISTORY_CHILD]
        single = {key: mine and sys.getrefcount(children[key]) == one_module for key in inner}
        pending += [(*_tables_of(children, key), single[key]) for key in inner]
    return found


def _is_large(parameters: dict[str, Any], key: str) -> bool:
    tensor = parameters[key]
    return tensor is not None and not tensor.is_meta and tensor.numel() * tensor.element_size() >= _LARGE


def _tables_of(children: dict[str, Any], key: str) -> tuple[dict[str, Any], dict[str, Any]]:
    module = children[key]
    if module is None or isinstance(module, torch.jit.ScriptModule):
        return {}, {}
    return fx_private.table(module, "_modules"), fx_private.table(module, "_parameters")
