"""A site as two small modules that can be run alone, and the values that really reach it."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.fx import Graph, GraphModule, Node

from refold import fx_private
from refold.snapshot import function_name, to_refs
from refold.verifying.calls import Call
from refold.verifying.leaves import map_tensors
from refold.verifying.sites import Site
from refold.verifying.stages import Stage, working_copy

Values = dict[str, Any]


@dataclass(frozen=True)
class Extract:
    """One side of a site as a module: its inputs by place, its results as a tuple."""

    module: GraphModule
    tensors: tuple[str, ...]
    """The names, in the whole module, of the parameters and buffers it uses."""


def extract(stage: Stage, site: Site) -> tuple[Extract, Extract]:
    """Both sides of a site."""
    before = _extract(stage.before, site.before, site.inputs, [b for b, _ in site.pairs])
    after = _extract(stage.after, site.after, site.inputs, [a for _, a in site.pairs])
    return before, after


def _extract(gm: GraphModule, inside: frozenset[str], inputs: Sequence[str], results: Sequence[str]) -> Extract:
    graph = Graph()
    values: dict[str, Node] = {}
    for name in inputs:
        values[name] = graph.placeholder(name)
    nodes = [node for node in gm.graph.nodes if node.name in inside]
    for node in nodes:
        values[node.name] = graph.node_copy(node, lambda n: values[n.name])
        values[node.name].meta = {}
    graph.output(tuple(values[name] for name in results))
    return Extract(GraphModule(gm, graph, "Site"), tuple(tensors_used(gm, nodes)))


def tensors_used(gm: nn.Module, nodes: Iterable[Node]) -> dict[str, torch.Tensor]:
    """The parameters and buffers that some nodes use, by their full names."""
    found: dict[str, torch.Tensor] = {}
    for node in nodes:
        if node.op not in ("call_module", "get_attr"):
            continue
        owner: Any = gm
        for part in str(node.target).split("."):
            owner = getattr(owner, part)
        if isinstance(owner, torch.Tensor):
            found[str(node.target)] = owner
        elif isinstance(owner, nn.Module):
            named = [*owner.named_parameters(remove_duplicate=False), *owner.named_buffers(remove_duplicate=False)]
            found |= {f"{node.target}.{name}": tensor for name, tensor in named}
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


def collect(stage: Stage, sites: Sequence[Site], call: Call, seed: int) -> list[Values]:
    """Run the module before the change once, and note the values that reach each site at the moment it reads them."""
    found: list[Values] = [{} for _ in sites]

    def note(place: int, name: str, value: Any) -> None:
        found[place][name] = map_tensors(value, lambda t: t.detach().clone())

    tapped = working_copy(stage.before)
    _tap(tapped.graph, sites, note)
    tapped.recompile()
    seeded(seed)
    call.on(tapped)
    return [{name: values.get(name) for name in site.inputs} for site, values in zip(sites, found, strict=True)]


def _tap(graph: Graph, sites: Sequence[Site], note: Any) -> None:
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


def seeded(seed: int) -> None:
    """Start all random numbers anew; the caller keeps the random state of the process. `torch.manual_seed` also notes
    a stack trace for each device that was never used, which takes a millisecond."""
    torch.default_generator.manual_seed(seed)
    if torch.cuda.is_initialized():
        torch.cuda.manual_seed_all(seed)


def digest(stage: Stage, site: Site) -> str:
    """What a site is, besides its names and the values of its tensors: equal digests mean the same rewrite."""
    sides = [_text(stage.before, site.before, site), _text(stage.after, site.after, site)]
    return "\n---\n".join(sides)


def _text(gm: GraphModule, inside: frozenset[str], site: Site) -> str:
    numbers = {name: f"in{i}" for i, name in enumerate(site.inputs)}
    lines = []
    for node in gm.graph.nodes:
        if node.name not in inside:
            continue
        numbers[node.name] = str(len(numbers))
        target = function_name(node.target) if not isinstance(node.target, str) else node.op
        described = _described(gm, node)
        lines.append(
            f"{numbers[node.name]} {target} {_numbered(to_refs((node.args, node.kwargs)), numbers)} {described}"
        )
    side = 0 if inside is site.before else 1
    return "\n".join([*lines, " ".join(numbers[pair[side]] for pair in site.pairs)])


def _numbered(value: Any, numbers: dict[str, str]) -> str:
    from refold.snapshot import Ref

    if isinstance(value, Ref):
        return f"%{numbers.get(value.name, '?')}"
    if isinstance(value, dict):
        return str({k: _numbered(v, numbers) for k, v in value.items()})
    if isinstance(value, tuple | list):
        return f"{type(value).__name__}({', '.join(_numbered(v, numbers) for v in value)})"
    return repr(value)


def _described(gm: GraphModule, node: Node) -> str:
    if node.op == "call_method":
        return str(node.target)
    used = tensors_used(gm, [node])
    shapes = [(name.removeprefix(str(node.target)), t.dtype, tuple(t.shape)) for name, t in used.items()]
    module = gm.get_submodule(str(node.target)) if node.op == "call_module" else None
    return f"{module!r} {module.training if module is not None else ''} {shapes}"
