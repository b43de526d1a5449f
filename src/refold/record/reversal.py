"""Undo a change: its weights are recovered, then nodes, tables and attributes are put back."""

from __future__ import annotations

import copy
from collections.abc import Iterable
from typing import Any

import torch
from torch import nn
from torch.fx import GraphModule, Node

from refold import fx_private
from refold.errors import BrokenTransformation, GraphEdited, NothingToUndo, OutOfOrder, WeightsChanged
from refold.fingerprint import fingerprint, is_sharded
from refold.fx_private import find_tensor
from refold.record import call_notes
from refold.record.atomicity import atomically
from refold.record.change import Change, InitialOrder
from refold.record.containers import FormerItems
from refold.record.nodes import MISSING, from_refs
from refold.record.outside_edits import ExpectedGraph, OutsideEdit
from refold.record.released import ReleasedMemory
from refold.record.sharded_modules import check_removable
from refold.record.stack import History, attach, history, settle
from refold.record.stored_modules import revive
from refold.weights import NoInverse, Tensors
from refold.weights.gradients import gradients_back
from refold.weights.maps import MapRecord

_BELOW = "below"
_WAYS_OUT = (
    "Pass weights='original' to get the weights of the moment before the rewrite, or refold.commit(gm) to keep it."
)


def undo(gm: GraphModule, n: int | None = 1, *, weights: str = "carry", lint_and_recompile: bool = True) -> GraphModule:
    """Undo the latest `n` changes (None: all of them) and return the module.

    Weights that were changed since are carried back through the rewrites' inverse maps; `weights='original'` gives
    back those of the moment before instead, where they are still known.
    """
    past = history(gm)
    wanted = len(past) if n is None else n
    if not past:
        raise NothingToUndo("this module carries no changes: it was never transformed, or its history was committed.")
    if not isinstance(wanted, int) or not 1 <= wanted <= len(past):
        raise NothingToUndo(
            f"{n!r} changes cannot be undone: the module carries {len(past)} (None undoes all of them)."
        )
    chosen = list(range(len(past) - 1, len(past) - 1 - wanted, -1))
    return undo_chosen(gm, chosen, weights=weights, lint_and_recompile=lint_and_recompile)


def undo_chosen(
    gm: GraphModule, chosen: list[int], *, weights: str = "carry", lint_and_recompile: bool = True
) -> GraphModule:
    """Undo changes by their places in the history, one after the other, all or none."""
    if weights not in ("carry", "original"):
        raise ValueError(f"weights must be 'carry' or 'original', not {weights!r}")
    call_notes.check_not_inside(gm, "undo")
    running = call_notes.recorder_of(gm)
    if running is not None:
        raise BrokenTransformation(
            f"{running.label} undoes changes of the module that it is transforming, which no record of it can hold. "
            f"Undo them before it is called, or after."
        )
    return atomically(gm, lambda before: _undo_all(gm, chosen, weights, lint_and_recompile, before.released))


def undo_below(gm: GraphModule) -> GraphModule:
    """Undo all changes of a graph below the model that it was made of. The weights of the model are the ones that are
    trained: constants that were computed from them are dropped, whatever became of the weights since."""
    chosen = list(range(len(history(gm)) - 1, -1, -1))
    return atomically(gm, lambda before: _undo_all(gm, chosen, _BELOW, True, before.released))


def _undo_all(
    gm: GraphModule, chosen: list[int], weights: str, lint_and_recompile: bool, released: ReleasedMemory
) -> GraphModule:
    settle(gm)
    for index in chosen:
        _undo_one(gm, index, weights, released)
    return finish(gm, lint_and_recompile)


def finish(gm: GraphModule, lint_and_recompile: bool) -> GraphModule:
    """Check an edited graph and generate its code, if that is wanted."""
    if lint_and_recompile:
        gm.graph.lint()
        gm.recompile()
    return gm


def _undo_one(gm: GraphModule, index: int, weights: str, released: ReleasedMemory) -> None:
    past = history(gm)
    change = past.changes[index]
    blockers = [later.label for later in past.changes[index + 1 :] if change.conflicts_with(later)]
    if blockers:
        raise OutOfOrder(
            f"{change.label} cannot be reversed before {', '.join(blockers)}: they build on what it changed. "
            f"Reverse {'that' if len(blockers) == 1 else 'those'} first (the latest first)."
        )
    edits = () if past.expected is None else past.expected.edits
    _check_no_edit_in_the_way(change, [edit for edit in edits if edit.place > index])
    if weights != "original":
        _check_unmapped_weights(gm, change)
    if weights == "carry":
        _check_sources_of_constants(gm, change)
    check_removable(gm, change.label, (name for record in change.maps for name in record.map.targets.values()))
    tensors = recover_tensors(gm, change, "carry" if weights == _BELOW else weights, released)
    assert past.initial_order is not None
    rest, edits = (*past.changes[:index], *past.changes[index + 1 :]), tuple(e.after_undoing(index) for e in edits)
    keeps_moves = any(other.moved for other in rest) or any(edit.moved for edit in edits)
    put_back(gm, change, tensors, past.initial_order, keeps_moves=keeps_moves)
    attach(gm, History(rest, past.initial_order, ExpectedGraph(gm.graph, edits=edits)))


def _check_no_edit_in_the_way(change: Change, later: Iterable[OutsideEdit]) -> None:
    """What was edited by hand later must not be what a change made, or built on."""
    edit = next(filter(change.conflicts_with, later), None)
    if edit is not None:
        raise GraphEdited(
            f"the graph was edited outside Refold since {change.label}, and the two meet: expected {edit.what}. Take "
            f"the edit back, or call refold.commit(gm) to keep the graph as it is and give the undo records up."
        )


def _check_unmapped_weights(gm: GraphModule, change: Change) -> None:
    """Weights that a change made without saying how they come back must not have been changed since."""
    for name, mark in change.fingerprints.items():
        tensor = find_tensor(gm, name)
        if tensor is None or fingerprint(tensor) != mark:
            raise WeightsChanged(
                f"{name}, which {change.label} made, was changed since, and the transformation does not say how to "
                f"carry that back. {_WAYS_OUT}"
            )


def _check_sources_of_constants(gm: GraphModule, change: Change) -> None:
    """Weights must be what constants were computed from: the graph that is trained went on with the constants."""
    for name, mark in change.computed_from.items():
        tensor = find_tensor(gm, name)
        if tensor is not None and fingerprint(tensor) != mark:
            raise WeightsChanged(
                f"{name} was changed after {change.label} had computed constants from it, and the graph went on with "
                f"those. Undo with weights='original' for a graph that reads {name} as it is now."
            )


def recover_tensors(
    root: nn.Module, change: Change, weights: str = "carry", released: ReleasedMemory | None = None
) -> dict[str, torch.Tensor]:
    """The tensors that the change's weight maps give back and those that it retained, by the names they had before it;
    live originals where they still fit."""
    released = released or ReleasedMemory()
    found: dict[str, torch.Tensor] = {}
    for record in reversed(change.maps):  # a map may have read what an earlier one of the same change made
        names = record.map.targets
        current = {r: found.pop(n) if n in found else _target(root, n, change.label) for r, n in names.items()}
        try:
            values = record.recover(current, weights)
        except NoInverse as reason:
            layer = ", ".join(record.map.targets.values())
            raise WeightsChanged(
                f"{layer} cannot be carried back through {change.label}: {reason}. {_WAYS_OUT}"
            ) from None
        grads = gradients_back(record, current, values)
        _release(record, current, values, released)
        revived = {role: record.specs[role].revive(value) for role, value in values.items()}
        for role, tensor in revived.items():
            if role in grads and tensor.requires_grad:
                tensor.grad = grads[role].to(tensor.dtype)
            found[record.map.sources[role]] = tensor
        del values  # slices keep the memory of the whole
        _part(record, current, revived, released)
    return found | {n: _target(root, now, change.label) for n, now in change.retained.items()}


def _part(record: MapRecord, current: Tensors, revived: Tensors, released: ReleasedMemory) -> None:
    """Give recovered slices memory of their own, and let go of the whole, which can be put together again from them."""
    _unshare(revived.values())
    old, new = (sum(t.numel() for t in tensors.values()) for tensors in (revived, current))
    for role in current if record.map.operation.structural and old == new else ():
        released.release(current[role], lambda role=role: record.map.operation.forward(revived)[role].detach())  # type: ignore[misc]


def _release(record: MapRecord, current: Tensors, values: Tensors, released: ReleasedMemory) -> None:
    """Let go of the memory of folded weights that can be folded again from the recovered ones."""
    for role in current if record.corrections and record.is_untouched(current) else ():
        released.release(current[role], lambda role=role: record.map.operation.forward(values)[role])  # type: ignore[misc]


def _target(root: nn.Module, name: str, label: str) -> torch.Tensor:
    """A tensor that a map made or that was retained, as it is now."""
    tensor = find_tensor(root, name)
    if tensor is None:
        raise GraphEdited(f"{name}, which holds weights since {label}, is no longer in the module.")
    return tensor


def _unshare(tensors: Iterable[torch.Tensor]) -> None:
    """Give every restored tensor memory of its own, one after the other: a slice would keep the whole alive."""
    for tensor in tensors:
        storage = tensor.untyped_storage()
        if not is_sharded(tensor) and storage.nbytes() > tensor.numel() * tensor.element_size():
            tensor.data = tensor.data.clone(memory_format=torch.contiguous_format)


def put_back(
    gm: GraphModule,
    change: Change,
    tensors: dict[str, torch.Tensor],
    initial_order: InitialOrder,
    *,
    keeps_moves: bool = False,
) -> None:
    """Undo a change on a module: its nodes, then its tables, then its attributes. The caller guards atomicity, and says
    whether other changes that moved nodes stay."""
    _put_nodes_back(gm, change, initial_order, keeps_moves)
    restored = put_modules_back(gm, change, tensors, initial_order)
    if gm.training != change.training and "training" not in change.attributes.get("", {}):
        for module in restored:
            module.train(gm.training)


def _put_nodes_back(gm: GraphModule, change: Change, initial_order: InitialOrder, keeps_moves: bool) -> None:
    graph = gm.graph
    by_name = {node.name: node for node in graph.nodes}
    fx_private.free_names(graph, change.erased)
    end = next(iter(reversed(graph.nodes)))
    for name, record in change.erased.items():
        with graph.inserting_before(end):
            by_name[name] = graph.create_node(record.op, record.target, (), {}, name, record.type)
        by_name[name].meta = dict(change.metas.get(name, {}))

    for record in [*change.erased.values(), *(before for before, _ in change.changed.values())]:
        node = by_name[record.name]
        node.op, node.target, node.type = record.op, record.target, record.type
        node.args, node.kwargs = from_refs(record.args, by_name), from_refs(record.kwargs, by_name)
    for name, values in change.metas.items():
        if name not in change.erased and name in by_name:  # it may be gone, erased outside
            _put_meta_back(by_name[name], values)
    for name in reversed(change.created):
        graph.erase_node(by_name.pop(name))
    _put_order_back(by_name, change, initial_order, keeps_moves)
    fx_private.free_names(graph, change.names_added)
    counts = fx_private.base_counts(graph) | {k: v for k, v in change.counts.items() if v is not MISSING}
    gone = {k for k, v in change.counts.items() if v is MISSING}
    fx_private.set_base_counts(graph, {k: v for k, v in counts.items() if k not in gone})
    if change.codegen is not MISSING:
        fx_private.set_codegen(graph, change.codegen)
    fx_private.sort_users(graph)
    for name, users in initial_order.users.items():
        if name in by_name and {user.name for user in by_name[name].users} == set(users):
            by_name[name].users = {by_name[user]: None for user in users}


def _put_meta_back(node: Node, values: dict[str, Any]) -> None:
    for key, value in values.items():
        if value is MISSING:
            node.meta.pop(key, None)
        else:
            node.meta[key] = value


def _put_order_back(by_name: dict[str, Node], change: Change, initial_order: InitialOrder, keeps_moves: bool) -> None:
    """Each node that was erased or moved goes right behind its nearest former predecessor that is still there.

    Where all nodes of the beginning are there again, and no change that stays has moved any, their order is that of the
    beginning."""
    whole = len(by_name) == len(initial_order.nodes) and all(name in by_name for name in initial_order.nodes)
    whole = whole and not keeps_moves
    order, out_of_place = (initial_order.nodes, None) if whole else (change.order, {*change.erased, *change.moved})
    previous: Node | None = None
    for name in order:
        node = by_name.get(name)
        if node is None:
            continue
        misplaced = out_of_place is None or name in out_of_place
        if misplaced and previous is not None and previous.next is not node:
            previous.append(node)
        elif misplaced and previous is None and node.prev.op != "root":
            next(iter(node.graph.nodes)).prepend(node)
        previous = node


def put_modules_back(
    gm: nn.Module, change: Change, tensors: dict[str, torch.Tensor], initial_order: InitialOrder
) -> list[nn.Module]:
    """Undo what a change did to modules, and nothing else; the modules that came back."""
    restored = _put_tables_back(gm, change, tensors, initial_order)
    for path, values in change.attributes.items():
        _put_attributes_back(gm.get_submodule(path), values)
    for name, trainable in change.trainable.items():
        tensor = find_tensor(gm, name)
        if tensor is not None:
            tensor.requires_grad_(trainable)
    return restored


def _put_tables_back(
    gm: nn.Module, change: Change, tensors: dict[str, torch.Tensor], initial_order: InitialOrder
) -> list[nn.Module]:
    restored = []
    leaving = []  # a module that only moved must not die between its two places
    for (path, name), entry in sorted(change.tables.items(), key=lambda item: item[0][0].count(".")):
        live = fx_private.table(gm.get_submodule(path), name)
        leaving += [live.pop(key, None) for key in entry.added]
        back = {key: revive(value, tensors) for key, value in entry.before.items()}
        live.update(back)
        _reorder(live, entry.order, initial_order.tables.get((path, name), entry.order))
        restored += [module for module in back.values() if isinstance(module, nn.Module)]
    return restored


def _reorder(live: dict[str, Any], exact: tuple[str, ...], initial_order: tuple[str, ...]) -> None:
    """The former order where it fits; otherwise the order of initial_order, newcomers last."""
    keys = (
        exact
        if set(exact) == set(live)
        else [*(k for k in initial_order if k in live), *(k for k in live if k not in initial_order)]
    )
    entries = {key: live[key] for key in keys}
    live.clear()
    live.update(entries)


def _put_attributes_back(module: nn.Module, values: dict[str, Any]) -> None:
    for key, value in values.items():
        if value is MISSING:
            vars(module).pop(key, None)
        elif key == "__class__":
            module.__class__ = value
        elif isinstance(value, FormerItems):
            value.restore_into(module.__dict__, key)
        else:
            fx_private.set_plain_attribute(module, key, copy.copy(value) if isinstance(value, set) else value)
