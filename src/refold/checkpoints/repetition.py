"""Load a checkpoint where no weight map says how: undo on a copy, load it there, do everything again, take it over."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any

import torch
from torch.fx import GraphModule

from refold import fx_private
from refold.errors import RefoldError
from refold.fx_private import named_tensors
from refold.record.reversal import undo
from refold.record.stack import history
from refold.rewrite.replay import replay, set_modes, steps_of


def repeat_with(gm: GraphModule, state_dict: Mapping[str, Any], strict: bool) -> tuple[GraphModule, Any]:
    """What the rewritten module would be had the original had the weights of this checkpoint, and torch's outcome of
    loading it; the module itself is not touched. Memory holds the module twice.

    RefoldError where the same rewrites do not come out again: one that reads the weights' values may decide
    otherwise, and one whose settings are not plain data cannot be made again."""
    steps, past = steps_of(gm), history(gm)
    again = copy.deepcopy(gm)
    if again.training != past[0].training:
        set_modes(again, {path for path, _ in fx_private.walk_modules(again)} if past[0].training else set())
    undo(again, None, lint_and_recompile=False)
    outcome = again.load_state_dict(state_dict, strict=strict)
    # the fingerprints of tensors without a map are those of the new values, not of those that were saved
    replay(again, [{key: value for key, value in step.items() if key != "prints"} for step in steps])
    if again.code != gm.code or _kinds(again) != _kinds(gm):
        raise RefoldError("with these weights the same rewrites give another module.")
    return again, outcome


def _kinds(gm: GraphModule) -> dict[str, tuple[torch.dtype, torch.Size]]:
    return {name: (tensor.dtype, tensor.shape) for name, tensor in named_tensors(gm).items()}
