"""Example inputs from a model's configuration and signature, for the names that models of transformers share."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn

from refold.capture.model_state import configurations
from refold.errors import NeedsInputs


class DummyInputs:
    """Makes inputs by name. Sizes are small; where the configuration fixes one (an image, a frame count) it is used."""

    def __init__(self, model: nn.Module, batch: int = 2, length: int = 8) -> None:
        self.model = model
        self.configs = list(configurations([getattr(model, "config", None)]))
        self.batch = batch
        self.length = length
        self.generator = torch.Generator().manual_seed(0)
        self.dtype = next((p.dtype for p in model.parameters() if p.is_floating_point()), torch.float32)
        self.device = next((p.device for p in model.parameters()), torch.device("cpu"))

    def make(self, name: str) -> torch.Tensor:
        """One input; a name that this class does not know raises `NeedsInputs`."""
        maker = _MAKERS.get(name)
        if maker is None:
            raise NeedsInputs(
                f"Refold cannot make an example for the input {name!r} of {type(self.model).__name__}. "
                f"Give real inputs: refold.trace(model, {name}=...)."
            )
        made = maker(self)
        made = made.to(self.dtype) if made.is_floating_point() else made
        return made.to(self.device)

    def setting(self, *names: str, default: Any = None) -> Any:
        """The first of these settings that the configuration, or one inside it, has."""
        for config in self.configs:
            for name in names:
                value = getattr(config, name, None)
                if value is not None:
                    return value
        return default

    def floats(self, *sizes: int) -> torch.Tensor:
        return torch.randn(*sizes, generator=self.generator)

    def tokens(self) -> torch.Tensor:
        """Token ids that no setting gives a special meaning to (an image token wants an image)."""
        vocabulary = self.setting("vocab_size", default=100)
        vocabulary = min(vocabulary) if isinstance(vocabulary, (list, tuple)) else vocabulary
        special = {v for config in self.configs for k, v in vars(config).items() if _is_special(k, v)}
        usual = [i for i in range(3, min(vocabulary, 1000)) if i not in special] or [0]
        places = torch.randint(len(usual), (self.batch, self.length), generator=self.generator)
        return torch.tensor(usual)[places]

    def image(self) -> torch.Tensor:
        height, width = self.image_size()
        return self.floats(
            self.batch, self.setting("num_channels", "in_channels", "in_chans", default=3), height, width
        )

    def video(self) -> torch.Tensor:
        frames = self.setting("num_frames", "frames_per_clip", default=8)
        height, width = self.image_size()
        return self.floats(self.batch, frames, self.setting("num_channels", default=3), height, width)

    def image_size(self) -> tuple[int, int]:
        size = self.setting("image_size", "img_size", "crop_size", default=32)
        if isinstance(size, dict):
            size = [size.get("height", 32), size.get("width", 32)]
        return (size, size) if isinstance(size, int) else (size[0], size[-1])

    def spectrogram(self) -> torch.Tensor:
        """Mel features; encoders with a fixed number of positions want them as (mels, frames)."""
        mels = self.setting("num_mel_bins", "n_mels", "feature_size", "feat_dim", "input_feat_per_channel", default=80)
        positions = self.setting("max_source_positions")
        if positions is not None and self.setting("input_feat_per_channel") is None:
            return self.floats(self.batch, mels, 2 * positions)
        return self.floats(self.batch, 64, mels)

    def waveform(self) -> torch.Tensor:
        if self.setting("max_length") and self.setting("num_mel_bins") and self.setting("frequency_stride"):
            return self.floats(self.batch, self.setting("max_length"), self.setting("num_mel_bins"))
        channels = self.setting("audio_channels")
        samples = 4000
        return self.floats(self.batch, samples) if channels is None else self.floats(self.batch, channels, samples)

    def embeddings(self) -> torch.Tensor:
        return self.floats(self.batch, self.length, self.setting("hidden_size", "d_model", default=32))

    def ones(self) -> torch.Tensor:
        return torch.ones(self.batch, self.length, dtype=torch.int64)

    def positions(self) -> torch.Tensor:
        return torch.arange(self.length).expand(self.batch, -1).contiguous()

    def boxes(self) -> torch.Tensor:
        return torch.tensor([0, 0, 10, 10]).expand(self.batch, self.length, 4).contiguous()


_MAKERS: dict[str, Callable[[DummyInputs], torch.Tensor]] = {
    "input_ids": DummyInputs.tokens,
    "decoder_input_ids": DummyInputs.tokens,
    "attention_mask": DummyInputs.ones,
    "decoder_attention_mask": DummyInputs.ones,
    "token_type_ids": lambda d: d.ones() * 0,
    "position_ids": DummyInputs.positions,
    "decoder_position_ids": DummyInputs.positions,
    "pixel_values": DummyInputs.image,
    "pixel_values_videos": DummyInputs.video,
    "input_features": DummyInputs.spectrogram,
    "input_values": DummyInputs.waveform,
    "inputs_embeds": DummyInputs.embeddings,
    "decoder_inputs_embeds": DummyInputs.embeddings,
    "bbox": DummyInputs.boxes,
    "visual_feats": lambda d: d.floats(d.batch, 4, d.setting("visual_feat_dim", default=32)),
    "visual_pos": lambda d: torch.rand(d.batch, 4, 4, generator=d.generator),
    "input": lambda d: d.floats(d.batch, d.length),
}


def _is_special(name: str, value: Any) -> bool:
    return isinstance(value, int) and name.endswith(("_token_id", "_token_index", "_index", "_id"))


def usual_input_names(model: nn.Module) -> list[str]:
    """What a model is called with by default: its main input, what it requires, and a decoder's tokens."""
    parameters = inspect.signature(model.forward).parameters
    main = getattr(model, "main_input_name", next(iter(parameters), "input"))
    mains = [main] if isinstance(main, str) else list(main)  # some models have several
    names = [name for name in mains if name in parameters or not parameters]
    names += [n for n, p in parameters.items() if p.default is p.empty and p.kind < p.VAR_POSITIONAL]
    names += [n for n in parameters if n == "input" and n not in names]
    if getattr(getattr(model, "config", None), "is_encoder_decoder", False) and "decoder_input_ids" in parameters:
        names.append("decoder_input_ids")
    return list(dict.fromkeys(names))


def make_inputs(model: nn.Module, names: Sequence[str] | None = None) -> dict[str, torch.Tensor]:
    """Inputs for a model by name; all must be known."""
    wanted = list(names) if names is not None else usual_input_names(model)
    parameters = inspect.signature(model.forward).parameters
    takes_any = any(p.kind is p.VAR_KEYWORD for p in parameters.values())
    unknown = [n for n in wanted if n not in parameters and not takes_any]
    if unknown:
        raise NeedsInputs(
            f"{type(model).__name__} has no input named {', '.join(map(repr, unknown))}; its forward takes "
            f"{', '.join(parameters)}."
        )
    dummies = DummyInputs(model)
    return {name: dummies.make(name) for name in wanted}
