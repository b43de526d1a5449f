"""MergeConvolutions: convolutions of equal geometry that read the same input become one."""

from __future__ import annotations

import itertools
import operator
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.fx import Node

from refold.aliasing import switches_mode, writes_to
from refold.edit import Editor, twin_of
from refold.match import Call, GraphView, match_conv
from refold.rewrite import Example, ReversibleRewrite, Site, Skip
from refold.slicing import make_views_reshapes, merged_path, why_not_movable, why_not_sliceable
from refold.tensor_memory import tied_by_memory
from refold.weights import Concatenate

aten = torch.ops.aten

_GEOMETRY = ("stride", "padding", "dilation", "groups", "padding_mode")
_DEFAULTS: dict[str, Any] = {"stride": 1, "padding": 0, "dilation": 1, "groups": 1, "padding_mode": "zeros"}


@dataclass(frozen=True)
class _Conv:
    """A convolution with its geometry."""

    call: Call
    dims: int
    geometry: tuple[Any, ...]


@dataclass(frozen=True, kw_only=True, repr=False)
class MergeConvolutions(ReversibleRewrite):
    """Merge convolutions that read the same input and have the same kernel size, stride, padding and dilation.

    `y₁ = W₁ ∗ x + b₁, y₂ = W₂ ∗ x + b₂`  becomes  `y = [W₁; W₂] ∗ x + [b₁; b₂]`, `y₁ = y[:, :n₁]`, `y₂ = y[:, n₁:]`
    (the channel axis counted from the last one, so that an input without a batch is right too).

    Grouped convolutions are left alone: their output channels would belong to other groups. All or none must have a
    bias. The originals come back by slicing the current weights, and share the merged memory meanwhile.
    """

    @classmethod
    def examples(cls) -> Iterable[Example]:
        from refold import examples

        return [examples.branches(), examples.exported_branches()]

    def find(self, view: GraphView) -> Iterator[Site | Skip]:
        groups: dict[tuple[Any, ...], list[_Conv]] = {}
        mode = 0
        for node in view.nodes:
            mode += switches_mode(node)
            found = _match(view, node)
            if isinstance(found, str):
                yield Skip(node, found)
            elif found is not None:
                groups.setdefault((found.call.input, mode), []).append(found)
        tied = tied_by_memory(view.gm)
        for convs in groups.values():
            yield from self._sites(view, convs, tied)

    def _sites(self, view: GraphView, convs: list[_Conv], tied: dict[int, str]) -> Iterator[Site | Skip]:
        if len(convs) < 2:
            yield Skip(convs[0].call.node, "no other convolution reads the same input")
            return
        alike: dict[tuple[Any, ...], list[_Conv]] = {}
        for conv in convs:
            reason = _why_not(view, conv) or why_not_movable(conv.call, tied)
            if reason is None:
                alike.setdefault(_kind(view, conv), []).append(conv)
            else:
                yield Skip(conv.call.node, reason)
        for group in alike.values():
            reason = _why_not_together(view, group)
            if reason is not None:
                yield from (Skip(conv.call.node, reason) for conv in group)
                continue
            names = ", ".join(_name(conv.call) for conv in group)
            yield Site(tuple(conv.call.node for conv in group), f"merged {names}", group)

    def rewrite(self, site: Site, edit: Editor) -> None:
        calls = [conv.call for conv in site.detail]
        path = edit.free_path(merged_path([_name(call) for call in calls]))
        widths = tuple(int(call.weight.shape[0]) for call in calls)
        weight = _concatenate(edit, calls, "weight", f"{path}.weight", widths)
        bias = _concatenate(edit, calls, "bias", f"{path}.bias", widths) if calls[0].bias is not None else None
        merged = _insert(edit, calls, path, weight, bias)
        self.mark_as_transformed(merged)
        start = 0
        for conv, width in zip(site.detail, widths, strict=True):
            self._become_slice(edit, conv, merged, start, start + width)
            start += width

    def _become_slice(self, edit: Editor, conv: _Conv, merged: Node, start: int, stop: int) -> None:
        call, node = conv.call, conv.call.node
        fetches = [n for n in node.all_input_nodes if n.op == "get_attr"]
        if call.kind == "aten":
            node.target, node.args = aten.slice.Tensor, (merged, -conv.dims - 1, start, stop)
        else:
            where: Any = (..., slice(start, stop), *[slice(None)] * conv.dims)
            node.op, node.target, node.args = "call_function", operator.getitem, (merged, where)
        node.kwargs = {}
        self.mark_as_transformed(node)
        make_views_reshapes(edit.gm, node)
        for fetch in [n for n in fetches if not n.users]:  # the input may be fetched as well, and stays
            edit.graph.erase_node(fetch)
        for name in [call.path] if call.path else [operand.name for operand in call.operands.values()]:
            edit.remove(name)


def _match(view: GraphView, node: Node) -> _Conv | str | None:
    for dims in (1, 2, 3):
        call = match_conv(view, node, dims)
        if isinstance(call, Call):
            holder: Any = view.module(call.path) if call.path else None
            settings = {k: getattr(holder, k) for k in _GEOMETRY} if holder is not None else _DEFAULTS | call.settings
            return _Conv(call, dims, tuple(_spread(settings[k], dims) for k in _GEOMETRY))
        if call is not None:
            return call
    return None


def _spread(value: Any, dims: int) -> Any:
    """One number may stand for all dimensions."""
    values = tuple(value) if isinstance(value, list | tuple) else value
    return (values,) * dims if isinstance(values, int) else values * dims if _is_single(values) else values


def _is_single(values: Any) -> bool:
    return isinstance(values, tuple) and len(values) == 1


def _why_not(view: GraphView, conv: _Conv) -> str | None:
    if conv.geometry[3] != (1,) * conv.dims:
        return "it is grouped"
    if not all(isinstance(value, str | tuple) for value in conv.geometry):
        return "its geometry is computed"
    return view.why_shared(conv.call) or why_not_sliceable(view, conv.call.node)


def _kind(view: GraphView, conv: _Conv) -> tuple[Any, ...]:
    """What convolutions must have in common to be merged."""
    call = conv.call
    module = view.module(call.path) if call.path else view.gm
    bias = None if call.bias is None else (call.bias.dtype, call.bias.requires_grad)
    own = (call.weight.dtype, call.weight.device, tuple(call.weight.shape[1:]), call.weight.requires_grad, bias)
    return (conv.dims, conv.geometry, own, call.kind, getattr(call.node, "target", None) if not call.path else None,
            module is not None and module.training)  # fmt: skip


def _why_not_together(view: GraphView, group: list[_Conv]) -> str | None:
    if len(group) < 2:
        return "the others on its input differ in geometry, dtype, device, bias, training mode or in what is frozen"
    for one, two in itertools.pairwise(group):
        between = view.writers_between(one.call.node, two.call.node)
        writer = writes_to(view.gm, two.call.input, between)
        if writer is not None:
            return f"{writer.name} writes into its input between it and the others"
    return None


def _name(call: Call) -> str:
    return call.path or call.operands["weight"].name.removesuffix(".weight")


def _concatenate(edit: Editor, calls: list[Call], role: str, name: str, widths: tuple[int, ...]) -> nn.Parameter:
    """The joint tensor of one role. The originals become views of it at once, so that memory is never doubled."""
    operands = [call.operands[role] for call in calls]
    sources = {str(i): operand.name for i, operand in enumerate(operands)}
    whole = edit.map_weights(Concatenate(widths), sources, {"whole": name})["whole"]
    for operand, part in zip(operands, whole.split(list(widths)), strict=True):
        if not operand.tensor.is_inference() and not operand.tensor.is_meta:
            operand.tensor.data = part
    return nn.Parameter(whole, requires_grad=operands[0].tensor.requires_grad)


def _insert(edit: Editor, calls: list[Call], path: str, weight: nn.Parameter, bias: nn.Parameter | None) -> Node:
    first = calls[0]
    if first.path is not None:
        layer: Any = twin_of(edit.gm.get_submodule(first.path), weight=weight, bias=bias)
        layer.out_channels = weight.shape[0]
        edit.put_module(path, layer)
        return edit.call(first.node, path, first.input)
    edit.put_tensor(f"{path}.weight", weight)
    fetched = [edit.fetch(first.node, f"{path}.weight"), None]
    if bias is not None:
        edit.put_tensor(f"{path}.bias", bias)
        fetched[1] = edit.fetch(first.node, f"{path}.bias")
    return edit.call(first.node, first.node.target, first.input, *fetched, **first.settings)
