"""Rules that trade clipping against rounding: `percentile`, `mse` (any Lp norm) and `imatrix` (input-weighted)."""

from __future__ import annotations

from collections.abc import Iterator

from torch import Tensor

from dq.scales import SCALE_RULES, Blocks, ScaleRule, best_of, storable


def percentile(blocks: Blocks, p: float = 99.9) -> Tensor:
    """The p-th percentile of |x| of a block, linearly interpolated, lands on the largest code."""
    a = blocks.x.abs()
    at = (a.shape[-1] - 1) * p / 100.0
    ordered = a.sort(-1).values
    low = int(at)
    high = min(low + 1, a.shape[-1] - 1)
    top = ordered[..., low] + (ordered[..., high] - ordered[..., low]) * (at - low)
    return storable(blocks.reaching(top, blocks.spec.fmt.divisor), blocks.spec)


def _ratios(blocks: Blocks, grid: int, maxshrink: float, expand: float) -> Iterator[Tensor]:
    base = blocks.absmax()
    for i in range(int(maxshrink * grid) + 1):
        yield storable(base * (1.0 - i / grid), blocks.spec)
    for i in range(1, int(expand * grid) + 1):
        yield storable(base * (1.0 + i / grid), blocks.spec)


def mse(blocks: Blocks, norm: float = 2.4, grid: int = 100, maxshrink: float = 0.8, expand: float = -1.0) -> Tensor:
    """Least `sum |x - x^|^norm` over ratios `1 - i/grid` down to `1 - maxshrink` of the absmax scale.

    Float grids are not uniform, so ratios above 1 can win: `expand` -1 searches up to 1.5 for them, none for integers.
    Source: GPTQ's and QuaRot's weight search (grid 100, shrink .8, exponent 2.4).
    """
    expand = (0.5 if blocks.spec.fmt.exponent is not None else 0.0) if expand < 0 else expand
    return best_of(blocks, lambda part: _ratios(part, grid, maxshrink, expand), norm=norm)


def imatrix(blocks: Blocks, norm: float = 3.0, grid: int = 20, maxshrink: float = 0.95, expand: float = -1.0) -> Tensor:
    """`mse` with every element weighted by E[x_k^2] of the input it meets."""
    expand = (0.5 if blocks.spec.fmt.exponent is not None else 0.0) if expand < 0 else expand
    return best_of(blocks, lambda part: _ratios(part, grid, maxshrink, expand), norm=norm, weight="importance")


SCALE_RULES.register(ScaleRule("percentile", percentile))
SCALE_RULES.register(ScaleRule("mse", mse))
SCALE_RULES.register(ScaleRule("imatrix", imatrix, needs="importance", plain="mse"))
