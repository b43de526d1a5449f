"""Every executor: same values, same structure, refuses what it was not built for, never overwrites a result."""

from __future__ import annotations

import copy
import importlib.metadata
import subprocess
import sys
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import nn

import refold
from refold.executors import (
    CudaGraph,
    Executor,
    Freeze,
    Plain,
    PreparationFailed,
    UnknownExecutor,
    UnsupportedInput,
    executor_named,
    executors,
    unavailable,
)

DEVICES = ["cpu"] + (["cuda"] if torch.cuda.is_available() else [])
OF_GRAPHS = ["onednn", "compile-fused+cuda_graph"]
# they have tests of their own
OF_OPEN_GRAPHS = ["packed+cuda_graph", "compile-open+cuda_graph", "compile-open", "openvino-open", "onnxruntime-open"]
QUICK = ["plain", "onednn"]  # to prepare; what all tests of one executor share
PAIRS = [
    pytest.param((name, device), marks=() if name in QUICK else pytest.mark.slow, id=f"{name}-{device}")
    for device in DEVICES
    for name in executors()
    if name not in OF_OPEN_GRAPHS
]


class Net(nn.Module):
    """Nested inputs and outputs, a constant argument, an unused input, an output that is an input, one given twice."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(16, 16)
        self.conv = nn.Conv2d(3, 8, 3)
        self.norm = nn.BatchNorm2d(8)
        nn.init.uniform_(self.norm.weight, 0.5, 1.5)
        self.norm.running_mean.normal_()
        self.norm.running_var.uniform_(0.5, 1.5)

    def forward(self, x: Any, image: Any, unused: Any = None, *, scale: float = 2.0) -> dict[str, Any]:
        y = torch.relu(self.linear(x["value"])) * scale
        return {"y": y, "pair": (self.norm(self.conv(image)), None, 3), "again": [y], "x": x["value"]}


def example(device: str) -> tuple[tuple[Any, ...], dict[str, Any]]:
    x = {"value": torch.randn(4, 16, device=device)}
    image = torch.randn(2, 3, 8, 8, device=device)
    return (x,), {"image": image, "unused": torch.ones(3, device=device), "scale": 3.0}


@dataclass
class Prepared:
    executor: Executor
    module: Net
    reference: Net
    call: Any
    device: str

    def compare(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        with torch.no_grad():
            want = copy.deepcopy(self.reference).double()(*_to_double(args), **_to_double(kwargs))
            eager = self.reference(*args, **kwargs)
            got = self.call(*args, **kwargs)
        assert got["pair"][1:] == (None, 3) and list(got) == ["y", "pair", "again", "x"]
        assert torch.equal(got["x"], args[0]["value"])
        assert torch.equal(got["again"][0], got["y"])
        for pick in (lambda o: o["y"], lambda o: o["pair"][0]):
            own = (pick(eager).double() - pick(want)).abs().max()
            error = (pick(got).double() - pick(want)).abs().max()
            rounding = torch.finfo(torch.float32).eps * pick(want).abs().max()
            # A sum of 27 products in another order: its error bound is the number of terms times one rounding.
            assert error <= own + 32 * rounding, self.executor.name
            assert pick(got).dtype is pick(eager).dtype and pick(got).shape == pick(eager).shape


def _to_double(value: Any) -> Any:
    return torch.utils._pytree.tree_map_only(torch.Tensor, torch.Tensor.double, value)


@pytest.fixture(scope="module", params=PAIRS)
def prepared(request: pytest.FixtureRequest) -> Prepared:
    name, device = request.param
    executor = executor_named(name)
    reason = executor.available(torch.device(device))
    if reason is not None:
        pytest.skip(reason)
    torch.manual_seed(0)
    module = Net().eval().to(device)
    reference = copy.deepcopy(module)
    args, kwargs = example(device)
    graph = refold.trace(module, *args, dynamic=False, whole_result=True, **kwargs) if name in OF_GRAPHS else module
    return Prepared(executor, module, reference, executor.prepare(graph, args, kwargs), device)


def test_same_values_and_structure_on_new_inputs(prepared: Prepared):
    for _ in range(3):
        prepared.compare(*example(prepared.device))


def test_keyword_order_and_strides_do_not_matter(prepared: Prepared):
    args, kwargs = example(prepared.device)
    turned = dict(reversed(kwargs.items()))
    turned["image"] = turned["image"].to(memory_format=torch.channels_last)
    turned["unused"] = torch.ones(6, device=prepared.device)[::2]
    args = ({"value": torch.randn(16, 4, device=prepared.device).t()},)
    prepared.compare(args, turned)


def test_works_in_inference_mode(prepared: Prepared):
    with torch.inference_mode():
        prepared.compare(*example(prepared.device))


def test_a_result_is_not_overwritten_by_the_next_call(prepared: Prepared):
    args, kwargs = example(prepared.device)
    with torch.no_grad():
        first = prepared.call(*args, **kwargs)
        kept = copy.deepcopy(first)
        prepared.call(*example(prepared.device)[0], **example(prepared.device)[1])
    assert torch.equal(first["y"], kept["y"])
    assert torch.equal(first["pair"][0], kept["pair"][0])


def test_what_it_was_not_built_for_is_refused(prepared: Prepared):
    if prepared.executor.name == "plain":
        pytest.skip("the plain module takes what it takes")
    args, kwargs = example(prepared.device)
    value = args[0]["value"]
    others: list[tuple[tuple[Any, ...], dict[str, Any]]] = [
        (({"value": torch.randn(5, 16, device=prepared.device)},), kwargs),
        (({"value": value.double()},), kwargs),
        (({"value": value.to("meta")},), kwargs),
        (({"other": value},), kwargs),
        ((value,), kwargs),
        (args, kwargs | {"scale": 2.0}),
        (args, kwargs | {"scale": 3}),
        (args, kwargs | {"extra": value}),
        (args, {name: kwargs[name] for name in ("image", "unused")}),
        ((), kwargs | {"x": args[0]}),
    ]
    for other_args, other_kwargs in others:
        with torch.no_grad(), pytest.raises(UnsupportedInput):
            prepared.call(*other_args, **other_kwargs)
    with torch.no_grad(), torch.autocast(prepared.device, dtype=torch.bfloat16), pytest.raises(UnsupportedInput):
        prepared.call(*args, **kwargs)


def test_gradients_are_given_or_refused(prepared: Prepared):
    args, kwargs = example(prepared.device)
    args[0]["value"].requires_grad_()
    if prepared.executor.name == "plain" or (prepared.executor.name.startswith("compile") and _follows_only(prepared)):
        prepared.call(*args, **kwargs)["y"].sum().backward()
        assert args[0]["value"].grad is not None and args[0]["value"].grad.abs().sum() > 0
        return
    with pytest.raises(UnsupportedInput, match="gradients"):
        prepared.call(*args, **kwargs)


def _follows_only(prepared: Prepared) -> bool:
    return prepared.executor.reads_live_weights and "graph" not in prepared.executor.name


def test_says_the_truth_about_following_weights(prepared: Prepared):
    args, kwargs = example(prepared.device)
    weights = [prepared.module.linear.weight, prepared.module.conv.weight]
    with torch.no_grad():
        before = copy.deepcopy(prepared.call(*args, **kwargs))
        for weight in weights:
            weight.mul_(2)
        after = prepared.call(*args, **kwargs)
        for weight in weights:
            weight.div_(2)
    follows = [not torch.equal(before["y"], after["y"]), not torch.equal(before["pair"][0], after["pair"][0])]
    assert all(follows) is prepared.executor.reads_live_weights  # freezing on a GPU bakes one of the two


def test_two_modules_of_one_class_keep_their_own_weights():
    """Dynamo keeps compiled code with the class's code object: without guards, one module would answer for another."""
    freeze = executor_named("compile-freezing")
    x = torch.randn(2, 4)
    modules = [nn.Linear(4, 4) for _ in range(2)]
    calls = [freeze.prepare(module, (x,), {}) for module in modules]
    with torch.no_grad():
        for module, call in zip(modules, calls, strict=True):
            assert torch.allclose(call(x), x @ module.weight.t() + module.bias, atol=1e-6)
        assert not torch.equal(calls[0](x), calls[1](x))


def test_one_tensor_given_twice_does_not_mean_that_both_are_one():
    class Difference(nn.Module):
        def forward(self, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
            return a - 2 * b

    same = torch.ones(3)
    for name, executor in executors("cpu").items():
        if name in (*OF_GRAPHS, *OF_OPEN_GRAPHS):  # there is no layer in it that they could exchange
            continue
        call = executor.prepare(Difference(), (same, same), {})
        with torch.no_grad():
            assert torch.equal(call(torch.zeros(3), same), torch.full((3,), -2.0)), name


def test_a_training_module_is_refused_by_those_that_bake():
    module = nn.Sequential(nn.Linear(2, 2), nn.Dropout(0.5)).train()
    for name, executor in executors("cpu").items():
        if executor.reads_live_weights:
            continue
        with pytest.raises(PreparationFailed, match="training"):
            executor.prepare(module, (torch.ones(1, 2),), {})
        assert name


def test_a_module_that_writes_into_its_input_is_refused_by_engines():
    class Writes(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x.add_(1)
            return x * 2

    for name in ("onnxruntime", "openvino"):
        executor = executor_named(name)
        if executor.available(torch.device("cpu")):
            pytest.skip(f"{name}: {executor.available(torch.device('cpu'))}")
        with pytest.raises(PreparationFailed, match="writes"):
            executor.prepare(Writes(), (torch.ones(2),), {})


def test_arguments_that_are_neither_tensors_nor_constants_are_refused():
    class Opaque:
        pass

    class Takes(nn.Module):
        def forward(self, x: torch.Tensor, y: Any) -> torch.Tensor:
            return x + 1

    with pytest.raises(PreparationFailed, match="Opaque"):
        executor_named("compile").prepare(Takes(), (torch.ones(1), Opaque()), {})


def test_module_that_cannot_be_compiled_says_so():
    class Branches(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x + 1 if x.sum().item() > 0 else x - 1

    with pytest.raises(PreparationFailed, match="compile-freezing"):
        executor_named("compile-freezing").prepare(Branches(), (torch.ones(2),), {})


def test_names_reasons_and_discovery(monkeypatch: pytest.MonkeyPatch):
    assert next(iter(executors())) == "plain"
    assert all(unavailable("cpu")[name] for name in ("cuda_graph", "compile+cuda_graph"))
    assert set(executors("cpu")) | set(unavailable("cpu")) == set(executors())
    with pytest.raises(UnknownExecutor, match="plain"):
        executor_named("nonsense")

    class Mine(Plain):
        name = "mine"

    class Entry:
        name, value, dist = "mine", "their_package:Mine", None

        def load(self) -> type[Executor]:
            return Mine

    monkeypatch.setattr(
        "refold.executors.catalogue.entry_points", lambda group: [Entry()] if "executors" in group else []
    )
    assert isinstance(executor_named("mine"), Mine)


def test_missing_packages_are_named(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    for name in ("onnxruntime", "openvino"):
        assert f"pip install {name}" in (executor_named(name).available(torch.device("cpu")) or "")
    assert importlib.metadata  # the real module is untouched


def test_model_outputs_keep_their_class():
    outputs = pytest.importorskip("transformers.modeling_outputs", reason="transformers is not installed")

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(4, 4)

        def forward(self, x: torch.Tensor) -> Any:
            y = self.linear(x)
            return outputs.BaseModelOutputWithPooling(last_hidden_state=y, pooler_output=y.sum(1))

    model, x = Model().eval(), torch.randn(2, 4)
    with torch.no_grad():
        want = copy.deepcopy(model)(x)
        graph = refold.trace(model, x, dynamic=False, whole_result=True)
        for name, executor in executors("cpu").items():
            if name in OF_OPEN_GRAPHS:
                continue
            got = executor.prepare(graph if name in OF_GRAPHS else model, (x,), {})(x)
            assert type(got) is type(want) and list(got) == list(want), name
            bound = 4 * torch.finfo(torch.float32).eps * want.last_hidden_state.abs().max()
            assert (got.last_hidden_state - want.last_hidden_state).abs().max() <= bound, name


def test_engines_run_the_attention_that_rewrites_make():
    """Grouped heads, a causal flag and a mask: an engine that refuses one of them would drop out after a rewrite."""

    class Attention(nn.Module):
        def forward(self, q: torch.Tensor, kv: torch.Tensor, mask: torch.Tensor) -> tuple[torch.Tensor, ...]:
            attend = torch.nn.functional.scaled_dot_product_attention
            causal = attend(q, kv, kv, is_causal=True, enable_gqa=True)
            return causal, attend(q, kv, kv, attn_mask=mask, enable_gqa=True, scale=0.3)

    torch.manual_seed(0)
    q, kv, mask = torch.randn(1, 4, 6, 8), torch.randn(1, 2, 6, 8), torch.rand(1, 1, 6, 6) > 0.3
    mask[..., 0] = True
    repeated = kv.double().repeat_interleave(2, dim=1)
    attend = torch.nn.functional.scaled_dot_product_attention
    want = (
        attend(q.double(), repeated, repeated, is_causal=True),
        attend(q.double(), repeated, repeated, attn_mask=mask, scale=0.3),
    )
    # Two products of 8 and 6 terms and a softmax between: each rounds a result at most once a term.
    bound = 32 * torch.finfo(torch.float32).eps * kv.abs().max()
    engines = [name for name in executors("cpu") if name.startswith(("onnxruntime", "openvino"))]
    engines = [name for name in engines if name not in OF_OPEN_GRAPHS]
    if not engines:
        pytest.skip(f"no engine is installed: {unavailable('cpu')}")
    for name in engines:
        call = executor_named(name).prepare(Attention(), (q, kv, mask), {})
        with torch.no_grad():
            for got, expected in zip(call(q, kv, mask), want, strict=True):
                assert (got.double() - expected).abs().max() <= bound, name


def engines() -> list[str]:
    found = [name for name in executors("cpu") if name in ("onnxruntime", "openvino")]
    return found or pytest.skip(f"no engine is installed: {unavailable('cpu')}")


class Score(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> Any:
        y = self.linear(x)
        return {"logits": y, "score": y.sum().item()}


class Labels(Score):
    def forward(self, x: torch.Tensor) -> Any:
        y = self.linear(x)
        return y, y.argmax(-1).tolist()


class Count(Score):
    def forward(self, x: torch.Tensor) -> Any:
        y = self.linear(x)
        return y, [y[y > 0].shape[0]]


class ScoreInObject(Score):
    def forward(self, x: torch.Tensor) -> Any:
        held = object.__new__(Attributes)
        held.logits = self.linear(x)
        held.best = held.logits.max().item()
        return held


class Attributes:
    logits: torch.Tensor
    best: float


class Positive(Score):
    def forward(self, x: torch.Tensor) -> Any:
        y = self.linear(x)
        return y[y > 0]


class Sizes(Score):
    def forward(self, x: torch.Tensor) -> Any:
        y = self.linear(x)
        return y, y.shape[0], [y.numel(), "name", None, 0.5]


@pytest.mark.parametrize("graph", [False, True], ids=["module", "graph"])
@pytest.mark.parametrize("cls", [Score, Labels, Count, ScoreInObject])
def test_engines_refuse_outputs_besides_tensors_that_depend_on_values(cls: type[nn.Module], graph: bool):
    x = torch.randn(3, 4)
    model = cls().eval()
    module = refold.trace(model, x, dynamic=False, whole_result=True) if graph else model
    for name in engines():
        with pytest.raises(PreparationFailed, match="computes another output from values"):
            executor_named(name).prepare(module, (x,), {})


def test_sizes_that_depend_on_shapes_alone_are_constants():
    model, x = Sizes().eval(), torch.randn(3, 4)
    want = copy.deepcopy(model)
    for name in engines():
        with torch.no_grad():
            got = executor_named(name).prepare(model, (x,), {})(x)
            torch.testing.assert_close(got[0], want(x)[0])
        assert got[1:] == (3, [12, "name", None, 0.5]), name


def test_output_sizes_that_depend_on_values_are_right_or_refused():
    model = Positive().eval()
    want = copy.deepcopy(model)
    for name in engines():
        try:
            call = executor_named(name).prepare(model, (torch.randn(3, 4),), {})
        except PreparationFailed as refused:
            assert name == "openvino" and "the size of an output depends on values" in str(refused)
            continue
        with torch.no_grad():
            for _ in range(3):
                x = torch.randn(3, 4)
                torch.testing.assert_close(call(x), want(x))


def test_engines_are_silent_and_refuse_sparse_tensors(capfd: pytest.CaptureFixture[str]):
    class Sparse(Score):
        def forward(self, x: torch.Tensor) -> Any:
            return self.linear(x).relu().to_sparse()

    class Branches(Score):
        def forward(self, x: torch.Tensor) -> Any:
            return self.linear(x) if x.sum() > 0 else -x

    for name in engines():
        with pytest.raises(PreparationFailed, match="layout sparse_coo"):
            executor_named(name).prepare(Sparse(), (torch.ones(3, 4),), {})
        with pytest.raises(PreparationFailed, match=r"torch\.export"):
            executor_named(name).prepare(Branches(), (torch.ones(3, 4),), {})
    assert "def forward" not in capfd.readouterr().err


def test_a_sparse_output_is_refused_in_a_sentence():
    class Sparse(Score):
        def forward(self, x: torch.Tensor) -> Any:
            return self.linear(x).relu().to_sparse()

    with pytest.raises(refold.RefoldError, match="An output is a sparse_coo tensor"):
        refold.optimize(Sparse().eval(), (torch.ones(3, 4),), backend="plain", progress=False, time_budget=1)


class Flattens(nn.Module):
    """A capture on contiguous inputs drops `contiguous`."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(12, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(x.contiguous().view(x.shape[0], -1))


@pytest.mark.parametrize("name", ["plain", "compile", "compile-freezing", "onnxruntime"])
def test_inputs_that_lie_otherwise(name: str):
    executor = executor_named(name)
    if executor.available(torch.device("cpu")):
        pytest.skip(f"{name}: {executor.available(torch.device('cpu'))}")
    x = torch.randn(2, 3, 1, 4)
    model = Flattens().eval()
    want = copy.deepcopy(model)
    call = executor.prepare(refold.trace(model, x, dynamic=False), (x,), {})
    complex_ = torch.complex(torch.randn(2, 3, 1, 4), torch.randn(2, 3, 1, 4))
    others = {
        "transposed": torch.randn(2, 4, 1, 3).transpose(1, 3),
        "channels last": x.to(memory_format=torch.channels_last),
        "sliced": torch.randn(2, 3, 1, 8)[..., ::2],
        "expanded": torch.randn(1, 3, 1, 4).expand(2, 3, 1, 4),
        "another stride along one": x.as_strided(x.shape, (12, 4, 99, 1)),
        "negated later": complex_.conj().imag,
    }
    with torch.no_grad():
        for how, other in others.items():
            torch.testing.assert_close(call(other), want(other.resolve_neg().clone()), msg=how)


@pytest.mark.parametrize("name", ["plain", "compile", "compile-freezing"])
def test_an_input_that_is_written_to_is_never_a_copy(name: str):
    class Writes(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x.add_(1) * 2

    module = refold.trace(Writes(), torch.zeros(2, 3), dynamic=False)
    call = executor_named(name).prepare(module, (torch.zeros(2, 3),), {})
    x = torch.zeros(2, 3)
    with torch.no_grad():
        call(x)
        assert torch.equal(x, torch.ones(2, 3))
        with pytest.raises(UnsupportedInput, match="writes into its inputs"):
            call(torch.zeros(3, 2).t())


def test_gradients_go_through_a_copied_input():
    model = Flattens().eval()
    call = Plain().prepare(refold.trace(model, torch.randn(2, 3, 4), dynamic=False), (torch.randn(2, 3, 4),), {})
    x = torch.randn(2, 4, 3).transpose(1, 2).requires_grad_()
    call(x).sum().backward()
    torch.testing.assert_close(x.grad, model.linear.weight.sum(0).reshape(1, 3, 4).expand(2, 3, 4))


def test_frozen_options_reach_inductor():
    with pytest.raises(Exception, match="nonsense_option"):
        Freeze("x", options={"nonsense_option": 1}).prepare(nn.Linear(2, 2), (torch.ones(1, 2),), {})


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
class TestCudaGraph:
    def test_new_shapes_are_captured_and_the_oldest_forgotten(self):
        module = nn.Linear(8, 8).cuda().eval()
        executor = CudaGraph("capture", new_shapes="capture", max_shapes=2)
        call = executor.prepare(module, (torch.randn(1, 8, device="cuda"),), {})
        with torch.no_grad():
            for rows in (1, 2, 3, 1, 2, 3):
                x = torch.randn(rows, 8, device="cuda")
                assert torch.equal(call(x), module(x))
        assert len(call.graphs.recordings) == 2

    def test_a_checked_call_finds_its_graph_also_when_that_was_forgotten(self):
        module = nn.Linear(8, 8).cuda().eval()
        executor = CudaGraph("capture", new_shapes="capture", max_shapes=1)
        x, other = torch.randn(1, 8, device="cuda"), torch.randn(2, 8, device="cuda")
        call = executor.prepare(module, (x,), {})
        with torch.no_grad():
            assert torch.equal(call.run_checked([x], (x,), {}), module(x))
            assert torch.equal(call(other), module(other))
            assert torch.equal(call.run_checked([x], (x,), {}), module(x))

    def test_inputs_and_outputs_of_several_kinds(self):
        class Several(nn.Module):
            def forward(self, x: torch.Tensor, n: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor, ...]:
                return x + y, n + 1, x.expand(3, *x.shape), (x > 0).t()

        args = (torch.randn(4, 5).cuda(), torch.arange(3).cuda(), torch.randn(5, 4).cuda().t())
        call = CudaGraph().prepare(Several(), args, {})
        with torch.no_grad():
            for _ in range(2):
                args = (torch.randn(5, 4).cuda().t(), torch.arange(3).cuda() + 7, torch.randn(4, 5).cuda())
                outputs = call(*args)
                torch.cuda.synchronize()
                assert all(map(torch.equal, outputs, Several()(*args)))

    def test_what_cannot_be_captured_is_refused(self):
        class Looks(nn.Module):
            def forward(self, x: torch.Tensor) -> torch.Tensor:
                return x + 1 if x.sum().item() > 0 else x

        class Writes(nn.Module):
            def forward(self, x: torch.Tensor) -> torch.Tensor:
                return x.add_(1)

        class ToHost(nn.Module):
            def forward(self, x: torch.Tensor) -> torch.Tensor:
                return torch.ones(2)

        for module in (Looks(), Writes(), ToHost()):
            with pytest.raises(PreparationFailed):
                CudaGraph().prepare(module, (torch.ones(2, device="cuda"),), {})

    def test_two_streams_do_not_mix_their_results(self):
        module = nn.Linear(512, 512).cuda().eval()
        call = CudaGraph().prepare(module, (torch.randn(64, 512, device="cuda"),), {})
        streams = [torch.cuda.Stream() for _ in range(2)]
        inputs = [torch.randn(64, 512, device="cuda") for _ in range(20)]
        torch.cuda.synchronize()
        outputs = []
        with torch.no_grad():
            for index, x in enumerate(inputs):
                with torch.cuda.stream(streams[index % 2]):
                    outputs.append(call(x))
            torch.cuda.synchronize()
            for x, y in zip(inputs, outputs, strict=True):
                assert torch.equal(y, module(x))


def test_openvino_says_nothing_to_the_root_logger() -> None:
    """In a process of its own: what it misses in torch's tables it says once."""
    pytest.importorskip("openvino")
    code = (
        "import logging, torch; from refold.executors import executor_named\n"
        "model = torch.nn.Linear(4, 4).eval()\n"
        "executor_named('openvino').prepare(model, (torch.randn(2, 4),), {})\n"
        "assert not logging.getLogger().handlers and not logging.getLogger().filters\n"
        "logging.warning('mine')"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert "mine" in done.stderr and "Traceback" not in done.stderr and "decomp" not in done.stderr
