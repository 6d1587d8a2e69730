"""Further transformers that make videos: those without a family of their own."""

from __future__ import annotations

import torch

from tiny_models.case import Case, Draw
from tiny_models.video import _COG, _HUNYUAN, _LONG, _WAN, _cogvideox, _hunyuan, _wan


def _latte(d: Draw) -> dict:
    return dict(hidden_states=d.x(4, 2, 8, 8), timestep=d.t(500, _LONG), encoder_hidden_states=d.x(5, 32))


def _allegro(d: Draw) -> dict:
    at = torch.arange(32)[None]
    grid, angles = (at // 16, at % 16 // 4, at % 4), torch.arange(4.0)[:, None].expand(4, 8)
    rope = ((angles.cos(), angles.sin()),) * 3
    return dict(
        hidden_states=d.x(4, 2, 8, 8), encoder_hidden_states=d.x(5, 32), timestep=d.t(500, _LONG),
        attention_mask=d.ones(2, 8, 8), encoder_attention_mask=d.ones(5), image_rotary_emb=(rope, grid),
    )  # fmt: skip


def _anyflow(d: Draw) -> dict:
    return dict(
        hidden_states=d.x(2, 4, 8, 8), timestep=d.ones(2) * 500, r_timestep=d.ones(2) * 250,
        encoder_hidden_states=d.x(5, 32),
    )  # fmt: skip


def _cosmos(d: Draw) -> dict:
    return dict(
        hidden_states=d.x(4, 2, 8, 8), timestep=d.t(0.5), encoder_hidden_states=d.x(5, 32), fps=16,
        padding_mask=torch.zeros(1, 1, 8, 8, dtype=d.dtype),
    )  # fmt: skip


def _easyanimate(d: Draw) -> dict:
    return dict(hidden_states=d.x(4, 2, 8, 8), timestep=d.t(500, _LONG), encoder_hidden_states=d.x(5, 32))


def _helios(d: Draw) -> dict:
    def frames(n: int, start: int) -> torch.Tensor:
        return torch.arange(start, start + n).expand(d.batch, n)

    return _wan(d) | dict(
        indices_hidden_states=frames(2, 8), indices_latents_history_short=frames(1, 7),
        indices_latents_history_mid=frames(2, 5), indices_latents_history_long=frames(4, 1),
        latents_history_short=d.x(4, 1, 8, 8), latents_history_mid=d.x(4, 2, 8, 8),
        latents_history_long=d.x(4, 4, 8, 8),
    )  # fmt: skip


def _framepack(d: Draw) -> dict:
    def frames(n: int, start: int) -> torch.Tensor:
        return torch.arange(start, start + n)

    return _hunyuan(d) | dict(
        hidden_states=d.x(4, 2, 8, 8), image_embeds=d.x(3, 32), indices_latents=frames(2, 8),
        latents_clean=d.x(4, 1, 8, 8), indices_latents_clean=frames(1, 7), latents_history_2x=d.x(4, 2, 8, 8),
        indices_latents_history_2x=frames(2, 5), latents_history_4x=d.x(4, 4, 8, 8),
        indices_latents_history_4x=frames(4, 1),
    )  # fmt: skip


def _joy_plus(d: Draw) -> dict:
    return dict(hidden_states=d.x(8, 4, 1, 2, 2), timestep=d.t(0.5), encoder_hidden_states=d.x(5, 32),
                encoder_hidden_states_mask=d.ones(5), shape_list=[[(1, 2, 4)]] * d.batch)  # fmt: skip


def _kandinsky5(d: Draw) -> dict:
    return dict(
        hidden_states=d.x(2, 8, 8, 4), encoder_hidden_states=d.x(5, 32), timestep=d.t(500.0),
        pooled_projections=d.x(32), visual_rope_pos=[torch.arange(2), torch.arange(4), torch.arange(4)],
        text_rope_pos=torch.arange(5),
    )  # fmt: skip


def _kandinsky6(d: Draw) -> dict:
    return dict(hidden_states=d.x(2, 8, 8, 9), encoder_hidden_states=d.x(5, 32), pooled_projections=d.x(32),
                timestep=d.t(500.0), audio_hidden_states=d.x(6, 4))  # fmt: skip


def _kandinsky6_sr(d: Draw) -> dict:
    return dict(hidden_states=d.x(1, 8, 8, 9), timestep=d.t(500.0))


def _ltx2(d: Draw) -> dict:
    return dict(
        hidden_states=d.x(32, 16), audio_hidden_states=d.x(6, 8), encoder_hidden_states=d.x(5, 32),
        audio_encoder_hidden_states=d.x(5, 32), timestep=d.t(500.0), encoder_attention_mask=d.ones(5),
        audio_encoder_attention_mask=d.ones(5), num_frames=2, height=4, width=4, audio_num_frames=6,
    )  # fmt: skip


def _refiner(d: Draw) -> dict:
    rope = torch.ones(d.batch, 32, 64, dtype=d.dtype), torch.zeros(d.batch, 32, 64, dtype=d.dtype)
    return dict(hidden_states=d.x(32, 16), encoder_hidden_states=d.x(5, 32), timestep=d.t(500.0),
                video_rotary_emb=rope, encoder_attention_mask=d.ones(5))  # fmt: skip


def _minimax_h3(d: Draw) -> dict:
    tags = torch.tensor([1] * 5 + [0] * 8 + [2] * 4)
    return dict(
        hidden_states=d.x(8, 16), audio_hidden_states=d.x(4, 8), encoder_hidden_states=d.x(5, 32),
        timestep=torch.full((1,), 0.5, dtype=d.dtype), timestep_indices=torch.zeros(17, dtype=_LONG), token_tags=tags,
        position_ids=torch.arange(17)[:, None].expand(17, 3), video_indices=torch.arange(5, 13),
        audio_indices=torch.arange(13, 17), text_indices=torch.arange(5),
    )  # fmt: skip


def _mochi(d: Draw) -> dict:
    return dict(hidden_states=d.x(4, 2, 8, 8), encoder_hidden_states=d.x(5, 32), timestep=d.t(500, _LONG),
                encoder_attention_mask=d.ones(5, dtype=torch.bool))  # fmt: skip


def _motif(d: Draw) -> dict:
    return dict(hidden_states=d.x(9, 2, 4, 4), timestep=d.t(500, _LONG), encoder_hidden_states=d.x(5, 32),
                encoder_attention_mask=d.ones(5))  # fmt: skip


def _vace(d: Draw) -> dict:
    return _wan(d) | dict(control_hidden_states=d.x(8, 2, 8, 8), control_hidden_states_scale=torch.ones(1))


def _animate(d: Draw) -> dict:
    return dict(
        hidden_states=d.x(12, 3, 8, 8), timestep=d.t(500, _LONG), encoder_hidden_states=d.x(5, 32),
        encoder_hidden_states_image=d.x(4, 32), pose_hidden_states=d.x(4, 2, 8, 8),
        face_pixel_values=d.x(3, 8, 16, 16),
    )  # fmt: skip


def _sana_video(d: Draw) -> dict:
    return dict(hidden_states=d.x(4, 2, 8, 8), encoder_hidden_states=d.x(5, 32), timestep=d.t(500.0),
                encoder_attention_mask=d.ones(5))  # fmt: skip


def _temporal(d: Draw) -> dict:
    return dict(hidden_states=torch.cat(d.rows(2, 32, 4, 4)), num_frames=2)


_LTX2 = dict(
    in_channels=16, out_channels=16, num_attention_heads=2, attention_head_dim=32, cross_attention_dim=64,
    audio_in_channels=8, audio_out_channels=8, audio_num_attention_heads=2, audio_attention_head_dim=16,
    audio_cross_attention_dim=32, num_layers=2, caption_channels=32, pos_embed_max_pos=20, base_height=32,
    base_width=32,
)  # fmt: skip
_K6 = dict(in_visual_dim=4, out_visual_dim=4, time_dim=32, model_dim=64, ff_dim=96, num_visual_blocks=2,
           axes_dims=(8, 12, 12))  # fmt: skip
_REST = {k: v for k, v in _WAN.items() if k != "rope_max_seq_len"}

CASES = (
    Case("ConsisIDTransformer3DModel", _COG | dict(is_train_face=False), _cogvideox),
    Case("LatteTransformer3DModel", dict(
        num_attention_heads=2, attention_head_dim=32, in_channels=4, out_channels=8, num_layers=2, patch_size=2,
        cross_attention_dim=64, attention_bias=True, sample_size=8, activation_fn="gelu-approximate",
        num_embeds_ada_norm=1000, norm_type="ada_norm_single", norm_elementwise_affine=False, caption_channels=32,
        video_length=2), _latte),
    Case("AllegroTransformer3DModel", dict(
        num_attention_heads=2, attention_head_dim=24, in_channels=4, out_channels=4, num_layers=2,
        cross_attention_dim=48, sample_height=8, sample_width=8, sample_frames=2, caption_channels=32), _allegro),
    Case("AnyFlowTransformer3DModel", _WAN, _anyflow),
    Case("AnyFlowFARTransformer3DModel", _WAN | dict(chunk_partition=(1, 1), full_chunk_limit=2), lambda d: (
        _anyflow(d) | dict(chunk_partition=[1, 1]))),
    Case("ChronoEditTransformer3DModel", _WAN, _wan),
    Case("CosmosTransformer3DModel", dict(
        in_channels=4, out_channels=4, num_attention_heads=2, attention_head_dim=32, num_layers=2, mlp_ratio=2.0,
        text_embed_dim=32, adaln_lora_dim=16, max_size=(4, 16, 16)), _cosmos),
    Case("EasyAnimateTransformer3DModel", dict(
        num_attention_heads=2, attention_head_dim=32, in_channels=4, out_channels=4, patch_size=2, sample_width=8,
        sample_height=8, num_layers=2, mmdit_layers=1, time_embed_dim=32, text_embed_dim=32), _easyanimate),
    Case("HeliosTransformer3DModel", _REST | dict(rope_dim=(8, 12, 12)), _helios),
    Case("HunyuanVideoFramepackTransformer3DModel", _HUNYUAN | dict(
        num_single_layers=2, pooled_projection_dim=32, has_image_proj=True, image_proj_dim=32,
        has_clean_x_embedder=True, patch_size=2), _framepack),
    Case("JoyImageEditPlusTransformer3DModel", dict(
        in_channels=4, out_channels=4, hidden_size=64, num_attention_heads=2, text_dim=32, num_layers=2,
        rope_dim_list=[8, 12, 12]), _joy_plus),
    Case("Kandinsky5Transformer3DModel", dict(
        in_visual_dim=4, out_visual_dim=4, in_text_dim=32, in_text_dim2=32, time_dim=32, model_dim=64, ff_dim=96,
        num_text_blocks=1, num_visual_blocks=2, axes_dims=(8, 12, 12)), _kandinsky5),
    Case("Kandinsky6Transformer3DModel", _K6 | dict(
        in_text_dim=32, in_text_dim2=32, num_text_blocks=1, in_audio_dim=4, out_audio_dim=4), _kandinsky6),
    Case("Kandinsky6SRTransformer3DModel", _K6, _kandinsky6_sr),
    Case("LTX2VideoTransformer3DModel", _LTX2, _ltx2),
    Case("SanaWMLTX2RefinerTransformer3DModel", _LTX2, _refiner),
    Case("MiniMaxH3Transformer3DModel", dict(
        num_attention_heads=2, attention_head_dim=32, hidden_size=64, num_layers=2, num_refiner_layers=1, ffn_dim=96,
        in_channels=4, audio_in_channels=8, text_dim=32, freq_dim=32, time_embed_hidden_dim=64, time_embed_dim=32,
        rope_freq_dim=4), _minimax_h3),
    Case("MochiTransformer3DModel", dict(
        num_attention_heads=2, attention_head_dim=32, num_layers=2, pooled_projection_dim=32, in_channels=4,
        text_embed_dim=32, time_embed_dim=32, max_sequence_length=5), _mochi),
    Case("MotifVideoTransformer3DModel", dict(
        in_channels=9, out_channels=4, num_attention_heads=2, attention_head_dim=32, num_layers=2,
        num_single_layers=2, num_decoder_layers=1, patch_size=1, text_embed_dim=32, rope_axes_dim=(8, 12, 12)), _motif),
    Case("SanaVideoTransformer3DModel", dict(
        in_channels=4, out_channels=4, num_attention_heads=2, attention_head_dim=32, num_layers=2,
        num_cross_attention_heads=2, cross_attention_head_dim=32, cross_attention_dim=64, caption_channels=32,
        sample_size=8, rope_max_seq_len=16), _sana_video),
    Case("SkyReelsV2Transformer3DModel", _WAN, _wan),
    Case("WanVACETransformer3DModel", _WAN | dict(vace_layers=[0], vace_in_channels=8), _vace),
    Case("WanAnimateTransformer3DModel", _WAN | dict(
        in_channels=12, latent_channels=4, image_dim=32, added_kv_proj_dim=64, motion_encoder_size=16,
        motion_encoder_channel_sizes={"4": 16, "8": 16, "16": 16}, motion_style_dim=16, motion_dim=4,
        motion_encoder_dim=16, face_encoder_hidden_dim=32, face_encoder_num_heads=2, inject_face_latents_blocks=2),
        _animate),
    Case("TransformerTemporalModel", dict(
        num_attention_heads=2, attention_head_dim=32, in_channels=32, num_layers=2, norm_num_groups=8), _temporal),
)  # fmt: skip
