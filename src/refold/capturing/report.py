"""What capture did with a model, as plain data and as text."""

from __future__ import annotations

import dataclasses
from typing import Any

from refold.capturing.raising import Refusal


@dataclasses.dataclass(frozen=True)
class CaptureReport:
    """How a model was captured, what is dynamic, what stayed as ATen ops and why, and what to know about it.

    ``dynamic`` holds, for each input, the dimensions in which another size was tried and gave the model's own result.
    A partial capture names its ``parts`` and the ``share`` of the parameters inside them. ``asked`` holds the settings
    of `refold.trace` that must be given again for the same graph.
    """

    model: str
    method: str
    dynamic: dict[str, tuple[int, ...]]
    sizes_tried: tuple[str, ...]
    raised: tuple[str, ...]
    refused: tuple[Refusal, ...]
    twins: tuple[str, ...]
    unread: tuple[str, ...]
    regions_inlined: int
    checks_dropped: int
    devices_unpinned: int
    nodes: int
    training: bool
    notes: tuple[str, ...]
    attempts: tuple[str, ...]
    seconds: dict[str, float]
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
            f"  modules: {len(self.raised)} calls, {len(self.refused)} left as ATen ops, {len(self.twins)} split",
            f"  dynamic: {opened}; compared bit for bit on {', '.join(self.sizes_tried)}",
        ]
        if self.parts:
            lines.append(f"  in part: {', '.join(self.parts)} ({100 * self.share:.0f} % of the parameters)")
        lines += [f"  not raised: {refusal}" for refusal in self.refused]
        lines += [f"  note: {note}" for note in self.notes]
        lines += [f"  note: left out of the result: {what}" for what in self.left_out]
        lines += [f"  tried before: {attempt}" for attempt in self.attempts]
        return "\n".join(lines)
