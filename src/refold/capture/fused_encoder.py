"""The nested-tensor fast path of nn.TransformerEncoder: with padding it gives other results than its modules.

Under ``no_grad`` the encoder makes nested tensors of padded rows and gives zeros at padded positions, which its
modules, and so a graph of them, do not. Whether a model's results depend on it is found with a mask that hides
something.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext, suppress
from typing import Any

import torch
from torch import nn

from refold.capture.forward_call import ForwardCall
from refold.capture.proof import CallResult, run
from refold.errors import NeverCapturable

_FUSED = (nn.TransformerEncoder, nn.TransformerEncoderLayer, nn.MultiheadAttention)
_MASK = "src_key_padding_mask"
_REMEDY = (
    ": make the nn.TransformerEncoder with enable_nested_tensor=False, or switch its fast path off with "
    "torch.backends.mha.set_fastpath_enabled(False)"
)


def check_fast_path(model: nn.Module, call: ForwardCall, leaves: Sequence[torch.Tensor]) -> None:
    """Raise where calls without gradients give something else than the modules they are written with."""
    if not has_fast_path(model):
        return
    with watching_masks(model) as masks:
        fused = run(model, call, leaves, fast_path=True)
    if not agree(fused, run(model, call, leaves)):
        raise NeverCapturable(f"the fast path of torch's attention modules gives other results than they do{_REMEDY}")
    if not masks:
        return
    padding = _with_padding(model, call, leaves)
    with nullcontext() if padding else watching_masks(model, hide=True):
        fused, plain = (run(model, call, padding or leaves, fast_path=on) for on in (True, False))
    if not agree(fused, plain):
        raise NeverCapturable(
            "an nn.TransformerEncoder is given a padding mask, and the nested tensors of its fast path give zeros in "
            f"padded places, which no graph does{_REMEDY}"
        )


def _with_padding(model: nn.Module, call: ForwardCall, leaves: Sequence[torch.Tensor]) -> list[torch.Tensor] | None:
    """The example with one input changed such that a padding mask hides the last position of the first row."""
    for i, leaf in enumerate(leaves):
        for value in (0, 1) if leaf.dim() == 2 and not leaf.is_floating_point() else ():
            changed = leaf.clone()
            changed[0, -1] = value
            tried = [*leaves[:i], changed, *leaves[i + 1 :]]
            with watching_masks(model) as masks, suppress(Exception):
                run(model, call, tried)
            if any(_hides_only_last(mask[0]) for mask in masks):
                return tried
    return None


def _hides_only_last(row: torch.Tensor) -> bool:
    hidden = row if row.dtype == torch.bool else row == -torch.inf
    return bool(hidden[-1]) and not bool(hidden[0])


def has_fast_path(model: nn.Module) -> bool:
    """Whether a call of the model, as it is set now, may run fused code."""
    enabled = torch.backends.mha.get_fastpath_enabled()
    return enabled and any(isinstance(m, _FUSED) and not m.training for m in model.modules())


def agree(one: CallResult, other: CallResult) -> bool:
    """Whether two calls gave the same but for rounding."""
    (_, some), (_, others) = one.result, other.result
    return len(some) == len(others) and all(map(_close, some, others))


def _close(one: Any, other: Any) -> bool:
    """Equal to half of the digits, as the same computation in another order is."""
    if not isinstance(one, torch.Tensor) or not one.is_floating_point():
        return bool(torch.equal(one, other)) if isinstance(one, torch.Tensor) else one == other
    precision = torch.finfo(one.dtype).eps ** 0.5
    scale = float(one.nan_to_num(0, 0, 0).abs().max()) if one.numel() else 0.0
    return one.shape == other.shape and torch.allclose(one, other, precision, precision * scale, equal_nan=True)


@contextmanager
def watching_masks(model: nn.Module, hide: bool = False) -> Iterator[list[torch.Tensor]]:
    """Inside, the padding masks that encoders with nested tensors are given. With ``hide``, they are given others:
    masks that hide the last position of the first row."""
    masks: list[torch.Tensor] = []

    def hook(_module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        given = dict(zip(("src", "mask", _MASK), args, strict=False)) | kwargs
        mask = given.get(_MASK)
        if mask is None or mask.dim() != 2 or mask.shape[1] < 2:
            return None
        masks.append(mask)
        hiding = torch.zeros_like(mask)
        hiding[0, -1] = True if mask.dtype == torch.bool else -torch.inf
        return ((given.pop("src"),), given | {_MASK: hiding}) if hide else None

    with ExitStack() as stack:
        for module in model.modules():
            if isinstance(module, nn.TransformerEncoder) and getattr(module, "use_nested_tensor", True):
                stack.enter_context(module.register_forward_pre_hook(hook, with_kwargs=True))
        yield masks
