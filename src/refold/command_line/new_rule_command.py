"""`refold new-rule`: the file of a rule and its test, which pass as they are written, for an author to go on from."""

from __future__ import annotations

import keyword
import re
from pathlib import Path
from string import Template

from refold.command_line.console import Console
from refold.errors import WrongInput
from refold.rewrite.registry import find_plugins

_RULE = Template('''\
"""$name: say in one line what becomes what."""

import torch
from refold.graph.targets import called_name
from refold.rewrite import ReversibleRewrite, Site, only_reader
from torch import nn


class $name(ReversibleRewrite):
    """Say here what is rewritten, why that is worth it, and the algebra of why it is the same.

    `relu(relu(x))`  becomes  `relu(x)`.
    """

    kind = "graph"  # "structural" where weights come back by slicing, "parametric" where by an inverse

    @classmethod
    def examples(cls):
        """Small models that it fires on, in eval mode, and their inputs: all laws are run on them."""
        yield Example().eval(), (torch.randn(2, 3),)

    def match(self, view, node):
        """Only look: a Site, None where the node is something else, or `raise Refuse("why")` where it almost fits."""
        if not is_relu(node) or not is_relu(node.args[0]):
            return None
        inner = node.args[0]
        only_reader(inner, node)
        return Site((inner, node), f"{node.name} is {inner.name} already")

    def rewrite(self, site, edit):
        """Edit; new tensors come from `edit.map_weights`, and none that was there is written into."""
        inner, outer = site.nodes
        edit.replace_uses(outer, inner)
        edit.erase(outer)


def is_relu(node):
    return called_name(node) == "relu" and len(node.args) == 1 and not node.kwargs


class Example(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(3, 4)

    def forward(self, x):
        return self.layer(x).relu().relu()
''')

_TEST = Template('''\
"""$name fires where it should, nowhere else, and keeps every law."""

import refold
import torch
from refold.testing import check_laws

from $file import Example, $name


def test_it_keeps_every_law():
    check_laws($name())


def test_it_fires_on_a_captured_model():
    x = torch.randn(2, 3)
    gm = refold.trace(Example().eval(), x)
    $name()(gm)
    assert len(refold.result(gm).rewritten) == 1
    assert refold.verify(gm, (x,)).right


def test_it_leaves_others_alone():
    def twice(x):
        once = x.relu()
        return once.relu(), once

    gm = torch.fx.symbolic_trace(twice)
    $name()(gm)
    (refused,) = refold.result(gm).refused
    assert "is also read by" in refused.reason
''')


def write_new_rule(console: Console, name: str, folder: Path) -> None:
    """Write both files, or none: what is there stays."""
    if not re.fullmatch(r"[A-Z]\w*", name) or not name.isascii() or keyword.iskeyword(name):
        raise WrongInput(f"{name!r} is no name of a class: give one like FoldLayerScale.")
    if name in find_plugins().classes:
        raise WrongInput(f"there is a transformation {name} already; refold list shows it.")
    file = re.sub(r"(?<=[a-z0-9])(?=[A-Z])|(?<=[A-Z])(?=[A-Z][a-z])", "_", name).lower()
    texts = {folder / f"{file}.py": _RULE, folder / f"test_{file}.py": _TEST}
    for path in texts:
        if path.exists():
            raise WrongInput(f"{path} exists already: give another name, or another folder with --out.")
    folder.mkdir(parents=True, exist_ok=True)
    for path, text in texts.items():
        path.write_text(text.substitute(name=name, file=file), encoding="utf-8")
    rule, test = texts
    console.show(
        {"rule": str(rule), "test": str(test)},
        f"wrote {rule} and {test}. The test passes as it is: python -m pytest {test}",
    )
