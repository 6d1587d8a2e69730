"""Further transformers that make images: those without a family of their own."""

from __future__ import annotations

import torch

from tiny_models.case import Case, Draw
from tiny_models.image import _DIT, _FLUX, _LONG, _ROPE, _chroma, _flux, _pixart


def _aura(d: Draw) -> dict:
    return dict(hidden_states=d.x(4, 8, 8), encoder_hidden_states=d.x(5, 32), timestep=d.t(0.5))


def _hunyuan_dit(d: Draw) -> dict:
    rope = torch.ones(16, 32), torch.zeros(16, 32)
    return dict(
        hidden_states=d.x(4, 8, 8), timestep=d.t(500.0), encoder_hidden_states=d.x(5, 32),
        text_embedding_mask=d.ones(5), encoder_hidden_states_t5=d.x(4, 32), text_embedding_mask_t5=d.ones(4),
        image_meta_size=d.ones(6), style=d.t(0, _LONG), image_rotary_emb=rope,
    )  # fmt: skip


def _lumina(d: Draw) -> dict:
    from diffusers.models.embeddings import get_2d_rotary_pos_embed_lumina

    rope = get_2d_rotary_pos_embed_lumina(32, 16, 16)
    return dict(
        hidden_states=d.x(4, 8, 8), timestep=d.t(0.5), encoder_hidden_states=d.x(5, 32), encoder_mask=d.ones(5),
        image_rotary_emb=rope, cross_attention_kwargs={},
    )  # fmt: skip


def _prior(d: Draw) -> dict:
    return dict(hidden_states=d.x(32), timestep=torch.tensor(5), proj_embedding=d.x(32),
                encoder_hidden_states=d.x(5, 32))  # fmt: skip


def _transformer2d(d: Draw) -> dict:
    return dict(hidden_states=d.x(32, 4, 4), encoder_hidden_states=d.x(5, 32))


def _fibo(d: Draw) -> dict:
    return {k: v for k, v in _flux(d).items() if k not in ("pooled_projections", "guidance")} | dict(
        text_encoder_layers=[d.x(5, 32) for _ in range(4)]
    )


def _fibo2(d: Draw) -> dict:
    return dict(hidden_states=d.x(4, 8, 8), timestep=d.t(0.5), encoder_hidden_states=d.x(2, 5, 32))


def _cogview(d: Draw) -> dict:
    size = d.ones(2) * 16
    return dict(
        hidden_states=d.x(4, 8, 8), encoder_hidden_states=d.x(5, 32), timestep=d.t(500, _LONG), original_size=size,
        target_size=size, crop_coords=size * 0,
    )  # fmt: skip


def _glm(d: Draw) -> dict:
    size = d.ones(2) * 16
    return dict(
        hidden_states=d.x(4, 8, 8), encoder_hidden_states=d.x(5, 32), timestep=d.t(500, _LONG), target_size=size,
        crop_coords=size * 0, prior_token_id=torch.arange(16).expand(d.batch, 16),
        prior_token_drop=torch.zeros(d.batch, 16, dtype=torch.bool),
    )  # fmt: skip


def _ernie(d: Draw) -> dict:
    return dict(hidden_states=d.x(16, 4, 4), timestep=d.t(500.0), text_bth=d.x(5, 32), text_lens=d.t(5, _LONG))


def _flux3(d: Draw) -> dict:
    return dict(
        hidden_states=d.x(16, 16), encoder_hidden_states=d.x(5, 32), timestep=d.t(0.5), img_ids=d.ids(16, 4),
        txt_ids=torch.zeros(5, 4, dtype=d.dtype),
    )  # fmt: skip


def _hidream(d: Draw) -> dict:
    return dict(
        hidden_states=d.x(4, 8, 8), timesteps=d.t(500, _LONG), encoder_hidden_states_t5=d.x(5, 32),
        encoder_hidden_states_llama3=torch.stack([d.x(5, 32) for _ in range(4)]), pooled_embeds=d.x(32),
    )  # fmt: skip


def _hunyuan_image(d: Draw) -> dict:
    return dict(hidden_states=d.x(4, 4, 4), timestep=d.t(500.0), encoder_hidden_states=d.x(5, 32),
                encoder_attention_mask=d.ones(5))  # fmt: skip


def _ideogram(d: Draw) -> dict:
    ids = torch.arange(21).expand(3, 21).T.expand(d.batch, 21, 3)
    return dict(
        hidden_states=d.x(21, 16), timestep=d.t(0.5), encoder_hidden_states=d.x(21, 32), position_ids=ids,
        segment_ids=d.ones(21, dtype=_LONG), indicator=torch.tensor([3] * 5 + [2] * 16).expand(d.batch, 21),
    )  # fmt: skip


def _joy(d: Draw) -> dict:
    return dict(hidden_states=d.x(4, 1, 4, 4), timestep=d.t(0.5), encoder_hidden_states=d.x(5, 32))


def _krea(d: Draw) -> dict:
    return dict(
        hidden_states=d.x(16, 16), encoder_hidden_states=d.x(5, 2, 32), timestep=d.t(0.5),
        position_ids=torch.cat([torch.zeros(5, 3), d.ids(16)]),
    )  # fmt: skip


def _longcat(d: Draw) -> dict:
    return {k: v for k, v in _flux(d).items() if k != "pooled_projections"}


def _nucleus(d: Draw) -> dict:
    return dict(
        hidden_states=d.x(16, 16), encoder_hidden_states=d.x(5, 32), timestep=d.t(0.5),
        encoder_hidden_states_mask=d.ones(5, dtype=torch.bool), img_shapes=[(1, 4, 4)] * d.batch,
    )  # fmt: skip


def _omnigen(d: Draw) -> dict:
    length = 5 + 1 + 16
    return dict(
        hidden_states=d.x(4, 8, 8), timestep=d.t(0.5), input_ids=torch.arange(5).expand(d.batch, 5),
        input_img_latents=[], input_image_sizes={}, attention_mask=d.ones(length, length),
        position_ids=torch.arange(length).expand(d.batch, length),
    )  # fmt: skip


def _prx(d: Draw) -> dict:
    return dict(hidden_states=d.x(4, 8, 8), timestep=d.t(0.5), encoder_hidden_states=d.x(5, 32))


def _qwen21(d: Draw) -> dict:
    return dict(
        hidden_states=d.x(16, 16), encoder_hidden_states=d.x(5, 32), timestep=d.t(0.5),
        img_shapes=[[(1, 4, 4)]] * d.batch, img_mask=torch.tensor([False] * 5 + [True] * 4).expand(d.batch, 9),
        encoder_hidden_states_mask=d.ones(5, dtype=torch.bool),
    )  # fmt: skip


_COGVIEW = dict(
    patch_size=2, in_channels=4, out_channels=4, num_layers=2, attention_head_dim=32, num_attention_heads=2,
    text_embed_dim=32, time_embed_dim=32, condition_dim=8,
)  # fmt: skip
_JOY = dict(in_channels=4, out_channels=4, hidden_size=64, num_attention_heads=2, text_dim=32, num_layers=2,
            rope_dim_list=[8, 12, 12])  # fmt: skip
_2D = dict(num_attention_heads=2, attention_head_dim=32, in_channels=32, num_layers=2, norm_num_groups=8,
           cross_attention_dim=32)  # fmt: skip

CASES = (
    Case("AuraFlowTransformer2DModel", dict(
        sample_size=8, in_channels=4, out_channels=4, num_mmdit_layers=2, num_single_dit_layers=2,
        attention_head_dim=32, num_attention_heads=2, joint_attention_dim=32, caption_projection_dim=64,
        pos_embed_max_size=16), _aura),
    Case("HunyuanDiT2DModel", dict(
        num_attention_heads=2, attention_head_dim=32, in_channels=4, patch_size=2, sample_size=8, hidden_size=64,
        num_layers=4, cross_attention_dim=32, cross_attention_dim_t5=32, pooled_projection_dim=32, text_len=5,
        text_len_t5=4), _hunyuan_dit),
    Case("LuminaNextDiT2DModel", dict(
        sample_size=8, in_channels=4, hidden_size=64, num_layers=2, num_attention_heads=2, num_kv_heads=2,
        multiple_of=16, cross_attention_dim=32), _lumina),
    Case("PriorTransformer", dict(
        num_attention_heads=2, attention_head_dim=32, num_layers=2, embedding_dim=32, num_embeddings=5), _prior),
    Case("Transformer2DModel", _2D, _transformer2d),
    Case("Transformer2DModel@patches", _DIT | dict(
        norm_type="ada_norm_single", cross_attention_dim=64, caption_channels=32, norm_elementwise_affine=False,
        num_embeds_ada_norm=1000, use_additional_conditions=False), _pixart),
    Case("DreamLiteTransformer2DModel", _2D, _transformer2d),
    Case("BriaTransformer2DModel", _FLUX | dict(axes_dims_rope=list(_ROPE)), lambda d: {
        k: v for k, v in _flux(d).items() if k not in ("guidance", "pooled_projections")}),
    Case("BriaFiboTransformer2DModel", _FLUX | dict(axes_dims_rope=list(_ROPE), text_encoder_dim=32), _fibo),
    Case("BriaFibo2Transformer2DModel", dict(
        in_channels=4, dim=64, n_layers=4, n_refiner_layers=1, n_heads=2, cap_feat_dim=32, injection_layer_ids=(1,),
        perceiver_num_layers=1, min_num_gist_tokens=4, max_num_gist_tokens=8, gist_step=4, gist_min_text_len=4,
        gist_max_text_len=8, axes_dims=_ROPE, axes_lens=(64, 16, 16)), _fibo2),
    Case("CogView3PlusTransformer2DModel", _COGVIEW | dict(pos_embed_max_size=8, sample_size=8), _cogview),
    Case("CogView4Transformer2DModel", _COGVIEW | dict(pos_embed_max_size=8, sample_size=8, rope_axes_dim=(8, 8)),
         _cogview),
    Case("GlmImageTransformer2DModel", _COGVIEW | dict(prior_vq_quantizer_codebook_size=32), _glm),
    Case("ErnieImageTransformer2DModel", dict(
        hidden_size=64, num_attention_heads=2, num_layers=2, ffn_hidden_size=96, in_channels=16, out_channels=16,
        text_in_dim=32, rope_axes_dim=_ROPE), _ernie),
    Case("Flux3Transformer2DModel", _FLUX | dict(
        cond_in_channels=16, timestep_channels=32, axes_dims_rope=(8, 8, 8, 8)), _flux3),
    Case("HiDreamImageTransformer2DModel", dict(
        patch_size=2, in_channels=4, num_layers=2, num_single_layers=2, attention_head_dim=32, num_attention_heads=2,
        caption_channels=[32, 32], text_emb_dim=32, num_routed_experts=4, axes_dims_rope=_ROPE,
        max_resolution=(16, 16), llama_layers=[0, 1, 2, 3], force_inference_output=True), _hidream),
    Case("HunyuanImageTransformer2DModel", dict(
        in_channels=4, out_channels=4, num_attention_heads=2, attention_head_dim=32, num_layers=2,
        num_single_layers=2, num_refiner_layers=1, text_embed_dim=32, rope_axes_dim=(16, 16)), _hunyuan_image),
    Case("Ideogram4Transformer2DModel", dict(
        in_channels=16, num_layers=2, attention_head_dim=32, num_attention_heads=2, intermediate_size=96, adaln_dim=32,
        llm_features_dim=32, mrope_section=(6, 5, 5)), _ideogram),
    Case("JoyImageEditTransformer3DModel", _JOY, _joy),
    Case("Krea2Transformer2DModel", dict(
        in_channels=16, num_layers=2, attention_head_dim=32, num_attention_heads=2, num_key_value_heads=1,
        intermediate_size=96, timestep_embed_dim=32, text_hidden_dim=32, num_text_layers=2,
        text_num_attention_heads=2, text_num_key_value_heads=2, text_intermediate_size=48,
        num_layerwise_text_blocks=1, num_refiner_text_blocks=1, axes_dims_rope=_ROPE), _krea),
    Case("LongCatImageTransformer2DModel", _FLUX | dict(pooled_projection_dim=32, axes_dims_rope=list(_ROPE)),
         _longcat),
    Case("NucleusMoEImageTransformer2DModel", dict(
        in_channels=16, out_channels=4, num_layers=4, attention_head_dim=32, num_attention_heads=2,
        joint_attention_dim=32, axes_dims_rope=_ROPE, num_experts=4, moe_intermediate_dim=48, capacity_factors=2.0,
        dense_moe_strategy="leave_first_block_dense"), _nucleus),
    Case("OmniGenTransformer2DModel", dict(
        in_channels=4, hidden_size=64, num_attention_heads=2, num_key_value_heads=2, intermediate_size=96,
        num_layers=2, pad_token_id=0, vocab_size=32, max_position_embeddings=64, original_max_position_embeddings=64,
        rope_scaling={"long_factor": [1.0] * 16, "short_factor": [1.0] * 16}, pos_embed_max_size=16,
        time_step_dim=32), _omnigen),
    Case("OvisImageTransformer2DModel", _FLUX | dict(out_channels=16, axes_dims_rope=_ROPE), _chroma),
    Case("PRXTransformer2DModel", dict(
        in_channels=4, context_in_dim=32, hidden_size=64, num_heads=2, depth=2, axes_dim=[16, 16]), _prx),
    Case("QwenImage21Transformer2DModel", dict(
        in_channels=16, out_channels=16, num_layers=2, attention_head_dim=32, num_attention_heads=2, context_in_dim=32,
        axes_dims_rope=_ROPE), _qwen21),
)  # fmt: skip
