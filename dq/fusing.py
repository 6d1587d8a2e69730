"""Fusing: factors of a LoRA become further columns of a quantized linear's 16-bit branch; the codes stay as they are.

    y = Q_X(pre(x)) @ Q_W(W')^T + (x @ [D; d]^T) @ [U | u]^T + b,      delta = u d

Written into 4-bit codes, a delta below half a step would be lost (a 4-bit step is about a tenth of the largest weight);
beside them it loses what rounding d and u to the branch's dtype costs, about 0.3 % in BF16. Both read the raw x, so
smoothing, rotation and residual channels do not touch it.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from dq.linear import QuantizedLinear
from dq.registry import DQError

MIN_RETENTION = 0.99


def retention(down: Tensor, up: Tensor, kept_down: Tensor, kept_up: Tensor) -> float:
    """`1 - |u' d' - u d| / |u d|` (Frobenius) of factors d [r, K], u [N, r]; 1.0 for a delta of zero.

    From Gram matrices in float64: no [N, K] matrix is formed.
    """
    d, u, kd, ku = (t.to(torch.float64) for t in (down, up, kept_down, kept_up))
    whole = _norm(d, u)
    if whole == 0.0:
        return 1.0
    # u' d' - u d = (u' - u) d' + u (d' - d), without the cancellation of two almost equal products
    return 1.0 - _norm(torch.cat([kd, kd - d]), torch.cat([ku - u, u], 1)) / whole


def _norm(down: Tensor, up: Tensor) -> float:
    square = ((up.T @ up) * (down @ down.T)).sum()
    return float(square.clamp(min=0.0).sqrt())


def balanced(down: Tensor, up: Tensor) -> tuple[Tensor, Tensor]:
    """The same product with rows of d and columns of u of about equal length, moved by powers of two (exact).

    A side that carried all of a small delta could leave the range of a 16-bit or 8-bit format.
    """
    d, u = down.to(torch.float64), up.to(torch.float64)
    a, b = d.norm(dim=1), u.norm(dim=0)
    shift = torch.where((a > 0) & (b > 0), torch.log2(b / a) / 2, 0.0).round()
    return torch.ldexp(d, shift[:, None]), torch.ldexp(u, -shift)


def fuse(layer: QuantizedLinear, down: Tensor, up: Tensor, name: str = "the layer") -> float:
    """Appends a delta `up @ down`, down [r, K] and up [N, r] on the raw x, to the layer's low-rank branch, in place.

    Returns:
        how much of the delta is kept, 1.0 for all (`retention`).

    Raises:
        DQError: NaN or Inf in a factor, or less than 99 % would be kept; the layer is unchanged then.
    """
    if not (torch.isfinite(down).all() and torch.isfinite(up).all()):
        raise DQError(f"cannot fuse into {name}: the adapter holds NaN or Inf")
    config = layer.config
    half = getattr(torch, config.side_dtype) if config.rank else layer.compute_dtype
    dtype = torch.float32 if layer.compute_dtype == torch.float32 else half
    exact = balanced(down, up)
    new = [t.to(layer.qweight.device, dtype) for t in exact]
    kept = retention(*exact, *(t.to(exact[0].device) for t in new))
    if not kept >= MIN_RETENTION:
        raise DQError(
            f"cannot fuse into {name}: {dtype} factors would keep {kept:.1%} of the adapter's effect, not the "
            f"{MIN_RETENTION:.0%} asked for; leave it beside the layer, which is exact"
        )
    if config.rank:
        new = [torch.cat([layer.lowrank_down.to(dtype), new[0]]), torch.cat([layer.lowrank_up.to(dtype), new[1]], 1)]
    _set_branch(layer, new[0], new[1])
    return kept


def unfuse(layer: QuantizedLinear, rank: int, side_dtype: str) -> None:
    """Takes the last factors off again, so that `rank` are left, in `side_dtype`: bit for bit what was there before."""
    dtype = getattr(torch, side_dtype)
    _set_branch(layer, layer.lowrank_down[:rank].to(dtype), layer.lowrank_up[:, :rank].to(dtype))
    if not rank:
        layer.config = replace(layer.config, side_dtype=side_dtype)


def _set_branch(layer: QuantizedLinear, down: Tensor, up: Tensor) -> None:
    """Copies of the factors as the layer's branch; none if there are no rows."""
    for key, value in (("lowrank_down", down), ("lowrank_up", up)):
        layer._buffers.pop(key, None)
        if len(down):
            layer.register_buffer(key, value.detach().clone(memory_format=torch.contiguous_format))
    dtype = str(down.dtype).removeprefix("torch.") if len(down) else layer.config.side_dtype
    layer.config = replace(layer.config, rank=len(down), side_dtype=dtype)
    layer._choice = None
