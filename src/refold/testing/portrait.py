"""Exactly the same: everything that a reverse must give back, written down so that two moments can be compared."""

from __future__ import annotations

import weakref
from collections import defaultdict
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.fx import GraphModule, Node

from refold import fx_private
from refold.fingerprint import fingerprint
from refold.fx_private import registered_tensors
from refold.wording import settings_of


@dataclass(frozen=True)
class Portrait:
    """A module at one moment, as plain data. It holds no tensor: values are fingerprints, ties are groups of names."""

    code: str
    nodes: tuple[str, ...]
    users: tuple[str, ...]
    tensors: dict[str, str]
    ties: frozenset[frozenset[str]]
    keys: tuple[str, ...]
    modules: dict[str, str]
    identities: dict[str, weakref.ref[torch.Tensor]] = field(compare=False)

    @classmethod
    def of(cls, model: nn.Module) -> Portrait:
        """Portray a module: a GraphModule with its graph, any other one with its tensors and modules only."""
        named = list(registered_tensors(model).items())
        nodes = list(model.graph.nodes) if isinstance(model, GraphModule) else []
        same: dict[int, set[str]] = defaultdict(set)
        for name, tensor in named:
            same[id(tensor)].add(name)
        return cls(
            code=model.code if isinstance(model, GraphModule) else "",
            nodes=tuple(map(_node, nodes)),
            users=tuple(f"{node.name}: {', '.join(user.name for user in node.users)}" for node in nodes),
            tensors={name: _describe(tensor) for name, tensor in named},
            ties=frozenset(frozenset(names) for names in same.values() if len(names) > 1),
            keys=tuple(model.state_dict()),
            modules={path: _module(path, module) for path, module in fx_private.walk_modules(model)},
            identities={name: weakref.ref(tensor) for name, tensor in named},
        )

    def differences(self, other: Portrait, *, same_objects: bool = False) -> list[str]:
        """What differs in another portrait, one sentence each."""
        found = [f"{part}: {_difference(getattr(self, part), getattr(other, part))}" for part in _PARTS]
        found = [text for text in found if not text.endswith(": ")]
        replaced = [name for name in self.identities if same_objects and not self._same_object(name, other)]
        return found + ([f"other tensor objects stand at {', '.join(replaced)}"] if replaced else [])

    def _same_object(self, name: str, other: Portrait) -> bool:
        """Whether a tensor is the one it was; one that was not kept alive cannot be."""
        mine, theirs = self.identities[name](), other.identities.get(name)
        return mine is None or (theirs is not None and theirs() is mine)

    def plain(self) -> dict[str, Any]:
        """As JSON-able data, without what does not survive a process (the order of users, identities)."""
        ties = sorted(sorted(group) for group in self.ties)
        parts = {"code": self.code, "nodes": list(self.nodes), "tensors": self.tensors, "ties": ties}
        return {**parts, "keys": list(self.keys), "modules": self.modules}


_PARTS = ("code", "nodes", "users", "tensors", "ties", "keys", "modules")


def _difference(old: Any, new: Any) -> str:
    if isinstance(old, dict):
        names = [k for k in {**old, **new} if old.get(k) != new.get(k)]
        order = "" if list(old) == list(new) else f"the order was {list(old)} and is {list(new)}"
        return "; ".join(f"{k} was {old.get(k)} and is {new.get(k)}" for k in names) or order
    if isinstance(old, tuple):
        pairs = [f"{a!r} became {b!r}" for a, b in zip(old, new, strict=False) if a != b]
        return pairs[0] if pairs else ("" if len(old) == len(new) else f"{len(old)} became {len(new)}")
    return "" if old == new else f"{old} became {new}"


def _describe(tensor: torch.Tensor) -> str:
    kind = "parameter" if isinstance(tensor, nn.Parameter) else "buffer"
    grad = "trainable" if tensor.requires_grad else "frozen"
    return f"{kind} {grad} {tensor.device} {tensor.stride()} {fingerprint(tensor)}"


def _module(path: str, module: nn.Module) -> str:
    # the class of a GraphModule is made anew by copying and pickling, and the type of its root by tracing
    kind = "GraphModule" if isinstance(module, GraphModule) else type(module).__qualname__
    return f"{kind} {'training' if module.training else 'evaluating'} {settings_of(module) if path else ''}"


def _node(node: Node) -> str:
    target: Any = node.target
    if not isinstance(target, str):
        target = f"{getattr(target, '__module__', '')}.{getattr(target, '__qualname__', target)}"
    return f"{node.name} = {node.op} {target} {node.args} {node.kwargs}"
