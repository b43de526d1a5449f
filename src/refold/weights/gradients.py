"""Gradients go where the weights go: into a rewrite's new parameters, and back out of them."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import torch

from refold.weights.map_operation import Tensors
from refold.weights.maps import MapRecord


def gradients_back(record: MapRecord, current: Tensors, values: Tensors) -> Tensors:
    """The gradients of a map's sources, by role, from those of its targets; `values` are the recovered sources."""
    grads = {role: tensor.grad for role, tensor in current.items() if tensor.grad is not None}
    if not grads or not {role for role, tensor in current.items() if tensor.requires_grad} <= set(grads):
        return {}
    moved = record.gradient_inverse(grads, values, 1)
    return {role: grad for role, grad in moved.items() if grad.shape == values[role].shape}


@torch.no_grad()
def gradients_forward(maps: Iterable[MapRecord], find: Callable[[str], torch.Tensor | None]) -> None:
    """Give the tensors that weight maps made the gradients that their sources had, where these determine them."""
    grads: Tensors = {}
    for record in maps:
        grads |= _moved(record, grads)
    for name, grad in grads.items():
        target = find(name)
        if target is not None and target.requires_grad and target.is_leaf and grad.shape == target.shape:
            target.grad = grad.to(target.dtype)


def _moved(record: MapRecord, earlier: Tensors) -> Tensors:
    sources = {role: spec.original.get() for role, spec in record.specs.items()}
    values = {role: tensor.detach() for role, tensor in sources.items() if tensor is not None}
    if len(values) < len(sources):
        return {}  # a tensor between two maps of one change: it had no life of its own, and no gradient
    given = {role: earlier.pop(record.map.sources[role], t.grad) for role, t in sources.items()}
    known = {role: grad for role, grad in given.items() if grad is not None}
    if not known or not {role for role, t in sources.items() if t.requires_grad} <= set(known):
        return {}
    moved = record.gradient_forward(known, values, 1)
    return {record.map.targets[role]: grad for role, grad in moved.items()}
