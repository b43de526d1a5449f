"""What people type, and what they get to hear: models and inputs by name, wrong inputs, folders of strangers."""

from __future__ import annotations

import json
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from cli_folders import let_it_say, write_folder
from torch import nn

from refold.call_arguments import CallArguments
from refold.cli import main
from refold.command_line.builtin_models import EXAMPLES, example_named
from refold.command_line.console import printable
from refold.command_line.loaded_model import DTYPES, prepare
from refold.command_line.model_inputs import NotPlain, restore_inputs, store_inputs
from refold.command_line.model_sources import Source, load_model, rebuild
from refold.command_line.options import Request, Sizes
from refold.command_line.transformers_models import config_from, model_from
from refold.errors import WrongInput
from refold.optimization.default_pipeline import default_pipeline

Run = Callable[..., tuple[int, str, str]]

FACTORY = """
import sys
import torch
from torch import nn
from neighbour import WIDTH

def make():
    return nn.Sequential(nn.Linear(WIDTH, 4), nn.ReLU())

def with_inputs():
    return make(), torch.ones(2, WIDTH)

def inputs(model):
    return {"input": torch.ones(5, model[0].in_features)}

def plain_inputs():
    return torch.ones(7, WIDTH)

def wide_inputs():
    return torch.ones(2, WIDTH + 1)

def no_inputs():
    return 3

def fails():
    raise RuntimeError("no weights today")

def leaves():
    sys.exit(0)

number = 3
"""


@pytest.fixture
def refold_command(capfd: pytest.CaptureFixture[str]) -> Run:
    def run(*arguments: object) -> tuple[int, str, str]:
        capfd.readouterr()
        code = main([str(argument) for argument in arguments])
        out, err = capfd.readouterr()
        return code, out, err

    return run


@pytest.fixture
def file(tmp_path: Path) -> Path:
    (tmp_path / "neighbour.py").write_text("WIDTH = 3\n")
    (tmp_path / "mine.py").write_text(FACTORY)
    return tmp_path / "mine.py"


# --- models and inputs -------------------------------------------------------------------------------------------


def test_an_example_is_the_same_everywhere_and_leaves_the_random_state_alone() -> None:
    torch.manual_seed(7)
    expected = torch.rand(1)
    torch.manual_seed(7)
    one, two = EXAMPLES["tiny"].build(), EXAMPLES["tiny"].build()
    assert torch.equal(torch.rand(1), expected)
    assert all(torch.equal(a, b) for a, b in zip(one.state_dict().values(), two.state_dict().values(), strict=True))
    assert not one.training


@pytest.mark.parametrize("name", ["distilbert", "mobilenet-v2"])
def test_examples_of_transformers_get_inputs_that_run(name: str) -> None:
    pytest.importorskip("transformers")
    loaded = prepare(Request(f"example:{name}", sizes=Sizes(batch=2, length=16, image=64)))
    assert not loaded.inputs.args
    assert all(tensor.shape[0] == 2 for tensor in loaded.inputs.kwargs.values())
    with torch.no_grad():
        assert loaded.inputs.given_to(loaded.model)[0].shape[0] == 2


def test_the_sentence_classifier_gets_sentences_of_natural_lengths() -> None:
    loaded = prepare(Request("example:sentence-classifier"))
    mask = loaded.inputs.kwargs["attention_mask"]
    assert mask.shape[0] == 32
    assert 0.3 < mask.float().mean() < 0.6, "most of the grid is padding, as in batches in arrival order"
    with pytest.raises(WrongInput, match="gives its own inputs"):
        prepare(Request("example:sentence-classifier", sizes=Sizes(batch=2)))


def test_a_factory_of_the_users_own_file(file: Path) -> None:
    assert isinstance(load_model(f"{file}:make").model, nn.Sequential)
    loaded = prepare(Request(f"{file}:with_inputs", dtype="bfloat16"))
    (x,) = loaded.inputs.args
    assert x.shape == (2, 3) and x.dtype == torch.bfloat16
    assert loaded.source == Source("file", f"{file}:with_inputs")
    assert prepare(Request(f"{file}:make", f"{file}:inputs")).inputs.kwargs["input"].shape == (5, 3)
    assert prepare(Request(f"{file}:make", f"{file}:plain_inputs")).inputs.args[0].shape == (7, 3)


def test_a_transformers_folder_comes_back_from_its_configuration(tmp_path: Path, refold_command: Run) -> None:
    transformers = pytest.importorskip("transformers")
    small = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 64}
    config = transformers.BertConfig(vocab_size=50, max_position_embeddings=32, **small)
    transformers.BertForSequenceClassification(config).save_pretrained(tmp_path / "bert")
    loaded = load_model(str(tmp_path / "bert"))
    assert type(loaded.model).__name__ == "BertForSequenceClassification"
    again = rebuild(Source.from_plain(json.loads(json.dumps(loaded.source.to_plain()))))
    assert [(n, p.shape) for n, p in again.named_parameters()] == [
        (n, p.shape) for n, p in loaded.model.named_parameters()
    ]
    code, out, err = refold_command("explain", tmp_path / "bert", "MergeLinears", "--batch", 2, "--json")
    told = json.loads(out)
    assert code == 0, err
    assert told["subject"]["inputs"] == {"input_ids": "int64[2, 32]", "attention_mask": "int64[2, 32]"}
    assert len(told["transformations"][0]["rewritten"]) == 1
    code, _, err = refold_command("explain", tmp_path / "bert", "MergeLinears", "--sequence-length", 64)
    assert code == 2 and "takes at most 32" in err


def test_a_transformers_model_makes_the_round_trip(tmp_path: Path, refold_command: Run) -> None:
    """Everything that the default pipeline does is saved, and undone from nothing but the folder."""
    transformers = pytest.importorskip("transformers")
    small = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 64}
    config = transformers.BertConfig(vocab_size=50, max_position_embeddings=32, **small)
    transformers.BertModel(config).save_pretrained(tmp_path / "bert")
    write_folder(tmp_path / "out", str(tmp_path / "bert"), *default_pipeline())
    shutil.rmtree(tmp_path / "bert")
    code, out, err = refold_command("undo", tmp_path / "out", "--json")
    assert code == 0, err
    told = json.loads(out)
    assert "MergeLinears()" in told["undone"] and told["left"] == 0
    assert told["compared"] > 20 and told["different"] == []


def test_timm_by_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "timm.py").write_text(
        "from torch import nn\n"
        "def is_model(name): return name == 'small'\n"
        "def create_model(name, pretrained=False):\n"
        "    if pretrained: raise OSError('no network')\n"
        "    made = nn.Conv2d(3, 4, 3); made.pretrained_cfg = {'input_size': (3, 24, 32)}; return made\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(WrongInput, match=r"no network.*timm:small:random"):
        load_model("timm:small")
    loaded = prepare(Request("timm:small:random", sizes=Sizes(batch=2)))
    assert loaded.inputs.args[0].shape == (2, 3, 24, 32)
    assert isinstance(rebuild(loaded.source), nn.Conv2d)
    with pytest.raises(WrongInput, match="timm has no model 'hf-hub:x/y'"):
        rebuild(Source("timm", "hf-hub:x/y"))


@pytest.mark.parametrize(
    "inputs",
    [
        {"x": torch.ones(2, dtype=torch.bfloat16), "flag": True, "deep": {"a": [torch.zeros(1), None]}},
        (torch.arange(3), (1.5, "word")),
    ],
)
def test_inputs_come_back_from_plain_data(inputs: Any, tmp_path: Path) -> None:
    form = json.loads(json.dumps(store_inputs(CallArguments.of(inputs), tmp_path)))
    back = restore_inputs(form, tmp_path, torch.device("cpu"))
    assert str(back) == str(CallArguments.of(inputs))
    with pytest.raises(NotPlain, match="is an object"):
        store_inputs(CallArguments((object(),)), tmp_path)


# --- wrong inputs ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["explain", "example:nope"], "There is no example 'nope'. There are: tiny"),
        (["explain", "no such thing!"], "is no model: it must be a transformers folder"),
        (["explain", "a/b/c"], "is no model"),
        (["explain", "{home}"], "is no transformers folder: it has no config.json"),
        (["explain", "{file}"], "name the function in it"),
        (["explain", "{file}:nope"], "has no function nope. It has: make, with_inputs"),
        (["explain", "{file}:number"], "is an int, and a function (or class) is needed"),
        (["explain", "{file}:fails"], "raised RuntimeError: no weights today"),
        (["explain", "{file}:leaves"], "raised SystemExit: 0"),
        (["explain", "{file}:inputs"], "raised TypeError"),
        (["explain", "{file}:plain_inputs"], "must return an nn.Module"),
        (["explain", "{file}:no_inputs"], "or one and its inputs; it returned an int."),
        (["explain", ""], "MODEL is empty"),
        (["explain", sys.executable], "is a file, and MODEL must be a transformers folder"),
        (["explain", "nothere.py:make"], "There is no file nothere.py"),
        (["explain", "timm:resnet50:other"], "timm:NAME:random"),
        (["explain", "example:tiny", "Nope"], "no transformation called 'Nope'"),
        (["explain", "example:tiny", "MergeLinears", "--dtype", "float3"], "--dtype must be one of"),
        (["explain", "example:tiny", "MergeLinears", "--device", "tpu9"], "--device tpu9"),
        (["explain", "example:tiny", "MergeLinears", "--inputs", "x"], "FILE.py:FUNCTION"),
        (
            ["explain", "{file}:make", "--inputs", "{file}:no_inputs"],
            "no_inputs must return a dict of keyword arguments",
        ),
        (
            ["explain", "{file}:make", "--inputs", "{file}:wide_inputs"],
            "Sequential does not run on these inputs (float32[2, 4]): RuntimeError: mat1 and mat2",
        ),
        (["explain", "{file}:with_inputs", "MergeLinears", "--batch", "3"], "do not go with"),
        (["explain", "example:tiny", "--batch", "0"], "greater than or equal to 1"),
        (["explain"], "Missing argument 'MODEL'"),
        (["nope"], "No such command 'nope'"),
        (["optimize", "example:tiny", "--out", "{file}"], "is a file, and a folder is to be written there"),
        (["optimize", "example:tiny", "--out", "{home}/x", "--pipeline", "{home}/none.yaml"], "No such file"),
        (["optimize", "example:tiny", "--out", "{home}/x", "--backend", "gpu-magic"], "no executor called 'gpu-magic'"),
        (["optimize", "example:tiny", "--out", "{home}/x", "--level", "extreme"], "level must be one of"),
        (["show", "{home}/none"], "There is no folder"),
        (["verify", "{home}"], "is no folder that Refold saved"),
        (["undo", "{home}"], "is no folder that Refold saved"),
        (["bisect", "{home}", "--check", "true"], "is no folder that Refold saved"),
        (["bisect", "{home}", "--check", " "], "--check is empty"),
    ],
)
def test_one_clear_sentence(arguments: list[str], sentence: str, file: Path, refold_command: Run) -> None:
    filled = [a.replace("{file}", str(file)).replace("{home}", str(file.parent)) for a in arguments]
    code, out, err = refold_command(*filled)
    last = err.strip().splitlines()[-1]
    assert code == 2
    assert sentence in last and last.startswith("refold: ")
    assert "Traceback" not in out + err
    assert sorted(path.name for path in file.parent.iterdir() if path.name != "__pycache__") == [
        "mine.py",
        "neighbour.py",
    ]


def test_a_hub_name_without_a_network(refold_command: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("transformers")
    import socket

    def fail(*args: object, **settings: object) -> None:
        raise OSError("Name or service not known")

    monkeypatch.setattr(socket, "getaddrinfo", fail)
    monkeypatch.delenv("https_proxy", raising=False)
    code, _, err = refold_command("explain", "nobody/nothing-like-this", "MergeLinears")
    assert code == 2 and "the hub cannot be reached from here" in err


def test_timm_that_is_not_installed(refold_command: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "timm", None)
    code, _, err = refold_command("explain", "timm:resnet50", "MergeLinears")
    assert code == 2 and "timm:resnet50 needs timm, which is not installed" in err


def test_an_error_as_json_and_with_its_traceback(refold_command: Run) -> None:
    code, out, err = refold_command("explain", "example:nope", "--json", "--debug")
    assert code == 2
    assert json.loads(out) == {"error": err.strip().splitlines()[-1].removeprefix("refold: "), "exit_code": 2}
    assert "Traceback" in err


def test_wrong_usage_as_json(refold_command: Run) -> None:
    code, out, err = refold_command("explain", "--json")
    assert code == 2
    assert json.loads(out) == {"error": err.strip().removeprefix("refold: "), "exit_code": 2}


def test_an_executor_that_cannot_be_used_is_refused_before_the_model_is_loaded(
    tmp_path: Path, refold_command: Run
) -> None:
    code, _, err = refold_command("optimize", "example:tiny", "--out", tmp_path / "out", "--backend", "cuda_graph")
    assert code == 2
    assert err == "refold: --backend cuda_graph cannot be used here: a CUDA graph needs a CUDA device, not cpu.\n"


def test_the_trial_run_leaves_nothing_behind(tmp_path: Path) -> None:
    (tmp_path / "counts.py").write_text(
        "import torch\n"
        "from torch import nn\n"
        "class Counts(nn.Module):\n"
        "    def __init__(self):\n"
        "        super().__init__()\n"
        "        self.register_buffer('calls', torch.zeros(()))\n"
        "    def forward(self, x):\n"
        "        self.calls += 1\n"
        "        return x.add_(torch.rand(()))\n"
        "def make():\n"
        "    return Counts(), torch.ones(3)\n"
    )
    torch.manual_seed(7)
    expected = torch.rand(1)
    torch.manual_seed(7)
    loaded = prepare(Request(f"{tmp_path / 'counts.py'}:make"))
    assert torch.equal(torch.rand(1), expected)
    assert loaded.model.calls == 0 and torch.equal(loaded.inputs.args[0], torch.ones(3))


def test_help_in_the_usual_signs(refold_command: Run) -> None:
    code, out, _ = refold_command("explain", "--help")
    assert code == 0
    assert "explain [OPTIONS] MODEL [TRANSFORMATION]" in out and "<bool>" not in out
    words = " ".join(out.replace("│", " ").split())
    assert all(name in words for name in DTYPES)
    assert "<bool>" not in refold_command("--help")[1]


def test_a_model_that_cannot_be_captured(tmp_path: Path, refold_command: Run) -> None:
    (tmp_path / "odd.py").write_text(
        "import torch\n"
        "from torch import nn\n"
        "class Odd(nn.Module):\n"
        "    def forward(self, x):\n"
        "        return x * 2 if x.sum().item() > 0 else x + 1\n"
        "def make():\n"
        "    return Odd(), torch.ones(3)\n"
    )
    code, _, err = refold_command("explain", f"{tmp_path / 'odd.py'}:make", "MergeLinears")
    assert code == 3 and "could not be captured" in err
    assert "refold.trace with on_failure='partial'" in err  # commands have no such option


# --- folders of strangers ----------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def honest(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_folder(tmp_path_factory.mktemp("honest") / "folder", "example:tiny")


@pytest.fixture
def stranger(honest: Path, tmp_path: Path) -> Callable[..., Path]:
    """Makes a folder that says what it likes about itself."""

    def make(**lies: Any) -> Path:
        return let_it_say(Path(shutil.copytree(honest, tmp_path / "folder")), **lies)

    return make


def test_code_that_a_folder_names_is_not_run(
    stranger: Callable[..., Path], tmp_path: Path, refold_command: Run
) -> None:
    (tmp_path / "evil.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')\ndef make(): pass\n")
    model = {"kind": "file", "name": f"{tmp_path / 'evil.py'}:make", "class": "", "config": {}}
    folder = stranger(model=model)
    for command in (["verify"], ["undo"], ["bisect", "--check", "true"]):
        code, _, err = refold_command(command[0], folder, *command[1:])
        assert code == 2 and "code that a folder names is never run" in err
    assert refold_command("show", folder)[0] == 0
    assert not (tmp_path / "ran").exists()
    assert refold_command("verify", folder, "--model", "example:tiny")[0] == 0


@pytest.mark.parametrize(
    ("lies", "sentence"),
    [
        ({"model": {"kind": "example", "name": "../evil", "class": "", "config": {}}}, "no example"),
        ({"model": {"kind": "pickle", "name": "x", "class": "", "config": {}}}, "does not know"),
        ({"model": None}, "does not say which model"),
        ({"model": {"kind": "transformers", "name": "x", "class": "", "config": {}}}, "no model type None"),
        ({"inputs": {"pickle": "x"}}, "cannot be read"),
        ({"inputs": None}, "does not hold its inputs"),
        ({"dtype": "object"}, "is damaged"),
        ({"changes": [1]}, "is damaged"),
        ({"version": 99}, "has version 99"),
        ({"schema": "else"}, "says something else"),
    ],
)
def test_a_folder_that_lies_is_refused(
    lies: Any, sentence: str, stranger: Callable[..., Path], refold_command: Run
) -> None:
    code, _, err = refold_command("verify", stranger(**lies))
    assert code == 2 and sentence in err and "Traceback" not in err


def test_configurations_make_nothing_but_models_of_transformers() -> None:
    transformers = pytest.importorskip("transformers")
    small = {
        "hidden_size": 8,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "intermediate_size": 8,
        "vocab_size": 9,
    }
    remote = {"auto_map": {"AutoModel": "evil--code"}, "attn_implementation": "kernels-community/evil"}
    config = config_from({"model_type": "bert", **small, **remote})
    assert not hasattr(config, "auto_map")
    assert isinstance(model_from(config, "BertModel"), transformers.BertModel)
    for name in ("Trainer", "GPT2Model", "os.system", "PreTrainedModel", "pipeline"):
        with pytest.raises(WrongInput, match="has no"):
            model_from(config, name)
    with pytest.raises(WrongInput, match="knows no model type"):
        config_from({"model_type": "no-such-type"})


def test_names_are_data_for_the_terminal_too(stranger: Callable[..., Path], refold_command: Run) -> None:
    evil = "[bold red]x[/] \x1b]0;pwned\x07 \x1b[2J <script>"
    model = {"kind": "example", "name": evil, "class": "", "config": {}}
    folder = stranger(model=model, changes=[{"label": evil, "bytes": 1, "lines": [f"+ {evil}"]}])
    code, out, _ = refold_command("show", folder)
    assert code == 0
    assert "\x1b" not in out and "\x07" not in out
    assert "[bold red]x[/]" in out and "\\x1b]0;pwned" in out
    assert refold_command("verify", folder)[2].count("\x1b") == 0
    assert printable("tab\tline\nwörd → ✓") == "tab\tline\nwörd → ✓"


def test_example_names() -> None:
    with pytest.raises(WrongInput, match="no example"):
        example_named("__class__")
