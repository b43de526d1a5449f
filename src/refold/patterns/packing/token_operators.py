"""The operators of packed graphs: which tokens of a call are real, packing and unpacking them, attention over them.

A batch of `rows` sequences on a grid of `length` positions is packed as one sequence of its real tokens: `kept` holds
their places on the grid, row by row. Where a call cannot be packed soundly, or has too little padding for it to pay,
`kept` holds all places, and the same graph computes densely. The operators are registered with torch when this file is
imported; packing and unpacking are made of torch's own operators, for any device, dtype and for gradients.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from refold.errors import RefoldError

_LIBRARY = torch.library.Library("refold", "DEF")
_SCHEMAS = {
    "token_plan": "(Tensor mask, SymInt rows, SymInt length, str side, float most, Tensor[] read_rows, "
    "Tensor[] read_positions) -> Tensor",
    "pack_tokens": "(Tensor x, Tensor kept, int row, int position) -> Tensor",
    "unpack_tokens": "(Tensor x, Tensor kept, SymInt rows, SymInt length, int row, int position) -> Tensor",
    "zero_padding": "(Tensor x, Tensor mask, int row, int position) -> Tensor",
    "attention_plan": "(Tensor? mask, Tensor kept, SymInt rows, SymInt length) -> (Tensor, Tensor)",
    "packed_attention": "(Tensor query, Tensor key, Tensor value, Tensor? mask, Tensor spans, Tensor masks, "
    "SymInt rows, SymInt length, bool is_causal=False, float? scale=None, bool enable_gqa=False) -> Tensor",
}
for _name, _schema in _SCHEMAS.items():
    _LIBRARY.define(f"{_name}{_schema}", tags=(torch.Tag.dynamic_output_shape,) if _name.endswith("_plan") else ())


# --- which tokens are real -------------------------------------------------------------------------------------------


def real_tokens(mask: Tensor) -> tuple[Tensor, Tensor]:
    """Where the tokens of a mask are real, as (rows, length) truths, and whether the mask says so without doubt.

    A mask of two dimensions is 1 at real tokens and 0 at padding. One of more says which queries may attend to which
    keys, by truths or by numbers that are added to the scores: a token is real if some query may attend to it.
    """
    added = mask.dim() > 2 and mask.is_floating_point()
    opened = mask == (0 if added else 1)
    closed = mask <= torch.finfo(mask.dtype).min / 2 if added else mask == 0
    clear = (opened | closed).all()
    middle = tuple(range(1, mask.dim() - 1))
    return (opened.any(middle) if middle else opened), clear


def _token_plan(
    mask: Tensor,
    rows: int,
    length: int,
    side: str,
    most: float,
    read_rows: list[Tensor] | None,
    read_positions: list[Tensor] | None,
) -> Tensor:
    """The places of the real tokens; all places where the mask is not understood, a row has no token, padding does not
    stand on the side that is needed ('any', 'right' or 'left'), a place that is read of itself is no real one, or more
    than a share of the places is real."""
    everything = torch.arange(rows * length, device=mask.device)
    if not lies_on_grid(mask, rows, length):
        return everything
    real, sound = sound_tokens(mask, side, read_rows or [], read_positions or [])  # ahead-of-time code gives None
    pays = real.sum() <= most * rows * length
    return real.flatten().nonzero().squeeze(1) if bool(sound & pays) else everything


def lies_on_grid(mask: Tensor, rows: int, length: int) -> bool:
    """Whether a mask has the shape of one over these rows and positions."""
    if mask.dim() < 2 or mask.shape[0] != rows or mask.shape[-1] != length or rows * length == 0:
        return False
    return mask.dim() == 2 or mask.shape[-2] in (1, length)


def sound_tokens(
    mask: Tensor, side: str, read_rows: list[Tensor], read_positions: list[Tensor]
) -> tuple[Tensor, Tensor]:
    """Where the tokens of a mask are real, and whether the others can be left out of this call."""
    real, clear = real_tokens(mask)
    sound = clear & real.any(1).all()
    if side != "any":
        before, after = (real[:, :-1], real[:, 1:]) if side == "right" else (real[:, 1:], real[:, :-1])
        sound = sound & (before | ~after).all()
    for row, position in zip(read_rows, read_positions, strict=True):
        sound = sound & real[row, position].all()
    return real, sound


def _fake_token_plan(mask: Tensor, *rest: Any) -> Tensor:
    if torch.onnx.is_in_onnx_export():
        raise RefoldError(
            "A graph without padding cannot be exported to ONNX, which has no operators for packed tokens: take "
            "RemovePadding back first (refold.undo), or export the model itself."
        )
    tokens = torch.library.get_ctx().new_dynamic_size(min=0)
    return mask.new_empty((tokens,), dtype=torch.int64)


# --- packing ---------------------------------------------------------------------------------------------------------


def _pack_tokens(x: Tensor, kept: Tensor, row: int, position: int) -> Tensor:
    """The kept places of a grid whose rows and positions are these dimensions, as one row; (rows·length) may be one
    dimension."""
    if row == position:
        return x.index_select(row, kept)
    tokens = x.movedim((row, position), (0, 1)).flatten(0, 1).index_select(0, kept)
    return tokens.unsqueeze(0).movedim((0, 1), (row, position))


def _unpack_tokens(x: Tensor, kept: Tensor, rows: int, length: int, row: int, position: int) -> Tensor:
    """The grid with packed tokens at their places, and zeros elsewhere."""
    if row == position:
        sizes = [rows * length if dim == row else size for dim, size in enumerate(x.shape)]
        return x.new_zeros(sizes).index_copy(row, kept, x)
    tokens = x.movedim((row, position), (0, 1)).select(0, 0)
    grid = tokens.new_zeros((rows * length, *tokens.shape[1:])).index_copy(0, kept, tokens)
    return grid.unflatten(0, (rows, length)).movedim((0, 1), (row, position))


def _zero_padding(x: Tensor, mask: Tensor, row: int, position: int) -> Tensor:
    """A grid with zeros at padding, whatever stood there. A mask of one row is that of all rows."""
    real = real_tokens(mask)[0]
    given = {row: real.shape[0], position: real.shape[1]}
    sizes = [given.get(dim, 1) for dim in range(x.dim())]
    return x.masked_fill(~(real if row < position else real.T).reshape(sizes), 0)


# --- attention -------------------------------------------------------------------------------------------------------

FULL, CAUSAL, MASKED = range(3)


def _attention_plan(mask: Tensor | None, kept: Tensor, rows: int, length: int) -> tuple[Tensor, Tensor]:
    """For each sequence its first and last place among the packed tokens, how it is masked, and where its part of the
    mask begins in the second result, which holds those parts one after the other. Nothing where all places are kept."""
    spans: list[tuple[int, int, int, int]] = []
    parts: list[Tensor] = []
    if kept.numel() < rows * length:
        start = offset = 0
        lengths = torch.bincount(kept // length, minlength=rows).tolist()
        for row, tokens in enumerate(kept.remainder(length).split(lengths)):
            part = _mask_part(mask, row, tokens)
            kind = FULL if part is None else _kind(part)
            spans.append((start, start + len(tokens), kind, offset))
            if part is not None and kind == MASKED:
                parts.append(part.reshape(-1))
                offset += part.numel()
            start += len(tokens)
    like = kept if mask is None else mask
    joined = torch.cat(parts) if parts else like.new_empty(0)
    return torch.tensor(spans, dtype=torch.int64).reshape(-1, 4), joined


def _mask_part(mask: Tensor | None, row: int, tokens: Tensor) -> Tensor | None:
    """What a mask says of the tokens of one sequence: (heads, queries, keys)."""
    if mask is None:
        return None
    whole = mask.reshape((1,) * (4 - mask.dim()) + tuple(mask.shape))
    part = whole[row if whole.shape[0] > 1 else 0]
    part = part.index_select(1, tokens) if part.shape[1] > 1 else part
    part = part.index_select(2, tokens) if part.shape[2] > 1 else part
    return part.expand(-1, len(tokens), len(tokens))


def _kind(part: Tensor) -> int:
    """Whether a mask lets all through, is causal, or neither."""
    opened = part if part.dtype == torch.bool else part == 0
    if bool(opened.all()):
        return FULL
    closed = ~part if part.dtype == torch.bool else part <= torch.finfo(part.dtype).min / 2
    below = torch.ones(part.shape[1:], dtype=torch.bool, device=part.device).tril()
    return CAUSAL if bool(torch.where(below, opened, closed).all()) else MASKED


def _fake_attention_plan(mask: Tensor | None, kept: Tensor, rows: int, length: int) -> tuple[Tensor, Tensor]:
    context = torch.library.get_ctx()
    spans = kept.new_empty((context.new_dynamic_size(min=0), 4), device="cpu")
    return spans, (kept if mask is None else mask).new_empty((context.new_dynamic_size(min=0),))


def _packed_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    spans: Tensor,
    masks: Tensor,
    rows: int,
    length: int,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """Attention of (1, heads, tokens, width): each sequence by itself, or all on the grid where nothing is left out."""
    settings: dict[str, Any] = {"scale": scale, "enable_gqa": enable_gqa}
    if len(spans) == 0:
        q, k, v = (_as_grid(t, rows, length) for t in (query, key, value))
        found = F.scaled_dot_product_attention(q, k, v, mask, is_causal=is_causal, **settings)
        return found.transpose(1, 2).reshape(1, rows * length, *found.shape[1::2]).transpose(1, 2)
    parts = []
    for start, stop, kind, offset in spans.tolist():
        q, k, v = (t[:, :, start:stop] for t in (query, key, value))
        part = _part_at(masks, offset, stop - start, query, mask) if kind == MASKED else None
        found = F.scaled_dot_product_attention(q, k, v, part, is_causal=is_causal or kind == CAUSAL, **settings)
        parts.append(found.transpose(1, 2))
    return torch.cat(parts, 1).transpose(1, 2)


def _as_grid(packed: Tensor, rows: int, length: int) -> Tensor:
    return packed.transpose(1, 2).reshape(rows, length, packed.shape[1], packed.shape[3]).transpose(1, 2)


def _part_at(masks: Tensor, offset: int, tokens: int, query: Tensor, mask: Tensor | None) -> Tensor:
    heads = query.shape[1] if mask is not None and mask.dim() > 2 and mask.shape[-3] > 1 else 1
    return masks[offset : offset + heads * tokens * tokens].view(1, heads, tokens, tokens)


def _fake_packed_attention(query: Tensor, key: Tensor, value: Tensor, *rest: Any, **settings: Any) -> Tensor:
    return query.new_empty((1, query.shape[2], query.shape[1], value.shape[3])).transpose(1, 2)


# --- gradients: computed again with torch's own -----------------------------------------------------------------------


def _gradients(function: Any, inputs: tuple[Any, ...], output: int | None, given: Tensor) -> tuple[Tensor | None, ...]:
    """The gradients of what a function gives (one of several outputs), for each of its inputs that is real."""
    leaves = [t.detach().requires_grad_() if _is_real(t) else t for t in inputs]
    with torch.enable_grad():
        found = function(*leaves)
        found = found if output is None else found[output]
    wanted = [t for t in leaves if _is_real(t)]
    if not found.requires_grad or not wanted:
        return (None,) * len(inputs)
    gradients = iter(torch.autograd.grad(found, wanted, given, allow_unused=True))
    return tuple(next(gradients) if _is_real(t) else None for t in leaves)


def _is_real(value: Any) -> bool:
    return isinstance(value, Tensor) and value.is_floating_point()


def _remember(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
    ctx.save_for_backward(*(t for t in inputs if isinstance(t, Tensor)))
    ctx.others = [None if isinstance(t, Tensor) else (t,) for t in inputs]


def _recalled(ctx: Any) -> tuple[Any, ...]:
    tensors = iter(ctx.saved_tensors)
    return tuple(next(tensors) if other is None else other[0] for other in ctx.others)


def _attention_backward(ctx: Any, given: Tensor) -> tuple[Tensor | None, ...]:
    return _gradients(_packed_attention, _recalled(ctx), None, given)


def _plan_backward(ctx: Any, spans: Tensor, given: Tensor) -> tuple[Tensor | None, ...]:
    return _gradients(_attention_plan, _recalled(ctx), 1, given)


def _register() -> None:
    for name, composed in (
        ("pack_tokens", _pack_tokens),
        ("unpack_tokens", _unpack_tokens),
        ("zero_padding", _zero_padding),
    ):
        _LIBRARY.impl(name, composed, "CompositeImplicitAutograd")
    for name, computed, fake in (
        ("token_plan", _token_plan, _fake_token_plan),
        ("attention_plan", _attention_plan, _fake_attention_plan),
        ("packed_attention", _packed_attention, _fake_packed_attention),
    ):
        _LIBRARY.impl(name, computed, "CompositeExplicitAutograd")
        torch.library.register_fake(f"refold::{name}", fake, lib=_LIBRARY)
    remember = {"setup_context": _remember, "lib": _LIBRARY}
    torch.library.register_autograd("refold::packed_attention", _attention_backward, **remember)  # type: ignore[arg-type]
    torch.library.register_autograd("refold::attention_plan", _plan_backward, **remember)  # type: ignore[arg-type]


_register()
OPERATORS = torch.ops.refold
"""The operators, as graphs call them."""
