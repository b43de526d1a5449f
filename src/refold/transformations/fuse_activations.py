"""FuseActivations: GELU, SiLU and their like, written out in arithmetic, become torch's own operators."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import nn
from torch.fx import Node
from torch.fx.node import map_arg

from refold.aliasing import writes_to, written_by
from refold.edit import Editor
from refold.match import Call, GraphView, example_value, match_conv, match_linear, why_not_plain
from refold.purity import erase_dead, name_of
from refold.rewrite import Example, ReversibleRewrite, Site, Skip

aten = torch.ops.aten
_ARITHMETIC = {"add", "sub", "rsub", "mul", "div", "true_divide", "truediv", "pow", "square", "neg", "softplus"}
_MODULES = (nn.Tanh, nn.Sigmoid, nn.ReLU6, nn.Hardsigmoid, nn.Softplus)
_MOST_STEPS = 8
_POINTS = torch.tensor(
    [i / 40 for i in range(-1200, 1201)] + [1e-8, -1e-8, 300, -300], dtype=torch.float64, device="cpu"
)
_ROUNDING = 1e-14  # of a dozen steps in float64


@dataclass(frozen=True)
class _Activation:
    """A function of torch, the ATen operator for it, their settings, and by what it is bent: written with another bend,
    it would be rounded otherwise where it is nearly zero."""

    function: Callable[..., Any]
    operator: Any
    bends: frozenset[str]
    settings: dict[str, Any] = field(default_factory=dict)


_ACTIVATIONS = (
    _Activation(F.gelu, aten.gelu.default, frozenset({"tanh"}), {"approximate": "tanh"}),
    _Activation(F.gelu, aten.gelu.default, frozenset({"erf"})),
    _Activation(F.silu, aten.silu.default, frozenset({"sigmoid", "exp"})),
    _Activation(F.mish, aten.mish.default, frozenset({"tanh"})),
    _Activation(F.hardswish, aten.hardswish.default, frozenset({"relu6", "hardtanh", "clamp", "hardsigmoid"})),
)
_BENDS = frozenset.union(*(activation.bends for activation in _ACTIVATIONS))


@dataclass(frozen=True, kw_only=True, repr=False)
class FuseActivations(ReversibleRewrite):
    """Compute an activation that is written out by torch's operator for it: one pass over memory instead of eight, and
    one rounding.

    `0.5·x·(1 + tanh(√(2/π)·(x + 0.044715·x³))) = gelu(x, "tanh")`,  `x·Φ(x) = gelu(x)` with `Φ(x) = (1 + erf(x/√2))/2`,
    `x·sigmoid(x) = silu(x)`,  `x·tanh(softplus(x)) = mish(x)`,  `x·relu6(x + 3)/6 = hardswish(x)`.

    However it is written: elementwise arithmetic on one value is evaluated in float64 from −300 to 300, and is the
    activation that it agrees with everywhere.
    """

    kind: ClassVar[str] = "graph"

    @classmethod
    def examples(cls) -> Iterable[Example]:
        from refold import examples

        return [examples.written_activations(), examples.exported_written_activations()]

    def find(self, view: GraphView) -> Iterator[Site | Skip]:
        taken: set[Node] = set()
        for node in view.nodes:
            if node in taken or not _is_step(view, node) or _name(view, node) not in _BENDS:
                continue
            found = _match(view, node)
            if found is None:
                continue
            source, steps, activation = found
            if source in taken:
                continue  # what it reads goes first; the next round sees it again
            root, what = steps[-1], f"{activation.function.__name__} of {source.name}"
            reason = _why_not(view, source, steps)
            if reason is not None:
                yield Skip(root, f"{what}: {reason}")
                continue
            taken.update(steps)
            yield Site(tuple(steps), what, (root, source, activation))

    def rewrite(self, site: Site, edit: Editor) -> None:
        root, source, activation = site.detail
        exported = isinstance(root.target, torch._ops.OpOverload)
        target = activation.operator if exported else activation.function
        fused = edit.call(root, target, source, **activation.settings)
        edit.replace_uses(root, fused)
        erase_dead(edit, [root])
        self.mark_as_transformed(fused)


def _match(view: GraphView, bend: Node) -> tuple[Node, list[Node], _Activation] | None:
    """The activation around its bend: what it reads, its steps in order, and which it is."""
    candidates = [activation for activation in _ACTIVATIONS if _name(view, bend) in activation.bends]
    for root in reversed(_ahead(view, bend)):
        for source in _behind(view, bend):
            steps = _steps_between(view, source, root)
            values = _evaluate(view, source, steps) if steps else None
            for activation in candidates if values is not None else ():
                difference = values - activation.function(_POINTS, **activation.settings)
                if steps and bool((difference.abs() <= _ROUNDING * (1 + _POINTS.abs())).all()):
                    return source, steps, activation
    return None


def _ahead(view: GraphView, node: Node) -> list[Node]:
    """The steps behind one another that alone read each other, from a node on."""
    chain = [node]
    while len(chain) < _MOST_STEPS and len(chain[-1].users) == 1:
        (user,) = chain[-1].users
        if not _is_step(view, user):
            break
        chain.append(user)
    return chain


def _behind(view: GraphView, node: Node) -> list[Node]:
    """The values that a node may be computed from by steps alone, the nearest first."""
    found: dict[Node, None] = {}
    pending = list(node.all_input_nodes)
    while pending and len(found) < _MOST_STEPS:
        value = pending.pop(0)
        if value not in found:
            found[value] = None
            pending += value.all_input_nodes if _is_step(view, value) else []
    return list(found)


def _steps_between(view: GraphView, source: Node, root: Node) -> list[Node] | None:
    """The steps by which the root is computed from the source and from nothing else, in the graph's order."""
    steps: set[Node] = set()
    pending = [root]
    while pending:
        node = pending.pop()
        if node is source or node in steps:
            continue
        if not _is_step(view, node) or len(steps) > 2 * _MOST_STEPS:
            return None
        steps.add(node)
        pending += node.all_input_nodes
    return sorted(steps, key=view.position.__getitem__)


def _is_step(view: GraphView, node: Node) -> bool:
    """Whether a node is elementwise arithmetic on values and numbers."""
    name = _name(view, node)
    if name not in _BENDS and name not in _ARITHMETIC:
        return False
    given = [*node.args, *node.kwargs.values()]
    are_plain = all(isinstance(value, Node | int | float) or value is None for value in given)
    return are_plain and not written_by(view.gm, node)


def _name(view: GraphView, node: Node) -> str:
    if node.op != "call_module":
        return name_of(node)
    module = view.module(str(node.target))
    is_known = isinstance(module, _MODULES) and why_not_plain(module, _MODULES) is None
    return type(module).__name__.lower() if is_known else ""


def _evaluate(view: GraphView, source: Node, steps: list[Node]) -> torch.Tensor | None:
    """What these steps make of numbers; None where they are not what they look like."""
    values: dict[Node, Any] = {source: _POINTS}
    try:
        for node in steps:
            args: Any = map_arg(node.args, values.__getitem__)
            kwargs: Any = map_arg(node.kwargs, values.__getitem__)
            target: Any = node.target
            if node.op == "call_module":
                target = view.gm.get_submodule(target)
            elif node.op == "call_method":
                target = getattr(torch.Tensor, target)
            values[node] = target(*args, **kwargs)
    except Exception:
        return None
    made = values[steps[-1]]
    return made if isinstance(made, torch.Tensor) and made.shape == _POINTS.shape else None


def _why_not(view: GraphView, source: Node, steps: list[Node]) -> str | None:
    inside, root = set(steps), steps[-1]
    others = [user.name for node in steps[:-1] for user in node.users if user not in inside]
    if others:
        return f"{others[0]} reads a part of it"
    if not _is_floating_point(view, source):
        return "it is not known whether its input is floating-point"
    if view.mode_switches_between(steps[0], root):
        return "gradients, autocast or inference mode is switched inside it"
    writer = writes_to(view.gm, source, view.writers_between(steps[0], root))
    return f"{writer.name} writes into its input in between" if writer is not None else None


def _is_floating_point(view: GraphView, source: Node) -> bool:
    noted = example_value(source)
    if noted is not None:
        return noted.is_floating_point()
    return any(isinstance(match, Call) for match in (match_linear(view, source), match_conv(view, source)))
