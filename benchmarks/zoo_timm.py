"""A spread of timm's image models, one or two of each kind, built with random weights; needs timm to be installed."""

from __future__ import annotations

import torch
from torch import nn

MODELS = (
    *("resnet18", "resnet50d", "resnext50_32x4d", "seresnet50", "res2net50_26w_4s", "skresnet18", "ecaresnet26t"),
    *("resnetv2_50", "resnest14d", "regnetx_002", "regnety_002", "densenet121", "dla34", "dpn48b", "vgg11_bn"),
    *("vovnet39a", "inception_v3", "xception41p", "hrnet_w18_small", "cspresnet50", "darknet53", "repvgg_a0"),
    *("efficientnet_b0", "tf_efficientnet_lite0", "efficientnetv2_rw_t", "mobilenetv2_100", "mobilenetv3_small_100"),
    *("mobilenetv4_conv_small", "mnasnet_100", "fbnetc_100", "ghostnet_100", "hardcorenas_a", "lcnet_100", "tinynet_e"),
    *("rexnet_100", "mobileone_s0", "fastvit_t8", "edgenext_xx_small", "mobilevit_xxs", "mobilevitv2_050"),
    *("nf_resnet26", "dm_nfnet_f0", "convnext_atto", "convnextv2_atto", "poolformer_s12", "inception_next_atto"),
    *("vit_tiny_patch16_224", "deit_tiny_patch16_224", "deit3_small_patch16_224", "beit_base_patch16_224"),
    *("swin_tiny_patch4_window7_224", "swinv2_tiny_window8_256", "maxvit_nano_rw_256", "coatnet_nano_rw_224"),
    *("cait_xxs24_224", "xcit_nano_12_p16_224", "levit_128s", "efficientformer_l1", "pit_ti_224", "pvt_v2_b0"),
    *("twins_svt_small", "crossvit_tiny_240", "convit_tiny", "volo_d1_224", "tnt_s_patch16_224", "visformer_tiny"),
    *("mixer_s32_224", "gmlp_s16_224", "resmlp_12_224", "focalnet_tiny_srf", "davit_tiny", "tiny_vit_5m_224"),
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
    channels, height, width = model.default_cfg["input_size"]
    size = (height, width) if model.default_cfg.get("fixed_input_size") else (min(height, 128), min(width, 128))
    images = {"x": torch.randn(2, channels, *size)}
    with torch.no_grad():
        model(**images)
    return model, images, "timm"
