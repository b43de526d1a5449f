"""A way to run a model that was built for one input signature, and whether it still computes what the model does."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.fx import GraphModule

from refold.executors import Checked, Signature, UnsupportedInput, run_checked
from refold.optimizing.all_ones import AllOnes
from refold.optimizing.freshness import Freshness
from refold.optimizing.sameness import Sameness
from refold.report.data import Report


@dataclass
class Variant:
    """One of the ways of an optimized model."""

    signature: Signature
    graph_module: GraphModule | None
    run: Callable[..., Any]
    executor: str
    freshness: Freshness
    report: Report
    all_ones: AllOnes | None = None
    sameness: Sameness | None = None
    other_values: Callable[[tuple[Any, ...], dict[str, Any]], str | None] | None = None
    """Why the values of inputs that steer the model's code are not those that it was built for."""
    looks_first: bool = field(init=False)
    """Whether the model is looked at before a call is run, and not while it computes."""

    def __post_init__(self) -> None:
        ways = [self.run] if self.all_ones is None else [self.run, self.all_ones.run]
        self.looks_first = not all(_hides_looks(way, self.freshness.watches) for way in ways)

    def run_checked(self, tensors: list[torch.Tensor], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run a call whose tensors the signature has checked already. `UnsupportedInput` says why it cannot stand for
        the model in this call; nothing was done then that anybody could see."""
        if self.other_values is not None:
            _refuse(self.other_values(args, kwargs))
        if self.looks_first:
            _refuse(self.why_changed())
            return run_checked(self._way(tensors), tensors, args, kwargs)
        way: Any = self._way(tensors)
        output, reason = way.run_while(self.why_changed, tensors, args, kwargs)
        if reason is not None:
            self.looks_first = True  # nothing is computed in vain a second time
            raise UnsupportedInput(reason)
        return output

    def why_changed(self) -> str | None:
        """Why the model is not the one that it was built from any more; None if it is."""
        if self.sameness is not None and (reason := self.sameness.why_not()):
            return reason
        return None if self.freshness.is_fresh() else "weights of the original were changed since it was optimized"

    def _way(self, tensors: list[torch.Tensor]) -> Callable[..., Any]:
        special = self.all_ones
        return self.run if special is None or not special.applies(tensors) else special.run


def _hides_looks(way: Callable[..., Any], weights: int) -> bool:
    least = way.hides_looks_from if isinstance(way, Checked) else None
    return least is not None and weights >= least


def _refuse(reason: str | None) -> None:
    if reason is not None:
        raise UnsupportedInput(reason)
