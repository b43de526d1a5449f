"""A buffer that forward binds to another tensor (``self.h = ...``): in a graph it is a write into the buffer."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from refold.capturing.errors import CaptureError


class Buffers:
    """The buffers of a model before a call that is traced."""

    def __init__(self, model: nn.Module) -> None:
        self._before = [(path, m, dict(m._buffers)) for path, m in model.named_modules() if "_buffers" in vars(m)]

    def write_rebound(self, outputs: Sequence[Any]) -> tuple[Any, ...]:
        """Write the tensors that buffers are bound to into the buffers that were there before the call.

        Returns the outputs, with copies of those that the writes would change.
        """
        rebound = [
            (f"{path}.{name}".lstrip("."), module, name, old)
            for path, module, buffers in self._before
            for name, old in buffers.items()
            if old is not None and module._buffers.get(name) is not old
        ]
        written = {_memory(old) for *_, old in rebound}
        outputs = tuple(_apart(value, written) for value in outputs)
        values = [_apart(module._buffers.get(name), written) for _, module, name, _ in rebound]
        for (path, module, name, old), new in zip(rebound, values, strict=True):
            if new is None or new.shape != old.shape or new.dtype != old.dtype:
                raise CaptureError(f"its forward gives the buffer {path} another size or dtype, which a graph cannot")
            old.copy_(new)
            module._buffers[name] = old
        return outputs


def _apart(value: Any, written: set[int]) -> Any:
    return value.clone() if isinstance(value, torch.Tensor) and _memory(value) in written else value


def _memory(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage()._cdata
