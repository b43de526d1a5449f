"""Capture strategies: one after the other, each result compared with the model, until one succeeds."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import nn

from refold.capture.captured import Captured
from refold.capture.export_capture import ExportCapture, Strategy
from refold.capture.export_program import hide_export
from refold.capture.failure import Failure, depends_on_values
from refold.capture.forward_call import bind_call
from refold.capture.model_state import SWITCHES, switched
from refold.capture.proof import has_no_values
from refold.errors import CaptureError, CaptureMismatch, NeverCapturable
from refold.wording import quiet

_TRACER_LOG = "torch.fx.experimental.symbolic_shapes"
_FIXED = "with data-dependent control flow fixed or opened"


def capture_model(
    model: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any], dynamic: Any, whole_result: bool = False
) -> Captured:
    """The model as a graph, by the first strategy whose graph gives the model's own results.

    They are: torch.export; the same of what calls run, where export runs other code; the same with values fixed that
    control flow depends on; and under the patches of transformers' exporter. An error names every reason.
    """
    switches: Mapping[str, Any] = {} if whole_result else SWITCHES
    try:
        with quiet(_TRACER_LOG):  # what it logs of attempts that fail is in the error that names them all
            return _try_strategies(model, args, kwargs, dynamic, switches)
    except NeverCapturable as error:
        raise NeverCapturable(
            f"{type(model).__name__} cannot be captured: {error}. What to try: on_failure='partial' captures the "
            "largest parts that can be and leaves the rest eager; submodule='...' captures one part."
        ) from error


def _try_strategies(
    model: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any], dynamic: Any, switches: Mapping[str, Any]
) -> Captured:
    failures: list[Failure] = []
    data_dependent = mismatched = False
    with switched(model, switches) as changed:
        call, leaves = bind_call(model, args, kwargs, switches)
        leaves = [leaf.to("meta") for leaf in leaves] if has_no_values(model) else leaves
        for strategy in _strategies(model):
            if (strategy.fixes_values and not data_dependent) or (strategy.after_mismatch and not mismatched):
                continue
            before = len(failures)
            captured = ExportCapture(model, call, leaves, strategy, changed, failures).capture(dynamic)
            if captured is not None:
                return captured
            data_dependent = depends_on_values(failures[before].error)
            mismatched = any(isinstance(failure.error, CaptureMismatch) for failure in failures[before:])
    raise _error(model, failures) from failures[0].error


def _strategies(model: nn.Module) -> Iterator[Strategy]:
    plain = Strategy("torch.export")
    yield plain
    yield Strategy(f"{plain.name} of what calls run", hide_export, after_mismatch=True)
    yield dataclasses.replace(plain, name=f"{plain.name} {_FIXED}", fixes_values=True)
    if _transformers_can_patch(model):
        patched = Strategy(f"{plain.name} with the patches of transformers.exporters", _patched)
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
        "one part; change that line so that control flow depends on no tensor's value, if the model is yours."
        + (f"\nAlso tried:{others}" if others else "")
    )
