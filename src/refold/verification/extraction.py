"""A site as two small modules that can be run alone, and the values that really reach it."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import nn
from torch.fx import Graph, GraphModule, Node

from refold import fx_private
from refold.fx_private import registered_tensors
from refold.nested import map_tensors
from refold.record.copies import working_copy
from refold.record.nodes import function_name, to_refs
from refold.verification.discrete_draws import is_discrete
from refold.verification.samples import NamedCall, Values
from refold.verification.sites import ComparedSite, find_entry
from refold.verification.stages import Stage


def extract(stage: Stage, site: ComparedSite) -> tuple[GraphModule, GraphModule]:
    """Both sides of a site as modules: inputs by place, results as a tuple, tensors under their names in the whole."""
    before = _extract(stage.before, site.before, site.inputs, [b for b, _ in site.pairs])
    after = _extract(stage.after, site.after, site.inputs, [a for _, a in site.pairs])
    return before, after


def _extract(gm: GraphModule, inside: frozenset[str], inputs: Sequence[str], results: Sequence[str]) -> GraphModule:
    graph = Graph()
    values: dict[str, Node] = {}
    for name in inputs:
        values[name] = graph.placeholder(name)
    for node in [node for node in gm.graph.nodes if node.name in inside]:
        values[node.name] = graph.node_copy(node, lambda n: values[n.name])
        values[node.name].meta = {}
    graph.output(tuple(values[name] for name in results))
    return GraphModule(gm, graph, "Site")


def tensors_used(gm: GraphModule, nodes: Iterable[Node]) -> dict[str, torch.Tensor]:
    """The parameters and buffers that some nodes use, by their full names."""
    found: dict[str, torch.Tensor] = {}
    for node in nodes:
        if node.op not in ("call_module", "get_attr"):
            continue
        used = find_entry(gm, str(node.target))
        if isinstance(used, torch.Tensor):
            found[str(node.target)] = used
        elif isinstance(used, nn.Module):
            found |= {f"{node.target}.{name}": tensor for name, tensor in registered_tensors(used).items()}
    return found


def install(module: nn.Module, tensors: dict[str, torch.Tensor]) -> None:
    """Put tensors in the place of parameters and buffers of a module of one's own."""
    for name, tensor in tensors.items():
        path, _, key = name.rpartition(".")
        owner = module.get_submodule(path)
        parameters = fx_private.table(owner, "_parameters")
        if key in parameters:
            parameters[key] = nn.Parameter(tensor, requires_grad=False)
        else:
            fx_private.table(owner, "_buffers")[key] = tensor


class Collector:
    """The module before the change, made to note the values that reach each site at the moment it reads them."""

    def __init__(self, stage: Stage, sites: Sequence[ComparedSite]) -> None:
        self.sites, self.found = sites, [dict[str, Any]() for _ in sites]
        self.tapped = working_copy(stage.before)
        _tap(self.tapped.graph, sites, self._note)
        self.tapped.recompile()

    def run(self, call: NamedCall, seed: int) -> list[Values]:
        """Run it once: the values of each site."""
        for values in self.found:
            values.clear()
        seeded(seed)
        call.on(self.tapped)
        return [{n: found.get(n) for n in site.inputs} for site, found in zip(self.sites, self.found, strict=True)]

    def _note(self, place: int, name: str, value: Any) -> None:
        self.found[place][name] = map_tensors(value, lambda t: t.detach().clone())


def _tap(graph: Graph, sites: Sequence[ComparedSite], note: Any) -> None:
    by_name = {node.name: node for node in graph.nodes}
    place = {node: i for i, node in enumerate(graph.nodes)}
    end = next(iter(reversed(graph.nodes)))
    for i, site in enumerate(sites):
        for name in site.inputs:
            value = by_name.get(name)
            if value is None:
                continue
            readers = [user for user in value.users if user.name in site.before and user in place]
            first = min(readers, key=place.__getitem__, default=end)
            with graph.inserting_before(first):
                graph.call_function(note, (i, name, value))


def discrete_values(stage: Stage, call: NamedCall, seed: int) -> set[str]:
    """The nodes of the module before the change whose values are masks or integers."""
    found: set[str] = set()

    def note(name: str, value: Any) -> None:
        if is_discrete(value):
            found.add(name)

    tapped = working_copy(stage.before)
    for node in list(tapped.graph.nodes):
        if node.op not in ("placeholder", "output"):
            with tapped.graph.inserting_after(node):
                tapped.graph.call_function(note, (node.name, node))
    tapped.recompile()
    seeded(seed)
    call.on(tapped)
    return found


def seeded(seed: int) -> None:
    """Start all random numbers anew; the caller keeps the random state of the process. `torch.manual_seed` also keeps
    a stack trace for each device that was never used, which takes a millisecond."""
    torch.default_generator.manual_seed(seed)
    if torch.cuda.is_initialized():
        torch.cuda.manual_seed_all(seed)


def digest(stage: Stage, site: ComparedSite) -> str:
    """What a site is, besides its names and the values of its tensors: equal digests mean the same rewrite."""
    sides = [_text(stage.before, site.before, site), _text(stage.after, site.after, site)]
    return "\n---\n".join(sides)


def _text(gm: GraphModule, inside: frozenset[str], site: ComparedSite) -> str:
    numbers = {name: f"in{i}" for i, name in enumerate(site.inputs)}
    lines = []
    for node in gm.graph.nodes:
        if node.name not in inside:
            continue
        numbers[node.name] = str(len(numbers))
        target = function_name(node.target) if not isinstance(node.target, str) else node.op
        arguments = to_refs((node.args, node.kwargs), {n: numbers.get(n.name, "?") for n in node.all_input_nodes})
        lines.append(f"{numbers[node.name]} {target} {arguments} {_described(gm, node)}")
    side = 0 if inside is site.before else 1
    return "\n".join([*lines, " ".join(numbers[pair[side]] for pair in site.pairs)])


def _described(gm: GraphModule, node: Node) -> str:
    if node.op == "call_method":
        return str(node.target)
    used = tensors_used(gm, [node])
    shapes = [(name.removeprefix(str(node.target)), t.dtype, tuple(t.shape)) for name, t in used.items()]
    module = gm.get_submodule(str(node.target)) if node.op == "call_module" else None
    return f"{module!r} {module.training if module is not None else ''} {shapes}"
