"""Whether what was built from a model still computes with the weights that the model has now.

A rewritten graph holds the model's own tensors, or merged ones that share their memory: weights that are written in
place there are followed. Weights that were folded, made part of a constant, or taken over by an engine are copies, and
their in-place counters must stand still. Memory that is shared may be parted later, when another graph of the same
model is merged or undone; what was shared is a copy from then on, of the same values or out of date.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import nn
from torch.fx import GraphModule

from refold import fx_private
from refold.atomic import operations_done
from refold.fingerprint import same_bits
from refold.history import history
from refold.hollow import named_tensors
from refold.operations import Concatenate, Constant
from refold.optimizing.sightings import Sighting

_Pairs = list[tuple[torch.Tensor, torch.Tensor]]


class Freshness:
    """Watches the weights of a model for one thing that was built from it. It is asked at every call, so it is quick.

    The memory that is read is held to the end, also when the weights move elsewhere."""

    def __init__(self, weights: list[torch.Tensor], gm: GraphModule | None, *, follows: bool) -> None:
        """`follows` says that what was built reads the graph's (without one: the model's) tensors at every call, from
        where they lay when it was built."""
        self._weights = weights
        self._held = _followed(weights, gm) if follows else []
        followed = {id(weight) for weight, _ in self._held}
        self._seen = Sighting(weights, [weight for weight in weights if id(weight) not in followed])
        self._operations = operations_done()

    @property
    def watches(self) -> int:
        """How many weights are looked at for their contents."""
        return self._seen.watches

    def is_fresh(self) -> bool:
        """Whether the weights are those of now."""
        if self._operations != operations_done():
            self._look_again()
        return self._seen.still_holds()

    def _look_again(self) -> None:
        """A graph was changed somewhere in this process, and weights may have moved with it. What was shared is a copy
        from now on; is it a copy of what the weights are now? Other threads ask too, and look themselves until this one
        is done."""
        operations = operations_done()
        if not self._seen.still_there() and self._seen.same_contents():
            parted = any(fx_private.address_of(weight) != fx_private.address_of(held) for weight, held in self._held)
            if not parted or all(same_bits(weight, held) for weight, held in self._held):
                self._seen = Sighting(self._weights, self._weights if parted else self._seen.copied)
        self._operations = operations


def read_in_eval(model: nn.Module) -> list[torch.Tensor]:
    """The parameters, buffers and other tensors whose values count in eval mode: how many batches a batch norm saw does
    not."""
    norms = [module for module in model.modules() if isinstance(module, nn.modules.batchnorm._NormBase)]
    seen = {id(norm.num_batches_tracked) for norm in norms}
    loose = (tensor for module in model.modules() for tensor in _loose_tensors(module))
    found: list[torch.Tensor] = []
    for tensor in (*model.parameters(), *model.buffers(), *loose):
        if id(tensor) not in seen:
            seen.add(id(tensor))
            found.append(tensor)
    return found


def _loose_tensors(module: nn.Module) -> Iterator[torch.Tensor]:
    """The tensors that a module has as plain attributes, or in lists and dicts there: capture made constants of them.
    One that shares the memory of a weight (a view that was kept) is counted with it."""
    for value in fx_private.plain_attributes(module).values():
        items = value.values() if isinstance(value, dict) else value if isinstance(value, list | tuple) else (value,)
        yield from (item for item in items if isinstance(item, torch.Tensor) and not item.is_sparse)


def _followed(weights: list[torch.Tensor], gm: GraphModule | None) -> _Pairs:
    """The weights that lie in the memory of the graph's tensors, each with a hold on that memory. Buffers are not among
    them if the graph has constants: those may have been computed from a buffer that the graph also reads."""
    if gm is None:
        return [(weight, weight.detach()) for weight in weights]
    changes = history(gm)
    operations = {type(record.map.operation) for change in changes for record in change.maps}
    if not operations <= {Concatenate, Constant} or any(change.prints for change in changes):
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
