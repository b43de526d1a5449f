"""A weight map tried on tensors without numbers, before anything is read: what would come out, or why it fails."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from refold.weights import Concatenate, Operation, Pad, Slice, Tensors


class DoesNotFit(Exception):
    """The map cannot be applied to tensors of these shapes, or would not lead back to them."""


def tried(operation: Operation, given: Tensors, *, back: bool = False) -> Tensors:
    """What a map makes of tensors on the meta device; its way back must make tensors of their shapes again."""
    try:
        made = _moved(operation, given, back)
        again = _moved(operation, made, not back) if operation.structural else given
    except (RuntimeError, IndexError, KeyError) as error:
        raise DoesNotFit(str(error)) from None
    lost = next((role for role, tensor in given.items() if tensor.shape != again[role].shape), None)
    if lost is not None:
        raise DoesNotFit(f"its way back makes {list(again[lost].shape)} of {list(given[lost].shape)}")
    return made


def _moved(operation: Operation, given: Tensors, back: bool) -> Tensors:
    """Joining is counted here: `torch.cat` of such tensors loads a compiler, which takes longer than all the rest."""
    if isinstance(operation, Slice if back else Concatenate):
        return {"whole": _joined([given[str(i)] for i in range(len(operation.sizes))], operation.dim)}
    if isinstance(operation, Pad) and not back:
        whole = given["weight"]
        shape = [operation.count if axis == operation.dim % whole.dim() else n for axis, n in enumerate(whole.shape)]
        return {"weight": _joined([whole, whole.new_empty(shape)], operation.dim)}
    return operation.inverse(given, {}) if back else operation.forward(given)


def _joined(parts: Sequence[torch.Tensor], dim: int) -> torch.Tensor:
    first = parts[0]
    if not -first.dim() <= dim < first.dim():
        raise IndexError(f"a tensor of shape {list(first.shape)} has no axis {dim}")
    axis = dim % first.dim()
    shapes = [list(part.shape) for part in parts]
    whole = [*shapes[0][:axis], sum(shape[axis] for shape in shapes if len(shape) > axis), *shapes[0][axis + 1 :]]
    if any(len(s) != len(whole) or s[:axis] + s[axis + 1 :] != whole[:axis] + whole[axis + 1 :] for s in shapes):
        raise RuntimeError(f"only tensors that differ in nothing but the axis {dim} can be joined")
    return first.new_empty(whole)
