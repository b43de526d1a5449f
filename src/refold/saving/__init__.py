"""Save and load without pickle: weights as safetensors, the way to the folded graph as a JSON recipe."""

from refold.errors import SaveError
from refold.saving.reader import load
from refold.saving.writer import save

__all__ = ["SaveError", "load", "save"]
