"""The command line as a user meets it: every command on a small model, and what it says about wrong inputs."""

from __future__ import annotations

import importlib
import json
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from cli_folders import let_it_say, write_folder

import refold
from refold.cli import main, open_inputs, open_model
from refold.command_line.builtin_models import EXAMPLES
from refold.command_line.saved_folder import ABOUT
from refold.extension.pipeline_files import read_pipeline
from refold.graph.view import GraphView
from refold.report import Report
from refold.rewrite.editor import Editor
from refold.rewrite.rule import ReversibleRewrite, Site
from refold.saving.folder import MANIFEST, plain_json

PIPELINE = """
refold-pipeline: 1
transformations:
  - RemoveNoOps
  - FuseBatchNorm2dInConv2d
  - MergeLinears
"""

Run = Callable[..., tuple[int, str, str]]


@pytest.fixture
def refold_command(capfd: pytest.CaptureFixture[str]) -> Run:
    """Runs a command in this process; the exit code, what it wrote to stdout, and what it wrote to stderr."""

    def run(*arguments: object) -> tuple[int, str, str]:
        capfd.readouterr()
        code = main([str(argument) for argument in arguments])
        out, err = capfd.readouterr()
        return code, out, err

    return run


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder that was made from the example `tiny`, with three changes."""
    kept = (refold.FuseBatchNorm2dInConv2d(), refold.ChangeTrueDivToMulByInverse(), refold.MergeLinears())
    return write_folder(tmp_path_factory.mktemp("made") / "tiny", "example:tiny", *kept)


@pytest.fixture
def folder(made: Path, tmp_path: Path) -> Path:
    """A copy of it that a test may change."""
    import shutil

    return Path(shutil.copytree(made, tmp_path / "tiny"))


# --- what optimize leaves ----------------------------------------------------------------------------------------


def test_optimize_leaves_a_whole_folder(tmp_path: Path, refold_command: Run) -> None:
    (tmp_path / "few.yaml").write_text(PIPELINE)
    fixed = ["--backend", "plain", "--time-budget", 5, "--pipeline", tmp_path / "few.yaml"]
    code, out, err = refold_command("optimize", "example:tiny", "--out", tmp_path / "tiny", *fixed)
    assert code == 0, err
    assert f"the report is {tmp_path / 'tiny' / 'report.html'}" in out and "MergeLinears" in out
    names = {path.name for path in (tmp_path / "tiny").iterdir()}
    assert {"report.html", "report.json", "pipeline.yaml", "about.json", "manifest.json", "recipe.json"} <= names
    assert {path.name for path in tmp_path.iterdir()} == {"few.yaml", "tiny"}
    report = Report.from_json((tmp_path / "tiny" / "report.json").read_text())
    read = read_pipeline(tmp_path / "tiny" / "pipeline.yaml")
    assert [type(t).__name__ for t in read] == ["RemoveNoOps", "FuseBatchNorm2dInConv2d", "MergeLinears"]
    assert [step.name for step in report.steps] == [type(t).__name__ for t in read]
    kept = [step.name for step in report.kept]  # what was faster is for the machine to say
    assert [change.name for change in refold.history(open_model(tmp_path / "tiny"))] == kept


def test_what_was_saved_computes_what_the_original_does(made: Path) -> None:
    gm, inputs = open_model(made), open_inputs(made)
    assert len(refold.history(gm)) == 3
    original = EXAMPLES["tiny"].build()
    assert isinstance(inputs, dict)
    with torch.no_grad():
        torch.testing.assert_close(gm(**inputs), original(**inputs))
    restored = refold.undo(gm, None)
    weights = dict(original.named_parameters())
    assert all(torch.equal(weights[name], p) for name, p in restored.named_parameters())


# --- the commands on a folder ------------------------------------------------------------------------------------


def test_show(made: Path, refold_command: Run) -> None:
    code, out, _ = refold_command("show", made, "--all")
    assert code == 0
    assert "1. FuseBatchNorm2dInConv2d" in out and "3. MergeLinears()" in out
    assert any(line.strip().startswith("-") for line in out.splitlines())
    assert "3 changes; " in out
    short = refold_command("show", made)[1]
    assert len(short.splitlines()) <= len(out.splitlines())


def test_show_as_json_agrees_with_the_loaded_history(made: Path, refold_command: Run) -> None:
    code, out, _ = refold_command("show", made, "--json")
    told = json.loads(out)["changes"]
    assert code == 0 and told
    assert [(c["label"], c["lines"]) for c in told] == [
        (c.label, c.describe()) for c in refold.history(open_model(made))
    ]


def test_verify_says_right(made: Path, refold_command: Run) -> None:
    code, out, _ = refold_command("verify", made, "--json")
    found = json.loads(out)
    assert code == 0
    assert found["right"] and found["sites"] and found["outputs"]


class Wrong(ReversibleRewrite):
    """Divides by three where the model divides by two."""

    def find(self, view: GraphView) -> Iterator[Site]:
        return (Site((n,), f"spoilt {n.name}") for n in view.nodes if n.name == "div" and n.args[1] == 2.0)

    def rewrite(self, site: Site, edit: Editor) -> None:
        site.nodes[0].args = (site.nodes[0].args[0], 3.0)


def test_quiet_leaves_stderr_to_errors(made: Path, refold_command: Run) -> None:
    assert "loading" in refold_command("verify", made)[2]
    code, out, err = refold_command("verify", made, "--quiet")
    assert (code, err) == (0, "") and "Right" in out
    code, out, err = refold_command("verify", made / "none", "--quiet")
    assert (code, out) == (2, "") and err.startswith("refold: ")


def test_verify_says_no_to_a_wrong_rewrite(tmp_path: Path, refold_command: Run) -> None:
    write_folder(tmp_path / "wrong", "example:tiny", Wrong())
    code, out, _ = refold_command("verify", tmp_path / "wrong")
    assert code == 1 and "WRONG" in out and "Wrong()" in out


def test_undo_gives_every_bit_back(folder: Path, refold_command: Run) -> None:
    changes = len(json.loads((folder / ABOUT).read_text())["changes"])
    code, out, _ = refold_command("undo", folder, "--changes", 1, "--json")
    assert code == 0 and json.loads(out)["left"] == changes - 1
    refold_command("undo", folder, "--changes", 1)
    assert "\n1 change; " in refold_command("show", folder)[1]
    while json.loads(out)["left"]:
        code, out, _ = refold_command("undo", folder, "--json")
    told = json.loads(out)
    assert (code, told["different"]) == (0, []) and told["compared"] > 20
    assert not refold.history(open_model(folder))
    code, _, err = refold_command("undo", folder)
    assert code == 2 and "nothing to undo" in err


def test_undo_says_no_where_the_bits_differ(folder: Path, refold_command: Run) -> None:
    about = json.loads((folder / ABOUT).read_text())
    about["original"]["head.weight"] = about["original"]["head.weight"][:-4] + "0000"
    let_it_say(folder, original=about["original"])
    before = {path.name: path.read_bytes() for path in folder.iterdir()}
    code, out, _ = refold_command("undo", folder)
    assert code == 1 and "head.weight" in out
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == before


def test_undo_elsewhere_leaves_the_folder_alone(folder: Path, tmp_path: Path, refold_command: Run) -> None:
    before = {path.name: path.read_bytes() for path in folder.iterdir()}
    assert refold_command("undo", folder, "--out", tmp_path / "original")[0] == 0
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == before
    assert not refold.history(open_model(tmp_path / "original"))


def test_undo_leaves_the_report_behind(folder: Path, tmp_path: Path, refold_command: Run) -> None:
    let_it_say(folder, run={"report": "report.html", "level": "default"})
    for name in ("report.html", "report.json", "pipeline.yaml"):
        (folder / name).write_text("speaks of rewrites")
    assert refold_command("undo", folder, "--out", tmp_path / "original")[0] == 0
    names = {path.name for path in (tmp_path / "original").iterdir()}
    assert not names & {"report.html", "report.json", "pipeline.yaml"}
    about = json.loads((tmp_path / "original" / ABOUT).read_text())
    assert about["run"] == {"level": "default", "undone": True} and set(about["files"]) == names - {ABOUT}


FILES = ["about.json", "inputs.safetensors", "manifest.json", "recipe.json", "weights-00001-of-00001.safetensors"]


@pytest.mark.parametrize("name", FILES)
def test_a_changed_byte_is_noticed_in_every_file_that_matters(name: str, folder: Path, refold_command: Run) -> None:
    data = bytearray((folder / name).read_bytes())
    data[-20] ^= 1
    (folder / name).write_bytes(data)
    code, _, err = refold_command("verify", folder)
    assert code == 2 and f"{folder / name} " in err.splitlines()[-1], err


def test_a_folder_whose_inputs_have_no_digest_is_read(folder: Path, refold_command: Run) -> None:
    """Version 0.1.0 listed the files of the model only."""
    manifest = json.loads((folder / MANIFEST).read_text())
    for name in (ABOUT, "inputs.safetensors"):
        del manifest["files"][name]
    (folder / MANIFEST).write_bytes(plain_json(manifest))
    assert refold_command("verify", folder)[0] == 0


CHECK = """
import json, os, sys
folder = sys.argv[1]
assert os.environ["REFOLD_FOLDER"] == folder
labels = [change["label"] for change in json.load(open(f"{folder}/about.json"))["changes"]]
sys.exit("MergeLinears()" in labels)
"""


def test_bisect_finds_the_culprit(folder: Path, tmp_path: Path, refold_command: Run) -> None:
    (tmp_path / "check.py").write_text(CHECK)
    check = f"{sys.executable} {tmp_path / 'check.py'} {{}}"
    code, out, _ = refold_command("bisect", folder, "--check", check, "--json")
    assert code == 1 and json.loads(out)["culprit"] == "MergeLinears()"


@pytest.mark.parametrize(
    ("check", "expected", "sentence"),
    [
        ("true", 0, "passes on"),
        ("false", 4, "every change undone as well"),
        ("exit 127", 4, "could not be run"),
    ],
)
def test_bisect_without_a_culprit(made: Path, check: str, expected: int, sentence: str, refold_command: Run) -> None:
    code, out, err = refold_command("bisect", made, "--check", check)
    assert code == expected and sentence in out + err


@pytest.mark.parametrize("count", [1, 2, 3, 5, 8, 13])
def test_bisect_asks_few_questions(count: int) -> None:
    from refold.command_line.folder_commands import first_bad

    for culprit in range(1, count + 1):
        asked: list[int] = []

        def good(kept: int, culprit: int = culprit, asked: list[int] = asked) -> bool:
            asked.append(kept)
            return kept < culprit

        assert first_bad(count, good) == culprit
        assert len(asked) <= count.bit_length()


# --- the commands on a model -------------------------------------------------------------------------------------


def test_explain_says_what_and_why_not(refold_command: Run) -> None:
    code, out, _ = refold_command("explain", "example:tiny", "MergeLinears", "--json")
    (told,) = json.loads(out)["transformations"]
    assert code == 0
    assert told["rewritten"][0]["what"] == "merged blocks.0.query, blocks.0.key, blocks.0.value"
    assert all(r["reason"] for r in told["refused"]) and len(told["refused"]) > 3
    code, out, _ = refold_command("explain", "example:tiny", "MergeLinears", "--batch", 3)
    assert "merged blocks.1.query" in out and "no other linear layer reads the same input" in out


class Crash(refold.Transformation):
    """A pass of somebody's that does not work."""

    def transform(self, graph_module: torch.fx.GraphModule) -> torch.fx.GraphModule:
        raise RuntimeError("crashed\ninside")


def test_explain_names_a_transformation_that_fails_and_goes_on(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    from refold.command_line import explain_command
    from refold.command_line.console import Console
    from refold.command_line.options import Request

    monkeypatch.setattr(explain_command, "name_of", lambda t: type(t).__name__)
    monkeypatch.setattr(explain_command, "chosen_pipeline", lambda *_, **__: (Crash(), refold.MergeLinears()))
    explain_command.explain_model(Console(), Request("example:tiny"), "default", None, None, False)
    out = capfd.readouterr().out
    assert "Crash  It failed and was left out: RuntimeError: crashed inside" in out
    assert "MergeLinears: 2 to rewrite" in out and "2 places would be rewritten" in out


def test_list_shows_everything(refold_command: Run) -> None:
    code, out, _ = refold_command("list", "--json")
    rows = {row["name"]: row for row in json.loads(out)["transformations"]}
    assert code == 0
    assert rows["MergeLinears"]["kind"] == "structural" and rows["MergeLinears"]["reversible"]
    assert rows["FuseBatchNorm2dInConv2d"]["kind"] == "parametric"
    assert rows["FuseBatchNorm2dInConv2d"]["settings"] == {"keep": "correction"}
    assert all(row["summary"] for row in rows.values())
    text = refold_command("list")[1]
    assert "W' = s·W" in text and "example:NAME" in text
    assert "share the merged memory" in refold_command("list", "MergeLinears")[1]


def test_bench_times_refold_beside_eager(refold_command: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:

    (tmp_path / "one.yaml").write_text("refold-pipeline: 1\ntransformations: [MergeLinears]")
    from refold.command_line import bench_command

    monkeypatch.setattr(bench_command, "executors", lambda device: {})
    code, out, _ = refold_command(
        "bench", "example:tiny", "--time-budget", 1, "--pipeline", tmp_path / "one.yaml", "--json"
    )
    told = json.loads(out)
    assert code == 0
    assert {row["name"] for row in told["candidates"]} == {"eager", "refold"}
    assert told["grades"]["refold"] in ("bit-identical", "same error class")


# --- cache -------------------------------------------------------------------------------------------------------


def test_cache_lists_and_clears(refold_command: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert "REFOLD_CACHE is 'off'" in refold_command("cache")[1]
    monkeypatch.setenv("REFOLD_CACHE", str(tmp_path / "cache"))
    assert "0 decisions" in refold_command("cache")[1]
    net = torch.nn.Sequential(torch.nn.Linear(4, 4)).eval()
    refold.optimize(net, (torch.ones(2, 4),), backend="plain", effort="quick", sizes="example", progress=False)
    code, out, _ = refold_command("cache", "--json")
    (row,) = json.loads(out)["entries"]
    assert code == 0 and (row["model"], row["runs"]) == ("Sequential", "plain")
    entry = tmp_path / "cache" / "decisions" / row["key"] / "decision.json"
    entry.write_text("{")
    assert "damaged" in refold_command("cache")[1]
    assert "1 decision deleted" in refold_command("cache", "--clear")[1] and not entry.exists()
    entry.parents[1].chmod(0o755)
    code, _, err = refold_command("cache")
    assert code == 2 and "chmod 700" in err


# --- new-rule ----------------------------------------------------------------------------------------------------


def test_a_new_rule_passes_its_test(tmp_path: Path, refold_command: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    code, out, err = refold_command("new-rule", "FoldHTTPScale", "--out", tmp_path / "rules")
    rule, test = tmp_path / "rules" / "fold_http_scale.py", tmp_path / "rules" / "test_fold_http_scale.py"
    assert (code, err) == (0, "") and str(test) in out
    monkeypatch.syspath_prepend(str(rule.parent))
    written = importlib.import_module(test.stem)
    tests = [thing for name, thing in vars(written).items() if name.startswith("test_")]
    for each in tests:
        each()
    assert len(tests) == 3
    before = rule.read_text()
    assert "exists already" in refold_command("new-rule", "FoldHTTPScale", "--out", rule.parent)[2]
    assert rule.read_text() == before
    assert "already" in refold_command("new-rule", "MergeLinears", "--out", tmp_path)[2]
    code, _, err = refold_command("new-rule", "fold-it")
    assert code == 2 and "is no name of a class" in err
