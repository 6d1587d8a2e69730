"""Tiny seeded decoders, in float64 throughout: a norm that goes through float32 would hide errors."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from torch import nn

SIZES = dict(
    vocab_size=61,
    hidden_size=48,
    intermediate_size=80,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=16,
    max_position_embeddings=64,
    attn_implementation="sdpa",
    pad_token_id=0,
    bos_token_id=1,
    eos_token_id=2,
)


class ExactNorm(nn.Module):
    """transformers' RMSNorms compute in float32; this one in the dtype of its input. Gemma's scale by 1 + weight."""

    def __init__(self, weight: nn.Parameter, eps: float, plus: float = 0.0):
        super().__init__()
        self.weight, self.eps, self.plus = weight, eps, plus

    def forward(self, x):
        return (self.plus + self.weight) * (x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.eps))


def decoder(kind: str = "Llama", dtype: torch.dtype = torch.float64, exact: bool = True, **changes) -> nn.Module:
    """A `<kind>ForCausalLM` with weights of unit scale and norms that are far from 1."""
    import transformers

    torch.manual_seed(0)
    config = getattr(transformers, f"{kind.replace('Gemma3', 'Gemma3Text')}Config")(**SIZES | changes)
    if "Gemma2" in kind:
        config._attn_implementation = "eager"
    model = getattr(transformers, f"{kind}ForCausalLM")(config).to(dtype).eval()
    with torch.no_grad():
        for name, p in model.named_parameters():
            if "norm" in name:
                p.copy_(0.5 + torch.rand_like(p))
            elif name.endswith("bias"):
                p.normal_(0, 0.3)
            else:
                p.normal_(0, 1.0 if "embed" in name else p.shape[1] ** -0.5)
    for name, module in list(model.named_modules()):
        if exact and type(module).__name__.endswith("RMSNorm"):
            eps = getattr(module, "variance_epsilon", None) or module.eps
            model.set_submodule(name, ExactNorm(module.weight, eps, float("Gemma" in kind)))
    return model


def tokens(rows: int = 2, length: int = 12, seed: int = 0) -> torch.Tensor:
    return torch.randint(0, SIZES["vocab_size"], (rows, length), generator=torch.Generator().manual_seed(seed))


@torch.no_grad()
def logits(model: nn.Module, ids: torch.Tensor | None = None) -> torch.Tensor:
    return model(tokens() if ids is None else ids).logits


def difference(model: nn.Module, expected: torch.Tensor) -> float:
    """Largest difference of the logits, relative to the largest logit."""
    return float((logits(model) - expected).abs().max() / expected.abs().max())


@pytest.fixture
def decoders() -> SimpleNamespace:
    """The builders of this file."""
    pytest.importorskip("transformers")
    return SimpleNamespace(decoder=decoder, tokens=tokens, logits=logits, difference=difference)
