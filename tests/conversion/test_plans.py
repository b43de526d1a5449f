"""Plans: from a module's history, printed, stored, applied to tensors elsewhere and to checkpoints."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from checkpoint_folders import file_bytes, llama_like, read_tensors, write_checkpoint
from torch import nn

import refold
from refold.cli import main
from refold.conversion import Plan, convert, read_plan
from refold.conversion.checkpoint_folder import MANIFEST
from refold.errors import CheckpointMismatch, WrongInput
from refold.fingerprint import same_bits
from refold.testing.laws import graph_of


class Attention(nn.Module):
    def __init__(self, tied: bool = False) -> None:
        super().__init__()
        self.q, self.k, self.v = nn.Linear(8, 8), nn.Linear(8, 4), nn.Linear(8, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.q(x) + torch.cat([self.k(x), self.v(x)], -1)


def layers(device: str = "cpu") -> torch.fx.GraphModule:
    torch.manual_seed(0)
    with torch.device(device):
        return graph_of(nn.Sequential(*(Attention() for _ in range(3))).eval())


def assert_same(found: dict[str, torch.Tensor], wanted: dict[str, torch.Tensor]) -> None:
    assert found.keys() == wanted.keys()
    assert [name for name in wanted if not same_bits(found[name], wanted[name])] == []


def test_a_plan_made_without_weights_moves_the_tensors_of_a_model_that_has_them(tmp_path: Path) -> None:
    gm, meta = layers(), layers("meta")
    original = {name: tensor.clone() for name, tensor in gm.state_dict().items()}
    for module in (gm, meta):
        refold.compose(refold.MergeLinears(), refold.FuseBiasInLinear())(module)
    plan = refold.plan(meta)
    assert plan.maps and plan == refold.plan(gm)
    assert_same(plan.apply(original), dict(gm.state_dict()))
    assert_same(plan.restore(gm.state_dict()), original)
    assert read_plan(plan.save(tmp_path / "plan.json")) == plan
    assert str(plan).splitlines()[0].endswith("(* = 0…2)")
    with pytest.raises(CheckpointMismatch, match=r"2\.k\.bias is missing"):
        plan.apply({name: tensor for name, tensor in original.items() if name != "2.k.bias"})


def test_a_plan_of_nothing_and_one_that_computes() -> None:
    assert str(refold.plan(layers())) == "nothing is changed"
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4)).eval()
    gm = refold.FuseBatchNorm2dInConv2d()(torch.fx.symbolic_trace(model))
    plan = refold.plan(gm)
    assert_same(
        {n: t for n, t in plan.apply(model.state_dict()).items() if n in gm.state_dict()}, dict(gm.state_dict())
    )
    with pytest.raises(CheckpointMismatch, match="computes with numbers"):
        plan.restore(gm.state_dict())


def test_a_transformation_that_does_not_say_how_has_no_plan() -> None:
    class Doubled(refold.Transformation):
        def transform(self, graph_module: torch.fx.GraphModule) -> torch.fx.GraphModule:
            for path, module in list(graph_module.named_modules()):
                if isinstance(module, nn.Linear):
                    fresh = nn.Linear(module.in_features, module.out_features)
                    graph_module.set_submodule(path, fresh)
            return graph_module

    gm = layers()
    Doubled()(gm)
    with pytest.raises(CheckpointMismatch, match="without saying how"):
        refold.plan(gm)


def test_a_plan_of_another_model_is_refused_where_it_would_not_lead_back(tmp_path: Path) -> None:
    gm = layers("meta")
    refold.MergeLinears()(gm)
    wider = {n: torch.zeros(*(2 * s for s in t.shape)) for n, t in layers("meta").state_dict().items()}
    write_checkpoint(tmp_path / "wider", wider)
    with pytest.raises(WrongInput, match=r"0\.q\.(weight|bias) F32.*its way back|split_with_sizes"):
        convert(tmp_path / "wider", tmp_path / "out", plan=refold.plan(gm))
    assert not (tmp_path / "out").exists()


def test_a_conversion_loads_neither_a_compiler_nor_symbolic_algebra(tmp_path: Path) -> None:
    write_checkpoint(tmp_path / "source", llama_like(layers=1))
    code = (
        "import sys; from refold.conversion import convert; "
        "convert(sys.argv[1], sys.argv[2], to='vllm', verify=True); "
        "sys.exit(bool({'torch._dynamo', 'sympy'} & set(sys.modules)))"
    )
    assert subprocess.run([sys.executable, "-c", code, tmp_path / "source", tmp_path / "out"]).returncode == 0


@pytest.mark.parametrize("data", [{}, {"format": "refold-plan", "version": 1}, {"format": "refold-plan", "version": 2}])
def test_a_damaged_plan_is_refused(data: dict[str, object], tmp_path: Path) -> None:
    (tmp_path / "plan.json").write_text(json.dumps(data))
    with pytest.raises(WrongInput, match=r"plan\.json"):
        read_plan(tmp_path / "plan.json")
    known = {"format": "refold-plan", "version": 1, "dropped": []}
    for operation in ("Reboot", "Concatenate"):
        with pytest.raises(WrongInput, match="damaged"):
            Plan.from_plain(known | {"maps": [{"operation": operation, "sources": {}, "targets": {}}]})


def test_a_pipeline_on_a_folder_of_transformers_and_back(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    transformers = pytest.importorskip("transformers")
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 4, "num_key_value_heads": 2}
    config = transformers.LlamaConfig(**sizes, num_hidden_layers=2, vocab_size=50)
    model = transformers.LlamaForCausalLM(config).eval()
    source, folded, back = (tmp_path / name for name in ("source", "folded", "back"))
    model.save_pretrained(source, max_shard_size="20KB")
    pipeline = tmp_path / "pipeline.yaml"
    pipeline.write_text("refold-pipeline: 1\ntransformations: [MergeLinears]\n")
    assert main(["convert", str(source), "--out", str(folded), "--pipeline", str(pipeline), "--verify"]) == 0
    gm = refold.trace(model, input_ids=torch.tensor([[1, 2, 3]]))
    refold.MergeLinears()(gm)
    assert_same(read_tensors(folded), {n: t for n, t in gm.state_dict().items() if n in read_tensors(folded)})
    assert any("merged" in name for name in read_tensors(folded))
    capsys.readouterr()
    assert main(["convert", str(folded), "--out", str(back), "--original"]) == 0
    assert "Every file of the original is there again" in capsys.readouterr().out
    there = file_bytes(back)
    there.pop(MANIFEST)
    assert there == file_bytes(source) and len(os.listdir(source)) > 4
    assert main(["convert", str(source), "--out", str(tmp_path / "x")]) == 2
