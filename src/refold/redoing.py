"""Load a checkpoint where no weight map says how: undo on a copy, load it there, do everything again, take it over."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any

import torch
from torch.fx import GraphModule

from refold import fx_private
from refold.errors import RefoldError
from refold.history import history, undo
from refold.hollow import named_tensors


def redone_from(gm: GraphModule, state_dict: Mapping[str, Any], strict: bool) -> tuple[GraphModule, Any]:
    """What the rewritten module would be had the original had the weights of this checkpoint, and torch's outcome of
    loading it; the module itself is not touched. Memory holds the module twice.

    RefoldError where the same rewrites do not come out again: one that looks at the weights' values may decide
    otherwise, and one whose settings are not plain data cannot be made again."""
    from refold.saving.replay import replay, set_modes, steps_of

    steps, past = steps_of(gm), history(gm)
    twin = copy.deepcopy(gm)
    if twin.training != past[0].training:
        set_modes(twin, {path for path, _ in fx_private.walk_modules(twin)} if past[0].training else set())
    undo(twin, None, lint_and_recompile=False)
    outcome = twin.load_state_dict(state_dict, strict=strict)
    # the fingerprints of tensors without a map are those of the new values, not of those that were saved
    replay(twin, [{key: value for key, value in step.items() if key != "prints"} for step in steps])
    if twin.code != gm.code or _kinds(twin) != _kinds(gm):
        raise RefoldError("with these weights the same rewrites give another module.")
    return twin, outcome


def _kinds(gm: GraphModule) -> dict[str, tuple[torch.dtype, torch.Size]]:
    return {name: (tensor.dtype, tensor.shape) for name, tensor in named_tensors(gm).items()}
