"""Every error that Refold raises on purpose. Each message says what, where, why, and what to do next."""

from __future__ import annotations


class RefoldError(Exception):
    """The base of all errors of this package."""


class UnknownName(RefoldError, KeyError):
    """Nothing is registered under this name."""

    def __str__(self) -> str:  # KeyError would print the repr of the sentence
        return str(self.args[0]) if self.args else ""


# --- rewriting and undoing -----------------------------------------------------------------------------------------


class NotAGraphModule(RefoldError, TypeError):
    """Something else was given where a torch.fx.GraphModule is needed."""


class NotATransformation(RefoldError, TypeError):
    """Something else (a class, a function) was given where a transformation is needed."""


class UnknownTransformation(UnknownName):
    """No transformation has this name."""


class BrokenTransformation(RefoldError):
    """A transformation broke the rules of the framework; the module was put back as it was."""


class NothingToUndo(RefoldError):
    """The module carries no change that this call could reverse."""


class OutOfOrder(RefoldError):
    """A later change depends on the one to be reversed."""


class GraphEdited(RefoldError):
    """The graph was edited outside Refold, where a recorded change had changed it."""


class WeightsChanged(RefoldError):
    """Weights were changed after the change, and no inverse can carry them back."""


class ReverseMismatch(RefoldError):
    """A transformation's own reverse gives something else than what was recorded."""


# --- capture -------------------------------------------------------------------------------------------------------


class CaptureError(RefoldError):
    """A model could not be captured, or a captured one cannot do what was requested."""


class NeedsInputs(CaptureError):
    """Example inputs could not be made from the configuration and must be given."""


class NeverCapturable(CaptureError):
    """No graph can do what the model does, in whatever way it is made."""


class CaptureMismatch(CaptureError):
    """The captured graph ran but gave other results than the model, so it was thrown away."""


class InputMismatch(CaptureError, ValueError):
    """A captured model was called with something else than what it was captured for."""


class FixedByCapture(CaptureError):
    """The dtype or the train/eval mode is part of the captured graph and cannot be changed any more."""


# --- checkpoints, optimizers and saved folders ---------------------------------------------------------------------


class CheckpointMismatch(RefoldError, RuntimeError):
    """A checkpoint lacks entries, or has too many, or wrongly shaped ones; nothing was loaded."""


class OptimizerMismatch(RefoldError):
    """An optimizer's state cannot follow a rewrite; module and optimizer are as they were."""


class SaveError(RefoldError):
    """A folder cannot be written or read; what was there before is intact."""


class UnknownRecipe(RefoldError):
    """A recipe names a transformation that is not known here, or gives it settings it does not have."""


# --- optimizing, measuring and reporting ---------------------------------------------------------------------------


class BadExample(RefoldError, TypeError):
    """The example inputs cannot be used to call the model."""


class BadLevel(RefoldError, ValueError):
    """There is no such level."""


class UnknownExecutor(UnknownName):
    """No executor has this name."""


class PreparationFailed(RefoldError):
    """An executor cannot run this module."""


class UnsupportedInput(RefoldError):
    """A prepared callable was given an input it was not built for. Raised before anything is computed."""


class FellBack(RefoldError, UserWarning):
    """A call of an optimized model ran the original, because what was prepared is not for such a call: a warning, or
    with `on_fallback="raise"` an error."""


class PreparedAnew(RefoldError, UserWarning):
    """A saved model was prepared anew, because what was saved with it does not hold here: a warning."""


class BadDecision(RefoldError):
    """A decision that was kept is damaged, or is not for this model: everything is decided anew then."""


class MeasurementFailed(RefoldError):
    """One of the callables to be timed raised, so there is nothing to measure."""


class BadReport(RefoldError, ValueError):
    """A file or a text is not a report that this version can read."""


# --- pipeline files and the command line ---------------------------------------------------------------------------


class BadPipeline(RefoldError, ValueError):
    """A pipeline file cannot be understood, or a pipeline cannot be written as one."""


class WrongInput(RefoldError, ValueError):
    """What a command was given (a model, its inputs, a file, a folder) cannot be used."""


class CheckFailed(RefoldError):
    """The user's check of `refold bisect` gives no answer that can be used."""


class BadLayout(WrongInput):
    """A table of how checkpoints are laid out cannot be understood, or does not fit the tensors it is used on."""
