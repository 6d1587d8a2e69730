"""Function-preserving outliers for FLUX transformers: tests and ablations of how methods cope with large channels.

A channel j of a linear's input is multiplied by s_j through what produces it, and the consumers' weight columns are
divided by s_j. Outputs stay as they were up to rounding; the inputs now have channels 20 to 60 times the others, as
large diffusion transformers have. What is covered (FluxTransformer2DModel, no fused projections):

- inputs of to_q, to_k, to_v; add_q_proj, add_k_proj, add_v_proj; ff.net.0.proj; ff_context.net.0.proj; and q, k, v,
  proj_mlp of single blocks. Their producer is `norm(x) * (1 + scale) + shift` with [shift; scale] = W silu(temb) + b:
  W_scale <- s W_scale,  b_scale <- s (1 + b_scale) - 1,  W_shift <- s W_shift,  b_shift <- s b_shift.
- inputs of to_out.0 and to_add_out, and the attention columns of a single block's proj_out. Attention is linear in V
  and mixes only tokens, never channels: rows of to_v (in joint attention also of add_v_proj, by the same s) times s.

Not covered: inputs that come out of a GELU (ff.net.2, the MLP columns of proj_out), which no scaling passes exactly,
and the embedders and norm_out, which recipes leave in 16 bits.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import nn

from dq.registry import DQError

_NO_ROWS = (
    "row (token) outliers cannot be injected exactly: weights are shared by all tokens, so a token's factor can be "
    "neither put in by its producer nor taken out by its consumer, and every block input passes a LayerNorm that "
    "divides by the token's own size. Use rows=False, or scale rows of recorded inputs in a test of a single linear."
)


@dataclass(frozen=True)
class Site:
    """Linears whose first `dim` input columns read the same channels (`consumers`), and what produces these channels:
    the first `dim` rows of each of `producers`, or, behind adaLN, the `dim` rows from `shift_row` and from `scale_row`
    of its modulation linear."""

    name: str
    dim: int
    producers: tuple[nn.Linear, ...]
    consumers: tuple[nn.Linear, ...]
    shift_row: int | None = None
    scale_row: int | None = None


def _modulated(name: str, norm: nn.Module, consumers: list, first: int = 0) -> Site:
    """A site behind adaLN; its shift is chunk `first` of the modulation linear and its scale the next chunk."""
    dim = consumers[0].in_features
    return Site(name, dim, (norm.linear,), tuple(consumers), first * dim, (first + 1) * dim)


def _double_sites(name: str, block: nn.Module) -> list[Site]:
    attn = block.attn
    return [
        _modulated(f"{name}.attn.to_qkv", block.norm1, [attn.to_q, attn.to_k, attn.to_v]),
        _modulated(f"{name}.attn.add_qkv", block.norm1_context, [attn.add_q_proj, attn.add_k_proj, attn.add_v_proj]),
        _modulated(f"{name}.ff.net.0.proj", block.norm1, [block.ff.net[0].proj], 3),
        _modulated(f"{name}.ff_context.net.0.proj", block.norm1_context, [block.ff_context.net[0].proj], 3),
        Site(
            f"{name}.attn.to_out",
            attn.to_v.out_features,
            (attn.to_v, attn.add_v_proj),
            (attn.to_out[0], attn.to_add_out),
        ),
    ]


def _single_sites(name: str, block: nn.Module) -> list[Site]:
    attn = block.attn
    return [
        _modulated(f"{name}.attn.to_qkv+proj_mlp", block.norm, [attn.to_q, attn.to_k, attn.to_v, block.proj_mlp]),
        Site(f"{name}.proj_out", attn.to_v.out_features, (attn.to_v,), (block.proj_out,)),
    ]


def outlier_sites(transformer: nn.Module) -> list[Site]:
    """All places of a FluxTransformer2DModel where channels can be scaled exactly.

    Raises:
        DQError: for another model, fused projections, or linears that are quantized or wrapped.
    """
    if not hasattr(transformer, "transformer_blocks") or not hasattr(transformer, "single_transformer_blocks"):
        raise DQError(f"outliers can be injected into FluxTransformer2DModel, not into {type(transformer).__name__}")
    sites: list[Site] = []
    for i, block in enumerate(transformer.transformer_blocks):
        _refuse_fused(block)
        sites += _double_sites(f"transformer_blocks.{i}", block)
    for i, block in enumerate(transformer.single_transformer_blocks):
        _refuse_fused(block)
        sites += _single_sites(f"single_transformer_blocks.{i}", block)
    for site in sites:
        for linear in site.producers + site.consumers:
            if type(linear) is not nn.Linear:
                kind = type(linear).__name__
                raise DQError(f"{site.name}: inject outliers before quantizing or adapting; it has a {kind}")
    return sites


def _refuse_fused(block: nn.Module) -> None:
    if getattr(block.attn, "fused_projections", False):
        raise DQError("inject outliers before fusing projections: call unfuse_qkv_projections() first")


def _scale_rows(linear: nn.Linear, first: int, factors: torch.Tensor, plus_one: bool = False) -> None:
    """Rows first.. of weight and bias times `factors`; with `plus_one` the bias b becomes s (1 + b) - 1."""
    rows = slice(first, first + len(factors))
    weight, bias = linear.weight.data, linear.bias
    weight[rows] = (weight[rows].double() * factors[:, None]).to(weight.dtype)
    if bias is not None:
        one = float(plus_one)
        bias.data[rows] = (factors * (bias.data[rows].double() + one) - one).to(bias.dtype)


def _apply(site: Site, factors: torch.Tensor) -> None:
    """Multiplies the site's input channels by `factors` [dim] and divides the consumers' columns by them."""
    factors = factors.to(site.consumers[0].weight.device, torch.float64)
    for linear in site.producers:
        if site.scale_row is None:
            _scale_rows(linear, 0, factors)
        else:
            _scale_rows(linear, site.shift_row, factors)
            _scale_rows(linear, site.scale_row, factors, plus_one=True)
    for linear in site.consumers:
        columns = linear.weight.data[:, : site.dim]
        columns.copy_((columns.double() / factors).to(columns.dtype))


@torch.no_grad()
def inject_outliers(
    transformer: nn.Module,
    fraction: float = 0.01,
    low: float = 20.0,
    high: float = 60.0,
    seed: int = 0,
    rows: bool = False,
) -> dict:
    """Scales max(1, round(fraction * dim)) random input channels of each site by factors uniform in [low, high], in
    place, leaving the model's outputs as they were up to the rounding of its dtype.

    Args:
        transformer: a FluxTransformer2DModel in 16, 32 or 64 bit, before quantization.
        fraction: part of the channels of each input, in (0, 1].
        low, high: bounds of the factors, 0 < low <= high.
        seed: of the choice of channels and factors.
        rows: token outliers; no exact construction exists (see the error), so True raises.

    Returns:
        {"channels": total count, "sites": {name: {"channels": [int], "factors": [float]}}}.

    Raises:
        DQError: for rows=True, values out of range, and models that `outlier_sites` refuses.
    """
    if rows:
        raise DQError(_NO_ROWS)
    if not 0 < fraction <= 1 or not 0 < low <= high:
        raise DQError(f"need 0 < fraction <= 1 and 0 < low <= high, not fraction={fraction}, low={low}, high={high}")
    generator = torch.Generator().manual_seed(seed)
    report: dict[str, dict] = {}
    for site in outlier_sites(transformer):
        count = max(1, round(fraction * site.dim))
        channels = torch.randperm(site.dim, generator=generator)[:count].sort().values
        values = low + (high - low) * torch.rand(count, generator=generator, dtype=torch.float64)
        factors = torch.ones(site.dim, dtype=torch.float64)
        factors[channels] = values
        _apply(site, factors)
        report[site.name] = {"channels": channels.tolist(), "factors": values.tolist()}
    return {"channels": sum(len(s["channels"]) for s in report.values()), "sites": report}
