"""What authors of transformations use: Transformation, Rewrite, Editor, operators, refusals."""

from refold.graph.view import Call, GraphView, Operand
from refold.rewrite.composition import compose
from refold.rewrite.editor import Editor
from refold.rewrite.operators import (
    ADDMM,
    AVERAGE_POOL,
    BATCH_NORM,
    CONVOLUTION,
    DROPOUT,
    LINEAR,
    PAD,
    TRANSPOSED_CONVOLUTION,
    UPSAMPLE,
    Attention,
    Division,
    Operator,
    match_attention,
    match_division,
)
from refold.rewrite.refusal import (
    Refuse,
    attempt,
    holds,
    movable,
    only_reader,
    own,
    plain,
    sliceable,
    unchanged_between,
)
from refold.rewrite.registry import registered
from refold.rewrite.rule import ReversibleRewrite, Rewrite, Site, Skip
from refold.rewrite.transformation import ReversibleTransformation, Transformation

__all__ = [
    "ADDMM", "AVERAGE_POOL", "BATCH_NORM", "CONVOLUTION", "DROPOUT", "LINEAR", "PAD", "TRANSPOSED_CONVOLUTION",
    "UPSAMPLE", "Attention", "Call", "Division", "Editor", "GraphView", "Operand", "Operator", "Refuse",
    "ReversibleRewrite", "ReversibleTransformation", "Rewrite", "Site", "Skip", "Transformation", "attempt", "compose",
    "holds", "match_attention", "match_division", "movable", "only_reader", "own", "plain", "registered", "sliceable",
    "unchanged_between",
]  # fmt: skip
