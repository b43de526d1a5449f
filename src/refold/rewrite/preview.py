"""What a transformation would do and why not, without touching the graph."""

from __future__ import annotations

from torch.fx import GraphModule

from refold.errors import BrokenTransformation
from refold.record.copies import shared_copy
from refold.record.difference import difference
from refold.record.outcome import Result, result
from refold.record.snapshot import Snapshot
from refold.record.stack import check_graph_module
from refold.rewrite.composition import Composition
from refold.rewrite.rule import Rewrite
from refold.rewrite.transformation import Transformation, check_transformation


def explain(gm: GraphModule, transformation: Transformation) -> Result:
    """The result that a call of the transformation would have. The module is not touched."""
    check_graph_module(gm)
    check_transformation(transformation)
    if isinstance(transformation, Rewrite):
        return _explained(gm, transformation)
    copy = shared_copy(gm)
    if isinstance(transformation, Composition):
        transformation = Composition(*transformation.transformations)
    return result(transformation(copy, lint_and_recompile=False))


def _explained(gm: GraphModule, rewrite: Rewrite) -> Result:
    before = Snapshot.of(gm)
    try:
        said = rewrite.explain(gm)
        if difference(before, before.later_state(gm)) is not None:
            raise BrokenTransformation(f"the find of {rewrite!r} edits the module, and must only look at it.")
        return said
    except BaseException:
        before.restore(gm)
        raise
