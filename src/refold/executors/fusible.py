"""What kernels of libraries can compute together with a layer."""

from __future__ import annotations

from typing import Any, Literal

import torch
from torch import nn
from torch.fx import Node

from ..arguments import argument
from ..match import GraphView, why_not_plain
from ..purity import name_of

DTYPES = (torch.float16, torch.bfloat16, torch.float32)


def activation_of(view: GraphView, node: Node) -> Literal["relu", "gelu"] | None:
    """Whether a node applies ReLU, or GELU by tanh."""
    if node.op == "call_module":
        module: Any = view.module(str(node.target))
        if not isinstance(module, nn.ReLU | nn.GELU) or why_not_plain(module, (nn.ReLU, nn.GELU)) is not None:
            return None
        return "relu" if isinstance(module, nn.ReLU) else "gelu" if module.approximate == "tanh" else None
    name = name_of(node)
    if name == "gelu":
        return "gelu" if argument(node, 1, "approximate", "none") == "tanh" else None
    return "relu" if name in ("relu", "relu_") else None
