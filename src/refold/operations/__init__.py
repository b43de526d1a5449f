"""The kinds of weight maps, one idea a file: structural ones only move numbers, parametric ones compute with them."""

from refold.operations.base import NoInverse, Operation, Tensors
from refold.operations.batch_norm import FoldBatchNorm
from refold.operations.constant import Constant
from refold.operations.low_rank import AddLowRank
from refold.operations.scale import Scale
from refold.operations.structural import AppendColumn, Concatenate, Fill, Pad, Reshape, Slice, Transpose

__all__ = [
    "AddLowRank",
    "AppendColumn",
    "Concatenate",
    "Constant",
    "Fill",
    "FoldBatchNorm",
    "NoInverse",
    "Operation",
    "Pad",
    "Reshape",
    "Scale",
    "Slice",
    "Tensors",
    "Transpose",
]
