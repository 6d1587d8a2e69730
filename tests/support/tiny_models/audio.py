"""Transformers that make sound."""

from __future__ import annotations

import torch

from tiny_models.case import Case, Draw


def _ace(d: Draw) -> dict:
    return dict(hidden_states=d.x(8, 8), timestep=d.t(0.5), timestep_r=d.t(0.5), encoder_hidden_states=d.x(5, 32),
                context_latents=d.x(8, 16))  # fmt: skip


def _stable_audio(d: Draw) -> dict:
    rope = torch.ones(9, 16), torch.zeros(9, 16)
    return dict(hidden_states=d.x(8, 8), timestep=d.t(0.5), encoder_hidden_states=d.x(5, 32),
                global_hidden_states=d.x(1, 32), rotary_embedding=rope)  # fmt: skip


def _film(d: Draw) -> dict:
    return dict(encodings_and_masks=[(d.x(6, 32), d.ones(6))], decoder_input_tokens=d.x(8, 16),
                decoder_noise_time=d.t(0.5))  # fmt: skip


def _stable_audio3(d: Draw) -> dict:
    return dict(hidden_states=d.x(8, 8), timestep=d.t(0.5), encoder_hidden_states=d.x(5, 32),
                global_hidden_states=d.x(32))  # fmt: skip


def _music3(d: Draw) -> dict:
    return dict(hidden_states=d.x(8, 6), timestep=d.t(0.5), encoder_hidden_states=d.x(6, 32))


def _longcat_audio(d: Draw) -> dict:
    return dict(hidden_states=d.x(6, 8), encoder_hidden_states=d.x(5, 32), timestep=d.t(0.5),
                encoder_attention_mask=d.ones(5, dtype=torch.bool))  # fmt: skip


CASES = (
    Case("AceStepTransformer1DModel", dict(
        hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=2, num_key_value_heads=1,
        head_dim=32, in_channels=24, audio_acoustic_hidden_dim=8, encoder_hidden_size=32, sliding_window=4), _ace),
    Case("StableAudioDiTModel", dict(
        sample_size=8, in_channels=8, num_layers=2, attention_head_dim=32, num_attention_heads=2,
        num_key_value_attention_heads=2, out_channels=8, cross_attention_dim=64, time_proj_dim=32,
        global_states_input_dim=32, cross_attention_input_dim=32), _stable_audio),
    Case("T5FilmDecoder", dict(
        input_dims=16, targets_length=8, d_model=32, num_layers=2, num_heads=2, d_kv=16, d_ff=64), _film),
    Case("StableAudio3DiTModel", dict(
        io_channels=8, embed_dim=64, depth=2, num_heads=2, cond_token_dim=32, global_cond_dim=32, local_add_cond_dim=9,
        timestep_features_dim=32, num_memory_tokens=2), _stable_audio3),
    Case("MiniMaxMusic3Transformer1DModel", dict(
        in_channels=8, condition_dim=32, num_layers=2, num_attention_heads=2, attention_head_dim=32, ff_inner_dim=96,
        rotary_dim=16, fourier_embedding_dim=32), _music3),
    Case("MiniMaxMusic3RVQDepthDecoder", dict(
        hidden_size=64, num_layers=2, num_attention_heads=2, intermediate_size=96, audio_vocab_size=32,
        num_codebooks=2), lambda d: dict(inputs_embeds=d.x(4, 64))),
    Case("LongCatAudioDiTTransformer", dict(
        dit_dim=64, dit_depth=2, dit_heads=2, dit_text_dim=32, latent_dim=8), _longcat_audio),
)  # fmt: skip
