"""Models and transformations, right and wrong, that the tests and the benchmark of `verify` share."""

from __future__ import annotations

import operator
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import nn
from torch.fx import GraphModule, symbolic_trace

import refold
from refold.rewrite.editor import Editor
from refold.rewrite.transformation import Transformation
from refold.weights import Concatenate, FoldBatchNormInLayer, Tensors

DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def harden(norm: nn.Module, generator: torch.Generator, spread: float = 4.0) -> None:
    """Statistics over many orders of magnitude, as trained and as broken nets have them."""
    size = norm.num_features
    norm.running_mean = torch.randn(size, generator=generator) * 3
    norm.running_var = 10.0 ** ((torch.rand(size, generator=generator) * 2 - 1) * spread)
    norm.weight.data = torch.randn(size, generator=generator)
    norm.bias.data = torch.randn(size, generator=generator)


class ConvNet(nn.Module):
    def __init__(self, generator: torch.Generator, spread: float = 4.0) -> None:
        super().__init__()
        bias = bool(torch.randint(0, 2, (), generator=generator))
        self.conv = nn.Conv2d(3, 6, 3, padding=1, bias=bias)
        self.norm = nn.BatchNorm2d(6)
        self.head = nn.Linear(6, 5)
        harden(self.norm, generator, spread)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(torch.relu(self.norm(self.conv(x))).mean((2, 3))) / 49


class Dead(ConvNet):
    """A ReLU that lets nothing through: end to end, every fold before it looks right."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(torch.relu(self.norm(self.conv(x)) - 1e4).mean((2, 3))) / 49


class Mlp(nn.Module):
    def __init__(self, generator: torch.Generator) -> None:
        super().__init__()
        self.first, self.norm, self.second = nn.Linear(7, 6), nn.BatchNorm1d(6), nn.Linear(6, 3)
        harden(self.norm, generator)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(torch.relu(self.norm(self.first(x)))) / 7.3


class Attention(nn.Module):
    def __init__(self, generator: torch.Generator) -> None:
        super().__init__()
        self.q, self.k, self.v = nn.Linear(8, 8), nn.Linear(8, 8, bias=False), nn.Linear(8, 6)
        self.out = nn.Linear(6, 8)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, None]:
        scores = torch.softmax(self.q(x) @ self.k(x).transpose(-1, -2) / 2.83, -1)
        return self.out(scores @ self.v(x)), scores.argmax(-1), None


MODELS: dict[str, tuple[type[nn.Module], tuple[int, ...]]] = {
    "conv": (ConvNet, (2, 3, 6, 6)),
    "mlp": (Mlp, (4, 7)),
    "attention": (Attention, (2, 5, 8)),
}
ALL = (
    refold.FuseBatchNorm2dInConv2d(),
    refold.FuseBatchNorm1dInLinear(),
    refold.MergeLinears(),
    refold.ChangeTrueDivToMulByInverse(),
    refold.FuseBiasInLinear(),
)


def build(name: str, dtype: torch.dtype, seed: int) -> tuple[GraphModule, torch.Tensor]:
    """A traced random model of a family, and an input."""
    torch.manual_seed(seed)
    cls, shape = MODELS[name]
    model = cls(torch.Generator().manual_seed(seed)).eval().to(dtype)
    return symbolic_trace(model), torch.randn(shape).to(dtype)


# --- a fold of somebody else, with defects ----------------------------------------------------------------------------


class ForeignFold(Transformation):
    """Folds batch norms into convolutions by raw edits, with no weight map; right, or with one defect."""

    preserves_computation = True
    DEFECTS = (
        "bias not scaled",
        "scale off by 0.1 %",
        "epsilon dropped",
        "wrong axis",
        "transposed weight",
        "no shift",
    )

    def __init__(self, defect: str = "") -> None:
        self.defect = defect

    def transform(self, graph_module: GraphModule) -> GraphModule:
        for node in list(graph_module.graph.nodes):
            if node.op == "call_module" and node.target == "norm":
                self._fold(graph_module, node)
        return graph_module

    def _fold(self, gm: GraphModule, node: torch.fx.Node) -> None:
        conv, norm = gm.conv, gm.norm
        weight, bias = self._values(conv, norm)
        new = nn.Conv2d(3, 6, 3, padding=1).eval()
        new.weight = nn.Parameter(weight.to(conv.weight.dtype))
        new.bias = nn.Parameter(bias.to(conv.weight.dtype))
        gm.conv = new
        node.replace_all_uses_with(node.args[0])
        gm.graph.erase_node(node)
        del gm.norm

    @torch.no_grad()
    def _values(self, conv: nn.Conv2d, norm: nn.BatchNorm2d) -> tuple[torch.Tensor, torch.Tensor]:
        weight, mean = conv.weight.double(), norm.running_mean.double()
        eps = 0.0 if self.defect == "epsilon dropped" else norm.eps
        scale = norm.weight.double() / torch.sqrt(norm.running_var.double() + eps)
        scale = scale * 1.001 if self.defect == "scale off by 0.1 %" else scale
        bias = torch.zeros_like(mean) if conv.bias is None else conv.bias.double()
        shift = scale * (bias - mean) if self.defect != "bias not scaled" else bias - mean
        shift = shift if self.defect == "no shift" else shift + norm.bias.double()
        along = (1, -1, 1, 1) if self.defect == "wrong axis" else (-1, 1, 1, 1)
        folded = weight * (scale[:3] if self.defect == "wrong axis" else scale).reshape(along)
        return (folded.transpose(2, 3) if self.defect == "transposed weight" else folded), shift


# --- the same, through weight maps ------------------------------------------------------------------------------------


@dataclass(frozen=True)
class UnscaledBias(FoldBatchNormInLayer):
    """`b' = b + t` instead of `s·b + t`."""

    def forward(self, old: Tensors) -> Tensors:
        plain = super().forward({k: v for k, v in old.items() if k != "bias"})
        bias = old.get("bias", torch.zeros_like(old["running_mean"]))
        return plain | {"bias": (plain["bias"].double() + bias.double()).to(plain["bias"].dtype)}


@dataclass(frozen=True)
class NoEpsilon(FoldBatchNormInLayer):
    """ε left out."""

    def scale(self, values: Tensors) -> tuple[torch.Tensor, torch.Tensor]:
        scale = values["gamma"].double() / values["running_var"].double().sqrt()
        return scale, values["beta"].double() - scale * values["running_mean"].double()


@dataclass(frozen=True)
class ScaleOff(FoldBatchNormInLayer):
    """The scale is 0.1 % too large."""

    def forward(self, old: Tensors) -> Tensors:
        return super().forward(old | {"gamma": old["gamma"].double() * 1.001})


class MappedFold(Transformation):
    """Folds by a weight map whose operation may have a defect, and may install something else than the map gives."""

    def __init__(self, operation: type[FoldBatchNormInLayer] = FoldBatchNormInLayer, stale: bool = False) -> None:
        self.operation, self.stale = operation, stale

    def transform(self, graph_module: GraphModule) -> GraphModule:
        edit, conv, norm = Editor(graph_module), graph_module.conv, graph_module.norm
        roles = {"gamma": "weight", "beta": "bias", "running_mean": "running_mean", "running_var": "running_var"}
        sources = {"weight": "conv.weight"} | {role: f"norm.{name}" for role, name in roles.items()}
        sources |= {} if conv.bias is None else {"bias": "conv.bias"}
        new = edit.map_weights(self.operation(norm.eps, 0), sources, {"weight": "conv.weight", "bias": "conv.bias"})
        twin = nn.Conv2d(3, 6, 3, padding=1).eval()
        twin.weight, twin.bias = nn.Parameter(new["weight"] * (1.5 if self.stale else 1)), nn.Parameter(new["bias"])
        edit.put_module("conv", twin)
        node = next(n for n in graph_module.graph.nodes if n.target == "norm")
        edit.replace_uses(node, node.args[0])
        edit.erase(node)
        edit.remove("norm")
        return graph_module


# --- rewrites of the graph --------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Swapped(Concatenate):
    """Concatenates in the wrong order."""

    def forward(self, old: Tensors) -> Tensors:
        return {"whole": torch.cat([old[str(i)] for i in reversed(range(len(self.sizes)))], self.dim)}

    def inverse(self, new: Tensors, kept: Tensors) -> Tensors:
        parts = new["whole"].detach().split(list(reversed(self.sizes)), self.dim)
        return {str(i): part for i, part in enumerate(reversed(parts))}


class Merge(Transformation):
    """Merges the two layers q and v of an attention by raw edits; the slices, or the concatenation, may be swapped."""

    def __init__(self, defect: str = "") -> None:
        self.defect = defect

    def transform(self, graph_module: GraphModule) -> GraphModule:
        edit, gm = Editor(graph_module), graph_module
        operation = Swapped((8, 6)) if self.defect == "swapped map" else Concatenate((8, 6))
        for role in ("weight", "bias"):
            whole = edit.map_weights(operation, {"0": f"q.{role}", "1": f"v.{role}"}, {"whole": f"merged_{role}"})[
                "whole"
            ]
            edit.put_tensor(f"merged_{role}", nn.Parameter(whole))
        first = next(n for n in gm.graph.nodes if n.target == "q")
        second = next(n for n in gm.graph.nodes if n.target == "v")
        fetched = [edit.fetch(first, f"merged_{role}") for role in ("weight", "bias")]
        merged = edit.call(first, F.linear, first.args[0], *fetched)
        starts = (6, 0) if self.defect == "swapped slice" else (0, 8)
        for node, start, width, name in ((first, starts[0], 8, "q"), (second, starts[1], 6, "v")):
            node.op, node.target = "call_function", operator.getitem
            node.args = (merged, (Ellipsis, slice(start, start + width)))
            edit.remove(name)
        return gm


class Divide(Transformation):
    """Turns the division by 49 into a multiplication, perhaps by something else."""

    def __init__(self, divisor: float = 49) -> None:
        self.divisor = divisor

    def transform(self, graph_module: GraphModule) -> GraphModule:
        for node in graph_module.graph.nodes:
            if node.target is operator.truediv:
                node.target, node.args = operator.mul, (node.args[0], 1 / self.divisor)
        return graph_module


Defect = tuple[str, str, Callable[[], Transformation]]
DEFECTS: list[Defect] = [(f"foreign: {d}", "conv", lambda d=d: ForeignFold(d)) for d in ForeignFold.DEFECTS]
DEFECTS += [
    ("map: bias not scaled", "conv", lambda: MappedFold(UnscaledBias)),
    ("map: epsilon dropped", "conv", lambda: MappedFold(NoEpsilon)),
    ("map: scale off by 0.1 %", "conv", lambda: MappedFold(ScaleOff)),
    ("swapped slice", "attention", lambda: Merge("swapped slice")),
    ("swapped concatenation", "attention", lambda: Merge("swapped map")),
    ("wrong constant", "conv", lambda: Divide(48)),
    ("constant off by 0.1 %", "conv", lambda: Divide(49 * 1.001)),
]
