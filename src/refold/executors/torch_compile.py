"""torch.compile with the settings that help: inductor's modes, and weights frozen into the code."""

from __future__ import annotations

import io
import itertools
import types
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, redirect_stderr
from typing import Any

import torch
from torch import nn

from refold import fx_private
from refold.errors import PreparationFailed
from refold.executors.input_spec import InputSpec, example
from refold.executors.interface import CallRunner, Executor, Runner, refuse_training
from refold.executors.meaning import prepare_compiled
from refold.executors.open_axes import OpenAxes
from refold.executors.strides import Strides, writes_into_inputs
from refold.nested import OUTPUT, Tree, flatten, rebuild, rebuilder
from refold.wording import first_line

_numbers = itertools.count()
_NEITHER_0_NOR_1 = 2  # for which compiled code would be other code


class _Inductor(Executor):
    """What the executors of this file share: a name, the device they are for, and inductor's settings."""

    def __init__(
        self,
        name: str,
        *,
        device: str | None = None,
        mode: str | None = None,
        options: dict[str, Any] | None = None,
        superseded_by: str | None = None,
    ) -> None:
        self.name = name
        self.device = device
        self.mode = mode
        self.options = options
        self.superseded_by = superseded_by
        self.takes_minutes = "max-autotune" in (mode or "") or bool((options or {}).get("max_autotune"))

    keeps_meaning = True
    hears_interrupts = True

    def available(self, device: torch.device) -> str | None:
        if device.type == "cuda" and not torch.cuda.is_available():
            return "there is no CUDA device"
        if self.device not in (None, device.type):
            return f"{self.name} is for {self.device}, not for {device.type}"
        return None


class Compile(_Inductor):
    """`torch.compile` of the module, guards and all: it follows the weights and gives gradients (unless `lower`, which
    makes another module of it first, has put in kernels for inference)."""

    def __init__(self, name: str, *, lower: Callable[[nn.Module], nn.Module] | None = None, **settings: Any) -> None:
        super().__init__(name, **settings)
        self.lower = lower

    def prepare(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Callable[..., Any]:
        module = self.lower(module) if self.lower is not None else module
        spec, tree, tensors = example(args, kwargs)
        compiled = torch.compile(_own_code(module), dynamic=False, mode=self.mode, options=self.options)
        # Inductor's own CUDA graphs write every output into the same memory again.
        reuses_outputs = self.mode in ("reduce-overhead", "max-autotune") and any(tensor.is_cuda for tensor in tensors)
        call = _with_outputs_copied(compiled) if reuses_outputs else compiled
        # Another shape, or other strides, would start a compilation in the middle of a call.
        runner = CallRunner(spec, module, call, tree, tensors)
        example_args, example_kwargs = rebuild(tree, tensors)
        with torch.no_grad(), _failures_named(self.name):
            runner(*example_args, **example_kwargs)
        return prepare_compiled(self, module, args, kwargs, runner)


def _with_outputs_copied(compiled: Callable[..., Any]) -> Callable[..., Any]:
    def call(*args: Any, **kwargs: Any) -> Any:
        tree, tensors = flatten(compiled(*args, **kwargs), OUTPUT)
        return rebuild(tree, [tensor.clone() for tensor in tensors])

    return call


class Freeze(_Inductor):
    """Inductor with the weights as constants: packed for the matrix kernels, folded, laid out for convolutions.

    The input is checked here, so dynamo's guards, which walk over all weights at every call, are left out.
    """

    reads_live_weights = False

    def prepare(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Callable[..., Any]:
        refuse_training(module)
        spec, tree, tensors = example(args, kwargs)
        options = {**(self.options or {}), "freezing": True, "guard_filter_fn": _no_guards}
        # fullgraph: without guards, code that other modules share must never be compiled on its own.
        compiled = torch.compile(_own_code(module), fullgraph=True, dynamic=False, options=options)
        runner = FrozenRunner(spec, module, compiled, tree, tensors)
        with torch.no_grad(), _failures_named(self.name), _weights_as_constants():
            runner.run(tensors)
        return prepare_compiled(self, module, args, kwargs, runner)


class FrozenRunner(Runner):
    """Calls code that trusts its input, so the strides are made those of the example first."""

    def __init__(
        self,
        spec: InputSpec,
        module: nn.Module,
        compiled: Callable[..., Any],
        tree: Tree,
        tensors: list[torch.Tensor],
    ) -> None:
        super().__init__(spec, module)
        self.compiled = compiled
        self.assemble = rebuilder(tree)
        self.strides = Strides(tensors, written=writes_into_inputs(module, tree, tensors))

    def run(self, tensors: list[torch.Tensor]) -> Any:
        laid_out = tensors if self.strides.fit(tensors) else self.strides.given_to(tensors)
        args, kwargs = self.assemble(laid_out)
        return self.compiled(*args, **kwargs)


class CompileOnce(_Inductor):
    """`torch.compile` for all sizes that capture left open: compiled once, with those sizes marked, and with guards on
    sizes alone, since all else is checked here. What they do not let through runs the module: no call compiles."""

    takes_any_size = True

    def prepare(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Callable[..., Any]:
        refuse_training(module)
        axes = OpenAxes.of(module, args, kwargs)
        spec, tree, tensors = example(args, kwargs, open_sizes=True)
        apart = axes.told_apart(tensors)
        for index, dim in axes.places():
            torch._dynamo.mark_dynamic(apart[index], dim)
        options = {**(self.options or {}), "guard_filter_fn": _guards_on_sizes}
        compiled = torch.compile(_own_code(module), fullgraph=True, options=options)
        runner = FrozenRunner(spec, module, compiled, tree, tensors)
        with torch.no_grad(), _failures_named(self.name):
            runner.run(apart)
            with torch.compiler.set_stance("fail_on_recompile"):
                runner.run(tensors)
        runner.compiled = torch._dynamo.run(compiled)  # what the guards do not let through runs the module
        return prepare_compiled(self, module, args, kwargs, runner, axes.from_size(_NEITHER_0_NOR_1))


class CompiledInFirstCall:
    """A module as code for any size, which its first call compiles. What its guards, on sizes alone, do not let through
    runs the module as it is: no later call compiles."""

    def __init__(self, module: nn.Module) -> None:
        options: dict[str, Any] = {"guard_filter_fn": _guards_on_sizes}
        self._run = torch.compile(_own_code(module), fullgraph=True, dynamic=True, options=options)
        self._is_compiled = False

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if self._is_compiled:
            return self._run(*args, **kwargs)
        with fx_private.equal_sizes_apart():
            result = self._run(*args, **kwargs)
        self._run, self._is_compiled = torch._dynamo.run(self._run), True
        return result


def _guards_on_sizes(entries: Sequence[Any]) -> list[bool]:
    return [entry.guard_type == "SHAPE_ENV" for entry in entries]


def _no_guards(entries: Sequence[Any]) -> list[bool]:
    return [False for _ in entries]


def _own_code(module: nn.Module) -> Callable[..., Any]:
    """A function that calls the module, with a code object of its own.

    Dynamo keeps what it compiled with the code object, which all instances of a class share. Without guards, the frozen
    weights of one would answer for another; with them, settings given later would be ignored.
    """

    def call(*args: Any, **kwargs: Any) -> Any:
        return module(*args, **kwargs)

    name = f"refold_call_{next(_numbers)}"
    return types.FunctionType(call.__code__.replace(co_name=name), call.__globals__, name, None, call.__closure__)


@contextmanager
def _weights_as_constants() -> Iterator[None]:
    """Tell dynamo, which does not see inductor's options, to hand the weights over as constants.

    The only private name that the executors need besides pytree: there is no public switch.
    """
    import torch._inductor.config as inductor

    with inductor.patch(freezing=True):
        yield


@contextmanager
def _failures_named(name: str) -> Iterator[None]:
    """Autotuning talks on stderr; the library does not. What fails is said with the executor's name."""
    try:
        with redirect_stderr(io.StringIO()):
            yield
    except Exception as error:
        raise PreparationFailed(f"{name} cannot compile this module: {first_line(error)}.") from error
