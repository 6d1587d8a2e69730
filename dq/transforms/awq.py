"""AWQ: smoothing by the mean magnitude of the input, `x' = x / s`, `W' = W * s`.

    s_k = max(E|x_k|^alpha, 1e-4), divided by sqrt(max s * min s); alpha of 0, 0.05 .. 0.95 by least output error

A channel that matters is large on average, not at its single largest token, so the weights it meets get more of the
grid. The step left behind is that of `smooth`. AWQ's search for clipping is the scale rule `awq` (dq.scales.awq); its
recipe is `transforms = ["awq"]` with `weights = "int4/group128@awq"`.
Source: AWQ (arXiv 2306.00978, section 3.2) and its reference implementation.
"""

from __future__ import annotations

import torch
from torch import Tensor

from dq.transforms import TRANSFORMS, GroupState, Planned, Transform, apply_steps
from dq.transforms.smooth import add_factor, find

ALPHAS = tuple(i / 20 for i in range(20))


def scaling(mean: Tensor, alpha: float) -> Tensor:
    """s [K] from E|x| [K]; 1 for channels that are never active, which the normalization leaves out."""
    active = mean > 0
    s = mean.clamp(min=torch.finfo(mean.dtype).tiny).pow(alpha).clamp(min=1e-4)
    if not active.any():
        return torch.ones_like(mean)
    middle = (s[active].max() * s[active].min()).sqrt()
    return torch.where(active, s / middle, 1.0)


def fit(state: GroupState, rows: int = 256) -> None:
    """One s for the whole group, searched with weights (and activations, if they are quantized) on their grids.

    Args:
        rows: calibration rows on which outputs are compared.

    Raises:
        DQError: without calibration.
    """
    state.require_stats("AWQ")
    counts = [sum(s.count.values()) for s in state.stats.values()]
    means = torch.stack([s.mean() * n for s, n in zip(state.stats.values(), counts, strict=True)])
    mean = apply_steps((means.sum(0) / sum(counts))[None], state.steps)[0]
    add_factor(state, find(state, len(mean), ALPHAS, lambda part, alpha: scaling(mean[part], alpha), rows))


def _planned(shape: tuple[int, int], parts: tuple[int, ...], params: dict, name: str) -> Planned:
    return Planned((("smooth", {}),))


def _check(params: dict) -> str:
    return "" if params.get("rows", 1) >= 1 else "rows is at least 1"


TRANSFORMS.register(Transform("awq", fit, order=1, needs_stats=True, planned=_planned, check=_check))
