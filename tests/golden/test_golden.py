"""What users can see of every rule stays as it was: signatures, code, marks, sentences, `refold list`, saved folders.

`rules.json` and `saved/` were written by this file, called as a program: `python tests/golden/test_golden.py`. Write
them again only for a change that is meant, and read the difference.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import refold
from refold.rewrite.registry import registered
from refold.rewrite.rule import Rewrite
from refold.testing.laws import graph_of

HERE = Path(__file__).parent
RULES, LIST, SAVED = HERE / "rules.json", HERE / "list.json", HERE / "saved"


def instances() -> list[Rewrite]:
    """Every rule with its default settings, and every fold that keeps the originals."""
    classes = sorted({c for c in registered() if c.__module__.startswith("refold.")}, key=lambda c: c.__name__)
    folds = [c for c in classes if "keep" in getattr(c, "__dataclass_fields__", {})]
    return [*(c() for c in classes), *(c(keep="original") for c in folds)]  # type: ignore[call-arg]


def plain_instances() -> list[Rewrite]:
    """Every rule with its default settings."""
    return [rule for rule in instances() if "original" not in repr(rule)]


def portrait(rule: Rewrite) -> dict[str, Any]:
    """All that one rule shows on its own examples."""
    return {"signature": rule.signature, "examples": [_applied(rule, model) for model, _inputs in rule.examples()]}


def _applied(rule: Rewrite, model: nn.Module) -> dict[str, Any]:
    gm = graph_of(model)
    before = gm.code
    explained = str(refold.explain(gm, rule))
    gm = rule(gm)
    facts = {
        "before": before,
        "explained": explained,
        "result": str(refold.result(gm)),
        "code": gm.code,
        "marked": [node.name for node in rule.get_transformed_nodes(gm)],
        "tensors": {name: str(tuple(tensor.shape)) for name, tensor in gm.state_dict().items()},
        "changes": [line for change in refold.history(gm) for line in change.describe()],
    }
    refold.undo(gm, None)
    assert gm.code == before
    return facts


def sentences(rules: list[Rewrite]) -> dict[str, dict[str, list[str]]]:
    """What every rule says about the examples of all the others; explaining touches no graph, so each is made once."""
    graphs = {repr(other): [graph_of(model) for model, _ in other.examples()] for other in plain_instances()}
    return {
        repr(rule): {name: [str(refold.explain(gm, rule)) for gm in made] for name, made in graphs.items()}
        for rule in rules
    }


def collect() -> dict[str, Any]:
    """Everything, as plain data."""
    rules = instances()
    elsewhere = sentences(rules)
    return {repr(rule): {**portrait(rule), "elsewhere": elsewhere[repr(rule)]} for rule in rules}


class Saved(nn.Module):
    """The model of the saved folder: a batch norm, a merge, a division."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.bn = nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4)
        self.q, self.k = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.bn(self.conv(x)).mean((2, 3))
        return self.q(x) * self.k(x) / 7


def folded() -> torch.fx.GraphModule:
    """The module that was saved."""
    torch.manual_seed(0)
    model = Saved().eval()
    with torch.no_grad():
        model.bn.running_mean.normal_()
        model.bn.running_var.uniform_(0.5, 2)
    steps = (refold.FuseBatchNorm2dInConv2d(), refold.MergeLinears(), refold.ChangeTrueDivToMulByInverse())
    return refold.compose(*steps)(torch.fx.symbolic_trace(model))


def listed() -> Any:
    """What `refold list --json` says about the transformations."""
    command = [sys.executable, "-m", "refold", "list", "--json"]
    out = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    return json.loads(out)["transformations"]


@pytest.fixture(scope="module")
def expected() -> dict[str, Any]:
    """The golden file."""
    return json.loads(RULES.read_text())


@pytest.mark.parametrize("rule", instances(), ids=repr)
def test_a_rule_is_as_it_was(rule: Rewrite, expected: dict[str, Any]) -> None:
    known = dict(expected[repr(rule)])
    known.pop("elsewhere")
    assert json.loads(json.dumps(portrait(rule))) == known


def test_sentences_are_as_they_were(expected: dict[str, Any]) -> None:
    for name, found in sentences(plain_instances()).items():
        assert found == expected[name]["elsewhere"], name


def test_the_list_is_as_it_was() -> None:
    assert [{k: row[k] for k in ("name", "class", "kind", "settings", "reversible")} for row in listed()] == [
        {k: row[k] for k in ("name", "class", "kind", "settings", "reversible")} for row in json.loads(LIST.read_text())
    ]


def test_a_folder_that_was_saved_before_loads() -> None:
    pytest.importorskip("safetensors", reason="safetensors is not installed")
    again, fresh = refold.load(SAVED, Saved().eval()), folded()
    assert again.code == fresh.code
    assert [c.describe() for c in refold.history(again)] == [c.describe() for c in refold.history(fresh)]
    for gm in (again, fresh):
        refold.undo(gm, None)
    assert again.code == fresh.code
    for name, tensor in fresh.state_dict().items():
        assert torch.equal(again.state_dict()[name], tensor), name


if __name__ == "__main__":
    RULES.write_text(json.dumps(collect(), indent=1) + "\n")
    LIST.write_text(json.dumps(listed(), indent=1) + "\n")
    refold.save(folded(), SAVED)
