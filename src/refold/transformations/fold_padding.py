"""FoldPadding: zeros that are put around an image before a convolution become the convolution's own padding."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import nn
from torch.fx import Node

from refold.aliasing import writes_to
from refold.edit import Editor, twin_of
from refold.match import CONV_NAMES, Call, GraphView, bind, match_conv, per_axis, why_not_plain
from refold.rewrite import Example, ReversibleRewrite, Site, Skip

aten = torch.ops.aten
_MODULES = (nn.ZeroPad1d, nn.ZeroPad2d, nn.ZeroPad3d, nn.ConstantPad1d, nn.ConstantPad2d, nn.ConstantPad3d)
_FUNCTIONS: dict[Any, tuple[str, ...]] = {
    F.pad: ("input", "pad", "mode", "value"),
    aten.pad.default: ("self", "pad", "mode", "value"),
    aten.constant_pad_nd.default: ("self", "pad", "value"),
}


@dataclass(frozen=True)
class _Pad:
    """A call that pads: what it pads, by how much on either side of each axis, the last axis first, and with what."""

    node: Node
    source: Node
    amounts: tuple[Any, ...]
    mode: Any
    value: Any


@dataclass(frozen=True, kw_only=True, repr=False)
class FoldPadding(ReversibleRewrite):
    """Let convolutions pad their input themselves, which costs them nothing; padding it before makes a copy of it.

    `conv(pad(x, p), W, padding=q) = conv(x, W, padding=p + q)`  where zeros are padded, as many on either side.

    Models that were made for TensorFlow's rule of padding pad apart, because that rule may ask for more zeros on one
    side; a convolution of torch cannot do that, and such a pad is left alone.
    """

    kind: ClassVar[str] = "graph"

    @classmethod
    def examples(cls) -> Iterable[Example]:
        from refold import examples

        return [examples.padded(), examples.exported_padded()]

    def find(self, view: GraphView) -> Iterator[Site | Skip]:
        for node in view.nodes:
            pad = _match_pad(view, node)
            if pad is None:
                continue
            found = pad if isinstance(pad, str) else _why_not(pad) or _convolution_behind(view, pad)
            if isinstance(found, str):
                yield Skip(node, found)
            else:
                conv, padding = found
                yield Site((node, conv.node), f"{conv.node.name} pads by itself: {padding}", (pad, conv, padding))

    def rewrite(self, site: Site, edit: Editor) -> None:
        pad, call, padding = site.detail
        node = call.node
        node.replace_input_with(pad.node, pad.source)
        if call.path is not None:
            conv: Any = twin_of(edit.gm.get_submodule(call.path))
            conv.padding = padding
            conv._reversed_padding_repeated_twice = [size for size in reversed(padding) for _ in range(2)]
            edit.put_module(call.path, conv)
        else:
            given = bind(node, CONV_NAMES) or {}
            tensors = tuple(given.pop(name, None) for name in CONV_NAMES[:3])
            node.args, node.kwargs = tensors, given | {"padding": list(padding)}
        edit.erase(pad.node)
        self.mark_as_transformed(node)


def _match_pad(view: GraphView, node: Node) -> _Pad | str | None:
    """A call that pads, or why it is not understood; None where it is something else."""
    if node.op == "call_function" and node.target in _FUNCTIONS:
        given = bind(node, _FUNCTIONS[node.target]) or {}
        source, amounts = given.get("input", given.get("self")), given.get("pad")
        mode, value = given.get("mode", "constant"), given.get("value", 0)
    elif node.op == "call_module" and isinstance(view.module(str(node.target)), _MODULES):
        module: Any = view.module(str(node.target))
        reason = why_not_plain(module, _MODULES)
        if reason is not None:
            return reason
        source, amounts = (bind(node, ("input",)) or {}).get("input"), module.padding
        mode, value = "constant", module.value
    else:
        return None
    if not isinstance(source, Node) or not isinstance(amounts, list | tuple):
        return "its arguments are not understood"
    return _Pad(node, source, tuple(amounts), mode, 0 if value is None else value)


def _why_not(pad: _Pad) -> str | None:
    if pad.mode != "constant" or isinstance(pad.value, Node) or pad.value != 0:
        return "it pads with something else than zeros"
    if not all(isinstance(amount, int) for amount in pad.amounts) or len(pad.amounts) % 2:
        return "how much it pads is computed"
    if any(amount < 0 for amount in pad.amounts):
        return "it cuts something off"
    if pad.amounts[::2] != pad.amounts[1::2]:
        return "it pads more on one side than on the other, which a convolution cannot"
    return "others read what it pads as well" if len(pad.node.users) > 1 else None


def _convolution_behind(view: GraphView, pad: _Pad) -> tuple[Call, tuple[int, ...]] | str:
    """The convolution that alone reads what is padded, and the padding of both together; a sentence where it cannot."""
    for user in pad.node.users:
        for dims in (1, 2, 3):
            call = match_conv(view, user, dims)
            if isinstance(call, str):
                return call
            if call is None or call.input is not pad.node:
                continue
            others = [node.name for node in view.reached_by(call.path) if node is not user] if call.path else []
            if others:
                return f"the convolution behind it is also run by {', '.join(others)}"
            if view.mode_switches_between(pad.node, user):
                return "gradients, autocast or inference mode is switched between it and the convolution"
            writer = writes_to(view.gm, pad.source, view.writers_between(pad.node, user))
            if writer is not None:
                return f"{writer.name} writes into what it pads before the convolution reads it"
            padding = _together(view, pad, call, dims)
            return padding if isinstance(padding, str) else (call, padding)
    return "no convolution reads it"


def _together(view: GraphView, pad: _Pad, call: Call, dims: int) -> tuple[int, ...] | str:
    """The padding of the convolution and that before it in one."""
    module: Any = view.module(call.path) if call.path is not None else None
    if module is not None and module.padding_mode != "zeros":
        return "the convolution behind it pads with something else than zeros"
    sizes = per_axis(call.settings.get("padding", 0) if module is None else module.padding, dims)
    if not all(isinstance(size, int) for size in sizes):
        return "the convolution behind it pads by a rule"
    if any(pad.amounts[2 * dims :]):
        return "it pads channels or batches"
    more = pad.amounts[: 2 * dims : 2][::-1]
    return tuple(a + b for a, b in zip(sizes, (0,) * (dims - len(more)) + more, strict=True))
