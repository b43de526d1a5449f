"""A saved folder: the rewritten model, and as plain data which model, which inputs and which run it came from."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.fx import GraphModule

import refold
from refold._version import __version__
from refold.command_line.errors import WrongInput
from refold.command_line.models import Source, rebuild
from refold.command_line.storing_inputs import NotPlain, restore_inputs, store_inputs
from refold.command_line.subject import DTYPES, chosen_device
from refold.command_line.writing import ABOUT, SCHEMA
from refold.fingerprint import fingerprint
from refold.optimizing.calls import Inputs

VERSION = 1


@dataclass
class Opened:
    """What a folder holds, put together again."""

    folder: Path
    graph_module: GraphModule
    about: About
    device: torch.device

    def inputs(self) -> Inputs:
        """The inputs that the model was optimized for."""
        if self.about.inputs is None:
            raise WrongInput(f"{self.folder} does not hold its inputs. Give them again: --inputs FILE.py:FUNCTION.")
        return restore_inputs(self.about.inputs, self.folder, self.device)


@dataclass
class About:
    """The plain data beside the saved model."""

    source: Source
    dtype: str = "float32"
    device: str = "cpu"
    inputs: Any = None
    run: dict[str, Any] = field(default_factory=dict)
    original: dict[str, str] = field(default_factory=dict)

    def to_plain(self, files: list[str]) -> dict[str, Any]:
        """For JSON."""
        return {
            "schema": SCHEMA,
            "version": VERSION,
            "refold": __version__,
            "model": self.source.to_plain(),
            "dtype": self.dtype,
            "device": self.device,
            "run": self.run,
            "inputs": self.inputs,
            "original": self.original,
            "files": files,
        }


def fill_folder(folder: Path, gm: GraphModule, about: About, inputs: Inputs | None) -> None:
    """Write the model and what is known about it; the list of files comes last."""
    refold.save(gm, folder)
    if inputs is not None:
        try:
            about.inputs = store_inputs(inputs, folder)
        except NotPlain as reason:
            about.run["inputs_left_out"] = str(reason)


def finish_folder(folder: Path, about: About) -> None:
    """Write the file that says what the folder is, with the names of all its files."""
    files = sorted(str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file())
    text = json.dumps(about.to_plain(files), indent=1, allow_nan=False)
    (folder / ABOUT).write_text(text + "\n", encoding="utf-8")


def read_about(folder: Path) -> About:
    """What a folder says about itself; anybody may have written it, so nothing in it is believed unseen."""
    if not folder.is_dir():
        raise WrongInput(f"There is no folder {folder}.")
    try:
        data = json.loads((folder / ABOUT).read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise WrongInput(f"{folder} is no folder of refold optimize: it has no {ABOUT}.") from None
    except (OSError, ValueError, RecursionError) as error:
        raise WrongInput(f"{folder / ABOUT} cannot be read: {error}.") from None
    if not isinstance(data, dict) or data.get("schema") != SCHEMA:
        raise WrongInput(f"{folder} is no folder of refold optimize: its {ABOUT} says something else.")
    if data.get("version") != VERSION:
        raise WrongInput(f"{folder} has version {data.get('version')!r}, and this Refold reads {VERSION}.")
    run, original = data.get("run"), data.get("original")
    if not isinstance(run, dict) or not isinstance(original, dict) or data.get("dtype") not in DTYPES:
        raise WrongInput(f"{folder / ABOUT} is damaged.")
    return About(
        Source.from_plain(data.get("model")), data["dtype"], str(data.get("device")), data.get("inputs"), run, original
    )


def open_folder(folder: Path, named: str | None = None, device: str | None = None) -> Opened:
    """The rewritten model of a folder, with its history. The model that it was made from is rebuilt from plain data,
    or is the one that the user names; no code that the folder names is ever run."""
    about = read_about(folder)
    place = chosen_device(device)
    model = rebuild(about.source, named).to(device=place, dtype=DTYPES[about.dtype]).eval().requires_grad_(False)
    return Opened(folder, refold.load(folder, model), about, place)


def fingerprints(model: nn.Module) -> dict[str, str]:
    """The bits of every weight and buffer, as short texts."""
    tensors = dict(model.named_parameters(remove_duplicate=False)) | dict(model.named_buffers(remove_duplicate=False))
    return {name: fingerprint(tensor) for name, tensor in tensors.items()}


def differing(model: nn.Module, original: dict[str, str]) -> list[str]:
    """The weights and buffers that are not, bit for bit, what they were in the original."""
    now = fingerprints(model)
    return sorted(name for name, mark in now.items() if name in original and original[name] != mark)
