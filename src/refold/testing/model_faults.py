"""Make lines of a whole job (optimize, trace, save) fail in turn: the model and what surrounds it must be as before."""

from __future__ import annotations

import builtins
import math
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn.modules import module as torch_modules

from refold.fingerprint import same_bits
from refold.fx_private import TABLES, registered_tensors, storage_of, version_of
from refold.record.containers import same_items
from refold.testing.faults import Fault, Line, _call_traced, _Lines, executed_lines, of_refold


@dataclass(frozen=True)
class ModelFacts:
    """A model and what surrounds calls of it at one moment: objects and where they lie, not only numbers."""

    tensors: dict[str, tuple[Any, ...]]
    values: dict[str, torch.Tensor]
    tables: dict[str, dict[str, Any]]
    attributes: dict[str, dict[str, Any]]
    surroundings: dict[str, Any]

    @classmethod
    def of(cls, model: nn.Module) -> ModelFacts:
        """What there is now."""
        named, modules = registered_tensors(model), dict(model.named_modules(remove_duplicate=False))
        return cls(
            {name: _facts(tensor) for name, tensor in named.items()},
            {name: tensor.detach().clone() for name, tensor in named.items()},
            {f"{path}.{kind}": dict(vars(module)[kind]) for path, module in modules.items() for kind in TABLES},
            {path: _copies(vars(module)) for path, module in modules.items()},
            _surroundings(),
        )

    def differences(self, other: ModelFacts, *, moved: bool = False) -> list[str]:
        """What is not the same at another moment; weights may have `moved` to other memory."""
        found = [] if moved else [n for n, facts in self.tensors.items() if facts != other.tensors.get(n)]
        found += [n for n, value in self.values.items() if not same_bits(value, other.values.get(n, value[None]))]
        found += [n for n, table in self.tables.items() if not same_items(table, other.tables.get(n, {}))]
        found += [f"attributes of {n}" for n, held in self.attributes.items() if not _same(held, other.attributes[n])]
        return found + [n for n, value in self.surroundings.items() if value != other.surroundings[n]]


def _facts(tensor: torch.Tensor) -> tuple[Any, ...]:
    size = tensor.untyped_storage().nbytes() if storage_of(tensor) is not None else 0
    return id(tensor), tensor.data_ptr(), storage_of(tensor), size, tensor.requires_grad, version_of(tensor)


def _copies(attributes: Mapping[str, Any]) -> dict[str, Any]:
    return {k: dict(v) if isinstance(v, dict) else v for k, v in attributes.items() if k not in TABLES}


def _same(one: dict[str, Any], other: dict[str, Any]) -> bool:
    return one.keys() == other.keys() and all(
        same_items(value, other[key]) if isinstance(value, dict) else value is other[key] for key, value in one.items()
    )


def _surroundings() -> dict[str, Any]:
    """What of torch and Python a job sets for a while."""
    return {
        "gradient mode": torch.is_grad_enabled(),
        "inference mode": torch.is_inference_mode_enabled(),
        "fast path of attention": torch.backends.mha.get_fastpath_enabled(),
        "is_exporting": torch.compiler.is_exporting,
        "random state": bytes(torch.get_rng_state().numpy()),
        "stderr": sys.stderr,
        "stdout": sys.stdout,
        "call of modules": nn.Module.__call__,
        "attributes of modules": nn.Module.__getattr__,
        "hooks on all modules": list(torch_modules._global_forward_pre_hooks),
        "max": (builtins.max, builtins.min, math.pow),
        "threads": torch.get_num_threads(),
    }


def check_job_faults(
    job: Callable[[], Any],
    model: nn.Module,
    choose: Callable[[list[Line]], Iterable[int]],
    error: type[BaseException] = Fault,
    undo: Callable[[Any], object] = lambda _: None,
    ready: Callable[[], object] = lambda: None,
) -> Iterator[str]:
    """Make chosen lines of a job on a model fail, one in each run; a sentence for each fault that left a trace. What a
    job that overcame its fault returned is handed to `undo`: the model is as it was then, but for where weights lie.
    `ready` is called before each run.
    """
    ready()
    undo(job())  # what is imported on first use is executed only once
    done: list[Any] = []
    ready()
    lines = executed_lines(lambda: done.append(job()), of_refold)
    undo(done.pop())
    for index in choose(lines):
        ready()
        before = ModelFacts.of(model)
        try:
            _call_traced(lambda: done.append(job()), _Lines(of_refold, index, error))
        except (Exception, error):
            found = before.differences(ModelFacts.of(model))
        else:
            undo(done.pop())
            found = before.differences(ModelFacts.of(model), moved=True)
        if found:
            file, number = lines[index]
            where = f"a fault at {Path(file).name}:{number} (line {index} of {len(lines)})"
            yield f"{where} left other {', '.join(found)}"


def every_line(lines: list[Line], most: int | None = None) -> list[int]:
    """The first execution of each line of the source, by index; an even choice among them where there are more."""
    first = sorted({line: i for i, line in reversed(list(enumerate(lines)))}.values())
    if most is None or len(first) <= most:
        return first
    return [first[int(i * len(first) / most)] for i in range(most)]
