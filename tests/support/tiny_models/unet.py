"""UNets."""

from __future__ import annotations

import torch

from tiny_models.case import Case, Draw


def _unet(d: Draw) -> dict:
    return dict(sample=d.x(4, 8, 8), timestep=torch.tensor(500), encoder_hidden_states=d.x(5, 32))


def _sdxl(d: Draw) -> dict:
    return _unet(d) | dict(added_cond_kwargs={"text_embeds": d.x(32), "time_ids": d.ones(6) * 8})


_UNET = dict(
    sample_size=8, block_out_channels=(32, 64), layers_per_block=1, cross_attention_dim=32, norm_num_groups=8,
    down_block_types=("DownBlock2D", "CrossAttnDownBlock2D"), up_block_types=("CrossAttnUpBlock2D", "UpBlock2D"),
)  # fmt: skip

CASES = (
    Case("UNet2DConditionModel", _UNET | dict(attention_head_dim=4), _unet),
    Case("UNet2DConditionModel@sdxl", _UNET | dict(
        transformer_layers_per_block=(1, 2), use_linear_projection=True, addition_embed_type="text_time",
        addition_time_embed_dim=8, projection_class_embeddings_input_dim=80, attention_head_dim=(2, 4)), _sdxl),
)  # fmt: skip
