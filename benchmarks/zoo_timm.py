"""A spread of timm's image models, one or two of each kind, built with random weights; needs timm to be installed."""

from __future__ import annotations

import torch
from torch import nn

MODELS = (
    *("resnet18", "resnext50_32x4d", "seresnet50", "res2net50_26w_4s", "resnetv2_50", "regnety_002", "densenet121"),
    *("dla34", "vgg11_bn", "inception_v3", "hrnet_w18_small", "cspresnet50", "repvgg_a0", "efficientnet_b0"),
    *("mobilenetv2_100", "mobilenetv3_small_100", "mobilenetv4_conv_small", "mnasnet_100", "ghostnet_100", "lcnet_100"),
    *("rexnet_100", "mobileone_s0", "fastvit_t8", "edgenext_xx_small", "mobilevit_xxs", "nf_resnet26", "convnext_atto"),
    *("convnextv2_atto", "poolformer_s12", "vit_tiny_patch16_224", "deit_tiny_patch16_224", "levit_128s", "pit_ti_224"),
    *("swin_tiny_patch4_window7_224", "maxvit_nano_rw_256", "coatnet_nano_rw_224", "cait_xxs24_224", "davit_tiny"),
    *("xcit_nano_12_p16_224", "efficientformer_l1", "pvt_v2_b0", "twins_svt_small", "convit_tiny", "visformer_tiny"),
    *("mixer_s32_224", "gmlp_s16_224", "resmlp_12_224", "focalnet_tiny_srf", "tiny_vit_5m_224"),
)


def build(name: str) -> tuple[nn.Module, dict[str, torch.Tensor], str]:
    """A model in eval mode with batch statistics that are not trivial, and two images of the size it wants."""
    import timm

    torch.manual_seed(0)
    model = timm.create_model(name, num_classes=10).eval()
    for module in model.modules():
        if isinstance(module, nn.modules.batchnorm._BatchNorm) and module.running_mean is not None:
            module.running_mean.normal_(0, 0.1)
            module.running_var.uniform_(0.5, 2)
    channels, height, _width = model.default_cfg["input_size"]
    sides = [height] if model.default_cfg.get("fixed_input_size") else [64, 128, height]
    return model, _images(model, channels, sides), "timm"


def _images(model: nn.Module, channels: int, sides: list[int]) -> dict[str, torch.Tensor]:
    """Two images of the smallest of these sizes that the model takes."""
    for side in sides[:-1]:
        images = {"x": torch.randn(2, channels, side, side)}
        try:
            with torch.no_grad():
                model(**images)
            return images
        except (RuntimeError, ValueError, AssertionError):
            continue
    return {"x": torch.randn(2, channels, sides[-1], sides[-1])}
