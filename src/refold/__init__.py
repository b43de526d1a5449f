"""Refold: rewrite PyTorch graphs to make them faster, and always get the original back, bit for bit."""

from refold._version import __version__
from refold.capture import capture_report, captured_parts, original_model, symbolic_trace, trace, unread_parameters
from refold.capturing.errors import CaptureError
from refold.checkpoints import load_original_state_dict, original_state_dict
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
from refold.measure import measure
from refold.optimize import optimize
from refold.optimizers import carry_optimizer
from refold.result import Result, result
from refold.saving import load, save
from refold.transformation import (
    DeepCopy,
    LintAndRecompile,
    ReversibleTransformation,
    Transformation,
    compose,
)
from refold.transformations.change_true_div_to_mul_by_inverse import ChangeTrueDivToMulByInverse
from refold.transformations.channels_last import ChannelsLast
from refold.transformations.eliminate_common_subexpressions import EliminateCommonSubexpressions
from refold.transformations.fold_batch_norm import FoldBatchNorm
from refold.transformations.fold_constants import FoldConstants
from refold.transformations.fold_padding import FoldPadding
from refold.transformations.fuse_activations import FuseActivations
from refold.transformations.fuse_attention import FuseAttention
from refold.transformations.fuse_batch_norm_1d_in_linear import FuseBatchNorm1dInLinear
from refold.transformations.fuse_batch_norm_2d_in_conv_2d import FuseBatchNorm2dInConv2d
from refold.transformations.fuse_bias_in_linear import FuseBiasInLinear
from refold.transformations.merge_convolutions import MergeConvolutions
from refold.transformations.merge_linears import MergeLinears
from refold.transformations.merge_lora import MergeLora
from refold.transformations.pool_by_mean import PoolByMean
from refold.transformations.remove_no_ops import RemoveNoOps
from refold.transformations.simplify_attention_mask import SimplifyAttentionMask
from refold.verify import Verification, verify

__all__ = [
    "BrokenTransformation",
    "CaptureError",
    "ChangeTrueDivToMulByInverse",
    "ChannelsLast",
    "DeepCopy",
    "EliminateCommonSubexpressions",
    "FoldBatchNorm",
    "FoldConstants",
    "FoldPadding",
    "FuseActivations",
    "FuseAttention",
    "FuseBatchNorm1dInLinear",
    "FuseBatchNorm2dInConv2d",
    "FuseBiasInLinear",
    "GraphEdited",
    "History",
    "LintAndRecompile",
    "MergeConvolutions",
    "MergeLinears",
    "MergeLora",
    "NotAGraphModule",
    "NotATransformation",
    "NothingToUndo",
    "OutOfOrder",
    "PoolByMean",
    "RefoldError",
    "RemoveNoOps",
    "Result",
    "ReverseMismatch",
    "ReversibleTransformation",
    "SimplifyAttentionMask",
    "Transformation",
    "Verification",
    "WeightsChanged",
    "WeightsMissing",
    "__version__",
    "attach",
    "capture_report",
    "captured_parts",
    "carry_optimizer",
    "commit",
    "compose",
    "detach",
    "explain",
    "history",
    "load",
    "load_original_state_dict",
    "measure",
    "optimize",
    "original_model",
    "original_state_dict",
    "result",
    "save",
    "symbolic_trace",
    "trace",
    "undo",
    "unread_parameters",
    "verify",
]
