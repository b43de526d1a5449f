"""Refold: rewrite PyTorch graphs to make them faster, and always get the original back, bit for bit."""

import importlib
from typing import TYPE_CHECKING, Any

from refold._version import __version__
from refold.errors import (
    BrokenTransformation,
    CaptureError,
    GraphEdited,
    NotAGraphModule,
    NotATransformation,
    NothingToUndo,
    OutOfOrder,
    RefoldError,
    ReverseMismatch,
    WeightsChanged,
)
from refold.record.outcome import Result, result
from refold.record.reversal import undo
from refold.record.stack import History, attach, commit, detach, history
from refold.rewrite.composition import DeepCopy, LintAndRecompile, compose
from refold.rewrite.preview import explain
from refold.rewrite.transformation import ReversibleTransformation, Transformation
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
from refold.transformations.remove_padding import RemovePadding
from refold.transformations.select_early import SelectEarly
from refold.transformations.simplify_attention_mask import SimplifyAttentionMask
from refold.transformations.split_upsampling import SplitUpsampling

if TYPE_CHECKING:
    from refold.capture.tracing import (
        capture_report,
        captured_parts,
        original_model,
        symbolic_trace,
        trace,
        unread_parameters,
    )
    from refold.checkpoints.checkpoint_load import load_original_state_dict
    from refold.checkpoints.optimizer_state import carry_optimizer
    from refold.checkpoints.original_state import original_state_dict
    from refold.conversion.planning import plan
    from refold.measurement.timing import measure
    from refold.optimization.job_stages import optimize
    from refold.optimization.saved_models import load, save
    from refold.optimization.training_forward import train_without_padding
    from refold.verification.verdicts import Verification
    from refold.verification.verifier import verify

_LOADED_WHEN_USED = {
    "capture_report": "refold.capture.tracing",
    "captured_parts": "refold.capture.tracing",
    "original_model": "refold.capture.tracing",
    "symbolic_trace": "refold.capture.tracing",
    "trace": "refold.capture.tracing",
    "unread_parameters": "refold.capture.tracing",
    "load_original_state_dict": "refold.checkpoints.checkpoint_load",
    "original_state_dict": "refold.checkpoints.original_state",
    "carry_optimizer": "refold.checkpoints.optimizer_state",
    "measure": "refold.measurement.timing",
    "plan": "refold.conversion.planning",
    "optimize": "refold.optimization.job_stages",
    "load": "refold.optimization.saved_models",
    "save": "refold.optimization.saved_models",
    "train_without_padding": "refold.optimization.training_forward",
    "verify": "refold.verification.verifier",
    "Verification": "refold.verification.verdicts",
}
"""What takes long to import (capture, verification, executors, the report), by the module that defines it."""

_PACKAGES = (
    "capture",
    "checkpoints",
    "conversion",
    "executors",
    "extension",
    "optimization",
    "report",
    "saving",
    "testing",
)
"""Packages that are reached as attributes after `import refold` alone."""


def __getattr__(name: str) -> Any:
    if name in _PACKAGES:
        return importlib.import_module(f"refold.{name}")
    if name not in _LOADED_WHEN_USED:
        raise AttributeError(f"module 'refold' has no attribute {name!r}")
    value = globals()[name] = getattr(importlib.import_module(_LOADED_WHEN_USED[name]), name)
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *_LOADED_WHEN_USED})


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
    "RemovePadding",
    "Result",
    "ReverseMismatch",
    "ReversibleTransformation",
    "SelectEarly",
    "SimplifyAttentionMask",
    "SplitUpsampling",
    "Transformation",
    "Verification",
    "WeightsChanged",
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
    "plan",
    "result",
    "save",
    "symbolic_trace",
    "trace",
    "train_without_padding",
    "undo",
    "unread_parameters",
    "verify",
]
