"""Small checkpoints as folders of safetensors files, as they lie on the hub."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

CONFIG = {"num_attention_heads": 4, "num_key_value_heads": 2}


def llama_like(layers: int = 4, width: int = 6, dtype: torch.dtype = torch.bfloat16) -> dict[str, torch.Tensor]:
    """The tensors of a decoder with grouped queries, biases and norms in another dtype."""
    generator = torch.Generator().manual_seed(0)

    def drawn(*shape: int, dtype: torch.dtype = dtype) -> torch.Tensor:
        return torch.randn(*shape, generator=generator).to(dtype)

    tensors = {"model.embed_tokens.weight": drawn(20, width)}
    for layer in range(layers):
        path = f"model.layers.{layer}"
        for name, rows in (("q", 8), ("k", 4), ("v", 4)):
            tensors[f"{path}.self_attn.{name}_proj.weight"] = drawn(rows, width)
            tensors[f"{path}.self_attn.{name}_proj.bias"] = drawn(rows)
        tensors[f"{path}.self_attn.o_proj.weight"] = drawn(width, 8)
        for name in ("gate", "up"):
            tensors[f"{path}.mlp.{name}_proj.weight"] = drawn(10, width)
        tensors[f"{path}.norm.weight"] = drawn(width, dtype=torch.float32)
    return tensors


def experts(count: int = 11, width: int = 6) -> dict[str, torch.Tensor]:
    """The experts of one layer, each a gated layer of its own; more than ten, so that numbers are no words."""
    parts = (("gate", (5, width)), ("up", (5, width)), ("down", (width, 5)))
    path = "model.layers.0.mlp.experts"
    return {f"{path}.{i}.{name}_proj.weight": torch.randn(shape) for i in range(count) for name, shape in parts}


def write_checkpoint(folder: Path, tensors: dict[str, torch.Tensor], files: int = 3) -> Path:
    """Write them as a folder with an index, cut without regard to layers."""
    folder.mkdir(parents=True)
    names = list(tensors)
    size = -(-len(names) // files)
    placed: dict[str, str] = {}
    for number in range(files):
        file = f"model-{number + 1:05d}-of-{files:05d}.safetensors"
        part = {name: tensors[name] for name in names[number * size : (number + 1) * size]}
        save_file(part, str(folder / file), metadata={"format": "pt", "note": "é"})
        placed |= dict.fromkeys(part, file)
    total = sum(tensor.nbytes for tensor in tensors.values())
    index = {"metadata": {"total_size": total}, "weight_map": placed}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index, indent=2) + "\n")
    (folder / "config.json").write_text(json.dumps(CONFIG))
    return folder


def read_tensors(folder: Path) -> dict[str, torch.Tensor]:
    """Every tensor in a folder, by the reader of safetensors itself."""
    return {name: tensor for path in sorted(folder.glob("*.safetensors")) for name, tensor in load_file(path).items()}


def file_bytes(folder: Path) -> dict[str, bytes]:
    """Every file in a folder."""
    return {path.name: path.read_bytes() for path in folder.iterdir() if path.is_file()}
