"""Coordinate descent on the grid: one column after the other takes the grid point that is best beside all others.

    q_k <- Q(q_k - (E H)_k / H_kk),   E = q - W,   H = E[x x^T]

Every step can only lower `tr(E H E^T)`, whatever rounding it starts from, and it reaches further than the two grid
points around a weight. Source: QuantEase (arXiv 2309.01885, section 3).
"""

from __future__ import annotations

import torch
from torch import Tensor

from dq.spec import Format

BLOCK = 128


def nearest(values: Tensor, step: Tensor, zero: Tensor | None, fmt: Format) -> Tensor:
    """Grid points next to real values; `step` and `zero` as `code_steps` gives them."""
    if zero is None:
        return fmt.round(values / step) * step
    return ((torch.round(values / step) + zero).clamp(fmt.min, fmt.max) - zero) * step


def descend(
    values: Tensor, goal: Tensor, hessian: Tensor, steps: tuple[Tensor, Tensor | None], fmt: Format, *,
    fixed: Tensor | None = None, sweeps: int = 4,
) -> Tensor:  # fmt: skip
    """Values on the grid [N, F] after some sweeps over the columns; those that never carried a signal stay.

    Args:
        values: where it starts, [N, F] on the grid.
        goal: W [N, F].
        hessian: [F, F].
        steps: code step and zero point (or None) of every element, [N, F].
        fixed: [N, F], what further columns' error adds to `E H`.
    """
    values, diagonal = values.clone(), hessian.diagonal()
    alive, (step, zero) = (diagonal > 0).tolist(), steps
    for _ in range(sweeps):
        before, pull = values.clone(), (values - goal) @ hessian + (0.0 if fixed is None else fixed)
        for start in range(0, len(alive), BLOCK):
            block = slice(start, min(start + BLOCK, len(alive)))
            near, tile, old = pull[:, block].clone(), hessian[block, block], values[:, block].clone()
            for i, k in enumerate(range(block.start, block.stop)):
                if not alive[k]:
                    continue
                best = values[:, k] - near[:, i] / diagonal[k]
                q = nearest(best, step[:, k], None if zero is None else zero[:, k], fmt)
                near += (q - values[:, k])[:, None] * tile[i]
                values[:, k] = q
            pull[:, block.stop :] += (values[:, block] - old) @ hessian[block, block.stop :]
        if torch.equal(values, before):
            break
    return values
