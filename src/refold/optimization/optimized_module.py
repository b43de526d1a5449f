"""The optimized model: used like the original, fast where it was built for, and the original itself everywhere else."""

from __future__ import annotations

import copy
import functools
import threading
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.fx import GraphModule

from refold.call_arguments import CallArguments
from refold.errors import RefoldError
from refold.executors import UnsupportedInput
from refold.fx_private import is_observed
from refold.optimization.fallbacks import Fallbacks
from refold.optimization.model_methods import bound_to
from refold.optimization.place import Place
from refold.optimization.preparation import Preparation
from refold.optimization.prepared import Call, Prepared
from refold.optimization.sizes import has_small_size
from refold.optimization.variants import Kind, further_kind, refreshed, undo_all
from refold.optimization.zeroed_outputs import ZeroedOutputs
from refold.report.document import Report
from refold.wording import one_line

_MOST_NOTES = 20
_FORWARDED = (
    *("named_modules", "named_children", "named_parameters", "named_buffers", "state_dict", "load_state_dict"),
    *("register_parameter", "register_buffer", "add_module", "zero_grad"),
    *("__len__", "__iter__", "__reversed__", "__contains__", "__getitem__", "__setitem__", "__delitem__"),
)
"""Methods that the original runs, where it has them."""
_MOVES = ("to", "cpu", "cuda", "half", "bfloat16", "float", "double")
_MOVED = "moved or cast since it was optimized: "
_IS_CARRIED = f"{_MOVED}the next call makes the rewritten graph anew, and calls run that; .refresh() prepares the rest"
_IS_GIVEN_UP = f"{_MOVED}runs the original; call refold.optimize again"


class _Refusal(NamedTuple):
    """Why a call does not run the way that was prepared for one kind of calls."""

    took_arguments: bool
    reason: str
    prepared: Prepared
    tensors: list[torch.Tensor]


class OptimizedModule(nn.Module):
    """Runs a model the fastest correct way that was found for its example inputs.

    Other arguments than the example's, training mode, inputs that require gradients, and weights that were changed
    since all go to the original model; `notes` says when that happened, `fallbacks` how often. Everything else
    (attributes, methods, parameters, `state_dict`) is the original's own.
    """

    def __new__(cls, original: nn.Module, *args: Any) -> OptimizedModule:
        return object.__new__(_class_like(type(original)))

    def __init__(
        self,
        original: nn.Module,
        prepared: Prepared,
        preparation: Preparation | None = None,
        select: Callable[[Any], Any] | None = None,
        fallbacks: Fallbacks | None = None,
    ) -> None:
        super().__init__()
        hidden = self.__dict__  # not registered as a child: names of parameters stay those of the original
        hidden["original"] = original
        hidden["prepared"] = prepared
        hidden["_zeroed"] = prepared.zeroed
        hidden["_preparation"] = preparation
        hidden["_variants"] = []  # further kinds of calls
        hidden["_carried"] = None  # after a move: the rewrites that the next call makes anew
        hidden["_lock"] = threading.Lock()
        hidden["_select"] = select
        hidden["notes"] = []
        hidden["_fallbacks"] = fallbacks or Fallbacks("warn")
        run = self._forward if select is None else lambda *args, **kwargs: select(self._forward(*args, **kwargs))
        hidden["forward"] = _signed_like(original.forward, run)
        self.__dict__["training"] = original.training

    # --- running ---------------------------------------------------------------------------------------------------

    def _forward(self, *args: Any, **kwargs: Any) -> Any:
        prepared: Prepared | None = self.prepared
        if prepared is None and self._carried is not None:
            prepared = self._carry_on()
        if prepared is None:
            return self._run_original("it was restored", args, kwargs, is_expected=True)
        if self.original.training:
            return self._run_original("the model is in training mode", args, kwargs, is_expected=True)
        refusals: list[_Refusal] = []
        further = [variant.prepared for variant in self._variants if variant.prepared is not None]
        for kind in (prepared, *further):
            tensors: list[torch.Tensor] | None = None
            try:
                call = kind.checked(args, kwargs)
                tensors = call[0]
                if torch.is_grad_enabled() and any(tensor.requires_grad for tensor in tensors):
                    return self._run_original("gradients of an input are asked for", args, kwargs, is_expected=True)
                output = self._run_fast(kind, call)
            except UnsupportedInput as unsupported:  # nothing was done that can be seen outside
                refusals.append(_Refusal(tensors is not None, str(unsupported), kind, tensors or []))
            else:
                self._fallbacks.count_fast()
                return output
        why = max(refusals, key=lambda refusal: refusal.took_arguments)  # the first of them knows best
        is_expected = has_small_size(why.tensors, why.prepared.example)
        return self._run_original(why.reason, args, kwargs, is_expected=is_expected, zeroed=why.prepared.zeroed)

    @staticmethod
    def _run_fast(prepared: Prepared, call: Call) -> Any:
        if not torch.is_grad_enabled():
            return prepared.run(call)
        with torch.no_grad():
            return prepared.run(call)

    def _run_original(
        self,
        reason: str,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        *,
        is_expected: bool,
        zeroed: ZeroedOutputs | None = None,
    ) -> Any:
        self._note(f"ran the original: {reason}")
        self._fallbacks.count(reason, is_expected=is_expected)
        result = self.original(*args, **kwargs)
        zeroed = zeroed or self._zeroed
        return result if zeroed is None else zeroed.of(result, args, kwargs)

    def _carry_on(self) -> Prepared | None:
        """After a move, the rewritten graph where the model is now; None where it cannot be made, or not by now."""
        if self.original.training or is_observed() or not self._lock.acquire(blocking=False):
            return None
        try:
            if self._carried is not None:
                self.__dict__["prepared"] = self._preparation.plainly(self._carried)
                self.__dict__["_carried"] = None
                for variant in self._variants:
                    variant.prepared = variant.preparation.plainly(variant.rewrites)
        except Exception as error:
            self.__dict__["_carried"] = None
            self._give_up(f"{_MOVED}runs the original, because {one_line(error, 300)}")
        finally:
            self._lock.release()
        return self.prepared

    def _note(self, note: str) -> None:
        if note not in self.notes and len(self.notes) < _MOST_NOTES:
            self.notes.append(note)

    def _give_up(self, why: str) -> None:
        """Say that what was prepared is of no use any more, and what comes in its place."""
        self._note(why)
        self._fallbacks.tell(why)

    # --- what it reports and gives back ----------------------------------------------------------------------------

    @property
    def report(self) -> Report:
        """Everything that was tried, kept and measured."""
        is_gone = self.prepared is None and self._carried is None
        built = self._last_report if self.prepared is None else self.prepared.report
        notes = (*built.notes, *(variant.note for variant in self._variants if not is_gone), *self.notes)
        return replace(built, notes=notes, calls=self._fallbacks.calls())

    @property
    def fallbacks(self) -> Counter[str]:
        """How many calls ran the original, by reason."""
        return self._fallbacks.reasons

    @property
    def graph_module(self) -> GraphModule | None:
        """The rewritten graph, with its history."""
        return None if self.prepared is None else self.prepared.graph_module

    def prepare(self, *args: Any, **kwargs: Any) -> OptimizedModule:
        """Prepare for calls like this one, too: with other switches (`output_hidden_states=True`), without an argument,
        in another dtype, under the autocast that is on now. Other sizes need no such thing."""
        if self.original.training:
            raise RefoldError("the model is in training mode; call .eval() first: optimizing is for inference.")
        if self._carried is not None:
            self._carry_on()
        if self.prepared is None or self._preparation is None:
            raise RefoldError("nothing is prepared for this model any more; call .refresh() first.")
        self.prepare_calls([CallArguments(args, kwargs).checked()])
        return self

    def prepare_calls(self, calls: list[CallArguments]) -> None:
        """Prepare for calls of one kind, which differ in their sizes only."""
        found = further_kind(self._kinds, calls)
        if found is not None:
            self._variants.append(found)

    @property
    def _kinds(self) -> list[Kind]:
        return [Kind(self._preparation, self.prepared), *self._variants]

    def refresh(self) -> list[str]:
        """Capture the model again, compare it with what was prepared, and prepare anew where it has changed. The
        sentences say what has; none where nothing has."""
        if self._preparation is None:
            return []
        found, changes = refreshed(self._kinds)
        prepared, *further = found
        for variant, its in zip(self._variants, further, strict=True):
            variant.prepared = its
        self.__dict__.update(prepared=prepared, _zeroed=prepared.zeroed, _carried=None)
        return changes

    def restore(self) -> nn.Module:
        """Undo everything and give the original model back, bit for bit."""
        prepared = self.prepared
        undo_all([prepared, *(variant.prepared for variant in self._variants)])
        if prepared is not None:
            self.__dict__.update(_last_report=prepared.report, prepared=None)  # last: it can be done again
        for variant in self._variants:
            variant.rewrites = variant.prepared.rewrites if variant.prepared is not None else variant.rewrites
            variant.prepared = None
        self.__dict__["_carried"] = None
        return self.original

    # --- being the original ----------------------------------------------------------------------------------------

    def __getattr__(self, name: str) -> Any:
        return bound_to(self, self.__dict__["original"], name, self._say_once)

    def _say_once(self, sentence: str) -> None:
        if sentence not in self.notes:
            self._give_up(sentence)

    def __setattr__(self, name: str, value: Any) -> None:
        """The original gets it; what was built from the original cannot know what difference it makes."""
        known, plain = getattr(self.original, name, value), isinstance(value, int | float | str)
        setattr(self.original, name, value)
        if name == "training":
            self.__dict__[name] = value
        elif known is not value and not (plain and type(known) is type(value) and known == value):
            self.restore()
            self._give_up(f"{name} was set since it was optimized: runs the original; call refold.optimize again")

    def __delattr__(self, name: str) -> None:
        delattr(self.original, name)
        self.restore()
        self._give_up(f"{name} was deleted since it was optimized: runs the original; call refold.optimize again")

    def __dir__(self) -> list[str]:
        return sorted({*super().__dir__(), *dir(self.original)})

    def __repr__(self) -> str:
        how = "restored" if self.prepared is None else self.prepared.at_example.executor
        return f"Optimized[{how}]({self.original!r})"

    def train(self, mode: bool = True) -> OptimizedModule:
        self.original.train(mode)
        self.__dict__["training"] = mode
        return self

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, local_metadata: Any, *others: Any) -> None:
        """Called where this is a part of a model that loads a checkpoint: torch goes on to children, and those are the
        original's."""
        kept = {key: value for key, value in local_metadata.items() if key == "assign_to_params_buffers"}
        for path, module in self.original.named_modules(remove_duplicate=False):
            inner = f"{prefix}{path}." if path else prefix
            module._load_from_state_dict(state_dict, inner, dict(kept), *others)

    def apply(self, fn: Callable[[nn.Module], None]) -> OptimizedModule:
        self.original.apply(fn)
        return self

    def requires_grad_(self, requires_grad: bool = True) -> OptimizedModule:
        self.original.requires_grad_(requires_grad)
        return self

    def _apply(self, fn: Callable[..., Any], recurse: bool = True) -> OptimizedModule:
        """`.to()`, `.half()`, `.cuda()`: the original moves, and what was prepared for it follows."""
        before = Place.of(self.original)
        self.original._apply(fn, recurse)
        self._follow_from(before)
        return self

    def _follow_from(self, before: Place) -> None:
        """After a move: nothing where nothing moved, else what was prepared for the old place is let go, and the next
        call makes the same rewrites at the new one."""
        prepared = self.prepared
        if prepared is None or (Place.of(self.original) == before and prepared.is_current()):
            return
        gm = prepared.graph_module
        self.restore()
        is_carried = self._preparation is not None
        if is_carried:
            self.__dict__["_carried"] = () if gm is None else prepared.rewrites
        self._give_up(_IS_CARRIED if is_carried else _IS_GIVEN_UP)

    def __deepcopy__(self, memo: dict[int, Any]) -> nn.Module:
        """A copy is a copy of the original: compiled code cannot be copied."""
        return copy.deepcopy(self.original, memo)

    def __reduce__(self) -> Any:
        return (_itself, (self.original,))


def _class_like(original: type[nn.Module]) -> type[OptimizedModule]:
    """A class of optimized modules that forwards to the original, has a length and items if the original's class does,
    and moves in its way."""

    def forward_to_original(name: str) -> Callable[..., Any]:
        return lambda self, *args, **kwargs: getattr(self.original, name)(*args, **kwargs)

    def move_original(name: str) -> Callable[..., Any]:
        def move(self: OptimizedModule, *args: Any, **kwargs: Any) -> OptimizedModule:
            before = Place.of(self.original)
            getattr(self.original, name)(*args, **kwargs)
            self._follow_from(before)
            return self

        return move

    methods: dict[str, Any] = {name: forward_to_original(name) for name in _FORWARDED if hasattr(original, name)}
    methods["__class__"] = property(lambda self: type(self.original))  # isinstance, and libraries that ask for a name
    own = [name for name in _MOVES if getattr(original, name) is not getattr(nn.Module, name)]
    methods |= {name: move_original(name) for name in own}
    return type("OptimizedModule", (OptimizedModule,), {"__module__": __name__, **methods})


def _signed_like(original: Callable[..., Any], run: Callable[..., Any]) -> Callable[..., Any]:
    """Runs one thing, and has the name, documentation and signature of another."""
    return functools.update_wrapper(functools.partial(run), original)


def _itself(original: nn.Module) -> nn.Module:
    """Unpickling gives the original: compiled code cannot be stored. `refold.save` keeps the rewritten graph."""
    return original
