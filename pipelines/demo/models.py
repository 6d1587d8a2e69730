"""Architectures of the demo pipeline: one dict of sizes per component, and the functions that build them.

`SIZES["demo"]` is what ships; `SIZES["tiny"]` is the same structure at a size the tests train in seconds.
"""

from __future__ import annotations

IMAGE_SIZE = 128
TEXT_TOKENS = 32  # both tokenizers pad and cut to this; FluxPipeline's max_sequence_length must equal it

_VAE = dict(
    in_channels=3,
    out_channels=3,
    act_fn="silu",
    sample_size=IMAGE_SIZE,
    use_quant_conv=False,
    use_post_quant_conv=False,
    force_upcast=False,
    down_block_types=("DownEncoderBlock2D",) * 4,
    up_block_types=("UpDecoderBlock2D",) * 4,
    layers_per_block=1,
)

SIZES = {
    "demo": {
        "vae": dict(_VAE, latent_channels=16, block_out_channels=(24, 48, 64, 64), norm_num_groups=8),
        "t5": dict(d_model=128, d_kv=32, num_heads=4, d_ff=256, num_layers=3),
        "t5_vocab": 1100,
        "clip": dict(hidden_size=128, intermediate_size=384, num_hidden_layers=2, num_attention_heads=4),
        "clip_vocab": 1024,
        "transformer": dict(
            in_channels=64,
            num_layers=3,
            num_single_layers=6,
            attention_head_dim=64,
            num_attention_heads=4,
            axes_dims_rope=(8, 28, 28),
        ),
    },
    "tiny": {
        "vae": dict(_VAE, latent_channels=4, block_out_channels=(8, 8, 8, 8), norm_num_groups=4),
        "t5": dict(d_model=16, d_kv=8, num_heads=2, d_ff=32, num_layers=1),
        "t5_vocab": 300,
        "clip": dict(hidden_size=16, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2),
        "clip_vocab": 560,
        "transformer": dict(
            in_channels=16,
            num_layers=1,
            num_single_layers=1,
            attention_head_dim=16,
            num_attention_heads=2,
            axes_dims_rope=(4, 6, 6),
        ),
    },
}


def build_vae(size: str):
    """AutoencoderKL with 8x downsampling; a 128 px image becomes [latent_channels, 16, 16]."""
    from diffusers import AutoencoderKL

    return AutoencoderKL(**SIZES[size]["vae"])


def build_text_encoders(size: str, clip_tokenizer, t5_tokenizer):
    """(CLIPTextModel, T5EncoderModel) whose vocabularies and special ids are those of the tokenizers."""
    from transformers import CLIPTextConfig, CLIPTextModel, T5Config, T5EncoderModel

    clip = CLIPTextConfig(
        vocab_size=len(clip_tokenizer),
        max_position_embeddings=TEXT_TOKENS,
        bos_token_id=clip_tokenizer.bos_token_id,
        eos_token_id=clip_tokenizer.eos_token_id,
        pad_token_id=clip_tokenizer.pad_token_id,
        projection_dim=SIZES[size]["clip"]["hidden_size"],
        hidden_act="gelu",
        **SIZES[size]["clip"],
    )
    t5 = T5Config(
        vocab_size=len(t5_tokenizer),
        feed_forward_proj="gated-gelu",
        dropout_rate=0.0,
        relative_attention_num_buckets=32,
        relative_attention_max_distance=64,
        pad_token_id=t5_tokenizer.pad_token_id,
        eos_token_id=t5_tokenizer.eos_token_id,
        is_encoder_decoder=False,
        use_cache=False,
        tie_word_embeddings=True,
        **SIZES[size]["t5"],
    )
    return CLIPTextModel(clip), T5EncoderModel(t5)


def build_transformer(size: str):
    """FluxTransformer2DModel with guidance embedding; modulation and output start at zero, so every block starts as
    the identity (adaLN-Zero, Peebles and Xie 2022, section 3.2)."""
    import torch
    from diffusers import FluxTransformer2DModel

    model = FluxTransformer2DModel(
        guidance_embeds=True,
        joint_attention_dim=SIZES[size]["t5"]["d_model"],
        pooled_projection_dim=SIZES[size]["clip"]["hidden_size"],
        **SIZES[size]["transformer"],
    )
    zero = [model.proj_out, model.norm_out.linear]
    for block in model.transformer_blocks:
        zero += [block.norm1.linear, block.norm1_context.linear]
    zero += [block.norm.linear for block in model.single_transformer_blocks]
    for linear in zero:
        torch.nn.init.zeros_(linear.weight)
        torch.nn.init.zeros_(linear.bias)
    return model


def build_scheduler():
    """The scheduler of FLUX.1-dev: at 64 image tokens its dynamic shift is exp(0.47) = 1.6."""
    from diffusers import FlowMatchEulerDiscreteScheduler

    return FlowMatchEulerDiscreteScheduler(
        shift=3.0,
        use_dynamic_shifting=True,
        base_shift=0.5,
        max_shift=1.15,
        base_image_seq_len=256,
        max_image_seq_len=4096,
    )
