"""What a decision depends on, as digests: the model's code and structure, the example's, the settings, the machine.

No value of a weight or of an example is in it.
"""

from __future__ import annotations

import functools
import hashlib
import os
import platform
import sys
import types
from collections.abc import Iterator, Sequence
from importlib.metadata import PackageNotFoundError, entry_points, version
from pathlib import Path
from typing import Any

import torch
from torch import nn

from refold._version import __version__
from refold.call_arguments import CallArguments
from refold.executors.catalogue import ENTRY_POINT_GROUP
from refold.fx_private import plain_attributes, tensor_places
from refold.nested import CALL, PLAIN, Branch, Constant, Tree, flatten
from refold.optimization.decision import JobKey
from refold.optimization.job import Job
from refold.optimization.surroundings import Surroundings
from refold.rewrite.description import canonical_text, class_path
from refold.rewrite.registry import ENTRY_POINTS

_PACKAGES = ("onnxruntime", "openvino", "onnxscript", "transformers")
_DEPTH = 4  # of objects inside of attributes


def key_of(job: Job, others: Sequence[CallArguments]) -> JobKey:
    """What the decision about a job depends on."""
    calls = [_text_of_call(call) for call in (job.inputs, *others)]
    asked = (job.level, job.backend, job.effort, job.budget.seconds, job.open_sizes, job.padding, job.max_memory)
    wanted = None if job.outputs is None else job.outputs.wanted
    settings = repr((*asked, [each.signature for each in job.pipeline], wanted, Surroundings.now()))
    return JobKey(_digest(_text_of_model(job.model)), _digest(*calls), _digest(settings), _machine(job))


def _digest(*texts: str) -> str:
    return hashlib.sha256("\n".join(texts).encode()).hexdigest()


# --- the model -----------------------------------------------------------------------------------------------------


def _text_of_model(model: nn.Module) -> str:
    modules = dict(model.named_modules(remove_duplicate=False))
    classes = {cls for module in modules.values() for cls in type(module).__mro__}
    lines = sorted(map(_text_of_class, classes))
    lines += [f"{path}: {class_path(type(m))} {_text(plain_attributes(m), 0)}" for path, m in modules.items()]
    first: dict[int, str] = {}
    for name, table, place in tensor_places(model):
        tensor = table[place]
        lines.append(f"{name}: {_text_of_tensor(tensor)} {first.setdefault(id(tensor), name)}")
    return "\n".join(lines)


@functools.lru_cache(maxsize=4096)
def _text_of_class(cls: type) -> str:
    """The code of a class; that of torch has a version."""
    if cls.__module__.partition(".")[0] in ("torch", "builtins"):
        return class_path(cls)
    codes = [f"{name}={_digest(*map(canonical_text, _codes(value)))}" for name, value in vars(cls).items()]
    return f"{class_path(cls)}: {' '.join(sorted(codes))}"


def _codes(value: Any) -> Iterator[types.CodeType]:
    """The code of a function, a method or a property, and of what a decorator has wrapped."""
    if isinstance(value, staticmethod | classmethod | types.MethodType):
        yield from _codes(value.__func__)
    elif isinstance(value, property):
        yield from _codes(value.fget)
    elif isinstance(value, types.FunctionType):
        yield value.__code__
        yield from _codes(getattr(value, "__wrapped__", None))


def _text(value: Any, depth: int) -> str:
    """A setting as text, without addresses. What begins with an underscore is nobody's setting."""
    if isinstance(value, torch.Tensor):
        return _text_of_tensor(value)
    if isinstance(value, PLAIN):
        return repr(value)
    if depth > _DEPTH or isinstance(value, nn.Module):
        return class_path(type(value))
    if isinstance(value, dict):
        shown = ((str(k), v) for k, v in value.items() if not str(k).startswith("_"))
        return f"{{{','.join(sorted(f'{k}:{_text(v, depth + 1)}' for k, v in shown))}}}"
    if isinstance(value, list | tuple):
        return f"[{','.join(_text(v, depth + 1) for v in value)}]"
    if isinstance(value, set | frozenset):
        return f"{{{','.join(sorted(_text(v, depth + 1) for v in value))}}}"
    if codes := [canonical_text(code) for code in _codes(value)]:
        return _digest(*codes)
    inner = vars(value) if hasattr(value, "__dict__") and not isinstance(value, type) else {}
    return f"{class_path(type(value))}{_text(inner, depth + 1)}"


def _text_of_tensor(tensor: torch.Tensor) -> str:
    strides = tensor.stride() if tensor.layout is torch.strided else ()
    is_parameter = isinstance(tensor, nn.Parameter)
    return f"{tensor.dtype}{tuple(tensor.shape)}{strides}{tensor.device}{is_parameter}{tensor.requires_grad}"


# --- the call ------------------------------------------------------------------------------------------------------


def _text_of_call(call: CallArguments) -> str:
    tree, tensors = flatten((call.args, call.kwargs), CALL)
    return f"{_text_of_tree(tree)} {[(each.dtype, each.shape, each.device) for each in tensors]}"


def _text_of_tree(tree: Tree) -> str:
    if isinstance(tree, Constant):
        return canonical_text(tree.value)
    if isinstance(tree, Branch):
        parts = ",".join(f"{key}:{_text_of_tree(child)}" for key, child in tree.items())
        return f"{class_path(tree.cls)}({parts})"
    return "*"


# --- the machine ---------------------------------------------------------------------------------------------------


def _machine(job: Job) -> dict[str, Any]:
    """What decides how fast something runs here and what it gives, by name."""
    return {
        "processor": _processor(),
        "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "device": _device(job.device),
        "threads": f"{torch.get_num_threads()}, {torch.get_num_interop_threads()}",
        "precision and determinism": _flags(),
        "versions": _versions(job.model),
    }


@functools.cache
def _processor() -> str:
    """Its name, and the instructions that torch uses on it."""
    name = platform.processor() or platform.machine()
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
        name = next(line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    except (OSError, StopIteration):
        pass
    return f"{platform.machine()}, {name}, {torch.backends.cpu.get_cpu_capability()}"


def _device(device: torch.device) -> str:
    if device.type != "cuda":
        return device.type
    facts = torch.cuda.get_device_properties(device)
    return f"{facts.name}, {facts.major}.{facts.minor}, {facts.total_memory}, CUDA {torch.version.cuda}"


def _flags() -> str:
    cuda, cudnn = torch.backends.cuda, torch.backends.cudnn
    return repr(
        (
            torch.get_default_dtype(),
            torch.get_float32_matmul_precision(),
            torch.are_deterministic_algorithms_enabled(),
            torch.get_flush_denormal() if hasattr(torch, "get_flush_denormal") else None,
            (cuda.matmul.allow_tf32, cuda.matmul.allow_fp16_reduced_precision_reduction),
            cuda.matmul.allow_bf16_reduced_precision_reduction,
            (cudnn.enabled, cudnn.allow_tf32, cudnn.benchmark, cudnn.deterministic),
            (cuda.flash_sdp_enabled(), cuda.mem_efficient_sdp_enabled(), cuda.math_sdp_enabled()),
            cuda.cudnn_sdp_enabled(),
            torch.backends.mkldnn.enabled,
            [(torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind)) for kind in ("cpu", "cuda")],
        )
    )


def _versions(model: nn.Module) -> str:
    """Of everything that takes part."""
    found = {"python": platform.python_version(), "torch": torch.__version__, "refold": f"{__version__} {_sources()}"}
    found |= {name: known for name in _PACKAGES if (known := _version(name)) is not None}
    for package in {type(module).__module__.partition(".")[0] for module in model.modules()}:
        found.setdefault(package, str(getattr(sys.modules.get(package), "__version__", "")))
    for entry in (*entry_points(group=ENTRY_POINTS), *entry_points(group=ENTRY_POINT_GROUP)):
        found[entry.value] = "" if entry.dist is None else entry.dist.version
    return ", ".join(f"{name} {known}".strip() for name, known in sorted(found.items()))


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


@functools.cache
def _sources() -> str:
    """A digest of Refold's own code: a version may stand for more than one state of it."""
    place = Path(__file__).parents[1]
    return _digest(*(path.read_text(encoding="utf-8") for path in sorted(place.rglob("*.py"))))[:12]
