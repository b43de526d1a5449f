"""What a transformation would do and why not, without touching the graph."""

from __future__ import annotations

import copy

import torch
from torch import nn
from torch.fx import GraphModule

from refold import fx_private
from refold.difference import difference
from refold.errors import BrokenTransformation
from refold.history import check_graph_module, history
from refold.hollow import parameter_over
from refold.result import Result, result
from refold.rewrite import Rewrite
from refold.snapshot import Snapshot
from refold.transformation import Composition, Transformation, check_transformation


def explain(gm: GraphModule, transformation: Transformation) -> Result:
    """The result that a call of the transformation would have. The module is not touched."""
    check_graph_module(gm)
    check_transformation(transformation)
    if isinstance(transformation, Rewrite):
        return _explained(gm, transformation)
    hollow = hollow_copy(gm)
    if isinstance(transformation, Composition):
        transformation = Composition(*transformation.transformations)
    return result(transformation(hollow, lint_and_recompile=False))


def _explained(gm: GraphModule, rewrite: Rewrite) -> Result:
    before = Snapshot.of(gm)
    try:
        said = rewrite.explain(gm)
        if difference(before, before.again(gm)) is not None:
            raise BrokenTransformation(f"the find of {rewrite!r} edits the module, and must only look at it.")
        return said
    except BaseException:
        before.restore(gm)
        raise


def hollow_copy(gm: GraphModule) -> GraphModule:
    """A module with a graph and parameters of its own objects, over the same memory: cheap, and safe to rewrite."""
    memo: dict[int, object] = {}
    for _path, module in fx_private.walk_modules(gm):
        if not hasattr(module, "_parameters"):
            continue
        for table in ("_parameters", "_buffers"):
            for tensor in fx_private.table(module, table).values():
                if tensor is not None and id(tensor) not in memo:
                    memo[id(tensor)] = _same_memory(tensor)
    past = history(gm)
    memo[id(past)] = past
    return copy.deepcopy(gm, memo)


def _same_memory(tensor: torch.Tensor) -> torch.Tensor:
    twin = tensor.detach()
    return parameter_over(twin, tensor.requires_grad) if isinstance(tensor, nn.Parameter) else twin
