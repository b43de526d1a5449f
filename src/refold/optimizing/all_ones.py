"""A second graph for calls whose attention mask is all ones: without the mask.

A tokenizer gives a mask with every batch, and unless the batch holds sequences of different lengths it is all ones. An
eager model looks at the values and drops such a mask; a graph has to compute with it, and loses the fast attention
kernels. So the rewritten graph gets a twin in which the mask is taken for ones, and every call looks at the mask first.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.fx import GraphModule, Node

from refold.executors import Executor, Signature, run_checked
from refold.explaining import hollow_copy
from refold.measure import Measurement, measure_many, rounds_needed
from refold.optimizing.budget import Budget
from refold.optimizing.calls import Inputs, split
from refold.optimizing.progress import silent
from refold.optimizing.steps import take_steps
from refold.transformations.fold_constants import FoldConstants
from refold.transformations.remove_no_ops import RemoveNoOps
from refold.transformations.simplify_attention_mask import SimplifyAttentionMask
from refold.verify import OutputReference

_CONFIDENCE = 0.95
_MEASURE_SECONDS = 5.0
_LOOKUPS: set[Any] = {nn.functional.embedding, torch.embedding, torch.ops.aten.embedding.default}


@dataclass(frozen=True)
class AllOnes:
    """How to run calls in which the tensors at these places are all ones."""

    places: tuple[int, ...]
    names: tuple[str, ...]
    run: Callable[..., Any]
    gain: Measurement

    def applies(self, tensors: list[torch.Tensor]) -> bool:
        """Look at the values. This waits for the device, which a stream that is being captured must not do."""
        return are_ones([tensors[place] for place in self.places])

    def __str__(self) -> str:
        given = " and ".join(self.names)
        return f"Calls whose {given} is all ones leave the attention mask out: another {self.gain.ratio:.2f}× faster."


def are_ones(tensors: list[torch.Tensor]) -> bool:
    if any(tensor.is_cuda for tensor in tensors) and torch.cuda.is_current_stream_capturing():
        return False
    return all(bool((tensor == 1).all()) for tensor in tensors)


def without_masks_of_ones(
    gm: GraphModule,
    run: Callable[..., Any],
    executor: Executor,
    inputs: Inputs,
    *,
    reference: OutputReference,
    level: str,
    budget: Budget,
) -> AllOnes | None:
    """The twin of a graph, run by the same executor, if the example has a mask of ones and it is faster without it."""
    args, kwargs = split(inputs)
    ones = _inputs_of_ones(gm, args, kwargs)
    if not ones or budget.left <= 0:
        return None
    twin = hollow_copy(gm)
    for name, value in ones.items():
        _take_for_ones(twin, name, value)
    steps = take_steps(
        twin,
        (SimplifyAttentionMask(), FoldConstants(), RemoveNoOps()),
        inputs,
        level=level,
        budget=budget,
        tell=silent,
    )
    if steps[0].status != "kept":
        return None
    try:
        fast = executor.prepare(twin, args, kwargs)
        with torch.no_grad():
            grade = reference.grade(fast(*args, **kwargs))
    except Exception:  # whatever an executor raises, there is the graph with the mask
        return None
    if not grade.acceptable or (level == "safe" and grade.grade != "bit-identical"):
        return None
    return _if_faster(run, fast, ones, inputs, budget)


def _if_faster(
    run: Callable[..., Any], fast: Callable[..., Any], ones: dict[str, torch.Tensor], inputs: Inputs, budget: Budget
) -> AllOnes | None:
    args, kwargs = split(inputs)
    signature = Signature.of(args, kwargs)
    tensors = signature.tensors(args, kwargs)
    places = tuple(next(i for i, tensor in enumerate(tensors) if tensor is value) for value in ones.values())

    def checked(*args: Any, **kwargs: Any) -> Any:
        tensors = signature.tensors(args, kwargs)
        assert are_ones([tensors[place] for place in places])
        return run_checked(fast, tensors, args, kwargs)

    duel = measure_many(
        {"with the mask": run, "without": checked},
        inputs,
        time_budget=max(1.0, budget.share(0.5, _MEASURE_SECONDS)),
        at_least=rounds_needed(_CONFIDENCE) if budget.seconds is None else 2,
        until_decided=True,
        confidence=_CONFIDENCE,
        memory=False,
        keep=("with the mask", "without"),
    )
    gain = None if duel.failed else duel.between("with the mask", "without")
    if gain is None or not gain.faster:
        return None
    return AllOnes(places, tuple(ones), fast, gain)


def _inputs_of_ones(gm: GraphModule, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, torch.Tensor]:
    """The inputs of the example that are masks of ones. What looks something up in a table is data, and no mask."""
    try:
        given = inspect.signature(gm.forward).bind(*args, **kwargs).arguments
    except TypeError:
        return {}
    found = {}
    for node in gm.graph.nodes:
        value = given.get(node.target) if node.op == "placeholder" else None
        if not isinstance(value, torch.Tensor) or value.is_floating_point() or value.is_complex() or value.numel() < 2:
            continue
        if node.users and not any(_looks_up(gm, user) for user in node.users) and are_ones([value]):
            found[node.target] = value
    return found


def _looks_up(gm: GraphModule, node: Node) -> bool:
    if node.op == "call_module":
        return isinstance(gm.get_submodule(str(node.target)), nn.Embedding)
    return node.target in _LOOKUPS


def _take_for_ones(gm: GraphModule, name: str, value: torch.Tensor) -> None:
    """Let the readers of an input read ones. The input stays, so that the graph is called as before."""
    placeholder = next(node for node in gm.graph.nodes if node.op == "placeholder" and node.target == name)
    last = [node for node in gm.graph.nodes if node.op == "placeholder"][-1]
    with gm.graph.inserting_after(last):
        ones = gm.graph.call_function(torch.ones, (tuple(value.shape),), {"dtype": value.dtype, "device": value.device})
    ones.meta = dict(placeholder.meta)
    placeholder.replace_all_uses_with(ones)
    gm.recompile()
