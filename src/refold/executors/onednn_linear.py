"""Linear layers computed by oneDNN, on CPUs where torch itself asks another library.

torch hands the matrix products of float32 to the library that it was built with, which knows some processors better
than others; oneDNN, which it brings along for convolutions, makes its kernels for the processor it finds. Which one is
faster is measured. The weights stay where they are, so that nothing is held twice and changes in place are followed.
Activations are left out: where oneDNN applies them itself, ReLU of NaN is 0 and GELU of infinity NaN.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.fx import GraphModule, Node

from refold.errors import InputMismatch, PreparationFailed, UnsupportedInput
from refold.executors.input_spec import example, refuse_gradients
from refold.executors.interface import CallRunner, Executor
from refold.graph.arguments import argument
from refold.graph.values import example_value
from refold.graph.view import Call, GraphView
from refold.record.copies import shared_copy
from refold.rewrite.operators import ADDMM, LINEAR
from refold.rewrite.refusal import attempt


class OneDnnLinears(Executor):
    """The graph as it is, but for its linear layers."""

    name = "onednn"
    takes_any_size = True
    keeps_meaning = True
    hears_interrupts = True
    takes_packed = True

    def available(self, device: torch.device) -> str | None:
        return why_no_onednn(device)

    def prepare(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Callable[..., Any]:
        spec, tree, tensors = example(args, kwargs, open_sizes=True)
        lowered = with_onednn_linears(module)
        return _Inference(spec, lowered, lowered, tree, tensors)


class _Inference(CallRunner):
    """These kernels give no gradients."""

    call: GraphModule

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        refuse_gradients(self.spec.tensors(args, kwargs), list(self.call.parameters()))
        try:
            with torch.no_grad():
                return super().__call__(*args, **kwargs)
        except InputMismatch as mismatch:  # the graph takes no such sizes; nothing was computed
            raise UnsupportedInput(str(mismatch)) from None


def with_onednn_linears(module: nn.Module) -> GraphModule:
    """A copy of a graph over the same weights whose linear layers are computed by oneDNN."""
    if not isinstance(module, GraphModule):
        raise PreparationFailed("Layers can be exchanged in a captured graph only.")
    lowered = shared_copy(module)
    view = GraphView(lowered)
    calls = [call for node in view.nodes if (call := _match(view, node)) is not None]
    if not calls:
        raise PreparationFailed("There is no linear layer in float32 or bfloat16 that oneDNN could compute.")
    for call in calls:
        _exchange(lowered, call)
    lowered.graph.lint()
    lowered.recompile()
    return lowered


def _match(view: GraphView, node: Node) -> Call | None:
    """The call of a linear layer that oneDNN computes like torch; None where it cannot."""
    call = attempt(LINEAR.match, view, node) or attempt(ADDMM.match, view, node)
    if not isinstance(call, Call) or not call.weight.numel():
        return None
    read = example_value(call.input)
    if read is None or read.dtype is not call.weight.dtype or call.weight.dtype not in _dtypes():
        return None
    return call if call.weight.device.type == "cpu" and call.weight.layout is torch.strided else None


def _dtypes() -> tuple[torch.dtype, ...]:
    fast = torch.ops.mkldnn._is_mkldnn_bf16_supported()
    return (torch.float32, torch.bfloat16) if fast else (torch.float32,)


def _exchange(gm: GraphModule, call: Call) -> None:
    """`x·Wᵀ + b` by the other library; the weight as (outputs, inputs)."""
    node, operands = call.node, call.operands
    is_turned = call.out_axis == 0
    rows: Any = argument(node, 0, "input") if is_turned else node.args[1]
    with gm.graph.inserting_before(node):
        weight = gm.graph.get_attr(operands["weight"].name)
        if not is_turned:
            weight = gm.graph.call_method("t", (weight,))
        bias = gm.graph.get_attr(operands["bias"].name) if "bias" in operands else None
        arguments: tuple[Any, ...] = (rows, weight, bias, "none", [], "")
        linear = gm.graph.call_function(torch.ops.mkldnn._linear_pointwise.default, arguments)
    linear.meta = dict(node.meta)
    node.replace_all_uses_with(linear)
    gm.graph.erase_node(node)


def why_no_onednn(device: torch.device) -> str | None:
    """Why these kernels cannot be used; None if they can."""
    if device.type != "cpu":
        return "oneDNN is for CPUs"
    if not (torch.backends.mkldnn.is_available() and torch.backends.mkldnn.enabled):
        return "this torch has no oneDNN, or it is switched off"
    if not hasattr(torch.ops.mkldnn, "_linear_pointwise"):
        return "this build of torch has no linear layer by oneDNN"
    return None
