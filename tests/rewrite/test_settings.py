"""Settings as plain data: what a recipe holds gives an equal transformation back."""

from __future__ import annotations

import enum
import json
from dataclasses import dataclass, field

import pytest
import torch
from torch.fx import GraphModule

import refold
from refold.errors import UnknownRecipe
from refold.rewrite.description import default_settings, recipe_of
from refold.rewrite.registry import transformation_from


class Side(enum.Enum):
    LEFT = 1
    RIGHT = 2


@dataclass(frozen=True, repr=False)
class Many(refold.Transformation):
    """Has a setting of every kind."""

    dtype: torch.dtype = torch.float32
    side: Side = Side.LEFT
    sizes: tuple[int, ...] = (1, 2)
    names: list[str] = field(default_factory=lambda: ["a"])
    dtypes: tuple[torch.dtype, ...] = (torch.float32,)
    factor: float | None = None

    def transform(self, graph_module: GraphModule) -> GraphModule:
        return graph_module


class Required(refold.Transformation):
    def __init__(self, what: object) -> None:
        self.what = what

    def transform(self, graph_module: GraphModule) -> GraphModule:
        return graph_module


OTHER = Many(torch.bfloat16, Side.RIGHT, (), ["b", "c"], (torch.float16, torch.float64), 0.5)


@pytest.mark.parametrize("transformation", [Many(), OTHER, Required("this"), Required((1, (2, 3)))])
def test_a_recipe_gives_an_equal_transformation_back(transformation: refold.Transformation) -> None:
    recipe = json.loads(json.dumps(recipe_of(transformation)))
    assert transformation_from(recipe).signature == transformation.signature


def test_default_values() -> None:
    assert default_settings(Many)["names"] == ["a"] and default_settings(Many)["side"] is Side.LEFT
    assert list(default_settings(Required)) == ["what"] and default_settings(refold.FuseBiasInLinear) == {}


@pytest.mark.parametrize(
    ("settings", "sentence"),
    [({"dtype": "colour"}, "such as float16"), ({"side": "UP"}, "one of LEFT, RIGHT"), ({"size": 3}, "size")],
)
def test_settings_that_do_not_fit_are_refused(settings: dict[str, object], sentence: str) -> None:
    with pytest.raises(UnknownRecipe, match=sentence):
        transformation_from({"class": f"{__name__}.Many", "settings": settings})


def test_settings_that_are_not_plain_have_no_recipe() -> None:
    assert recipe_of(Required(object())) is None
