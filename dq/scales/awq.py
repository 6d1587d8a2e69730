"""`awq`: AWQ's search for clipping, per row and group, by the error of the group's share of the output.

    range = range of w cut to +-amax * (1 - i/20), i = 0 .. 9;  least d^T H d, d = w^ - w, H = E[x x^T] of the inputs

`d^T H d` is the mean over tokens of (x (w^ - w))^2, so a K x K second moment replaces a pass over tokens per candidate.
With a zero point the range is that of min and max, AWQ's own form; symmetric grids scale amax.
Source: AWQ (arXiv 2306.00978) and its reference implementation, which samples 512 tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from dq.scales import SCALE_RULES, Blocks, ScaleRule, amax, best_of, storable


def _ratios(grid: int, maxshrink: float) -> Iterator[float]:
    return (1.0 - i / grid for i in range(max(1, round(maxshrink * grid))))


def awq(blocks: Blocks, grid: int = 20, maxshrink: float = 0.5) -> Tensor:
    """Ratios `1 - i/grid`, i below `maxshrink * grid`, of the absmax scale; needs groups that divide K."""

    def candidates(part: Blocks) -> Iterator[Tensor]:
        base = part.absmax()
        return (storable(base * ratio, part.spec) for ratio in _ratios(grid, maxshrink))

    return best_of(blocks, candidates, weight="hessian")


def clip(blocks: Blocks, fake: Callable[[Tensor], Tensor], grid: int = 20, maxshrink: float = 0.5) -> Tensor:
    """The blocks [R, G, E], each cut to the best of `+-amax * (1 - i/grid)`; the first of equals."""
    top, best, least = amax(blocks.x)[..., None], blocks.x, None
    for ratio in _ratios(grid, maxshrink):
        cut = torch.minimum(torch.maximum(blocks.x, -top * ratio), top * ratio)
        error = blocks.through_hessian(fake(cut) - blocks.x)
        if least is None:
            least = error
            continue
        better = error < least
        best, least = torch.where(better[..., None], cut, best), torch.where(better, error, least)
    return best


SCALE_RULES.register(ScaleRule("awq", awq, needs="hessian", plain="absmax", clip=clip))
