"""The tensors of a saved folder: put in by key when it is written, taken out by key when it is read."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import nn

from refold.errors import SaveError
from refold.fingerprint import flat_bytes, raw_bytes

_ALIGNMENT = 64  # bytes, as torch aligns what it allocates


class Store:
    """Tensors by key. What is the same object is stored once."""

    def __init__(self) -> None:
        self._tensors: dict[str, torch.Tensor] = {}
        self._keys: dict[int, str] = {}
        self._files: dict[str, Path] = {}
        self._open: dict[Path, Any] = {}
        self._device = "cpu"

    # --- writing ---------------------------------------------------------------------------------------------------

    def put(self, key: str, tensor: torch.Tensor) -> str:
        """Take a tensor in; the key under which it is stored (an earlier one if it is stored already)."""
        if id(tensor) in self._keys:
            return self._keys[id(tensor)]
        if type(tensor) not in (torch.Tensor, nn.Parameter) or tensor.layout != torch.strided or tensor.is_quantized:
            raise SaveError(
                f"{key} is a {type(tensor).__name__} ({tensor.layout}), which cannot be saved as plain data."
            )
        if tensor.is_meta:
            raise SaveError(f"{key} is on the meta device: it has no values to save.")
        self._keys[id(tensor)] = key
        self._tensors[key] = tensor
        return key

    def put_bytes(self, key: str, data: bytes) -> str | None:
        """Take bytes in, as a tensor of them; None for no bytes."""
        return self.put(key, torch.frombuffer(bytearray(data), dtype=torch.uint8)) if data else None

    def write(self, folder: Path, shard_bytes: int) -> dict[str, str]:
        """Write everything into files of at most that size (a larger tensor has one of its own); key -> file."""
        shards = list(self._shards(shard_bytes))
        placed: dict[str, str] = {}
        for number, shard in enumerate(shards, 1):
            name = f"weights-{number:05d}-of-{len(shards):05d}.safetensors"
            _write_shard(folder / name, shard)
            placed |= dict.fromkeys(shard, name)
        return placed

    def _shards(self, limit: int) -> Iterator[dict[str, torch.Tensor]]:
        shard: dict[str, torch.Tensor] = {}
        size = 0
        for key, tensor in self._tensors.items():
            more = tensor.numel() * tensor.element_size()
            if shard and size + more > limit:
                yield shard
                shard, size = {}, 0
            shard[key] = tensor
            size += more
        if shard:
            yield shard

    # --- reading ---------------------------------------------------------------------------------------------------

    @classmethod
    def reading(cls, files: dict[str, Path], placed: dict[str, str], device: str) -> Store:
        """A store over the files of a saved folder."""
        store = cls()
        store._device = device
        for key, name in placed.items():
            if name not in files:
                raise SaveError(f"{key} should be in {name}, which is not among the saved files.")
            store._files[key] = files[name]
        return store

    def get(self, key: str) -> torch.Tensor:
        """Read a tensor into memory that begins where torch's own does: kernels round otherwise at other places."""
        path = self._files.get(key)
        if path is None:
            raise SaveError(f"the tensor {key!r} was not saved.")
        library = safetensors()
        try:
            if path not in self._open:
                self._open[path] = library.safe_open(str(path), framework="pt", device=self._device)
            found: torch.Tensor = self._open[path].get_tensor(key)
        except Exception as error:
            raise SaveError(f"{key} cannot be read from {path}: {error}.") from error
        return found.clone() if found.data_ptr() % _ALIGNMENT else found

    def get_bytes(self, key: str) -> bytes:
        """Read bytes."""
        return bytes(raw_bytes(flat_bytes(self.get(key).cpu())))


def _write_shard(path: Path, tensors: dict[str, torch.Tensor]) -> None:
    plain: dict[str, torch.Tensor] = {}
    seen: set[int] = set()
    for key, tensor in tensors.items():  # safetensors wants every tensor contiguous and alone in its memory
        alone = tensor.untyped_storage().nbytes() == tensor.numel() * tensor.element_size()
        if not alone or not tensor.is_contiguous() or tensor.data_ptr() in seen:
            tensor = tensor.clone(memory_format=torch.contiguous_format)
        plain[key] = tensor.detach()
        seen.add(tensor.data_ptr())
    try:
        safetensors().save_file(plain, str(path), metadata={"format": "pt"})
    except Exception as error:
        text = str(error)
        if "No space left" in text or "os error 28" in text:
            raise OSError(28, "No space left on device") from error
        if isinstance(error, OSError):
            raise
        raise SaveError(f"{path.name} could not be written: {error}.") from error


def dtype_name(dtype: torch.dtype) -> str:
    """float32 for torch.float32."""
    return str(dtype).removeprefix("torch.")


def dtype_of(name: Any) -> torch.dtype:
    """torch.float32 for float32; nothing but a dtype comes out."""
    found = getattr(torch, name, None) if isinstance(name, str) and name.isidentifier() else None
    if not isinstance(found, torch.dtype):
        raise SaveError(f"{name!r} is no dtype.")
    return found


def safetensors() -> Any:
    """The safetensors package, imported when it is needed."""
    try:
        import safetensors.torch as found
    except ImportError as missing:
        raise SaveError(
            "refold.save and refold.load keep weights as safetensors, and that package is not installed. "
            "Install it: pip install safetensors."
        ) from missing
    return found
