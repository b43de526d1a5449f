"""Raising: the ATen nodes of one call of a leaf module become one call_module of that module, at its own path."""

from __future__ import annotations

import dataclasses
import operator
from collections.abc import Collection, Iterable, Iterator
from typing import Any

import torch
from torch import fx, nn

from refold.capturing.effects import has_effect

_CONTAINERS = (nn.Sequential, nn.ModuleList, nn.ModuleDict, nn.Identity)


@dataclasses.dataclass(frozen=True)
class Refusal:
    """A leaf module that stays as ATen ops, and why."""

    path: str
    type: str
    why: str

    def __str__(self) -> str:
        return f"{self.path} ({self.type}): {self.why}"


@dataclasses.dataclass
class Raised:
    """What raising did: the paths that are module calls now, those that are not, and calls that nobody read."""

    modules: list[str] = dataclasses.field(default_factory=list)
    refused: list[Refusal] = dataclasses.field(default_factory=list)
    dead: list[str] = dataclasses.field(default_factory=list)


def is_leaf(module: nn.Module) -> bool:
    """The classic rule (a class of torch.nn), narrowed to modules that hold no others."""
    own_class = type(module).__module__.startswith("torch.nn.modules") and type(module) not in _CONTAINERS
    return own_class and next(module.children(), None) is None


def raise_modules(graph: fx.Graph, model: nn.Module, split: Collection[str] = ()) -> Raised:
    """Replace the nodes of every leaf call by one call_module, in one pass over the graph.

    What modules that were ``split`` into a twin and the rest hold belongs to that rest.
    """
    raised = Raised()
    names = names_of_tensors(model)
    for (_call, path), nodes in calls_of(graph, model, is_leaf).items():
        if any(above in split for above in above(path)):
            raised.refused.append(
                Refusal(path, type(model.get_submodule(path)).__name__, "it is held by a module that was split")
            )
            continue
        _raise_call(graph, model.get_submodule(path), path, nodes, names, raised)
    return raised


def above(path: str) -> Iterator[str]:
    """The paths of the modules that hold what stands at a path, from the inside out."""
    while "." in path:
        path = path.rpartition(".")[0]
        yield path


def names_of_tensors(model: nn.Module) -> dict[str, int]:
    """Every name of every parameter and buffer, with the identity of the tensor it stands for: ties share one."""
    found = {name: id(t) for name, t in model.named_parameters(remove_duplicate=False)}
    return found | {name: id(t) for name, t in model.named_buffers(remove_duplicate=False)}


def calls_of(graph: fx.Graph, model: nn.Module, wanted: Any) -> dict[tuple[str, str], list[fx.Node]]:
    """The nodes of every call of a wanted module: {(key of the call, path of the module): nodes, in order}."""
    modules = dict(model.named_modules(remove_duplicate=False))
    leaves = {path for path, module in modules.items() if path and wanted(module)}
    calls: dict[tuple[str, str], list[fx.Node]] = {}
    for node in graph.nodes:
        call = innermost_call(node)
        if call is not None and call[1] in leaves:
            calls.setdefault(call, []).append(node)
    return calls


def innermost_call(node: fx.Node) -> tuple[str, str] | None:
    """Which module call made this node; a second call of one module has its own key."""
    stack = node.meta.get("nn_module_stack")
    if node.op != "call_function" or not stack:
        return None
    key, (path, _cls) = next(reversed(stack.items()))
    return key, path.split("@")[0]


def _raise_call(
    graph: fx.Graph, module: nn.Module, path: str, nodes: list[fx.Node], names: dict[str, int], raised: Raised
) -> None:
    members = set(nodes)
    outputs = [n for n in nodes if any(u not in members for u in n.users)]
    if not outputs and not any(has_effect(n) for n in nodes):
        _erase(graph, nodes)
        raised.dead.append(path)
        return
    own = {id(t) for t in (*module.parameters(), *module.buffers())}
    inputs = [n for n in _outer_inputs(nodes, members) if n.op != "get_attr" or names.get(str(n.target)) not in own]
    why = _why_not(module, nodes, inputs, outputs)
    if why:
        raised.refused.append(Refusal(path, type(module).__name__, why))
        return
    with graph.inserting_before(nodes[0]):
        call = graph.call_module(path, tuple(inputs))
    call.meta = dict(outputs[0].meta)
    outputs[0].replace_all_uses_with(call, delete_user_cb=lambda user: user not in members)
    _erase(graph, nodes)
    raised.modules.append(path)


def _outer_inputs(nodes: Iterable[fx.Node], members: set[fx.Node]) -> list[fx.Node]:
    """The tensors that flow into the call, in the order of their first use."""
    sources = dict.fromkeys(source for node in nodes for source in node.all_input_nodes)
    return [n for n in sources if n not in members and is_tensor(n)]


def is_tensor(node: fx.Node) -> bool:
    return isinstance(node.meta.get("val"), torch.Tensor) or node.op == "get_attr"


def _why_not(module: nn.Module, nodes: list[fx.Node], inputs: list[fx.Node], outputs: list[fx.Node]) -> str:
    """Why this call cannot be one call_module with one tensor in and one out; empty where it can."""
    if not outputs:
        return "nobody reads its result, but it has an effect"
    if any(not is_tensor(n) for n in outputs):
        return "a size computed inside it is used outside"
    if len(outputs) > 1 or outputs[0].target is operator.getitem:
        return f"it gives {len(outputs)} values; only modules with one result are raised"
    if len(inputs) != 1:
        return f"it takes {len(inputs)} tensors; only modules with one input are raised"
    if isinstance(module, nn.modules.conv._ConvTransposeNd) and _given_output_size(module, nodes):
        return "it was called with an output_size"
    return ""


def _given_output_size(module: Any, nodes: list[fx.Node]) -> bool:
    """Whether output_padding in the graph differs from the module's own."""
    for node in nodes:
        names = [a.name for a in node.target._schema.arguments] if hasattr(node.target, "_schema") else []
        if "output_padding" not in names:
            continue
        place = names.index("output_padding")
        padding = node.args[place] if len(node.args) > place else [0]
        return any(p != own for p, own in zip(_as_list(padding), module.output_padding, strict=False))
    return False


def _as_list(value: Any) -> list[Any]:
    return list(value) if isinstance(value, (list, tuple)) else [value]


def _erase(graph: fx.Graph, nodes: list[fx.Node]) -> None:
    for node in reversed(nodes):
        graph.erase_node(node)
