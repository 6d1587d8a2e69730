"""Tiny decoders of every family, a tokenizer of letters, and a text they can read."""

from types import SimpleNamespace

import pytest
import torch

TEXT = "the quick brown fox jumps over the lazy dog. pack my box with five dozen liquor jugs, said the old man. " * 30
SIZES = dict(
    vocab_size=128, hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4,
    num_key_value_heads=2, head_dim=16, max_position_embeddings=128, bos_token_id=1, eos_token_id=2, pad_token_id=0,
)  # fmt: skip


class Letters:
    """One token per letter; with `start`, a start token in front, as Llama's tokenizer has it."""

    def __init__(self, start: bool = False):
        self.bos_token_id, self.start = 1, start

    def __call__(self, text, add_special_tokens=True, verbose=True):
        first = [1] if self.start and add_special_tokens else []
        return {"input_ids": first + [3 + ord(c) % 120 for c in text]}


def decoder(kind: str = "Llama", seed: int = 0, dtype: torch.dtype = torch.float32, **changes):
    """A `<kind>ForCausalLM` whose norms are far from 1 (those of Gemma far from 0)."""
    import transformers

    torch.manual_seed(seed)
    config = getattr(transformers, f"{kind.replace('Gemma3', 'Gemma3Text')}Config")(**SIZES | changes)
    model = getattr(transformers, f"{kind}ForCausalLM")(config).eval()
    with torch.no_grad():
        for name, p in model.named_parameters():
            if "norm" in name:
                p.copy_(0.5 + torch.rand_like(p))
            elif p.dim() > 1:
                p.normal_(0, 1.0 if "embed" in name else p.shape[-1] ** -0.5)
    return model.to(dtype)


@torch.no_grad()
def spread(model, factor: float = 30.0):
    """The model with outlier channels in the residual stream, as large models have them."""
    for layer in model.model.layers:
        layer.input_layernorm.weight[3] *= factor
        layer.post_attention_layernorm.weight[5] *= factor
    return model


@pytest.fixture(scope="session")
def llm() -> SimpleNamespace:
    """The builders of this file."""
    pytest.importorskip("transformers")
    return SimpleNamespace(decoder=decoder, spread=spread, tokenizer=Letters, text=TEXT)
