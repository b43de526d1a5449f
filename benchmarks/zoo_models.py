"""A tiny random-weight instance of any family of transformers, from its configuration alone."""

from __future__ import annotations

import inspect
import itertools
import re
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import nn
from zoo_recipes import RECIPES, Recipe, packed_images, tiny_resnet

from refold.capture.example_inputs import DummyInputs, usual_input_names

MOST_PARAMETERS = 120_000_000

# (pattern of a setting's name, its tiny value); the first that matches counts
_TINY: list[tuple[str, Any]] = [
    (r"feat_extract_layers|num_conv_.*layers|adapter_layers|conv_stride|conv_kernel", lambda v: v),
    (r"vocab_size$|type_vocab|entity_vocab", lambda v: min(v, 200)),
    (
        r"num_(local_|routed_)?experts$|n_routed_experts|moe_num_experts|num_expert$|ffn_num_experts",
        lambda v: min(v, 4),
    ),
    (r"top_?k$|num_experts_per_tok(en)?$|moe_k$|num_selected_experts|moe_top_k", lambda v: min(v, 2)),
    (r"n_group$|topk_group$", lambda v: 1),
    (r"num_key_value_heads|num_kv_heads|n_head_kv|multi_query_group_num", lambda v: min(v, 2)),
    (r"context_length", lambda v: min(v, 8)),
    (r"attention_hidden_size", lambda v: min(v, 32)),
    (r"(num|n)_?(.*_)?heads?$|attention_heads$|(encoder|decoder)_attention_heads", lambda v: min(v, 4)),
    (r"block_sizes|cross_attention_layers", lambda v: min(v, 2)),
    (r"(num|n)_(.*_)?layers?$|layers$|num_.*blocks$|^depth$|^n_layer$|^depths$|block_repeats", lambda v: min(v, 1)),
    (r"head_dim$|d_kv$|kv_channels", lambda v: v),  # rotary settings depend on it
    (r"rotary_dim", lambda v: min(v, 4)),
    (r"q_lora_rank|kv_lora_rank", lambda v: min(v, 16)),
    (r"intermediate_size|ffn_dim|ffn_size|d_ff|inner_dim|n_inner|feedforward|mlp_dim|ffn_hidden", lambda v: min(v, 64)),
    (
        r"hidden_size|d_model|n_embd|embed_dim|hidden_dim|projection_dim|embedding_size|^dim$|conv_dim$",
        lambda v: min(v, 32),
    ),
    (r"image_size|img_size", lambda v: min(v, 64)),
    (r"patch_size$", lambda v: min(v, 16)),
    (r"num_frames|frames_per_clip", lambda v: min(v, 4)),
    (r"max_source_positions|max_(target_)?position", lambda v: min(v, 512)),
    (r"num_queries|num_query_tokens|num_latents", lambda v: min(v, 8)),
    (r"state_size|mamba_d_state|ssm_state", lambda v: min(v, 8)),
]
_DEEP = re.compile(r"layers?$|blocks$|^depth$|^n_layer$|depths$|vocab_size|experts")


def build(model_type: str) -> tuple[nn.Module, dict[str, torch.Tensor], str]:
    """A model in eval mode that runs, inputs it runs on, and which recipe worked; raises with the reasons."""
    own = RECIPES.get(model_type, Recipe())
    if own.not_here:
        raise RuntimeError(f"not runnable here: {own.not_here}")
    reasons: list[str] = []
    for name, shrink in _SHRINKS.items():
        try:
            model = _instance(model_type, shrink, own)
        except Exception as error:
            reasons.append(f"{name}: {_first_line(error)}")
            continue
        for inputs in _input_sets(model, own):
            try:
                torch.manual_seed(0)
                with torch.no_grad():
                    model(**{k: v.clone() for k, v in inputs.items()})
                return model, inputs, name
            except Exception as error:
                reasons.append(f"{name}, {list(inputs)}: {_first_line(error)}")
    raise RuntimeError(" | ".join(reasons[:2] + reasons[2:][-2:]) or "no recipe")


def _first_line(error: Exception) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return f"{type(error).__name__}: {' '.join(lines[:2])[:160]}"


def _instance(model_type: str, shrink: Callable[[Any], dict[str, Any]], own: Recipe) -> nn.Module:
    from transformers import AutoModel
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    config = shrunk(CONFIG_MAPPING[model_type], shrink, own.settings)
    with torch.device("meta"):
        size = sum(p.numel() for p in AutoModel.from_config(config).parameters())
    if size > MOST_PARAMETERS:
        raise MemoryError(f"{size} parameters")
    torch.manual_seed(0)
    model = AutoModel.from_config(config).eval()
    if own.prepare is not None:
        own.prepare(model)
    return model


def shrunk(config_class: type, shrink: Callable[[Any], dict[str, Any]], own: Mapping[str, Any] | None = None) -> Any:
    """A configuration made with small values for the settings its default has, then with a family's own values."""
    settings = _tiny_settings(config_class(), shrink)
    for path, value in (own or {}).items():
        *above, name = path.split(".")
        inner = settings
        for part in above:
            inner = inner.setdefault(part, {})
        inner[name] = value
    return config_class(**settings)


def _tiny_settings(config: Any, shrink: Callable[[Any], dict[str, Any]]) -> dict[str, Any]:
    settings = shrink(config)
    for name, value in vars(config).items():
        if not name.endswith(("_config", "encoder", "decoder")) or not hasattr(value, "to_dict"):
            continue
        if value.model_type == "timm_backbone":
            settings[name] = tiny_resnet(len(value.out_indices or [0]))
            continue
        inner = {k: v for k, v in value.to_dict().items() if k not in _DERIVED}
        inner.update(_tiny_settings(value, shrink))
        settings[name] = inner
    return settings


# settings that a configuration computes from others: those of the default would contradict the tiny ones
_DERIVED = {"per_layer_config", "stage_names", "out_features", "out_indices", "dtype"}


def tiny(config: Any, layers: int = 1, width: int = 32) -> dict[str, Any]:
    """Everything small."""
    settings: dict[str, Any] = {"use_cache": False} if hasattr(config, "use_cache") else {}
    for name, value in vars(config).items():
        rule = next((r for p, r in _TINY if re.search(p, name)), None)
        if rule is None or isinstance(value, bool):
            continue
        if isinstance(value, int) and value > 0:
            settings[name] = rule(value)
        elif isinstance(value, (list, tuple)) and value and all(type(v) is int for v in value):
            settings[name] = [rule(v) for v in value]
    for name in settings.keys() & {"hidden_size", "d_model", "embed_dim", "n_embd"}:
        settings[name] = min(vars(config)[name], width) if isinstance(vars(config)[name], int) else settings[name]
    for name in [n for n in settings if re.search(r"layers?$|blocks$|^depth$", n) and isinstance(settings[n], int)]:
        settings[name] = min(vars(config)[name], max(settings[name], layers))
    return _repair(config, settings)


def shallow(config: Any) -> dict[str, Any]:
    """Default widths, few layers, a small vocabulary."""
    settings = {}
    for name, value in vars(config).items():
        if isinstance(value, int) and not isinstance(value, bool) and value > 2 and _DEEP.search(name):
            settings[name] = min(value, 200 if "vocab" in name else 4 if "expert" in name else 2)
        elif isinstance(value, (list, tuple)) and "depths" in name:
            settings[name] = [1 for _ in value]
    return _repair(config, settings)


def _repair(config: Any, settings: dict[str, Any]) -> dict[str, Any]:
    """Settings that depend on others: special tokens inside the vocabulary, one entry per layer, head sizes."""
    vocabulary = settings.get("vocab_size", getattr(config, "vocab_size", None))
    taken = itertools.count(10)
    for name, value in vars(config).items():
        if not isinstance(value, int) or isinstance(value, bool) or not name.endswith(("token_id", "token_index")):
            continue
        if isinstance(vocabulary, int) and value >= vocabulary:
            settings[name] = next(taken)
    heads = vars(config).get("num_attention_heads")
    if heads is not None and vars(config).get("num_key_value_heads") == heads:
        settings["num_key_value_heads"] = settings.get("num_attention_heads", heads)
    if "mrope_section" in getattr(type(config), "ignore_keys_at_rope_validation", ()):
        settings["rope_parameters"] = _rotary_axes(config, settings)
    if not settings.get("num_hidden_layers"):
        return settings
    patterns = {
        name: _kinds(vars(config).get(name)) for name in ("layer_types", "mlp_layer_types", "layers_block_type")
    }
    settings["num_hidden_layers"] = layers = max(settings["num_hidden_layers"], *map(len, patterns.values()))
    for name, value in vars(config).items():  # one entry for each layer of the default
        if isinstance(value, (list, tuple)) and len(value) == config.num_hidden_layers > layers:
            settings[name] = list(settings.get(name, value))[:layers]
    for name, kinds in patterns.items():
        if (
            kinds and len(vars(config)[name]) >= settings["num_hidden_layers"]
        ):  # the first of each kind, so that no kind of layer is lost
            settings[name] = (kinds + list(vars(config)[name]))[: settings["num_hidden_layers"]]
    return settings


def _rotary_axes(config: Any, settings: dict[str, Any]) -> dict[str, Any]:
    """Rotary positions in three axes: their sections must sum up to half of what is rotated of a head."""
    rope = dict(vars(config).get("rope_parameters") or {"rope_type": "default", "rope_theta": 10000.0})
    if any(isinstance(value, dict) for value in rope.values()):  # one for each kind of layer: left as it is
        return rope
    width = settings.get("hidden_size", config.hidden_size) // settings.get(
        "num_attention_heads", config.num_attention_heads
    )
    rotated = int((vars(config).get("head_dim") or width) * rope.get("partial_rotary_factor", 1.0))
    third = rotated // 2 // 3
    return rope | {"mrope_section": [rotated // 2 - 2 * third, third, third]}


def _kinds(pattern: Any) -> list[Any]:
    return list(dict.fromkeys(pattern)) if isinstance(pattern, (list, tuple)) else []


def default(config: Any) -> dict[str, Any]:
    """The configuration as it is."""
    return {}


def tiny_wider(config: Any) -> dict[str, Any]:
    """Everything small, but two layers and twice as wide."""
    return tiny(config, layers=2, width=64)


_SHRINKS: dict[str, Callable[[Any], dict[str, Any]]] = {
    "tiny": tiny,
    "tiny, wider": tiny_wider,
    "shallow": shallow,
}


def _input_sets(model: nn.Module, own: Recipe) -> Iterator[dict[str, torch.Tensor]]:
    """Sets of inputs to try, from the usual one to more."""
    if own.inputs is not None:
        dummies = DummyInputs(model)
        yield {name: dummies.make(name) if make is None else make(dummies) for name, make in own.inputs.items()}
        return
    yield from packed_images(model)
    parameters = inspect.signature(model.forward).parameters
    usual = usual_input_names(model)
    extra = ("pixel_values", "input_features", "input_values", "decoder_input_ids", "input_ids", "bbox")
    sets: list[list[str]] = []
    if "input_ids" in parameters and "attention_mask" in parameters and usual[:1] == ["input_ids"]:
        sets.append([*usual, "attention_mask"])
    sets.append(usual)
    for name in extra:
        if name in parameters and name not in usual:
            sets += [[*usual, name]]
    if "input_ids" in parameters and usual[:1] != ["input_ids"]:
        sets.append(["input_ids"])
    seen = set()
    for names in sets:
        if tuple(names) in seen or not names:
            continue
        seen.add(tuple(names))
        yield from _variants(model, names)


def _variants(model: nn.Module, names: list[str]) -> Iterator[dict[str, torch.Tensor]]:
    """The usual shapes, then videos where images are wanted, then longer inputs."""
    dummies = DummyInputs(model)
    try:
        made = {name: dummies.make(name) for name in names}
    except Exception:
        return
    yield made
    if "pixel_values" in made:
        yield made | {"pixel_values": dummies.video()}
    if "input_features" in made:
        features = made["input_features"]
        yield made | {"input_features": features.transpose(1, 2).contiguous()}
    if "input_ids" in made:
        longer = DummyInputs(model, length=64)
        yield {name: longer.make(name) for name in names}
