"""Whether two ways to run a module give the same: told roughly, in a sentence. How exact they are, `verify` says."""

from __future__ import annotations

from collections.abc import Sequence

import torch


def disagreement(expected: Sequence[torch.Tensor], computed: Sequence[torch.Tensor]) -> str | None:
    """Where outputs are mixed up, missing, or not numbers where those of the module are; None if they agree.

    Half of the digits must agree: the relative error is at most √ε. What is not rounded must be the same.
    """
    if len(expected) != len(computed):
        return f"It gives {len(computed)} outputs, and the module {len(expected)}."
    for index, (mine, its) in enumerate(zip(expected, computed, strict=True)):
        if mine.shape != its.shape or mine.dtype != its.dtype:
            return f"Output {index} is of another shape or type than the module's."
        if not mine.is_floating_point() and not mine.is_complex():
            if not torch.equal(mine, its):
                return f"It computes something else than the module in output {index}."
            continue
        finite = torch.isfinite(mine)
        if not torch.equal(finite, torch.isfinite(its)):
            return f"It has NaN or infinity elsewhere in output {index} than the module."
        error = torch.linalg.vector_norm(_wide(its[finite]) - _wide(mine[finite]))
        if error > torch.finfo(mine.dtype).eps ** 0.5 * torch.linalg.vector_norm(_wide(mine[finite])):
            return f"It computes something else than the module in output {index}."
    return None


def _wide(values: torch.Tensor) -> torch.Tensor:
    return values.to(torch.complex128 if values.is_complex() else torch.float64)
