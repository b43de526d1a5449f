"""A model's own checkpoint goes into the whole default pipeline's result: it computes with it, and gives it back."""

from __future__ import annotations

import copy

import pytest

pytest.importorskip("transformers")

import torch
import transformers
from torch import nn
from torch.utils import _pytree as pytree
from zoo_families import SMALL, make, tokens

import refold
from refold.optimization.default_pipeline import default_pipeline
from refold.testing.equivalence import deviations


def masked_bert() -> tuple[nn.Module, tuple, dict]:
    """A bias with two names, of which the graph reads one."""
    config = transformers.BertConfig(vocab_size=99, **SMALL)
    return transformers.BertForMaskedLM(config).eval(), (tokens(2),), {}


def another(state: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Every floating-point number another one; variances stay positive."""
    numbers = torch.Generator().manual_seed(3)

    def moved(tensor: torch.Tensor) -> torch.Tensor:
        noise = torch.rand(tensor.shape, generator=numbers, dtype=torch.float64)
        return tensor * (1 + 0.3 * noise) + 0.05 * noise if tensor.is_floating_point() else tensor.clone()

    return {name: moved(tensor) for name, tensor in state.items()}


@pytest.mark.parametrize("dynamic", ["auto", False])
@pytest.mark.parametrize("name", ["llama", "gpt2", "conv_net", "masked bert"])
def test_the_models_checkpoint_goes_through_the_whole_pipeline(name: str, dynamic: object) -> None:
    model, args, kwargs = masked_bert() if name == "masked bert" else make(name)
    model, call = model.double(), pytree.tree_map(_double, (list(args), kwargs))
    if hasattr(model, "config"):
        model.config.use_cache = False
    loaded = copy.deepcopy(model)
    loaded.load_state_dict(another(model.state_dict()))
    checkpoint = {key: tensor.clone() for key, tensor in loaded.state_dict().items()}  # tied weights agree
    gm = refold.trace(model, *call[0], dynamic=dynamic, **call[1])
    plain = copy.deepcopy(gm)
    for transformation in default_pipeline():
        transformation(gm)
    assert refold.history(gm)
    refold.load_original_state_dict(gm, checkpoint)
    refold.load_original_state_dict(plain, checkpoint)
    assert not list(deviations(plain, gm, (*call[0], *call[1].values())))
    found = refold.original_state_dict(gm)
    assert found.keys() == checkpoint.keys()
    assert all(torch.equal(found[key], tensor) for key, tensor in checkpoint.items())
    copy.deepcopy(model).load_state_dict(found)
    refold.undo(gm, None)
    assert gm.code == plain.code
    with torch.no_grad():
        pairs = zip(_leaves(gm, call), _leaves(loaded, call), strict=True)
        assert all(torch.equal(a, b) for a, b in pairs)


def _double(value: object) -> object:
    return value.double() if isinstance(value, torch.Tensor) and value.is_floating_point() else value


def _leaves(model: nn.Module, call: tuple[list, dict]) -> list[torch.Tensor]:
    output = model(*call[0], **call[1])
    values = dict(output) if isinstance(output, dict) else output
    return [leaf for leaf in pytree.tree_leaves(values) if isinstance(leaf, torch.Tensor)]
