"""Denoisers of known shapes with random weights, for timing: what a step takes does not depend on their values."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from dq.pipelines.decoding import fill_random
from dq.registry import DQError, suggest


def _flux(**sizes: int) -> tuple[str, dict[str, Any]]:
    return "FluxTransformer2DModel", dict(patch_size=1, attention_head_dim=128, guidance_embeds=True, **sizes)


# name -> (class of diffusers, its configuration, (height, width) of the tokens, text tokens)
SHAPES: dict[str, tuple[str, dict[str, Any], tuple[int, int], int]] = {
    "flux.1-dev": (*_flux(in_channels=64, num_layers=19, num_single_layers=38, num_attention_heads=24,
                          joint_attention_dim=4096, pooled_projection_dim=768), (64, 64), 512),
    "flux-tiny": (*_flux(in_channels=16, num_layers=1, num_single_layers=2, num_attention_heads=2,
                         joint_attention_dim=256, pooled_projection_dim=64), (6, 6), 16),
}  # fmt: skip


def random_denoiser(
    shape: str, device: torch.device, dtype: torch.dtype = torch.bfloat16
) -> tuple[nn.Module, dict[str, Any]]:
    """(model, arguments of one call at batch 1) of a known shape; every linear keeps the size of its input.

    Raises:
        DQError: an unknown shape (near names are suggested).
    """
    import diffusers

    if shape not in SHAPES:
        raise DQError(f"unknown shape {shape!r}{suggest(shape, SHAPES)}")
    kind, config, (high, wide), text = SHAPES[shape]
    with torch.device("meta"):
        model = getattr(diffusers, kind)(**config).to(dtype)
    model = model.to_empty(device=device).eval()
    generator = torch.Generator(device).manual_seed(0)
    fill_random(model, generator)

    def draw(*size: int) -> torch.Tensor:
        return torch.randn(size, generator=generator, device=device).to(dtype)

    places = torch.cartesian_prod(torch.zeros(1), torch.arange(float(high)), torch.arange(float(wide)))
    inputs = dict(
        hidden_states=draw(1, high * wide, config["in_channels"]),
        encoder_hidden_states=draw(1, text, config["joint_attention_dim"]),
        pooled_projections=draw(1, config["pooled_projection_dim"]),
        timestep=torch.full((1,), 0.5, dtype=dtype, device=device),
        guidance=torch.full((1,), 3.5, dtype=dtype, device=device),
        img_ids=places.to(device, dtype), txt_ids=torch.zeros(text, 3, dtype=dtype, device=device),
        return_dict=False,
    )  # fmt: skip
    return model, inputs
