"""Optimized models in folders: saved, and given back as the fast model, with what was decided."""

from __future__ import annotations

import warnings
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import refold
from refold import FoldBatchNorm, MergeLinears
from refold.errors import PreparedAnew, SaveError
from refold.optimization import decision as decisions
from refold.optimization import steps
from refold.optimization.decision import Decision
from refold.optimization.optimized_module import OptimizedModule
from refold.saving.folder import MANIFEST, parsed, plain_json, seal


class Scores(nn.Module):
    """Merged layers, a folded norm, tied weights, an argument by name and a plain value."""

    def __init__(self) -> None:
        super().__init__()
        self.left, self.right, self.tied = (nn.Linear(6, 6) for _ in range(3))
        self.tied.weight = self.left.weight
        self.norm = nn.Sequential(nn.Linear(6, 6), nn.BatchNorm1d(6))
        self.register_buffer("shift", torch.randn(6), persistent=False)

    def forward(self, x: torch.Tensor, scale: torch.Tensor | None = None, twice: bool = False) -> torch.Tensor:
        y = self.norm(self.left(x) + self.right(x) + self.tied(x)) + self.shift
        y = y if scale is None else y * scale
        return 2 * y if twice else y


def scores(seed: int = 0) -> Scores:
    torch.manual_seed(seed)
    model = Scores().eval()
    with torch.no_grad():
        for tensor in (*model.parameters(), *model.buffers()):
            if tensor.is_floating_point():
                tensor.uniform_(0.5, 1.5)
    return model


CALL = {"x": torch.randn(4, 6, generator=torch.Generator().manual_seed(0)), "scale": torch.ones(4, 1), "twice": True}


def optimized(model: nn.Module, **settings: Any) -> OptimizedModule:
    usual = {"backend": "plain", "effort": "quick", "pipeline": (FoldBatchNorm(), MergeLinears()), "progress": False}
    return refold.optimize(model, CALL, **usual | settings)


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, torch.Tensor]:
    """A folder of an optimized model, and what that model gives."""
    folder = tmp_path_factory.mktemp("made")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("REFOLD_CACHE", str(folder / "cache"))
        fast = optimized(scores())
    refold.save(fast, folder / "fast")
    return folder / "fast", fast(**CALL)


@pytest.fixture
def folder(made: tuple[Path, torch.Tensor], tmp_path: Path) -> Path:
    """A copy of it that a test may change."""
    import shutil

    return Path(shutil.copytree(made[0], tmp_path / "copy"))


def loaded(folder: Path, model: Any, **settings: Any) -> OptimizedModule:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        fast = refold.load(folder, model, **settings)
    assert type(fast).__mro__[1] is OptimizedModule
    return fast


def rewritten(folder: Path, **changes: Any) -> None:
    """Change what the folder says, as somebody would who knows how."""
    data = parsed((folder / "optimized.json").read_bytes(), folder)
    (folder / "optimized.json").write_bytes(plain_json(data | changes))
    (folder / MANIFEST).unlink()
    seal(folder)


def decision_in(folder: Path) -> Decision:
    return Decision.from_text(parsed((folder / "optimized.json").read_bytes(), folder)["decision"].encode())


@pytest.mark.parametrize(
    "given", [scores, Scores, lambda: scores(3)], ids=["a function", "a class", "another function"]
)
def test_the_fast_model_comes_back(
    made: tuple[Path, torch.Tensor], given: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(steps, "verify_last", None)  # the very weights were verified when it was saved
    fast = loaded(made[0], given)
    assert torch.equal(fast(**CALL), made[1]) and not fast.fallbacks
    assert fast.tied.weight is fast.left.weight
    assert torch.equal(fast.restore().shift, scores().shift)
    other = {"x": torch.randn(9, 6), "scale": torch.ones(9, 1), "twice": True}
    assert torch.allclose(loaded(made[0], given)(**other), scores()(**other), atol=1e-5)


def test_a_model_that_is_given_stays_as_it_is(made: tuple[Path, torch.Tensor]) -> None:
    same, other = scores(0), scores(3)
    before = {name: tensor.clone() for name, tensor in other.state_dict().items()}
    assert loaded(made[0], same).original is same
    fast = loaded(made[0], other)
    assert torch.equal(fast(**CALL), made[1])
    assert all(torch.equal(tensor, before[name]) for name, tensor in other.state_dict().items())
    assert fast.original is not other


def test_on_another_machine_it_is_prepared_anew_and_says_so(folder: Path, made: tuple[Path, torch.Tensor]) -> None:
    decision = decision_in(folder)
    machine = decision.key.machine | {"processor": "another one"}
    elsewhere = replace(decision, key=replace(decision.key, machine=machine))
    rewritten(folder, decision=elsewhere.to_text())
    with pytest.warns(PreparedAnew, match="processor"):
        fast = refold.load(folder, Scores)
    assert torch.allclose(fast(**CALL), made[1]) and not fast.fallbacks
    assert [change.label for change in refold.history(fast.graph_module)]


def test_what_another_version_decided_is_decided_anew(folder: Path, made: tuple[Path, torch.Tensor]) -> None:
    rewritten(folder, decision='{"schema": "refold.decision", "version": 99}')
    with pytest.warns(PreparedAnew, match="version"):
        fast = refold.load(folder, Scores)
    assert torch.allclose(fast(**CALL), made[1]) and not fast.fallbacks


def test_another_model_is_refused(made: tuple[Path, torch.Tensor]) -> None:
    with pytest.raises(SaveError, match="is not the one that was saved"):
        refold.load(made[0], nn.Linear(6, 6))
    with pytest.raises(SaveError, match="give the model"):
        refold.load(made[0])
    with pytest.raises(SaveError, match="no graph of it"):
        refold.load(made[0], Scores, graph_module=refold.trace(scores(), **CALL))


def test_other_code_is_prepared_anew(made: tuple[Path, torch.Tensor]) -> None:
    class Other(Scores):
        def forward(self, x: torch.Tensor, scale: torch.Tensor | None = None, twice: bool = False) -> torch.Tensor:
            return self.left(x) - self.tied(x) * scale

    with pytest.warns(PreparedAnew, match="other model"):
        fast = refold.load(made[0], Other)
    assert torch.allclose(fast(**CALL), fast.original(**CALL), atol=1e-5)


@pytest.mark.parametrize(
    ("changes", "what"),
    [
        ({"schema": "other"}, "another version"),
        ({"settings": {}}, "does not fit together"),
        ({"settings": None}, "does not fit together"),
        ({"decision": 1}, "does not fit together"),
        ({"inputs": None}, "were not recorded"),
        ({"others": 3}, "does not fit together"),
        ({"tensors": {}}, "is not the one that was saved"),
        ({"placed": {"left.weight": "../../etc/passwd"}}, "not among the saved files"),
    ],
)
def test_what_does_not_fit_is_refused(folder: Path, changes: dict[str, Any], what: str) -> None:
    rewritten(folder, **changes)
    with pytest.raises(SaveError, match=what):
        refold.load(folder, Scores)


def test_a_changed_byte_is_refused(folder: Path) -> None:
    text = (folder / "optimized.json").read_text()
    (folder / "optimized.json").write_text(text.replace("MergeLinears", "MergeLineart", 1))
    with pytest.raises(SaveError, match="damaged"):
        refold.load(folder, Scores)


def test_a_graph_takes_the_place_of_an_optimized_model_and_back(folder: Path) -> None:
    fast = loaded(folder, Scores)
    refold.save(refold.trace(scores(), **CALL), folder)
    assert isinstance(refold.load(folder, Scores), torch.fx.GraphModule)
    refold.save(fast, folder)
    assert isinstance(loaded(folder, Scores), nn.Module) and not (folder / "recipe.json").exists()


def test_what_cannot_be_saved_says_why(tmp_path: Path) -> None:
    fast = optimized(scores())
    fast.restore()
    with pytest.raises(SaveError, match="optimize it again"):
        refold.save(fast, tmp_path / "folder")
    assert not (tmp_path / "folder").exists()


def test_weights_that_were_changed_since_are_verified_when_it_is_loaded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("REFOLD_CACHE", str(tmp_path / "cache"))
    fast = optimized(scores(), pipeline=MergeLinears())
    with torch.no_grad():
        fast.left.bias.add_(1.0)  # the merged layer reads it from there
    refold.save(fast, tmp_path / "folder")
    assert decision_in(tmp_path / "folder").weights == ""
    again = loaded(tmp_path / "folder", Scores)
    assert torch.equal(again(**CALL), fast(**CALL)) and not again.fallbacks
    assert decisions.SCHEMA in (tmp_path / "folder" / "optimized.json").read_text()


def test_what_was_prepared_again_comes_back_as_it_was(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("REFOLD_CACHE", str(tmp_path / "cache"))
    fast = optimized(scores(), backend="auto")
    fast.norm[1].weight.data.mul_(2.0)  # nothing counts it, and it was folded
    assert fast.refresh()
    refold.save(fast, tmp_path / "folder")
    assert torch.equal(loaded(tmp_path / "folder", Scores)(**CALL), fast(**CALL))


def test_further_kinds_of_calls_travel_with_the_folder(tmp_path: Path) -> None:
    model = scores()
    fast = optimized(model, on_fallback="raise")
    fast.prepare(CALL["x"])
    with torch.autocast("cpu", dtype=torch.bfloat16):
        fast.prepare(**CALL)
    refold.save(fast, tmp_path / "fast")
    again = refold.load(tmp_path / "fast", scores)
    assert len(again._kinds) == 3 and again._fallbacks.policy == "raise"
    with torch.no_grad():
        assert torch.equal(again(CALL["x"]), fast(CALL["x"]))
        with torch.autocast("cpu", dtype=torch.bfloat16):
            assert torch.equal(again(**CALL), fast(**CALL))
    assert again.report.calls.fast == 2 and again.report.calls.original == 0


def test_what_was_optimized_under_autocast_is_loaded_for_it(tmp_path: Path) -> None:
    with torch.autocast("cpu", dtype=torch.bfloat16):
        fast = optimized(scores(), on_fallback="raise")
    refold.save(fast, tmp_path / "fast")
    again = loaded(tmp_path / "fast", scores)
    with torch.no_grad(), torch.autocast("cpu", dtype=torch.bfloat16):
        assert torch.equal(again(**CALL), fast(**CALL))
