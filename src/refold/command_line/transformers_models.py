"""Models of transformers from configurations as plain data: classes of the installed package only, never other code."""

from __future__ import annotations

from typing import Any

from torch import nn

from refold.errors import WrongInput
from refold.wording import one_line

_ATTENTION = ("eager", "sdpa", "flash_attention_2", "flex_attention")
# What makes transformers fetch code, kernels or weights from elsewhere.
_REFUSED_KEYS = frozenset({"auto_map", "custom_pipelines", "quantization_config", "use_kernels", "trust_remote_code"})
_IMPLEMENTATIONS = ("attn_implementation", "_attn_implementation", "_attn_implementation_internal")


def transformers_package() -> Any:
    """The installed transformers, or a sentence."""
    try:
        import transformers
    except ImportError:
        raise WrongInput("This model needs transformers, which is not installed: pip install transformers.") from None
    return transformers


def config_from(data: dict[str, Any]) -> Any:
    """A configuration of a model type that transformers itself knows."""
    mapping = transformers_package().models.auto.configuration_auto.CONFIG_MAPPING
    model_type = data.get("model_type")
    if not isinstance(model_type, str) or model_type not in mapping:
        raise WrongInput(f"The installed transformers knows no model type {model_type!r}.")
    try:
        return mapping[model_type].from_dict(_harmless(data))
    except Exception as error:  # configurations check their settings in their own ways
        raise WrongInput(
            f"The configuration of this {model_type} model is refused by transformers: {one_line(error)}"
        ) from error


def _harmless(data: Any) -> Any:
    """The settings without those that could make transformers fetch anything, at every depth."""
    if isinstance(data, list):
        return [_harmless(value) for value in data]
    if not isinstance(data, dict):
        return data
    kept = {key: value for key, value in data.items() if key not in _REFUSED_KEYS}
    for key in _IMPLEMENTATIONS:
        if key in kept and kept[key] not in _ATTENTION:
            del kept[key]
    return {key: _harmless(value) for key, value in kept.items()}


def model_from(config: Any, class_name: str | None) -> nn.Module:
    """A model with random weights, of a class that transformers itself defines for this configuration."""
    cls = model_class(config, class_name)
    try:
        model: nn.Module = cls(config)
    except Exception as error:
        raise WrongInput(f"{cls.__name__} cannot be made from its configuration: {one_line(error)}") from error
    return model.eval()


def model_class(config: Any, class_name: str | None) -> Any:
    """The named class, else the one that the configuration names, else the plain encoder or decoder of its type."""
    transformers = transformers_package()
    names = [class_name] if class_name else list(getattr(config, "architectures", None) or [])
    for name in names:
        found = getattr(transformers, name, None) if isinstance(name, str) and name.isidentifier() else None
        if _fits(transformers, found, config):
            return found
    if class_name:
        raise WrongInput(f"The installed transformers has no {class_name!r} for a {config.model_type} configuration.")
    mapping = transformers.models.auto.modeling_auto.MODEL_MAPPING
    if type(config) not in mapping:
        raise WrongInput(f"The installed transformers has no plain model for the type {config.model_type}.")
    found = mapping[type(config)]
    return found[0] if isinstance(found, (tuple, list)) else found


def _fits(transformers: Any, found: Any, config: Any) -> bool:
    if not (isinstance(found, type) and issubclass(found, transformers.PreTrainedModel)):
        return False
    config_class = getattr(found, "config_class", None)
    return isinstance(config_class, type) and isinstance(config, config_class)
