"""The places that a change rewrote, in the graphs before and after it: what goes in, what comes out.

A node is touched when the change made, erased or changed it, or when the module or tensor it uses is another one. A
touched node that only reads other nodes than before is rewired: it stands outside, and what it reads is compared. The
touched nodes fall into sites by which reads which, in either graph. What a site reads from outside are its inputs; they
must be the same nodes on both sides, so a value that only one side reads is recomputed inside. What writes into a value
that is made inside, through whatever views, belongs inside as well.

A site may be enlarged by the readers of its results only where they lose nothing (a reshape): whatever loses something
(a ReLU) could hide a defect.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.fx import GraphModule, Node
from torch.fx.node import map_aggregate

from refold import fx_private
from refold.fingerprint import same_bits
from refold.graph.aliasing import memory_roots, written_by
from refold.graph.groups import connected
from refold.graph.targets import name_of
from refold.record.change import overlap
from refold.record.nodes import Ref, record_node, same_value
from refold.verification.stages import Stage

Pair = tuple[str, str]

_ENLARGEMENTS = 3


@dataclass(frozen=True)
class ComparedSite:
    """One place: the nodes on both sides, the values that go in, and the values (before, after) to be compared."""

    before: frozenset[str]
    after: frozenset[str]
    inputs: tuple[str, ...]
    pairs: tuple[Pair, ...]
    followers: frozenset[str]
    """Readers of the results that lose nothing of them, by which the site can be enlarged."""

    @property
    def name(self) -> str:
        """The values that the site gives, by their names after the change."""
        names = sorted({a for _, a in self.pairs}) or sorted(self.after or self.before)
        return ", ".join(names[:4]) + (f" and {len(names) - 4} more" if len(names) > 4 else "")


class SiteFinder:
    """Finds the sites of one stage."""

    def __init__(self, stage: Stage) -> None:
        self.stage = stage
        self.nodes = [{n.name: n for n in gm.graph.nodes} for gm in (stage.before, stage.after)]
        self.place = [{name: i for i, name in enumerate(names)} for names in self.nodes]
        self.order = _joint_order(*self.place)
        self.written = [_written_memory(gm) for gm in (stage.before, stage.after)]
        self.touched = _touched(stage, self.nodes)
        self.reweighted = {name for name in self.nodes[1] if self._reads_other_weights(name)}
        self.touched |= self.reweighted
        self.rewired = {name: pairs for name in self.touched if (pairs := self._rewired(name)) is not None}
        self.rewired = {name: pairs for name, pairs in self.rewired.items() if not self._changed_places(name)}

    def sites(self, absorb: frozenset[str] = frozenset()) -> Iterator[ComparedSite]:
        """The sites; the nodes in `absorb` count as touched."""
        if self._order_matters() or self._sizes_depend_on_data():
            yield self.whole()
            return
        rewired = {name: pairs for name, pairs in self.rewired.items() if name not in absorb}
        members = (self.touched | absorb) - set(rewired)
        links: list[Iterable[str]] = [
            [name, *(read for read in self._inputs(side, name) if read in members)]
            for side in (0, 1)
            for name in self.nodes[side]
            if name in members
        ]
        links += [pair for pairs in rewired.values() for pair in pairs]
        readers = self._readers(members, rewired)
        for names in connected(links):
            wanted = {pair: nodes for pair, nodes in readers.items() if pair[0] in names or pair[1] in names}
            if names & members or wanted:
                sides = (names & members & set(self.nodes[0]), names & members & set(self.nodes[1]))
                yield self._closed(sides, tuple(wanted), frozenset().union(*wanted.values()))

    def whole(self) -> ComparedSite:
        """The whole graph as one site, for changes whose effect cannot be seen in a part."""
        inside = [{n for n, node in names.items() if node.op not in ("placeholder", "output")} for names in self.nodes]
        inputs = tuple(n for n, node in self.nodes[0].items() if node.op == "placeholder" and n in self.nodes[1])
        pairs = tuple(dict.fromkeys(self._output_pairs()))
        return ComparedSite(frozenset(inside[0]), frozenset(inside[1]), inputs, pairs, frozenset())

    def enlargements(self, site: ComparedSite, is_discrete: Callable[[str], bool]) -> Iterator[ComparedSite]:
        """Larger and larger sites: with what makes the masks and integers among the inputs, then with what makes the
        other inputs as well."""
        for step in range(_ENLARGEMENTS + 1):
            larger = self._with_makers(site, lambda name: True) if step else site
            while larger is not None and (more := self._with_makers(larger, is_discrete)) is not None:
                larger = more
            if larger is not None and larger is not site:
                yield larger
                site = larger

    def _with_makers(self, site: ComparedSite, wanted: Callable[[str], bool]) -> ComparedSite | None:
        """The site together with what makes some of its inputs; None where nothing is left to add."""
        more = {n for n in site.inputs if n not in self.touched and self.nodes[0][n].op != "placeholder" and wanted(n)}
        if not more:
            return None
        return self._closed(({*site.before, *more}, {*site.after, *more}), site.pairs, site.followers)

    # --- finding ---------------------------------------------------------------------------------------------------

    def _order_matters(self) -> bool:
        """Whether something is written in place that was moved past, or that is now read where a copy was before."""
        if not self.written[1] or self.stage.change.moved:
            return bool(self.written[1])
        before, after = (set().union(*each.values()) for each in self.written)
        for old, new in {(b, a) for pairs in self.rewired.values() for b, a in pairs if b != a}:
            shares_now = not after.isdisjoint(memory_roots(self.stage.after, self.nodes[1][new]))
            if shares_now and before.isdisjoint(memory_roots(self.stage.before, self.nodes[0][old])):
                return True
        return False

    def _sizes_depend_on_data(self) -> bool:
        """Whether a new node chooses sizes from data: then values in between have other sizes, and mean the same only
        together with those that the choice was made from."""
        made = (node for name, node in self.nodes[1].items() if name not in self.nodes[0])
        return any(torch.Tag.dynamic_output_shape in getattr(node.target, "tags", ()) for node in made)

    def _inputs(self, side: int, name: str) -> list[str]:
        return [n.name for n in self.nodes[side][name].all_input_nodes]

    def _rewired(self, name: str) -> list[Pair] | None:
        """The (before, after) pairs of what a node reads, where nothing else about it changed."""
        old, new = (names.get(name) for names in self.nodes)
        if old is None or new is None:
            return None
        if old.op == "output":
            return self._output_pairs()
        a, b = record_node(old), record_node(new)
        if a.op != b.op or not same_value(a.target, b.target) or _uses_other(self.stage, old):
            return None
        pairs = _paired((a.args, a.kwargs), (b.args, b.kwargs))
        return None if pairs is None or written_by(self.stage.before, old) or name in self.reweighted else pairs

    def _reads_other_weights(self, name: str) -> bool:
        """Whether a node reads one tensor of the module before and another one after: what it makes of it counts, not
        the tensor. (A computed value that became a tensor, or the other way round, is compared itself.)"""
        old, new = (names.get(name) for names in self.nodes)
        if old is None or new is None or old.op == "output":
            return False
        fetched = [[n for n in node.all_input_nodes if n.op == "get_attr"] for node in (old, new)]
        if not any(n.name in self.touched for n in (*fetched[0], *fetched[1])) or len(fetched[0]) != len(fetched[1]):
            return False
        sides = (self.stage.before, self.stage.after)
        entries = [[find_entry(gm, str(n.target)) for n in nodes] for gm, nodes in zip(sides, fetched, strict=True)]
        return not all(map(same_things, *entries))

    def _changed_places(self, name: str) -> bool:
        """Whether a rewired node changed places with another one: what it read reads it now. Both are then inside."""
        before = [n for n in self._inputs(0, name) if n in self.rewired and name in self._inputs(1, n)]
        return bool(before) or any(name in self._inputs(0, n) for n in self._inputs(1, name) if n in self.rewired)

    def _output_pairs(self) -> list[Pair]:
        old, new = (next(iter(reversed(gm.graph.nodes))) for gm in (self.stage.before, self.stage.after))
        pairs = _paired(record_node(old).args, record_node(new).args)
        if pairs is None:
            raise OutputChanged
        return pairs

    def _readers(self, members: set[str], rewired: dict[str, list[Pair]]) -> dict[Pair, set[str]]:
        """Every pair of values that a node outside reads, with the readers that lose nothing of it."""
        found: dict[Pair, set[str]] = {}
        for name, node in self.nodes[1].items():
            if name in members:
                continue
            pairs = rewired.get(name) or [(read.name, read.name) for read in node.all_input_nodes]
            for b, a in pairs:
                if b != a or b in members or a in members:
                    found.setdefault((b, a), set()).update([name] if loses_nothing(node) else [])
        return found

    # --- closing ---------------------------------------------------------------------------------------------------

    def _closed(
        self, sides: tuple[set[str], set[str]], pairs: tuple[Pair, ...], followers: frozenset[str]
    ) -> ComparedSite:
        """Take in what only one side reads, the latest first, until both sides read the same nodes."""
        while True:
            for side in (0, 1):
                sides[side].update(self._writes_inside(side, sides[side]))
            needs = [self._needs(side, sides[side], {pair[side] for pair in pairs}) for side in (0, 1)]
            fetches = [{n for n in needs[s] if self.nodes[s][n].op == "get_attr"} for s in (0, 1)]
            if any(fetches):
                for s in (0, 1):
                    sides[s].update(fetches[s])
                continue
            only_one = [(s, n) for s in (0, 1) for n in needs[s] - needs[1 - s]]
            lonely = [(self.order[n], s, n) for s, n in only_one if self.nodes[s][n].op != "placeholder"]
            if not lonely:
                break
            _, side, name = max(lonely)
            sides[side].add(name)
        inputs = tuple(sorted(needs[0] | needs[1], key=lambda n: self.place[0].get(n, -1)))
        return ComparedSite(frozenset(sides[0]), frozenset(sides[1]), inputs, pairs, followers)

    def _writes_inside(self, side: int, inside: set[str]) -> set[str]:
        """What writes into values that are made inside before others inside read them, and the views it writes to."""
        place = self.place[side]
        last = max((place[name] for name in inside), default=0)
        found: set[str] = set()
        for writer, memory in self.written[side].items():
            if writer.name in inside or place[writer.name] > last:
                continue
            views: set[Node] = set()  # all that lies in the memory of something inside, and what it was made from
            for node in sorted(memory, key=lambda n: place[n.name]):
                if node.name in inside or not views.isdisjoint(node.all_input_nodes):
                    views.add(node)
            found |= {writer.name, *(view.name for view in views)} if views else set()
        return found

    def _needs(self, side: int, inside: set[str], results: set[str]) -> set[str]:
        read = {n for name in inside for n in self._inputs(side, name)}
        return (read | results) - inside


_LOSSLESS = {
    "view", "reshape", "flatten", "unflatten", "permute", "transpose", "t", "squeeze", "unsqueeze", "contiguous",
    "clone", "view_as", "reshape_as", "movedim", "moveaxis", "swapaxes", "swapdims", "expand", "expand_as", "mT", "T",
    "_unsafe_view", "alias", "size", "sym_size", "dim", "numel", "shape", "dtype", "device", "ndim", "detach",
}  # fmt: skip


def loses_nothing(node: Node) -> bool:
    """Whether a node only rearranges a value, or only reads its size."""
    name = name_of(node)
    if name == "getattr" and len(node.args) > 1:
        name = str(node.args[1])
    return node.op in ("call_function", "call_method") and name in _LOSSLESS


class OutputChanged(Exception):
    """The graph's output has another structure than before."""


def _paired(old: Any, new: Any) -> list[Pair] | None:
    """The nodes at the same places of two arguments; None where they differ in anything else."""
    sides: tuple[list[str], list[str]] = ([], [])

    def blank(side: int, value: Any) -> Any:
        def take(item: Any) -> Any:
            if isinstance(item, Ref):
                sides[side].append(item.name)
                return Ref("")
            return item

        return map_aggregate(value, take)

    same = same_value(blank(0, old), blank(1, new))
    return list(zip(*sides, strict=True)) if same and len(sides[0]) == len(sides[1]) else None


def _written_memory(gm: GraphModule) -> dict[Node, set[Node]]:
    """The nodes that write, each with the nodes in whose memory it writes."""
    writers = {node: written_by(gm, node) for node in gm.graph.nodes}
    return {node: memory_roots(gm, *targets) for node, targets in writers.items() if targets}


def _joint_order(before: dict[str, int], after: dict[str, int]) -> dict[str, tuple[int, int]]:
    """Places that can be compared across both graphs: new nodes come right after what stood there before."""
    found, last = {name: (place, 0) for name, place in before.items()}, -1
    for name, place in after.items():
        last = before.get(name, last)
        found.setdefault(name, (last, place + 1))
    return found


def _touched(stage: Stage, nodes: list[dict[str, Node]]) -> set[str]:
    change = stage.change
    found = {*change.created, *change.erased, *change.changed}
    written = change.writes
    for name, node in nodes[1].items():
        uses = node.op in ("call_module", "get_attr") and name in nodes[0]
        if uses and overlap(frozenset({str(node.target)}), written) and _uses_other(stage, node):
            found.add(name)
    return found


def _uses_other(stage: Stage, node: Node) -> bool:
    """Whether the module or tensor that a node uses differs between the two sides, or a weight map made it: what the
    map gives may be rounded to what was there before."""
    if node.op not in ("call_module", "get_attr"):
        return False
    name = str(node.target)
    made = (target for record in stage.change.maps for target in record.map.targets.values())
    if any(target == name or target.startswith(f"{name}.") for target in made):
        return True
    return not same_things(*(find_entry(gm, name) for gm in (stage.before, stage.after)))


def find_entry(gm: nn.Module, path: str) -> Any:
    """The module or tensor at a path; None where there is none."""
    found: Any = gm
    for part in path.split("."):
        found = getattr(found, part, None)
    return found


def same_things(a: Any, b: Any) -> bool:
    """Whether two modules or tensors are alike in everything that computes."""
    if isinstance(a, torch.Tensor) and isinstance(b, torch.Tensor):
        return a.device == b.device and same_bits(a, b)
    if not isinstance(a, nn.Module) or not isinstance(b, nn.Module):
        return a is b
    if a is b or isinstance(a, torch.jit.ScriptModule):
        return a is b
    if type(a) is not type(b) and not isinstance(a, GraphModule):
        return False
    if isinstance(a, GraphModule) and isinstance(b, GraphModule) and a.code != b.code:
        return False
    return _same_settings(a, b) and all(_same_table(a, b, name) for name in fx_private.TABLES)


def _same_table(a: nn.Module, b: nn.Module, name: str) -> bool:
    old, new = fx_private.table(a, name), fx_private.table(b, name)
    return list(old) == list(new) and all(v is new[k] or same_things(v, new[k]) for k, v in old.items())


def _same_settings(a: nn.Module, b: nn.Module) -> bool:
    """Plain attributes that compare; what a copy holds anew (hooks, lists of tensors, functions) is no setting."""
    old, new = fx_private.plain_attributes(a), fx_private.plain_attributes(b)
    plain = (bool, int, float, str, tuple, type(None), torch.dtype)
    return old.keys() == new.keys() and all(same_value(v, new[k]) for k, v in old.items() if isinstance(v, plain))
