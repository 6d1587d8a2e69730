"""Transformers that make images."""

from __future__ import annotations

import torch

from tiny_models.case import Case, Draw

_LONG = torch.long


def _flux(d: Draw) -> dict:
    return dict(
        hidden_states=d.x(16, 16), encoder_hidden_states=d.x(5, 32), pooled_projections=d.x(32), timestep=d.t(0.5),
        img_ids=d.ids(16), txt_ids=torch.zeros(5, 3, dtype=d.dtype), guidance=d.t(3.5),
    )  # fmt: skip


def _flux2(d: Draw) -> dict:
    return dict(
        hidden_states=d.x(16, 16), encoder_hidden_states=d.x(5, 32), timestep=d.t(0.5), img_ids=d.ids(16, 4),
        txt_ids=torch.zeros(5, 4, dtype=d.dtype), guidance=d.t(3.5),
    )  # fmt: skip


def _chroma(d: Draw) -> dict:
    return dict(
        hidden_states=d.x(16, 16), encoder_hidden_states=d.x(5, 32), timestep=d.t(0.5), img_ids=d.ids(16),
        txt_ids=torch.zeros(5, 3, dtype=d.dtype),
    )  # fmt: skip


def _sd3(d: Draw) -> dict:
    return dict(
        hidden_states=d.x(4, 8, 8), encoder_hidden_states=d.x(5, 32), pooled_projections=d.x(64), timestep=d.t(500.0)
    )


def _pixart(d: Draw) -> dict:
    return dict(
        hidden_states=d.x(4, 8, 8), encoder_hidden_states=d.x(5, 32), timestep=d.t(500, _LONG),
        added_cond_kwargs={"resolution": None, "aspect_ratio": None}, encoder_attention_mask=d.ones(5),
    )  # fmt: skip


def _sana(d: Draw) -> dict:
    return dict(hidden_states=d.x(4, 8, 8), encoder_hidden_states=d.x(5, 32), timestep=d.t(500.0),
                encoder_attention_mask=d.ones(5))  # fmt: skip


def _qwen(d: Draw) -> dict:
    return dict(
        hidden_states=d.x(16, 16), encoder_hidden_states=d.x(5, 32), timestep=d.t(0.5),
        encoder_hidden_states_mask=d.ones(5, dtype=torch.bool), img_shapes=[[(1, 4, 4)]] * d.batch,
    )  # fmt: skip


def _z_image(d: Draw) -> dict:
    return dict(x=d.rows(4, 1, 8, 8), t=d.t(0.5), cap_feats=d.rows(5, 32))


def _lumina2(d: Draw) -> dict:
    return dict(hidden_states=d.x(4, 8, 8), timestep=d.t(0.5), encoder_hidden_states=d.x(5, 32),
                encoder_attention_mask=d.ones(5, dtype=torch.bool))  # fmt: skip


def _dit(d: Draw) -> dict:
    return dict(hidden_states=d.x(4, 8, 8), timestep=d.t(500, _LONG), class_labels=d.t(3, _LONG))


_FLUX = dict(
    in_channels=16, num_layers=2, num_single_layers=2, attention_head_dim=32, num_attention_heads=2,
    joint_attention_dim=32,
)  # fmt: skip
_ROPE = (8, 12, 12)
_SD3 = dict(
    sample_size=8, patch_size=2, in_channels=4, num_layers=3, attention_head_dim=32, num_attention_heads=2,
    joint_attention_dim=32, caption_projection_dim=64, pooled_projection_dim=64, out_channels=4, pos_embed_max_size=8,
)  # fmt: skip
_Z = dict(
    in_channels=4, dim=64, n_layers=2, n_refiner_layers=1, n_heads=2, n_kv_heads=2, cap_feat_dim=32,
    axes_dims=[8, 12, 12], axes_lens=[64, 16, 16],
)  # fmt: skip
_DIT = dict(num_attention_heads=2, attention_head_dim=32, in_channels=4, num_layers=2, sample_size=8, patch_size=2)
_SANA = dict(
    in_channels=4, out_channels=4, num_attention_heads=4, attention_head_dim=16, num_layers=2,
    num_cross_attention_heads=4, cross_attention_head_dim=16, cross_attention_dim=64, caption_channels=32,
    sample_size=8, patch_size=1,
)  # fmt: skip

CASES = (
    Case("FluxTransformer2DModel", _FLUX | dict(pooled_projection_dim=32, guidance_embeds=True, axes_dims_rope=_ROPE),
         _flux),
    Case("Flux2Transformer2DModel", _FLUX | dict(timestep_guidance_channels=32, axes_dims_rope=(8, 8, 8, 8)), _flux2),
    Case("ChromaTransformer2DModel", _FLUX | dict(
        axes_dims_rope=_ROPE, approximator_num_channels=32, approximator_hidden_dim=64, approximator_layers=2),
         _chroma),
    Case("SD3Transformer2DModel", _SD3, _sd3),
    Case("SD3Transformer2DModel@dual", _SD3 | dict(dual_attention_layers=(0, 1), qk_norm="rms_norm"), _sd3),
    Case("PixArtTransformer2DModel", _DIT | dict(cross_attention_dim=64, caption_channels=32, out_channels=8), _pixart),
    Case("SanaTransformer2DModel", _SANA, _sana),
    Case("SanaTransformer2DModel@sprint", _SANA | dict(qk_norm="rms_norm_across_heads", guidance_embeds=True),
         lambda d: _sana(d) | dict(guidance=d.t(4.5))),
    Case("QwenImageTransformer2DModel", {k: v for k, v in _FLUX.items() if k != "num_single_layers"} | dict(
        out_channels=4, axes_dims_rope=_ROPE), _qwen),
    Case("ZImageTransformer2DModel", _Z, _z_image),
    Case("Lumina2Transformer2DModel", dict(
        sample_size=8, patch_size=2, in_channels=4, hidden_size=96, num_layers=2, num_refiner_layers=1,
        num_attention_heads=3, num_kv_heads=1, multiple_of=16, axes_dim_rope=(8, 12, 12), axes_lens=(64, 16, 16),
        cap_feat_dim=32), _lumina2),
    Case("DiTTransformer2DModel", _DIT | dict(num_embeds_ada_norm=10), _dit),
)  # fmt: skip
