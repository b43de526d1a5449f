"""The interface of an executor, one way to run a module, and how executors are found: built-in or by entry points."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from importlib.metadata import EntryPoint, entry_points
from typing import Any, TypeVar

import torch
from torch import nn

from .. import fx_private
from ..errors import RefoldError
from ..offered import Problem, Unusable, load_offered
from .signature import PreparationFailed, Signature, UnsupportedInput, refuse_gradients
from .strides import Strides, writes_into_inputs
from .tree import Layout

T = TypeVar("T")
ENTRY_POINT_GROUP = "refold.executors"


class UnknownExecutor(RefoldError, KeyError):
    """No executor has this name."""

    def __str__(self) -> str:  # KeyError would print the repr of the sentence
        return str(self.args[0]) if self.args else ""


class Executor(ABC):
    """Makes a callable out of a module that is called like it and returns what it returns.

    The callable raises `UnsupportedInput`, before it computes, for an input that it was not built for.
    """

    name: str
    follows_weights: bool = True
    """Whether the callable sees weights that are changed in place after `prepare`."""
    takes_minutes: bool = False
    """Whether preparing is too long for everyday use: it is tried with `level="max"` only."""
    superseded_by: str | None = None
    """An executor that is usually as fast or faster: where it is ready, this one is tried with `level="max"` only."""

    @abstractmethod
    def available(self, device: torch.device) -> str | None:
        """None where this executor can be used, else the reason why not."""

    @abstractmethod
    def prepare(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Callable[..., Any]:
        """Build for this module and inputs like these; `PreparationFailed` says why it cannot be done."""

    def __repr__(self) -> str:
        return f"<executor {self.name}>"


class Checked:
    """A prepared callable that can be told that its input was checked. (No ABC: those are slow to recognise.)"""

    signature: Signature
    hides_looks_from: int | None = None
    """From how many weights on a look at them is better had by `run_while` than before a call; None where it is not.
    What is computed while somebody looks may be thrown away, so it must have no effect but its output."""

    def run_checked(self, tensors: list[torch.Tensor], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run a call with these arguments, whose tensors the signature gave."""
        raise NotImplementedError

    def run_while(
        self, look: Callable[[], T], tensors: list[torch.Tensor], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[Any, T]:
        """Run a call as `run_checked` does, and look at something while it computes: the output, and what was seen."""
        raise NotImplementedError


class Runner(Checked):
    """Checks its input, then runs it without gradients."""

    def __init__(self, signature: Signature, module: nn.Module) -> None:
        self.signature = signature
        self.weights = [*module.parameters(), *module.buffers()]

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        tensors = self.signature.tensors(args, kwargs)
        refuse_gradients(tensors, self.weights)
        with torch.no_grad():
            return self.run(tensors)

    def run_checked(self, tensors: list[torch.Tensor], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        return self.run(tensors)

    def run(self, tensors: list[torch.Tensor]) -> Any:
        """Compute the output from the checked tensors of the call."""
        raise NotImplementedError


class CallRunner(Checked):
    """Checks its input, then calls the module, or what was compiled of it, as it was called: gradients go through.

    Inputs that lie in memory otherwise than those of the example are copied first."""

    def __init__(
        self,
        signature: Signature,
        module: nn.Module,
        call: Callable[..., Any],
        layout: Layout,
        tensors: list[torch.Tensor],
    ) -> None:
        self.signature = signature
        self.call = call
        self.layout = layout
        self.strides = Strides(tensors, written=writes_into_inputs(module, layout, tensors))

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.run_checked(self.signature.tensors(args, kwargs), args, kwargs)

    def run_checked(self, tensors: list[torch.Tensor], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if not self.strides.fit(tensors):
            args, kwargs = self.layout.fill(self.strides.given_to(tensors))
        return self.call(*args, **kwargs)


def run_checked(
    run: Callable[..., Any], tensors: list[torch.Tensor], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    """Run a call whose tensors its signature has checked already: a runner would check them once more."""
    return run.run_checked(tensors, args, kwargs) if isinstance(run, Checked) else run(*args, **kwargs)


def executors(device: torch.device | str | None = None) -> dict[str, Executor]:
    """All executors by name, built-in ones first; with a device, only those that are available on it."""
    found, _ = _all()
    if device is None:
        return found
    place = torch.device(device)
    return {name: executor for name, executor in found.items() if why_unavailable(executor, place) is None}


def executor_named(name: str) -> Executor:
    """The executor of that name; a name that does not exist is refused with the names that do."""
    found, left_out = _all()
    if name not in found:
        broken = [str(problem) for problem in left_out if problem.name == name]
        known = f"There are: {', '.join(found)}."
        raise UnknownExecutor(" ".join([f"There is no executor called {name!r}.", known, *broken]))
    return found[name]


def problems() -> tuple[Problem, ...]:
    """The executors of other packages that could not be used, each with the reason."""
    return _all()[1]


def unavailable(device: torch.device | str) -> dict[str, str]:
    """The executors that cannot be used on this device, each with the reason."""
    place = torch.device(device)
    reasons = {name: why_unavailable(executor, place) for name, executor in executors().items()}
    return {name: reason for name, reason in reasons.items() if reason is not None}


def why_unavailable(executor: Executor, place: torch.device) -> str | None:
    """Why an executor cannot be used on a device; None if it can."""
    try:
        return executor.available(place)
    except Exception as error:  # another package's code may raise anything
        return f"it fails to say whether it is available: {first_line(error)}"


def _all() -> tuple[dict[str, Executor], tuple[Problem, ...]]:
    """Every executor by name, built-in ones first, and what had to be left out."""
    from .builtin import BUILT_IN

    found = {executor.name: executor for executor in BUILT_IN}
    left_out = []
    for entry in entry_points(group=ENTRY_POINT_GROUP):
        made = load_offered(entry, lambda entry: _load(entry, found))
        if isinstance(made, Problem):
            left_out.append(made)
        else:
            found[made.name] = made
    return found, tuple(left_out)


def _load(entry: EntryPoint, taken: dict[str, Executor]) -> Executor:
    made = entry.load()
    executor = made() if isinstance(made, type) else made
    if not isinstance(executor, Executor):
        raise Unusable(f"{entry.value} is no refold.executors.Executor")
    if executor.name in taken:
        raise Unusable(f"its name {executor.name!r} is taken already, by {type(taken[executor.name]).__name__}")
    return executor


def refuse_training(module: nn.Module) -> None:
    """Raise for a module whose output is random or that updates statistics: neither can be baked."""
    stateful = (nn.modules.batchnorm._BatchNorm, nn.modules.dropout._DropoutNd)
    for path, child in module.named_modules():
        if child.training and isinstance(child, stateful):
            raise PreparationFailed(
                f"{path or 'the module'} ({type(child).__name__}) is in training mode, and this executor is for "
                "inference. Call .eval() first."
            )


def run_example(module: nn.Module, layout: Layout, tensors: list[torch.Tensor]) -> Any:
    """Run the module once, and refuse one that writes into its input or its weights: a baked copy would not."""
    watched = [*tensors, *module.parameters(), *module.buffers()]
    versions = fx_private.versions_of(watched)
    args, kwargs = layout.fill(tensors)
    with torch.no_grad():
        output = module(*args, **kwargs)
    if versions != fx_private.versions_of(watched):
        raise PreparationFailed("The module writes into its input, or into a weight or buffer, when it is called.")
    return output


def first_line(error: BaseException) -> str:
    """The error's type and the first line of what it says, for use inside a sentence."""
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0].rstrip('.')}" if lines else type(error).__name__


__all__ = [
    "CallRunner",
    "Checked",
    "Executor",
    "PreparationFailed",
    "Runner",
    "UnknownExecutor",
    "UnsupportedInput",
    "executor_named",
    "executors",
    "first_line",
    "problems",
    "refuse_training",
    "run_checked",
    "run_example",
    "unavailable",
    "why_unavailable",
]
