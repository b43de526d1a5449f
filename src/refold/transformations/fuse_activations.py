"""FuseActivations: GELU, SiLU and their like, decomposed into arithmetic, become torch's own operators."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch.fx import Node

from refold.examples import Example, layers
from refold.graph.values import example_value
from refold.graph.view import Call, GraphView
from refold.patterns.activations import DecomposedActivation, match_decomposed_activation
from refold.rewrite.editor import Editor
from refold.rewrite.operators import CONVOLUTION, LINEAR
from refold.rewrite.refusal import Refuse, attempt, unchanged_between
from refold.rewrite.rule import ReversibleRewrite, Site


@dataclass(frozen=True, kw_only=True, repr=False)
class FuseActivations(ReversibleRewrite):
    """Compute an activation that is decomposed into arithmetic by torch's operator for it: one pass over memory instead
    of eight, and one rounding.

    `0.5·x·(1 + tanh(√(2/π)·(x + 0.044715·x³))) = gelu(x, "tanh")`,  `x·Φ(x) = gelu(x)` with `Φ(x) = (1 + erf(x/√2))/2`,
    `x·sigmoid(x) = silu(x)`,  `x·tanh(softplus(x)) = mish(x)`,  `x·relu6(x + 3)/6 = hardswish(x)`.

    However it is written: elementwise arithmetic on one value is evaluated in float64 from −300 to 300, and is the
    activation that it agrees with everywhere.
    """

    kind: ClassVar[str] = "graph"

    @classmethod
    def examples(cls) -> Iterable[Example]:
        return [layers.decomposed_activations(), layers.exported_decomposed_activations()]

    def match(self, view: GraphView, node: Node) -> Site | None:
        found = match_decomposed_activation(view, node)
        if found is None:
            return None
        what = f"{found.activation.function.__name__} of {found.source.name}"
        refusal = attempt(_check, view, found)
        if refusal is not None:
            raise Refuse(f"{what}: {refusal.reason}")
        return Site(tuple(found.steps), what, found, needs=(found.source,))

    def rewrite(self, site: Site, edit: Editor) -> None:
        found: DecomposedActivation = site.detail
        activation, root = found.activation, found.root
        exported = isinstance(root.target, torch._ops.OpOverload)
        target = activation.operator if exported else activation.function
        fused = edit.call(root, target, found.source, **activation.settings)
        edit.replace_uses(root, fused)
        edit.erase_unused([root])


def _check(view: GraphView, found: DecomposedActivation) -> None:
    first, inside = found.steps[0], set(found.steps)
    others = [user.name for node in found.steps[:-1] for user in node.users if user not in inside]
    if others:
        raise Refuse(f"{others[0]} reads a part of it")
    if not _is_floating_point(view, found.source):
        raise Refuse("it is not known whether its input is floating-point")
    unchanged_between(view, found.source, first, found.root)


def _is_floating_point(view: GraphView, source: Node) -> bool:
    recorded = example_value(source)
    if recorded is not None:
        return recorded.is_floating_point()
    return any(isinstance(attempt(table.match, view, source), Call) for table in (LINEAR, CONVOLUTION))
