"""Decoder models with static shapes, for timing and CUDA graphs: a prompt at once, then one token at a time.

The model's own modules run (embedding, norms, projections, MLPs); attention reads and writes buffers of fixed length,
so that a step is the same work at every position and can be captured. For decoders with the module names of Llama,
Mistral, Qwen2 and Qwen3 (with or without norms of queries and keys).
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from dq.registry import DQError, suggest

# Shapes by name: enough of a configuration to build a model with random weights.
SHAPES: dict[str, dict[str, Any]] = {
    "llama-3.1-8b": dict(
        model_type="llama", vocab_size=128256, hidden_size=4096, intermediate_size=14336, num_hidden_layers=32,
        num_attention_heads=32, num_key_value_heads=8, max_position_embeddings=131072, tie_word_embeddings=False,
    ),
    "llama-3.2-1b": dict(
        model_type="llama", vocab_size=128256, hidden_size=2048, intermediate_size=8192, num_hidden_layers=16,
        num_attention_heads=32, num_key_value_heads=8, head_dim=64, max_position_embeddings=131072,
        tie_word_embeddings=True,
    ),
    "qwen3-8b": dict(
        model_type="qwen3", vocab_size=151936, hidden_size=4096, intermediate_size=12288, num_hidden_layers=36,
        num_attention_heads=32, num_key_value_heads=8, head_dim=128, max_position_embeddings=40960,
        tie_word_embeddings=False,
    ),
}  # fmt: skip


def shape(name: str) -> dict[str, Any]:
    """The configuration of a known shape, or of the model folder (or config.json) at a path.

    Raises:
        DQError: neither (near names are suggested).
    """
    path = Path(name) / "config.json" if Path(name).is_dir() else Path(name)
    if path.is_file():
        return json.loads(path.read_text(encoding="utf-8"))
    if name not in SHAPES:
        raise DQError(f"unknown shape {name!r}{suggest(name, SHAPES)} (or give a folder with a config.json)")
    return dict(SHAPES[name])


@torch.no_grad()
def fill_random(model: nn.Module, generator: torch.Generator) -> None:
    """Matrices from N(0, 1 / K), gains 1, biases 0, in place: activations stay of ordinary size through many layers."""
    for name, p in model.named_parameters():
        if p.dim() > 1:
            p.normal_(0, p.shape[-1] ** -0.5, generator=generator)
        else:
            p.fill_(0.0 if name.endswith("bias") else 1.0)


def random_decoder(config: dict[str, Any], device: torch.device, dtype: torch.dtype = torch.bfloat16) -> nn.Module:
    """A model of that shape whose weights are drawn on the device, all outputs of about unit size."""
    from transformers import AutoConfig, AutoModelForCausalLM

    values = dict(config)
    made = AutoConfig.for_model(values.pop("model_type"), **values)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(made, dtype=dtype)
    rotary = model.model.rotary_emb
    model.model.rotary_emb = None  # its buffers are no random numbers
    model.to_empty(device=device)
    model.model.rotary_emb = type(rotary)(config=made).to(device)
    fill_random(model, torch.Generator(device).manual_seed(0))
    model.tie_weights()
    return model.requires_grad_(False).eval()


def _project(layer: nn.Module, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Queries [B, H, T, d], keys and values [B, G, T, d] of a block's normed input, before positions."""
    attention, size = layer.self_attn, layer.self_attn.head_dim
    h = layer.input_layernorm(x)
    q, k, v = (p(h).unflatten(-1, (-1, size)) for p in (attention.q_proj, attention.k_proj, attention.v_proj))
    if hasattr(attention, "q_norm"):
        q, k = attention.q_norm(q), attention.k_norm(k)
    return q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)


def _turned(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotary positions: halves of a head turned against each other."""
    a, b = x.chunk(2, -1)
    return x * cos + torch.cat([-b, a], -1) * sin


def _finish(layer: nn.Module, x: Tensor, mixed: Tensor) -> Tensor:
    """The rest of a block behind attention [B, T, H d]."""
    x = x + layer.self_attn.o_proj(mixed)
    return x + layer.mlp(layer.post_attention_layernorm(x))


def prompt_block(layer: nn.Module, x: Tensor, cos: Tensor, sin: Tensor, keys: Tensor, values: Tensor) -> Tensor:
    """A block over a prompt [B, T, D]; keys and values go to the front of their buffers [B, G, L, d]."""
    q, k, v = _project(layer, x)
    q, k = _turned(q, cos, sin), _turned(k, cos, sin)
    keys[:, :, : k.shape[2]].copy_(k)
    values[:, :, : v.shape[2]].copy_(v)
    y = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
    return _finish(layer, x, y.transpose(1, 2).flatten(2))


def token_block(
    layer: nn.Module, x: Tensor, cos: Tensor, sin: Tensor, keys: Tensor, values: Tensor, at: Tensor, seen: Tensor
) -> Tensor:
    """A block over one token [B, 1, D] at position `at` [1]; `seen` [L] is 0 where it may look and -inf elsewhere."""
    q, k, v = _project(layer, x)
    q, k = _turned(q, cos, sin), _turned(k, cos, sin)
    keys.index_copy_(2, at, k)
    values.index_copy_(2, at, v)
    groups = keys.shape[1]
    q = q.reshape(q.shape[0], groups, -1, q.shape[-1])  # the queries that share keys are rows of one product
    weights = (q @ keys.mT).float() * q.shape[-1] ** -0.5 + seen
    y = weights.softmax(-1).to(v.dtype) @ values
    return _finish(layer, x, y.reshape(x.shape[0], 1, -1))


class StaticDecoder:
    """A decoder over buffers for `length` tokens.

    Args:
        compiled: run every block as one compiled function, which all blocks share.

    Raises:
        DQError: a model with other modules.
    """

    def __init__(self, model: nn.Module, length: int, batch: int = 1, compiled: bool = True):
        self.model, self.length, self.batch = model, length, batch
        self.layers = getattr(model.model, "layers", ())
        for layer in self.layers:
            if not all(hasattr(layer.self_attn, n) for n in ("q_proj", "k_proj", "v_proj", "o_proj", "head_dim")):
                raise DQError(f"{type(model).__name__} has no q_proj, k_proj, v_proj and o_proj in its blocks")
        first, config = self.layers[0].self_attn, model.config
        size = (batch, config.num_key_value_heads, length, first.head_dim)
        self.device, self.dtype = model.lm_head.weight.device, model.lm_head.weight.dtype
        self.keys, self.values = (
            [torch.zeros(size, device=self.device, dtype=self.dtype) for _ in self.layers] for _ in "kv"
        )
        places = torch.arange(length, device=self.device)
        probe = torch.zeros(1, device=self.device, dtype=self.dtype)
        self.cos, self.sin = (t[0] for t in model.model.rotary_emb(probe, places[None]))
        self.places = places
        wrap = (lambda f: torch.compile(f, fullgraph=True, dynamic=False)) if compiled else (lambda f: f)
        self._prompt, self._token = wrap(prompt_block), wrap(token_block)

    @torch.no_grad()
    def prompt(self, ids: Tensor) -> Tensor:
        """Logits [B, V] behind a prompt [B, T]."""
        x, n = self.model.model.embed_tokens(ids), ids.shape[1]
        for layer, keys, values in zip(self.layers, self.keys, self.values, strict=True):
            x = self._prompt(layer, x, self.cos[:n], self.sin[:n], keys, values)
        return self.model.lm_head(self.model.model.norm(x[:, -1]))

    @torch.no_grad()
    def token(self, ids: Tensor, at: Tensor) -> Tensor:
        """Logits [B, V] behind one more token [B, 1] at position `at`, int64 [1]."""
        x = self.model.model.embed_tokens(ids)
        cos, sin = self.cos[at], self.sin[at]
        seen = torch.where(self.places <= at, 0.0, float("-inf"))
        for layer, keys, values in zip(self.layers, self.keys, self.values, strict=True):
            x = self._token(layer, x, cos, sin, keys, values, at, seen)
        return self.model.lm_head(self.model.model.norm(x[:, -1]))
