"""The kinds of weight maps, one idea a file: structural ones only move numbers, parametric ones compute with them."""

from refold.weights.batch_norm_maps import FoldBatchNormInLayer
from refold.weights.map_operation import NoInverse, Operation, Tensors
from refold.weights.parametric import AddLowRank, Scale
from refold.weights.structural import (
    AppendColumn,
    Concatenate,
    ConcatenateBlocks,
    Constant,
    Fill,
    Pad,
    Permute,
    Rename,
    Reshape,
    Slice,
    Transpose,
)
from refold.weights.upsampling_map import SumTaps

__all__ = [
    "AddLowRank",
    "AppendColumn",
    "Concatenate",
    "ConcatenateBlocks",
    "Constant",
    "Fill",
    "FoldBatchNormInLayer",
    "NoInverse",
    "Operation",
    "Pad",
    "Permute",
    "Rename",
    "Reshape",
    "Scale",
    "Slice",
    "SumTaps",
    "Tensors",
    "Transpose",
]
