"""What was decided for a model, as plain data: the rewrites and where they are made, the ways to run, what was found.

It holds no weight, no value of an example and nothing that could run. It comes from a file that anybody may have
written: whatever does not fit is `BadDecision`, and what is read is tried on the model before it is used.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass, replace
from typing import Any

from torch.fx import GraphModule

from refold.errors import BadDecision, RefoldError
from refold.measurement.timing import Comparison, Timing
from refold.report.document import Report
from refold.report.json_data import decode, encode
from refold.saving.node_digests import node_digests, node_names

SCHEMA = "refold.decision"
VERSION = 1


@dataclass(frozen=True)
class JobKey:
    """Three digests of what was asked for, and the machine in words."""

    model: str
    call: str
    settings: str
    machine: dict

    @property
    def digest(self) -> str:
        """All of it as one name."""
        return _sha256(json.dumps([self.model, self.call, self.settings, self.machine], sort_keys=True))[:32]

    def differences(self, other: JobKey) -> list[str]:
        """What is different in another one, in words."""
        parts = [name for name in ("model", "call", "settings") if getattr(self, name) != getattr(other, name)]
        names = dict.fromkeys((*self.machine, *other.machine))
        return parts + [name for name in names if self.machine.get(name) != other.machine.get(name)]


@dataclass(frozen=True)
class Rounds:
    """The rounds of a race that one way to run took part in."""

    name: str
    seconds: tuple[float, ...]


@dataclass(frozen=True)
class Decision:
    """How a model is run, and how sure that is."""

    key: JobKey
    weights: str
    """A fingerprint of all weights."""
    captured: str
    """A digest of the graph before its rewrites."""
    rewritten: str
    """A digest of the graph after them."""
    steps: list
    """The rewrites with their settings, and the places where each was made."""
    at_example: str
    """The executor for the example's sizes."""
    runs_unrewritten: bool
    """Whether that executor runs the graph without the rewrites."""
    at_any_size: str | None
    """The executor for other sizes; None where those run the original."""
    report: Report
    rounds: tuple[Rounds, ...] = ()
    """The race of the chosen one with those that may be faster, for all that it can tell; none where it is settled."""
    untried: tuple[str, ...] = ()
    """The executors that the time budget left out."""
    races: int = 1
    created: str = ""

    @property
    def is_settled(self) -> bool:
        """Whether nothing is left to find out."""
        return not self.rounds and not self.untried

    def comparison(self) -> Comparison | None:
        """The race as it was left."""
        timings = {each.name: Timing(each.name, each.seconds, 0.0) for each in self.rounds}
        machine = self.key.machine
        return Comparison(timings, {}, str(machine.get("device")), 0) if timings else None

    def with_weights(self, weights: str) -> Decision:
        """The same for other weights."""
        return replace(self, weights=weights)

    def to_text(self) -> str:
        """As JSON, with a digest of itself."""
        text = json.dumps(encode(self), sort_keys=True, allow_nan=False)
        return json.dumps({"schema": SCHEMA, "version": VERSION, "sha256": _sha256(text), "decision": text})

    @classmethod
    def from_text(cls, text: bytes) -> Decision:
        """What `to_text` gave; `BadDecision` says what is wrong with anything else."""
        try:
            data = json.loads(text)
            if not isinstance(data, dict) or (data.get("schema"), data.get("version")) != (SCHEMA, VERSION):
                raise BadDecision("it is no decision of this version")
            if not isinstance(data.get("decision"), str) or _sha256(data["decision"]) != data.get("sha256"):
                raise BadDecision("it is damaged")
            found: Decision = decode(cls, json.loads(data["decision"]), "decision")
        except (ValueError, RecursionError) as error:
            raise BadDecision(f"it is damaged ({error})") from None
        except BadDecision:
            raise
        except RefoldError as error:
            raise BadDecision(str(error)) from None
        return found


def _sha256(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


def digest_of_graph(gm: GraphModule) -> str:
    """A digest of a graph with the names of its nodes."""
    return _sha256(" ".join((*node_digests(gm), *node_names(gm))))


def plain_steps(steps: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Recorded rewrites without the fingerprints of values: those are made anew where the rewrites are."""
    return [{name: value for name, value in step.items() if name != "prints"} for step in steps]
