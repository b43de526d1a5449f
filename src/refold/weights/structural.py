"""Maps that only move numbers: their inverse is exact, always from the current weights, and needs no record."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from refold.weights.map_operation import NoInverse, OnShards, Operation, Tensors


@dataclass(frozen=True)
class Concatenate(Operation):
    """`y = cat(x₀, x₁, …)` along `dim`; back by slicing."""

    sizes: tuple[int, ...]
    dim: int = 0

    def forward(self, old: Tensors) -> Tensors:
        return {"whole": torch.cat([old[str(i)] for i in range(len(self.sizes))], self.dim)}

    def inverse(self, new: Tensors, kept: Tensors) -> Tensors:
        parts = new["whole"].detach().split(list(self.sizes), self.dim)
        return {str(i): part for i, part in enumerate(parts)}

    def on_shards(self, axis: int, parts: int, dims: int) -> OnShards | None:
        if axis == self.dim:
            return None
        return OnShards(self, dict.fromkeys(map(str, range(len(self.sizes))), axis), {"whole": axis})


@dataclass(frozen=True)
class ConcatenateBlocks(Concatenate):
    """`y` is made of blocks, and block i of y is the concatenation along `dim` of the i-th parts of x₀, x₁, …; back by
    slicing. Divided among as many ranks, y gives each the concatenation of its own parts of all x."""

    blocks: int = 1

    def forward(self, old: Tensors) -> Tensors:
        parts = [old[str(i)].unflatten(self.dim, (self.blocks, -1)) for i in range(len(self.sizes))]
        return {"whole": torch.cat(parts, self.dim + 1).flatten(self.dim, self.dim + 1)}

    def inverse(self, new: Tensors, kept: Tensors) -> Tensors:
        blocks = new["whole"].detach().unflatten(self.dim, (self.blocks, -1))
        parts = blocks.split([size // self.blocks for size in self.sizes], self.dim + 1)
        return {str(i): part.flatten(self.dim, self.dim + 1) for i, part in enumerate(parts)}

    def on_shards(self, axis: int, parts: int, dims: int) -> OnShards | None:
        operation: Operation = self
        if axis == self.dim:
            if self.blocks % parts:
                return None
            sizes = tuple(size // parts for size in self.sizes)
            operation = ConcatenateBlocks(sizes, self.dim, self.blocks // parts)
        return OnShards(operation, dict.fromkeys(map(str, range(len(self.sizes))), axis), {"whole": axis})


@dataclass(frozen=True)
class AppendColumn(Operation):
    """`W' = [W | b]`; back by slicing."""

    def forward(self, old: Tensors) -> Tensors:
        return {"weight": torch.cat([old["weight"], old["bias"][:, None]], 1)}

    def inverse(self, new: Tensors, kept: Tensors) -> Tensors:
        whole = new["weight"].detach()
        return {"weight": whole[:, :-1], "bias": whole[:, -1]}

    def on_shards(self, axis: int, parts: int, dims: int) -> OnShards | None:
        return OnShards(self, {"weight": 0, "bias": 0}, {"weight": 0}) if axis == 0 else None


@dataclass(frozen=True)
class Slice(Operation):
    """`x₀, x₁, … = split(y)` along `dim`; back by concatenation. The reverse of Concatenate."""

    sizes: tuple[int, ...]
    dim: int = 0

    def forward(self, old: Tensors) -> Tensors:
        parts = old["whole"].split(list(self.sizes), self.dim)
        return {str(i): part.contiguous() for i, part in enumerate(parts)}

    def inverse(self, new: Tensors, kept: Tensors) -> Tensors:
        return {"whole": torch.cat([new[str(i)].detach() for i in range(len(self.sizes))], self.dim)}

    def successors(self, roles: frozenset[str]) -> dict[str, frozenset[str]]:
        return {str(i): roles for i in range(len(self.sizes))}

    def on_shards(self, axis: int, parts: int, dims: int) -> OnShards | None:
        if axis == self.dim:
            return None
        return OnShards(self, {"whole": axis}, dict.fromkeys(map(str, range(len(self.sizes))), axis))


@dataclass(frozen=True)
class Transpose(Operation):
    """`y = xᵀ` (the last two axes); back by transposing."""

    def forward(self, old: Tensors) -> Tensors:
        return {"weight": old["weight"].mT.contiguous()}

    def inverse(self, new: Tensors, kept: Tensors) -> Tensors:
        return {"weight": new["weight"].detach().mT}

    def on_shards(self, axis: int, parts: int, dims: int) -> OnShards | None:
        turned = {dims - 1: dims - 2, dims - 2: dims - 1}
        return OnShards(self, {"weight": axis}, {"weight": turned.get(axis, axis)})


@dataclass(frozen=True)
class Permute(Operation):
    """The axes in another order: axis i of the new tensor is axis `axes[i]` of the old one; back likewise."""

    axes: tuple[int, ...]

    def forward(self, old: Tensors) -> Tensors:
        return {"weight": old["weight"].permute(self.axes).contiguous()}

    def inverse(self, new: Tensors, kept: Tensors) -> Tensors:
        back = sorted(range(len(self.axes)), key=lambda i: self.axes[i])
        return {"weight": new["weight"].detach().permute(back)}

    def on_shards(self, axis: int, parts: int, dims: int) -> OnShards | None:
        return OnShards(self, {"weight": axis}, {"weight": self.axes.index(axis)})


@dataclass(frozen=True)
class Rename(Operation):
    """The same tensor under another name."""

    def forward(self, old: Tensors) -> Tensors:
        return {"weight": old["weight"]}

    def inverse(self, new: Tensors, kept: Tensors) -> Tensors:
        return {"weight": new["weight"].detach()}

    def on_shards(self, axis: int, parts: int, dims: int) -> OnShards | None:
        return OnShards(self, {"weight": axis}, {"weight": axis})


@dataclass(frozen=True)
class Reshape(Operation):
    """The same numbers in another shape; back to `before`."""

    before: tuple[int, ...]
    after: tuple[int, ...]

    def forward(self, old: Tensors) -> Tensors:
        return {"weight": old["weight"].reshape(self.after)}

    def inverse(self, new: Tensors, kept: Tensors) -> Tensors:
        return {"weight": new["weight"].detach().reshape(self.before)}


@dataclass(frozen=True)
class Pad(Operation):
    """Append `count` zeros along `dim`; back by slicing. Numbers trained into the padding cannot come back."""

    count: int
    dim: int = 0

    def forward(self, old: Tensors) -> Tensors:
        shape = list(old["weight"].shape)
        shape[self.dim] = self.count
        return {"weight": torch.cat([old["weight"], old["weight"].new_zeros(shape)], self.dim)}

    def inverse(self, new: Tensors, kept: Tensors) -> Tensors:
        whole = new["weight"].detach()
        return {"weight": whole.narrow(self.dim, 0, whole.shape[self.dim] - self.count)}

    def on_shards(self, axis: int, parts: int, dims: int) -> OnShards | None:
        return OnShards(self, {"weight": axis}, {"weight": axis}) if axis != self.dim else None


@dataclass(frozen=True)
class Fill(Operation):
    """A constant that no weight of the original determines: stated so that checkpoints know where it comes from."""

    shape: tuple[int, ...]
    value: float
    dtype: str = "float32"

    def forward(self, old: Tensors) -> Tensors:
        return {"constant": torch.full(self.shape, self.value, dtype=getattr(torch, self.dtype))}

    def inverse(self, new: Tensors, kept: Tensors) -> Tensors:
        return {}


@dataclass(frozen=True)
class Constant(Operation):
    """A tensor computed from numbers and from what no checkpoint holds: a checkpoint leaves it as it is, and undoing
    lets go of it. One that was written into has no place in the original."""

    structural = False

    def forward(self, old: Tensors) -> Tensors:
        return {}

    def inverse(self, new: Tensors, kept: Tensors) -> Tensors:
        return {}

    def carry(self, new: Tensors, kept: Tensors, exact: Tensors, changed: frozenset[str]) -> Tensors:
        if changed:
            raise NoInverse("it is a constant that no weight of the original determines, and it was written into")
        return {}


@dataclass(frozen=True)
class Relayout(Operation):
    """The same numbers in another order in memory; `strides` are those to come back to."""

    strides: tuple[int, ...]

    def forward(self, old: Tensors) -> Tensors:
        return {"weight": old["weight"]}

    def inverse(self, new: Tensors, kept: Tensors) -> Tensors:
        weight = new["weight"].detach()
        back = torch.empty_strided(weight.shape, self.strides, dtype=weight.dtype, device=weight.device)
        return {"weight": back.copy_(weight)}
