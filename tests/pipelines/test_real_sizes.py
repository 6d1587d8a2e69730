"""Plans for models of real size, built without memory: shares of the default skips, and how long a plan takes."""

import time

import diffusers
import pytest
import torch
from torch import nn

from dq.planning import make_plan

SD35 = dict(
    sample_size=128, num_layers=24, num_attention_heads=24, caption_projection_dim=1536, pos_embed_max_size=384,
    dual_attention_layers=tuple(range(13)), qk_norm="rms_norm",
)  # fmt: skip
SDXL = dict(
    sample_size=128, cross_attention_dim=2048, block_out_channels=(320, 640, 1280), attention_head_dim=[5, 10, 20],
    down_block_types=("DownBlock2D", "CrossAttnDownBlock2D", "CrossAttnDownBlock2D"), use_linear_projection=True,
    up_block_types=("CrossAttnUpBlock2D", "CrossAttnUpBlock2D", "UpBlock2D"), transformer_layers_per_block=[1, 2, 10],
    addition_embed_type="text_time", addition_time_embed_dim=256, projection_class_embeddings_input_dim=2816,
)  # fmt: skip
# Class, changes to its default configuration, billions of parameters, and percent of all parameters in linears that
# stay in 16 bits, are weight-only, are quantized. Source: enumeration of diffusers 0.42.1 under the rule of section
# 10.0 of the methods specification; of Z-Image with its own exception (modulations stay in 16 bits, section 10.8).
SIZES = {
    "FLUX.1-dev": ("FluxTransformer2DModel", dict(guidance_embeds=True), 11.901, (0.54, 27.13, 72.33)),
    "FLUX.2-dev": ("Flux2Transformer2DModel", {}, 32.223, (2.53, 0.0, 97.47)),
    "SD3.5-medium": ("SD3Transformer2DModel", SD35, 2.24, (0.86, 33.99, 65.14)),
    "PixArt-Sigma": ("PixArtTransformer2DModel", dict(caption_channels=4096, use_additional_conditions=False), 0.611,
                     (14.74, 0.0, 85.22)),
    "HunyuanVideo": ("HunyuanVideoTransformer3DModel", {}, 12.821, (2.81, 26.51, 70.68)),
    "Wan2.1-14B-I2V": ("WanTransformer3DModel", dict(in_channels=36, image_dim=1280, added_kv_proj_dim=5120), 16.395,
                       (27.06, 0.0, 72.92)),
    "Qwen-Image": ("QwenImageTransformer2DModel", {}, 20.430, (0.20, 33.27, 66.53)),
    "Z-Image": ("ZImageTransformer2DModel", {}, 6.155, (0.19 + 2.05, 0.0, 97.75)),
    "HunyuanVideo-1.5": ("HunyuanVideo15Transformer3DModel", {}, 8.327, (2.03, 32.66, 65.31)),
    "Sana-1.6B": ("SanaTransformer2DModel", {}, 1.604, (15.38, 0.0, 37.54)),
    "DiT-XL/2": ("DiTTransformer2DModel", {}, 0.750, (6.42, 29.76, 59.51)),
    "SDXL": ("UNet2DConditionModel", SDXL, 2.567, (15.17, 0.0, 71.83)),
}  # fmt: skip


def on_meta(cls, config):
    with torch.device("meta"):
        return getattr(diffusers, cls)(**config)


@pytest.mark.parametrize("name", SIZES)
def test_shares(name):
    cls, config, billions, shares = SIZES[name]
    model = on_meta(cls, config)
    total = sum(p.numel() for p in model.parameters())
    found = {"kept": 0, "modulation": 0, "quantized": 0}
    for row in make_plan(model, "int8").rows:
        layers = [model.get_submodule(m) for m in row.members]
        what = "kept" if row.target is None else "modulation" if row.target.activations is None else "quantized"
        found[what] += sum(p.numel() for m in layers if type(m) is nn.Linear for p in m.parameters())
    assert total / 1e9 == pytest.approx(billions, abs=0.005)
    assert [100 * n / total for n in found.values()] == pytest.approx(shares, abs=0.006)


@pytest.mark.parametrize("recipe", ["fp8", "w4a4-nvfp4-svd", "w4a4-auto"])
@pytest.mark.parametrize("known", [True, False], ids=["family", "detected"])
def test_a_thousand_linears_are_planned_in_two_seconds(recipe, known):
    model = on_meta("QwenImageTransformer2DModel", dict(num_layers=72))
    if not known:
        model.__class__ = type("Unknown", (type(model),), {})
    start = time.process_time()
    plan = make_plan(model, recipe)
    assert time.process_time() - start < 2.0
    assert sum(len(r.members) for r in plan.rows) > 1000 and plan.family.name == ("qwen-image" if known else "detected")
