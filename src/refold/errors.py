"""Every error that Refold raises on purpose. Each message says what, where, why, and what to do next."""


class RefoldError(Exception):
    """The base of all errors of this package."""


class NotAGraphModule(RefoldError, TypeError):
    """Something else was given where a torch.fx.GraphModule is needed."""


class NotATransformation(RefoldError, TypeError):
    """Something else (a class, a function) was given where a transformation is needed."""


class BrokenTransformation(RefoldError):
    """A transformation broke the rules of the framework; the module was put back as it was."""


class NothingToUndo(RefoldError):
    """The module carries no change that this call could reverse."""


class OutOfOrder(RefoldError):
    """A later change depends on the one to be reversed."""


class GraphEdited(RefoldError):
    """The graph was edited outside Refold after the last recorded change."""


class WeightsChanged(RefoldError):
    """Weights were changed after the change, and no inverse can carry them back."""


class ReverseMismatch(RefoldError):
    """A transformation's own reverse gives something else than what was recorded."""


class WeightsMissing(RefoldError, KeyError):
    """A checkpoint lacks, or has too many, or has wrongly shaped entries."""

    def __str__(self) -> str:  # KeyError would print the repr of the sentence
        return str(self.args[0]) if self.args else ""
