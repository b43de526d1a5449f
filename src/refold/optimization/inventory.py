"""What a model was when it was prepared, to be compared bit for bit: what no check at a call can see."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from typing import Any, Self

import torch
from torch import nn
from torch.fx import GraphModule

from refold.fingerprint import fingerprint
from refold.fx_private import named_tensors, plain_attributes
from refold.nested import PLAIN


@dataclass(frozen=True)
class Inventory:
    """A captured graph, the plain attributes of its modules, its constants, and the weights that were copied out of the
    model. Weights that the prepared code reads from where they lie are not among them: those are followed."""

    nodes: Mapping[str, str]
    attributes: Mapping[str, str]
    tensors: Mapping[str, str]

    @classmethod
    def of(cls, model: nn.Module, captured: GraphModule) -> Self:
        """Of a graph that nothing was rewritten in yet, and without the model's own weights."""
        own = set(named_tensors(model))
        constants = {name: tensor for name, tensor in named_tensors(captured).items() if name not in own}
        return cls(
            {node.name: f"{node.op} {node.target} {node.args} {node.kwargs}" for node in captured.graph.nodes},
            {
                f"{path}.{name}": repr(value)
                for path, module in captured.named_modules()
                if path
                for name, value in plain_attributes(module).items()
                if isinstance(value, (*PLAIN, tuple))
            },
            {name: fingerprint(tensor) for name, tensor in constants.items()},
        )

    def with_weights(self, model: nn.Module, names: Collection[str]) -> Self:
        """The same with weights of the model, as they are now."""
        found = named_tensors(model)
        weights = {name: fingerprint(found[name]) for name in names if name in found}
        return replace(self, tensors={**self.tensors, **weights})

    def differences(self, now: Inventory) -> list[str]:
        """What is different now, as sentences."""
        found = [_difference("the graph", self.nodes, now.nodes), _difference("values of", self.tensors, now.tensors)]
        found.insert(1, _difference("attributes", self.attributes, now.attributes))
        return [sentence for sentence in found if sentence]


def names_of(model: nn.Module, tensors: list[torch.Tensor]) -> list[str]:
    """What these tensors are called in a model."""
    wanted = set(map(id, tensors))
    return [name for name, tensor in named_tensors(model).items() if id(tensor) in wanted]


def _difference(what: str, before: Mapping[str, Any], after: Mapping[str, Any]) -> str:
    names = [name for name in dict.fromkeys((*before, *after)) if before.get(name) != after.get(name)]
    if not names:
        return ""
    more = f" and {len(names) - 3} more" if len(names) > 3 else ""
    return f"{what} changed: {', '.join(names[:3])}{more}"
