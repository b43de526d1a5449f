"""The verbs of rewrites: on nodes, layers, slices, modules and weights.

They are a convenience: what is recorded is the difference that they make, not their calls.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable, Iterator, Mapping
from itertools import accumulate, chain, count
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.fx import GraphModule, Node

from refold import fx_private
from refold.fingerprint import fingerprint, is_sharded
from refold.fx_private import find_tensor
from refold.graph.aliasing import aliases
from refold.graph.layout import VIEWS, hands_out, make_reshape
from refold.graph.purity import is_pure
from refold.graph.targets import runs_unknown_code
from refold.graph.view import Call
from refold.record import call_notes
from refold.rewrite.recorded_values import RecordedValues, copy_place
from refold.weights import Concatenate, ConcatenateBlocks, Operation, Tensors
from refold.weights.joint_memory import joint_memory
from refold.weights.maps import MapRecord, TensorSpec, WeightMap, apply_map, constant_record

aten = torch.ops.aten
_OVERLOADS: dict[str, Any] = {
    "transpose": aten.transpose.int,
    "unsqueeze": aten.unsqueeze.default,
    "squeeze": aten.squeeze.dim,
    "contiguous": aten.contiguous.default,
    "add": aten.add.Tensor,
}


class Editor:
    """Edits one graph module, and marks the nodes that it makes or changes. Modules are swapped in containers that
    belong to the graph, never edited."""

    def __init__(self, gm: GraphModule, mark: Callable[[Node], None] = lambda node: None) -> None:
        self.gm = gm
        self.graph = gm.graph
        self.mark = mark
        """Marks a node as made or changed by the transformation."""
        self._values = RecordedValues(gm)
        self.shared: dict[object, Node] = {}
        """Nodes that several sites of one round share, by a key of the transformation's own."""

    # --- nodes -----------------------------------------------------------------------------------------------------

    def call(self, before: Node, target: Any, *args: Any, **kwargs: Any) -> Node:
        """Insert a call of a function, of a module (by path) or of a method (a leading dot)."""
        made = self._call(before, target, *args, **kwargs)
        self.mark(made)
        return made

    def _call(self, before: Node, target: Any, *args: Any, **kwargs: Any) -> Node:
        with self.graph.inserting_before(before):
            if not isinstance(target, str):
                made = self.graph.call_function(target, args, kwargs)
            elif target.startswith("."):
                made = self.graph.call_method(target[1:], args, kwargs)
            else:
                made = self.graph.call_module(target, args, kwargs)
        self._values.record(made)
        for source in (before, *made.all_input_nodes):  # before the output stands what belongs to its inputs
            copy_place(source, made)
        return made

    def insert(self, before: Node, name: str, value: Node, *args: Any, **kwargs: Any) -> Node:
        """Insert a small step around a rewrite: a method of a tensor, or the ATen operator for it where the graph has
        such operators. It is not marked: it is no place that was rewritten."""
        exported = isinstance(before.target, torch._ops.OpOverload) and name in _OVERLOADS
        return self._call(before, _OVERLOADS[name] if exported else f".{name}", value, *args, **kwargs)

    def fetch(self, before: Node, name: str) -> Node:
        """Insert a get_attr of a parameter or buffer."""
        with self.graph.inserting_before(before):
            made = self.graph.create_node("get_attr", name)
        self._values.record(made)
        return made

    def replace_uses(self, old: Node, new: Node) -> None:
        """Let all who read one node read another; it inherits what was recorded about the value."""
        for key in ("val", "tensor_meta", "nn_module_stack", "stack_trace"):
            if key in old.meta and key not in new.meta:
                new.meta[key] = old.meta[key]
        old.replace_all_uses_with(new, propagate_meta=False)

    def erase(self, node: Node) -> None:
        """Erase a node, and the fetches that only it used; tensors and modules that nothing refers to any more go."""
        inputs = node.all_input_nodes
        self.graph.erase_node(node)
        self._erase_fetches(inputs)

    def _erase_fetches(self, nodes: Iterable[Node]) -> None:
        for fetch in nodes:
            if fetch.op == "get_attr" and not fetch.users:
                self.graph.erase_node(fetch)

    def erase_unused(self, nodes: Iterable[Node]) -> None:
        """Erase these nodes and whatever only they read, as far as nothing reads them and they only compute."""
        pending = list(nodes)
        erased: set[Node] = set()
        while pending:
            node = pending.pop()
            if node in erased or node.users or not is_pure(self.gm, node):
                continue
            erased.add(node)
            pending += node.all_input_nodes
            self.graph.erase_node(node)

    # --- layers ----------------------------------------------------------------------------------------------------

    def replace_layer(
        self,
        call: Call,
        settings: Mapping[str, Any] | None = None,
        names: Mapping[str, str] | None = None,
        input: Node | None = None,
        **tensors: torch.Tensor | None,
    ) -> None:
        """Let a layer compute with other settings, on another input and with other tensors, by role; None takes a
        tensor away. A function's tensors lie under the names of before, or are put under these `names` and fetched anew
        from there. What is no parameter yet becomes one that requires gradients if the weight does."""
        node, source = call.node, input or call.input
        new = {role: _as_parameter(tensor, call.weight.requires_grad) for role, tensor in tensors.items()}
        if call.path is not None:
            self.put_module(call.path, _layer_like(self.gm.get_submodule(call.path), settings or {}, new))
            node.args, node.kwargs = (source,), {}
        else:
            before = node.all_input_nodes
            fetches = self._put_tensors(call, new, names or {})
            if settings or input or fetches:
                fetched = {n.target: n for n in before if n.op == "get_attr"}
                own = {role: fetched[operand.name] for role, operand in call.operands.items()}
                node.args, node.kwargs = _arguments(call, {"input": source, **own, **fetches}, settings or {})
                node.target = _taking(node.target, settings or {})
                self._erase_fetches(before)
        self.mark(node)

    def _put_tensors(
        self, call: Call, tensors: Mapping[str, torch.Tensor | None], names: Mapping[str, str]
    ) -> dict[str, Node | None]:
        """Put a function's tensors; the nodes that fetch those under new names, and None for those that go."""
        fetches: dict[str, Node | None] = {}
        for role, tensor in tensors.items():
            name = names.get(role) or call.operands[role].name
            if tensor is None:
                self.remove(name)
                fetches[role] = None
                continue
            self.put_tensor(name, tensor)
            if role in names:
                fetches[role] = self.fetch(call.node, name)
        return fetches

    def merged_layer(self, before: Node, calls: list[Call], path: str, blocks: int = 1) -> Node:
        """Insert one layer that computes the outputs of several on one input, in this order; its tensors lie at a path.
        Layers without a bias must stand behind those that have one: the joint bias is padded where it is used. With
        several blocks, each holds that part of the outputs of all layers: then all have a bias, or none."""
        biased = [call for call in calls if call.bias is not None]
        tensors = {"weight": self._concatenate(calls, "weight", f"{path}.weight", blocks)}
        if biased:
            tensors["bias"] = self._concatenate(biased, "bias", f"{path}.bias", blocks)
        first = calls[0]
        if all(call.kind == "module" for call in calls) and len(biased) in (0, len(calls)):
            like = self.gm.get_submodule(first.path or "")
            self.put_module(path, _layer_like(like, {}, {"bias": None, **tensors}))
            return self.call(before, path, first.input)
        for role, tensor in tensors.items():
            self.put_tensor(f"{path}.{role}", tensor)
        arguments = {role: self.fetch(before, f"{path}.{role}") for role in first.order if role in tensors}
        missing = sum(call.width for call in calls if call.bias is None)
        exported = all(call.kind == "aten" for call in calls)
        if biased and missing:
            pad = aten.constant_pad_nd.default if exported else F.pad
            arguments["bias"] = self._call(before, pad, arguments["bias"], [0, missing])
        target = first.node.target if exported else first.function
        args, kwargs = _arguments(first, {"input": first.input, **arguments}, {})
        return self.call(before, target, *args, **kwargs)

    def _concatenate(self, calls: list[Call], role: str, name: str, blocks: int) -> nn.Parameter:
        """The joint tensor of one role. The originals become views of it at once, so that memory is never doubled; and
        if they are views of such a one already, for another graph of the same model, it is that one's memory."""
        operands = [call.operands[role] for call in calls]
        sources = {str(i): operand.name for i, operand in enumerate(operands)}
        dim = calls[0].out_axis if role == "weight" else 0
        widths = tuple(call.width for call in calls)
        operation = Concatenate(widths, dim) if blocks == 1 else ConcatenateBlocks(widths, dim, blocks)
        whole = self.map_weights(operation, sources, {"whole": name})["whole"]
        shared = dim == 0 and blocks == 1 and not is_sharded(whole)  # columns do not lie together in memory
        if shared and (joint := joint_memory([operand.tensor for operand in operands])) is not None:
            whole = joint
        for operand, part in zip(operands, whole.split(list(widths)) if shared else (), strict=False):
            if not operand.tensor.is_inference() and not operand.tensor.is_meta:
                operand.tensor.data = part
        return nn.Parameter(whole, requires_grad=operands[0].tensor.requires_grad)

    def slice_up(self, calls: list[Call], merged: Node, axis: int, blocks: int = 1) -> None:
        """Let layers be slices of a merged one along an axis, counted from the last; their own tensors go. Of several
        blocks, which lie along the last axis, each holds a part of every slice."""
        ends = list(accumulate(call.width // blocks for call in calls))
        exported = calls[0].kind == "aten"
        if blocks > 1:  # -1: on one rank of several, there is but one of the blocks
            target = aten.unflatten.int if exported else ".unflatten"
            merged = self._call(calls[0].node, target, merged, -1, [-1, ends[-1]])
        for call, stop in zip(calls, ends, strict=True):
            self._become_slice(call, merged, axis, stop - call.width // blocks, stop, blocks > 1)

    def _become_slice(self, call: Call, merged: Node, axis: int, start: int, stop: int, from_blocks: bool) -> None:
        node, before = call.node, call.node.all_input_nodes
        exported = call.kind == "aten"
        where: Any = (..., slice(start, stop), *[slice(None)] * (-1 - axis))
        args: tuple[Any, ...] = (axis, start, stop) if exported else (where,)
        target: Any = aten.slice.Tensor if exported else operator.getitem
        if from_blocks:
            merged = self._call(node, target, merged, *args)
            target, args = aten.flatten.using_ints if exported else torch.flatten, (-2,)
        node.op, node.target, node.args, node.kwargs = "call_function", target, (merged, *args), {}
        self._values.record(node)
        self.mark(node)
        make_views_reshapes(self.gm, node)
        self._erase_fetches(before)  # the input may be fetched as well, and stays where others read it
        self.remove_layer(call)

    def remove_layer(self, call: Call) -> None:
        """Remove the module of a call, or its tensors."""
        for name in [call.path] if call.path else [operand.name for operand in call.operands.values()]:
            self.remove(name)

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
                children[part] = child = fx_private.module_like(type(child), vars(child))
            owner = child
        return owner

    def put_module(self, path: str, module: nn.Module) -> None:
        """Put a module at a path, in the place of what is there."""
        parent, _, key = path.rpartition(".")
        fx_private.table(self.container(parent), "_modules")[key] = module

    def put_tensor(self, name: str, tensor: torch.Tensor) -> None:
        """Put a parameter or buffer under a full name, in the place of what is there."""
        parent, _, key = name.rpartition(".")
        _register(self.container(parent), key, tensor)

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
        call_notes.current().maps.append(record)
        _release(record, old, new)
        return new

    def constant(self, name: str, value: torch.Tensor, weights: Iterable[str] = ()) -> str:
        """Keep a value as a buffer that no checkpoint holds, under a name like this one; where it is. One that was
        computed from weights (their names) is computed again when a checkpoint is loaded."""
        path = self.free_path(f"constants.{name}")
        owner, _, key = path.rpartition(".")
        self.container(owner).register_buffer(key, value.detach().clone(), persistent=False)
        sources = {weight: fingerprint(self._tensor(weight)) for weight in weights}
        call_notes.current().computed_from.update(sources)
        if not sources:
            call_notes.current().maps.append(constant_record(path, value))
        return path

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
    released = call_notes.current().released
    for role in record.corrections:
        released.release(old[role], lambda role=role: record.recover(new)[role])  # type: ignore[misc]


def _taking(target: Any, settings: Mapping[str, Any]) -> Any:
    """The overload of a convolution that takes a padding in numbers, where one took the name of a rule before."""
    by_name = isinstance(target, torch._ops.OpOverload) and target._overloadname == "padding"
    return target.overloadpacket.default if by_name and isinstance(settings.get("padding"), list) else target


def _as_parameter(tensor: torch.Tensor | None, requires_grad: bool) -> nn.Parameter | None:
    return tensor if tensor is None or isinstance(tensor, nn.Parameter) else nn.Parameter(tensor, requires_grad)


def _layer_like(
    module: nn.Module, settings: Mapping[str, Any], tensors: Mapping[str, torch.Tensor | None]
) -> nn.Module:
    """A layer like this one with other tensors and settings, and the sizes that go with them; nothing of the given one
    is changed."""
    layer: Any = fx_private.module_like(type(module), fx_private.with_own_containers(vars(module)))
    for role, tensor in tensors.items():
        _register(layer, role, tensor)
    for name, value in settings.items():
        setattr(layer, name, value)
    if isinstance(layer, nn.Linear):
        layer.out_features, layer.in_features = layer.weight.shape
    elif isinstance(layer, nn.Conv1d | nn.Conv2d | nn.Conv3d):
        layer.out_channels = layer.weight.shape[0]
        if "padding" in settings:
            layer._reversed_padding_repeated_twice = [size for size in settings["padding"][::-1] for _ in range(2)]
    return layer


def _register(owner: nn.Module, key: str, tensor: torch.Tensor | None) -> None:
    """Put a parameter, a buffer or no parameter under a name. What has this name in another table goes: the weight of a
    layer may be a buffer, and what takes its place a parameter."""
    target = "_parameters" if tensor is None or isinstance(tensor, nn.Parameter) else "_buffers"
    for name in fx_private.TABLES:
        if name != target:
            fx_private.table(owner, name).pop(key, None)
    fx_private.table(owner, target)[key] = tensor


def _arguments(
    call: Call, nodes: Mapping[str, Node | None], settings: Mapping[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The arguments of a layer's function: the nodes in its order, then its settings by name."""
    keywords = {**call.given, **settings}
    args = [nodes.get(role) for role in call.order]
    while args[-1] is None and not keywords:
        args.pop()
    return tuple(args), keywords


def make_views_reshapes(gm: GraphModule, node: Node) -> None:
    """A slice cannot always be viewed in another shape, but always be reshaped. What leaves the graph is made whole. So
    is what code that is not torch's may read, or a view of it: such code meets the layout that it met before."""
    found = list(aliases(gm, node))
    for value, reader in found:
        if reader.target in VIEWS:
            make_reshape(reader)
        elif value is node and hands_out(reader):
            _read_contiguous(gm, node, reader)
    make_whole_for_others(gm, node, [reader for _, reader in found])


def make_whole_for_others(gm: GraphModule, node: Node, readers: Iterable[Node]) -> None:
    """Let all that read a value read a contiguous copy, if there is code among these readers that is not torch's."""
    if any(runs_unknown_code(gm, reader) and not hands_out(reader) for reader in readers):
        for reader in [user for user in node.users if not _is_contiguous_call(user)]:
            _read_contiguous(gm, node, reader)


def _is_contiguous_call(node: Node) -> bool:
    return node.op == "call_method" and node.target == "contiguous"


def _read_contiguous(gm: GraphModule, node: Node, reader: Node) -> None:
    existing = next(filter(_is_contiguous_call, node.users), None)
    if existing is None:
        with node.graph.inserting_after(node):
            existing = node.graph.call_method("contiguous", (node,))
        RecordedValues(gm).record(existing)
        copy_place(node, existing)
    reader.replace_input_with(node, existing)
