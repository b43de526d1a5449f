"""Verify that a rewritten module still computes the same: is it right, and what does it cost in accuracy?"""

from __future__ import annotations

import functools
from collections.abc import Iterable
from typing import Any

import torch
from torch import nn
from torch.fx import GraphModule

from refold.errors import UnknownRecipe
from refold.fingerprint import same_bits
from refold.fx_private import registered_tensors
from refold.record.change import Change
from refold.record.copies import working_copy
from refold.record.sharded_modules import check_whole
from refold.record.stack import check_graph_module, history
from refold.rewrite.composition import Composition
from refold.rewrite.registry import transformation_from
from refold.rewrite.transformation import Transformation
from refold.verification.accuracy import OutputReference
from refold.verification.extraction import seeded
from refold.verification.samples import NamedCall, as_calls
from refold.verification.stage_verdicts import evaluate_stage
from refold.verification.stages import stages
from refold.verification.verdicts import Verification
from refold.verification.zeroed_reference import with_zeros_of, zeroed_stage, zeroes_padding
from refold.wording import first_line


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
    float64, on the values that really reach it and on sampled ones. *What does it cost in accuracy?* Every output is
    compared with a float64 run of the original, beside the original's own error.

    `inputs` are a dict of keyword arguments, a tuple of positional ones, a tensor, or a list of several such. The
    original is rebuilt from the module's history, or given. `transformations` helps with weights that no weight map
    accounts for: those that were applied can be applied again in float64. Where a transformation says that it changes
    what is computed, and writes zeros at padding, the original is compared with the same zeros. Nothing is touched.
    """
    n = len(history(gm))
    return verify_last(gm, inputs, n, before=original, transformations=transformations, seed=seed)


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
    `outputs` only the first question is answered, which is much cheaper."""
    check_whole(
        gm,
        "sites are cut out and run alone in float64, on whole weights",
        "Verify the same transformations on the graph before it is sharded.",
    )
    calls = as_calls(inputs)
    given = list(transformations)
    found, start = Verification(), working_copy(check_graph_module(gm))
    zeroing: list[GraphModule] = []
    with torch.random.fork_rng(), torch.no_grad():
        for stage in stages(gm, n):
            maker, start = _maker(stage.change, given), stage.before
            if zeroes_padding(stage, maker):
                zeroing.append(stage.after)
                stage = zeroed_stage(stage)
            found = evaluate_stage(stage, calls, maker, seed).joined(found)
        if before is not None:
            found = found.joined(_compare_originals(start, before))
        zeroed = functools.reduce(lambda gm, after: with_zeros_of(after, gm), zeroing, start)
        original = zeroed if before is None or zeroing else before
        for call in calls if outputs else ():
            found = found.joined(_measure(gm, original, call, seed))
    return found


def by_signature(transformations: Iterable[Transformation]) -> dict[int, Transformation]:
    """Transformations, and the parts of composed ones, by the signature that a change records."""
    found: dict[int, Transformation] = {}
    for t in transformations:
        parts = by_signature(t.transformations) if isinstance(t, Composition) else {}
        found |= {**parts, t.signature: t}
    return found


def _maker(change: Change, given: list[Transformation]) -> Transformation | None:
    """The transformation that made a change: one of those given, or the one that its recipe describes."""
    found = by_signature(given).get(change.signature)
    if found is not None or change.recipe is None:
        return found
    try:
        made: Transformation = transformation_from(change.recipe)
    except UnknownRecipe:
        return None
    return made if made.signature == change.signature else None


def _compare_originals(rebuilt: GraphModule, original: nn.Module) -> Verification:
    """What the history gives back must be the original that was given, bit for bit."""
    old, new = registered_tensors(original), registered_tensors(rebuilt)
    unknown = [name for name, _ in rebuilt.named_parameters() if name not in old]
    if unknown:
        names = ", ".join(unknown[:4])
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


def _measure(gm: GraphModule, original: nn.Module, call: NamedCall, seed: int) -> Verification:
    try:
        reference = OutputReference.of(original, call, seed)
    except Exception as error:  # not the rewrite's fault, but nothing can be said about it then
        return Verification(problems=(f"the original itself fails on {call.name}: {first_line(error)}",))
    notes = (reference.note,) if reference.note else ()
    try:
        seeded(seed)
        outputs = call.on(working_copy(gm))
    except Exception as error:
        sentence = f"the rewritten module raises where the original does not: {first_line(error)}"
        return Verification(problems=(sentence,), notes=notes)
    return Verification(outputs=reference.grade(outputs).outputs, notes=notes)
