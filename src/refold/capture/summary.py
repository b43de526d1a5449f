"""What capture did with a model, as plain data and as text."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from torch import nn

from refold.capture.module_calls import NotRaised


@dataclasses.dataclass(frozen=True, kw_only=True)
class CaptureReport:
    """How a model was captured, what is dynamic, what stayed as ATen ops and why, and what to know about it.

    ``dynamic`` holds, for each input, the dimensions in which another size was tried and gave the model's own result,
    ``sizes`` what is fixed or narrowed beyond that, and why.
    ``split`` names the modules of which the operator of their torch.nn base class became a module call and the rest
    stayed as ATen ops. ``device_independent`` counts the nodes that follow the device of the inputs.
    A partial capture names its ``parts`` and the ``share`` of the parameters inside them. ``asked`` holds the settings
    of `refold.trace` that must be given again for the same graph.
    """

    model: str
    method: str
    nodes: int
    training: bool
    seconds: dict[str, float]
    dynamic: dict[str, tuple[int, ...]] = dataclasses.field(default_factory=dict)
    sizes: tuple[str, ...] = ()
    sizes_tried: tuple[str, ...] = ("the example",)
    raised: tuple[str, ...] = ()
    refused: tuple[NotRaised, ...] = ()
    split: tuple[str, ...] = ()
    unread: tuple[str, ...] = ()
    device_independent: int = 0
    notes: tuple[str, ...] = ()
    attempts: tuple[str, ...] = ()
    left_out: tuple[str, ...] = ()
    asked: dict[str, Any] = dataclasses.field(default_factory=dict)
    parts: tuple[str, ...] = ()
    share: float = 1.0

    @property
    def complete(self) -> bool:
        """Whether every leaf module that was called is a module call in the graph."""
        return not self.refused

    def __str__(self) -> str:
        opened = ", ".join(f"{name} {list(dims)}" for name, dims in self.dynamic.items() if dims) or "nothing"
        lines = [
            f"{self.model}: captured by {self.method} in {sum(self.seconds.values()):.2f} s, {self.nodes} nodes",
            f"  modules: {len(self.raised)} calls, {len(self.refused)} left as ATen ops, {len(self.split)} split",
            f"  dynamic: {opened}; compared bit for bit on {', '.join(self.sizes_tried)}",
        ]
        if self.parts:
            lines.append(f"  in part: {', '.join(self.parts)} ({100 * self.share:.0f} % of the parameters)")
        lines += [f"  not raised: {refusal}" for refusal in self.refused]
        lines += [f"  size: {size}" for size in self.sizes]
        lines += [f"  note: {note}" for note in self.notes]
        lines += [f"  note: left out of the result: {what}" for what in self.left_out]
        lines += [f"  tried before: {attempt}" for attempt in self.attempts]
        return "\n".join(lines)


def report_of_parts(model: nn.Module, parts: Mapping[str, CaptureReport], attempt: str) -> CaptureReport:
    """One report on a model of which only these parts could be captured, after a failed attempt on all of it."""
    inside = {id(p) for path in parts for p in model.get_submodule(path).parameters()}
    sizes = {id(p): p.numel() for p in model.parameters()}
    return CaptureReport(
        model=type(model).__name__,
        method="partial",
        nodes=sum(r.nodes for r in parts.values()),
        training=model.training,
        seconds={path: sum(r.seconds.values()) for path, r in parts.items()},
        raised=tuple(f"{path}.{name}" for path, r in parts.items() for name in r.raised),
        refused=tuple(refusal for r in parts.values() for refusal in r.refused),
        split=tuple(f"{path}.{name}" for path, r in parts.items() for name in r.split),
        device_independent=sum(r.device_independent for r in parts.values()),
        notes=tuple(f"{path}: {note}" for path, r in parts.items() for note in r.notes),
        attempts=(attempt,),
        parts=tuple(parts),
        share=sum(n for i, n in sizes.items() if i in inside) / max(sum(sizes.values()), 1),
    )
