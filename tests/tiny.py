"""Tiny seeded random models, pipelines and tokenizers, made here and not downloaded. Tests reach them as `tiny`."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn

PROMPTS = ["a red circle", "two blue squares", "a green cat", "one cat and two dogs", "a square"]
LATENTS = dict(height=32, width=32, num_inference_steps=4, max_sequence_length=16, output_type="latent")


def recipe(name: str, **changes: Any):
    """The preset with the lower bound on sizes taken down to tiny models."""
    import dq

    return dq.Recipe.load(name).with_(min_features=16, **changes)


def layer(
    recipe_, n: int = 48, k: int = 64, *, bias: bool = True, dtype: torch.dtype = torch.float32, weight=None, x=None
):
    """One linear quantized with a preset (or recipe), calibrated on x [..., k] if the recipe asks for it; and its
    16-bit original."""
    import dq

    torch.manual_seed(0)
    source = nn.Linear(k, n, bias=bias)
    with torch.no_grad():
        source.weight.copy_(torch.randn(n, k) / k**0.5 if weight is None else weight)
    source = source.to(dtype).requires_grad_(False)
    net = nn.Sequential(copy.deepcopy(source))
    recipe_ = dq.Recipe.load(recipe_).with_(min_features=1)
    x = torch.randn(64, k) if x is None else x
    records = [dict(input=x.to(dtype))] if recipe_.needs_calibration else None
    dq.quantize(net, recipe_, calibration=records, progress=False)
    return net[0], source


def seeded(build: Callable[[], nn.Module], seed: int = 0, dtype: torch.dtype = torch.float32) -> nn.Module:
    """A model in eval mode with weights of a size at which every layer matters (std 1/sqrt(K), never zero)."""
    torch.manual_seed(seed)
    model = build()
    with torch.no_grad():
        for name, p in model.named_parameters():
            if p.dim() > 1 and "embed" not in name and "shared" not in name:
                p.normal_(0, (1.0 / p[0].numel()) ** 0.5)
            elif name.endswith("bias"):
                p.normal_(0, 0.1)
    for p in model.parameters():  # buffers such as rotary frequencies keep their dtype, as `from_pretrained` keeps them
        p.data = p.data.to(dtype)
    return model.eval()


def flux(dtype: torch.dtype = torch.float32, seed: int = 0, **changes: Any) -> nn.Module:
    """FLUX.1 with two double and two single blocks of width 64."""
    from diffusers import FluxTransformer2DModel

    config = dict(
        in_channels=16, num_layers=2, num_single_layers=2, attention_head_dim=32, num_attention_heads=2,
        joint_attention_dim=32, pooled_projection_dim=32, guidance_embeds=True, axes_dims_rope=(8, 12, 12),
    )  # fmt: skip
    return seeded(lambda: FluxTransformer2DModel(**config | changes), seed, dtype)


def flux_inputs(dtype: torch.dtype = torch.float32, batch: int = 1, seed: int = 0, text: int = 5) -> dict[str, Any]:
    """Arguments of one call of `flux()`; sample i of a batch is the same whatever the batch size."""
    g = [torch.Generator().manual_seed(seed + i) for i in range(batch)]

    def rows(*shape: int) -> torch.Tensor:
        return torch.stack([torch.randn(shape, generator=one) for one in g]).to(dtype)

    ids = torch.zeros(16, 3)
    ids[:, 1], ids[:, 2] = torch.arange(16) // 4, torch.arange(16) % 4
    return dict(
        hidden_states=rows(16, 16), encoder_hidden_states=rows(text, 32), pooled_projections=rows(32),
        timestep=torch.full((batch,), 0.5, dtype=dtype), img_ids=ids.to(dtype),
        txt_ids=torch.zeros(text, 3, dtype=dtype), guidance=torch.full((batch,), 3.5, dtype=dtype), return_dict=False,
    )  # fmt: skip


def llama(dtype: torch.dtype = torch.float32, seed: int = 0, tied: bool = False, **changes: Any) -> nn.Module:
    """A causal language model with two layers of width 64."""
    from transformers import LlamaConfig, LlamaForCausalLM

    config = dict(
        vocab_size=128, hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=64, tie_word_embeddings=tied, bos_token_id=1, eos_token_id=2,
        pad_token_id=0,
    )  # fmt: skip
    return seeded(lambda: LlamaForCausalLM(LlamaConfig(**config | changes)), seed, dtype)


def t5_config(**changes: Any):
    """Configuration of `t5()`."""
    from transformers import T5Config

    config = dict(
        vocab_size=256, d_model=32, d_kv=8, d_ff=64, num_layers=2, num_heads=4, relative_attention_num_buckets=8,
        feed_forward_proj="gated-gelu", decoder_start_token_id=0,
    )  # fmt: skip
    return T5Config(**config | changes)


def t5(dtype: torch.dtype = torch.float32, seed: int = 0, **changes: Any) -> nn.Module:
    """The encoder that FLUX.1 uses as `text_encoder_2`, two layers of width 32."""
    from transformers import T5EncoderModel

    return seeded(lambda: T5EncoderModel(t5_config(**changes)), seed, dtype)


def clip(dtype: torch.dtype = torch.float32, seed: int = 0) -> nn.Module:
    """The text encoder whose pooled output FLUX.1 uses."""
    from transformers import CLIPTextConfig, CLIPTextModel

    config = CLIPTextConfig(
        vocab_size=256, hidden_size=32, intermediate_size=37, num_hidden_layers=2, num_attention_heads=4,
        max_position_embeddings=77, bos_token_id=0, eos_token_id=1, pad_token_id=1,
    )  # fmt: skip
    return seeded(lambda: CLIPTextModel(config), seed, dtype)


def vae(dtype: torch.dtype = torch.float32, seed: int = 0) -> nn.Module:
    """Four latent channels, one level: images have the size of the latents."""
    from diffusers import AutoencoderKL

    return seeded(
        lambda: AutoencoderKL(
            block_out_channels=(8, 8), layers_per_block=1, latent_channels=4, norm_num_groups=2, use_quant_conv=False,
            use_post_quant_conv=False, shift_factor=0.06, scaling_factor=1.5,
            down_block_types=("DownEncoderBlock2D",) * 2, up_block_types=("UpDecoderBlock2D",) * 2,
        ),
        seed,
        dtype,
    )  # fmt: skip


def clip_tokenizer():
    """Byte-level without merges: one token per letter, so that every prompt works."""
    from tokenizers import pre_tokenizers
    from transformers import CLIPTokenizer

    letters = sorted(pre_tokenizers.ByteLevel.alphabet())[:120]
    words = ["<|startoftext|>", "<|endoftext|>", *letters, *(x + "</w>" for x in letters)]
    return CLIPTokenizer(vocab={w: i for i, w in enumerate(words)}, merges=[], model_max_length=77)


def t5_tokenizer():
    """Unigram over single letters."""
    from transformers import T5Tokenizer

    letters = [(c, -2.0) for c in "abcdefghijklmnopqrstuvwxyz0123456789.,"]
    vocab = [("<pad>", 0.0), ("</s>", 0.0), ("<unk>", 0.0), ("▁", -1.5), *letters]
    return T5Tokenizer(vocab=vocab, extra_ids=0, model_max_length=64)


def flux_pipeline(dtype: torch.dtype = torch.float32, seed: int = 0):
    """A whole FluxPipeline: prompts are tokenized, encoded, denoised and decoded."""
    from diffusers import FlowMatchEulerDiscreteScheduler, FluxPipeline

    pipe = FluxPipeline(
        scheduler=FlowMatchEulerDiscreteScheduler(), vae=vae(dtype, seed), text_encoder=clip(dtype, seed),
        tokenizer=clip_tokenizer(), text_encoder_2=t5(dtype, seed), tokenizer_2=t5_tokenizer(),
        transformer=flux(dtype, seed),
    )  # fmt: skip
    pipe.set_progress_bar_config(disable=True)
    return pipe


def denoise(pipe: Any, prompt: str | list[str] = PROMPTS[0], **kwargs: Any) -> torch.Tensor:
    """Latents (or images) of a seeded run."""
    generator = torch.Generator().manual_seed(7)
    return pipe(prompt, generator=generator, return_dict=False, **LATENTS | kwargs)[0]


def weight_files(folder: Any) -> list[Path]:
    """The safetensors files of a saved model."""
    return sorted(Path(folder).glob("*.safetensors"))


def edit(folder: Any, change: Callable[[dict[str, torch.Tensor]], Any], index: bool = True) -> None:
    """Lets `change` edit the tensors of every file of a saved model in place; the index follows if asked."""
    from safetensors.torch import load_file, save_file

    where: dict[str, str] = {}
    for path in weight_files(folder):
        tensors = load_file(path)
        change(tensors)
        save_file(tensors, path, metadata={"format": "pt"})
        where |= dict.fromkeys(tensors, path.name)
    for path in Path(folder).glob("*.index.json"):
        content = json.loads(path.read_text())
        if index:
            path.write_text(json.dumps(content | {"weight_map": where}))


def edit_config(folder: Any, change: Callable[[dict[str, Any]], Any]) -> None:
    """Lets `change` edit the quantization_config of a saved model in place."""
    path = Path(folder) / "config.json"
    config = json.loads(path.read_text())
    change(config["quantization_config"])
    path.write_text(json.dumps(config))
