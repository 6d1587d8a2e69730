"""Smoothing: `x' = x / lambda`, `W' = W * lambda`, with `lambda_k = a_k^alpha / w_k^beta`.

a_k = max over calibration tokens of |x_k|, w_k = max over all linears of the group and their rows of |W_nk|.
Source: SmoothQuant (arXiv 2211.10438, eq. 4: beta = 1 - alpha) and SVDQuant (arXiv 2411.05007, the searched grid).
"""

from __future__ import annotations

from itertools import pairwise

import torch
from torch import Tensor

from dq.transforms import TRANSFORMS, GroupState, Step, Transform, fake, round_weight
from dq.transforms.lowrank import sketch_factors

# 11 candidates stand for the 39 of the source: alpha in steps that still tell neighbours apart, beta = 0 or 1 - alpha.
GRID = ((0.0, 0.0), *((a, b) for a in (0.2, 0.35, 0.5, 0.65, 0.8) for b in (0.0, 1.0 - a)))


def smoothing_factor(a: Tensor, w: Tensor, alpha: float, beta: float) -> Tensor:
    """lambda [K], float32; 1 where a channel is never active, its weight column is zero, or the result not finite."""
    scale = a.clamp(min=1e-5).pow(alpha) / w.clamp(min=1e-5).pow(beta)
    scale = scale.clamp(min=1e-5)
    return torch.where((a > 0) & (w > 0) & torch.isfinite(scale), scale, 1.0)


def _error(state: GroupState, lam: Tensor, limit: int) -> float:
    """Sum over the group of ||y_q - y||^2 with weights and activations on their grids, low-rank branch present."""
    total = 0.0
    for members in state.inputs:
        x = state.rows(members[0], limit)
        w = torch.cat([state.weights[m] for m in members])
        xs, ws = x / lam, w * lam
        low = torch.zeros_like(ws)
        if state.rank:
            up, down = sketch_factors(ws, state.rank)
            low = up @ down
        y = fake(xs, state.act_spec) @ round_weight(ws - low, state.weight_spec).T + xs @ low.T
        total += float((y - x @ w.T).square().sum())
    return total


def _search(state: GroupState, a: Tensor, w: Tensor, limit: int) -> Tensor:
    """Best candidate per part of the input, parts one after the other (each other part keeps its best so far)."""
    lam, best = torch.ones_like(a), None
    for part in _slices(state):
        for alpha, beta in GRID:
            trial = lam.clone()
            trial[part] = smoothing_factor(a[part], w[part], alpha, beta)
            error = _error(state, trial.to(next(iter(state.weights.values()))), limit)
            if best is None or error < best[0]:
                best = (error, trial)
        lam = best[1]
    return lam


def _slices(state: GroupState) -> list[slice]:
    edges = [0]
    for width in state.k_parts or (state.width,):
        edges.append(edges[-1] + width)
    return [slice(i, j) for i, j in pairwise(edges)]


def fit(
    state: GroupState,
    alpha: float = 0.5,
    search: bool = False,
    rows: int = 256,
    merge: str = "max",
    guidance: float = 1.0,
) -> None:
    """One lambda for the whole group.

    Args:
        alpha: migration strength when not searching (beta = 1 - alpha).
        merge, guidance: how maxima of step bins and CFG branches become one a_k; see `Stat.amax`.
        search: choose (alpha, beta) from `GRID` by output error on `rows` calibration rows.

    Raises:
        DQError: without calibration.
    """
    state.require_stats("smoothing")
    w = torch.stack([w.abs().amax(0) for w in state.weights.values()]).amax(0).float().cpu()
    a = torch.stack([s.amax(merge, guidance=guidance, weight=w) for s in state.stats.values()]).amax(0)
    lam = _search(state, a, w, rows) if search else smoothing_factor(a, w, alpha, 1.0 - alpha)
    if not torch.equal(lam, torch.ones_like(lam)):
        state.add(Step("smooth", {"factor": lam}))


def _apply(x: Tensor, tensors: dict, params: dict) -> Tensor:
    return x / tensors["factor"].to(x)


def _weight(w: Tensor, tensors: dict, params: dict) -> Tensor:
    return w * tensors["factor"].to(w)


def _buffers(width: int, params: dict) -> dict[str, tuple[int, ...]]:
    return {"factor": (width,)}


def _check(params: dict) -> str:
    merges = ("max", "mean", "cfg", "spearman")
    good = 0 <= params.get("alpha", 0) <= 1 and params.get("rows", 1) >= 1 and params.get("merge", "max") in merges
    return "" if good else f"alpha is 0 to 1, rows at least 1, merge one of {', '.join(merges)}"


TRANSFORMS.register(Transform("smooth", fit, 1, _apply, _weight, _apply, _buffers, needs_stats=True, check=_check))
