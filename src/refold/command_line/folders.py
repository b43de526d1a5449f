"""A saved folder: the rewritten model, and as plain data which model, which inputs and which run it came from."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.fx import GraphModule

from refold._version import __version__
from refold.capture import trace
from refold.command_line.errors import WrongInput
from refold.command_line.inputs import NO_SIZES, inputs_for, placed
from refold.command_line.models import Loaded, Source, load_model, rebuild
from refold.command_line.storing_inputs import FILE as INPUTS
from refold.command_line.storing_inputs import NotPlain, restore_inputs, store_inputs
from refold.command_line.subject import DTYPES, check_runs, chosen_device
from refold.command_line.writing import ABOUT, SCHEMA, umask
from refold.fingerprint import fingerprint
from refold.history import history
from refold.optimizing.calls import Inputs, split
from refold.recipes import UnknownRecipe
from refold.saving import SaveError, load, save
from refold.saving.folder import MANIFEST, account_for, checked_file

VERSION = 1


@dataclass
class About:
    """The plain data beside the saved model."""

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
class Named:
    """What a user says about a folder that the folder itself does not, or must not, say."""

    model: str | None = None
    inputs: str | None = None
    device: str | None = None


@dataclass
class Opened:
    """What a folder holds, put together again."""

    graph_module: GraphModule
    inputs: Inputs | None
    about: About | None


# --- writing -----------------------------------------------------------------------------------------------------


def fill_folder(folder: Path, gm: GraphModule, about: About, inputs: Inputs | None) -> None:
    """Write the rewritten model, its inputs, and what its changes are."""
    save(gm, folder)
    about.changes = [{"label": c.label, "bytes": c.nbytes, "lines": c.describe()} for c in history(gm)]
    if inputs is None:
        return
    try:
        about.inputs = store_inputs(inputs, folder)
    except NotPlain as reason:
        about.run["inputs_left_out"] = str(reason)


def finish_folder(folder: Path, about: About) -> None:
    """Write the file that says what the folder is, with the names of all its files."""
    files = sorted(str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file())
    text = json.dumps(about.to_plain(files), indent=1, allow_nan=False)
    (folder / ABOUT).write_text(text + "\n", encoding="utf-8")
    account_for(folder, *(name for name in (ABOUT, INPUTS) if (folder / name).exists()))
    for name in files:
        (folder / name).chmod(0o666 & ~umask())  # some writers make files that only their owner may read


# --- reading -----------------------------------------------------------------------------------------------------


def read_about(folder: Path) -> About | None:
    """What a folder says about itself; None for one that `refold.save` wrote, which knows no model. Anybody may have
    written it, so nothing in it is believed unseen."""
    if not folder.is_dir():
        raise WrongInput(f"There is no folder {folder}.")
    if not (folder / ABOUT).exists():
        if (folder / MANIFEST).exists():
            return None
        raise WrongInput(f"{folder} is no folder that Refold saved: it has no {ABOUT}.")
    with _folder_is_wrong():
        checked_file(folder, ABOUT)
    try:
        data = json.loads((folder / ABOUT).read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise WrongInput(f"{folder / ABOUT} cannot be read: {error}.") from None
    if not isinstance(data, dict) or data.get("schema") != SCHEMA:
        raise WrongInput(f"{folder} is no folder of refold optimize: its {ABOUT} says something else.")
    if data.get("version") != VERSION:
        raise WrongInput(f"{folder} has version {data.get('version')!r}, and this Refold reads {VERSION}.")
    if not _well_formed(data):
        raise WrongInput(f"{folder / ABOUT} is damaged.")
    source = Source.from_plain(data.get("model"))
    return About(source, data["dtype"], data.get("inputs"), data["run"], data["original"], data["changes"])


def _well_formed(data: dict[str, Any]) -> bool:
    run, original, changes = (data.get(key) for key in ("run", "original", "changes"))
    if not (isinstance(run, dict) and isinstance(original, dict) and isinstance(changes, list)):
        return False
    return data.get("dtype") in DTYPES and all(isinstance(change, dict) and _is_change(change) for change in changes)


def _is_change(change: dict[str, Any]) -> bool:
    label, size, lines = change.get("label"), change.get("bytes"), change.get("lines")
    texts = isinstance(label, str) and isinstance(lines, list) and all(isinstance(line, str) for line in lines)
    return texts and isinstance(size, int)


def open_folder(folder: Path, named: Named) -> Opened:
    """The rewritten model of a folder, with its history. The model that it was made from is rebuilt from plain data,
    or is the one that the user names; no code that the folder names is ever run."""
    _stay_offline()
    about = read_about(folder)
    device = chosen_device(named.device)
    if about is None:
        return _open_bare(folder, named, device)
    loaded = _base(about, named.model)
    inputs = _inputs(folder, about, named, loaded, device)
    model = loaded.model.to(device=device, dtype=DTYPES[about.dtype]).eval().requires_grad_(False)
    check_runs(model, inputs)
    args, kwargs = split(inputs)
    with torch.no_grad():
        captured = trace(model, *args, dynamic=False, **kwargs)
    with _folder_is_wrong():
        return Opened(load(folder, graph_module=captured, device=str(device)), inputs, about)


@contextmanager
def _folder_is_wrong() -> Iterator[None]:
    """Whatever file of a folder is damaged or does not fit, the folder is a wrong input."""
    try:
        yield
    except (SaveError, UnknownRecipe) as reason:
        raise WrongInput(str(reason)) from reason


def _base(about: About, named: str | None) -> Loaded:
    return load_model(named) if named is not None else Loaded(rebuild(about.source), about.source)


def _inputs(folder: Path, about: About, named: Named, loaded: Loaded, device: torch.device) -> Inputs:
    if named.inputs is not None:
        return placed(inputs_for(loaded, NO_SIZES, named.inputs), device, DTYPES[about.dtype])
    if about.inputs is None:
        reason = about.run.get("inputs_left_out", "they were not stored")
        raise WrongInput(f"{folder} does not hold its inputs ({reason}). Give them: --inputs FILE.py:FUNCTION.")
    return _stored_inputs(folder, about, device)


def _stored_inputs(folder: Path, about: About, device: torch.device) -> Inputs:
    with _folder_is_wrong():
        checked_file(folder, INPUTS)
    return restore_inputs(about.inputs, folder, device)


def _open_bare(folder: Path, named: Named, device: torch.device) -> Opened:
    """A folder that `refold.save` wrote: the model is the user's to name."""
    if named.model is None:
        raise WrongInput(f"{folder} does not say which model it was made from. Name it: --model MODEL.")
    loaded = load_model(named.model)
    model = loaded.model.to(device)
    inputs = None
    if named.inputs is not None or loaded.inputs is not None:
        inputs = placed(inputs_for(loaded, NO_SIZES, named.inputs), device, None)
    with _folder_is_wrong():
        return Opened(load(folder, model, example_inputs=inputs, device=str(device)), inputs, None)


def read_inputs(folder: Path) -> Inputs:
    """The inputs that a folder holds."""
    about = read_about(folder)
    if about is None or about.inputs is None:
        raise WrongInput(f"{folder} does not hold its inputs.")
    return _stored_inputs(folder, about, torch.device("cpu"))


def _stay_offline() -> None:
    """What a folder says must not make a package download anything. Named models were downloaded before."""
    os.environ["HF_HUB_OFFLINE"] = "1"


def fingerprints(model: nn.Module) -> dict[str, str]:
    """The bits of every weight and buffer, as short texts."""
    tensors = dict(model.named_parameters(remove_duplicate=False)) | dict(model.named_buffers(remove_duplicate=False))
    return {name: fingerprint(tensor) for name, tensor in tensors.items()}


def differing(model: nn.Module, original: dict[str, str]) -> tuple[list[str], int]:
    """The weights that are not, bit for bit, what they were in the original, and how many were compared."""
    now = {name: mark for name, mark in fingerprints(model).items() if name in original}
    return sorted(name for name, mark in now.items() if original[name] != mark), len(now)
