"""An export that the model does not notice.

Some models run other code while they are exported, for the sake of export targets that lack an operation (the gated
delta rule of Qwen 3.5: a loop instead of a triangular solver). That code rounds otherwise than what their calls run,
so no graph of it is the model. They learn of the export from `torch.compiler.is_exporting`.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import nn


@contextmanager
def hidden_export(_model: nn.Module) -> Iterator[None]:
    """Inside, `torch.compiler.is_exporting` tells the truth to torch alone."""
    is_exporting = torch.compiler.is_exporting

    def answer() -> bool:
        asking = sys._getframe(1).f_globals.get("__name__", "")
        return asking.partition(".")[0] == "torch" and is_exporting()

    torch.compiler.is_exporting = answer
    try:
        yield
    finally:
        torch.compiler.is_exporting = is_exporting
