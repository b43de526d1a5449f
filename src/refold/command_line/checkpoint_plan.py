"""The plan of a pipeline for a checkpoint: its model is made without weights, from the configuration beside them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from refold.capture.example_inputs import make_inputs
from refold.capture.tracing import trace
from refold.command_line.transformers_models import config_from, model_from
from refold.conversion import Plan
from refold.conversion.checkpoint_folder import read_object
from refold.conversion.planning import plan
from refold.errors import WrongInput
from refold.extension.pipeline_files import read_pipeline


def plan_of_pipeline(source: Path, pipeline: Path) -> Plan:
    """What the transformations of a pipeline file do to the tensors of a transformers folder."""
    steps = read_pipeline(pipeline)
    if not (source / "config.json").is_file():
        raise WrongInput(
            f"{source} has no config.json, so its model is not known. Make a plan with refold.plan instead."
        )
    config = config_from(read_object(source / "config.json"))
    if getattr(config, "use_cache", False):
        config.use_cache = False
    with torch.device("meta"), torch.no_grad():
        model = model_from(config, None).requires_grad_(False)
    inputs: dict[str, Any] = dict(make_inputs(model))
    with torch.no_grad():
        gm = trace(model, **inputs)
    for step in steps:
        step(gm)
    return plan(gm)
