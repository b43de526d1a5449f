"""Refold: rewrite PyTorch graphs to make them faster, and always get the original back, bit for bit."""

from refold._version import __version__
from refold.errors import (
    BrokenTransformation,
    GraphEdited,
    NotAGraphModule,
    NotATransformation,
    NothingToUndo,
    OutOfOrder,
    RefoldError,
    ReverseMismatch,
    WeightsChanged,
    WeightsMissing,
)
from refold.explaining import explain
from refold.history import History, attach, commit, detach, history, undo
from refold.result import Result, result
from refold.transformation import (
    DeepCopy,
    LintAndRecompile,
    ReversibleTransformation,
    Transformation,
    compose,
)
from refold.transformations.change_true_div_to_mul_by_inverse import ChangeTrueDivToMulByInverse
from refold.transformations.fuse_batch_norm_1d_in_linear import FuseBatchNorm1dInLinear
from refold.transformations.fuse_batch_norm_2d_in_conv_2d import FuseBatchNorm2dInConv2d
from refold.transformations.fuse_bias_in_linear import FuseBiasInLinear
from refold.transformations.merge_linears import MergeLinears

__all__ = [
    "BrokenTransformation",
    "ChangeTrueDivToMulByInverse",
    "DeepCopy",
    "FuseBatchNorm1dInLinear",
    "FuseBatchNorm2dInConv2d",
    "FuseBiasInLinear",
    "GraphEdited",
    "History",
    "LintAndRecompile",
    "MergeLinears",
    "NotAGraphModule",
    "NotATransformation",
    "NothingToUndo",
    "OutOfOrder",
    "RefoldError",
    "Result",
    "ReverseMismatch",
    "ReversibleTransformation",
    "Transformation",
    "WeightsChanged",
    "WeightsMissing",
    "__version__",
    "attach",
    "commit",
    "compose",
    "detach",
    "explain",
    "history",
    "result",
    "undo",
]
