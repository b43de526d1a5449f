"""A saved module comes back with its history; a damaged or hostile folder is refused and changes nothing."""

from __future__ import annotations

import contextlib
import copy
import errno
import json
import os
import random
import re
import shutil
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from saving_models import Mixed, everything, folded, mixed
from torch import nn

import refold
from refold.errors import UnknownRecipe
from refold.fingerprint import same_bits
from refold.saving import SaveError, folder, load, save, store
from refold.saving.writer import write_module

SUPPORT = Path(__file__).parent.parent / "support"

pytest.importorskip("safetensors", reason="safetensors is not installed: pip install safetensors")


def assert_same(gm: torch.fx.GraphModule, other: torch.fx.GraphModule) -> None:
    assert gm.code == other.code
    mine, theirs = gm.state_dict(), other.state_dict()
    assert list(mine) == list(theirs)
    for name, tensor in theirs.items():
        assert same_bits(mine[name], tensor), name
    for (name, a), (_, b) in zip(gm.named_parameters(), other.named_parameters(), strict=True):
        assert a.requires_grad == b.requires_grad, name


def files(place: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in place.iterdir()}


# --- coming back ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
@pytest.mark.parametrize("as_class", [True, False])
def test_the_module_and_its_history_come_back(tmp_path: Path, dtype: torch.dtype, as_class: bool) -> None:
    original = torch.fx.symbolic_trace(mixed(1, dtype))
    before = copy.deepcopy(original)
    gm = everything()(original)
    assert len(refold.history(gm)) == 3
    save(gm, tmp_path / "saved")
    mine = Mixed().eval()
    untouched = copy.deepcopy(mine.state_dict())
    again = load(tmp_path / "saved", Mixed if as_class else mine)
    assert_same(again, gm)
    assert same_bits(again.offset, gm.offset)
    assert str(refold.history(again)) == str(refold.history(gm))
    x = torch.randn(2, 3, 8, 8).to(dtype)
    assert torch.equal(again(x), gm(x))
    refold.undo(again, None)
    assert_same(again, before)
    assert again.o.weight is again.tied.weight
    assert all(torch.equal(tensor, untouched[name]) for name, tensor in mine.state_dict().items())


def test_without_a_history_and_with_frozen_and_training_modules(tmp_path: Path) -> None:
    gm = torch.fx.symbolic_trace(mixed())
    gm.conv.weight.requires_grad_(False)
    gm.q.train()
    save(gm, tmp_path / "saved")
    again = load(tmp_path / "saved", Mixed)
    assert_same(again, gm)
    assert again.q.training and not again.k.training and not refold.history(again)


def test_a_module_that_was_cast_and_trained_after_folding(tmp_path: Path) -> None:
    gm = folded()
    gm.train()
    gm.half()
    with torch.no_grad():
        gm.conv.weight.add_(0.25)
    save(gm, tmp_path / "saved")
    again = load(tmp_path / "saved", Mixed)
    assert_same(again, gm)
    assert again.training
    refold.undo(again, None)
    refold.undo(gm, None)
    assert_same(again, gm)
    assert again.conv.weight.dtype == torch.float16


def test_keep_original_and_removed_tensors_come_back(tmp_path: Path) -> None:
    gm = torch.fx.symbolic_trace(mixed())
    before = copy.deepcopy(gm)
    refold.FuseBatchNorm2dInConv2d(keep="original")(gm)
    with torch.no_grad():
        gm.conv.weight.add_(1)
    save(gm, tmp_path / "saved")
    again = load(tmp_path / "saved", Mixed)
    refold.undo(again, weights="original")
    assert_same(again, before)


class DropTail(refold.Transformation):
    """Somebody's raw edit: the last layer is taken off, weights and all, without a weight map."""

    def transform(self, graph_module: torch.fx.GraphModule) -> torch.fx.GraphModule:
        graph = graph_module.graph
        tail = next(n for n in graph.nodes if n.target == "tied")
        tail.replace_all_uses_with(tail.args[0])
        graph.erase_node(tail)
        del graph_module.tied
        return graph_module


def test_tensors_that_only_the_history_holds(tmp_path: Path) -> None:
    model = mixed()
    model.tied.weight = nn.Parameter(torch.randn(4, 4))
    gm = torch.fx.symbolic_trace(model)
    before = copy.deepcopy(gm)
    DropTail()(gm)
    assert "tied.weight" not in gm.state_dict()
    save(gm, tmp_path / "saved")

    def untied() -> Mixed:
        made = Mixed()
        made.tied.weight = nn.Parameter(made.tied.weight.clone())
        return made.eval()

    again = load(tmp_path / "saved", untied)
    assert "tied.weight" not in again.state_dict()
    refold.undo(again)
    assert_same(again, before)


def test_a_captured_model(tmp_path: Path) -> None:
    from refold.capture.tracing import trace

    gm = trace(mixed(), torch.randn(2, 3, 8, 8))
    before = copy.deepcopy(gm)
    everything()(gm)
    assert refold.history(gm)
    save(gm, tmp_path / "saved")
    again = load(tmp_path / "saved", Mixed().eval())
    x = torch.randn(2, 3, 8, 8)
    assert_same(again, gm)
    assert torch.equal(again(x), gm(x))
    refold.undo(again, None)
    assert_same(again, before)


def test_a_graph_module_may_be_handed_over(tmp_path: Path) -> None:
    gm = folded()
    save(gm, tmp_path / "saved")
    again = load(tmp_path / "saved", graph_module=torch.fx.symbolic_trace(Mixed().eval()))
    assert_same(again, gm)
    with pytest.raises(SaveError, match="hand the result over"):
        load(tmp_path / "saved")


def test_many_shards(tmp_path: Path) -> None:
    gm = folded()
    save(gm, tmp_path / "saved", shard_bytes=300)
    shards = [name for name in files(tmp_path / "saved") if name.startswith("weights")]
    assert len(shards) > 3
    assert_same(load(tmp_path / "saved", Mixed), gm)
    (tmp_path / "saved" / shards[1]).unlink()
    with pytest.raises(SaveError, match="missing"):
        load(tmp_path / "saved", Mixed)


def test_loading_in_another_process_under_another_hash_seed(tmp_path: Path) -> None:
    gm = folded(2)
    save(gm, tmp_path / "saved")
    refold.undo(gm, None)
    torch.save(gm.state_dict(), tmp_path / "expected.pt")
    code = (
        "import sys, torch, refold; sys.path.insert(0, sys.argv[1])\n"
        "from saving_models import Mixed; from refold.saving import load\n"
        "gm = refold.undo(load(sys.argv[2] + '/saved', Mixed), None)\n"
        "expected = torch.load(sys.argv[2] + '/expected.pt')\n"
        "assert list(expected) == list(gm.state_dict())\n"
        "assert all(torch.equal(v, expected[k]) for k, v in gm.state_dict().items())\n"
    )
    environment = os.environ | {"PYTHONHASHSEED": "77"}
    here = str(SUPPORT)
    subprocess.run([sys.executable, "-c", code, here, str(tmp_path)], check=True, env=environment, timeout=120)


# --- refusing to save ----------------------------------------------------------------------------------------------


def test_what_could_not_be_loaded_is_not_saved(tmp_path: Path) -> None:
    gm = folded()
    with torch.no_grad():
        node = next(n for n in gm.graph.nodes if n.op == "call_method" and n.target == "mean")
        node.target = "sum"
    with pytest.raises(refold.RefoldError):
        save(gm, tmp_path / "saved")
    assert not (tmp_path / "saved").exists() and not list(tmp_path.iterdir())


@pytest.mark.parametrize("later", [False, True])
def test_a_graph_edited_by_hand_is_not_saved(tmp_path: Path, later: bool) -> None:
    gm = torch.fx.symbolic_trace(Mixed().eval())
    refold.MergeLinears()(gm)
    output = next(iter(reversed(gm.graph.nodes)))
    with gm.graph.inserting_before(output):
        gm.graph.call_function(torch.relu, (output.prev,))
    if later:
        refold.ChangeTrueDivToMulByInverse()(gm)
    with pytest.raises(refold.GraphEdited, match="No recipe leads"):
        save(gm, tmp_path / "saved")
    assert not (tmp_path / "saved").exists()


def test_meta_weights_are_refused(tmp_path: Path) -> None:
    gm = torch.fx.symbolic_trace(Mixed()).to("meta")
    with pytest.raises(SaveError, match="meta device"):
        save(gm, tmp_path / "saved")


def test_files_of_others_stay(tmp_path: Path) -> None:
    place = tmp_path / "mine"
    (place / "checkpoints").mkdir(parents=True)
    (place / "tokenizer.json").write_text("words")
    (place / "checkpoints" / "recipe.json").write_text("deep")
    os.symlink("tokenizer.json", place / "link")
    for gm, shard_bytes in ((folded(1), 400), (folded(2), 10**9)):
        save(gm, place, shard_bytes=shard_bytes)
        assert_same(load(place, Mixed), gm)
    names = {"manifest.json", "recipe.json", "weights-00001-of-00001.safetensors"}
    assert {path.name for path in place.iterdir()} == names | {"tokenizer.json", "checkpoints", "link"}
    assert (place / "tokenizer.json").read_text() == (place / "link").read_text() == "words"
    assert (place / "checkpoints" / "recipe.json").read_text() == "deep" and (place / "link").is_symlink()


@pytest.mark.parametrize("name", ["manifest.json", "recipe.json", "weights-00001-of-00001.safetensors"])
def test_a_name_that_is_taken_is_refused_and_nothing_is_written(tmp_path: Path, name: str) -> None:
    place = tmp_path / "mine"
    place.mkdir()
    (place / name).write_text('{"years": "of work"}')
    with pytest.raises(SaveError, match=rf"{re.escape(name)}.*move (it|the file) away"):
        save(folded(2), place)
    assert files(place) == {name: b'{"years": "of work"}'} and [path.name for path in tmp_path.iterdir()] == ["mine"]


def test_overwriting_a_saved_folder(tmp_path: Path) -> None:
    save(folded(1), tmp_path / "saved")
    gm = folded(2)
    save(gm, tmp_path / "saved", shard_bytes=500)
    assert_same(load(tmp_path / "saved", Mixed), gm)
    assert [path.name for path in tmp_path.iterdir()] == ["saved"]


# --- damage --------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("once") / "saved"
    save(folded(), place)
    return place


@pytest.fixture
def copied(saved: Path, tmp_path: Path) -> Path:
    place = tmp_path / "saved"
    place.mkdir()
    for name, data in files(saved).items():
        (place / name).write_bytes(data)
    return place


@pytest.mark.parametrize("name", ["manifest.json", "recipe.json", "weights-00001-of-00001.safetensors"])
def test_a_changed_byte_anywhere_is_noticed(copied: Path, name: str) -> None:
    data = (copied / name).read_bytes()
    numbers = random.Random(0)
    for place in [0, len(data) - 1, *(numbers.randrange(len(data)) for _ in range(20))]:
        for flip in (1, 0x20, 0x80):
            damaged = bytearray(data)
            damaged[place] ^= flip
            (copied / name).write_bytes(damaged)
            with pytest.raises(SaveError):
                load(copied, Mixed)
    (copied / name).write_bytes(data)
    load(copied, Mixed)


@pytest.mark.parametrize("name", ["manifest.json", "recipe.json", "weights-00001-of-00001.safetensors"])
@pytest.mark.parametrize("keep", [0.0, 0.5, 0.99])
def test_a_truncated_or_missing_file_is_noticed(copied: Path, name: str, keep: float) -> None:
    data = (copied / name).read_bytes()
    (copied / name).write_bytes(data[: int(len(data) * keep)])
    with pytest.raises(SaveError):
        load(copied, Mixed)
    (copied / name).unlink()
    with pytest.raises(SaveError):
        load(copied, Mixed)


def reseal(place: Path, change: Any = None, manifest: Any = None) -> None:
    """Change the recipe or the manifest and make all hashes right again, as an attacker would."""
    recipe = json.loads((place / "recipe.json").read_text())
    if change is not None:
        change(recipe)
    (place / "recipe.json").write_bytes(folder.plain_json(recipe))
    listed = {
        path.name: {"bytes": path.stat().st_size, "sha256": folder.sha256(path)}
        for path in place.iterdir()
        if path.name != folder.MANIFEST and path.is_file()
    }
    data = {"format": folder.FORMAT, "version": folder.VERSION, "files": listed}
    if manifest is not None:
        manifest(data)
    (place / folder.MANIFEST).write_bytes(folder.plain_json(data))


def test_a_newer_format_is_refused(copied: Path) -> None:
    reseal(copied, manifest=lambda data: data.update(version=folder.VERSION + 1))
    with pytest.raises(SaveError, match="newer Refold"):
        load(copied, Mixed)


@pytest.mark.parametrize("name", ["../evil.bin", "/etc/passwd", "sub/evil.bin", "..", "", "a\x00b", "A\\b"])
def test_paths_that_leave_the_folder_are_refused(copied: Path, name: str) -> None:
    (copied.parent / "evil.bin").write_bytes(b"secret")

    def escape(data: dict[str, Any]) -> None:
        data["files"][name] = {"bytes": 6, "sha256": folder.sha256(copied.parent / "evil.bin")}

    reseal(copied, manifest=escape)
    with pytest.raises(SaveError, match="no plain file name"):
        load(copied, Mixed)


def test_symbolic_links_are_refused(copied: Path, tmp_path: Path) -> None:
    outside = tmp_path / "outside.json"
    outside.write_bytes((copied / "recipe.json").read_bytes())
    (copied / "recipe.json").unlink()
    (copied / "recipe.json").symlink_to(outside)
    with pytest.raises(SaveError, match="symbolic link"):
        load(copied, Mixed)
    link = tmp_path / "link"
    link.symlink_to(copied)
    with pytest.raises(SaveError, match="symbolic link"):
        save(folded(), link)


HOSTILE = ["x);__import__('os').system('true')#", "def", "a b", "x\n import os", "__class__.x", "", "1a"]


@pytest.mark.parametrize("name", HOSTILE)
@pytest.mark.parametrize("where", ["names", "counts", "sites"])
def test_hostile_names_of_nodes_are_refused(copied: Path, name: str, where: str) -> None:
    if where == "counts" and name.isidentifier():
        name = f"{name} "  # a counter may stand for a keyword: the names made from it get a number

    def poison(recipe: dict[str, Any]) -> None:
        if where == "names":
            recipe["base"]["names"][1] = name
        elif where == "counts":
            recipe["base"]["counts"][name] = 3
        else:
            recipe["steps"][0]["sites"][0][0] = name

    reseal(copied, poison)
    with pytest.raises(SaveError, match="no identifier"):
        load(copied, Mixed)


@pytest.mark.parametrize(
    "path", ["os.system", "builtins.eval", "subprocess.Popen", "refold.rewrite.replay.Replayed", 3]
)
def test_unknown_transformations_are_refused_and_never_imported(copied: Path, path: Any) -> None:
    reseal(copied, lambda recipe: recipe["steps"][0].update({"class": path, "settings": {"command": "true"}}))
    with pytest.raises(UnknownRecipe, match="not known here"):
        load(copied, Mixed)
    reseal(copied, lambda recipe: recipe["steps"][0].update({"class": "this_module_is_not_there.Evil"}))
    with pytest.raises(UnknownRecipe):
        load(copied, Mixed)
    assert "this_module_is_not_there" not in sys.modules


def test_settings_that_do_not_fit_are_refused(copied: Path) -> None:
    reseal(copied, lambda recipe: recipe["steps"][0]["settings"].update(colour="red"))
    with pytest.raises(UnknownRecipe, match="settings do not fit"):
        load(copied, Mixed)


def drop(key: str) -> Any:
    return lambda recipe: recipe.pop(key)


NONSENSE: dict[str, Any] = {
    "no steps": lambda r: r.update(steps=[]),
    "steps are a number": lambda r: r.update(steps=3),
    "no records": lambda r: r.update(records=[]),
    "a foreign operation": lambda r: r["records"][0][0]["operation"].update(operation="Evil"),
    "another operation": lambda r: r["records"][0][0]["operation"].update(eps=0.5),
    "another source": lambda r: r["records"][0][0]["sources"].update(weight="k.weight"),
    "a wrong shape": lambda r: r["records"][0][0]["specs"]["weight"].update(shape=[1 << 40]),
    "a wrong dtype": lambda r: r["records"][0][0]["specs"]["weight"].update(dtype="load"),
    "a wrong key": lambda r: r["tensors"]["o.bias"].update(key="nowhere"),
    "another tensor": lambda r: r["tensors"]["o.bias"].update(key="tied.bias"),
    "a missing tensor": lambda r: r["tensors"].pop("o.bias"),
    "a wrong file": lambda r: r["placed"].update({"o.bias": "recipe.json"}),
    "an unlisted file": lambda r: r["placed"].update({"o.bias": "../../etc/passwd"}),
    "another graph": lambda r: r["nodes"].reverse(),
    "another base": lambda r: r["base"]["nodes"].reverse(),
    "another signature": lambda r: r["steps"][0].update(signature=1),
    "a site that is not there": lambda r: r["steps"][0]["sites"].append(["nowhere"]),
    "a method": lambda r: r["capture"].update(method="exec"),
    **{f"without {key}": drop(key) for key in ("capture", "base", "steps", "nodes", "tensors", "records", "placed")},
}


@pytest.mark.parametrize("name", NONSENSE)
def test_a_recipe_that_lies_is_refused(copied: Path, name: str) -> None:
    reseal(copied, NONSENSE[name])
    mine = Mixed().eval()
    before = copy.deepcopy(mine.state_dict())
    with pytest.raises(SaveError):
        load(copied, mine)
    assert all(torch.equal(tensor, before[name]) for name, tensor in mine.state_dict().items())


def test_another_model_is_refused_with_the_place_where_it_differs(copied: Path) -> None:
    class Other(Mixed):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return super().forward(x) + 1

    with pytest.raises(SaveError, match="they part at node"):
        load(copied, Other)

    def wider() -> Mixed:
        made = Mixed()
        made.o = nn.Linear(4, 4, bias=False)
        return made

    with pytest.raises(SaveError, match=r"lacks o\.bias"):
        load(copied, wider)


def test_what_makes_no_model_is_named(copied: Path) -> None:
    with pytest.raises(
        SaveError, match=r"Linear could not make the model: TypeError: .*in_features.*a function without"
    ):
        load(copied, nn.Linear)
    with pytest.raises(SaveError, match="gave no model but int"):
        load(copied, lambda: 3)  # type: ignore[arg-type, return-value]


def test_files_that_people_may_edit_are_not_on_the_list(tmp_path: Path) -> None:
    place = tmp_path / "saved"
    with folder.replaced(place, editable=["report.txt"]) as fresh:
        write_module(folded(1), fresh)
        (fresh / "notes.txt").write_text("six")
        (fresh / "report.txt").write_text("fast")
    (place / "report.txt").write_text("very fast")
    assert folder.checked_file(place, "notes.txt").read_text() == "six"
    load(place, Mixed)
    (place / "notes.txt").write_text("sax")
    for read in (lambda: folder.checked_file(place, "notes.txt"), lambda: load(place, Mixed)):
        with pytest.raises(SaveError, match=r"notes\.txt is damaged"):
            read()


def test_who_may_read_the_folder_may_read_its_files(tmp_path: Path) -> None:
    save(folded(1), tmp_path / "saved")
    rights = (tmp_path / "saved").stat().st_mode & 0o666
    assert {path.stat().st_mode & 0o777 for path in (tmp_path / "saved").iterdir()} == {rights}


# --- trouble while writing -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("place", ["write_bytes", "shard", "seal", "rename"])
def test_a_full_disk_leaves_the_old_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, place: str) -> None:
    target = tmp_path / "saved"
    save(folded(1), target)
    before = files(target)

    def full(*_: Any, **__: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    name = {"write_bytes": "write_bytes", "seal": "sync_folder", "rename": "_commit"}.get(place)
    if name is None:
        monkeypatch.setattr(store, "_write_shard", full)
    else:
        monkeypatch.setattr(folder, name, full)
        monkeypatch.setattr("refold.saving.writer.write_bytes", full if name == "write_bytes" else folder.write_bytes)
    with pytest.raises(SaveError, match="the disk is full"):
        save(folded(2), target)
    assert files(target) == before
    assert [path.name for path in tmp_path.iterdir()] == ["saved"]


@pytest.mark.parametrize("calls", range(1, 6))
@pytest.mark.parametrize("trouble", [KeyboardInterrupt(), OSError("no")])
def test_trouble_while_files_are_put_in_place(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, trouble: BaseException, calls: int
) -> None:
    """They count from the commit on, so the way is gone to its end, at once or by who looks at the folder next."""
    target, gm, replace = tmp_path / "saved", folded(2), os.replace
    save(folded(1), target)
    (target / "README").write_text("mine")
    left = [calls]

    def stopped(a: Any, b: Any) -> None:
        left[0] -= 1
        if left[0] <= 0:
            raise trouble
        replace(a, b)

    with monkeypatch.context() as patched, contextlib.suppress(KeyboardInterrupt, SaveError):
        patched.setattr(os, "replace", stopped)
        save(gm, target, shard_bytes=2000)
    assert_same(load(target, Mixed), gm)
    assert (target / "README").read_text() == "mine" and not (target / ".refold-new").exists()
    assert [path.name for path in tmp_path.iterdir()] == ["saved"]


def test_many_writers_and_readers_at_once(tmp_path: Path) -> None:
    place = tmp_path / "saved"

    def write(number: int) -> None:
        with folder.replaced(place) as fresh:
            for name in ("a", "b", f"only-{number}"):
                (fresh / name).write_text(str(number))
        folder.tidy(place)

    write(0)
    with ThreadPoolExecutor(8) as pool:
        list(pool.map(write, range(200)))
    texts = {path.read_text() for path in folder.checked_files(place).values()}
    assert len(texts) == 1 and {path.name for path in place.iterdir()} == {
        "a",
        "b",
        f"only-{texts.pop()}",
        "manifest.json",
    }


def test_committed_files_are_plain_files_of_the_folder(tmp_path: Path) -> None:
    """A folder from elsewhere cannot have files moved that are not its own."""
    place, other = tmp_path / "saved", tmp_path / "other"
    save(folded(1), place)
    save(folded(2), other)
    here, there = files(place), files(other)
    (place / ".refold-new").symlink_to(other)
    load(place, Mixed)
    (place / ".refold-new").unlink()
    shutil.copytree(other, place / ".refold-new")
    manifest = {"format": "refold", "version": 1, "files": {"../../other/recipe.json": {}}}
    (place / ".refold-new" / "manifest.json").write_bytes(folder.plain_json(manifest))
    with pytest.raises(SaveError, match="no plain file name"):
        load(place, Mixed)
    shutil.rmtree(place / ".refold-new")
    assert (files(place), files(other)) == (here, there)


KILLED = """
import os, random, signal, sys, time
import torch
sys.path.insert(0, sys.argv[1])
torch.set_num_threads(1)
from saving_models import Mixed, folded
from refold.saving import load, save
place, numbers = sys.argv[2], random.Random(0)
old, new = folded(1), folded(2)
save(old, place)
start = time.perf_counter()
save(new, place, shard_bytes=400)
took = time.perf_counter() - start
seen = []
while len(seen) < 10 or (len(set(seen)) < 2 and len(seen) < 60):
    child = os.fork()
    if child == 0:
        while True:
            save(old, place)
            save(new, place, shard_bytes=400)
    time.sleep(numbers.uniform(0, 4 * took))
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    assert os.path.isdir(place)
    found = load(place, Mixed).state_dict()
    fits = [m for m in (old, new) if all(torch.equal(t, found[n]) for n, t in m.state_dict().items())]
    assert len(fits) == 1, "a mixture"
    seen.append("old" if fits[0] is old else "new")
assert set(seen) == {"old", "new"}, seen
save(old, place)
assert os.listdir(os.path.dirname(place)) == ["saved"]
"""


def test_a_process_killed_at_any_moment_leaves_the_old_folder_or_the_new_one(tmp_path: Path) -> None:
    command = [sys.executable, "-c", KILLED, str(SUPPORT), str(tmp_path / "saved")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr


class Killed(BaseException):
    """Stands for SIGKILL at one precise call."""


def test_stopped_at_every_single_file_operation(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No `finally` may help: cleaning up is switched off from the moment of the kill on."""
    gm, target = folded(2), tmp_path / "saved"
    save(folded(1), target)
    (target / "README").write_text("mine")
    old = files(target)
    real = {name: getattr(os, name) for name in ("rename", "replace", "unlink", "rmdir", "fsync", "mkdir")}
    state = {"stop": 0, "count": 0}

    def step(name: str, *args: Any, **kwargs: Any) -> Any:
        state["count"] += 1
        if state["count"] >= state["stop"]:
            monkeypatch.setattr(folder.shutil, "rmtree", lambda *_, **__: None)
            raise Killed
        return real[name](*args, **kwargs)

    while state["count"] >= state["stop"]:
        state = {"stop": state["stop"] + 1, "count": 0}
        with monkeypatch.context() as patched:
            for name in real:
                patched.setattr(os, name, lambda *a, _name=name, **k: step(_name, *a, **k))
            with contextlib.suppress(Killed):
                save(gm, target, shard_bytes=2000)
        monkeypatch.undo()
        folder.tidy(target)
        now = load(target, Mixed)
        is_new = torch.equal(now.conv.weight, gm.conv.weight)
        assert (target / "README").read_text() == "mine"
        assert is_new or files(target) == old
        if is_new:
            save(folded(1), target)
            old = files(target)
    assert state["stop"] > 10


class Nested(nn.Module):
    """Takes nested inputs, and goes round as often as a tensor says."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, pair: tuple, named: dict, turns: torch.Tensor, *, flip: bool = False) -> torch.Tensor:
        x = pair[0] + pair[1][0] - named["less"]
        for _ in range(int(turns)):
            x = self.linear(x)
        return -x if flip else x


def test_nested_inputs_and_values_that_control_flow_depends_on_are_captured_again(tmp_path: Path) -> None:
    model, x = Nested().eval(), torch.randn(2, 4)
    arguments = (((x, [x + 1]), {"less": x * 2}, torch.tensor(3)), {"flip": True})
    saved = refold.trace(model, *arguments[0], **arguments[1])
    refold.save(saved, tmp_path / "nested")
    loaded = refold.load(tmp_path / "nested", model)
    assert torch.equal(loaded(*arguments[0], **arguments[1]), saved(*arguments[0], **arguments[1]))
    with pytest.raises(refold.RefoldError, match="turns"):
        loaded((x, [x]), {"less": x}, torch.tensor(2), flip=True)


def test_what_is_loaded_lies_where_torch_would_put_it(tmp_path: Path) -> None:
    """Kernels round otherwise where memory begins elsewhere."""
    refold.save(folded(), tmp_path / "folded")
    loaded = refold.load(tmp_path / "folded", mixed)
    assert {tensor.data_ptr() % 64 for tensor in [*loaded.parameters(), *loaded.buffers()]} == {0}
