"""Folding a batch norm into the linear map before or after it: what the batch-norm transformations share."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import torch
from torch import nn
from torch.fx import Node

from refold.aliasing import writes_to
from refold.edit import Editor, twin_of
from refold.match import Call, GraphView
from refold.releasing import LARGE
from refold.rewrite import Site, Skip
from refold.runtime import linear_with_batch_norm
from refold.weights import FoldBatchNorm


def largest_first(found: Iterable[Site | Skip], weight_of: Callable[[Site], torch.Tensor]) -> list[Site | Skip]:
    """The same with the largest weights in front: while a layer is folded, memory holds it twice, and the corrections
    of all that were folded before. In this order that is never more than the largest layer and all corrections. Small
    ones, whose memory is not given up early either, stay in the order of the graph."""

    def place(item: Site | Skip) -> int:
        weight = weight_of(item) if isinstance(item, Site) else None
        size = weight.numel() * weight.element_size() if weight is not None else 0
        return -size if size >= LARGE else 0

    return sorted(found, key=place)


def must_wait(linear: Call, norm: Call, taken: set[Node], gone: set[Node]) -> bool:
    """Whether a fold must wait for the next round: in this one its layer was taken, or a norm that it reads went."""
    return linear.node in taken or not gone.isdisjoint((linear.input, norm.input))


def why_not_foldable(view: GraphView, linear: Call, norm: Call, operation: FoldBatchNorm) -> str | None:
    """Why a batch norm and the linear map beside it cannot become one, as a sentence."""
    for call in (linear, norm):
        reason = view.why_shared(call)
        if reason is not None:
            return reason if call is linear else f"of its batch norm: {reason}"
    statistics = norm.operands["running_var"].tensor
    if statistics.device != linear.weight.device:
        return "it and its batch norm are on different devices"
    affine = norm.operands.get("gamma")
    if affine is not None and affine.tensor.requires_grad and not linear.weight.requires_grad:
        return "its batch norm is trainable while it is frozen itself"
    return _why_not_moved(view, linear, norm, operation) or _why_not_finite(linear, norm, operation)


def why_read_by_others(first: Call, second: Call) -> str | None:
    """Why what stands between two calls is needed by itself, as a sentence."""
    others = [user.name for user in first.node.users if user is not second.node]
    return f"the output of {first.node.name} is also read by {', '.join(others)}" if others else None


def _why_not_moved(view: GraphView, linear: Call, norm: Call, operation: FoldBatchNorm) -> str | None:
    """A layer takes over what the norm before it read: at its own place, which comes later."""
    first, second = (linear, norm) if operation.first == "linear" else (norm, linear)
    if view.mode_switches_between(first.node, second.node):
        return "gradients, autocast or inference mode is switched between it and its batch norm"
    if operation.first == "linear":
        return None
    writer = writes_to(view.gm, norm.input, view.writers_between(norm.node, linear.node))
    return None if writer is None else f"{writer.name} writes into what its batch norm reads before the layer runs"


def _why_not_finite(linear: Call, norm: Call, operation: FoldBatchNorm) -> str | None:
    """In float16 `s·W` may be too large where `W` and the normalised values are not. A bound that costs little goes
    first: no new number is above `|W|·(|s| + n·|t|) + (|s| + 1)·|b| + |s| + |t|`, with n inputs to an output."""
    values = {role: operand.tensor.detach() for call in (linear, norm) for role, operand in call.operands.items()}
    if any(tensor.is_meta or not tensor.numel() for tensor in values.values()):
        return None
    scale, shift = (float(tensor.abs().max()) for tensor in operation.scale(values))
    weight, bias = (float(values[role].abs().max()) if role in values else 0.0 for role in ("weight", "bias"))
    bound = weight * (scale + values["weight"][0].numel() * shift) + (scale + 1) * bias + scale + shift
    if bound <= torch.finfo(linear.weight.dtype).max:
        return None
    if not _overflows(values, operation.forward(values)):
        return None
    return f"finite numbers of its weights would not be finite in {linear.weight.dtype} when folded"


def _overflows(old: dict[str, torch.Tensor], new: dict[str, torch.Tensor]) -> bool:
    """Whether finite numbers become others; a weight that holds inf or NaN already may keep them."""
    if bool((torch.isfinite(old["weight"]) & ~torch.isfinite(new["weight"])).any()):
        return True
    old_finite, new_finite = (all(bool(torch.isfinite(t).all()) for t in tensors.values()) for tensors in (old, new))
    return old_finite and not new_finite


def fold(edit: Editor, linear: Call, norm: Call, operation: FoldBatchNorm, keep: str) -> Node:
    """Fold a batch norm into a linear map and take it out of the graph; the node that now computes both."""
    names = {role: operand.name for role, operand in linear.operands.items()}
    sources = names | {role: operand.name for role, operand in norm.operands.items()}
    prefix = linear.path or names["weight"].rpartition(".")[0]
    inside = f"{prefix}." if prefix else ""
    bias = names.get("bias") or (f"{inside}bias" if linear.path else edit.free_path(f"{inside}bias"))
    targets = {"weight": names["weight"], "bias": bias}
    if operation.guard:
        targets |= {role: edit.free_path(f"{inside}{role}") for role in ("scale", "shift")}
    new = edit.map_weights(operation, sources, targets, keep)
    _install(edit, linear, norm, new, targets, operation.guard)
    _take_out(edit, linear, norm, operation.first)
    return linear.node


def _install(
    edit: Editor, linear: Call, norm: Call, new: dict[str, torch.Tensor], names: dict[str, str], guard: bool
) -> None:
    beta = norm.operands["beta"].tensor if "beta" in norm.operands else None
    trains = {"weight": linear.weight.requires_grad}
    shift = linear.bias if linear.bias is not None else beta
    trains["bias"] = shift is not None and shift.requires_grad  # what has no origin to return to must not be trained
    tensors: dict[str, torch.Tensor] = {role: nn.Parameter(new[role], requires_grad=trains[role]) for role in trains}
    tensors |= {role: value for role, value in new.items() if role not in trains}
    if linear.path is not None and not guard:
        edit.put_module(linear.path, twin_of(edit.gm.get_submodule(linear.path), **tensors))
        return
    node = linear.node
    if linear.path is not None:
        edit.put_module(linear.path, nn.Module().train(edit.gm.get_submodule(linear.path).training))
    fetches = [n for n in node.all_input_nodes if n.op == "get_attr"]
    for role, tensor in tensors.items():
        edit.put_tensor(names[role], tensor)
    fetched = {role: edit.fetch(node, name) for role, name in names.items()}
    node.args, node.kwargs = (linear.input, fetched["weight"], fetched["bias"]), dict(linear.settings)
    if guard:
        node.op, node.target = "call_function", linear_with_batch_norm
        node.args, node.kwargs = (linear.input, *fetched.values(), norm.input is node), {}
    for fetch in [n for n in fetches if not n.users]:  # the input may be fetched as well, and stays
        edit.graph.erase_node(fetch)


def _take_out(edit: Editor, linear: Call, norm: Call, first: str) -> None:
    if first == "linear":
        edit.replace_uses(norm.node, linear.node)
    else:
        linear.node.replace_input_with(norm.node, norm.input)
    edit.erase(norm.node)
    for path in [norm.path] if norm.path else [operand.name for operand in norm.operands.values()]:
        edit.remove(path)
