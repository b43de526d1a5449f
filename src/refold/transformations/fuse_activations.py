"""FuseActivations: GELU, SiLU and their like, written out in arithmetic, become torch's own operators."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch.fx import Node

from refold.activation_pattern import WrittenActivation, match_written_activation
from refold.aliasing import writes_to
from refold.edit import Editor
from refold.match import Call, GraphView, example_value, match_conv, match_linear
from refold.purity import erase_dead
from refold.rewrite import Example, ReversibleRewrite, Site, Skip


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
            found = match_written_activation(view, node) if node not in taken else None
            if found is None or found.source in taken:  # what it reads goes first; the next round sees it again
                continue
            what = f"{found.activation.function.__name__} of {found.source.name}"
            reason = _why_not(view, found)
            if reason is not None:
                yield Skip(found.root, f"{what}: {reason}")
                continue
            taken.update(found.steps)
            yield Site(tuple(found.steps), what, found)

    def rewrite(self, site: Site, edit: Editor) -> None:
        found: WrittenActivation = site.detail
        activation, root = found.activation, found.root
        exported = isinstance(root.target, torch._ops.OpOverload)
        target = activation.operator if exported else activation.function
        fused = edit.call(root, target, found.source, **activation.settings)
        edit.replace_uses(root, fused)
        erase_dead(edit, [root])
        self.mark_as_transformed(fused)


def _why_not(view: GraphView, found: WrittenActivation) -> str | None:
    first, inside = found.steps[0], set(found.steps)
    others = [user.name for node in found.steps[:-1] for user in node.users if user not in inside]
    if others:
        return f"{others[0]} reads a part of it"
    if not _is_floating_point(view, found.source):
        return "it is not known whether its input is floating-point"
    if view.mode_switches_between(first, found.root):
        return "gradients, autocast or inference mode is switched inside it"
    writer = writes_to(view.gm, found.source, view.writers_between(first, found.root))
    return f"{writer.name} writes into its input in between" if writer is not None else None


def _is_floating_point(view: GraphView, source: Node) -> bool:
    noted = example_value(source)
    if noted is not None:
        return noted.is_floating_point()
    return any(isinstance(match, Call) for match in (match_linear(view, source), match_conv(view, source)))
