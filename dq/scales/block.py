"""Rules for block formats with E4M3 scales (NVFP4): `4over6`, `sweep`, `weighted_sweep`, `local_hessian`, `exact`.

All give ordinary NVFP4 bytes. Sources: Four Over Six (arXiv 2512.02010) for `4over6`; NVIDIA Model Optimizer and
ScaleSweep (arXiv 2606.07618) for the sweep over E4M3 codes, bounded here to a window around the absmax code.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import lru_cache

import torch
from torch import Tensor

from dq.scales import SCALE_RULES, Blocks, ScaleRule, amax, best_of, storable

WINDOW = (-6, 10)  # code offsets that held the optimum on Gaussian, Laplace and Student-t data


def four_over_six(blocks: Blocks) -> Tensor:
    """The block maximum lands on 6 or on 4, whichever has the smaller squared error (6 if equal). The second level is
    normalised to 256, so that the larger scale, up to 384, still fits E4M3."""

    def candidates(part: Blocks) -> Iterator[Tensor]:
        top = amax(part.x)
        yield storable(part.reaching(top, 6.0), part.spec)
        yield storable(part.reaching(top, 4.0), part.spec)

    return best_of(blocks, candidates)


def _codes(part: Blocks, window: tuple[int, int]) -> Iterator[Tensor]:
    base = storable(part.absmax(), part.spec).to(torch.float8_e4m3fn).view(torch.uint8).to(torch.int16)
    for offset in sorted(range(window[0], window[1] + 1), key=abs):  # the absmax code first: it wins ties
        yield (base + offset).clamp(1, 126).to(torch.uint8).view(torch.float8_e4m3fn).to(torch.float32)


def sweep(blocks: Blocks, target: str = "native", low: int = WINDOW[0], high: int = WINDOW[1]) -> Tensor:
    """Least squared error over E4M3 scale codes in a window around the absmax code.

    Args:
        target: `native`: the value FP4 hardware multiplies; `e4m3`: the value as executed on FP8 tensor cores.
    """
    return best_of(blocks, lambda part: _codes(part, (low, high)), target=target)


def weighted_sweep(blocks: Blocks, target: str = "native") -> Tensor:
    """`sweep` with every element weighted by E[x_k^2] of the input it meets."""
    return best_of(blocks, lambda part: _codes(part, WINDOW), target=target, weight="importance")


def local_hessian(blocks: Blocks, target: str = "native") -> Tensor:
    """`sweep` by `d^T H d` with the 16x16 diagonal blocks H of E[x x^T]."""
    return best_of(blocks, lambda part: _codes(part, WINDOW), target=target, weight="hessian")


@lru_cache(maxsize=1)
def exact_scales() -> tuple[float, ...]:
    """The positive E4M3 scales whose product with every E2M1 value is exact in E4M3."""
    scales = torch.arange(1, 127, dtype=torch.uint8).view(torch.float8_e4m3fn).to(torch.float32)
    products = scales[:, None] * torch.tensor([0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])
    back = products.clamp(max=448.0).to(torch.float8_e4m3fn).to(torch.float32)
    return tuple(scales[(products == back).all(1)].tolist())


def exact(blocks: Blocks) -> Tensor:
    """Least squared error over the scales of `exact_scales` near the absmax scale.

    Bit-exact on FP8 tensor cores, at the price of a coarser choice. For tests.
    """
    known = torch.tensor(exact_scales(), device=blocks.x.device)

    def candidates(part: Blocks) -> Iterator[Tensor]:
        at = torch.bucketize(part.absmax(), known)
        for offset in (0, -1, 1, -2, 2):
            yield known[(at + offset).clamp(0, len(known) - 1)]

    return best_of(blocks, candidates)


_E4M3 = ("fp8_e4m3",)
SCALE_RULES.register(ScaleRule("4over6", four_over_six, ceiling=256.0, formats=_E4M3))
SCALE_RULES.register(ScaleRule("sweep", sweep, formats=_E4M3))
SCALE_RULES.register(ScaleRule("weighted_sweep", weighted_sweep, formats=_E4M3, needs="importance", plain="absmax"))
SCALE_RULES.register(ScaleRule("local_hessian", local_hessian, formats=_E4M3, needs="hessian", plain="absmax"))
SCALE_RULES.register(ScaleRule("exact", exact, ceiling=64.0, formats=_E4M3))
