"""What is given by mistake, found before the long work begins: one sentence for each mistake, with the way out."""

from __future__ import annotations

import difflib
import inspect
import re
from collections.abc import Iterator, Mapping
from os import PathLike
from typing import Any

import torch
from torch import nn

from refold.call_arguments import CallArguments
from refold.errors import BadExample, RefoldError
from refold.fx_private import join_path
from refold.optimization.optimized_module import OptimizedModule
from refold.wording import first_line, kind_of


def check_model(model: Any) -> None:
    """Refuse what is no model, and models that cannot be optimized as they are."""
    if not isinstance(model, nn.Module):
        raise RefoldError(f"a torch.nn.Module is needed, and {_what(model)} was given{_where_the_model_is(model)}.")
    if isinstance(model, torch.jit.ScriptModule):
        raise RefoldError("a TorchScript module holds no Python to capture; give the model that it was made from.")
    if (inner := _wrapped(model)) is not None:
        raise RefoldError(f"the model is wrapped by {type(model).__name__}; give what is inside: model.{inner}.")
    if (part := _optimized_part(model)) is not None:
        raise RefoldError(f"a part of the model, {part}, is optimized already; call .restore() on it first.")
    if model.training and "eval" in vars(model):  # torch.export takes it away
        raise RefoldError("the module of an exported program has no eval mode; give the model that was exported.")
    if model.training:
        raise RefoldError("the model is in training mode; call model.eval() first: optimizing is for inference.")
    _check_weights(model)


def _what(given: Any) -> str:
    return f"the class {given.__name__}" if isinstance(given, type) else kind_of(given)


def _where_the_model_is(given: Any) -> str:
    """The way out where something else than a model was given."""
    if isinstance(given, type) and issubclass(given, nn.Module):
        return f"; make an instance of it first: {given.__name__}(...)"
    if inspect.ismethod(given) and isinstance(given.__self__, nn.Module):
        return f"; give the model itself, not its {given.__name__}"
    if isinstance(given, str | PathLike):
        return "; load the model first, for example with transformers.AutoModel.from_pretrained"
    if isinstance(given, torch.Tensor):
        return "; the model comes first, the example second"
    if isinstance(given, Mapping):
        return "; load these weights into a model first, with model.load_state_dict"
    if isinstance(getattr(given, "model", None), nn.Module):
        return "; give its model: .model"
    if isinstance(given, torch.export.ExportedProgram):
        return "; give the model that was exported"
    if hasattr(given, "convert_tokens_to_ids"):
        return "; give the model that it is for, and what it returns for some texts as the example"
    return "; write it as the forward of one" if callable(given) else ""


def _wrapped(model: nn.Module) -> str | None:
    """Under which name a wrapper holds the model that it wraps."""
    if "_orig_mod" in vars(model).get("_modules", {}):  # what torch.compile gives
        return "_orig_mod"
    is_wrapper = type(model).__module__.startswith(("torch.nn.parallel.", "torch.distributed."))
    return "module" if is_wrapper and isinstance(getattr(model, "module", None), nn.Module) else None


def _optimized_part(model: nn.Module) -> str | None:
    """Where an optimized model lies inside of this one. (It answers for its original where modules are listed.)"""
    waiting = [("", model)]
    while waiting:
        path, module = waiting.pop()
        if isinstance(module, OptimizedModule):
            return path
        children = vars(module).get("_modules", {})
        waiting += [(join_path(path, name), child) for name, child in children.items() if child is not None]
    return None


def _check_weights(model: nn.Module) -> None:
    weights = dict(model.named_parameters())
    on_meta = next((name for name, weight in weights.items() if weight.is_meta), None)
    if on_meta is not None:
        raise RefoldError(f"the model has no values yet ({on_meta} is on the meta device); load its weights first.")
    devices = sorted({str(weight.device) for weight in weights.values()})
    if len(devices) > 1:
        raise RefoldError(
            f"the model is split over {' and '.join(devices)}; move it to one: model.to({devices[-1]!r})."
        )
    if any(map(_is_quantized, model.modules())):
        raise RefoldError(
            "the model is quantized, and its kernels cannot be rewritten; give the model that it was made from."
        )


def _is_quantized(module: nn.Module) -> bool:
    packed = any(isinstance(value, torch.ScriptObject) for value in vars(module).values())
    own = (*module.parameters(recurse=False), *module.buffers(recurse=False))
    by_transformers = getattr(module, "is_quantized", False) is True
    return packed or by_transformers or any(tensor.is_quantized for tensor in own)


def takes(model: nn.Module, count: int) -> bool:
    """Whether the model can be called with so many arguments by position."""
    try:
        inspect.signature(model.forward).bind(*range(count))
    except TypeError:
        return False
    return True


# --- the first call ------------------------------------------------------------------------------------------------


def first_call(model: nn.Module, inputs: CallArguments) -> Any:
    """What the model gives for the example; where it fails, `BadExample` says what is most likely wrong."""
    try:
        return inputs.given_to(model)
    except Exception as error:
        reasons = (
            *_mistakes(model, inputs),
            *_missing_kernel(error),
            "Call the model on it yourself: what it takes is what is optimized",
        )
        given = inputs.described() or "nothing"
        sentence = f"{type(model).__name__} fails on the example ({given}): {first_line(error)}. {reasons[0]}."
        raise BadExample(sentence) from error


def _mistakes(model: nn.Module, inputs: CallArguments) -> Iterator[str]:
    """What may be wrong with the inputs of a call that failed, the most likely first."""
    if (inner := _inner_model(model)) is not None:
        yield f"It takes texts, and a part of it takes tensors: give {inner}, with a tokenizer's output as the example"
    named = {**{str(i): value for i, value in enumerate(inputs.args)}, **inputs.kwargs}
    for name, value in named.items():
        if _first_leaf(value, str) is not None:
            yield 'Models take tensors, not text: give tokenizer(texts, padding=True, return_tensors="pt")'
        if isinstance(value, list) and isinstance(_first_leaf(value, int | float), int | float):
            yield f'{name} is a list of numbers: make it a tensor, or tell the tokenizer return_tensors="pt"'
    if len(inputs.args) == 1 and isinstance(inputs.args[0], Mapping):
        yield "A dict inside of a tuple is one positional argument: give the dict itself"
    yield from _misnamed(model, inputs)
    yield from _misplaced(model, inputs)


def _missing_kernel(error: Exception) -> Iterator[str]:
    if re.search(r"not (implemented|supported)", str(error)) and re.search("Half|BFloat16|dtype", str(error)):
        yield "An operator of it is missing for this dtype on this device: try float32 or bfloat16, or another device"


def _first_leaf(value: Any, kind: Any) -> Any:
    while isinstance(value, list | tuple) and value:
        value = value[0]
    return value if isinstance(value, kind) else None


def _inner_model(model: nn.Module) -> str | None:
    """Where the model of tensors lies inside of one that is made for texts, such as a SentenceTransformer."""
    takes_texts = callable(getattr(model, "encode", None)) and callable(getattr(model, "tokenize", None))
    paths = [path for path, _ in model.named_modules() if path.rpartition(".")[2] in ("auto_model", "model")]
    first, _, rest = (paths[0] if takes_texts and paths else "").partition(".")
    return (f"model[{first}].{rest}" if first.isdigit() else f"model.{first}") if first else None


def _misnamed(model: nn.Module, inputs: CallArguments) -> Iterator[str]:
    signature = inspect.signature(model.forward)
    known = [name for name, p in signature.parameters.items() if p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)]
    takes = f"forward takes {', '.join(known[:8])}{', …' if len(known) > 8 else ''}"
    for name in inputs.kwargs:
        if name not in known:
            close = difflib.get_close_matches(name, known, 1)
            yield f"{name!r} is no argument of it{f'; did you mean {close[0]!r}?' if close else ''} ({takes})"
    try:
        signature.bind(*inputs.args, **inputs.kwargs)
    except TypeError:
        yield f"The number of arguments is another: {takes}"


def _misplaced(model: nn.Module, inputs: CallArguments) -> Iterator[str]:
    weight = next(model.parameters(), None)
    if weight is None:
        return
    for tensor in inputs.tensors:
        if tensor.device != weight.device:
            yield f"The model is on {weight.device} and the example on {tensor.device}: move one of them"
        if tensor.is_floating_point() and tensor.dtype != weight.dtype:
            yield f"The model has {weight.dtype} and the example {tensor.dtype}: cast one of them"
