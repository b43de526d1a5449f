"""The most likely mistakes of a first hour: each is answered in one sentence that names the way out."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import refold
from refold import optimize
from refold.errors import BadExample, RefoldError

PLAIN: dict[str, Any] = {"backend": "plain", "effort": "quick", "progress": False}
IDS = torch.arange(6).reshape(2, 3)
X = torch.ones(2, 4)


class Text(nn.Module):
    """A small classifier that is called as those of transformers are."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.head = nn.Embedding(10, 4), nn.Linear(4, 2)

    def forward(self, input_ids: torch.Tensor, attention_mask: torch.Tensor | None = None) -> torch.Tensor:
        words = self.words(input_ids)
        return self.head(words if attention_mask is None else words * attention_mask.unsqueeze(-1)).mean(1)


class Split(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)
        self.first.register_parameter("other", None)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(self.first(x))


class Pipeline:
    """What transformers.pipeline gives looks like this from outside."""

    model = Text()

    def __call__(self, text: str) -> None:
        """Not reached."""


class Tokenizer(Pipeline):
    """What a tokenizer of transformers looks like from outside."""

    model = None

    def convert_tokens_to_ids(self, tokens: list[str]) -> None:
        """Not reached."""


class Sentences(nn.Sequential):
    """A SentenceTransformer: it has its tokenizer inside, and is called with a dict of what that gives."""

    def __init__(self) -> None:
        inner = nn.Module()
        inner.auto_model = Text()
        super().__init__(inner)

    def encode(self, texts: list[str]) -> None:
        """Not reached."""

    tokenize = encode


class NoKernel(nn.Module):
    """What some operators do in half precision."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.linalg.inv(x)


class Encoding(dict[str, Any]):
    """A tokenizer's output is a mapping."""


def text() -> nn.Module:
    return Text().eval()


def net(dtype: torch.dtype = torch.float32) -> nn.Module:
    return nn.Sequential(nn.Linear(4, 4), nn.ReLU()).eval().to(dtype)


class Two(nn.Module):
    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return x + y


def restored() -> Any:
    fast = optimize(net(), X, **PLAIN)
    fast.restore()
    return fast


def quantized() -> nn.Module:
    model = net()
    model.register_buffer("table", torch.quantize_per_tensor(X, 0.1, 0, torch.qint8))
    return model


def one(values: Any) -> dict[str, Any]:
    return {"input_ids": values}


Case = tuple[Callable[[], Any], str]
MISTAKES: dict[str, Case] = {
    # the model
    "in training mode": (lambda: optimize(net().train(), X), r"call model\.eval\(\) first"),
    "a class": (lambda: optimize(Text, one(IDS)), r"the class Text was given; make an instance of it first: Text\("),
    "a name": (lambda: optimize("bert-base", one(IDS)), "a str was given; load the model first"),
    "a function": (lambda: optimize(lambda x: x, X), "a function was given; write it as the forward of one"),
    "a state dict": (lambda: optimize(net().state_dict(), X), r"load these weights .* with model\.load_state_dict"),
    "a pipeline": (lambda: optimize(Pipeline(), one(IDS)), r"a Pipeline was given; give its model: \.model"),
    "an exported program": (lambda: optimize(torch.export.export(net(), (X,)), X), "give the model that was exported"),
    "its module": (
        lambda: optimize(torch.export.export(net(), (X,)).module(), X),
        "has no eval mode; give the model that was exported",
    ),
    "a TorchScript module": (lambda: optimize(torch.jit.trace(net(), X), X), "give the model that it was made from"),
    "a tokenizer": (lambda: optimize(Tokenizer(), one(IDS)), "a Tokenizer was given; give the model that it is for"),
    "its forward": (lambda: optimize(net().forward, X), "give the model itself, not its forward"),
    "a file": (lambda: optimize(Path("model.pt"), X), "Path was given; load the model first"),
    "a list of layers": (lambda: optimize(list(net()), X), "a list was given"),
    "a compiled function": (lambda: optimize(torch.compile(torch.relu), X), "write it as the forward of one"),
    "a sentence transformer": (
        lambda: optimize(Sentences().eval(), one(IDS)),
        r"give model\[0\]\.auto_model, with a tok",
    ),
    "a part optimized already": (
        lambda: optimize(nn.Sequential(optimize(net(), X, **PLAIN), nn.ReLU()).eval(), X),
        r"a part of the model, 0, is optimized already; call \.restore\(\)",
    ),
    "both swapped": (lambda: optimize(X, net()), "the model comes first, the example second"),
    "wrapped by torch.compile": (lambda: optimize(torch.compile(net()), X), r"give what is inside: model\._orig_mod"),
    "a DataParallel": (lambda: optimize(nn.DataParallel(net()), X), r"give what is inside: model\.module"),
    "optimized already": (lambda: optimize(optimize(net(), X, backend="plain"), X), r"call \.restore\(\) on it first"),
    "quantized": (lambda: optimize(quantized(), X), "the model is quantized"),
    "no weights loaded": (lambda: optimize(nn.Linear(4, 4, device="meta").eval(), X), "load its weights first"),
    # the example
    "no example": (lambda: optimize(net()), r"Give what one call takes, such as \{"),
    "a text": (lambda: optimize(text(), "some text"), r"give tokenizer\(texts, padding=True"),
    "texts": (lambda: optimize(text(), ["a text", "another"]), r"give tokenizer\(texts, padding=True"),
    "texts by name": (lambda: optimize(text(), one(["a text"])), r"give tokenizer\(texts, padding=True"),
    "lists of numbers": (lambda: optimize(text(), one([[1, 2]])), 'input_ids is a list .* return_tensors="pt"'),
    "an encoding of lists": (
        lambda: optimize(text(), Encoding(one([[1, 2]]))),
        "input_ids is a list .* return_tensors",
    ),
    "an array": (lambda: optimize(net(), X.numpy()), r"Give torch\.from_numpy"),
    "arrays by name": (lambda: optimize(text(), one(IDS.numpy())), r"input_ids is a numpy.*give torch\.from_numpy"),
    "a generator": (lambda: optimize(net(), (x for x in [X])), r"Give one batch of it: next\(iter\("),
    "a loader": (lambda: optimize(net(), torch.utils.data.DataLoader([X])), r"Give one batch of it: next\(iter\("),
    "a number": (lambda: optimize(net(), 3), "not an int. Give what one call takes"),
    "a dict in a tuple": (lambda: optimize(text(), (one(IDS),)), "give the dict itself"),
    "a wrong name": (
        lambda: optimize(text(), {"inputs": IDS}),
        "'inputs' is no argument of it; did you mean 'input_ids'",
    ),
    "nothing given": (lambda: optimize(text(), {}), "forward takes input_ids, attention_mask"),
    "one missing": (lambda: optimize(text(), {"attention_mask": IDS}), "forward takes input_ids, attention_mask"),
    "too many": (lambda: optimize(net(), (X, X)), "The number of arguments is another: forward takes input"),
    "another dtype": (lambda: optimize(net(), X.double()), "torch.float32 and the example torch.float64: cast one"),
    "on another device": (lambda: optimize(net(), X.to("meta")), "on cpu and the example on meta: move one"),
    "another width": (lambda: optimize(net(), X[:, :3]), r"float32\[2, 3\].* Call the model on it yourself"),
    "unknown words": (lambda: optimize(text(), one(IDS + 10)), "fails on the example .*IndexError"),
    "a list for the arguments": (
        lambda: optimize(Two().eval(), [X, X]),
        "a list, which means several calls; give a tuple",
    ),
    "several calls, one of them wrong": (
        lambda: optimize(text(), [one(IDS), {"input_id": IDS}]),
        "'input_id' is no argument of it; did you mean 'input_ids'",
    ),
    "an empty list": (lambda: optimize(net(), []), "an empty list; give at least one"),
    "an empty batch": (lambda: optimize(net(), X[:0]), r"without a single row \(float32\[0, 4\]\) shows nothing"),
    "no kernel for its dtype": (lambda: optimize(NoKernel().eval(), X[:, :2].half()), "try float32 or bfloat16"),
    # the settings
    "an unknown executor": (lambda: optimize(net(), X, backend="onnx"), "no executor called 'onnx'. There are: plain"),
    "an unknown level": (lambda: optimize(net(), X, level="fast"), "level must be one of safe"),
    "an unknown effort": (lambda: optimize(net(), X, effort="fast"), "effort must be one of quick, default, max"),
    "unknown sizes": (lambda: optimize(net(), X, sizes="dynamic"), "sizes must be 'open' or 'example', not 'dynamic'"),
    "padding by a flag": (lambda: optimize(net(), X, padding=True), "padding must be None, or 'zeros'"),
    "a wrong policy": (lambda: optimize(net(), X, on_fallback="error"), "on_fallback must be one of warn, raise, ign"),
    "an output that is not there": (
        lambda: optimize(net(), X, outputs=["logits"], **PLAIN),
        r"outputs=\['logits'\] selects among several, and the model gives one",
    ),
    "no time at all": (lambda: optimize(net(), X, time_budget=0), "time_budget must be a positive number"),
    "a class of a rule": (lambda: optimize(net(), X, pipeline=refold.MergeLinears), r"needed: MergeLinears\(\)"),
    "the name of a rule": (lambda: optimize(net(), X, pipeline=["MergeLinears"]), "a str was given"),
    # by hand
    "a rule on a model": (lambda: refold.MergeLinears()(net()), r"Capture it first: gm = refold\.trace"),
    "undo of a model": (lambda: refold.undo(net()), r"Capture it first: gm = refold\.trace"),
    "preparing what was restored": (lambda: restored().prepare(X), r"call \.refresh\(\) first"),
    "a folder that is not there": (lambda: refold.load("not-there", net()), "not-there is no saved model"),
}


@pytest.mark.filterwarnings("ignore::UserWarning:torch.*", "ignore:torch.quantize")
@pytest.mark.parametrize("name", MISTAKES)
def test_a_mistake_gets_one_sentence_with_the_way_out(name: str) -> None:
    make, words = MISTAKES[name]
    with pytest.raises(RefoldError, match=words) as refused:
        make()
    said = str(refused.value)
    assert "\n" not in said and len(said) < 420 and said.endswith((".", ")")), said


def test_a_model_on_two_devices() -> None:
    """One that has no values would be refused for that, and there is no second device everywhere."""
    if not torch.cuda.is_available():
        pytest.skip("needs a second device")
    model = Split().eval()
    model.second.cuda()
    with pytest.raises(RefoldError, match=r"split over cpu and cuda:0; move it to one"):
        optimize(model, X)


def test_a_call_that_fails_leaves_the_model_and_the_cause_behind() -> None:
    model = text()
    before = copy.deepcopy(model.state_dict())
    with pytest.raises(BadExample) as refused:
        optimize(model, one(IDS + 10))
    assert isinstance(refused.value.__cause__, IndexError)
    assert all(torch.equal(before[name], tensor) for name, tensor in model.state_dict().items())


def test_what_is_no_mistake() -> None:
    """An example that requires gradients, a captured model, one that is half a model in half precision, two tensors as
    two calls: these are just optimized."""
    for model, example in (
        (net(), X.clone().requires_grad_()),
        (torch.fx.symbolic_trace(net()), X),
        (net(torch.bfloat16), X.bfloat16()),
        (net(), [X, X[:1]]),
    ):
        call = example[0] if isinstance(example, list) else example
        with torch.no_grad():
            expected = model(call)
            assert torch.equal(optimize(model.eval(), example, **PLAIN)(call), expected)
