"""The few verbs most rewrites need. A convenience: what is recorded is the difference they make, not their calls."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import chain, count
from typing import Any

import torch
from torch import nn
from torch.fx import GraphModule, Node

from refold import fx_private, recording
from refold.history import find_tensor
from refold.weights import MapRecord, Operation, Tensors, TensorSpec, WeightMap, apply_map


class Editor:
    """Edits one graph module. Modules are swapped in containers that belong to the graph, never edited."""

    def __init__(self, gm: GraphModule) -> None:
        self.gm = gm
        self.graph = gm.graph
        self.shared: dict[object, Node] = {}
        """Nodes that several sites of one run share, by a key of the transformation's own."""

    # --- nodes -----------------------------------------------------------------------------------------------------

    def call(self, before: Node, target: Any, *args: Any, **kwargs: Any) -> Node:
        """Insert a call of a function, of a module (by path) or of a method (a leading dot)."""
        with self.graph.inserting_before(before):
            if not isinstance(target, str):
                return self.graph.call_function(target, args, kwargs)
            if target.startswith("."):
                return self.graph.call_method(target[1:], args, kwargs)
            return self.graph.call_module(target, args, kwargs)

    def fetch(self, before: Node, name: str) -> Node:
        """Insert a get_attr of a parameter or buffer."""
        with self.graph.inserting_before(before):
            return self.graph.create_node("get_attr", name)

    def replace_uses(self, old: Node, new: Node) -> None:
        """Let all who read one node read another; it inherits what was noted about the value."""
        for key in ("val", "tensor_meta", "nn_module_stack", "stack_trace"):
            if key in old.meta and key not in new.meta:
                new.meta[key] = old.meta[key]
        old.replace_all_uses_with(new, propagate_meta=False)

    def erase(self, node: Node) -> None:
        """Erase a node, and the fetches that only it used; tensors and modules that nothing refers to any more go."""
        inputs = node.all_input_nodes
        self.graph.erase_node(node)
        for fetch in inputs:
            if fetch.op == "get_attr" and not fetch.users:
                self.graph.erase_node(fetch)

    # --- modules and tensors ---------------------------------------------------------------------------------------

    def container(self, path: str) -> nn.Module:
        """The module at a path, to put things into: one that belongs to the graph alone, made or copied if need be."""
        owner: nn.Module = self.gm
        for part in path.split(".") if path else ():
            children = fx_private.table(owner, "_modules")
            child = children.get(part)
            if child is None:
                children[part] = child = nn.Module()
            elif type(child) is not nn.Module and not isinstance(child, GraphModule):
                twin = fx_private.empty_module(type(child), fx_private.plain_attributes(child))
                for name in fx_private.TABLES:
                    fx_private.table(twin, name).update(fx_private.table(child, name))
                children[part] = child = twin
            owner = child
        return owner

    def put_module(self, path: str, module: nn.Module) -> None:
        """Put a module at a path, in the place of what is there."""
        parent, _, key = path.rpartition(".")
        fx_private.table(self.container(parent), "_modules")[key] = module

    def put_tensor(self, name: str, tensor: torch.Tensor) -> None:
        """Put a parameter or buffer under a full name, in the place of what is there."""
        parent, _, key = name.rpartition(".")
        owner = self.container(parent)
        table = "_parameters" if isinstance(tensor, nn.Parameter) else "_buffers"
        fx_private.table(owner, table)[key] = tensor

    def remove(self, path: str) -> None:
        """Remove the module, parameter or buffer at a path; the container stays."""
        parent, _, key = path.rpartition(".")
        owner = self.container(parent)
        for name in fx_private.TABLES:
            fx_private.table(owner, name).pop(key, None)

    def free_path(self, path: str) -> str:
        """This path, or one like it: all but its end are modules, or can be made, and its end is not taken yet."""
        *parents, end = path.split(".")
        owner: nn.Module = self.gm
        found: list[str] = []
        for part in parents:
            part = next(name for name in _numbered(part) if _is_container(owner, name) or not hasattr(owner, name))
            owner = fx_private.table(owner, "_modules").get(part) or nn.Module()
            found.append(part)
        return ".".join([*found, next(name for name in _numbered(end) if not hasattr(owner, name))])

    # --- weights ---------------------------------------------------------------------------------------------------

    def map_weights(
        self, operation: Operation, sources: dict[str, str], targets: dict[str, str], keep: str = "correction"
    ) -> Tensors:
        """Compute new tensors from those of these names, and state the map so that it can be undone and applied to
        checkpoints. The caller installs the results under the names in `targets`."""
        old = {role: self._tensor(name) for role, name in sources.items()}
        new, record = apply_map(WeightMap(operation, sources, targets), old, keep)
        record.specs = {role: TensorSpec.of(tensor) for role, tensor in old.items()}
        recording.current().maps.append(record)
        _release(record, old, new)
        return new

    def _tensor(self, name: str) -> torch.Tensor:
        tensor = find_tensor(self.gm, name)
        if tensor is None:
            raise KeyError(f"there is no parameter or buffer named {name}")
        return tensor


def _numbered(name: str) -> Iterator[str]:
    return chain([name], (f"{name}_{number}" for number in count(2)))


def _is_container(owner: nn.Module, name: str) -> bool:
    """Whether a module has a child of this name that can be copied, and so be put into."""
    child = fx_private.table(owner, "_modules").get(name)
    return child is not None and not isinstance(child, torch.jit.ScriptModule)


def _release(record: MapRecord, old: Tensors, new: Tensors) -> None:
    """Let go of the memory of weights that the record can give back."""
    ledger = recording.current().ledger
    for role in record.residues:
        ledger.release(old[role], lambda role=role: record.recover(new)[role])  # type: ignore[misc]


def twin_of(module: nn.Module, **tensors: torch.Tensor | None) -> nn.Module:
    """A module like this one with other parameters; nothing of the given module is changed."""
    twin = fx_private.empty_module(type(module), fx_private.plain_attributes(module))
    for name in fx_private.TABLES:
        fx_private.table(twin, name).update(fx_private.table(module, name))
    fx_private.table(twin, "_parameters").update(tensors)
    return twin
