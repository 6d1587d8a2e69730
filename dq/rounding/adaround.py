"""AdaRound: whether a weight is rounded down or up is learned; a soft choice h in [0, 1] hardens while it trains.

    q = lower + h (upper - lower),   h(v) = clip(1.2 sigmoid(v) - 0.1, 0, 1),   start: q = w
    K tr(E H E^T) / tr(E0 H E0^T) + strength * sum(1 - |2h - 1|^beta)  per row, E = W - q, E0 that of nearest rounding,
    H = E[x x^T];   no second term in the first 20 % of the steps, then beta falls from 20 to 2;   final h = (v >= 0)

lower and upper are the grid points around w: integers (zero points included), or the uneven ones of a small float. With
H the loss is that over all calibration tokens, not over a minibatch, and the first term's unit makes one strength fit
every layer. What hardening loses, sweeps of coordinate descent win back: on correlated inputs more than the learning
gains. Sources: AdaRound (arXiv 2004.10568, section 3); uneven grids as in FAAR; the unit and the sweeps are our own.
"""

from __future__ import annotations

import warnings
from dataclasses import dataclass

import torch
from torch import Tensor

from dq.columns import code_steps
from dq.qtensor import QTensor, Scales, choose_scale, encode
from dq.registry import DQError
from dq.rounding import ROUNDINGS, Job, Rounding
from dq.rounding.descent import descend
from dq.spec import Format, QuantSpec

STRETCH, GAMMA = 1.2, -0.1  # zeta - gamma, and gamma, of the rectified sigmoid
BETA = (20.0, 2.0)
CHUNK = 1 << 25  # weights optimised at once: four float32 numbers are kept for each
MOST = 100_000
MARGIN = 0.4  # how far from undecided a choice starts that was made before


def choice(v: Tensor) -> Tensor:
    """h(v) = clip(1.2 sigmoid(v) - 0.1, 0, 1)."""
    return (STRETCH * torch.sigmoid(v) + GAMMA).clamp(0.0, 1.0)


def start(rest: Tensor) -> Tensor:
    """The v with h(v) = rest, for rest in [0, 1]."""
    return -torch.log(STRETCH / (rest - GAMMA) - 1.0)


def beta(step: int, steps: int, warmup: float = 0.2) -> float | None:
    """Exponent of the regulariser: 20 at the end of the warm-up, falling to 2 in a straight line; None before it."""
    first = warmup * steps
    return None if step < first else BETA[1] + (BETA[0] - BETA[1]) * (1.0 - (step - first) / max(steps - first, 1e-9))


def regulariser(h: Tensor, exponent: float) -> Tensor:
    """`sum(1 - |2h - 1|^beta)`: the number of undecided choices, softened."""
    return (1.0 - (2.0 * h - 1.0).abs().pow(exponent)).sum()


def grid_points(fmt: Format) -> Tensor:
    """All finite values of a format of at most 8 bits, ascending, in code steps."""
    codes = torch.arange(2**fmt.bits, dtype=torch.uint8)
    values = fmt.decode(codes.view(fmt.dtype) if fmt.bits == 8 else codes) + 0.0  # -0 and 0 are one value
    return values[torch.isfinite(values) & (values >= fmt.min) & (values <= fmt.max)].unique()


def _pair(below: Tensor, weight: Tensor, scales: Scales, spec: QuantSpec) -> tuple[Tensor, Tensor]:
    """The grid points of index `below` and `below + 1`, as weights; both the border outside the grid."""
    step, zero = code_steps(scales, spec, tuple(weight.shape))
    points, offset = grid_points(spec.fmt).to(weight), 0.0 if zero is None else zero
    found = ((points[(below + i).clamp(0, len(points) - 1)] - offset) * step for i in (0, 1))
    return tuple(found)


def _in_steps(weight: Tensor, scales: Scales, spec: QuantSpec) -> Tensor:
    step, zero = code_steps(scales, spec, tuple(weight.shape))
    return torch.where(step > 0, weight / step, 0.0) + (0.0 if zero is None else zero)


def neighbours(weight: Tensor, scales: Scales, spec: QuantSpec) -> tuple[Tensor, Tensor]:
    """The grid points (lower, upper) around every weight [N, K], float32; both the border where it lies outside."""
    points = grid_points(spec.fmt).to(weight)
    at = torch.bucketize(_in_steps(weight, scales, spec), points, right=True, out_int32=True)
    return _pair(at - 1, weight, scales, spec)


def beside(values: Tensor, weight: Tensor, scales: Scales, spec: QuantSpec) -> tuple[Tensor, Tensor]:
    """Grid points (lower, upper), one of which is `values` [N, K] (on the grid), the other one next to it towards
    `weight`: the choice that is left to a weight that was rounded before, wherever to."""
    points = grid_points(spec.fmt).to(weight)
    at = torch.bucketize(_in_steps(values, scales, spec), (points[1:] + points[:-1]) / 2, out_int32=True)
    return _pair(torch.where(weight >= values, at, at - 1), weight, scales, spec)


@dataclass
class Soft:
    """Weights [N, K] on their way to the grid: `lower + h(v) gap`."""

    lower: Tensor
    gap: Tensor
    v: Tensor

    @classmethod
    def of(cls, weight: Tensor, scales: Scales, spec: QuantSpec, values: Tensor | None = None) -> Soft:
        """Starts at the weight; from `values` on the grid, if given: it then hardens to them unless it learns."""
        lower, upper = neighbours(weight, scales, spec) if values is None else beside(values, weight, scales, spec)
        gap = upper - lower
        rest = torch.where(gap > 0, (weight - lower) / gap, 0.0).clamp(0.0, 1.0)
        if values is not None:
            rest = torch.where(values <= lower, rest.clamp(max=0.5 - MARGIN), rest.clamp(min=0.5 + MARGIN))
        return cls(lower, gap, start(rest))

    def values(self) -> Tensor:
        return self.lower + choice(self.v) * self.gap

    def hard(self) -> Tensor:
        return torch.where(self.v >= 0, self.lower + self.gap, self.lower)


def row_errors(error: Tensor, hessian: Tensor) -> Tensor:
    """[N]: `e H e^T` of every row of an error [N, K]."""
    return ((error @ hessian) * error).sum(1)


def _gradient(soft: Soft, pull: Tensor, exponent: float | None, strength: float) -> Tensor:
    """Of the objective in v; `pull` [N, K] is that of its first term in q."""
    s = torch.sigmoid(soft.v)
    h = STRETCH * s + GAMMA
    slope = pull * soft.gap
    if exponent is not None:
        side = 2.0 * h.clamp(0.0, 1.0) - 1.0
        slope = slope - 2.0 * strength * exponent * side.abs().pow(exponent - 1.0) * side.sign()
    return torch.where((h >= 0) & (h <= 1), slope * STRETCH * s * (1.0 - s), 0.0)


def _learn(soft: Soft, weight: Tensor, hessian: Tensor, fixed: Tensor, unit: Tensor, settings: dict) -> Tensor:
    """Hard values [N, F] of the free columns.

    Args:
        weight: their goal.
        hessian: [F, F].
        fixed: [N, F], what the other columns' error adds to `E H`.
        unit: [N, 1], the error of nearest rounding per column.
    """
    steps = settings["iters"]
    optimizer = torch.optim.Adam([soft.v], settings["lr"])
    for i in range(steps):
        pull = ((soft.values() - weight) @ hessian + fixed).mul_(2.0 / unit)
        soft.v.grad = _gradient(soft, pull, beta(i, steps, settings["warmup"]), settings["strength"])
        optimizer.step()
    return soft.hard()


def adaround(
    job: Job, iters: int = 1000, lr: float = 0.01, strength: float = 10.0, warmup: float = 0.2, sweeps: int = 4
) -> tuple[QTensor, QTensor | None]:
    """AdaRound at scales chosen beforehand by the spec's rule. Deterministic. A row that did not gain keeps nearest
    rounding, so that `tr(E H E^T)` is never larger than that. Columns with a weight residual are rounded to nearest:
    what they lose is carried by the residual, and the other columns make good what that still loses.

    Args:
        iters: Adam steps.
        lr: their size; 0.01 over 1000 steps goes as far as the paper's 0.001 over 10000.
        strength: of the regulariser, in the unit above (the paper's 0.01 has the unit of the output's square).
        warmup: share of the steps without it.
        sweeps: of coordinate descent at the end, see dq.rounding.descent.

    Raises:
        DQError: no Hessian (no calibration), or NaN/Inf in it.
    """
    if job.hessian is None:
        raise DQError(f"{job.name}: adaround needs calibration: pass calibration=dq.Prompts([...])")
    hessian, weight = job.hessian.to(torch.float32), job.weight.to(torch.float32)
    if not torch.isfinite(hessian).all():
        raise DQError(
            f"{job.name}: the Hessian of the calibration inputs holds NaN or Inf; inputs too large to square?"
        )
    if job.mean is not None:
        hessian = hessian - torch.outer(job.mean, job.mean).to(hessian)
    scales = choose_scale(weight, job.spec, job.amax, **job.statistics())
    main = encode(weight, scales, job.spec)
    if job.spec.fmt.identity:
        return main, job.left_over(main)
    settings = dict(iters=iters, lr=lr, strength=strength, warmup=warmup, sweeps=sweeps)
    values, gained = _rounded(job, weight, hessian, main, settings)
    lost = len(gained) - int(gained.sum())
    if 2 * lost > len(gained):
        what = f"adaround gained nothing on {lost} of {len(gained)} rows, which keep nearest rounding"
        warnings.warn(f"{job.name}: {what}; give it more iters or sweeps", stacklevel=2)
    main = encode(values, scales, job.spec)
    return main, job.left_over(main)


def _rounded(job: Job, weight: Tensor, hessian: Tensor, nearest: QTensor, settings: dict) -> tuple[Tensor, Tensor]:
    """Values on the grid [N, K], and which rows gained over nearest rounding [N] (rows without any error count)."""
    free = weight.shape[1] - job.residual
    values, rest = nearest.dequantize(), job.left_over(nearest)
    error = values - weight
    if rest is not None:
        error[:, free:] += rest.dequantize()
    before = row_errors(error, hessian)
    gained = before <= 0
    inner, fixed = hessian[:free, :free], error[:, free:] @ hessian[free:, :free]
    whole, grid = Soft.of(weight, nearest.scales, job.spec), code_steps(nearest.scales, job.spec, tuple(weight.shape))
    for rows in torch.arange(len(weight), device=weight.device).split(max(1, CHUNK // max(free, 1))):
        soft = Soft(*(t[rows, :free].contiguous() for t in (whole.lower, whole.gap, whole.v)))
        goal, start_at, rest = weight[rows, :free], values[rows, :free], error[rows, free:]
        unit = (before[rows, None] / max(free, 1)).clamp(min=torch.finfo(torch.float32).tiny)
        hard = _learn(soft, goal, inner, fixed[rows], unit, settings)
        won = row_errors(torch.cat([hard - goal, rest], 1), hessian) < before[rows]
        hard = torch.where(won[:, None], hard, start_at)
        steps = tuple(None if t is None else t[rows, :free] for t in grid)
        hard = descend(hard, goal, inner, steps, job.spec.fmt, fixed=fixed[rows], sweeps=settings["sweeps"])
        won = row_errors(torch.cat([hard - goal, rest], 1), hessian) < before[rows]
        values[rows, :free] = torch.where(won[:, None], hard, start_at)
        gained[rows] |= won
    return values, gained


def _check(params: dict) -> str:
    if not 1 <= params.get("iters", 1000) <= MOST:
        return f"iters is 1 to {MOST}"
    if params.get("lr", 0.01) <= 0 or params.get("strength", 10.0) < 0 or params.get("sweeps", 4) < 0:
        return "lr is above 0, strength and sweeps are at least 0"
    return "" if 0 <= params.get("warmup", 0.2) < 1 else "warmup is a share of the steps, from 0 to below 1"


ROUNDINGS.register(Rounding("adaround", adaround, needs_stats=True, needs_gram=True, check=_check))
