"""A batch norm and the layer it can be folded into: found, checked, put in order and folded."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import nn
from torch.fx import Node

from refold.graph.aliasing import writes_to
from refold.graph.values import rank_of
from refold.graph.view import Call, GraphView
from refold.record.released import LARGE
from refold.rewrite.description import Keep
from refold.rewrite.editor import Editor
from refold.rewrite.operators import BATCH_NORM, Operator
from refold.rewrite.refusal import Refuse, attempt, only_reader, own
from refold.rewrite.rule import Rewrite, Site, Skip
from refold.runtime import linear_with_batch_norm
from refold.weights import FoldBatchNormInLayer
from refold.weights.batch_norm_maps import FoldBatchNormBeforeConvolution, FoldBatchNormInTransposed
from refold.weights.sharded import largest, lay_out


@dataclass(frozen=True)
class Pair:
    """A batch norm and a layer that it may go into: a linear layer has no dimensions, a convolution one to three."""

    layer: Call
    norm: Call
    place: str
    """'behind' the layer, 'before' it, or 'flattened': behind it with a reshape to rows in between."""

    @property
    def is_transposed(self) -> bool:
        """Whether the layer is a transposed convolution."""
        return self.layer.dims > 0 and self.layer.out_axis == 1

    @property
    def channels(self) -> int:
        """The channels of the layer that the batch norm must have."""
        if self.is_transposed:
            return int(self.layer.weight.shape[1] * self.layer.settings["groups"])
        return int(self.layer.weight.shape[1 if self.place == "before" else 0])

    @property
    def operation(self) -> FoldBatchNormInLayer:
        """The map that folds it. It works at every rank where a linear layer's is not known."""
        eps, dims = float(self.norm.settings["eps"]), self.layer.dims
        channel, first = (1, "norm") if self.place == "before" else (0, "linear")
        if self.is_transposed:
            return FoldBatchNormInTransposed(eps, channel, first, groups=self.layer.settings["groups"])
        if dims and self.place == "before":
            return FoldBatchNormBeforeConvolution(eps, channel, first, dims=dims)
        guard = dims == 0 and self.place != "flattened" and rank_of(self.norm.input) is None
        return FoldBatchNormInLayer(eps, channel, first, guard)


def layers_at(
    view: GraphView, node: Node, norm: Call, place: str, *operators: Operator, dims: int | None = None
) -> Iterator[Pair | Refuse]:
    """A batch norm with the layer that a node calls, if it calls one of these operators, or why that is left alone."""
    for operator in operators:
        call = attempt(operator.match, view, node, dims)
        if isinstance(call, Refuse):
            yield Refuse(f"{node.name} is left alone: {call.reason}")
        elif call is not None:
            yield Pair(call, norm, place)


@dataclass(frozen=True, kw_only=True, repr=False)
class FoldRule(Rewrite):
    """What rules that fold batch norms share; they say which layers stand next to one, and what makes a fold exact."""

    kind: ClassVar[str] = "parametric"
    norm_dims: ClassVar[int | None] = None
    """Over how many dimensions the batch norms run; None for any."""
    keep: Keep = "correction"

    @abstractmethod
    def neighbours(self, view: GraphView, norm: Call) -> Iterable[Pair | Refuse]:
        """The layers that a batch norm may go into, and at last why there is none."""

    def check_exact(self, pair: Pair) -> None:
        """Refuse a pair whose fold would compute something else."""
        check_rank(pair)

    def match(self, view: GraphView, node: Node) -> Site | None:
        """The first neighbour that a batch norm can be folded into; else the first refusal counts. It waits while
        another fold takes the layer, or removes what the layer or the norm reads."""
        norm = BATCH_NORM.match(view, node, self.norm_dims)
        if norm is None:
            return None
        refusals: list[Refuse] = []
        for candidate in self.neighbours(view, norm):
            pair = candidate if isinstance(candidate, Refuse) else attempt(self._checked, view, candidate)
            if isinstance(pair, Pair):
                layer, what = pair.layer, f"folded {node.name} into {pair.layer.node.name}"
                return Site((layer.node, node), what, pair, (layer.input, norm.input))
            refusals.append(pair)
        raise refusals[0]

    def _checked(self, view: GraphView, pair: Pair) -> Pair:
        self.check_exact(pair)
        _check_partners(view, pair)
        _check_finite(pair)
        return pair

    def find(self, view: GraphView) -> Iterable[Site | Skip]:
        """The largest weights first: while a layer is folded, memory holds it twice, and the corrections of all that
        were folded before. In this order that is never more than the largest layer and all corrections. Small ones,
        whose memory is not given up early either, stay in the order of the graph."""

        def order(item: Site | Skip) -> int:
            weight = item.detail.layer.weight if isinstance(item, Site) else None
            size = weight.numel() * weight.element_size() if weight is not None else 0
            return -size if size >= LARGE else 0

        return sorted(super().find(view), key=order)

    def rewrite(self, site: Site, edit: Editor) -> None:
        fold(edit, site.detail, self.keep)


# --- checks --------------------------------------------------------------------------------------------------------


def check_rank(pair: Pair) -> None:
    """Refuse a batch norm that may run over another axis than the layer's channels."""
    rank, dims = rank_of(pair.norm.input), pair.layer.dims
    if dims == 0:
        gamma = pair.norm.operands.get("gamma")
        if rank not in (None, 2):
            raise Refuse(f"it runs over axis 1 of a {rank}-D value, and the linear layer over the last")
        if rank is None and gamma is not None and not gamma.tensor.is_meta and bool((gamma.tensor == 0).any()):
            raise Refuse("the rank of its input is not known, and one of its scales is 0")
        return
    # BatchNorm2d and 3d take values of one rank, with a batch; BatchNorm1d and the function take others too
    if rank is None and (pair.norm.path is None or dims == 1 or pair.norm.dims != dims):
        raise Refuse("the rank of its input is not known")
    if rank not in (None, dims + 2):
        raise Refuse(f"it runs over axis 1 of a {rank}-D value, which is not the channel axis of the convolution")


def _check_partners(view: GraphView, pair: Pair) -> None:
    """Refuse two that do not fit each other, or where other nodes read, write or switch what is between them."""
    layer, norm = pair.layer, pair.norm
    statistics, gamma = norm.operands["running_var"].tensor, norm.operands.get("gamma")
    if statistics.numel() != pair.channels:
        raise Refuse("it has another number of channels than the layer, or runs over another axis")
    if pair.place == "before" and layer.input is not norm.node:
        raise Refuse("it is not the input of the layer behind it")
    first, second = (norm.node, layer.node) if pair.place == "before" else (layer.node, norm.node)
    if pair.place != "flattened":
        only_reader(first, second)
    own(view, layer)
    shared = attempt(own, view, norm)
    if shared is not None:
        raise Refuse(f"of its batch norm: {shared.reason}")
    if statistics.device != layer.weight.device:
        raise Refuse("it and its batch norm are on different devices")
    if gamma is not None and gamma.tensor.requires_grad and not layer.weight.requires_grad:
        raise Refuse("its batch norm is trainable while it is frozen itself")
    if view.mode_switches_between(first, second):
        raise Refuse("gradients, autocast or inference mode is switched between it and its batch norm")
    writer = writes_to(view.gm, norm.input, view.writers_between(first, second)) if pair.place == "before" else None
    if writer is not None:
        raise Refuse(f"{writer.name} writes into what its batch norm reads before the layer runs")


def _check_finite(pair: Pair) -> None:
    """In float16 `s·W` may be too large where `W` and the normalised values are not. A bound that costs little goes
    first: no new number is above `|W|·(|s| + n·|t|) + (|s| + 1)·|b| + |s| + |t|`, with n inputs to an output."""
    operands, operation, dtype = pair.layer.operands | pair.norm.operands, pair.operation, pair.layer.weight.dtype
    values = {role: operand.tensor.detach() for role, operand in operands.items()}
    if any(tensor.is_meta or not tensor.numel() for tensor in values.values()):
        return
    vectors = {role: lay_out(tensor, None) for role, tensor in values.items() if role != "weight"}
    scale, shift = map(largest, operation.scale(vectors))
    weight, bias = (largest(values[role]) if role in values else 0.0 for role in ("weight", "bias"))
    bound = weight * (scale + values["weight"][0].numel() * shift) + (scale + 1) * bias + scale + shift
    if not bound <= torch.finfo(dtype).max:
        whole = {"weight": lay_out(values["weight"], None)} | vectors
        if _overflows(whole, operation.forward(whole)):
            raise Refuse(f"finite numbers of its weights would not be finite in {dtype} when folded")


def _overflows(old: dict[str, torch.Tensor], new: dict[str, torch.Tensor]) -> bool:
    """Whether finite numbers become others; a weight that holds inf or NaN already may keep them."""
    if bool((torch.isfinite(old["weight"]) & ~torch.isfinite(new["weight"])).any()):
        return True
    old_finite, new_finite = (all(bool(torch.isfinite(t).all()) for t in tensors.values()) for tensors in (old, new))
    return old_finite and not new_finite


# --- folding -------------------------------------------------------------------------------------------------------


def fold(edit: Editor, pair: Pair, keep: str) -> None:
    """Fold the batch norm of a pair into its layer and take it out of the graph."""
    layer, norm, operation = pair.layer, pair.norm, pair.operation
    names = {role: operand.name for role, operand in layer.operands.items()}
    sources = names | {role: operand.name for role, operand in norm.operands.items()}
    parent = layer.path or names["weight"].rpartition(".")[0]
    inside = f"{parent}." if parent else ""
    bias = names.get("bias") or (f"{inside}bias" if layer.path else edit.free_path(f"{inside}bias"))
    targets = {"weight": names["weight"], "bias": bias}
    if operation.guard:
        targets |= {role: edit.free_path(f"{inside}{role}") for role in ("scale", "shift")}
    new = edit.map_weights(operation, sources, targets, keep)
    origin = layer.operands.get("bias") or norm.operands.get("beta")  # without one to return to it is not trained
    new["bias"] = nn.Parameter(new["bias"], requires_grad=origin is not None and origin.tensor.requires_grad)
    source = norm.input if pair.place == "before" else layer.input
    if operation.guard:
        new["weight"] = nn.Parameter(new["weight"], requires_grad=layer.weight.requires_grad)
        _call_guarded(edit, pair, source, new, targets)
    else:
        edit.replace_layer(layer, names=targets, input=source, weight=new["weight"], bias=new["bias"])
    if pair.place == "behind":
        edit.replace_uses(norm.node, layer.node)
    elif pair.place == "flattened":  # the rows take its place
        norm.node.replace_all_uses_with(norm.input, propagate_meta=False)
    edit.erase(norm.node)
    edit.remove_layer(norm)


def _call_guarded(
    edit: Editor, pair: Pair, source: Node, tensors: dict[str, torch.Tensor], names: dict[str, str]
) -> None:
    """Let a linear layer look at the rank of its input when it runs."""
    layer, node = pair.layer, pair.layer.node
    if layer.path is not None:
        edit.put_module(layer.path, nn.Module().train(edit.gm.get_submodule(layer.path).training))
    for role, tensor in tensors.items():
        edit.put_tensor(names[role], tensor)
    fetched = [edit.fetch(node, name) for name in names.values()]
    before = [fetch for fetch in node.all_input_nodes if fetch.op == "get_attr"]
    node.op, node.target = "call_function", linear_with_batch_norm
    node.args, node.kwargs = (source, *fetched, pair.place == "behind"), {}
    edit.mark(node)
    for fetch in [fetch for fetch in before if not fetch.users]:  # the input may be fetched as well, and stays
        edit.graph.erase_node(fetch)
