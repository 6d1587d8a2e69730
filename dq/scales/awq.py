"""`awq`: AWQ's search for clipping, per row and group, by the error of the group's share of the output.

    scale = absmax scale * (1 - i/20), i = 0 .. 9;  least d^T H d, d = w^ - w, H = E[x x^T] of the group's inputs

`d^T H d` is the mean over tokens of (x (w^ - w))^2, so a K x K second moment replaces a pass over tokens per candidate.
Source: AWQ (arXiv 2306.00978) and its reference implementation, which samples 512 tokens.
"""

from __future__ import annotations

from collections.abc import Iterator

from torch import Tensor

from dq.scales import SCALE_RULES, Blocks, ScaleRule, best_of, storable


def awq(blocks: Blocks, grid: int = 20, maxshrink: float = 0.5) -> Tensor:
    """Ratios `1 - i/grid`, i below `maxshrink * grid`, of the absmax scale; needs groups that divide K."""

    def candidates(part: Blocks) -> Iterator[Tensor]:
        base = part.absmax()
        for i in range(max(1, round(maxshrink * grid))):
            yield storable(base * (1.0 - i / grid), part.spec)

    return best_of(blocks, candidates, weight="hessian")


SCALE_RULES.register(ScaleRule("awq", awq, needs="hessian", plain="mse"))
