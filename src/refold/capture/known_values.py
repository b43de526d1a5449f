"""Data-dependent control flow: fixed where it depends on a description of the data, opened where on a selection.

``grid_thw.tolist()`` in a vision tower or ``for expert in hit_experts`` stops an export: a value that is not known yet
would decide which lines run. Two things are known all the same. An input such as ``grid_thw`` may be fixed to the value
of the example, as a size may (calls are checked for it), and so may a buffer that holds a stride or a count; then
everything computed from them alone is known. And a loop over those of n elements that a mask hits is a loop over all n,
if the others have nothing to do; that is for the comparison with the model to say.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils._pytree import tree_leaves

from refold.nested import SYMBOLS, map_leaves, tensors_in

Source = int | str  # an input by its index, a buffer by its name
Known = dict[Source, torch.Tensor]

_MOST_VALUES = 4096  # a tensor with more is data, not a description of data
_FROM = "_refold_from"  # on a tensor: what it was computed from
_KNOWN = "_refold_known"  # on a tensor: its values are real
_OF = "_refold_of"  # on the indices a mask hits: how many there are to hit

_T = torch.Tensor
_ASKS = {_T.tolist, _T.item, _T.__bool__, _T.__int__, _T.__float__, _T.__index__, _T.numpy, _T.__format__}
_ASKS_FOR_SIZES = {torch.repeat_interleave: 1, _T.repeat_interleave: 1, torch.arange: 0, torch.linspace: 0}
_LOOKUPS = {nn.functional.embedding, torch.embedding}
_SELECTS = {torch.nonzero, _T.nonzero, torch.argwhere, _T.argwhere}
_TAKES_NUMBERS = {nn.functional.pad, nn.functional.interpolate}
_WRITERS = {"__setitem__", *(f"__i{op}__" for op in ("add", "sub", "mul", "truediv", "floordiv", "mod", "and", "or"))}
_MAKERS = {torch.arange, torch.zeros, torch.ones, torch.full, torch.empty}


class NeedsValue(Exception):
    """Python reads a value that is known as soon as some inputs or buffers are fixed."""


class KnownValues(TorchFunctionMode):
    """While it is active, what follows from known tensors is computed at once instead of being recorded.

    ``needed`` holds what must be known too after a failed try; ``opened`` says what was opened.
    """

    def __init__(self, model: nn.Module, leaves: Sequence[torch.Tensor], known: Known, makes_indices: bool) -> None:
        super().__init__()
        self.model = model
        self.known = known
        self.makes_indices = makes_indices
        self.real: Known = dict(enumerate(leaves)) | dict(model.named_buffers())
        self.fixable = {source for source, tensor in self.real.items() if _is_description(tensor)}
        self.needed: set[Source] = set()
        self.opened: list[str] = []
        self.sizes: dict[Source, str] = {}
        self.inputs: Known = {}

    @contextmanager
    def watching(self, leaves: Sequence[torch.Tensor]) -> Iterator[list[torch.Tensor]]:
        """The inputs to go on with: known ones as real tensors, the others marked by where they come from."""
        with _disable_current_modes():
            self.inputs = {i: value.clone() for i, value in self.known.items() if isinstance(i, int)}
        marked = [_mark(self.inputs.get(i, leaf), {i}, i in self.inputs) for i, leaf in enumerate(leaves)]
        self.sizes = {i: str(leaf.numel()) for i, leaf in enumerate(leaves)}
        for name, buffer in self.model.named_buffers():  # while a graph is recorded these are fake tensors
            if name in self.fixable:
                _mark(buffer, frozenset({name}), known=False)
        with self:
            yield marked

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        args, kwargs = map_leaves(tuple(args), self._known_buffer), map_leaves(dict(kwargs or {}), self._known_buffer)
        if func in _TAKES_NUMBERS:  # torch itself would read tensors among them, unseen by this mode
            args = [map_leaves(a, self._as_number) if isinstance(a, (tuple, list, slice)) else a for a in args]
        tensors = tensors_in((args, kwargs))
        sources = frozenset[Source]().union(*(vars(t).get(_FROM, ()) for t in tensors))
        if func in _LOOKUPS:
            self._refuse_lookup(tensors)
        if _writes(func) and tensors and _KNOWN in vars(tensors[0]):
            self._refuse_write(tensors)
        if self._computable(func, tensors, args, kwargs):
            with _disable_current_modes():
                return _mark(func(*args, **kwargs), sources, known=True)
        if func is torch.tensor and tensors and all(t.dim() == 0 for t in tensors) and len(tensors) == len(args[0]):
            return torch.stack(tensors).to(**{k: v for k, v in kwargs.items() if k in ("dtype", "device")})
        if func is _T.unbind and _OF in vars(args[0]):  # what a for loop calls
            return self._all_of(args[0])
        if func in _ASKS or len(tensors) > _ASKS_FOR_SIZES.get(func, len(tensors)):
            self._ask(sources)
        args, kwargs = map_leaves(args, _frozen), map_leaves(kwargs, _frozen)
        return self._open(func, args, _mark(func(*args, **kwargs), sources, known=False))

    def _known_buffer(self, value: Any) -> Any:
        """The real tensor in place of a buffer that is known; everything else as it is."""
        if not isinstance(value, torch.Tensor) or _KNOWN in vars(value) or len(vars(value).get(_FROM, ())) != 1:
            return value
        (name,) = vars(value)[_FROM]
        is_known = isinstance(name, str) and name in self.known and self.model.get_buffer(name) is value
        return _mark(self.known[name], {name}, known=True) if is_known else value

    def _computable(
        self, func: Callable[..., Any], tensors: list[torch.Tensor], args: Sequence[Any], kwargs: Mapping[str, Any]
    ) -> bool:
        if tensors:
            return all(_KNOWN in vars(t) for t in tensors)
        makes = func is torch.tensor or (self.makes_indices and func in _MAKERS)
        return makes and _of_whole_numbers(func, args, kwargs)

    def _ask(self, sources: frozenset[Source]) -> None:
        """Stop where Python is about to read a value that fixing some tensors would make known."""
        unknown = sources - self.known.keys()
        if unknown and sources <= self.fixable:
            self.needed |= unknown
            raise NeedsValue(f"control flow depends on the values of {sorted(map(str, unknown))}")

    def _as_number(self, value: Any) -> Any:
        """A number of a padding or a slice, where a tensor is given for it."""
        if not isinstance(value, torch.Tensor) or value.dim() or not _is_description(value):
            return value
        self._ask(vars(value).get(_FROM, frozenset()))
        return int(value) if _KNOWN in vars(value) else value

    def _refuse_lookup(self, tensors: list[torch.Tensor]) -> None:
        """What is looked up in a table as it is, is data: a graph for one text only would be of no use."""
        for tensor in tensors:
            data = {s for s in vars(tensor).get(_FROM, ()) if str(tensor.numel()) == self.sizes.get(s)}
            self.fixable -= data
            if data & self.known.keys():
                raise NeedsValue("an input that control flow depends on is looked up in a table too: it is data")

    def _refuse_write(self, tensors: list[torch.Tensor]) -> None:
        """A known tensor may be written to while it is the model's own and of no meaning to anybody else."""
        source = next(iter(vars(tensors[0]).get(_FROM, ())), None)
        is_source = any(tensors[0] is value for value in (*self.known.values(), *self.inputs.values()))
        if is_source or not all(_KNOWN in vars(t) for t in tensors):
            raise NeedsValue(f"a tensor that control flow depends on is written to ({source})")

    def _all_of(self, hit: torch.Tensor) -> list[torch.Tensor]:
        count = vars(hit)[_OF]
        self.opened.append(f"a loop over the elements that a mask hits runs over all {count}")
        with _disable_current_modes():
            return [_mark(torch.tensor([i]), frozenset(), known=True) for i in range(count)]

    def _open(self, func: Callable[..., Any], args: Sequence[Any], result: Any) -> Any:
        """A selection may hold any number of elements; torch's checks for 0 or 1 of them get the answer no."""
        from torch.fx.experimental.symbolic_shapes import free_unbacked_symbols  # symbolic algebra takes long to load

        for tensor in tensors_in(result):
            for size in tensor.shape:
                if isinstance(size, torch.SymInt) and free_unbacked_symbols(size) and size.node.expr.is_Symbol:
                    torch._check(size >= 2)  # not kept as an assertion: the graph is compared on small selections too
                    self.opened.append("a selection by a mask may hold any number of elements")
        if func in _SELECTS and args[0].dim() == 1 and isinstance(args[0].shape[0], int):
            setattr(result, _OF, args[0].shape[0])
        return result


def _writes(func: Callable[..., Any]) -> bool:
    name = getattr(func, "__name__", "")
    return name in _WRITERS or (name.endswith("_") and not name.startswith("__"))


def _is_description(tensor: torch.Tensor) -> bool:
    return not tensor.is_floating_point() and not tensor.is_complex() and tensor.numel() <= _MOST_VALUES


def _of_whole_numbers(func: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
    """Whether a tensor of whole numbers would be made, from plain numbers."""
    values, dtype = tree_leaves((args, kwargs)), kwargs.get("dtype")
    if any(isinstance(v, SYMBOLS) for v in values):
        return False
    if dtype is not None:
        return not dtype.is_floating_point and not dtype.is_complex
    return func in (torch.arange, torch.tensor, torch.full) and not any(isinstance(v, float) for v in values)


def _frozen(value: Any) -> Any:
    """A copy of what is known: it becomes a constant of the graph, and the model may write to its own."""
    if not isinstance(value, torch.Tensor) or _KNOWN not in vars(value):
        return value
    with _disable_current_modes():
        return value.clone()


def _mark(result: Any, sources: Any, known: bool) -> Any:
    for tensor in tensors_in(result):
        if isinstance(tensor, nn.Parameter):
            continue
        if sources:
            setattr(tensor, _FROM, frozenset(sources) | vars(tensor).get(_FROM, frozenset()))
        if known:
            setattr(tensor, _KNOWN, True)
    return result
