"""Weight-map records as plain data and tensors, and back."""

from __future__ import annotations

from typing import Any

import torch

from refold.errors import SaveError
from refold.saving.store import Store, dtype_name, dtype_of
from refold.weights import Operation
from refold.weights.correction import Correction
from refold.weights.maps import Handle, MapRecord, TensorSpec

_PARTS = ("symbols", "positions", "values")


def record_to_plain(record: MapRecord, store: Store, prefix: str) -> dict[str, Any]:
    """A record as JSON data; its tensors and corrections go into the store under this prefix."""
    corrections = {
        role: {part: store.put_bytes(f"{prefix}.{role}.{part}", getattr(correction, part)) for part in _PARTS}
        for role, correction in record.corrections.items()
    }
    return {
        "operation": record.map.operation.settings(),
        "sources": record.map.sources,
        "targets": record.map.targets,
        "specs": {role: spec_to_plain(spec) for role, spec in record.specs.items()},
        "target_dtypes": {role: dtype_name(dtype) for role, dtype in record.target_dtypes.items()},
        "kept": {role: store.put(f"{prefix}.{role}.kept", t) for role, t in record.kept.items()},
        "originals": {role: store.put(f"{prefix}.{role}.original", t) for role, t in record.originals.items()},
        "prints": record.fingerprints,
        "source_prints": record.source_fingerprints,
        "casts": {role: list(marks) for role, marks in record.casts.items()},
        "residues": corrections,
    }


def spec_to_plain(spec: TensorSpec) -> dict[str, Any]:
    """A tensor's description as JSON data."""
    return {
        "shape": list(spec.shape),
        "dtype": dtype_name(spec.dtype),
        "requires_grad": spec.requires_grad,
        "parameter": spec.is_parameter,
    }


def spec_from_plain(data: dict[str, Any]) -> TensorSpec:
    """A tensor's description from JSON data."""
    shape = tuple(int(size) for size in data["shape"])
    return TensorSpec(shape, dtype_of(data["dtype"]), bool(data["requires_grad"]), bool(data["parameter"]), Handle())


def record_from_plain(data: dict[str, Any], replayed: MapRecord, store: Store) -> MapRecord:
    """The saved record in the place of the one that the replay made; both must state the same map."""
    operation = Operation.from_settings(data["operation"])
    same = operation == replayed.map.operation
    same &= data["sources"] == replayed.map.sources and data["targets"] == replayed.map.targets
    if not same:
        raise SaveError(
            f"the saved map of {', '.join(map(str, data['targets'].values()))} is not what the replay made."
        )
    specs = {role: spec_from_plain(data["specs"][role]) for role in replayed.specs}
    for role, spec in replayed.specs.items():
        if specs[role].shape != spec.shape:
            raise SaveError(f"{replayed.map.sources[role]} was saved with another shape than the model gives it.")
    return MapRecord(
        replayed.map,
        specs,
        {role: dtype_of(data["target_dtypes"][role]) for role in replayed.map.targets},
        {role: store.get(key) for role, key in _roles(data["kept"], specs).items()},
        {role: _correction(parts, store) for role, parts in _roles(data["residues"], specs).items()},
        {role: store.get(key) for role, key in _roles(data["originals"], specs).items()},
        {str(role): str(mark) for role, mark in data["prints"].items()},
        {str(role): str(mark) for role, mark in data["source_prints"].items()},
        {str(role): tuple(map(str, marks)) for role, marks in data.get("casts", {}).items()},
    )


def _roles(entries: dict[str, Any], specs: dict[str, TensorSpec]) -> dict[str, Any]:
    unknown = set(entries) - set(specs)
    if unknown:
        raise SaveError(f"a saved record speaks of {', '.join(sorted(unknown))}, which its map does not have.")
    return entries


def _correction(parts: dict[str, str | None], store: Store) -> Correction:
    def read(part: str) -> bytes:
        key = parts[part]
        return b"" if key is None else store.get_bytes(key)

    return Correction(*(read(part) for part in _PARTS))


def meta_tensor(spec: TensorSpec) -> torch.Tensor:
    """A tensor on the meta device that fits a description."""
    empty = torch.empty(spec.shape, dtype=spec.dtype, device="meta")
    return torch.nn.Parameter(empty, requires_grad=spec.requires_grad) if spec.is_parameter else empty
