"""Transformers that make videos."""

from __future__ import annotations

import torch

from tiny_models.case import Case, Draw

_LONG = torch.long


def _hunyuan(d: Draw) -> dict:
    return dict(
        hidden_states=d.x(4, 2, 4, 4), timestep=d.t(500, _LONG), encoder_hidden_states=d.x(5, 32),
        encoder_attention_mask=d.ones(5), pooled_projections=d.x(32), guidance=d.t(3500.0),
    )  # fmt: skip


def _hunyuan15(d: Draw) -> dict:
    return dict(
        hidden_states=d.x(4, 2, 4, 4), timestep=d.t(500.0), encoder_hidden_states=d.x(5, 32),
        encoder_attention_mask=d.ones(5), encoder_hidden_states_2=d.x(4, 32), encoder_attention_mask_2=d.ones(4),
        image_embeds=d.x(3, 32),
    )  # fmt: skip


def _wan(d: Draw) -> dict:
    return dict(hidden_states=d.x(4, 2, 8, 8), timestep=d.t(500, _LONG), encoder_hidden_states=d.x(5, 32))


def _ltx(d: Draw) -> dict:
    return dict(
        hidden_states=d.x(32, 16), encoder_hidden_states=d.x(5, 32), timestep=d.t(500, _LONG),
        encoder_attention_mask=d.ones(5), num_frames=2, height=4, width=4, rope_interpolation_scale=(0.3, 32, 32),
    )  # fmt: skip


def _cogvideox(d: Draw) -> dict:
    return dict(hidden_states=d.x(2, 4, 8, 8), encoder_hidden_states=d.x(5, 32), timestep=d.t(500, _LONG))


_HUNYUAN = dict(
    in_channels=4, out_channels=4, num_attention_heads=2, attention_head_dim=32, num_layers=2, num_refiner_layers=1,
    patch_size=1, text_embed_dim=32, rope_axes_dim=(8, 12, 12),
)  # fmt: skip
_WAN = dict(
    num_attention_heads=2, attention_head_dim=32, in_channels=4, out_channels=4, text_dim=32, freq_dim=32, ffn_dim=96,
    num_layers=2, rope_max_seq_len=16,
)  # fmt: skip
_COG = dict(
    num_attention_heads=2, attention_head_dim=32, in_channels=4, out_channels=4, time_embed_dim=32, text_embed_dim=32,
    num_layers=2, sample_width=8, sample_height=8, sample_frames=5, max_text_seq_length=5,
)  # fmt: skip

CASES = (
    Case("HunyuanVideoTransformer3DModel", _HUNYUAN | dict(num_single_layers=2, pooled_projection_dim=32), _hunyuan),
    Case("HunyuanVideo15Transformer3DModel", _HUNYUAN | dict(text_embed_2_dim=32, image_embed_dim=32), _hunyuan15),
    Case("WanTransformer3DModel", _WAN, _wan),
    Case("WanTransformer3DModel@i2v", _WAN | dict(image_dim=32, added_kv_proj_dim=64),
         lambda d: _wan(d) | dict(encoder_hidden_states_image=d.x(4, 32))),
    Case("LTXVideoTransformer3DModel", dict(
        in_channels=16, out_channels=16, num_attention_heads=2, attention_head_dim=32, cross_attention_dim=64,
        num_layers=2, caption_channels=32), _ltx),
    Case("CogVideoXTransformer3DModel", _COG, _cogvideox),
)  # fmt: skip
