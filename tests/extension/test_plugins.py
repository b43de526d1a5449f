"""Transformations by name: built-in ones, those of other packages, and plugins that are broken."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
from importlib.metadata import EntryPoint
from pathlib import Path

import pytest
import torch
from torch import nn

import refold
from refold import errors, executors
from refold.extension import plugins
from refold.rewrite.registry import ENTRY_POINTS, find_plugins

PLUGIN = '''
import torch
from torch import nn
import refold
from refold.rewrite import ReversibleRewrite, Site, Skip


class DropIdentity(ReversibleRewrite):
    """Calls of nn.Identity disappear: `y = x`."""

    kind = "graph"

    @classmethod
    def examples(cls):
        return [(nn.Sequential(nn.Linear(3, 3), nn.Identity()), (torch.ones(2, 3),))]

    def find(self, view):
        for node in view.nodes:
            if node.op == "call_module" and type(view.module(node.target)) is nn.Identity:
                yield Site((node,), f"dropped {node.target}")

    def rewrite(self, site, edit):
        (node,) = site.nodes
        node.replace_all_uses_with(node.args[0])
        edit.graph.erase_node(node)


not_a_class = DropIdentity()


class Good(refold.executors.Plain):
    name = "good"


class Unsure(Good):
    name = "unsure"

    def available(self, device):
        raise OSError("no driver")


class NeedsAnArgument(DropIdentity):
    def __init__(self, what):
        self.what = what
'''


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An installed package, as pip leaves it, that offers good and broken transformations."""
    (tmp_path / "their_package.py").write_text(PLUGIN)
    (tmp_path / "leaves.py").write_text("import sys\nsys.exit('no such luck')\n")
    info = tmp_path / "their_package-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: their-package\nVersion: 1.0\n")
    entries = """
        [refold.transformations]
        DropIdentity = their_package:DropIdentity
        Missing = no_such_module:Thing
        Leaves = leaves:Thing
        Instance = their_package:not_a_class
        Abstract = refold.rewrite:Transformation
        MergeLinears = their_package:DropIdentity
        NeedsAnArgument = their_package:NeedsAnArgument

        [refold.executors]
        good = their_package:Good
        gone = no_such_module:Nope
        leaving = leaves:Thing
        odd = their_package:DropIdentity
        plain = refold.executors.plain:Plain
        unsure = their_package:Unsure
    """
    (info / "entry_points.txt").write_text(textwrap.dedent(entries))
    monkeypatch.syspath_prepend(tmp_path)
    return tmp_path


def test_built_in_ones_are_found_by_name() -> None:
    found = plugins.transformations()
    assert found["MergeLinears"] is refold.MergeLinears
    assert plugins.name_of(refold.MergeLinears()) == "MergeLinears"
    assert all(cls.__module__.startswith("refold.transformations.") for cls in found.values())


def test_a_plugin_is_found_and_broken_ones_are_reported(package: Path) -> None:
    found = find_plugins()
    assert found.classes["DropIdentity"].__module__ == "their_package"
    assert found.origins["DropIdentity"] == "their-package"
    assert found.classes["MergeLinears"] is refold.MergeLinears
    reasons = {problem.name: str(problem) for problem in plugins.problems()}
    broken = {"Missing", "Leaves", "Instance", "Abstract", "MergeLinears", "NeedsAnArgument"}
    assert set(reasons) == broken | {"gone", "leaving", "odd", "plain"}
    assert "No module named 'no_such_module'" in reasons["Missing"]
    assert "no such luck" in reasons["Leaves"]
    assert "no class derived from refold.Transformation" in reasons["Instance"]
    assert "abstract: it lacks transform" in reasons["Abstract"]
    assert "taken already, by refold.transformations.merge_linears.MergeLinears" in reasons["MergeLinears"]
    assert "their-package" in reasons["NeedsAnArgument"] and "what" in reasons["NeedsAnArgument"]


def test_a_broken_executor_stops_nobody(package: Path) -> None:
    found = executors.executors()
    assert type(found["good"]).__module__ == "their_package" and type(found["plain"]) is executors.Plain
    assert {"gone", "leaving", "odd"}.isdisjoint(found)
    reasons = {problem.name: str(problem) for problem in plugins.problems()}
    assert "No module named 'no_such_module'" in reasons["gone"] and "their-package" in reasons["gone"]
    assert "no such luck" in reasons["leaving"] and "is no refold.executors.Executor" in reasons["odd"]
    assert "'plain' is taken already, by Plain" in reasons["plain"]
    assert "unsure" not in executors.executors("cpu") and "no driver" in executors.unavailable("cpu")["unsure"]
    with pytest.raises(executors.UnknownExecutor, match=r"The plugin gone .* was left out: ModuleNotFoundError"):
        executors.executor_named("gone")
    model = nn.Sequential(nn.Linear(2, 2)).eval()
    assert refold.optimize(model, (torch.ones(1, 2),), backend="plain", progress=False) is not None


def test_an_unknown_name_is_refused_with_the_names_that_exist(package: Path) -> None:
    with pytest.raises(errors.UnknownTransformation, match=r"no transformation called 'Nope'.*MergeLinears"):
        plugins.transformation_named("Nope")
    with pytest.raises(errors.UnknownTransformation, match=r"The plugin Missing .* was left out"):
        plugins.transformation_named("Missing")


def test_a_class_that_is_not_registered_has_no_name() -> None:
    class Mine(refold.Transformation):
        def transform(self, graph_module):  # type: ignore[no-untyped-def]
            return graph_module

    with pytest.raises(errors.UnknownTransformation, match="Mine is not registered"):
        plugins.name_of(Mine())


def test_a_plugin_passes_the_laws(package: Path) -> None:
    from refold.testing import check_laws

    check_laws(plugins.transformation_named("DropIdentity")())


def test_the_command_line_lists_it(package: Path) -> None:
    command = [sys.executable, "-c", "import sys; from refold.cli import main; sys.exit(main())", "list"]
    paths = {"PYTHONPATH": os.pathsep.join([str(package), *filter(None, [os.environ.get("PYTHONPATH")])])}
    done = subprocess.run(command, capture_output=True, text=True, env=paths, timeout=120)
    assert done.returncode == 0, done.stderr
    assert "DropIdentity" in done.stdout and "their-package" in done.stdout
    assert "The plugin Missing (their-package) was left out" in done.stderr
    assert "The plugin gone (their-package) was left out" in done.stderr


def test_entry_points_can_be_given() -> None:
    entry = EntryPoint("Other", "refold.transformations.merge_linears:MergeLinears", ENTRY_POINTS)
    assert find_plugins([entry]).classes["Other"] is refold.MergeLinears
