"""The error of saving and loading, and the sentence for a missing package."""

from __future__ import annotations

from typing import Any

from refold.errors import RefoldError


class SaveError(RefoldError):
    """A folder cannot be written or read; what was there before is intact."""


def safetensors() -> Any:
    """The safetensors package, imported when it is needed."""
    try:
        import safetensors.torch as found
    except ImportError as missing:
        raise SaveError(
            "refold.save and refold.load keep weights as safetensors, and that package is not installed. "
            "Install it: pip install 'refold[save]'."
        ) from missing
    return found
