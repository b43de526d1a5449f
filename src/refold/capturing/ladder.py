"""The ladder: one way of capturing after the other, each result compared with the model, until one stands."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import nn

from refold.capturing.classic import capture_classic
from refold.capturing.errors import CaptureError, NeverCapturable
from refold.capturing.explaining import Failure, steered_by_values
from refold.capturing.hidden_export import hidden_export
from refold.capturing.module import Captured
from refold.capturing.restoring import SWITCHES
from refold.capturing.whole import PLAIN_EXPORT, NotCaptured, Way, capture_whole
from refold.quiet import quiet

_TRACER_LOG = "torch.fx.experimental.symbolic_shapes"
_FIXED = "with values that steer Python fixed or opened"


def climb(
    model: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any], dynamic: Any, whole_result: bool = False
) -> Captured:
    """torch.export; the same of what calls run, where export runs other code; under the patches of transformers'
    exporter; classic fx. Raises with all reasons."""
    switches: Mapping[str, Any] = {} if whole_result else SWITCHES
    try:
        with quiet(_TRACER_LOG):  # what it logs of attempts that fail is in the error that names them all
            return _climb(model, args, kwargs, dynamic, switches)
    except NeverCapturable as error:
        raise NeverCapturable(
            f"{type(model).__name__} cannot be captured: {error}. What to try: on_failure='partial' captures the "
            "largest parts that can be and leaves the rest eager; submodule='...' captures one part."
        ) from error


def _climb(
    model: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any], dynamic: Any, switches: Mapping[str, Any]
) -> Captured:
    failures: list[Failure] = []
    cause: BaseException | None = None
    steered = mismatched = False
    for way in _ways(model):
        if (way.fixes_values and not steered) or (way.after_mismatch and not mismatched):
            continue
        try:
            return capture_whole(model, args, kwargs, dynamic, way, failures, switches)
        except NotCaptured as failed:
            cause = cause or failed.cause
            steered = failed.cause is not None and steered_by_values(failed.cause)
            mismatched = failed.mismatched
    try:
        return capture_classic(model, args, kwargs, dynamic, failures, switches)
    except NotCaptured:
        raise _error(model, failures) from cause


def _ways(model: nn.Module) -> Iterator[Way]:
    yield PLAIN_EXPORT
    yield Way(f"{PLAIN_EXPORT.name} of what calls run", hidden_export, after_mismatch=True)
    yield dataclasses.replace(PLAIN_EXPORT, name=f"{PLAIN_EXPORT.name} {_FIXED}", fixes_values=True)
    if _transformers_can_patch(model):
        patched = Way(f"{PLAIN_EXPORT.name} with the patches of transformers.exporters", _patched)
        yield patched
        yield dataclasses.replace(patched, name=f"{patched.name} and {_FIXED}", fixes_values=True)


def _transformers_can_patch(model: nn.Module) -> bool:
    try:
        from transformers import PreTrainedModel
        from transformers.exporters import exporter_dynamo  # noqa: F401
    except ImportError:
        return False
    return any(isinstance(m, PreTrainedModel) for m in model.modules())


@contextmanager
def _patched(model: nn.Module) -> Iterator[None]:
    """What transformers.exporters.DynamoExporter puts around an export, without what it does to the inputs.

    Its own ``export`` also computes values from the example (sequence lengths, window indices) and makes them inputs;
    a graph that needs them would not be called as the model is.
    """
    from transformers import masking_utils
    from transformers.exporters import exporter_dynamo, utils

    with ExitStack() as stack:
        stack.enter_context(utils.apply_patches("dynamo"))
        stack.enter_context(exporter_dynamo.reset_model_state(model))
        if hasattr(masking_utils, "_vmap_expansion_sdpa"):  # its graphs do not run outside vmap
            patch = (masking_utils, "_vmap_expansion_sdpa", lambda _original: _broadcast_mask)
            stack.enter_context(utils.patch_attributes([patch]))
        yield


def _broadcast_mask(mask_function: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    """A mask from a function of indices, by broadcasting instead of vmap (the other exporters do so too)."""

    def expanded(batch: torch.Tensor, head: torch.Tensor, query: torch.Tensor, key: torch.Tensor) -> torch.Tensor:
        places = (
            batch[:, None, None, None],
            head[None, :, None, None],
            query[None, None, :, None],
            key[None, None, None],
        )
        return mask_function(*places).expand(batch.shape[0], head.shape[0], query.shape[0], key.shape[0])

    return expanded


def _error(model: nn.Module, failures: Sequence[Failure]) -> CaptureError:
    first = failures[0]
    where = f" at {first.where}" if first.where else ""
    others = "".join(f"\n  {failure}" for failure in failures[1:])
    return CaptureError(
        f"{type(model).__name__} could not be captured{where}: {first.why}. What to try: refold.trace with "
        "on_failure='partial' captures the largest parts that can be and leaves the rest eager, with submodule='...' "
        "one part; change that line so that no tensor value steers Python, if the model is yours."
        + (f"\nAlso tried:{others}" if others else "")
    )
