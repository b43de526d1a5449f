"""What capture refuses, each as a sentence: what, where, why, and what to do next."""

from refold.errors import RefoldError


class CaptureError(RefoldError):
    """A model could not be captured, or a captured one was asked for something it cannot do."""


class CaptureMismatch(CaptureError):
    """The captured graph ran but gave other results than the model, so it was thrown away."""


class NeverCapturable(CaptureError):
    """No graph can do what the model does, in whatever way it is made."""


class InputMismatch(CaptureError, ValueError):
    """A captured model was called with something else than what it was captured for."""


class BakedIn(CaptureError):
    """The dtype or the train/eval mode is written into the graph and cannot be changed any more."""


class NeedsInputs(CaptureError):
    """Example inputs could not be made from the configuration and must be given."""
