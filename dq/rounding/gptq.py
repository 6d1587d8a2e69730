"""GPTQ: columns are rounded one after the other, and each error is made good by the columns still to come.

    H' = E[x x^T] + damp * mean(diag H) I,   H'^-1 = U^T U (U upper triangular)
    for every column j, in order:  q = Q(w_j),  W[:, j:] -= (w_j - q) / U_jj * U[j, j:]

minimises `E|W x - Q x|^2` greedily. Sources: GPTQ (arXiv 2210.17323, algorithm 1); static act-order (all scales chosen
beforehand in natural order, only the visiting order follows diag H) as in MR-GPTQ (arXiv 2509.23202); the target that
knows the executed input is our own, after GPTAQ (arXiv 2504.02692).
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import NamedTuple

import torch
from torch import Tensor

from dq.columns import code_steps
from dq.qtensor import QTensor, Scales, choose_scale, encode
from dq.registry import DQError, Registry
from dq.rounding import ROUNDINGS, Job, Rounding
from dq.spec import Format

BLOCK = 128
DAMPS = 3  # escalations, by 10 each, before giving up


class Grid(NamedTuple):
    """One code step at every element [N, n] of some columns, and zero points in code steps or None."""

    step: Tensor
    zero: Tensor | None
    fmt: Format


@dataclass
class _Stage:
    """One quantizer of all columns: its scales, and what one code step is worth at every element [N, K]."""

    job: Job
    scales: Scales
    step: Tensor
    zero: Tensor | None

    @classmethod
    def of(cls, weight: Tensor, job: Job, start: int = 0) -> _Stage:
        scales = choose_scale(weight, job.spec, job.amax, **job.statistics(start))
        step, zero = code_steps(scales, job.spec, tuple(weight.shape))
        return cls(job, scales, step, zero)

    def at(self, columns: Tensor) -> tuple[Tensor, Tensor | None]:
        """Step and zero point of these columns, [N, n] each."""
        zero = None if self.zero is None else self.zero[:, columns].contiguous()
        return self.step[:, columns].contiguous(), zero


def _round(column: Tensor, step: Tensor, zero: Tensor | None, fmt: Format) -> Tensor:
    if zero is None:
        return fmt.round(column / step) * step
    return ((torch.round(column / step) + zero).clamp(fmt.min, fmt.max) - zero) * step


def executed_target(weight: Tensor, hessian: Tensor, gain: Tensor, noise: Tensor) -> tuple[Tensor, Tensor]:
    """(W*, H*): the least-squares weight for the input as it is executed, and that input's second moment.

    With the executed input `x^ = G x + e` (G diagonal, e independent with variances D):
    `H* = G H G + D` and `W* = W H G H*^-1` minimise `E|W x - W* x^|^2`; then `E|W x - Q x^|^2` is that minimum plus
    `(W* - Q) H* (W* - Q)^T`, which GPTQ takes over. Where inputs are correlated, W* averages noise out.
    """
    cross = hessian * gain  # H G
    executed = cross * gain[:, None]
    executed = executed + torch.diag(noise)
    # Ridge towards W itself: directions without signal keep their weight, all of them where there is none at all.
    ridge = 1e-4 * executed.diagonal().mean().clamp(min=1e-30) * torch.eye(len(executed)).to(executed)
    target = torch.linalg.solve((executed + ridge).double(), (cross + ridge).T.double() @ weight.T.double()).T
    return target.to(weight), executed


def inverse_factor(hessian: Tensor, damp: float, name: str) -> Tensor | None:
    """U upper triangular with `(H + damp * mean(diag H) I)^-1 = U^T U`; None if H is degenerate at any damping."""
    scale = hessian.diagonal().mean()
    for _ in range(DAMPS + 1):
        damped = hessian + (damp * scale) * torch.eye(len(hessian)).to(hessian)
        low, info = torch.linalg.cholesky_ex(damped)
        if not info and torch.isfinite(low).all():
            upper, info = torch.linalg.cholesky_ex(torch.cholesky_inverse(low), upper=True)
            if not info and torch.isfinite(upper).all():
                return upper
        damp *= 10.0
    warnings.warn(f"{name}: the Hessian stays degenerate at damping {damp / 10:g}; rounded to nearest", stacklevel=2)
    return None


def _block(
    work: Tensor, u: Tensor, first: Grid, second: Grid | None, kept: Sequence[bool] | None, mask: Tensor | None
) -> tuple[Tensor, Tensor, Tensor]:
    """One block of columns, `work` [N, b] in visiting order, changed in place.

    Args:
        second: the grid of what the first one lost.
        kept: which columns have it; None asks `mask` [b], ones and zeros: the same work for every answer.

    Returns:
        first-stage values, second-stage values (0 where there is none) and errors, [N, b] each.
    """
    main, errors = torch.empty_like(work), torch.empty_like(work)
    rest = torch.zeros_like(work)
    for i in range(work.shape[1]):
        column = work[:, i]
        q = _round(column, first.step[:, i], None if first.zero is None else first.zero[:, i], first.fmt)
        main[:, i] = q
        if second is not None and (kept is None or kept[i]):
            zero = None if second.zero is None else second.zero[:, i]
            more = _round(column - q, second.step[:, i], zero, second.fmt)
            rest[:, i] = more if mask is None else more * mask[i]
            q = q + rest[:, i]
        error = (column - q) / u[i, i]
        work[:, i:] -= error[:, None] * u[i, i:]
        errors[:, i] = error
    return main, rest, errors


class _Captured:
    """`_block` as a CUDA graph: thousands of launches of a few rows each, which otherwise wait for Python."""

    def __init__(self, rows: int, width: int, device: torch.device, kinds: tuple[tuple[Format, bool], ...]):
        def empty(*size: int) -> Tensor:
            return torch.ones(size, device=device)

        self.work, self.u = empty(rows, width), torch.eye(width, device=device)
        self.mask = torch.zeros(width, device=device)
        self.grids = [Grid(empty(rows, width), empty(rows, width) if zero else None, fmt) for fmt, zero in kinds]
        side = torch.cuda.Stream(device)
        side.wait_stream(torch.cuda.current_stream(device))
        with torch.cuda.stream(side):
            self._run()
        torch.cuda.current_stream(device).wait_stream(side)
        self.graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self.graph):
            self.results = self._run()

    def _run(self) -> tuple[Tensor, Tensor, Tensor]:
        return _block(self.work, self.u, self.grids[0], self.grids[1] if len(self.grids) > 1 else None, None, self.mask)

    def __call__(self, work: Tensor, u: Tensor, grids: Sequence[Grid], kept: Sequence[bool]) -> tuple[Tensor, ...]:
        self.work.copy_(work)
        self.u.copy_(u)
        self.mask.copy_(torch.tensor(kept, dtype=torch.float32))
        for mine, other in zip(self.grids, grids, strict=True):
            mine.step.copy_(other.step)
            if mine.zero is not None:
                mine.zero.copy_(other.zero)
        self.graph.replay()
        return tuple(t.clone() for t in self.results)


@dataclass(frozen=True)
class BlockKernel:
    """A kernel that does what `_block` does, with its bits: `(block [N, b], grids) -> reason` why not, and what runs on
    `(block, u, grids, kept)` and leaves the block as it is."""

    name: str
    refuse: Callable[[Tensor, Sequence[Grid]], str]
    run: Callable[[Tensor, Tensor, Sequence[Grid], Sequence[bool]], tuple[Tensor, Tensor, Tensor]]


BLOCK_KERNELS: Registry[BlockKernel] = Registry("block kernel", "dq.kernels.quantize")
_captured = lru_cache(maxsize=32)(_Captured)
_CHECKED: dict[tuple, bool] = {}  # what a kernel or graph was asked for -> whether it gave what the loop itself gives


def _fast(key: tuple, block: Tensor, grids: Sequence[Grid]) -> Callable[..., tuple[Tensor, ...]]:
    """A kernel that takes the block, else the loop as a graph."""
    return next((k.run for k in BLOCK_KERNELS if not k.refuse(block, grids)), None) or _captured(*key)


def _columns(block: Tensor, u: Tensor, grids: Sequence[Grid], kept: Sequence[bool]) -> tuple[Tensor, ...]:
    """`_block` of a copy; on CUDA by a kernel or as a graph, whose first result has to be that of the loop."""
    second = grids[1] if len(grids) > 1 else None
    key = (*block.shape, block.device, tuple((g.fmt, g.zero is not None) for g in grids))
    if not block.is_cuda or _CHECKED.get(key) is False:
        return _block(block.clone(), u, grids[0], second, kept, None)
    if key in _CHECKED:
        return _fast(key, block, grids)(block, u, grids, kept)
    wanted = _block(block.clone(), u, grids[0], second, kept, None)
    try:
        found = _fast(key, block, grids)(block, u, grids, kept)
        _CHECKED[key] = all(torch.allclose(a, b) for a, b in zip(wanted, found, strict=True))
    except RuntimeError:  # an operation of the format that no graph takes
        _CHECKED[key] = False
    return wanted


def _sweep(weight: Tensor, upper: Tensor, order: Tensor, stages: list[_Stage], split: int) -> tuple[Tensor, Tensor]:
    """The loop. Columns arrive in visiting order; `order[i]` is the natural column of position i.

    Returns:
        first-stage values [N, K] and second-stage values [N, K - split], in natural order.
    """
    main, work = torch.empty_like(weight), weight
    rest, natural = torch.zeros_like(weight), order.tolist()
    for start in range(0, len(natural), BLOCK):
        stop = min(start + BLOCK, len(natural))
        at, kept = order[start:stop], [j >= split for j in natural[start:stop]]
        grids = [Grid(*stages[0].at(at), stages[0].job.spec.fmt)]
        if len(stages) > 1:
            grids.append(Grid(*stages[1].at((at - split).clamp(min=0)), stages[1].job.spec.fmt))
        block, u = work[:, start:stop], upper[start:stop, start:stop]
        main[:, at], rest[:, at], errors = _columns(block, u, grids, kept)
        work[:, stop:] -= errors @ upper[start:stop, stop:]
    return main, rest[:, split:]


def gptq(job: Job, damp: float = 0.01, order: bool = True, executed: bool = False) -> tuple[QTensor, QTensor | None]:
    """GPTQ at scales chosen beforehand by the spec's rule (weighted rules take diag H).

    Args:
        damp: added to the diagonal, in units of its mean; times 10 while the factorisation fails, at most three times.
        order: visit columns by falling diag H (act-order with static groups: costs nothing at run time).
        executed: aim at `W x` from the input as the activation grid delivers it, see `executed_target`.

    Raises:
        DQError: no Hessian (no calibration), or NaN/Inf in it.
    """
    if job.hessian is None:
        raise DQError(f"{job.name}: gptq needs calibration: pass calibration=dq.Prompts([...])")
    if not torch.isfinite(job.hessian).all():
        raise DQError(
            f"{job.name}: the Hessian of the calibration inputs holds NaN or Inf; inputs too large to square?"
        )
    weight, hessian = job.weight.to(torch.float32), job.hessian.to(torch.float32)
    if job.mean is not None:
        hessian = hessian - torch.outer(job.mean, job.mean).to(hessian)
    if executed and job.noise is not None:
        weight, hessian = executed_target(weight, hessian, job.gain, job.noise)
    job = replace(job, weight=weight, hessian=hessian)
    dead = hessian.diagonal() <= 0
    hessian = hessian + torch.diag(dead.to(hessian))
    split = weight.shape[1] - job.residual
    stages = [_Stage.of(weight, job)]
    if job.residual:
        first = encode(weight, stages[0].scales, job.spec).dequantize()
        stages.append(_Stage.of((weight - first)[:, split:], job, split))
    natural = torch.arange(weight.shape[1], device=weight.device)
    visit = hessian.diagonal().argsort(descending=True, stable=True) if order else natural
    upper = inverse_factor(hessian[visit][:, visit], damp, job.name)
    if upper is None:
        return _nearest(weight, stages, split)
    # Columns that never carried a signal keep their rounded weight: an input outside the calibration may use them.
    main, rest = _sweep(weight[:, visit].contiguous(), upper, visit, stages, split)
    return _encoded(main, rest, stages)


def _nearest(weight: Tensor, stages: list[_Stage], split: int) -> tuple[QTensor, QTensor | None]:
    main = encode(weight, stages[0].scales, stages[0].job.spec)
    return _encoded(main.dequantize(), (weight - main.dequantize())[:, split:], stages)


def _encoded(main: Tensor, rest: Tensor, stages: list[_Stage]) -> tuple[QTensor, QTensor | None]:
    """Codes of values that lie on the grid already."""
    done = [encode(v, s.scales, s.job.spec) for v, s in zip((main, rest), stages, strict=False)]
    return done[0], done[1] if len(done) > 1 else None


def _check(params: dict) -> str:
    return "" if params.get("damp", 0.01) > 0 else "damp is above 0"


ROUNDINGS.register(Rounding("gptq", gptq, needs_stats=True, needs_gram=True, check=_check))
