"""Low-rank absorption: `W' = L_up L_down + R`; L stays in 16 bits beside the quantized R.

The factors are stored in the raw basis (un-smoothed, un-rotated), so the branch reads the layer's own input and a LoRA
is exact beside it. Linears that share a down factor (q, k, v) are decomposed stacked along N.
Source: SVDQuant (arXiv 2411.05007, section 4) with the alternating refinement of its reference implementation.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

from dq.registry import DQError
from dq.transforms import TRANSFORMS, GroupState, Planned, Transform, round_weight


def auto_rank(width: int) -> int:
    """K/96 rounded to a multiple of 8, at least 8 (32 at K = 3072)."""
    return max(8, round(width / 96 / 8) * 8)


def svd_factors(w: Tensor, rank: int) -> tuple[Tensor, Tensor]:
    """Best rank-`rank` approximation `up @ down` of w [N, K]; sqrt(sigma) on both sides.

    Balanced factors keep a 16-bit copy of either side equally accurate. Uses eigenvectors of the smaller Gram matrix in
    float64: exact to far below 16-bit rounding, and an order of magnitude cheaper than a full SVD.
    """
    rank = min(rank, *w.shape)
    a = w.to(torch.float64)
    tall = a.shape[0] >= a.shape[1]
    gram = a.T @ a if tall else a @ a.T
    basis = torch.linalg.eigh(gram).eigenvectors[:, -rank:].flip(-1)
    other = a @ basis if tall else a.T @ basis
    root = other.norm(dim=0).clamp(min=torch.finfo(torch.float64).tiny).sqrt()
    up, down = (other / root, (basis * root).T) if tall else (basis * root, (other / root).T)
    return up.to(w.dtype), down.to(w.dtype)


def sketch_factors(w: Tensor, rank: int, iterations: int = 2) -> tuple[Tensor, Tensor]:
    """`svd_factors` by subspace iteration from a fixed start: close to the best approximation and many times cheaper.

    For searches, which only compare candidates. Source: Halko, Martinsson, Tropp (SIAM Review 2011), algorithm 4.4.
    """
    rank = min(rank, *w.shape)
    start = torch.randn(w.shape[1], min(rank + 8, *w.shape), generator=torch.Generator().manual_seed(0))
    basis = start.to(w)
    for _ in range(iterations):
        basis = torch.linalg.qr(w.T @ torch.linalg.qr(w @ basis).Q).Q
    u, s, v = torch.linalg.svd(w @ basis, full_matrices=False)
    root = s[:rank].sqrt()
    return u[:, :rank] * root, root[:, None] * (v[:rank] @ basis.T)


def _objective(state: GroupState, names: tuple[str, ...]):
    """(low, quantized residual) -> squared output error on calibration rows, or squared weight error without them."""
    w = torch.cat([state.weights[n] for n in names])
    x = state.rows(names[0], 256)
    if x is None:
        return lambda low, residual: float((w - low - residual).square().sum())
    y, xq = x @ w.T, state.executed(x)
    return lambda low, residual: float((xq @ residual.T + x @ low.T - y).square().sum())


def decompose(w: Tensor, rank: int, spec, error, iterations: int, factors=svd_factors) -> tuple[Tensor, Tensor]:
    """`L_i = SVD_r(W - Q_{i-1})`, `Q_i = RTN(W - L_i)`; keeps the best, stops at the first non-improvement."""
    best, best_error, residual = None, float("inf"), torch.zeros_like(w)
    for _ in range(max(1, iterations)):
        up, down = factors(w - residual, rank)
        residual = round_weight(w - up @ down, spec)
        now = error(up @ down, residual)
        if now >= best_error:
            break
        best, best_error = (up, down), now
    return best if best is not None else (up, down)


def absorb(state: GroupState, name: str, down: Tensor, up: Tensor) -> None:
    """Adds factors on the raw x, down [r, K] and up [N, r] in their storage dtype, to the side branch of one linear,
    and takes what they stand for out of its W'."""
    w, (downs, ups) = state.weights[name], state.side.get(name, (down[:0], up[:, :0]))
    state.side[name] = (torch.cat([downs, down]), torch.cat([ups, up], 1))
    state.weights[name] = w - up.to(w) @ state.to_basis(down.to(w))


WEIGHTINGS = ("none", "hessian", "noise")
ROUNDED = 0.009  # relative squared error of a 4-bit weight: how much of its residual a rounding loses


def _metric(state: GroupState, name: str, weighting: str) -> tuple[Tensor, Tensor] | None:
    """(R, R^-1), each [K, K], or diagonals [K]: the SVD is taken of W R, so that it minimises `|(W - L) R|^2`."""
    if weighting == "none":
        return None
    hessian = state.hessian(name)
    if hessian is None:
        raise DQError(f"a low rank weighted by {weighting} needs calibration (layer {name})")
    if not torch.isfinite(hessian).all():
        raise DQError(f"{name}: the Hessian of the calibration inputs holds NaN or Inf; inputs too large to square?")
    if weighting == "hessian":
        values, vectors = torch.linalg.eigh(hessian.to(torch.float64))
        root = values.clamp(min=_floor(values)).sqrt()
        return (vectors * root).to(hessian), (vectors / root).T.to(hessian)
    error = state.activation_error(name)
    power = ROUNDED * hessian.diagonal() + (0.0 if error is None else error[1].to(hessian))
    root = power.clamp(min=_floor(power)).sqrt()
    return root, 1.0 / root


def _floor(power: Tensor) -> float:
    """Least power that counts: nothing is divided by 0, and where there is no signal at all, all are equal."""
    return 1e-4 * float(power.mean()) or 1.0


def _solver(metric: tuple[Tensor, Tensor] | None, randomized: bool) -> Callable[[Tensor, int], tuple[Tensor, Tensor]]:
    """`(w, rank) -> (up, down)`: exact or by a sketch, of w or of w R."""

    def factors(w: Tensor, rank: int) -> tuple[Tensor, Tensor]:
        solve = partial(sketch_factors, iterations=4) if randomized else svd_factors
        if metric is None:
            return solve(w, rank)
        root, inverse = (m.to(w) for m in metric)
        up, down = solve(w * root if root.dim() == 1 else w @ root, rank)
        return up, down * inverse if inverse.dim() == 1 else down @ inverse

    return factors


def fit(
    state: GroupState, rank: int = 0, iterations: int = 10, weighting: str = "none", randomized: bool = False
) -> None:
    """Moves a rank-r part of every weight of the group into its side branch.

    Args:
        rank: r; 0 takes `auto_rank(K)`.
        iterations: bound on the alternation; 1 is the plain SVD.
        weighting: what the rank is spent on. `none`: the weight itself (SVDQuant). `hessian`: the layer's output,
            `SVD(W H^1/2) H^-1/2` (QERA, arXiv 2410.06040). `noise`: what rounding will lose of the rest, every channel
            weighted by its activation noise and by the share of its power that weight rounding loses.
        randomized: decompose by a sketch, `sketch_factors`: nearly as good, and much faster for large N and K.
    """
    rank = rank or auto_rank(state.width)
    sets = state.lowrank or tuple((n,) for n in state.weights)
    for names in sets:
        w = torch.cat([state.weights[n] for n in names])
        solver = _solver(_metric(state, names[0], weighting), randomized)
        up, down = decompose(w, rank, state.weight_spec, _objective(state, names), iterations, solver)
        # Round to the storage dtype first and subtract what is really stored: its rounding then costs nothing.
        raw = state.from_basis(down).to(state.side_dtype)
        up, start = up.to(state.side_dtype), 0
        for n in names:
            part = up[start : start + len(state.weights[n])]
            start += len(part)
            absorb(state, n, raw, part)


def _check(params: dict) -> str:
    good = params.get("rank", 0) >= 0 and params.get("iterations", 1) >= 1
    good = good and params.get("weighting", "none") in WEIGHTINGS
    words = f"rank is at least 0 (0 chooses by the width), iterations at least 1, weighting one of {WEIGHTINGS}"
    return "" if good else words


def _planned(shape: tuple[int, int], parts: tuple[int, ...], params: dict, name: str) -> Planned:
    asked, whole = params.get("rank", 0), min(shape)
    remark = f"rank {asked} is more than a matrix of {shape[0]}x{shape[1]} has: {whole}" if asked > whole else ""
    return Planned(rank=min(asked or auto_rank(shape[1]), whole), remark=remark)


TRANSFORMS.register(
    Transform(
        "lowrank",
        fit,
        order=4,
        needs_gram=lambda params: params.get("weighting", "none") != "none",
        planned=_planned,
        check=_check,
    )
)
