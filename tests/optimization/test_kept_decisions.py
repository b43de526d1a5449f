"""Decisions that are kept between processes: used again after a comparison, made anew where they do not hold."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import refold
from refold import FoldBatchNorm, MergeLinears, RemoveNoOps
from refold.call_arguments import CallArguments
from refold.errors import BadDecision
from refold.optimization import choice, steps
from refold.optimization.budget import Budget
from refold.optimization.cache_folder import cache_of_user
from refold.optimization.decision import Decision, Rounds
from refold.optimization.job import Job
from refold.optimization.job_key import key_of
from refold.optimization.optimized_module import OptimizedModule
from refold.optimization.progress import silent
from refold.optimization.redoing import to_race
from refold.optimization.selected_outputs import SelectedOutputs


class Attention(nn.Module):
    """A model in which linear layers are merged and a batch norm is folded."""

    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.query, self.key, self.value = (nn.Linear(width, width) for _ in range(3))
        self.last = nn.Sequential(nn.Linear(width, width), nn.BatchNorm1d(5))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        scores = self.query(x) @ self.key(x).transpose(-1, -2)
        return self.last(scores.softmax(-1) @ self.value(x))


def a_model(seed: int = 0, cls: type[nn.Module] = Attention) -> nn.Module:
    torch.manual_seed(seed)
    model = cls()
    with torch.no_grad():
        for tensor in (*model.parameters(), *model.buffers()):
            if tensor.is_floating_point():
                tensor.uniform_(0.5, 1.5)
    return model.eval()


X = torch.randn(3, 5, 8, generator=torch.Generator().manual_seed(1))


PIPELINE = (RemoveNoOps(), FoldBatchNorm(), MergeLinears())
QUICK = {"backend": "plain", "effort": "quick", "sizes": "example", "pipeline": PIPELINE, "progress": False}


def optimized(model: nn.Module, x: Any = X, **settings: Any) -> OptimizedModule:
    return refold.optimize(model, (x,), **QUICK | settings)


def is_as_decided(fast: OptimizedModule) -> bool:
    return any(note.startswith("As decided on ") for note in fast.report.notes)


def is_right(fast: OptimizedModule, x: torch.Tensor = X) -> bool:
    """Whether the fast way runs, and gives what the model gives."""
    with torch.no_grad():
        return torch.allclose(fast(x), fast.original(x), atol=1e-5) and not fast.fallbacks


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A cache of the test's own."""
    monkeypatch.setenv("REFOLD_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache" / "decisions"


@pytest.fixture
def verified(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Grows with every rewrite that is verified."""
    found: list[int] = []
    real = steps.verify_last

    def counted(*args: Any, **kwargs: Any) -> Any:
        found.append(1)
        return real(*args, **kwargs)

    monkeypatch.setattr(steps, "verify_last", counted)
    return found


def only_entry(cache: Path) -> Path:
    (found,) = cache.glob("*/decision.json")
    return found


def test_what_was_decided_is_used_again(cache: Path, verified: list[int]) -> None:
    first = optimized(a_model())
    made = [change.label for change in refold.history(first.graph_module)]
    assert made and verified and not is_as_decided(first)
    verified.clear()
    again = optimized(a_model(), X + 1)
    assert is_as_decided(again) and is_right(again, X + 1) and not verified
    assert [change.label for change in refold.history(again.graph_module)] == made
    assert again.report.steps == first.report.steps
    original = again.original
    assert again.restore() is original and again.report.steps == first.report.steps


def test_other_weights_are_folded_and_verified_anew(cache: Path, verified: list[int]) -> None:
    optimized(a_model(0))
    verified.clear()
    other = optimized(a_model(7))
    assert is_as_decided(other) and is_right(other) and verified
    verified.clear()
    assert is_right(optimized(a_model(7))) and not verified
    refused = [card.name for card in other.report.steps if card.status != "kept"]
    assert refused  # what was tried in vain is told, though it was not tried again


def test_nothing_is_kept_where_the_cache_is_turned_off(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    optimized(a_model(), cache=False)
    assert not cache.exists()
    monkeypatch.setenv("REFOLD_CACHE", "off")
    optimized(a_model())
    assert not cache.exists()
    assert cache_of_user() is None


def other_code(self: Attention, x: torch.Tensor) -> torch.Tensor:
    return self.last(self.value(x) + self.query(x)) + self.key(x)


def key(model: nn.Module | None = None, x: torch.Tensor = X, **settings: Any) -> str:
    """The key of a job, which is not done."""
    job = Job(model or a_model(), CallArguments((x,)), PIPELINE, "default", "auto", "quick", Budget(9.0), silent)
    return key_of(replace(job, **settings), []).digest


def with_attribute(value: Any) -> nn.Module:
    model = a_model()
    model.scale = value  # type: ignore[assignment]
    return model


def in_float64() -> nn.Module:
    return a_model().double()


DIFFERENT: dict[str, Callable[[], str]] = {
    "sizes": lambda: key(x=torch.randn(4, 5, 8)),
    "dtype": lambda: key(x=X.double()),
    "weights of another shape": lambda: key(a_model(cls=lambda: Attention(12))),  # type: ignore[arg-type]
    "weights of another dtype": lambda: key(in_float64()),
    "code": lambda: key(a_model(cls=type("Attention", (Attention,), {"forward": other_code}))),
    "an attribute": lambda: key(with_attribute(2)),
    "a level": lambda: key(level="safe"),
    "a budget": lambda: key(budget=Budget(8.0)),
    "a pipeline": lambda: key(pipeline=PIPELINE[:1]),
    "outputs": lambda: key(outputs=SelectedOutputs(("a",))),
    "a tie": lambda: key(tied(a_model())),
}


def tied(model: nn.Module) -> nn.Module:
    model.query.weight = model.key.weight
    return model


@pytest.mark.parametrize("what", DIFFERENT)
def test_what_is_different_has_another_key(what: str) -> None:
    assert DIFFERENT[what]() != key() == key(a_model(5), X + 1)


def test_precision_and_threads_have_keys_of_their_own() -> None:
    before = key()
    torch.set_float32_matmul_precision("high")
    assert key() != before
    torch.set_float32_matmul_precision("highest")
    torch.set_num_threads(2)
    try:
        assert key() != before
    finally:
        torch.set_num_threads(1)
    assert key() == before


def test_equal_configurations_have_equal_keys() -> None:
    """Attributes are compared by what they hold: objects, functions, sets in any order, one in itself."""

    class Settings:
        def __init__(self) -> None:
            self.words, self.call, self.own = {"a", "b", "c"}, other_code, self

    assert key(with_attribute(Settings())) == key(with_attribute(Settings()))


@pytest.fixture(scope="module")
def kept(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, bytes]:
    """The key and the text of a decision about the model, with open sizes."""
    folder = tmp_path_factory.mktemp("kept")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("REFOLD_CACHE", str(folder))
        optimized(a_model(), sizes="open")
    entry = only_entry(folder / "decisions")
    return entry.parent.name, entry.read_bytes()


def put(cache: Path, key: str, text: bytes | str) -> None:
    (cache / key).mkdir(mode=0o700, parents=True)
    cache.chmod(0o700)
    (cache / key / "decision.json").write_bytes(text if isinstance(text, bytes) else text.encode())


DAMAGE: dict[str, Callable[[bytes], bytes]] = {
    "empty": lambda text: b"",
    "no JSON": lambda text: b"\x80\x04\x95",
    "another schema": lambda text: b'{"schema": "other", "version": 1}',
    "another version": lambda text: text.replace(b'"version": 1', b'"version": 2', 1),
    "a changed word": lambda text: text.replace(b"plain", b"xlain"),
    "nested too deep": lambda text: b"[" * 100_000,
    "a list": lambda text: b"[]",
}


@pytest.mark.parametrize("how", DAMAGE)
def test_a_damaged_decision_is_none(kept: tuple[str, bytes], how: str) -> None:
    assert Decision.from_text(kept[1]).to_text().encode() == kept[1]
    with pytest.raises(BadDecision):
        Decision.from_text(DAMAGE[how](kept[1]))


def test_a_cut_entry_is_ignored_and_made_anew(cache: Path, kept: tuple[str, bytes]) -> None:
    put(cache, kept[0], kept[1][: len(kept[1]) // 2])
    fast = optimized(a_model(), sizes="open")
    assert not is_as_decided(fast) and is_right(fast)
    assert any("was not used" in note for note in fast.report.notes)
    assert decision_in(cache).steps == Decision.from_text(kept[1]).steps


def test_an_entry_of_another_model_is_ignored(cache: Path, kept: tuple[str, bytes]) -> None:
    decision = Decision.from_text(kept[1])
    put(cache, kept[0], replace(decision, key=replace(decision.key, model="0" * 64)).to_text())
    fast = optimized(a_model(), sizes="open")
    assert any("that of another model" in note for note in fast.report.notes)
    assert is_right(fast) and decision_in(cache).key == decision.key


def decision_in(cache: Path) -> Decision:
    return Decision.from_text(only_entry(cache).read_bytes())


LIES: dict[str, Callable[[Decision], Decision]] = {
    "an unknown executor left to try": lambda d: replace(d, at_example="magic", untried=("magic",)),
    "one that takes no other sizes": lambda d: replace(d, at_any_size="compile"),
    "a rewrite less": lambda d: replace(d, steps=d.steps[1:]),
    "an unknown rewrite": lambda d: replace(d, steps=[d.steps[0] | {"class": "os.system"}]),
    "another graph": lambda d: replace(d, captured="0" * 64),
    "steps of another kind": lambda d: replace(d, steps=[1]),
}


@pytest.mark.parametrize("lie", LIES)
def test_what_a_decision_claims_is_tried(cache: Path, kept: tuple[str, bytes], lie: str) -> None:
    """Whatever the text says: the model is rewritten, run and given back as if there were none."""
    model = a_model()
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    put(cache, kept[0], LIES[lie](Decision.from_text(kept[1])).to_text())
    fast = optimized(model, sizes="open")
    assert not is_as_decided(fast) and is_right(fast)
    assert any("was not used" in note for note in fast.report.notes)
    assert fast.restore() is model
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())


def test_what_was_left_open_is_raced_again(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What was level in the race and what the budget left untried: both are tried, up to three times."""
    few = {name: each for name, each in choice.executors("cpu").items() if name in ("plain", "onednn")}
    monkeypatch.setattr(choice, "executors", lambda device: few)
    how = {"backend": "auto", "effort": "default", "time_budget": 5.0}
    optimized(a_model(), **how)
    decision = decision_in(cache)
    level = tuple(Rounds(name, (1e-4,) * 8) for name in few)
    only_entry(cache).write_text(replace(decision, rounds=level, untried=(), races=1).to_text())
    fast = optimized(a_model(), **how)
    raced = [note for note in fast.report.notes if "was raced again" in note]
    assert len(raced) == 1 and "plain" in raced[0] and "onednn" in raced[0] and is_right(fast)
    assert decision_in(cache).races == 2
    only_entry(cache).write_text(replace(decision, rounds=level, untried=("onednn",), races=2).to_text())
    optimized(a_model(), **how)
    assert decision_in(cache).is_settled
    assert is_as_decided(optimized(a_model(), **how))


def test_what_is_not_there_is_not_raced(kept: tuple[str, bytes]) -> None:
    decision = Decision.from_text(kept[1])
    job = Job(a_model(), CallArguments((X,)), PIPELINE, "default", "auto", "default", Budget(9.0), silent)
    assert to_race(job, decision) == ()
    left = replace(decision, rounds=(Rounds("magic", (1.0,)),), untried=("magic", "onednn"))
    assert to_race(job, left)[0] == "onednn" and "magic" not in to_race(job, left)
    assert to_race(replace(job, effort="quick"), left) == ()


def test_a_model_that_was_rewritten_before_is_decided_each_time(cache: Path) -> None:
    """What its history holds cannot be made again from a graph that has it already."""
    gm = refold.MergeLinears()(refold.trace(a_model(), X))
    for _ in range(2):
        fast = optimized(gm)
        assert is_right(fast) and not is_as_decided(fast)


def test_no_value_is_in_the_entry(cache: Path) -> None:
    torch.manual_seed(0)
    big = a_model(cls=lambda: Attention(64))  # type: ignore[arg-type]
    optimized(big, torch.full((3, 5, 64), 0.4711))
    text = only_entry(cache).read_text()
    assert "0.4711" not in text and f"{big.query.weight[0, 0].item():.6f}"[:7] not in text
    size = sum(os.path.getsize(path) for path in cache.rglob("*") if path.is_file())
    assert size < 64 * 64 * 4 * 4  # less than its four weights


def test_other_sizes_run_fast_as_decided(cache: Path) -> None:
    """A drawn call is run by what serves other sizes before a decision is used."""

    class Open(Attention):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.query(x) + self.key(x) * self.value(x)

    fasts = [optimized(a_model(cls=Open), sizes="open") for _ in range(2)]
    assert is_as_decided(fasts[1]) and is_right(fasts[1], torch.randn(5, 9, 8))


def test_what_is_decided_waits_for_nobody(cache: Path) -> None:
    """Many processes may start at once with a decision that is there; only what is to be decided is decided once."""
    optimized(a_model())
    folder = cache_of_user()
    assert folder is not None
    told: list[str] = []
    with folder.locked(only_entry(cache).parent.name, 1.0, pytest.fail):
        optimized(a_model(), progress=lambda what, done: told.append(what))
    assert "capturing" in told and not any("waiting" in what for what in told)
