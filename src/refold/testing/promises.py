"""What every rule promises on every graph that runs: it does not raise, computes the same, and is undone exactly."""

from __future__ import annotations

import copy
import traceback
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from torch.fx import GraphModule

from refold import history, undo
from refold.fx_private import registered_tensors
from refold.rewrite.preview import explain
from refold.rewrite.transformation import Transformation
from refold.testing.equivalence import as_float64, deviations
from refold.testing.portrait import Portrait


@dataclass(frozen=True)
class Breach:
    """A promise that a rule did not keep on a graph: it 'raised', the result is 'wrong', or the undo 'inexact'."""

    kind: str
    rule: str
    sentence: str

    def __str__(self) -> str:
        return f"{self.rule} {self.kind}: {self.sentence}"


@dataclass(frozen=True)
class Kept:
    """A rule kept its promises on a graph."""

    fired: bool


def check_promises(t: Transformation, gm: GraphModule, inputs: tuple[Any, ...]) -> Breach | Kept:
    """Apply a rule to copies of a graph, in its own dtype for the undo and in float64 for the results."""
    try:
        rewritten = copy.deepcopy(gm)
        for kind, found in (("inexact", _inexact(t, rewritten)), ("wrong", _wrong(t, gm, inputs))):
            for sentence in found:
                return Breach(kind, repr(t), sentence)
        return Kept(bool(history(t(rewritten))))
    except Exception as error:
        places = traceback.extract_tb(error.__traceback__)
        where = " < ".join(f"{place.filename.rpartition('/')[2]}:{place.lineno}" for place in places[:-4:-1])
        return Breach("raised", repr(t), f"{type(error).__name__}: {error} ({where})")


def _inexact(t: Transformation, gm: GraphModule) -> Iterator[str]:
    """What explaining, applying and undoing a rule did not give back."""
    before, memory = Portrait.of(gm), _memory(gm)
    tensors = list(registered_tensors(gm).values())  # alive, so that the same objects must come back
    foretold = explain(gm, t)
    yield from (f"explain: {text}" for text in before.differences(Portrait.of(gm), same_objects=True))
    t(gm)
    fired = bool(history(gm))
    mapped = {name for change in history(gm) for record in change.maps for name in record.map.sources.values()}
    if fired != bool(foretold.rewritten):
        yield f"explain says {len(foretold.rewritten)} places, and it {'fired' if fired else 'did not fire'}"
    if fired:
        undo(gm, None)
    yield from before.differences(Portrait.of(gm), same_objects=bool(tensors))
    for name, (address, *layout) in _memory(gm).items():
        if layout != memory[name][1:]:
            yield f"{name} lay at {memory[name][1:]} of its storage, and lies at {layout}"
        if address != memory[name][0] and name not in mapped:  # what was mapped gave its memory up
            yield f"{name} lies in other memory"


def _memory(gm: GraphModule) -> dict[str, list[Any]]:
    """Of each tensor its address, its place in the storage, the storage's size, and who else lies in it."""
    tensors = registered_tensors(gm)
    sharing: dict[int, list[str]] = {}
    for name, tensor in tensors.items():
        sharing.setdefault(tensor.untyped_storage().data_ptr(), []).append(name)
    return {
        name: [t.data_ptr(), t.storage_offset(), t.untyped_storage().nbytes(), sharing[t.untyped_storage().data_ptr()]]
        for name, t in tensors.items()
    }


def _wrong(t: Transformation, gm: GraphModule, inputs: tuple[Any, ...]) -> Iterator[str]:
    precise = as_float64(gm)
    rewritten = t(copy.deepcopy(precise))
    if history(rewritten):
        yield from map(str, deviations(precise, rewritten, as_float64(inputs)))
