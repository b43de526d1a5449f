"""Which nodes only compute: no writes, no random numbers, no checks. They can be erased, evaluated early or joined."""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch import nn
from torch.fx import GraphModule, Node

from refold.graph.aliasing import has_tag, own_tensors_written, switches_mode, written_by
from refold.graph.arguments import argument, named_arguments
from refold.graph.targets import find_module, is_known_function, is_known_module, name_of

_RANDOM_NAMES = {
    "gumbel_softmax", "fractional_max_pool2d", "fractional_max_pool3d", "fractional_max_pool2d_with_indices",
    "fractional_max_pool3d_with_indices", "seed", "manual_seed", "initial_seed", "get_rng_state", "set_rng_state",
    "empty", "empty_like", "new_empty", "empty_strided", "new_empty_strided", "empty_permuted",
}  # fmt: skip
"""What gives other values every time, besides the operators that torch has tagged so."""
_DROPOUT_NAMES = {
    "dropout", "dropout1d", "dropout2d", "dropout3d", "alpha_dropout", "feature_dropout", "feature_alpha_dropout",
}  # fmt: skip
_EFFECT_NAMES = {
    "backward", "register_hook", "retain_grad", "requires_grad_", "requires_grad", "set_", "share_memory_", "print",
    "setattr", "item", "tolist", "is_nonzero", "record_stream", "input", "open", "exec", "eval", "cond", "while_loop",
}  # fmt: skip
_FREE_FUNCTIONS: set[Any] = {getattr, len, int, float, bool, round, max, min, slice, tuple, list, operator.getitem}
_FREE_FUNCTIONS |= {abs, pow, sum}
MODES_MATTER = (nn.modules.dropout._DropoutNd, nn.SyncBatchNorm, nn.RReLU, nn.RNNBase, nn.MultiheadAttention)
"""Modules that compute something else in training, besides those that move statistics then."""
_RANDOM_MODULES = (nn.FractionalMaxPool2d, nn.FractionalMaxPool3d)


def is_pure(gm: GraphModule, node: Node) -> bool:
    """Whether a node does nothing but compute its value from its inputs, the same one every time."""
    if node.op == "get_attr":
        return True
    if node.op == "call_module":
        return _pure_module(gm, str(node.target))
    if node.op not in ("call_function", "call_method") or switches_mode(node) or written_by(gm, node):
        return False
    name = name_of(node)
    if name in _RANDOM_NAMES or name in _EFFECT_NAMES or "assert" in name or name.startswith("sym_constrain"):
        return False
    if name in _DROPOUT_NAMES:
        return drops_nothing(node)
    if name == "scaled_dot_product_attention":
        return bool(argument(node, 4, "dropout_p", 0.0) == 0.0)
    if node.op == "call_method":
        return hasattr(torch.Tensor, name) and not _draws(name)
    return _pure_function(node)


def drops_at_random(gm: GraphModule, node: Node) -> bool:
    """Whether a node is dropout that drops something, by itself or within attention."""
    if node.op == "call_module":
        module = find_module(gm, str(node.target))
        return isinstance(module, nn.modules.dropout._DropoutNd) and module.training and module.p > 0
    is_dropout = name_of(node) in _DROPOUT_NAMES or name_of(node) == "scaled_dot_product_attention"
    return node.op in ("call_function", "call_method") and is_dropout and not is_pure(gm, node)


def _pure_function(node: Node) -> bool:
    target: Any = node.target
    if target in _FREE_FUNCTIONS:
        return True
    if not is_known_function(target) or isinstance(target, type) or getattr(target, "__module__", "") == "builtins":
        return False
    if isinstance(target, torch._ops.OpOverload):
        return torch.Tag.nondeterministic_seeded not in target.tags and bool(target._schema.returns)
    given = named_arguments(node)
    drops = given.get("training", False) is not False and given.get("dropout_p", 1.0) != 0.0
    return not drops and not _draws(name_of(node))


def _draws(name: str) -> bool:
    """Whether torch's operator of a name draws random numbers."""
    return has_tag(name, torch.Tag.nondeterministic_seeded)


def drops_nothing(node: Node) -> bool:
    """Whether a dropout function is called so that it returns its input: not training, or with probability 0."""
    default = True if getattr(node.target, "__module__", "") == "torch.nn.functional" else None
    training = argument(node, 2, "training", argument(node, 2, "train", default))
    return training is False or argument(node, 1, "p", 0.5) == 0


def _pure_module(gm: GraphModule, path: str) -> bool:
    module = find_module(gm, path)
    if module is None or not is_known_module(module) or any(True for _ in own_tensors_written(module)):
        return False
    return all(_pure_alone(m) for m in module.modules())


def _pure_alone(module: nn.Module) -> bool:
    if getattr(module, "inplace", False) or isinstance(module, _RANDOM_MODULES):
        return False
    return not (module.training and isinstance(module, MODES_MATTER))


_PURE_MODULES = ("_operator", "math", "builtins", "torch", "sympy")


def has_effect(node: Node) -> bool:
    """Whether an operator writes into an argument or draws random numbers, or is unknown code."""
    if node.op != "call_function":
        return node.op in ("call_module", "call_method")
    target: Any = node.target
    if isinstance(target, type):
        return False
    schema = getattr(target, "_schema", None)
    if schema is None:
        return not (getattr(target, "__module__", None) or "").startswith(_PURE_MODULES)
    return schema.is_mutable or torch.Tag.nondeterministic_seeded in target.tags
