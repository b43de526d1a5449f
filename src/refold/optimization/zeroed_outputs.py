"""Outputs that nobody reads at padding: zeros there on every way, so that padding need not be computed."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.fx import GraphModule, Node
from torch.fx.node import map_arg

from refold.call_arguments import CallArguments
from refold.graph.layout import hands_out
from refold.graph.values import example_value
from refold.graph.view import GraphView
from refold.nested import OUTPUT, flatten, named_leaves, rebuild
from refold.patterns.packing.grids import Grid, find_grids
from refold.patterns.packing.packings import AT_PADDING, Packing, find_packing, handed_out
from refold.patterns.packing.token_operators import OPERATORS
from refold.patterns.packing.token_wise import made_from
from refold.record.outcome import Result
from refold.rewrite.recorded_values import PLACE
from refold.rewrite.refusal import Refuse, attempt


@dataclass(frozen=True)
class ZeroedOutputs:
    """Which outputs are zeros at the padding of which argument."""

    signature: inspect.Signature
    masks: tuple[tuple[str, str], ...]
    """Names of outputs, each with the name of its mask."""

    def of(self, result: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """What a call gave, with zeros at padding. A call without a mask has no padding."""
        outputs = dict(named_leaves(result, "" if not isinstance(result, torch.Tensor) else _ALONE))
        zeroed = {}
        for name, mask in ((name, self.mask_given(mask, args, kwargs)) for name, mask in self.masks):
            output = outputs.get(name)
            if isinstance(output, torch.Tensor) and mask is not None and _lies_on(mask, output):
                zeroed[id(output)] = OPERATORS.zero_padding(output, mask, 0, 1)
        if not zeroed:
            return result
        tree, leaves = flatten(result, OUTPUT)
        return rebuild(tree, [zeroed.get(id(leaf), leaf) for leaf in leaves])

    def called(self, run: Callable[..., Any]) -> Callable[..., Any]:
        """The same function, with these zeros."""
        return lambda *args, **kwargs: self.of(run(*args, **kwargs), args, kwargs)

    def mask_given(self, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> torch.Tensor | None:
        """The mask of that name in a call."""
        places = list(self.signature.parameters)
        place = places.index(name) if name in places else len(args)
        found = args[place] if place < len(args) else kwargs.get(name)
        return found if isinstance(found, torch.Tensor) else None

    @property
    def note(self) -> str:
        """What the report says."""
        told = (f"{name} (where {mask} is 0)" for name, mask in self.masks)
        return f"Zeros at padding, as padding='zeros' allows, on every way to run the model: {', '.join(told)}."


_ALONE = "output"


def hints_about_padding(results: Iterable[Result]) -> list[str]:
    """What to say where padding was computed only because outputs may be read there."""
    reasons = [refused.reason for found in results for refused in found.refused]
    told = next((reason for reason in reasons if reason.endswith(AT_PADDING)), None)
    if told is None:
        return []
    given = told.removesuffix(AT_PADDING).strip()
    return [f"Padding is computed, because {given} there, too: optimize(…, padding='zeros') says that it is not read."]


def zero_outputs(gm: GraphModule, model: nn.Module, inputs: CallArguments) -> ZeroedOutputs | str:
    """Write zeros at padding into a captured graph, for every output that has a value for each token of a mask that is
    proven to be one; or a sentence that says why there are none. The graph is then what all else is compared with."""
    view, refusals = GraphView(gm), []
    zeroed: dict[Node, Node] = {}
    for grid in find_grids(view):
        packing = attempt(find_packing, grid, True)
        if isinstance(packing, Packing):
            zeroed |= dict.fromkeys(_outputs_on(grid, packing), grid.mask)
        elif isinstance(packing, Refuse):
            refusals.append(f"{packing.reason} (with {grid.mask.name} as the mask)")
    if not zeroed:
        why = "; ".join(refusals) or "no output has a value for each token of a mask of open sizes"
        return f"padding='zeros' makes no difference: {why}."
    masks = tuple((name, str(zeroed[node].target)) for name, node in _names(gm, list(zeroed)))
    outputs = ZeroedOutputs(inspect.signature(model.forward), masks)
    lost = [mask for _, mask in masks if outputs.mask_given(mask, inputs.args, inputs.kwargs) is None]
    if lost:
        return f"padding='zeros' makes no difference: {lost[0]} is not given to the model by that name."
    for node, mask in zeroed.items():
        _put_zeros(gm, node, mask)
    gm.graph.lint()
    gm.recompile()
    return outputs


def _outputs_on(grid: Grid, packing: Packing) -> list[Node]:
    """The numbers that are given out, are made from packed tokens, and lie on the grid."""
    made = packing.members | made_from(grid.view, packing.members)
    mask = example_value(grid.mask)
    flat = mask is not None and mask.dim() == 2
    return [n for n in grid.view.nodes if flat and n in made and _is_for_each_token(grid, n)]


def _is_for_each_token(grid: Grid, node: Node) -> bool:
    value = example_value(node)
    is_number = value is not None and value.is_floating_point()
    return is_number and handed_out(grid.view, node) and grid.place(node) == (0, 1)


def _put_zeros(gm: GraphModule, node: Node, mask: Node) -> None:
    holders = [user for user in node.users if hands_out(user)]
    with gm.graph.inserting_after(node):
        zeros = gm.graph.call_function(OPERATORS.zero_padding.default, (node, mask, 0, 1))
    zeros.meta |= {key: node.meta[key] for key in ("val", *PLACE) if key in node.meta}
    for holder in holders:
        holder.replace_input_with(node, zeros)


def _names(gm: GraphModule, nodes: list[Node]) -> list[tuple[str, Node]]:
    """What some outputs are called in the result: only the objects that hold them are made, of stand-ins."""
    made: dict[Node, Any] = {}
    for node in gm.graph.nodes:
        args, kwargs = map_arg((node.args, node.kwargs), lambda n: made[n])
        if node.op == "output":
            result = args[0]
        elif node.op == "call_function" and hands_out(node):
            made[node] = node.target(*args, **kwargs)
        else:
            made[node] = torch.empty(0)
    found = named_leaves(result, "" if not isinstance(result, torch.Tensor) else _ALONE)
    return [(name, node) for name, leaf in found for node in nodes if leaf is made[node]]


def _lies_on(mask: torch.Tensor, output: torch.Tensor) -> bool:
    """Whether a mask has the rows and positions of an output, or one row for all."""
    if mask.dim() != 2 or output.dim() < 2:
        return False
    return mask.shape[1] == output.shape[1] and mask.shape[0] in (1, output.shape[0])
