"""Verify that a rewritten module still computes the same: is it right, and what does it cost in accuracy?"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from contextlib import suppress
from typing import Any

import torch
from torch import nn
from torch.fx import GraphModule

from refold.change import Change
from refold.fingerprint import same_bits
from refold.history import check_graph_module, history
from refold.transformation import Transformation
from refold.verifying.accuracy import Graded, OutputReference
from refold.verifying.calls import Call, as_calls
from refold.verifying.exact import by_signature
from refold.verifying.extracting import seeded
from refold.verifying.results import OutputVerdict, SiteVerdict, Verification
from refold.verifying.stage_verdicts import judge_stage
from refold.verifying.stages import stages, working_copy

__all__ = ["Graded", "OutputReference", "OutputVerdict", "SiteVerdict", "Verification", "verify", "verify_last"]


def verify(
    gm: GraphModule,
    inputs: Any,
    *,
    original: nn.Module | None = None,
    transformations: Iterable[Transformation] = (),
    seed: int = 0,
) -> Verification:
    """Answer two questions about a module that was rewritten.

    *Is the rewrite right?* Every rewritten site is cut out of the graphs before and after the change and run alone, in
    float64, on the values that really reach it and on drawn ones. *What does it cost in accuracy?* Every output is
    compared with a float64 run of the original, beside the original's own error.

    `inputs` are a dict of keyword arguments, a tuple of positional ones, a tensor, or a list of several such. The
    original is rebuilt from the module's history, or given. `transformations` helps with weights that no weight map
    accounts for: those that were applied can be applied again in float64. Nothing is touched.
    """
    return _verify(check_graph_module(gm), inputs, len(history(gm)), original, transformations, seed)


def verify_last(
    gm: GraphModule,
    inputs: Any,
    n: int = 1,
    *,
    before: nn.Module | None = None,
    transformations: Iterable[Transformation] = (),
    seed: int = 0,
    outputs: bool = True,
) -> Verification:
    """The same for the latest `n` changes only; `before` is the module before them, if the caller has it still. Without
    `outputs` only the first question is asked, which is much cheaper."""
    return _verify(check_graph_module(gm), inputs, n, before, transformations, seed, outputs)


def _verify(
    gm: GraphModule,
    inputs: Any,
    n: int,
    original: nn.Module | None,
    transformations: Iterable[Transformation],
    seed: int,
    outputs: bool = True,
) -> Verification:
    calls = as_calls(inputs)
    given = list(transformations)
    found, start = Verification(), working_copy(gm)
    with torch.random.fork_rng(), torch.no_grad():
        for stage in stages(gm, n):
            found = judge_stage(stage, calls, _maker(stage.change, given), seed).joined(found)
            start = stage.before
        if original is not None:
            found = found.joined(_compare_originals(start, original))
        for call in calls if outputs else ():
            found = found.joined(_measure(gm, original if original is not None else start, call, seed, len(calls) > 1))
    return found


def _maker(change: Change, given: list[Transformation]) -> Transformation | None:
    """The transformation that made a change: one of those given, or one of a known class without settings."""
    return by_signature(given).get(change.signature) or by_signature(_unset(change.name)).get(change.signature)


def _unset(name: str) -> list[Transformation]:
    """Transformations of a class of this name, as they are without settings."""
    pending: list[type[Transformation]] = [Transformation]  # type: ignore[type-abstract]
    found: list[Transformation] = []
    while pending:
        cls = pending.pop()
        pending += cls.__subclasses__()
        if cls.__name__ == name:
            with suppress(TypeError):  # one that is abstract, or cannot be made without settings
                found.append(cls())
    return found


def _compare_originals(rebuilt: GraphModule, original: nn.Module) -> Verification:
    """What the history gives back must be the original that was given, bit for bit."""
    old, new = _named(original), _named(rebuilt)
    foreign = [name for name, _ in rebuilt.named_parameters() if name not in old]
    if foreign:
        names = ", ".join(foreign[:4])
        return Verification(problems=(f"the given original is another model: it has no parameter {names}",))
    differ = [name for name in old.keys() & new.keys() if not same_bits(old[name], new[name])]
    if not differ:
        return Verification()
    names = ", ".join(sorted(differ)[:4])
    return Verification(
        problems=(
            f"the history gives other values back than the original has, for {names}: the weights were changed since, "
            f"or a weight map does not describe what its transformation did",
        )
    )


def _named(module: nn.Module) -> dict[str, torch.Tensor]:
    parameters = module.named_parameters(remove_duplicate=False)
    return {**dict(parameters), **dict(module.named_buffers(remove_duplicate=False))}


def _measure(gm: GraphModule, original: nn.Module, call: Call, seed: int, several: bool) -> Verification:
    try:
        reference = OutputReference.of(original, call, seed)
    except Exception as error:  # not the rewrite's fault, but nothing can be said about it then
        return Verification(problems=(f"the original itself fails on {call.name}: {_line(error)}",))
    notes: Sequence[str] = (reference.note,) if reference.note else ()
    try:
        seeded(seed)
        outputs = call.on(working_copy(gm))
    except Exception as error:
        sentence = f"the rewritten module raises where the original does not: {_line(error)}"
        return Verification(problems=(sentence,), notes=tuple(notes))
    return Verification(outputs=reference.grade(outputs).outputs, notes=tuple(notes))


def _line(error: Exception) -> str:
    return f"{type(error).__name__}: {(str(error).splitlines() or ['no message'])[0]}"
