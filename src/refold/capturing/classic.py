"""Classic fx: torch.fx's own symbolic trace, for models that torch.export cannot take but proxies can run through."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import fx, nn

from refold.capturing.assembling import assemble
from refold.capturing.calling import Calling, add_output, bind
from refold.capturing.devices import unpin
from refold.capturing.errors import NeverCapturable
from refold.capturing.explaining import Failure, explain
from refold.capturing.export import Adapter, Result
from refold.capturing.fast_path import without_fast_path
from refold.capturing.module import Captured
from refold.capturing.report import CaptureReport
from refold.capturing.restoring import switched, untouched
from refold.capturing.sizes import InputRule, SizeRules
from refold.capturing.unlifting import CONSTANTS
from refold.capturing.whole import NotCaptured, attach_record, prove, unread_tensors

NAME = "classic torch.fx"


class _Tracer(fx.Tracer):
    """Records reads of parameters and buffers too, so that what is computed from them alone stays in the graph."""

    proxy_buffer_attributes = True

    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
        return module_qualified_name != "model" and super().is_leaf_module(m, module_qualified_name)


def capture_classic(
    model: nn.Module,
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    dynamic: Any,
    failures: list[Failure],
    switches: Mapping[str, Any],
) -> Captured:
    """Trace with proxies; the sizes in the graph are those the proxies asked for, so they are open until tried."""
    with switched(model, switches):
        calling, leaves = bind(model, args, kwargs, switches)
        try:
            return _capture(model, calling, leaves, dynamic, failures)
        except NeverCapturable:
            raise
        except Exception as error:  # whatever the model's code does to a proxy
            failures.append(explain(NAME, error))
            raise NotCaptured(failures, error) from error


def _capture(
    model: nn.Module, calling: Calling, leaves: list[torch.Tensor], dynamic: Any, failures: Sequence[Failure]
) -> Captured:
    started = time.perf_counter()
    result = Result()
    with untouched(model), without_fast_path():
        adapter = Adapter(model, calling, result)
        graph, constants = _own_arguments(_Tracer().trace(adapter), adapter, calling)
    unpinned = unpin(graph)
    captured = assemble(graph, model, constants, {})
    rules = _open_rules(calling, leaves) if dynamic is not False else _open_rules(calling, leaves).pinned(set())
    trials = prove(model, captured, calling, leaves, rules)
    rules = rules.pinned(trials.proven)
    report = CaptureReport(
        model=type(model).__name__,
        method=NAME,
        dynamic={r.name: tuple(d for d, s in enumerate(r.sizes) if isinstance(s, str)) for r in rules.inputs},
        sizes_tried=tuple(trials.tried),
        raised=tuple(str(n.target) for n in graph.nodes if n.op == "call_module"),
        refused=(),
        twins=(),
        unread=tuple(unread_tensors(captured, model)),
        regions_inlined=0,
        checks_dropped=0,
        devices_unpinned=unpinned,
        nodes=len(graph.nodes),
        training=model.training,
        notes=tuple(trials.notes),
        left_out=tuple(result.left_out),
        attempts=tuple(map(str, failures)),
        seconds={"trace": time.perf_counter() - started},
    )
    attach_record(captured, model, calling, rules, report, constants)
    return captured


def _open_rules(calling: Calling, leaves: Sequence[torch.Tensor]) -> SizeRules:
    """Nothing is known about sizes: every dimension is open until it is tried."""
    inputs = [
        InputRule(name, leaf.dtype, tuple(f"{name}.{d}" for d in range(leaf.dim())), tuple(leaf.shape))
        for name, leaf in zip(calling.leaf_names(), leaves, strict=True)
    ]
    return SizeRules(tuple(inputs), {}, ())


def _own_arguments(traced: fx.Graph, adapter: Adapter, calling: Calling) -> tuple[fx.Graph, dict[str, Any]]:
    """Copy the graph: the model's own arguments and paths instead of the adapter's, its constants in their place."""
    graph = fx.Graph()
    constants: dict[str, Any] = {}
    leaves = calling.add_placeholders(graph)
    env: dict[fx.Node, Any] = {}
    for node in traced.nodes:
        if node.op == "placeholder":
            env[node] = leaves
        elif node.op == "output":
            add_output(graph, adapter.result.tree, fx.map_arg(node.args[0], lambda n: env[n]))
        elif any(isinstance(env[n], list) for n in node.all_input_nodes):
            env[node] = leaves[int(str(node.args[1]))]
        else:
            target = _own_target(node, adapter, constants)
            args, kwargs = fx.map_arg((node.args, node.kwargs), lambda n: env[n])
            env[node] = graph.create_node(node.op, target, args, kwargs, node.name.removeprefix("model_"), node.type)
    return graph, constants


def _own_target(node: fx.Node, adapter: Adapter, constants: dict[str, Any]) -> Any:
    if node.op not in ("call_module", "get_attr"):
        return node.target
    path = str(node.target)
    if path.startswith("model."):
        return path.removeprefix("model.")
    constants[f"{CONSTANTS}.{path}"] = getattr(adapter, path)
    return f"{CONSTANTS}.{path}"
