"""`plan`: what the rewrites of a module do to its tensors, as a value that needs neither the module nor its weights."""

from __future__ import annotations

from collections.abc import Iterator

from torch.fx import GraphModule

from refold.conversion.tensor_plan import Plan
from refold.errors import CheckpointMismatch
from refold.fx_private import named_tensors
from refold.record.change import Change
from refold.record.stack import check_graph_module, history
from refold.weights import Rename
from refold.weights.maps import WeightMap


def plan(gm: GraphModule) -> Plan:
    """Which tensor of a rewritten module comes from which of the original's, by which map.

    It prints, it is JSON (`save`, `to_plain`), and it is applied to tensors that lie elsewhere: `apply` to a state dict
    of the original, `restore` back, and `refold convert --plan` to a checkpoint that no memory holds. The module may be
    on the meta device. A transformation that changed tensors without saying how has no plan.
    """
    maps: list[WeightMap] = []
    dropped: list[str] = []
    for change in history(check_graph_module(gm)):
        _check_mapped(change)
        maps += [record.map for record in change.maps]
        aliases = set(_aliases(change))
        maps += [
            WeightMap(Rename(), {"weight": before}, {"weight": after})
            for before, after in change.renamed.items()
            if before not in aliases
        ]
        dropped += [name for name, _ in change.held_tensors() if name not in change.renamed] + sorted(aliases)
    there = named_tensors(gm)
    return Plan(tuple(maps), tuple(dict.fromkeys(name for name in dropped if name not in there)))


def _check_mapped(change: Change) -> None:
    if change.fingerprints:
        raise CheckpointMismatch(
            f"{change.label} made {', '.join(change.fingerprints)} without saying how they come from the original's "
            f"tensors, so there is no plan. A rule says it by edit.map_weights."
        )


def _aliases(change: Change) -> Iterator[str]:
    """Names of retained tensors that had a second name, and only that one has a place now."""
    seen = {after for before, after in change.retained.items() if before == after}
    for before, after in change.renamed.items():
        if after in seen:
            yield before
        seen.add(after)
