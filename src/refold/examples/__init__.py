"""Small models that rewrites fire on, as examples for rules, laws and documentation.

(Annotations are real classes here, not strings: torch cannot unpickle the graph of a model whose annotations are.)
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

Example = tuple[nn.Module, tuple[Any, ...]]
"""A small model (or a GraphModule that is captured already) that a rewrite fires on, and inputs for it."""


def seeded(make: Callable[[], Example], seed: int = 0) -> Example:
    """An example made with the random numbers of a seed; the caller's own are left as they were. Batch norms get
    statistics as training would give them."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model, inputs = make()
        settle(model)
    return model, inputs


def example_factory(
    make: Callable[[], nn.Module], *shapes: tuple[int, ...], inference: bool = False, export: bool = False
) -> Callable[[], Example]:
    """What makes an example anew at every call, always with the same numbers: the model (for inference if wanted,
    exported if wanted) and inputs of these shapes."""

    def make_example() -> Example:
        found = seeded(lambda: (make().train(not inference), tuple(torch.randn(shape) for shape in shapes)))
        return exported(found) if export else found

    return make_example


@torch.no_grad()
def settle(model: nn.Module) -> nn.Module:
    """Give every batch norm statistics and an affine map that are not trivial."""
    for module in model.modules():
        if not isinstance(module, nn.BatchNorm1d | nn.BatchNorm2d | nn.BatchNorm3d):
            continue
        if module.running_mean is not None and module.running_var is not None:
            module.running_mean.normal_()
            module.running_var.uniform_(0.5, 2.0)
        if module.affine:
            module.weight.uniform_(0.5, 2.0).mul_(torch.sign(torch.randn_like(module.weight)))
            module.bias.normal_()
    return model


def exported(example: Example) -> Example:
    """The same model as `torch.export` sees it: ATen operators, parameters fetched by get_attr."""
    model, inputs = example
    return torch.export.export(model, inputs, strict=False).module(), inputs
