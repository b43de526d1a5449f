"""The interface of an executor, one way to run a module, and the callables that executors prepare."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from refold import fx_private
from refold.errors import PreparationFailed
from refold.executors.input_spec import InputSpec, refuse_gradients
from refold.executors.strides import Strides, writes_into_inputs
from refold.nested import Tree, rebuild


class Executor(ABC):
    """Makes a callable out of a module that is called like it and returns what it returns.

    The callable raises `UnsupportedInput`, before it computes, for an input that it was not built for.
    """

    name: str
    reads_live_weights: bool = True
    """Whether the callable reads the module's own weights at every call, so that changes in place are seen."""
    takes_minutes: bool = False
    """Whether preparing is too long for everyday use: it is tried with `effort="max"` only."""
    takes_any_size: bool = False
    """Whether the callable takes all sizes that the module takes; others are for the sizes of their example alone."""
    keeps_meaning: bool = False
    """Whether what `prepare` gives means what torch means, for all inputs that it takes: it runs torch's own operators,
    or probed its own. Others are probed before they are chosen."""
    takes_packed: bool = False
    """Whether it runs graphs that leave padding out (`RemovePadding`); others are given the graph without that."""
    hears_interrupts: bool = False
    """Whether Ctrl-C ends preparing at once, since it is Python, or it sees to that by itself; others prepare in a
    thread of their own."""
    superseded_by: str | None = None
    """An executor that is usually as fast or faster: where it is ready, this one is tried with `effort="max"` only."""

    @abstractmethod
    def available(self, device: torch.device) -> str | None:
        """None where this executor can be used, else the reason why not."""

    @abstractmethod
    def prepare(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Callable[..., Any]:
        """Build for this module and inputs like these; `PreparationFailed` says why it cannot be done."""

    @property
    def key(self) -> Any:
        """What the answers of operators are kept under: the class and its settings."""
        return type(self), repr(sorted(vars(self).items(), key=str))

    def __repr__(self) -> str:
        return f"<executor {self.name}>"


class Checked:
    """A prepared callable that need not check its input if the caller did. (No ABC: those are slow to recognise.)"""

    spec: InputSpec
    is_asynchronous: bool = False
    """Whether a call returns while a device still computes. The model is checked meanwhile, and an output of old
    weights is thrown away, so the call must have no effect but its output."""

    def run_checked(self, tensors: list[torch.Tensor], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run a call with these arguments, whose tensors the spec gave."""
        raise NotImplementedError


class Runner(Checked):
    """Checks its input, then runs it without gradients."""

    def __init__(self, spec: InputSpec, module: nn.Module) -> None:
        self.spec = spec
        self.weights = [*module.parameters(), *module.buffers()]

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        tensors = self.spec.tensors(args, kwargs)
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

    Inputs that lie in memory otherwise than those of the example are copied first. `unchecked` is what is called where
    the caller has checked the sizes, too."""

    def __init__(
        self,
        spec: InputSpec,
        module: nn.Module,
        call: Callable[..., Any],
        tree: Tree,
        tensors: list[torch.Tensor],
        unchecked: Callable[..., Any] | None = None,
    ) -> None:
        self.spec = spec
        self.call = call
        self.unchecked = unchecked or call
        self.tree = tree
        self.strides = Strides(tensors, written=writes_into_inputs(module, tree, tensors))

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._run(self.call, self.spec.tensors(args, kwargs), args, kwargs)

    def run_checked(self, tensors: list[torch.Tensor], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        return self._run(self.unchecked, tensors, args, kwargs)

    def _run(
        self, call: Callable[..., Any], tensors: list[torch.Tensor], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        if not self.strides.fit(tensors):
            args, kwargs = rebuild(self.tree, self.strides.given_to(tensors))
        return call(*args, **kwargs)


def run_checked(
    run: Callable[..., Any], tensors: list[torch.Tensor], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    """Run a call whose tensors its spec has checked already: a runner would check them once more."""
    return run.run_checked(tensors, args, kwargs) if isinstance(run, Checked) else run(*args, **kwargs)


def refuse_training(module: nn.Module) -> None:
    """Raise for a module whose output is random or that updates statistics: neither can be baked."""
    stateful = (nn.modules.batchnorm._BatchNorm, nn.modules.dropout._DropoutNd)
    for path, child in module.named_modules():
        if child.training and isinstance(child, stateful):
            raise PreparationFailed(
                f"{path or 'the module'} ({type(child).__name__}) is in training mode, and this executor is for "
                "inference. Call .eval() first."
            )


def run_example(module: nn.Module, tree: Tree, tensors: list[torch.Tensor]) -> Any:
    """Run the module once, and refuse one that writes into its input or its weights: a baked copy would not."""
    watched = [*tensors, *module.parameters(), *module.buffers()]
    versions = fx_private.versions_of(watched)
    args, kwargs = rebuild(tree, tensors)
    with torch.no_grad():
        output = module(*args, **kwargs)
    if versions != fx_private.versions_of(watched):
        raise PreparationFailed("The module writes into its input, or into a weight or buffer, when it is called.")
    return output
