"""The fused inference path of nn.TransformerEncoder, switched off: a graph holds the modules as they are written."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch


@contextmanager
def without_fast_path() -> Iterator[None]:
    """Inside, attention modules run as they are written."""
    enabled = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(False)
    try:
        yield
    finally:
        torch.backends.mha.set_fastpath_enabled(enabled)
