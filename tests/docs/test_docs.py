"""Every Python block of the README and of the documentation runs, and prints what the page says it prints.

The blocks of one page run in order, in one namespace. A `text` block right behind a Python block is its output; `...`
in it stands for anything. A block that begins with `# name.py` is saved under that name, imported, and its tests run.
So do the `refold` commands of every `sh` block. Blocks that are only for reading use another language.
"""

from __future__ import annotations

import contextlib
import doctest
import importlib
import io
import os
import re
import shlex
import sys
import tomllib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType

import pytest
import torch

from refold.cli import main

ROOT = Path(__file__).parent.parent.parent
WRITTEN_BY_SCRIPTS = {"zoo.md", "benchmarks.md"}
PAGES = [ROOT / "README.md", *sorted(p for p in (ROOT / "docs").glob("*.md") if p.name not in WRITTEN_BY_SCRIPTS)]

_BLOCK = re.compile(r"^```python\n(?P<code>.*?)^```$(?:\n\n?^```text\n(?P<output>.*?)^```$)?", re.M | re.S)


@dataclass(frozen=True)
class Block:
    """Code of a page, the line it begins on, and the output the page shows for it."""

    code: str
    line: int
    output: str | None


def blocks_of(page: Path) -> list[Block]:
    text = page.read_text(encoding="utf-8")
    return [Block(m["code"], text.count("\n", 0, m.start()) + 2, m["output"]) for m in _BLOCK.finditer(text)]


@pytest.fixture(autouse=True)
def own_environment() -> Iterator[None]:
    """What a page sets is its own: another test must not write into the cache of a page."""
    before = dict(os.environ)
    yield
    os.environ.clear()
    os.environ.update(before)


def run(page: Path, block: Block, namespace: dict[str, object]) -> str:
    """Run a block so that a traceback names the page and the line; what it printed."""
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        file = re.match(r"# (\w+)\.py\n", block.code)
        if file:
            namespace |= run_as_file(file[1], block.code)
        else:
            code = compile("\n" * (block.line - 1) + block.code, str(page), "exec", dont_inherit=True)
            exec(code, namespace)
    return printed.getvalue()


def run_as_file(name: str, code: str) -> dict[str, object]:
    """Save a block in the current folder, import it, and run its tests as pytest would; the names it defines."""
    Path(f"{name}.py").write_text(code, encoding="utf-8")
    importlib.invalidate_caches()
    found = vars(importlib.import_module(name))
    tests = [thing for key, thing in found.items() if key.startswith("test_")]
    assert tests, f"{name}.py has no test"
    for test in tests:
        test()
    return {key: thing for key, thing in found.items() if not key.startswith("__")}


def agrees(expected: str, printed: str) -> bool:
    """Whether an output is the one shown; `...` stands for anything."""
    return doctest.OutputChecker().check_output(expected, printed, doctest.ELLIPSIS)


@pytest.mark.parametrize("page", [p for p in PAGES if blocks_of(p)], ids=lambda p: p.name)
def test_every_block_of_a_page_runs(page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    torch.manual_seed(0)
    module = ModuleType(f"page_{page.stem}")
    monkeypatch.setitem(sys.modules, module.__name__, module)  # where classes of the page say that they come from
    for block in blocks_of(page):
        printed = run(page, block, vars(module))
        if block.output is not None:
            where = f"{page.relative_to(ROOT)}, line {block.line}"
            assert agrees(block.output, printed), f"{where} shows\n{block.output}\nand the code printed\n{printed}"


def commands_of(page: Path) -> list[str]:
    blocks = re.findall(r"^```sh\n(.*?)^```$", page.read_text(encoding="utf-8"), re.M | re.S)
    return [line for block in blocks for line in block.splitlines() if line.startswith("refold ")]


@pytest.mark.parametrize("page", [p for p in PAGES if commands_of(p)], ids=lambda p: p.name)
def test_every_command_of_a_page_runs(
    page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    for command in commands_of(page):
        code = main(shlex.split(command, comments=True)[1:])
        said = capsys.readouterr()
        assert code == 0, f"{command} ended with {code}: {said.err}"
        assert said.out, f"{command} said nothing"


def test_blocks_are_found_with_their_lines_and_output(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text("# A page\n\n```python\nx = 6 * 7\nprint(x)\n```\n\n```text\n42\n```\n\n```python\n1 / 0\n```\n")
    first, second = blocks_of(page)
    assert (first.line, first.output, second.line, second.output) == (4, "42\n", 13, None)
    assert run(page, first, {}) == "42\n" and not agrees("43\n", "42\n")
    with pytest.raises(ZeroDivisionError) as raised:
        run(page, second, {})
    assert raised.traceback[-1].lineno + 1 == 13


def test_the_readme_begins_with_commands_that_exist() -> None:
    readme, makefile = (ROOT / "README.md").read_text(), (ROOT / "Makefile").read_text()
    commands = re.findall(r"^make (\w+)", readme, re.M)
    assert commands[:2] == ["test", "demo"]
    first_code = readme.index("```")
    assert readme.index("make test") - first_code < 20, "the two commands are not the README's first block"
    for command in commands:
        assert re.search(rf"^{command}:", makefile, re.M), f"the Makefile has no {command}"


@pytest.mark.parametrize("page", PAGES, ids=lambda p: p.name)
def test_links_between_files_lead_somewhere(page: Path) -> None:
    """In a checkout as it is cloned: pages that `make docs` generates are not there."""
    generated = [ROOT / "docs" / name for name in ("transformations", "generated", "_build")]
    for target in re.findall(r"\]\(([^)#\s]+)", page.read_text(encoding="utf-8")):
        if not target.startswith("http"):
            file = (page.parent / target).resolve()
            assert file.exists(), f"{page.name} links to {target}, which does not exist"
            assert not any(file.is_relative_to(folder) for folder in generated), f"{target} is generated"


def test_the_example_of_a_transformation_is_short() -> None:
    page = ROOT / "docs" / "writing_a_transformation.md"
    longest = max(block.code.count("\n") for block in blocks_of(page))
    assert 20 < longest < 60, f"the transformation with its test has {longest} lines"


def test_the_speeds_that_the_readme_names_are_those_of_the_results():
    """`benchmarks/plot.py` writes the page from the results; the README is written by hand."""
    page = (ROOT / "docs" / "benchmarks.md").read_text()
    named = re.search(r"^Eleven models.*?\n\n", (ROOT / "README.md").read_text(), re.M | re.S)
    assert named is not None
    means = re.findall(r"best (?:torch.compile mode|of torch.compile and eager) of .*?\*\*(.*?)×.*?lowest (.*?)×", page)
    (cpu, cpu_lowest), (cpu_with_eager, _), (gpu, gpu_lowest), (gpu_with_eager, _) = means
    order = [gpu, gpu_lowest, cpu, cpu_lowest, gpu_with_eager, cpu_with_eager]
    assert re.findall(r"([\d.]+)×", named[0]) == order


def test_every_extra_is_explained_and_no_message_asks_an_index_for_refold():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    page = (ROOT / "docs" / "install.md").read_text()
    named = {extra: needs.strip() for extra, needs in re.findall(r"^\| `(\w+)` \| ([^|]*) \|", page, re.M)}
    brought = {
        extra: ", ".join(re.split(r"[><=]", need)[0] for need in needs)
        for extra, needs in project["optional-dependencies"].items()
    }
    assert named == brought
    sources = [path.read_text() for path in (ROOT / "src").rglob("*.py")]
    assert not [found for text in sources for found in re.findall(r"pip install[^\n]*refold.*", text)]
