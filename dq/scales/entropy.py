"""`entropy`: the clipping threshold of least information loss, per block of at least a few hundred values.

A histogram of |x| with 2048 bins; for every i >= 128, P is the first i bins with the tail added to the last, Q is P in
2^(bits-1) levels, spread uniformly over its non-empty bins; the last i of least KL(P || Q) wins.
Source: the calibrator of TensorRT. Meant for 8-bit activations, not for 4 bits.
"""

from __future__ import annotations

import torch
from torch import Tensor

from dq.scales import SCALE_RULES, Blocks, ScaleRule, amax, storable

BINS, FIRST, STRIDE = 2048, 128, 4
CHUNK = 256  # blocks whose histograms are looked at together


def _histogram(a: Tensor, top: Tensor) -> Tensor:
    """Counts [B, BINS] of |x| [B, E] over 0..top [B]; the first bin takes the count of the second."""
    at = (a / top[:, None] * BINS).to(torch.int64).clamp_(max=BINS - 1)
    counts = a.new_zeros(len(a), BINS, dtype=torch.float64)
    counts.scatter_add_(1, at, torch.ones_like(a, dtype=torch.float64))
    counts[:, 0] = counts[:, 1]
    return counts


def _divergence(counts: Tensor, i: int, levels: int) -> Tensor:
    """KL(P || Q) [B] at a threshold after bin i."""
    head = counts[:, :i]
    p = head.clone()
    p[:, -1] += counts[:, i:].sum(1)
    level = torch.div(torch.arange(i, device=counts.device) * levels, i, rounding_mode="floor")
    filled = (head > 0).to(counts.dtype)
    mass = counts.new_zeros(len(counts), levels).index_add_(1, level, head)
    many = counts.new_zeros(len(counts), levels).index_add_(1, level, filled)
    q = (mass / many.clamp(min=1))[:, level] * filled
    p, q = p / p.sum(1, keepdim=True).clamp(min=1e-30), q / q.sum(1, keepdim=True).clamp(min=1e-30)
    return torch.where(p > 0, p * (p.clamp(min=1e-30) / q.clamp(min=1e-30)).log(), 0.0).sum(1)


def threshold(x: Tensor, bits: int) -> Tensor:
    """The value of |x| above which to clip, for each row of x [B, E]; 0 for a row of zeros."""
    top = amax(x)
    counts = _histogram(x.abs(), torch.where(top > 0, top, 1.0))
    best, at = torch.full_like(top, torch.inf, dtype=torch.float64), torch.full_like(top, BINS)
    for i in range(FIRST, BINS + 1, STRIDE):
        now = _divergence(counts, i, 2 ** (bits - 1))
        better = now <= best
        best, at = torch.where(better, now, best), torch.where(better, float(i), at)
    return top * (at / BINS)


def choose(blocks: Blocks) -> Tensor:
    """Per block, the entropy-optimal threshold lands on the largest code."""
    flat = blocks.x.flatten(0, 1)
    tops = [threshold(part, blocks.spec.fmt.bits) for part in flat.split(CHUNK)] if flat.numel() else []
    top = torch.cat(tops).reshape(blocks.x.shape[:2]) if tops else blocks.x.new_zeros(blocks.x.shape[:2])
    return storable(blocks.reaching(top, blocks.spec.fmt.divisor), blocks.spec)


SCALE_RULES.register(ScaleRule("entropy", choose))
