"""Whether what was built from a model still computes with the weights that the model has now.

A rewritten graph holds the model's own tensors, or merged ones that share their memory, so weights that are written in
place are seen. Folded weights, and those that an engine took over, are copies: there the in-place counters must stand
still. And memory that is shared may be parted later, when another graph of the same model is merged or undone: then the
shared ones turn into copies, which hold the same values at that moment or are out of date.
"""

from __future__ import annotations

from collections import Counter

import torch
from torch import nn
from torch.fx import GraphModule

from refold import fx_private
from refold.atomic import operations_done
from refold.fingerprint import same_bits
from refold.history import find_tensor, history
from refold.hollow import named_tensors
from refold.weights import Concatenate

_Pairs = list[tuple[torch.Tensor, torch.Tensor]]


class Freshness:
    """Watches the weights of a model for one thing that was built from it. It is asked at every call, so it is quick.

    The memory that is read is held to the end, also when the weights move elsewhere."""

    def __init__(self, weights: list[torch.Tensor], gm: GraphModule | None, *, follows: bool) -> None:
        """`follows` says that what was built reads the graph's (without one: the model's) tensors at every call, from
        where they lay when it was built."""
        self._weights = weights
        self._versions: list[int | None] | None = fx_private.versions_of(weights)
        self._held = _shared_memory(weights, gm) if follows else None
        self._is_shared = self._held is not None
        self._operations = operations_done()

    def is_fresh(self) -> bool:
        """Whether the weights are those of now."""
        if not self._is_shared:
            return fx_private.versions_of(self._weights) == self._versions
        return operations_done() == self._operations or self._look_again()

    def _look_again(self) -> bool:
        """A graph was changed somewhere in this process: see whether the memory is still the same. If not, it is a copy
        from now on; is it a copy of what the weights are now?"""
        assert self._held is not None
        self._operations = operations_done()
        if all(fx_private.address_of(weight) == fx_private.address_of(held) for weight, held in self._held):
            return True
        is_same = all(same_bits(weight, held) for weight, held in self._held)
        self._is_shared = False
        self._versions = fx_private.versions_of(self._weights) if is_same else None
        return is_same


def read_in_eval(model: nn.Module) -> list[torch.Tensor]:
    """The parameters and buffers whose values count in eval mode: how many batches a batch norm saw does not."""
    norms = [module for module in model.modules() if isinstance(module, nn.modules.batchnorm._NormBase)]
    counters = {id(norm.num_batches_tracked) for norm in norms}
    return [weight for weight in (*model.parameters(), *model.buffers()) if id(weight) not in counters]


def _shared_memory(weights: list[torch.Tensor], gm: GraphModule | None) -> _Pairs | None:
    """Every weight that lies in the memory of the graph's tensors, with the piece of memory where it lies; None if the
    graph has weights that were computed from these and lie elsewhere."""
    if gm is None:
        return [(weight, weight.detach()) for weight in weights]
    records = [record for change in history(gm) for record in change.maps]
    if not all(isinstance(record.map.operation, Concatenate) for record in records):
        return None
    read = {fx_private.storage_of(tensor) for tensor in named_tensors(gm).values()}
    pairs = [(weight, weight.detach()) for weight in weights if fx_private.storage_of(weight) in read]
    covered = Counter[int | None]()
    for weight in {fx_private.address_of(weight): weight for weight, _ in pairs}.values():  # tied ones count once
        covered[fx_private.storage_of(weight)] += weight.numel()
    merged = [find_tensor(gm, name) for record in records for name in record.map.targets.values()]
    are_views = all(whole is not None and covered[fx_private.storage_of(whole)] >= whole.numel() for whole in merged)
    return pairs if are_views else None
