"""Folding a batch norm into the linear map before or after it: what the batch-norm transformations share."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import torch
from torch import nn
from torch.fx import Node

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


def why_not_foldable(view: GraphView, linear: Call, norm: Call, first: Call) -> str | None:
    """Why a batch norm and the linear map beside it cannot become one, as a sentence."""
    second = norm if first is linear else linear
    others = [user.name for user in first.node.users if user is not second.node]
    if others:
        return f"the output of {first.node.name} is also read by {', '.join(others)}"
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
    return None


def fold(
    edit: Editor,
    linear: Call,
    norm: Call,
    *,
    channel: int,
    keep: str,
    guard: bool = False,
    kind: Callable[..., FoldBatchNorm] = FoldBatchNorm,
) -> Node:
    """Fold a batch norm into a linear map and take it out of the graph; the node that now computes both. `kind` makes
    the weight map, for weights that are laid out in another way."""
    first = "linear" if norm.input is linear.node else "norm"
    names = {role: operand.name for role, operand in linear.operands.items()}
    sources = names | {role: operand.name for role, operand in norm.operands.items()}
    prefix = linear.path or names["weight"].rpartition(".")[0]
    inside = f"{prefix}." if prefix else ""
    bias = names.get("bias") or (f"{inside}bias" if linear.path else edit.free_path(f"{inside}bias"))
    targets = {"weight": names["weight"], "bias": bias}
    if guard:
        targets |= {role: edit.free_path(f"{inside}{role}") for role in ("scale", "shift")}
    operation = kind(float(norm.settings["eps"]), channel, first, guard)
    new = edit.map_weights(operation, sources, targets, keep)
    _install(edit, linear, norm, new, targets, guard)
    _take_out(edit, linear, norm, first)
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
    for fetch in fetches:
        edit.graph.erase_node(fetch)


def _take_out(edit: Editor, linear: Call, norm: Call, first: str) -> None:
    if first == "linear":
        edit.replace_uses(norm.node, linear.node)
    else:
        linear.node.replace_input_with(norm.node, norm.input)
    edit.erase(norm.node)
    for path in [norm.path] if norm.path else [operand.name for operand in norm.operands.values()]:
        edit.remove(path)
