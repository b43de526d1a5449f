"""`refold.save` and `refold.load`: for captured graphs, and for optimized models."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from torch import nn
from torch.fx import GraphModule

from refold.call_arguments import Inputs
from refold.errors import SaveError
from refold.saving import reader, writer
from refold.saving.capture_recipe import Model
from refold.saving.folder import own_files, tidy
from refold.saving.reader import OPTIMIZED
from refold.saving.writer import SHARD_BYTES


def save(module: nn.Module, folder: str | os.PathLike[str], *, shard_bytes: int = SHARD_BYTES) -> None:
    """Save a module so that `refold.load` gives it back: a captured graph with its history, or an optimized model.

    Of a graph, weights are stored as safetensors and the way to it as a JSON recipe; of an optimized model, the
    original's weights and what was decided. Nothing that could run is stored.

    What Refold wrote into the folder before is replaced as one: whatever happens, it holds the old module or the new
    one. Other files in it stay as they are; one that has a name that is needed is an error. A graph that could not be
    loaded again is refused: the recipe is tried before anything is written.
    """
    from refold.optimization.optimized_module import OptimizedModule

    if issubclass(type(module), OptimizedModule):  # it says of itself that it is what the original is
        from refold.optimization.fast_folder import save_optimized

        save_optimized(module, folder, shard_bytes)  # type: ignore[arg-type]
    else:
        writer.save(module, folder, shard_bytes=shard_bytes)  # type: ignore[arg-type]


def load(
    folder: str | os.PathLike[str],
    model: Model | None = None,
    *,
    example_inputs: Inputs | None = None,
    graph_module: GraphModule | None = None,
    device: str = "cpu",
) -> Any:
    """What `refold.save` put into a folder: a graph with its history, or an optimized model, called as the model is.

    The graph is never read from the folder. It is captured again from `model` (a model, its class, or a function that
    makes it) as it was before saving, or handed over as `graph_module`; then the saved recipe is replayed and the
    outcome compared. The model's weights are not touched. `example_inputs` are only needed where the original call had
    inputs that were no plain tensors. Only transformations that are known here are run.

    An optimized model runs at once as it was decided, after it was compared with the model. Where the processor, the
    device or a version is another one, it is prepared anew, and a `PreparedAnew` warning says so. A model that has the
    saved weights is used itself; of one that has others, a copy with the saved ones.
    """
    place = Path(folder)
    tidy(place)
    if OPTIMIZED not in own_files(place):
        return reader.load(place, model, example_inputs=example_inputs, graph_module=graph_module, device=device)
    if graph_module is not None:
        raise SaveError(f"{place} holds an optimized model: give the model, and no graph of it.")
    from refold.optimization.fast_folder import load_optimized

    return load_optimized(place, model, example_inputs, device)
