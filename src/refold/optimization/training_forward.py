"""Training without padding: a model's calls run a graph of its own parameters on the real tokens of a batch alone."""

from __future__ import annotations

import copy
import functools
import types
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.fx import GraphModule

from refold.call_arguments import CallArguments
from refold.capture.captured import why_refused
from refold.capture.tracing import trace
from refold.errors import RefoldError, UnsupportedInput
from refold.executors import InputSpec
from refold.graph.purity import drops_at_random
from refold.optimization.fallbacks import Fallbacks
from refold.optimization.spelling import Spelling
from refold.optimization.watch import Watch
from refold.record.outcome import result
from refold.record.stack import history
from refold.report.data import Calls
from refold.transformations.fuse_attention import FuseAttention
from refold.transformations.remove_no_ops import RemoveNoOps
from refold.transformations.remove_padding import RemovePadding
from refold.verification.verifier import verify_last

_WAY_OUT = "The graph is made for the first call in training mode; call .restore() and train_without_padding again"
_PLACE = "_refold_training"
"""Where a model keeps what its forward runs."""
_NO_MASK = "no input of this call is a mask that some of the work can be left out by"


def train_without_padding(model: nn.Module, *, padding: str = "exact", on_fallback: str = "warn") -> TrainingForward:
    """Let a model leave padding out while it trains: its forward is replaced, and it stays the same object.

    The first call in training mode captures the model as it is called there, leaves padding out (`RemovePadding`), and
    verifies that; it raises `RefoldError`, with the reason, where that cannot be done. In eval mode the model's own
    code runs, on the same parameters. `padding="zeros"` says that nobody reads outputs at padding: they are zeros there
    while the model trains. Calls that the graph does not take run the model's own code, with a `FellBack` warning once
    for each reason. What comes back counts the calls, and `.restore()` gives the model its own forward again.
    """
    if padding not in ("exact", "zeros"):
        raise RefoldError(f"padding must be 'exact', or 'zeros' for outputs that are not read there, not {padding!r}.")
    if vars(model).get(_PLACE) is not None:
        raise RefoldError("the model leaves padding out already; call .restore() on what was returned for it first.")
    training = TrainingForward(model, padding, model.forward, Fallbacks(on_fallback, _WAY_OUT))

    def forward(model: nn.Module, *args: Any, **kwargs: Any) -> Any:
        return vars(model)[_PLACE](*args, **kwargs)  # of the model that is called, which may be a copy

    functools.update_wrapper(forward, getattr(model.forward, "__func__", model.forward))
    vars(model)[_PLACE] = training
    model.forward = types.MethodType(forward, model)
    return training


class TrainingForward:
    """The forward of a model: a graph without padding in training mode, and the model's own code elsewhere."""

    def __init__(self, model: nn.Module, padding: str, original: Callable[..., Any], fallbacks: Fallbacks) -> None:
        self.model, self.padding, self.original = model, padding, original
        self.graph_module: GraphModule | None = None
        """The graph that runs, with its history; None until the first call in training mode."""
        self._own = vars(model).get("forward")
        self._fallbacks = fallbacks

    @property
    def calls(self) -> Calls:
        """How many calls in training mode left padding out, and why others did not."""
        return self._fallbacks.calls()

    def restore(self) -> nn.Module:
        """Give the model its own forward again. Its parameters are those that were trained."""
        vars(self.model).pop("forward", None)
        vars(self.model).pop(_PLACE, None)
        if self._own is not None:
            self.model.forward = self._own
        return self.model

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if not self.model.training:
            return self.original(*args, **kwargs)
        if self.graph_module is None:
            self._capture(args, kwargs)
        try:
            args, kwargs = self._taken(args, kwargs)
        except UnsupportedInput as unsupported:
            self._fallbacks.count(str(unsupported), is_expected=False)
            return self.original(*args, **kwargs)
        self._fallbacks.count_fast()
        return self.graph_module(*args, **kwargs)  # type: ignore[misc]

    def __deepcopy__(self, memo: dict[int, Any]) -> TrainingForward:
        """A copy of the model leaves padding out by a graph of its own parameters."""
        model, original = copy.deepcopy((self.model, self.original), memo)  # the copy that this is made for
        copied = TrainingForward(model, self.padding, original, Fallbacks(self._fallbacks.policy, _WAY_OUT))
        copied._own = copy.deepcopy(self._own, memo)
        return copied

    def __reduce__(self) -> Any:
        """A model that is pickled is stored with its own forward."""
        return type(None), ()

    def _taken(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """A call in the spelling of the captured one; `UnsupportedInput` says why the graph does not take it."""
        args, kwargs = self._spelling.of(args, kwargs)
        self._spec.tensors(args, kwargs)
        reason = why_refused(self.graph_module, args, kwargs) or self._watch.why_changed()  # type: ignore[arg-type]
        if reason is not None:
            raise UnsupportedInput(reason)
        return args, kwargs

    def _capture(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        placed = vars(self.model).pop("forward")  # this, or what others have wrapped around it
        device = next((tensor.device.type for tensor in self.model.parameters()), "cpu")
        try:
            with torch.autocast(device, enabled=False):
                gm = _without_padding(self.model, args, kwargs, self.padding)
        finally:
            self.model.forward = placed
        self._spelling = Spelling(self.original, args, kwargs)
        self._spec = InputSpec.of(args, kwargs, open_sizes=True)
        self._watch = Watch([], gm, reads_live_weights=True).watch_modules(self.model)
        self.graph_module = gm


def _without_padding(model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], padding: str) -> GraphModule:
    """The model as a graph of its own modules and parameters, in which padding is left out."""
    gm = trace(model, *args, whole_result=True, **kwargs)
    why_not = [
        f"{n.name} drops values at random: set the model's dropout to 0"
        for n in gm.graph.nodes
        if drops_at_random(gm, n)
    ]
    if not why_not:
        RemoveNoOps()(gm)
        FuseAttention()(gm)
        RemovePadding(padding=padding)(gm)  # type: ignore[arg-type]
        found = result(gm)
        if found and verify_last(gm, CallArguments(args, kwargs), len(history(gm)), outputs=False).right:
            return gm
        why_not = [f"{r.node}: {r.reason}" for r in found.refused] or ["it did not verify" if found else _NO_MASK]
    raise RefoldError(
        f"Padding cannot be left out of {type(model).__name__} while it trains: {why_not[0]}. Call .restore() on what "
        "train_without_padding returned, and train the model as it is."
    )
