"""Maps that fold a batch norm into the layer before or behind it."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from refold.weights.map_operation import NoInverse, OnShards, Tensors, along
from refold.weights.parametric import ScaledWeight


@dataclass(frozen=True)
class FoldBatchNormInLayer(ScaledWeight, stored_as="FoldBatchNorm"):
    """Fold `y = γ·(x − μ)/√(σ²+ε) + β` into the linear map before or after it. With `s = γ/√(σ²+ε)`, `t = β − s·μ`:

    after it (`x = W·u + b`):   `W' = s·W`, `b' = s·b + t`; back: `W = W'/s`, and a changed `b'` goes into β
    (with `guard` into `b = (b' − t)/s`, which is right at every rank).
    before it (`z = W·y + b`):  `W' = W·s`, `b' = b + W·t`; back: `W = W'/s`, `b = b' − W·t`.

    `channel` is the axis of W along which s runs. With `guard`, s and t are made as well (see refold.runtime).
    """

    eps: float
    channel: int
    first: str = "linear"
    guard: bool = False

    def scale(self, values: Tensors) -> tuple[torch.Tensor, torch.Tensor]:
        """s and t in float64."""
        variance = values["running_var"].double()
        gamma = values["gamma"].double() if "gamma" in values else torch.ones_like(variance)
        scale = gamma / torch.sqrt(variance + self.eps)
        shift = values["beta"].double() if "beta" in values else torch.zeros_like(variance)
        return scale, shift - scale * values["running_mean"].double()

    def factor(self, values: Tensors, weight: torch.Tensor) -> torch.Tensor:
        return along(self.scale(values)[0], self.channel, weight)

    def forward(self, old: Tensors) -> Tensors:
        weight = old["weight"]
        scale, shift = self.scale(old)
        bias = old["bias"].double() if "bias" in old else None
        if self.first == "linear":
            new_bias = shift if bias is None else scale * bias + shift
        else:
            moved = self._through(weight.double(), shift)
            new_bias = moved if bias is None else bias + moved
        new = {"weight": self.scaled(old), "bias": new_bias}
        new |= {"scale": scale, "shift": shift} if self.guard else {}
        return {role: value.to(weight.dtype) for role, value in new.items()}

    def on_shards(self, axis: int, parts: int, dims: int) -> OnShards | None:
        cut, by_output = {"weight": axis}, {"bias": 0}
        if self.first == "linear":
            if axis != self.channel:
                return OnShards(self, cut, cut)
            vectors = dict.fromkeys(("bias", "gamma", "beta", "running_mean", "running_var"), 0)
            return OnShards(self, cut | vectors, cut | by_output | {"scale": 0, "shift": 0})
        is_output = axis == 1 - self.channel  # the shift is summed over the other axes
        return OnShards(self, cut | by_output, cut | by_output) if is_output else None

    def from_kept(self, kept: Tensors) -> Tensors:
        scale, shift = self.scale(kept)
        known = {"scale": scale, "shift": shift}
        if self.first == "linear":
            known["bias"] = scale * kept["bias"].double() + shift if "bias" in kept else shift
        return known

    def carry(self, new: Tensors, kept: Tensors, exact: Tensors, changed: frozenset[str]) -> Tensors:
        if changed & {"scale", "shift"}:
            raise NoInverse("the scale or shift of its batch norm was changed apart from its weights")
        weight, bias = new["weight"].detach(), new["bias"].detach().double()
        scale, shift = self.scale(kept)
        lost = "its batch norm has a scale of 0 in a channel whose folded weights were changed"
        old = self.carry_weight(new, kept, exact, lost)
        if not bool(torch.isfinite(old.to(exact["weight"].dtype)[torch.isfinite(weight)]).all()):
            raise NoInverse(f"a changed weight divided by its batch norm's scale is too large for {weight.dtype}")
        if self.first == "linear" and "bias" not in changed:
            return {"weight": old}
        return {"weight": old} | self._carried_bias(bias, old, scale, shift, kept)

    def _carried_bias(
        self, bias: torch.Tensor, weight: torch.Tensor, scale: torch.Tensor, shift: torch.Tensor, kept: Tensors
    ) -> Tensors:
        if self.first == "linear":
            if "beta" in kept and not self.guard:
                inner = kept["bias"].double() if "bias" in kept else torch.zeros_like(scale)
                return {"beta": bias - scale * (inner - kept["running_mean"].double())}
            if "bias" in kept and bool((scale != 0).all()):
                return {"bias": (bias - shift) / scale}
            if self.guard:  # β runs along another axis than the bias where the rank is 3
                raise NoInverse("the layer has no bias of its own that could hold the changed one at every rank")
            raise NoInverse("neither the layer nor its batch norm has a bias that could hold the changed one")
        if "bias" in kept:
            return {"bias": bias - self._through(weight, shift)}
        if bool((shift == 0).all()) and bool((bias == 0).all()):
            return {}
        raise NoInverse("the layer has no bias of its own that could hold the changed one")

    # --- gradients -------------------------------------------------------------------------------------------------
    # behind the layer:  ∂W = s·∂W',            ∂b = s·∂b', ∂β = ∂b',    ∂γ = (Σ ∂W'·W + ∂b'·(b − μ)) / √(σ²+ε)
    # before the layer:  ∂W = s·∂W' + ∂b'·tᵀ,   ∂b = ∂b',   ∂β = Wᵀ·∂b', ∂γ = (Σ ∂W'·W − μ·Wᵀ·∂b') / √(σ²+ε)

    def gradient_forward(self, old: Tensors, values: Tensors, power: int) -> Tensors:
        scale, shift = self.scale(values)
        if "weight" not in old or bool((scale == 0).any()):
            return {}
        weight = old["weight"].double()
        factor = self.factor(values, weight) ** power
        if self.first == "linear":
            moved = {"weight": weight / factor}
            if "beta" in old and not self.guard:
                return moved | {"bias": old["beta"].double()}
            return moved | ({"bias": old["bias"].double() / scale**power} if "bias" in old else {})
        if "bias" not in old or not self._moves_alone(shift, power):
            return {}
        bias = old["bias"].double()
        return {"weight": (weight - self._outer(bias, shift, weight)) / factor, "bias": bias}

    def gradient_inverse(self, new: Tensors, values: Tensors, power: int) -> Tensors:
        scale, shift = self.scale(values)
        if "weight" not in new or (self.first == "norm" and not self._moves_alone(shift, power)):
            return {}
        weight, bias = new["weight"].double(), new.get("bias")
        moved = {"weight": weight * self.factor(values, weight) ** power}
        if bias is None:
            return moved if self.first == "linear" else {}
        bias = bias.double()
        if self.first == "linear":
            moved |= {"beta": bias, "bias": bias * scale**power}
        else:
            moved |= {"weight": moved["weight"] + self._outer(bias, shift, weight), "bias": bias}
        if power == 1 and "weight" in values:
            moved |= self._norm_gradients(weight, bias, values)
        return {role: value for role, value in moved.items() if role in values or role == "weight"}

    def _norm_gradients(self, weight: torch.Tensor, bias: torch.Tensor, values: Tensors) -> Tensors:
        old, mean = values["weight"].double(), values["running_mean"].double()
        spread = torch.sqrt(values["running_var"].double() + self.eps)
        through = self._sum_by_channel(weight * old)
        if self.first == "linear":
            inner = values["bias"].double() if "bias" in values else torch.zeros_like(mean)
            return {"gamma": (through + bias * (inner - mean)) / spread}
        back = old.reshape(*old.shape[:2], -1).sum(2).T @ bias
        return {"gamma": (through - mean * back) / spread, "beta": back}

    def _sum_by_channel(self, numbers: torch.Tensor) -> torch.Tensor:
        return numbers.sum([axis for axis in range(numbers.dim()) if axis != self.channel])

    def _moves_alone(self, shift: torch.Tensor, power: int) -> bool:
        """Squares of a sum need its cross terms, which are not kept; without a shift there is no sum."""
        return power == 1 or bool((shift == 0).all())

    def _through(self, weight: torch.Tensor, shift: torch.Tensor) -> torch.Tensor:
        return (weight * along(shift, self.channel, weight)).transpose(self.channel, -1).flatten(1).sum(1)

    def _outer(self, bias: torch.Tensor, shift: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
        return (bias[:, None] * shift).reshape(len(bias), len(shift), *[1] * (like.dim() - 2))

    def successors(self, roles: frozenset[str]) -> dict[str, frozenset[str]]:
        behind = self.first == "linear" and "beta" in roles and not self.guard
        return {"weight": frozenset({"weight"}), "bias": frozenset({"beta" if behind else "bias"}) & roles}


@dataclass(frozen=True)
class FoldBatchNormInTransposed(FoldBatchNormInLayer):
    """A batch norm behind a transposed convolution, whose weight is (in, out/groups, …): the scales of a group's
    outputs run along the second axis, for the rows of that group's inputs."""

    groups: int = 1

    def on_shards(self, axis: int, parts: int, dims: int) -> OnShards | None:
        return None

    def factor(self, values: Tensors, weight: torch.Tensor) -> torch.Tensor:
        of_groups = self.scale(values)[0].reshape(self.groups, -1)
        of_rows = of_groups.repeat_interleave(weight.shape[0] // self.groups, 0)
        return of_rows.reshape(*of_rows.shape, *[1] * (weight.dim() - 2))

    def _sum_by_channel(self, numbers: torch.Tensor) -> torch.Tensor:
        inputs, outputs = numbers.shape[:2]
        return numbers.reshape(self.groups, inputs // self.groups, outputs, -1).sum((1, 3)).flatten()


@dataclass(frozen=True)
class FoldBatchNormBeforeConvolution(FoldBatchNormInLayer):
    """A batch norm before a convolution over `dims` dimensions that pads nothing: `W'[o,i] = W[o,i]·sᵢ`, and
    `b'[o] = b[o] + Σ W[o,i,…]·tᵢ`."""

    dims: int = 2
