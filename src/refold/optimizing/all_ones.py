"""A second graph for calls whose attention mask is all ones: without the mask.

A tokenizer gives a mask with every batch, and unless the batch holds sequences of different lengths it is all ones. An
eager model looks at the values and drops such a mask; a graph has to compute with it, and loses the fast attention
kernels. So the rewritten graph gets a twin in which the mask is taken for ones, and every call looks at the mask first.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn
from torch.fx import GraphModule, Node

from refold.executors import Executor, Signature, run_checked
from refold.explaining import hollow_copy
from refold.optimizing.budget import Budget
from refold.optimizing.calls import Inputs, split
from refold.optimizing.choosing import duel, prepare_checked
from refold.optimizing.freshness import Freshness
from refold.optimizing.padding import are_ones
from refold.optimizing.progress import silent
from refold.optimizing.steps import take_steps
from refold.transformations.fold_constants import FoldConstants
from refold.transformations.remove_no_ops import RemoveNoOps
from refold.transformations.simplify_attention_mask import SimplifyAttentionMask
from refold.verify import OutputReference

_MEASURE_SECONDS = 5.0
_LOOKUPS: set[Any] = {nn.functional.embedding, torch.embedding, torch.ops.aten.embedding.default}


@dataclass(frozen=True)
class AllOnes:
    """How to run calls in which the tensors at these places are all ones."""

    signature: Signature
    names: tuple[str, ...]
    places: tuple[int, ...]
    run: Callable[..., Any]
    freshness: Freshness
    gain: float = 1.0

    def applies(self, tensors: list[torch.Tensor]) -> bool:
        """Whether a call may be run so. This looks at values, and waits for the device to have computed them."""
        return are_ones([tensors[place] for place in self.places]) and self.freshness.is_fresh()

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """As a call comes here: looked at, and run."""
        tensors = self.signature.tensors(args, kwargs)
        assert self.applies(tensors)
        return run_checked(self.run, tensors, args, kwargs)

    def __str__(self) -> str:
        given = " and ".join(self.names)
        return f"Calls whose {given} is all ones leave the attention mask out: another {self.gain:.2f}× faster."


def without_masks_of_ones(
    gm: GraphModule,
    run: Callable[..., Any],
    executor: Executor,
    inputs: Inputs,
    *,
    weights: list[torch.Tensor],
    reference: OutputReference,
    level: str,
    budget: Budget,
) -> AllOnes | str:
    """The twin of a graph, run by the same executor, if the example has a mask of ones and it is faster without it;
    else a sentence that says why there is none, empty where no attention reads such a mask."""
    args, kwargs = split(inputs)
    signature = Signature.of(args, kwargs)
    ones = _masks_of_ones(gm, args, kwargs) if signature.is_flat else {}
    if not ones:
        return ""
    given = " and ".join(ones)
    if not budget.is_enough_to_prepare:
        return f"Calls whose {given} is all ones are not treated apart: the time budget was spent."
    twin, tensors = hollow_copy(gm), signature.tensors(args, kwargs)
    for name, place in ones.items():
        _take_for_ones(twin, name, tensors[place])
    rewrites = (SimplifyAttentionMask(), FoldConstants(), RemoveNoOps())
    simplified, *_ = take_steps(twin, rewrites, inputs, level=level, budget=budget, tell=silent)
    if simplified.status == "no match":
        return ""
    if simplified.status != "kept":
        return f"Dropping the attention mask where {given} is all ones: {simplified.status}. {simplified.note}".strip()
    left_out: dict[str, str] = {}
    ready, _ = prepare_checked({executor.name: executor}, twin, inputs, reference, level, budget, silent, left_out)
    if executor.name not in ready:
        return f"Without the attention mask, {executor.name} cannot run the model: {left_out[executor.name]}."
    freshness = Freshness(weights, twin, follows=executor.follows_weights)
    found = AllOnes(signature, tuple(ones), tuple(ones.values()), ready[executor.name], freshness)
    gain = duel(("with the mask", run), ("without", found), inputs, budget, _MEASURE_SECONDS)
    if gain is None:
        return f"Without the attention mask, {executor.name} failed while it was timed."
    if not gain.faster:
        return f"Calls whose {given} is all ones keep the attention mask: to look and drop it is {gain.ratio:.2f}×."
    return replace(found, gain=gain.ratio)


def _masks_of_ones(gm: GraphModule, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, int]:
    """The inputs of the example that are masks of ones, each with its place among the tensors of the call. What looks
    something up in a table is data, and no mask."""
    given = dict(zip(inspect.signature(gm.forward).parameters, args, strict=False)) | kwargs
    tensors = {name: value for name, value in given.items() if isinstance(value, torch.Tensor)}
    found = {}
    for place, (name, value) in enumerate(tensors.items()):
        if value.is_floating_point() or value.is_complex() or value.numel() < 2 or not are_ones([value]):
            continue
        readers = [user for node in _placeholders(gm) if node.target == name for user in node.users]
        if readers and not any(_looks_up(gm, reader) for reader in readers):
            found[name] = place
    return found


def _placeholders(gm: GraphModule) -> list[Node]:
    return [node for node in gm.graph.nodes if node.op == "placeholder"]


def _looks_up(gm: GraphModule, node: Node) -> bool:
    if node.op == "call_module":
        return isinstance(gm.get_submodule(str(node.target)), nn.Embedding)
    return node.target in _LOOKUPS


def _take_for_ones(gm: GraphModule, name: str, like: torch.Tensor) -> None:
    """Let the readers of an input read ones. The input stays, so that the graph is called as before."""
    placeholder = next(node for node in _placeholders(gm) if node.target == name)
    settings: dict[str, Any] = {"dtype": like.dtype, "device": like.device}
    with gm.graph.inserting_after(_placeholders(gm)[-1]):
        ones = gm.graph.call_function(torch.ones, (tuple(like.shape),), settings)
    ones.meta = dict(placeholder.meta)
    placeholder.replace_all_uses_with(ones)
    gm.recompile()
