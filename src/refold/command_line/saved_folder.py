"""The folder of a command: the rewritten model, and as plain data which model, inputs and run it came from."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch
from torch import nn
from torch.fx import GraphModule

from refold._version import __version__
from refold.call_arguments import CallArguments
from refold.command_line.loaded_model import DTYPES, chosen_device, ready
from refold.command_line.model_inputs import FILE as INPUTS
from refold.command_line.model_inputs import NotPlain, inputs_for, placed, restore_inputs, store_inputs
from refold.command_line.model_sources import ABOUT, Source, SourceModel, load_model, rebuild
from refold.command_line.options import NO_SIZES, FolderOptions
from refold.errors import UnknownRecipe, WrongInput
from refold.fingerprint import fingerprint
from refold.fx_private import registered_tensors
from refold.record.stack import history
from refold.saving import SaveError, load
from refold.saving.folder import MANIFEST, check_names_free, checked_file, own_files, parsed, replaced, tidy
from refold.saving.writer import RECIPE, write_module

SCHEMA = "refold.folder"
VERSION = 1


@dataclass
class About:
    """The plain data that is saved with a model."""

    source: Source
    dtype: str = "float32"
    inputs: Any = None
    run: dict[str, Any] = field(default_factory=dict)
    original: dict[str, str] = field(default_factory=dict)
    changes: list[dict[str, Any]] = field(default_factory=list)

    def to_plain(self, files: list[str]) -> dict[str, Any]:
        """For JSON."""
        return {
            "schema": SCHEMA,
            "version": VERSION,
            "refold": __version__,
            "model": self.source.to_plain(),
            "dtype": self.dtype,
            "run": self.run,
            "inputs": self.inputs,
            "original": self.original,
            "changes": self.changes,
            "files": files,
        }


@dataclass
class Opened:
    """What a folder holds, put together again."""

    graph_module: GraphModule
    inputs: CallArguments | None
    about: About | None


# --- writing -----------------------------------------------------------------------------------------------------


def write_folder(
    place: Path,
    gm: GraphModule,
    about: About,
    inputs: CallArguments | None,
    *,
    texts: Mapping[str, str] = MappingProxyType({}),
    overwrite: bool = False,
) -> None:
    """Write the rewritten model, its inputs, what is known about both, and texts that people may edit."""
    check_place(place, overwrite, texts)
    about.changes = described_changes(gm)
    with replaced(place, editable=texts.keys()) as folder:
        write_module(gm, folder)
        try:
            about.inputs = None if inputs is None else store_inputs(inputs, folder)
        except NotPlain as reason:
            about.run["inputs_left_out"] = str(reason)
        for name, text in texts.items():
            (folder / name).write_text(text, encoding="utf-8")
        files = sorted([MANIFEST, *(path.name for path in folder.iterdir())])
        data = json.dumps(about.to_plain(files), indent=1, allow_nan=False)
        (folder / ABOUT).write_text(data + "\n", encoding="utf-8")


def described_changes(gm: GraphModule) -> list[dict[str, Any]]:
    """What was done to a module, as plain data."""
    return [{"label": c.label, "bytes": c.nbytes, "lines": c.describe()} for c in history(gm)]


def check_place(place: Path, overwrite: bool, texts: Iterable[str] = ()) -> None:
    """Refuse, before any work, a place where the folder cannot be put. Only what Refold wrote is ever replaced."""
    if place.exists() and not place.is_dir():
        raise WrongInput(f"{place} is a file, and a folder is to be written there. Choose another name.")
    with _folder_is_wrong():
        tidy(place)
        check_names_free(place, (ABOUT, INPUTS, MANIFEST, RECIPE, *texts))
        if own_files(place) and not overwrite:
            raise WrongInput(f"{place} exists already. Choose another folder, or give --overwrite to replace it.")
    parent = next(p for p in place.absolute().parents if p.exists())
    if not parent.is_dir() or not os.access(parent, os.W_OK):
        raise WrongInput(f"{place} cannot be written: {parent} is no folder that you may write to.")


# --- reading -----------------------------------------------------------------------------------------------------


def read_about(folder: Path) -> About | None:
    """What a folder says about itself; None for one that `refold.save` wrote, which knows no model. Its origin
    is unknown, so everything in it is checked."""
    tidy(folder)
    if not folder.is_dir():
        raise WrongInput(f"There is no folder {folder}.")
    if not (folder / ABOUT).exists():
        if (folder / MANIFEST).exists():
            return None
        raise WrongInput(f"{folder} is no folder that Refold saved: it has no {ABOUT}.")
    with _folder_is_wrong():
        data = parsed(checked_file(folder, ABOUT).read_bytes(), folder / ABOUT)
    if data.get("schema") != SCHEMA:
        raise WrongInput(f"{folder} is no folder of refold optimize: its {ABOUT} says something else.")
    if data.get("version") != VERSION:
        raise WrongInput(f"{folder} has version {data.get('version')!r}, and this Refold reads {VERSION}.")
    if not _well_formed(data):
        raise WrongInput(f"{folder / ABOUT} is damaged.")
    source = Source.from_plain(data.get("model"))
    return About(source, data["dtype"], data.get("inputs"), data["run"], data["original"], data["changes"])


def _well_formed(data: dict[str, Any]) -> bool:
    match data:
        case {"dtype": str() as dtype, "run": dict(), "original": dict(), "changes": list() as changes}:
            return dtype in DTYPES and all(map(_is_change, changes))
    return False


def _is_change(change: Any) -> bool:
    match change:
        case {"label": str(), "bytes": int(), "lines": list() as lines}:
            return all(isinstance(line, str) for line in lines)
    return False


def open_folder(folder: Path, said: FolderOptions) -> Opened:
    """The rewritten model of a folder, with its history. The model that it was made from is rebuilt from plain data,
    or is the one that the user names; no code that the folder names is ever run."""
    os.environ["HF_HUB_OFFLINE"] = "1"  # nothing is downloaded because a folder says so
    about = read_about(folder)
    device = chosen_device(said.device)
    if about is None:
        return _open_bare(folder, said, device)
    found = SourceModel(rebuild(about.source), about.source) if said.model is None else load_model(said.model)
    if said.inputs is None:
        inputs = _stored_inputs(folder, about, device)
    else:
        inputs = placed(inputs_for(found, NO_SIZES, said.inputs), device, DTYPES[about.dtype])
    captured = ready(found, inputs, device, DTYPES[about.dtype]).capture()
    with _folder_is_wrong():
        return Opened(load(folder, graph_module=captured, device=str(device)), inputs, about)


@contextmanager
def _folder_is_wrong() -> Iterator[None]:
    """Whatever file of a folder is damaged or does not fit, the folder is a wrong input."""
    try:
        yield
    except (SaveError, UnknownRecipe) as reason:
        raise WrongInput(str(reason)) from reason


def _stored_inputs(folder: Path, about: About, device: torch.device) -> CallArguments:
    if about.inputs is None:
        reason = about.run.get("inputs_left_out", "they were not stored")
        raise WrongInput(f"{folder} does not hold its inputs ({reason}). Give them: --inputs FILE.py:FUNCTION.")
    with _folder_is_wrong():
        checked_file(folder, INPUTS)
    return restore_inputs(about.inputs, folder, device)


def _open_bare(folder: Path, said: FolderOptions, device: torch.device) -> Opened:
    """A folder that `refold.save` wrote: the user must name the model."""
    if said.model is None:
        raise WrongInput(f"{folder} does not say which model it was made from. Name it: --model MODEL.")
    found = load_model(said.model)
    model, inputs = found.model.to(device), None
    if said.inputs is not None or found.inputs is not None:
        inputs = placed(inputs_for(found, NO_SIZES, said.inputs), device, None)
    with _folder_is_wrong():
        return Opened(load(folder, model, example_inputs=inputs, device=str(device)), inputs, None)


def read_inputs(folder: Path) -> CallArguments:
    """The inputs that a folder holds."""
    about = read_about(folder)
    if about is None:
        raise WrongInput(f"{folder} does not hold its inputs.")
    return _stored_inputs(folder, about, torch.device("cpu"))


def fingerprints(model: nn.Module) -> dict[str, str]:
    """The bits of every weight and buffer, as short texts."""
    return {name: fingerprint(tensor) for name, tensor in registered_tensors(model).items()}


def differing(model: nn.Module, original: dict[str, str]) -> tuple[list[str], int]:
    """The weights that are not, bit for bit, what they were in the original, and how many were compared."""
    now = {name: mark for name, mark in fingerprints(model).items() if name in original}
    return sorted(name for name, mark in now.items() if original[name] != mark), len(now)
