"""What an optimized model does with a call that nothing was prepared for: it counts it, and says so, or refuses."""

from __future__ import annotations

import logging
import os
import re
import sys
import threading
import warnings
from collections import Counter
from pathlib import Path
from typing import Literal, get_args

import torch

from refold.errors import FellBack, RefoldError
from refold.report.data import Calls

OnFallback = Literal["warn", "raise", "ignore"]
LOG = logging.getLogger("refold")
_MOST_REASONS = 20
_WAY_OUT = "Give such a call to .prepare(...) once, or say on_fallback='ignore'"
_AGAIN = "Call .refresh()"
_OURS_AND_TORCH = tuple(f"{folder}{os.sep}" for folder in (Path(__file__).parents[1], *torch.__path__))


class Fallbacks:
    """The calls of one optimized model: how many ran fast, and why the others did not."""

    def __init__(self, policy: str, way_out: str | None = None) -> None:
        if policy not in get_args(OnFallback):
            raise RefoldError(f"on_fallback must be one of {', '.join(get_args(OnFallback))}, not {policy!r}.")
        self.policy, self._way_out = policy, way_out
        self.reasons: Counter[str] = Counter()
        self._fast = 0
        self._said: set[str] = set()
        self._lock = threading.Lock()

    def count_fast(self) -> None:
        """A call ran the fast way."""
        with self._lock:
            self._fast += 1

    def count(self, reason: str, *, is_expected: bool) -> None:
        """A call runs the original. Where nobody expects that, it is said once for each reason, or refused."""
        with self._lock:
            known = reason in self.reasons or len(self.reasons) < _MOST_REASONS
            self.reasons[reason if known else "others"] += 1
        if is_expected or self.policy == "ignore":
            return
        sentence = (
            f"{reason.rstrip('.')}. {self._way_out or (_AGAIN if 'since it was optimized' in reason else _WAY_OUT)}"
        )
        if self.policy == "raise":
            raise FellBack(f"did not run: {sentence}.")
        kind = re.sub(r"\d+", "", reason)  # the same reason for other sizes is no news
        if kind not in self._said and len(self._said) < _MOST_REASONS:
            self._said.add(kind)
            self.tell(f"ran the original model: {sentence}; further ones are counted in .report.calls")

    def tell(self, sentence: str) -> None:
        """Say what happened to what was prepared, to who called it through torch, and to the log."""
        LOG.info("%s", sentence)
        if self.policy != "ignore":
            warnings.warn(sentence, FellBack, _frames_to_caller())

    def calls(self) -> Calls:
        """All calls up to now, for the report."""
        with self._lock:
            return Calls(self._fast, self.reasons.total(), tuple(self.reasons.most_common()))


def _frames_to_caller() -> int:
    """How far away the nearest code is that is neither ours nor torch's."""
    frames, frame = 1, sys._getframe(1)
    while frame.f_back is not None and frame.f_code.co_filename.startswith(_OURS_AND_TORCH):
        frames, frame = frames + 1, frame.f_back
    return frames
