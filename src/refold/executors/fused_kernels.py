"""Layers with the activation behind them, computed by one kernel of cuBLAS or cuDNN each."""

from __future__ import annotations

from torch import nn
from torch.fx import GraphModule

from refold.errors import PreparationFailed
from refold.executors.fused_convolution import fuse_convolutions
from refold.executors.fused_linear import fuse_linears
from refold.record.copies import shared_copy


def with_fused_kernels(module: nn.Module) -> GraphModule:
    """A copy of a graph over the same weights, with fused kernels wherever there are some."""
    if not isinstance(module, GraphModule):
        raise PreparationFailed("Kernels can be fused in a captured graph only.")
    lowered = shared_copy(module)
    if not fuse_convolutions(lowered) + fuse_linears(lowered):
        raise PreparationFailed("No layer is followed by an activation that a kernel could compute with it.")
    lowered.graph.lint()
    lowered.recompile()
    return lowered
