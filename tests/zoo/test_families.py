"""A dozen families: captured, raised, equal to eager bit for bit, at another batch size, after copy and pickle."""

from __future__ import annotations

import copy
import io
from typing import Any

import pytest

transformers = pytest.importorskip("transformers")

import torch  # noqa: E402
from torch import fx, nn  # noqa: E402
from zoo_families import FAMILIES, captured_of, make  # noqa: E402

from refold.capture.tracing import capture_report  # noqa: E402


def tensors_of(result: Any) -> list[torch.Tensor]:
    if isinstance(result, torch.Tensor):
        return [result]
    values = result.values() if isinstance(result, dict) else result
    return [t for value in values if value is not None for t in tensors_of(value)]


def assert_same(result: Any, expected: Any) -> None:
    assert type(result) is type(expected)
    if isinstance(expected, dict):
        assert list(result.keys()) == list(expected.keys())
    got, wanted = tensors_of(result), tensors_of(expected)
    assert len(got) == len(wanted) > 0
    assert all(torch.equal(a, b) for a, b in zip(got, wanted, strict=True))


def eager(model: nn.Module, args: tuple, kwargs: dict) -> Any:
    """The reference: an own copy of the model, without the fused path of nn.TransformerEncoder and without a cache."""
    reference = copy.deepcopy(model)
    if hasattr(reference, "config"):
        reference.config.use_cache = False
    torch.backends.mha.set_fastpath_enabled(False)
    try:
        with torch.no_grad():
            return reference(*args, **kwargs)
    finally:
        torch.backends.mha.set_fastpath_enabled(True)


@pytest.mark.parametrize("name", FAMILIES)
def test_a_family_is_captured_as_it_is(name: str) -> None:
    model, args, kwargs, captured = captured_of(name)
    fresh, _, _ = make(name)
    expected = eager(fresh, args, kwargs)
    report = capture_report(captured)

    assert isinstance(captured, fx.GraphModule)
    assert report.complete, report
    with torch.no_grad():
        assert_same(captured(*args, **kwargs), expected)
        assert_same(copy.deepcopy(captured)(*args, **kwargs), expected)

    own = dict(model.named_modules(remove_duplicate=False))
    called = [n for n in captured.graph.nodes if n.op == "call_module"]
    linears = [m for m in model.modules() if type(m) in (nn.Linear, nn.Conv2d, nn.Conv1d, nn.LayerNorm)]
    assert len({n.target for n in called}) >= len(linears) - len(report.unread)
    for node in called:
        if node.target not in report.split:
            assert captured.get_submodule(node.target) is own[node.target]
    keys = list(captured.state_dict())
    assert keys == [k for k in model.state_dict() if k in set(keys)]
    assert set(model.state_dict()) - set(keys) <= {*report.unread, *_unread_aliases(model, captured)}
    assert all(torch.equal(v, fresh.state_dict()[k]) for k, v in model.state_dict().items())


def _unread_aliases(model: nn.Module, captured: nn.Module) -> set[str]:
    """Names of tensors that the graph reads under another name, and statistics of modules it never calls."""
    kept = {id(p) for p in captured.parameters()}
    tied = {name for name, p in model.named_parameters(remove_duplicate=False) if id(p) in kept}
    return tied | {name for name, _ in model.named_buffers()}


@pytest.mark.parametrize("name", FAMILIES)
def test_another_batch_size_gives_the_same_as_eager(name: str) -> None:
    model, args, kwargs, captured = captured_of(name)
    report = capture_report(captured)
    assert any(0 in dims for dims in report.dynamic.values()), report

    def longer(value: Any) -> Any:
        return torch.cat([value, value.flip(-1), value]) if isinstance(value, torch.Tensor) else value

    more = tuple(map(longer, args)), {k: longer(v) for k, v in kwargs.items()}
    expected = eager(model, *more)
    with torch.no_grad():
        assert_same(captured(*more[0], **more[1]), expected)


@pytest.mark.parametrize("name", ["bert", "llama", "conv_net"])
def test_it_pickles_node_for_node(name: str) -> None:
    model, args, kwargs, captured = captured_of(name)
    expected = eager(model, args, kwargs)
    file = io.BytesIO()
    torch.save(captured, file)
    file.seek(0)
    loaded = torch.load(file, weights_only=False)
    assert loaded.code == captured.code
    assert [n.name for n in loaded.graph.nodes] == [n.name for n in captured.graph.nodes]
    assert list(loaded.state_dict()) == list(captured.state_dict())
    assert capture_report(loaded) == capture_report(captured)
    with torch.no_grad():
        assert_same(loaded(*args, **kwargs), expected)
