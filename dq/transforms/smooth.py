"""Smoothing: `x' = x / lambda`, `W' = W * lambda`, with `lambda_k = a_k^alpha / w_k^beta`.

a_k = max over calibration tokens of |x_k|, w_k = max over all linears of the group and their rows of |W_nk|.
Source: SmoothQuant (arXiv 2211.10438, eq. 4: beta = 1 - alpha) and SVDQuant (arXiv 2411.05007, the searched grid).

ViDiT-Q (arXiv 2406.02540) writes the same with a mask, `x' = x * m`, `W' = W / m`, `m = w^alpha_v / a^(1 - alpha_v)`:
m = 1/lambda with alpha = 1 - alpha_v. Its static-dynamic scheme is this transform followed by a rotation; of its
example alpha_v = 0.5665: `transforms = [{ name = "smooth", alpha = 0.4335 }, "rotate"]`. PTQ4DiT (arXiv 2405.16005) is
alpha = 0.5 with `merge = "spearman"`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from dq.stats import Stat
from dq.transforms import TRANSFORMS, GroupState, Step, Transform, apply_steps, fake, idle_word, round_weight
from dq.transforms.lowrank import sketch_factors

# Candidates (alpha, beta), "no smoothing" first. `short`: alpha in steps that still tell neighbours apart, beta = 0 or
# 1 - alpha: 11 in place of the 39 of the source.
GRID = ((0.0, 0.0), *((a, b) for a in (0.2, 0.35, 0.5, 0.65, 0.8) for b in (0.0, 1.0 - a)))
_STEPS = tuple(i / 20 for i in range(1, 20))
GRIDS = {"short": GRID, "svdquant": ((0.0, 0.0), *((a, 0.0) for a in _STEPS), *((a, 1.0 - a) for a in _STEPS))}


def smoothing_factor(a: Tensor, w: Tensor, alpha: float, beta: float) -> Tensor:
    """lambda [K], float32; 1 where a channel is never active, its weight column is zero, or the result not finite."""
    scale = a.clamp(min=1e-5).pow(alpha) / w.clamp(min=1e-5).pow(beta)
    scale = scale.clamp(min=1e-5)
    return torch.where((a > 0) & (w > 0) & torch.isfinite(scale), scale, 1.0)


def output_error(state: GroupState, lam: Tensor, limit: int) -> float:
    """Sum over the group of ||y_q - y||^2 with weights and activations on their grids, low-rank branch present."""
    total, rank = 0.0, state.rank - max((len(down) for down, _ in state.side.values()), default=0)
    for members in state.inputs:
        x = state.rows(members[0], limit)
        w = torch.cat([state.weights[m] for m in members])
        xs, ws = x / lam, w * lam
        low = torch.zeros_like(ws)
        if rank > 0:
            up, down = sketch_factors(ws, rank)
            low = up @ down
        y = fake(xs, state.act_spec) @ round_weight(ws - low, state.weight_spec).T + xs @ low.T
        total += float((y - x @ w.T).square().sum())
    return total


def find(
    state: GroupState, width: int, grid: Iterable[Any], factor: Callable[[slice, Any], Tensor], limit: int
) -> Tensor:
    """The lambda [K] of least output error on `limit` rows: `factor(part, candidate)` over a grid, per part of the
    input, parts one after the other (each other part keeps its best so far). The first of equals stays."""
    lam, best = torch.ones(width), None
    for part in _slices(state):
        for candidate in grid:
            trial = lam.clone()
            trial[part] = factor(part, candidate)
            error = output_error(state, trial.to(next(iter(state.weights.values()))), limit)
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
    grid: str = "short",
    quantile: float = 1.0,
) -> None:
    """One lambda for the whole group.

    Args:
        alpha: migration strength when not searching (beta = 1 - alpha).
        merge, guidance: how maxima of step bins and CFG branches become one a_k; see `Stat.amax`.
        search: choose (alpha, beta) from a grid by output error on `rows` calibration rows.
        grid: `short` has 11 candidates, `svdquant` all 39 of its source.
        quantile: below 1, a_k is at most this quantile of |x_k| over the sampled tokens: a guard against massive
            activations, single tokens (a text's first, some of a video) far above all others.

    Raises:
        DQError: without calibration.
    """
    state.require_stats("smoothing")
    w = torch.stack([w.abs().amax(0) for w in state.weights.values()]).amax(0).float().cpu()
    a = torch.stack([_tops(s, merge, guidance, w, quantile) for s in state.stats.values()]).amax(0)
    a = apply_steps(a[None], state.steps)[0]  # what stands before works channel by channel, and is monotonic
    if search:
        lam = find(state, len(a), GRIDS[grid], lambda part, ab: smoothing_factor(a[part], w[part], *ab), rows)
    else:
        lam = smoothing_factor(a, w, alpha, 1.0 - alpha)
    add_factor(state, lam)


def _tops(stat: Stat, merge: str, guidance: float, w: Tensor, quantile: float) -> Tensor:
    top = stat.amax(merge, guidance=guidance, weight=w)
    return top if quantile >= 1 else torch.minimum(top, stat.rows.abs().quantile(quantile, dim=0))


def add_factor(state: GroupState, lam: Tensor) -> None:
    """Appends the step `x / lambda`, unless it would change nothing; two of them in a row become one."""
    if torch.equal(lam, torch.ones_like(lam)):
        return
    if state.steps and state.steps[-1].name == "smooth":
        last = state.steps.pop().tensors["factor"]
        state.weights = {n: w / last.to(w) for n, w in state.weights.items()}
        lam = lam * last.to(lam)
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
    if not good or not 0 < params.get("quantile", 1.0) <= 1 or params.get("grid", "short") not in GRIDS:
        lists = f"merge one of {', '.join(merges)}, grid one of {', '.join(GRIDS)}"
        return f"alpha is 0 to 1, rows at least 1, quantile above 0 and at most 1, {lists}"
    searched = dict.fromkeys(("rows", "grid"), ("search", True))
    return idle_word(params, {"alpha": ("search", False), "guidance": ("merge", "cfg")} | searched)


TRANSFORMS.register(Transform("smooth", fit, 1, _apply, _weight, _apply, _buffers, needs_stats=True, check=_check))
