"""Checkpoints converted as a stream: there and back byte for byte, whatever stops it; bad folders change nothing."""

from __future__ import annotations

import errno
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from checkpoint_folders import experts, file_bytes, llama_like, read_tensors, write_checkpoint

from refold.conversion import Plan, convert, layout_named, shard_writer
from refold.conversion import file_bytes as bytes_module
from refold.conversion.checkpoint_folder import MANIFEST
from refold.errors import BadLayout, CheckFailed, SaveError, WrongInput
from refold.fingerprint import same_bits
from refold.weights import Pad, Transpose
from refold.weights.maps import WeightMap

HERE = Path(__file__).parent


@pytest.fixture
def source(tmp_path: Path) -> Path:
    return write_checkpoint(tmp_path / "source", llama_like())


def assert_same_tensors(found: dict[str, torch.Tensor], wanted: dict[str, torch.Tensor]) -> None:
    assert found.keys() == wanted.keys()
    assert [name for name in wanted if not same_bits(found[name], wanted[name])] == []


def assert_same_files(found: Path, wanted: Path) -> None:
    """All files of a folder are in the other, which has a manifest of its own besides."""
    there = file_bytes(found)
    there.pop(MANIFEST)
    assert there == {name: data for name, data in file_bytes(wanted).items() if name != MANIFEST}


# --- there and back ------------------------------------------------------------------------------------------------


def test_the_fused_layout_and_back_byte_for_byte(source: Path, tmp_path: Path) -> None:
    done = convert(source, tmp_path / "fused", to="vllm", verify=True)
    wanted = llama_like()
    for layer in range(4):
        path = f"model.layers.{layer}"
        for kind in ("weight", "bias"):
            parts = [wanted.pop(f"{path}.self_attn.{name}_proj.{kind}") for name in "qkv"]
            wanted[f"{path}.self_attn.qkv_proj.{kind}"] = torch.cat(parts)
        parts = [wanted.pop(f"{path}.mlp.{name}_proj.weight") for name in ("gate", "up")]
        wanted[f"{path}.mlp.gate_up_proj.weight"] = torch.cat(parts)
    assert_same_tensors(read_tensors(tmp_path / "fused"), wanted)
    index = json.loads((tmp_path / "fused" / "model.safetensors.index.json").read_text())
    assert index["weight_map"].keys() == wanted.keys()
    assert set(done.passed) == wanted.keys() - {n for n in wanted if "qkv" in n or "gate_up" in n}
    assert not (tmp_path / ".fused.converting").exists()
    back = convert(tmp_path / "fused", tmp_path / "back", to="hf", verify=True)
    assert back.same_as_original
    assert_same_files(tmp_path / "back", source)
    again = convert(tmp_path / "back", tmp_path / "again", to="vllm")
    assert again.same_as_original
    assert_same_files(tmp_path / "again", tmp_path / "fused")


def test_a_fused_folder_of_unknown_origin_is_split_by_the_configuration(source: Path, tmp_path: Path) -> None:
    convert(source, tmp_path / "fused", to="vllm")
    (tmp_path / "fused" / MANIFEST).unlink()
    convert(tmp_path / "fused", tmp_path / "back", to="hf", origin="vllm", verify=True)
    assert_same_tensors(read_tensors(tmp_path / "back"), llama_like())


def test_experts_are_stacked_in_the_order_of_their_numbers(tmp_path: Path) -> None:
    tensors = experts()
    source = write_checkpoint(tmp_path / "source", tensors, files=2)
    convert(source, tmp_path / "fused", to="vllm", verify=True)
    path = "model.layers.0.mlp.experts"
    both = [torch.cat([tensors[f"{path}.{i}.{n}_proj.weight"] for n in ("gate", "up")]) for i in range(11)]
    downs = [tensors[f"{path}.{i}.down_proj.weight"] for i in range(11)]
    wanted = {f"{path}.w13_weight": torch.stack(both), f"{path}.w2_weight": torch.stack(downs)}
    assert_same_tensors(read_tensors(tmp_path / "fused"), wanted)
    assert convert(tmp_path / "fused", tmp_path / "back", to="hf").same_as_original
    assert_same_files(tmp_path / "back", source)
    (tmp_path / "fused" / MANIFEST).unlink()
    convert(tmp_path / "fused", tmp_path / "split", to="hf", origin="vllm", verify=True)
    assert_same_tensors(read_tensors(tmp_path / "split"), tensors)


OWN = """
refold-layout: 1
rows:
  - {from: "{p*}.{b=self_attn}.o_proj.weight", into: "{p*}.{b}.out.kernel", steps: [transpose]}
  - {from: "{p*}.{b=self_attn}.q_proj.weight", into: "{p*}.{b}.heads",
     steps: [{reshape: [num_attention_heads, -1, 6]}, {permute: [1, 2, 0]}]}
  - {from: "model.{e=embed_tokens}.weight", into: "{e}", steps: [{pad: {along: 0, multiple: 16}}]}
  - {from: "{p*}.gate_proj.weight", into: ["{p*}.a", "{p*}.b"], shares: [2, 3]}
  - {from: ["{p*}.v_proj.weight", "{p*}.up_proj.weight"], into: "{p*}.never", along: 1}
  - {from: "{p*}.norm.weight", into: "{p*}.scale"}
"""


def test_a_layout_of_ones_own(source: Path, tmp_path: Path) -> None:
    table = tmp_path / "own.yaml"
    table.write_text(OWN.replace("model.{e=embed_tokens}", "{m=model}.{e=embed_tokens}").replace('"{e}"', '"{m}.{e}"'))
    done = convert(source, tmp_path / "own", to=str(table), verify=True)
    old, new = llama_like(), read_tensors(tmp_path / "own")
    path = "model.layers.2"
    assert same_bits(new[f"{path}.self_attn.out.kernel"], old[f"{path}.self_attn.o_proj.weight"].T.contiguous())
    heads = old[f"{path}.self_attn.q_proj.weight"].reshape(4, 2, 6).permute(1, 2, 0)
    assert same_bits(new[f"{path}.self_attn.heads"], heads.contiguous())
    padded = new["model.embed_tokens"]
    assert (
        padded.shape == (32, 6) and same_bits(padded[:20], old["model.embed_tokens.weight"]) and not padded[20:].any()
    )
    assert same_bits(new[f"{path}.mlp.b"], old[f"{path}.mlp.gate_proj.weight"][4:])
    assert same_bits(new[f"{path}.scale"], old[f"{path}.norm.weight"])
    assert done.incomplete[f"{path}.mlp.up_proj.weight"] == f"{path}.mlp.v_proj.weight is not there"
    assert convert(tmp_path / "own", tmp_path / "back", original=True, verify=True).same_as_original
    assert_same_files(tmp_path / "back", source)


def test_tensors_that_were_changed_are_carried_back(source: Path, tmp_path: Path) -> None:
    from safetensors.torch import save_file

    convert(source, tmp_path / "fused", to="vllm")
    for path in (tmp_path / "fused").glob("*.safetensors"):
        save_file({name: t.double() * 2 for name, t in read_tensors_of(path).items()}, path, metadata={"format": "pt"})
    back = convert(tmp_path / "fused", tmp_path / "back", to="hf", verify=True)
    assert back.same_as_original is False
    assert_same_tensors(read_tensors(tmp_path / "back"), {n: t.double() * 2 for n, t in llama_like().items()})


def read_tensors_of(path: Path) -> dict[str, torch.Tensor]:
    from safetensors.torch import load_file

    return load_file(path)


def test_dtypes_that_only_move_keep_every_bit(tmp_path: Path) -> None:
    kinds = [torch.float8_e4m3fn, torch.float16, torch.int8, torch.bool, torch.complex64, torch.float64, torch.int64]
    tensors = {}
    for number, dtype in enumerate(kinds):
        values = torch.randint(0, 256, (4 * dtype.itemsize,), dtype=torch.uint8)
        values = values % 2 if dtype == torch.bool else values
        for name in "qkv":
            tensors[f"m.{number}.self_attn.{name}_proj.weight"] = values.clone().view(dtype).reshape(2, 2)
    tensors |= {"empty": torch.empty(0, 3), "scalar": torch.tensor(float("nan"))}
    source = write_checkpoint(tmp_path / "source", tensors)
    convert(source, tmp_path / "fused", to="vllm", verify=True)
    fused = read_tensors(tmp_path / "fused")
    for number, dtype in enumerate(kinds):
        whole = fused[f"m.{number}.self_attn.qkv_proj.weight"]
        assert whole.dtype == dtype and same_bits(whole[:2], tensors[f"m.{number}.self_attn.q_proj.weight"])
    assert convert(tmp_path / "fused", tmp_path / "back", to="hf").same_as_original


def test_a_file_whose_tensors_all_go_elsewhere_is_left_out_and_comes_back(tmp_path: Path) -> None:
    tensors = {f"m.self_attn.{name}_proj.weight": torch.randn(2, 3) for name in "qkv"}
    source = write_checkpoint(tmp_path / "source", tensors, files=3)
    convert(source, tmp_path / "fused", to="vllm", verify=True)
    assert [path.name for path in (tmp_path / "fused").glob("*.safetensors")] == ["model-00001-of-00001.safetensors"]
    assert convert(tmp_path / "fused", tmp_path / "back", to="hf", verify=True).same_as_original
    assert_same_files(tmp_path / "back", source)


def test_maps_that_join_nothing_are_computed_and_their_results_may_lie_in_several_files(tmp_path: Path) -> None:
    tensors = {f"m.self_attn.{name}_proj.weight": torch.randn(2, 3) for name in "qkv"}
    source = write_checkpoint(tmp_path / "source", tensors, files=3)
    whole = {"whole": "m.whole"}
    from refold.weights import Concatenate

    maps = [
        WeightMap(Concatenate((3, 3, 3), 1), {str(i): name for i, name in enumerate(tensors)}, whole),
        WeightMap(Pad(1, 0), {"weight": "m.whole"}, {"weight": "m.whole"}),
        WeightMap(Transpose(), {"weight": "m.whole"}, {"weight": "m.turned"}),
    ]
    plan = Plan(tuple(maps))
    convert(source, tmp_path / "turned", plan=plan, verify=True)
    wanted = torch.nn.functional.pad(torch.cat([*tensors.values()], 1), (0, 0, 0, 1)).T.contiguous()
    assert_same_tensors(read_tensors(tmp_path / "turned"), {"m.turned": wanted})
    assert convert(tmp_path / "turned", tmp_path / "back", original=True, verify=True).same_as_original
    assert_same_files(tmp_path / "back", source)


@pytest.mark.filterwarnings("ignore")
def test_checkpoints_of_torch_distributed_are_read_and_the_results_read_by_it(tmp_path: Path) -> None:
    from torch.distributed import checkpoint as dcp

    tensors = llama_like(layers=1)
    writer = dcp.HuggingFaceStorageWriter(str(tmp_path / "source"), {n: 1 + i % 2 for i, n in enumerate(tensors)})
    dcp.save(tensors, storage_writer=writer)
    convert(tmp_path / "source", tmp_path / "fused", to="vllm", verify=True)
    wanted = read_tensors(tmp_path / "fused")
    found = {name: torch.zeros_like(tensor) for name, tensor in wanted.items()}
    dcp.load(found, storage_reader=dcp.HuggingFaceStorageReader(str(tmp_path / "fused")))
    assert any("qkv_proj" in name for name in found)
    assert_same_tensors(found, wanted)
    assert convert(tmp_path / "fused", tmp_path / "back", to="hf").same_as_original
    pieces = shutil.copytree(tmp_path / "source", tmp_path / "pieces")
    (pieces / "model.safetensors.index.json").unlink()
    for rank in (1, 2):
        shutil.copy(pieces / "model-00001-of-00002.safetensors", pieces / f"shard-0000{rank}-model-1-of-1.safetensors")
    for path in pieces.glob("model-*"):
        path.unlink()
    assert_refused(pieces, "Join them first")


# --- plans ---------------------------------------------------------------------------------------------------------


def test_a_table_says_which_names_it_takes_and_refuses_what_is_ambiguous(tmp_path: Path) -> None:
    tensors = llama_like()
    del tensors["model.layers.1.self_attn.k_proj.bias"]
    source = write_checkpoint(tmp_path / "halves", tensors)
    assert_refused(source, "k_proj.bias is not there", BadLayout)
    tensors = llama_like()
    name = "model.layers.1.self_attn.k_proj.weight"
    source = write_checkpoint(tmp_path / "dtypes", tensors | {name: tensors[name].float()})
    assert_refused(source, "BF16 and .*F32", BadLayout)
    source = write_checkpoint(tmp_path / "shapes", tensors | {name: tensors[name][:, :3].clone()})
    assert_refused(source, "does not fit", BadLayout)
    source = write_checkpoint(tmp_path / "taken", tensors | {name.replace("k_proj", "qkv_proj"): tensors[name].clone()})
    assert_refused(source, "two tensors would have the name", BadLayout)
    table = tmp_path / "twice.yaml"
    row = '  - {from: "{p*}.norm.weight", into: "{p*}.n"}\n'
    table.write_text(
        f'refold-layout: 1\nrows:\n{row}  - {{from: "model.layers.{{i}}.{{k}}.weight", into: "{{i}}.{{k}}"}}\n'
    )
    source = write_checkpoint(tmp_path / "claims", llama_like())
    assert_refused(source, "two rows claim model.layers.0.norm.weight", BadLayout, to=str(table))


@pytest.mark.parametrize(
    "rows",
    [
        "",
        "rows: 3",
        "rows: [{from: a}]",
        "rows: [{from: a, into: b, along: -1}]",
        "rows: [{from: a, into: [b, c]}]",
        "rows: [{from: [a, b], into: [c, d]}]",
        "rows: [{from: '{x}', into: '{y}'}]",
        "rows: [{from: '{x', into: b}]",
        "rows: [{from: a, into: b, steps: [turn]}]",
        "rows: [{from: a, into: b, steps: [{permute: [1, 1]}]}]",
        "rows: [{from: [a, a], into: b}]",
        "rows: [{from: a, into: b, other: c}]",
        "rows: [{from: [a, b], into: c, shares: [1]}]",
        "rows: [{from: '{x}.{n}', into: '{x}', stack: [n]}]",
        "rows: [{from: '{1}.a', into: '{1}.b'}]",
        "rows: [{from: a, into: b, steps: [{permute: ['0', '1']}]}]",
    ],
)
def test_a_table_that_cannot_be_understood_is_refused(rows: str, tmp_path: Path) -> None:
    table = tmp_path / "table.yaml"
    table.write_text(f"refold-layout: 1\n{rows}\n")
    with pytest.raises(BadLayout, match=r"table\.yaml"):
        layout_named(str(table))


STEPS = {
    "transpose": ("norm", "norm.weight: .* no two axes"),
    "{permute: [0, 2, 1]}": ("mlp.gate_proj", r"gate_proj.weight: .* has not the axes \[0, 2, 1\]"),
    "{reshape: [5, 5]}": ("norm", r"no shape \[5, 5\]"),
    "{reshape: [99999999999999999999, -1]}": ("norm", "no shape"),
    "{pad: {along: 0, multiple: 0}}": ("norm", "cannot be padded"),
    "{pad: {along: 7, multiple: 4}}": ("norm", "cannot be padded"),
}


@pytest.mark.parametrize("step", STEPS)
def test_a_step_that_does_not_fit_a_tensor_is_refused_with_its_name(step: str, source: Path, tmp_path: Path) -> None:
    path, words = STEPS[step]
    table = tmp_path / "table.yaml"
    row = f"{{from: '{{p*}}.{path}.weight', into: '{{p*}}.new', steps: [{step}]}}"
    table.write_text(f"refold-layout: 1\nrows: [{row}]\n")
    assert_refused(source, f"{words}.*Nothing was written", BadLayout, to=str(table))


def test_scales_that_the_weights_of_their_layer_leave_behind_are_told(tmp_path: Path) -> None:
    tensors = llama_like(layers=1)
    scale = "model.layers.0.self_attn.q_proj.weight_scale"
    done = convert(write_checkpoint(tmp_path / "source", tensors | {scale: torch.ones(1)}), tmp_path / "out", to="vllm")
    assert list(done.incomplete) == [scale] and "of the same layer goes elsewhere" in done.incomplete[scale]


def test_packed_elements_are_refused_by_name(tmp_path: Path) -> None:
    header = {
        f"m.self_attn.{n}_proj.weight": {"dtype": "F4", "shape": [1, 2], "data_offsets": [i, i + 1]}
        for i, n in enumerate("qkv")
    }
    text = json.dumps(header).encode()
    (tmp_path / "source").mkdir()
    (tmp_path / "source" / "model.safetensors").write_bytes(len(text).to_bytes(8, "little") + text + b"abc")
    assert_refused(tmp_path / "source", "q_proj.weight is F4, several elements to a byte")


# --- bad folders ---------------------------------------------------------------------------------------------------


def assert_refused(source: Path, words: str, error: type[Exception] = WrongInput, to: str = "vllm") -> None:
    """Refused with these words; the source is as it was, and nothing is where the result would be."""
    before, neighbours = file_bytes(source), sorted(os.listdir(source.parent))
    with pytest.raises(error, match=words):
        convert(source, source.parent / "out", to=to)
    assert file_bytes(source) == before
    assert sorted(os.listdir(source.parent)) == neighbours


def edit_index(source: Path, edit: Callable[[dict[str, Any]], object]) -> None:
    path = source / "model.safetensors.index.json"
    data = json.loads(path.read_text())
    edit(data["weight_map"])
    path.write_text(json.dumps(data))


FIRST, SECOND = "model-00001-of-00003.safetensors", "model-00002-of-00003.safetensors"
NAME = "model.embed_tokens.weight"


def _grow(path: Path) -> None:
    path.write_bytes(path.read_bytes() + b"\0")


def _cut(path: Path, size: int) -> None:
    path.write_bytes(path.read_bytes()[:size])


def _twice_in_a_header(path: Path) -> None:
    data = path.read_bytes()
    size = int.from_bytes(data[:8], "little")
    header = data[8 : 8 + size].replace(b"layers.0.self_attn.k_proj.bias", b"layers.0.self_attn.q_proj.bias")
    path.write_bytes(data[:8] + header + data[8 + size :])


def _twice_in_two_files(source: Path) -> None:
    (source / "model.safetensors.index.json").unlink()
    shutil.copy(source / FIRST, source / "z.safetensors")


def _without_index(source: Path, spoil: Callable[[], object]) -> None:
    (source / "model.safetensors.index.json").unlink()
    spoil()


def _dead_link(path: Path) -> None:
    path.unlink()
    path.symlink_to(path.parent / "nowhere")


def _rewrite_header(path: Path, edit: Callable[[dict[str, Any]], object]) -> None:
    data = path.read_bytes()
    size = int.from_bytes(data[:8], "little")
    header = json.loads(data[8 : 8 + size])
    edit(header)
    text = json.dumps(header).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + data[8 + size :])


def _rename_to_half(header: dict[str, Any]) -> None:
    header["\ud800"] = header.pop(NAME)


BAD: dict[str, tuple[Callable[[Path], object], str]] = {
    "missing shard": (lambda s: (s / SECOND).unlink(), f"{SECOND} is missing"),
    "unlisted shard": (lambda s: edit_index(s, lambda m: [m.pop(n) for n in list(m) if m[n] == SECOND]), "names no"),
    "wrong place": (lambda s: edit_index(s, lambda m: m.update({NAME: SECOND})), f"is in {SECOND}, and it is not"),
    "unknown name": (lambda s: edit_index(s, lambda m: m.update(more=FIRST)), "more is in"),
    "unlisted name": (lambda s: edit_index(s, lambda m: m.pop(NAME)), f"{NAME}, which .* does not list"),
    "parent folder": (lambda s: edit_index(s, lambda m: m.update({NAME: f"../{FIRST}"})), "not in its own folder"),
    "absolute path": (lambda s: edit_index(s, lambda m: m.update({NAME: f"/tmp/{FIRST}"})), "not in its own folder"),
    "no text": (lambda s: (s / "model.safetensors.index.json").write_bytes(b"\xff"), "cannot be read"),
    "no object": (lambda s: (s / "model.safetensors.index.json").write_text("[]"), "holds no object"),
    "truncated": (lambda s: _cut(s / FIRST, -1), "truncated"),
    "cut in the header": (lambda s: _cut(s / FIRST, 100), "truncated"),
    "empty file": (lambda s: _cut(s / FIRST, 0), "truncated"),
    "too long": (lambda s: _grow(s / FIRST), "behind its last tensor"),
    "twice in a header": (lambda s: _twice_in_a_header(s / FIRST), "q_proj.bias' twice"),
    "twice in two files": (lambda s: _twice_in_two_files(s), "one name, two tensors"),
    "no weights": (lambda s: [p.unlink() for p in s.glob("*safetensors*")], "holds no safetensors files"),
    "first of three": (lambda s: _without_index(s, lambda: (s / FIRST).unlink()), "lacks file 1 of 3"),
    "dead link": (lambda s: _without_index(s, lambda: _dead_link(s / FIRST)), "a link that leads nowhere"),
    "metadata": (lambda s: _rewrite_header(s / FIRST, lambda h: h.update(__metadata__=3)), "metadata must give texts"),
    "no text in it": (lambda s: _rewrite_header(s / FIRST, _rename_to_half), "cannot be understood"),
    "no folder": (lambda s: s.rename(s.parent / "elsewhere"), "is no folder"),
}  # fmt: skip


@pytest.mark.parametrize("bad", BAD)
def test_a_folder_that_contradicts_itself_is_refused(bad: str, source: Path) -> None:
    spoil, words = BAD[bad]
    spoil(source)
    if bad == "no folder":
        with pytest.raises(WrongInput, match=words):
            convert(source, source.parent / "out", to="vllm")
        return
    assert_refused(source, words)


LIES: dict[str, tuple[Callable[[dict[str, Any]], object], str]] = {
    "index elsewhere": (lambda m: m["index"].update(name="../../evil.safetensors.index.json"), "no file of the folder"),
    "index over another": (lambda m: m["index"].update(name="config.json"), "no file of the folder"),
    "index of nothing": (lambda m: m["index"].update(text="{}"), "weight_map"),
    "file elsewhere": (lambda m: m["headers"].update({f"../{FIRST}": m["headers"].pop(FIRST)}), "no file of"),
    "parent folder": (lambda m: m["headers"].update({"..": m["headers"].pop(FIRST)}), "no file of"),
    "offsets": (lambda m: m["headers"].update({FIRST: _moved_by(m["headers"][FIRST], 99)}), "overlap, or bytes"),
    "no header": (lambda m: m["headers"].update({FIRST: '{"a": 3}'}), "cannot be understood"),
    "no plan": (lambda m: m.update(plan=[]), "no plan"),
    "no origin": (lambda m: m.pop("from"), "it has no 'from'"),
    "no side": (lambda m: m.update(back="no"), "'no' is no bool"),
    "no checksums": (lambda m: m.pop("source"), "it has no 'source'"),
}  # fmt: skip


def _moved_by(header: str, count: int) -> str:
    data = json.loads(header)
    for name, facts in data.items():
        if name != "__metadata__":
            facts["data_offsets"] = [place + count for place in facts["data_offsets"]]
    return json.dumps(data)


@pytest.mark.parametrize("lie", LIES)
def test_a_manifest_of_unknown_origin_is_checked(lie: str, source: Path, tmp_path: Path) -> None:
    (tmp_path / "in").mkdir()
    fused = tmp_path / "in" / "fused"
    convert(source, fused, to="vllm")
    data = json.loads((fused / MANIFEST).read_text())
    spoil, words = LIES[lie]
    spoil(data)
    (fused / MANIFEST).write_text(json.dumps(data))
    before = sorted(tmp_path.rglob("*"))
    with pytest.raises(WrongInput, match=f"{MANIFEST} is damaged: .*{words}"):
        convert(fused, tmp_path / "in" / "back", original=True)
    assert sorted(tmp_path.rglob("*")) == before


def test_what_is_at_the_place_of_the_result_is_never_touched(source: Path, tmp_path: Path) -> None:
    mine = tmp_path / "mine"
    mine.mkdir()
    (mine / "notes.txt").write_text("mine")
    for place, words in (
        (mine, "holds files"),
        (mine / "notes.txt", "is a file"),
        (source / "in", "inside one another"),
    ):
        with pytest.raises(WrongInput, match=words):
            convert(source, place, to="vllm")
    convert(source, tmp_path / "fused", to="vllm")
    before = file_bytes(tmp_path / "fused")
    assert convert(source, tmp_path / "fused", to="vllm").was_there
    table = tmp_path / "other.yaml"
    table.write_text("refold-layout: 1\nrows: [{from: '{p*}.norm.weight', into: '{p*}.n'}]\n")
    with pytest.raises(WrongInput, match="holds another conversion"):
        convert(source, tmp_path / "fused", to=str(table))
    assert file_bytes(tmp_path / "fused") == before and (mine / "notes.txt").read_text() == "mine"
    _grow(tmp_path / "fused" / "config.json")
    with pytest.raises(CheckFailed, match=r"config\.json is not what"):
        convert(source, tmp_path / "fused", to="vllm")


def test_a_full_disk_is_a_sentence_and_the_work_goes_on_afterwards(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(shutil, "disk_usage", lambda path: shutil._ntuple_diskusage(1, 1, 0))
        assert_refused(source, "are free there. Nothing was written", SaveError)
    calls = []

    def full(*arguments: Any) -> None:
        calls.append(arguments)
        if len(calls) == 2:
            raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(os, "ftruncate", lambda *a: (full(), ftruncate(*a)))
        with pytest.raises(SaveError, match=r"the disk is full\. What was there before is intact\. .* goes on"):
            convert(source, tmp_path / "fused", to="vllm", jobs=1)
    assert not (tmp_path / "fused").exists()
    written = []
    with monkeypatch.context() as patch:
        patch.setattr(
            shard_writer, "hashed", lambda path, tell: written.append(path.name) or bytes_module.hashed(path, tell)
        )
        convert(source, tmp_path / "fused", to="vllm")
    assert 0 < len(written) < 3  # the others were done before
    convert(source, tmp_path / "whole", to="vllm")
    assert file_bytes(tmp_path / "fused") == file_bytes(tmp_path / "whole")


ftruncate = os.ftruncate


@pytest.mark.parametrize("system", [object(), SimpleNamespace(fallocate=lambda *arguments: -1)])
def test_where_room_cannot_be_made_at_once_files_grow(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, system: object
) -> None:
    convert(source, tmp_path / "whole", to="vllm")
    monkeypatch.setattr(bytes_module.ctypes, "CDLL", lambda name: system)
    convert(source, tmp_path / "fused", to="vllm")
    assert file_bytes(tmp_path / "fused") == file_bytes(tmp_path / "whole")


@pytest.mark.skipif(not hasattr(os, "posix_fadvise"), reason="the system takes no hints about files")
def test_the_source_does_not_stay_in_memory_unless_it_is_read_again(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    let_go: list[str] = []
    monkeypatch.setattr(os, "posix_fadvise", lambda file, *how: let_go.append(os.readlink(f"/proc/self/fd/{file}")))
    convert(source, tmp_path / "checked", to="vllm", verify=True)
    assert let_go == []
    convert(source, tmp_path / "fused", to="vllm")
    assert sorted(let_go) == sorted(str(path) for path in source.glob("*.safetensors"))


def test_what_was_written_wrong_is_noticed(source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = bytes_module._write

    def flipped(target: int, data: memoryview, place: int) -> None:
        real(target, bytes([data[0] ^ 1, *data[1:]]), place)

    monkeypatch.setattr(bytes_module, "_write", flipped)
    with pytest.raises(CheckFailed, match="bit for bit"):
        convert(source, tmp_path / "fused", to="vllm", verify=True)
    assert not (tmp_path / "fused").exists()


def test_a_source_that_is_written_to_meanwhile_is_noticed(source: Path, tmp_path: Path) -> None:
    def disturb(done: int, total: int) -> None:
        os.utime(source / FIRST)

    with pytest.raises(WrongInput, match="was written to while it was read"):
        convert(source, tmp_path / "fused", to="vllm", advance=disturb)
    assert not (tmp_path / "fused").exists()


# --- processes -----------------------------------------------------------------------------------------------------


def test_killed_at_any_moment_it_goes_on_to_the_same_files(tmp_path: Path) -> None:
    source = write_checkpoint(tmp_path / "source", llama_like(layers=1), files=2)
    ran = subprocess.run(
        [sys.executable, HERE / "killed_conversions.py", source, tmp_path / "out"], capture_output=True
    )
    assert ran.returncode == 0, ran.stderr.decode()
    assert int(ran.stdout) > 20


def test_two_processes_make_what_one_makes(source: Path, tmp_path: Path) -> None:
    convert(source, tmp_path / "one", to="vllm")
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    command += ["-m", "refold", "convert", str(source), "--out", str(tmp_path / "two"), "--to", "vllm", "--verify"]
    ran = subprocess.run(command, capture_output=True, env=os.environ | {"OMP_NUM_THREADS": "1"}, timeout=120)
    assert ran.returncode == 0, ran.stderr.decode()
    assert file_bytes(tmp_path / "two") == file_bytes(tmp_path / "one")
