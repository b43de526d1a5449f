"""Save and load without pickle: weights as safetensors, the way to the folded graph as a JSON recipe."""

from refold.saving.errors import SaveError
from refold.saving.loading import load
from refold.saving.writing import save

__all__ = ["SaveError", "load", "save"]
