"""MODEL as people type it, as an nn.Module, and as plain data from which it can be made again."""

from __future__ import annotations

import json
import os
import socket
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit
from urllib.request import getproxies

from torch import nn

from refold.command_line.builtin_models import example_named
from refold.command_line.transformers_models import config_from, model_class, model_from, transformers_package
from refold.command_line.user_code import call, load_function, names_a_function
from refold.errors import WrongInput
from refold.wording import kind_of, one_line

ABOUT = "about.json"
FORMS = "a transformers folder or hub name, timm:NAME, FILE.py:FACTORY, or example:NAME"


@dataclass(frozen=True)
class Source:
    """Where a model comes from, as plain data: enough to make it again, except for one from a user's file."""

    kind: str
    name: str
    class_name: str = ""
    config: dict[str, Any] = field(default_factory=dict)

    def to_plain(self) -> dict[str, Any]:
        """For JSON."""
        return {"kind": self.kind, "name": self.name, "class": self.class_name, "config": self.config}

    @classmethod
    def from_plain(cls, data: Any) -> Source:
        """From JSON of unknown origin, so everything is checked."""
        match data:
            case {"kind": str(kind), "name": str(name), "class": str(class_name), "config": dict(config)}:
                return cls(kind, name, class_name, config)
        raise WrongInput("The folder does not say which model it was made from.")


@dataclass
class SourceModel:
    """A model, where it comes from, and the inputs that its maker gave with it."""

    model: nn.Module
    source: Source
    inputs: Any = None
    image_size: int = 224
    """Where the model's own configuration fixes none."""


def load_model(text: str) -> SourceModel:
    """The model that a person named."""
    if not text.strip():
        raise WrongInput(f"MODEL is empty: it must be {FORMS}.")
    if text.startswith("example:"):
        name = text.removeprefix("example:")
        example = example_named(name)
        inputs = example.inputs and example.inputs()
        return SourceModel(example.build(), Source("example", name), inputs, example.image_size)
    if text.startswith("timm:"):
        return _from_timm(text.removeprefix("timm:"))
    if names_a_function(text):
        return _from_file(text)
    if text.endswith(".py"):
        raise WrongInput(f"{text} is a file: name the function in it that makes the model, as {text}:FUNCTION.")
    if Path(text).is_file():
        raise WrongInput(f"{text} is a file, and MODEL must be {FORMS}.")
    return _from_folder(Path(text)) if Path(text).is_dir() else _from_hub(text)


def rebuild(source: Source) -> nn.Module:
    """The model of a saved folder, from plain data only. One from a user's file must be named again by the user, so
    that opening another person's folder never runs that person's code."""
    if source.kind == "example":
        return example_named(source.name).build()
    if source.kind == "transformers":
        return model_from(config_from(source.config), source.class_name)
    if source.kind == "timm":
        return _timm_model(source.name, pretrained=False)
    if source.kind == "file":
        raise WrongInput(
            f"The folder was made from {source.name}, and code that a folder names is never run. "
            "If you trust that file, name it yourself: --model FILE.py:FACTORY."
        )
    raise WrongInput(f"The folder was made from a kind of model that this Refold does not know: {source.kind!r}.")


# --- the user's own file -----------------------------------------------------------------------------------------


def _from_file(text: str) -> SourceModel:
    made = call(load_function(text, "MODEL"), text)
    model, inputs = made if isinstance(made, tuple) and len(made) == 2 else (made, None)
    if not isinstance(model, nn.Module):
        raise WrongInput(f"{text} must return an nn.Module, or one and its inputs; it returned {kind_of(model)}.")
    return SourceModel(model.eval(), Source("file", text), inputs)


# --- transformers ------------------------------------------------------------------------------------------------


def _from_folder(path: Path) -> SourceModel:
    file = path / "config.json"
    if (path / ABOUT).exists():
        raise WrongInput(f"{path} is a folder that Refold saved: use refold show, verify, undo or bisect with it.")
    if not file.is_file():
        raise WrongInput(f"{path} is no transformers folder: it has no config.json.")
    try:
        data = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise WrongInput(f"{file} cannot be read: {error}.") from None
    if not isinstance(data, dict):
        raise WrongInput(f"{file} holds no configuration.")
    return _pretrained(str(path), config_from(data), local=True)


def _from_hub(name: str) -> SourceModel:
    parts = name.split("/")
    if len(parts) > 2 or not all(part.replace("-", "").replace(".", "").replace("_", "").isalnum() for part in parts):
        raise WrongInput(f"{name!r} is no model: it must be {FORMS}, and there is no such folder.")
    transformers = transformers_package()
    cached = not _hub_can_be_reached()
    try:
        config = transformers.AutoConfig.from_pretrained(name, trust_remote_code=False, local_files_only=cached)
    except Exception as error:  # no network, no such name, or a model that wants to run its own code
        raise WrongInput(_why_not_from_hub(name, error, cached)) from error
    return _pretrained(name, config, local=cached)


def _hub_can_be_reached() -> bool:
    """Checked first, because the hub's own library waits half a minute before it gives up."""
    host = urlsplit(os.environ.get("HF_ENDPOINT", "https://huggingface.co")).hostname
    if getproxies():
        return True
    try:
        socket.getaddrinfo(host, 443)
    except OSError:
        return False
    return True


def _why_not_from_hub(name: str, error: Exception, cached: bool) -> str:
    if "trust_remote_code" in str(error):
        return f"{name} brings code of its own, which Refold never runs: make the model in a file, FILE.py:FACTORY."
    if cached:
        return f"There is no folder {name}, and it cannot be downloaded: the hub cannot be reached from here."
    return f"There is no folder {name}, and the hub does not give such a model: {one_line(error, 300)}"


def _pretrained(name: str, config: Any, *, local: bool) -> SourceModel:
    cls = model_class(config, None)
    if getattr(config, "use_cache", False):
        config.use_cache = False  # a cache is an input and an output of its own; here one call is made faster
    try:
        model = cls.from_pretrained(name, config=config, local_files_only=local)
    except Exception as error:
        raise WrongInput(f"The weights of {name} cannot be loaded: {one_line(error, 300)}") from error
    plain = json.loads(json.dumps(config.to_dict(), default=str))
    return SourceModel(model.eval(), Source("transformers", name, cls.__name__, plain))


# --- timm --------------------------------------------------------------------------------------------------------


def _from_timm(text: str) -> SourceModel:
    name, _, weights = text.partition(":")
    if weights not in ("", "random"):
        raise WrongInput(
            f"timm:{text} is not understood: it must be timm:NAME, or timm:NAME:random for random weights."
        )
    return SourceModel(_timm_model(name, pretrained=not weights), Source("timm", name))


def _timm_model(name: str, *, pretrained: bool) -> nn.Module:
    try:
        import timm
    except ImportError:
        raise WrongInput(f"timm:{name} needs timm, which is not installed: pip install timm.") from None
    if not name.replace("_", "").replace(".", "").isalnum() or not timm.is_model(name):
        raise WrongInput(f"timm has no model {name!r}; timm.list_models() names them all.")
    try:
        model: nn.Module = timm.create_model(name, pretrained=pretrained)
    except Exception as error:
        way_out = f" Without its weights: timm:{name}:random." if pretrained else ""
        raise WrongInput(
            f"timm cannot make {name}: {type(error).__name__}: {one_line(error, 300)}.{way_out}"
        ) from error
    return model.eval()
