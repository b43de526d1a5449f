"""The optimized model: used like the original, fast where it was built for, and the original itself everywhere else."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import torch
from torch import nn
from torch.fx import GraphModule
from torch.utils.hooks import RemovableHandle

from refold import fx_private
from refold.executors import UnsupportedInput
from refold.executors.base import first_line
from refold.executors.tree import flatten
from refold.history import history, undo
from refold.optimizing.variant import Variant
from refold.report.data import Report

_MOST_NOTES = 20
_CONTAINER_METHODS = (
    *("__len__", "__iter__", "__reversed__", "__contains__"),
    *("__getitem__", "__setitem__", "__delitem__"),
)
_MOVES = ("to", "cpu", "cuda", "half", "bfloat16", "float", "double")
_MOVED = "moved or cast since it was optimized: runs the original; call refold.optimize again"


class OptimizedModule(nn.Module):
    """Runs a model the fastest correct way that was found for its example inputs.

    An input of another signature, training mode, inputs that require gradients, and weights that were changed since all
    go to the original model; `notes` says when that happened. Everything else (attributes, methods, parameters,
    `state_dict`) is the original's own.
    """

    def __new__(cls, original: nn.Module, *args: Any) -> OptimizedModule:
        return object.__new__(_class_like(type(original)))

    def __init__(
        self, original: nn.Module, variant: Variant, reoptimize: Callable[[Any, Any], Variant] | None = None
    ) -> None:
        super().__init__()
        hidden = self.__dict__  # not registered as a child: names of parameters stay those of the original
        hidden["original"] = original
        hidden["variants"] = [variant]
        hidden["notes"] = []
        hidden["_reoptimize"] = reoptimize
        hidden["_hooks_seen"] = None
        hidden["forward"] = _signed_like(original.forward, self._forward)
        self.__dict__["training"] = original.training

    # --- running ---------------------------------------------------------------------------------------------------

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """As every module is called, by a shorter way while no hook was added anywhere."""
        if self._hooks_seen == RemovableHandle.next_id:
            return self._forward(*args, **kwargs)
        seen = RemovableHandle.next_id
        if not fx_private.has_hooks(self) and not fx_private.has_global_hooks():
            self.__dict__["_hooks_seen"] = seen
        return super().__call__(*args, **kwargs)

    def _forward(self, *args: Any, **kwargs: Any) -> Any:
        if self.original.training:
            return self._fall_back("the model is in training mode", args, kwargs)
        reason = "it was restored"
        for variant in self.variants:
            try:
                tensors = variant.signature.tensors(args, kwargs)
                break
            except UnsupportedInput as unsupported:
                reason = str(unsupported)
        else:
            found = self._optimize_again(args, kwargs, reason)
            if isinstance(found, str):
                return self._fall_back(found, args, kwargs)
            variant, tensors = found
        try:
            if not torch.is_grad_enabled():
                return variant.run_checked(tensors, args, kwargs)
            if not any(tensor.requires_grad for tensor in tensors):
                with torch.no_grad():
                    return variant.run_checked(tensors, args, kwargs)
            reason = "gradients of an input are asked for"
        except UnsupportedInput as unsupported:  # nothing was done that anybody could see
            reason = str(unsupported)
        return self._fall_back(reason, args, kwargs)

    def _optimize_again(
        self, args: tuple[Any, ...], kwargs: dict[str, Any], reason: str
    ) -> tuple[Variant, list[torch.Tensor]] | str:
        """A variant for a call that no other is for, and the tensors among its arguments; or why there is none."""
        if self._reoptimize is None or not self.variants:
            return reason
        leaves, _ = flatten((args, kwargs))
        if torch.is_grad_enabled() and any(isinstance(x, torch.Tensor) and x.requires_grad for x in leaves):
            return "gradients of an input are asked for"
        try:
            variant = self._reoptimize(args, kwargs)
            tensors = variant.signature.tensors(args, kwargs)
        except Exception as error:  # whatever is in the way of optimizing, the original can be called
            return f"it could not be optimized for another input: {first_line(error)}"
        self.variants.append(variant)
        self._note(f"optimized again for another input: {reason}")
        return variant, tensors

    def _fall_back(self, reason: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        self._note(f"ran the original: {reason}")
        return self.original(*args, **kwargs)

    def _note(self, note: str) -> None:
        if note not in self.notes and len(self.notes) < _MOST_NOTES:
            self.notes.append(note)

    # --- what it tells and gives back ------------------------------------------------------------------------------

    @property
    def report(self) -> Report:
        """Everything that was tried, kept and measured."""
        built = self.variants[0].report if self.variants else self._last_report
        return replace(built, notes=(*built.notes, *self.notes))

    @property
    def graph_module(self) -> GraphModule | None:
        """The rewritten graph, with its history."""
        return self.variants[0].graph_module if self.variants else None

    def restore(self) -> nn.Module:
        """Undo everything and give the original model back, bit for bit."""
        if self.variants:
            self.__dict__["_last_report"] = self.variants[0].report
        while self.variants:
            gm = self.variants.pop().graph_module
            if gm is not None and history(gm):
                undo(gm, None)
        return self.original

    # --- being the original ----------------------------------------------------------------------------------------

    def __getattr__(self, name: str) -> Any:
        return getattr(self.__dict__["original"], name)

    def __setattr__(self, name: str, value: Any) -> None:
        """The original gets it; what was built from the original cannot know what difference it makes."""
        known, plain = getattr(self.original, name, value), isinstance(value, int | float | str)
        setattr(self.original, name, value)
        if name == "training":
            self.__dict__[name] = value
        elif known is not value and not (plain and type(known) is type(value) and known == value):
            self.restore()
            self._note(f"{name} was set since it was optimized: runs the original; call refold.optimize again")

    def __delattr__(self, name: str) -> None:
        delattr(self.original, name)
        self.restore()
        self._note(f"{name} was deleted since it was optimized: runs the original; call refold.optimize again")

    def __dir__(self) -> list[str]:
        return sorted({*super().__dir__(), *dir(self.original)})

    def __repr__(self) -> str:
        how = self.variants[0].executor if self.variants else "restored"
        return f"Optimized[{how}]({self.original!r})"

    def train(self, mode: bool = True) -> OptimizedModule:
        self.original.train(mode)
        self.__dict__["training"] = mode
        return self

    def named_modules(self, *args: Any, **kwargs: Any) -> Iterator[tuple[str, nn.Module]]:
        return self.original.named_modules(*args, **kwargs)

    def named_children(self) -> Iterator[tuple[str, nn.Module]]:
        return self.original.named_children()

    def named_parameters(self, *args: Any, **kwargs: Any) -> Iterator[tuple[str, nn.Parameter]]:
        return self.original.named_parameters(*args, **kwargs)

    def named_buffers(self, *args: Any, **kwargs: Any) -> Iterator[tuple[str, torch.Tensor]]:
        return self.original.named_buffers(*args, **kwargs)

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        return self.original.state_dict(*args, **kwargs)

    def load_state_dict(self, *args: Any, **kwargs: Any) -> Any:
        return self.original.load_state_dict(*args, **kwargs)

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

    def register_parameter(self, name: str, param: nn.Parameter | None) -> None:
        self.original.register_parameter(name, param)

    def register_buffer(self, name: str, tensor: torch.Tensor | None, persistent: bool = True) -> None:
        self.original.register_buffer(name, tensor, persistent)

    def add_module(self, name: str, module: nn.Module | None) -> None:
        self.original.add_module(name, module)

    def requires_grad_(self, requires_grad: bool = True) -> OptimizedModule:
        self.original.requires_grad_(requires_grad)
        return self

    def zero_grad(self, set_to_none: bool = True) -> None:
        self.original.zero_grad(set_to_none)

    def _apply(self, fn: Callable[..., Any], recurse: bool = True) -> OptimizedModule:
        """`.to()`, `.half()`, `.cuda()`: the original moves, and what was built for the old place is given up."""
        self.restore()
        self.original._apply(fn, recurse)
        self._note(_MOVED)
        return self

    def __deepcopy__(self, memo: dict[int, Any]) -> nn.Module:
        """A copy is a copy of the original: compiled code cannot be copied."""
        return copy.deepcopy(self.original, memo)

    def __reduce__(self) -> Any:
        return (_itself, (self.original,))


def _class_like(original: type[nn.Module]) -> type[OptimizedModule]:
    """A class of optimized modules that has a length and items if the original's class does, and moves in its way."""

    def forward_to_original(name: str) -> Callable[..., Any]:
        return lambda self, *args: getattr(self.original, name)(*args)

    def move_original(name: str) -> Callable[..., Any]:
        def move(self: OptimizedModule, *args: Any, **kwargs: Any) -> OptimizedModule:
            self.restore()
            getattr(self.original, name)(*args, **kwargs)
            self._note(_MOVED)
            return self

        return move

    methods = {name: forward_to_original(name) for name in _CONTAINER_METHODS if hasattr(original, name)}
    own = [name for name in _MOVES if getattr(original, name) is not getattr(nn.Module, name)]
    methods |= {name: move_original(name) for name in own}
    return type("OptimizedModule", (OptimizedModule,), {"__module__": __name__, **methods})


def _signed_like(original: Callable[..., Any], run: Callable[..., Any]) -> Callable[..., Any]:
    """Runs one thing, and has the name, documentation and signature of another."""
    return functools.update_wrapper(functools.partial(run), original)


def _itself(original: nn.Module) -> nn.Module:
    """Unpickling gives the original: compiled code cannot be stored. `refold.save` keeps the rewritten graph."""
    return original
