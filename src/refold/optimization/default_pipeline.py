"""Which transformations are tried, and in which order."""

from __future__ import annotations

from collections.abc import Iterable

import torch

from refold.errors import BadLevel
from refold.rewrite.composition import flat
from refold.rewrite.transformation import Transformation, check_transformation
from refold.transformations.channels_last import ChannelsLast
from refold.transformations.eliminate_common_subexpressions import EliminateCommonSubexpressions
from refold.transformations.fold_batch_norm import FoldBatchNorm
from refold.transformations.fold_constants import FoldConstants
from refold.transformations.fold_padding import FoldPadding
from refold.transformations.fuse_activations import FuseActivations
from refold.transformations.fuse_attention import FuseAttention
from refold.transformations.merge_convolutions import MergeConvolutions
from refold.transformations.merge_linears import MergeLinears
from refold.transformations.merge_lora import MergeLora
from refold.transformations.pool_by_mean import PoolByMean
from refold.transformations.remove_no_ops import RemoveNoOps
from refold.transformations.remove_padding import RemovePadding
from refold.transformations.select_early import SelectEarly
from refold.transformations.simplify_attention_mask import SimplifyAttentionMask
from refold.transformations.split_upsampling import SplitUpsampling

LEVELS = ("safe", "default")


def default_pipeline(level: str = "default") -> tuple[Transformation, ...]:
    """The transformations that are tried. All levels try the same ones; `safe` keeps only what leaves every output
    bit-identical."""
    if level not in LEVELS:
        raise BadLevel(f"level must be one of {', '.join(LEVELS)}, not {level!r}.")
    return (
        RemoveNoOps(),
        FuseActivations(),
        FuseAttention(),
        SimplifyAttentionMask(),
        EliminateCommonSubexpressions(),
        FoldConstants(),
        FoldBatchNorm(),
        FoldPadding(),
        SplitUpsampling(),
        PoolByMean(),
        SelectEarly(),
        MergeLora(),
        MergeLinears(),
        MergeConvolutions(),
        ChannelsLast(),
    )


def chosen_pipeline(
    level: str, pipeline: Iterable[Transformation] | Transformation | None
) -> tuple[Transformation, ...]:
    """The user's own pipeline, or the level's. A single transformation is one, too, and a composition is its parts."""
    if pipeline is None:
        return default_pipeline(level)
    default_pipeline(level)  # an unknown level is a mistake even where it names no pipeline
    if not isinstance(pipeline, Iterable):
        return tuple(flat([check_transformation(pipeline)]))
    return tuple(check_transformation(t) for t in pipeline)


def usual_for(
    transformations: tuple[Transformation, ...], device: torch.device, effort: str
) -> tuple[Transformation, ...]:
    """The usual transformations as they are for inference: what depends on weights alone is computed once. And
    RemovePadding, but not where there is time for the plain graph alone on a GPU: there, packed batches run fast only
    by graphs that are compiled and recorded for them."""
    usual = tuple(FoldConstants(parameters=True) if t == FoldConstants() else t for t in transformations)
    return usual if device.type == "cuda" and effort == "quick" else (*usual, RemovePadding())
