"""UNets."""

from __future__ import annotations

import torch

from tiny_models.case import Case, Draw


def _unet(d: Draw) -> dict:
    return dict(sample=d.x(4, 8, 8), timestep=torch.tensor(500), encoder_hidden_states=d.x(5, 32))


def _sdxl(d: Draw) -> dict:
    return _unet(d) | dict(added_cond_kwargs={"text_embeds": d.x(32), "time_ids": d.ones(6) * 8})


def _video(d: Draw) -> dict:
    return dict(sample=d.x(4, 2, 8, 8), timestep=torch.tensor(500), encoder_hidden_states=d.x(5, 32))


def _i2vgen(d: Draw) -> dict:
    return _video(d) | dict(fps=d.t(16, torch.long), image_latents=d.x(4, 2, 8, 8), image_embeddings=d.x(32))


def _svd(d: Draw) -> dict:
    return dict(sample=d.x(2, 8, 8, 8), timestep=torch.tensor(500), encoder_hidden_states=d.x(1, 32),
                added_time_ids=d.ones(3))  # fmt: skip


def _kandinsky3(d: Draw) -> dict:
    return _unet(d) | dict(sample=d.x(4, 16, 16), encoder_attention_mask=d.ones(5))


def _cascade(d: Draw) -> dict:
    return dict(sample=d.x(4, 8, 8), timestep_ratio=d.t(0.5), clip_text_pooled=d.x(1, 32), clip_text=d.x(5, 32),
                clip_img=d.x(1, 32))  # fmt: skip


def _uvit(d: Draw) -> dict:
    return dict(
        input_ids=torch.arange(64).view(1, 8, 8).expand(d.batch, 8, 8) % 30, encoder_hidden_states=d.x(5, 32),
        pooled_text_emb=d.x(32), micro_conds=d.ones(5),
    )  # fmt: skip


_UNET = dict(
    sample_size=8, block_out_channels=(32, 64), layers_per_block=1, cross_attention_dim=32, norm_num_groups=8,
    down_block_types=("DownBlock2D", "CrossAttnDownBlock2D"), up_block_types=("CrossAttnUpBlock2D", "UpBlock2D"),
)  # fmt: skip

CASES = (
    Case("UNet2DConditionModel", _UNET | dict(attention_head_dim=4), _unet),
    Case("UNet2DConditionModel@sdxl", _UNET | dict(
        transformer_layers_per_block=(1, 2), use_linear_projection=True, addition_embed_type="text_time",
        addition_time_embed_dim=8, projection_class_embeddings_input_dim=80, attention_head_dim=(2, 4)), _sdxl),
    Case("UNet2DModel", dict(
        sample_size=8, in_channels=4, out_channels=4, block_out_channels=(32, 64), layers_per_block=1,
        norm_num_groups=8, attention_head_dim=16, down_block_types=("DownBlock2D", "AttnDownBlock2D"),
        up_block_types=("AttnUpBlock2D", "UpBlock2D")), lambda d: dict(sample=d.x(4, 8, 8), timestep=500)),
    Case("UNet1DModel", dict(
        sample_size=32, in_channels=4, out_channels=4, extra_in_channels=64, block_out_channels=(32, 32, 64)),
        lambda d: dict(sample=d.x(4, 32), timestep=500)),
    Case("UNet3DConditionModel", _UNET | dict(
        down_block_types=("DownBlock3D", "CrossAttnDownBlock3D"), up_block_types=("CrossAttnUpBlock3D", "UpBlock3D"),
        attention_head_dim=16), _video),
    Case("DreamLiteUNetModel", {k: v for k, v in _UNET.items() if "block_types" not in k} | dict(
        attention_head_dim=(2, 4), down_block_types=(
            "DreamLiteCrossAttnNoSelfAttnDownBlock2D", "DreamLiteCrossAttnDownBlock2D"),
        up_block_types=("DreamLiteCrossAttnUpBlock2D", "DreamLiteUpBlock2D")), _unet),
    Case("I2VGenXLUNet", {k: v for k, v in _UNET.items() if "block_types" not in k} | dict(
        down_block_types=("DownBlock3D", "CrossAttnDownBlock3D"), up_block_types=("CrossAttnUpBlock3D", "UpBlock3D"),
        num_attention_heads=2), _i2vgen),
    Case("Kandinsky3UNet", dict(
        time_embedding_dim=32, groups=4, attention_head_dim=16, layers_per_block=2, cross_attention_dim=32,
        block_out_channels=(32, 64), encoder_hid_dim=32), _kandinsky3),
    Case("UNetMotionModel", {k: v for k, v in _UNET.items() if "block_types" not in k} | dict(
        down_block_types=("DownBlockMotion", "CrossAttnDownBlockMotion"), num_attention_heads=2,
        motion_num_attention_heads=2, up_block_types=("CrossAttnUpBlockMotion", "UpBlockMotion"),
        motion_max_seq_length=4), lambda d: _video(d) | dict(
            encoder_hidden_states=d.x(5, 32).repeat_interleave(2, 0))),
    Case("UNetSpatioTemporalConditionModel", dict(
        sample_size=8, block_out_channels=(32, 64), layers_per_block=1, cross_attention_dim=32, num_frames=2,
        addition_time_embed_dim=8, projection_class_embeddings_input_dim=24, num_attention_heads=(2, 4),
        down_block_types=("CrossAttnDownBlockSpatioTemporal", "DownBlockSpatioTemporal"),
        up_block_types=("UpBlockSpatioTemporal", "CrossAttnUpBlockSpatioTemporal")), _svd),
    Case("StableCascadeUNet", dict(
        in_channels=4, out_channels=4, conditioning_dim=64, block_out_channels=(32, 64), num_attention_heads=(2, 4),
        down_num_layers_per_block=(1, 1), up_num_layers_per_block=(1, 1), clip_text_in_channels=32,
        clip_text_pooled_in_channels=32, clip_image_in_channels=32, dropout=(0.0, 0.0)), _cascade),
    Case("UVit2DModel", dict(
        hidden_size=64, cond_embed_dim=32, micro_cond_encode_dim=8, micro_cond_embed_dim=40, encoder_hidden_size=32,
        vocab_size=32, codebook_size=31, in_channels=32, block_out_channels=32, num_res_blocks=1, block_num_heads=2,
        num_hidden_layers=2, num_attention_heads=2, intermediate_size=96, sample_size=8), _uvit),
)  # fmt: skip
