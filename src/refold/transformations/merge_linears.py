"""MergeLinears: linear layers that read the same input become one."""

from __future__ import annotations

import operator
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.fx import Node

from refold.aliasing import switches_mode, writes_to
from refold.edit import Editor
from refold.match import Call, GraphView, match_addmm, match_linear
from refold.rewrite import Example, ReversibleRewrite, Site, Skip
from refold.slicing import make_views_reshapes, merged_path, why_not_movable, why_not_sliceable
from refold.tensor_memory import tied_by_memory
from refold.weights import Concatenate

aten = torch.ops.aten


@dataclass(frozen=True, kw_only=True, repr=False)
class MergeLinears(ReversibleRewrite):
    """Merge linear layers that read the same input into one wider layer, and slice its output.

    `y₁ = x·W₁ᵀ + b₁, y₂ = x·W₂ᵀ + b₂`  becomes  `y = x·[W₁; W₂]ᵀ + [b₁; b₂]`, `y₁ = y[…, :n₁]`, `y₂ = y[…, n₁:]`.

    One large matrix product uses the machine better than several small ones (query, key and value; gate and up). Where
    only some layers have a bias, those come first and the joint bias is padded with zeros when it is used, so that a
    layer without a bias never gains one, not even by training. The originals come back by slicing the current weights.
    While merged, the original parameters share the merged memory: nothing is held twice. Weights of (in, out), as those
    of GPT-2's Conv1D (`addmm` on rows), are joined by columns, and their memory is not shared.
    """

    @classmethod
    def examples(cls) -> Iterable[Example]:
        from refold.examples import conv1ds
        from refold.testing import models

        return [models.attention(), models.gated(), models.functional(), models.exported(models.attention()), conv1ds()]

    def find(self, view: GraphView) -> Iterator[Site | Skip]:
        groups: dict[tuple[object, ...], list[Call]] = {}
        mode = 0
        for node in view.nodes:
            mode += switches_mode(node)
            call = match_linear(view, node) or match_addmm(view, node)
            if isinstance(call, str):
                yield Skip(node, call)
            elif call is not None:
                groups.setdefault((call.input, mode), []).append(call)
        tied = tied_by_memory(view.gm)
        for calls in groups.values():
            yield from self._sites(view, calls, tied)

    def _sites(self, view: GraphView, calls: list[Call], tied: dict[int, str]) -> Iterator[Site | Skip]:
        if len(calls) < 2:
            yield Skip(calls[0].node, "no other linear layer reads the same input")
            return
        alike: dict[tuple[object, ...], list[Call]] = {}
        for call in calls:
            reason = view.why_shared(call) or why_not_movable(call, tied) or why_not_sliceable(view, call.node)
            if reason is not None:
                yield Skip(call.node, reason)
                continue
            alike.setdefault(_kind(view, call), []).append(call)
        for group in alike.values():
            yield from self._parts(view, group, len(alike) > 1)

    def _parts(self, view: GraphView, group: list[Call], others: bool) -> Iterator[Site | Skip]:
        """Cut a group where the input is written to between two layers."""
        part = [group[0]]
        for call in group[1:]:
            writer = writes_to(view.gm, call.input, view.writers_between(part[-1].node, call.node))
            if writer is None:
                part.append(call)
                continue
            yield Skip(call.node, f"{writer.name} writes into its input between it and {part[-1].node.name}")
            yield from self._site(part, others)
            part = [call]
        yield from self._site(part, others)

    def _site(self, part: list[Call], others: bool) -> Iterator[Site | Skip]:
        if len(part) > 1:
            names = ", ".join(_name(call) for call in part)
            yield Site(tuple(call.node for call in part), f"merged {names}", part)
        elif others:
            reason = "the others on its input differ in dtype, device, training mode or in what is frozen"
            yield Skip(part[0].node, reason)

    def rewrite(self, site: Site, edit: Editor) -> None:
        # layers with a bias first, so that the joint bias is one piece
        calls: list[Call] = sorted(site.detail, key=lambda call: call.bias is None)
        biased = [call for call in calls if call.bias is not None]
        path = edit.free_path(merged_path([_name(call) for call in site.detail]))
        widths = tuple(_width(call) for call in calls)
        weight = _concatenate(edit, calls, "weight", f"{path}.weight", widths)
        bias = _concatenate(edit, biased, "bias", f"{path}.bias", widths[: len(biased)]) if biased else None
        first = site.detail[0].node
        as_module = all(call.kind == "module" for call in calls) and len(biased) in (0, len(calls))
        if as_module:
            edit.put_module(path, _linear(edit, calls[0], weight, bias))
            merged = edit.call(first, path, calls[0].input)
        else:
            edit.put_tensor(f"{path}.weight", weight)
            merged = _call_function(edit, first, calls, path, bias)
        self.mark_as_transformed(merged)
        start = 0
        for call, width in zip(calls, widths, strict=True):
            self._become_slice(edit, call, merged, start, start + width)
            start += width

    def _become_slice(self, edit: Editor, call: Call, merged: Node, start: int, stop: int) -> None:
        node = call.node
        fetches = [n for n in node.all_input_nodes if n.op == "get_attr"]
        if call.kind == "aten":
            node.target, node.args = aten.slice.Tensor, (merged, -1, start, stop)
        else:
            where: Any = (Ellipsis, slice(start, stop))
            node.op, node.target, node.args = "call_function", operator.getitem, (merged, where)
        node.kwargs = {}
        self.mark_as_transformed(node)
        make_views_reshapes(edit.gm, node)
        for fetch in fetches:
            edit.graph.erase_node(fetch)
        for name in [call.path] if call.path else [operand.name for operand in call.operands.values()]:
            edit.remove(name)


def _name(call: Call) -> str:
    return call.path or call.operands["weight"].name.removesuffix(".weight")


def _width(call: Call) -> int:
    """The number of outputs: the weight is (out, in), or (in, out) as GPT-2's Conv1D has it."""
    return int(call.weight.shape[_out(call)])


def _out(call: Call) -> int:
    return int(call.settings.get("out", 0))


def _kind(view: GraphView, call: Call) -> tuple[object, ...]:
    """What layers must have in common to be merged."""
    weight, bias = call.weight, call.bias
    module = view.module(call.path) if call.path else view.gm
    frozen = (
        weight.requires_grad,
        None if bias is None or bias.requires_grad == weight.requires_grad else bias.requires_grad,
    )
    return (
        weight.dtype,
        weight.device,
        weight.shape[1 - _out(call)],
        _out(call),
        frozen,
        bias is None or bias.dtype == weight.dtype or bias.dtype,
        module and module.training,
    )


def _concatenate(edit: Editor, calls: list[Call], role: str, name: str, widths: tuple[int, ...]) -> nn.Parameter:
    """The joint tensor of one role. The originals become views of it at once, so that memory is never doubled."""
    operands = [call.operands[role] for call in calls]
    sources = {str(i): operand.name for i, operand in enumerate(operands)}
    dim = _out(calls[0]) if role == "weight" else 0
    whole = edit.map_weights(Concatenate(widths, dim), sources, {"whole": name})["whole"]
    if dim:  # columns do not lie together in memory: views of them would change the layout that an eager model sees
        return nn.Parameter(whole, requires_grad=operands[0].tensor.requires_grad)
    for operand, part in zip(operands, whole.split(list(widths)), strict=True):
        if not operand.tensor.is_inference() and not operand.tensor.is_meta:
            operand.tensor.data = part
    return nn.Parameter(whole, requires_grad=operands[0].tensor.requires_grad)


def _linear(edit: Editor, like: Call, weight: nn.Parameter, bias: nn.Parameter | None) -> nn.Linear:
    layer = nn.Linear(weight.shape[1], weight.shape[0], bias=bias is not None, device="meta")
    layer.weight = weight
    layer.register_parameter("bias", bias)
    layer.train(edit.gm.get_submodule(like.path or "").training)
    return layer


def _call_function(edit: Editor, before: Node, calls: list[Call], path: str, bias: nn.Parameter | None) -> Node:
    exported = all(call.kind == "aten" for call in calls)
    if _out(calls[0]) == 1 and bias is not None:
        edit.put_tensor(f"{path}.bias", bias)
        parts = [edit.fetch(before, f"{path}.bias"), calls[0].input, edit.fetch(before, f"{path}.weight")]
        return edit.call(before, aten.addmm.default if exported else torch.addmm, *parts)
    args = [calls[0].input, edit.fetch(before, f"{path}.weight")]
    if bias is not None:
        edit.put_tensor(f"{path}.bias", bias)
        args.append(edit.fetch(before, f"{path}.bias"))
        missing = sum(_width(call) for call in calls if call.bias is None)
        if missing:
            pad = aten.constant_pad_nd.default if exported else F.pad
            args[-1] = edit.call(before, pad, args[-1], [0, missing])
    return edit.call(before, aten.linear.default if exported else F.linear, *args)
