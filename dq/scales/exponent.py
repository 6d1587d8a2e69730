"""Shared exponents of the MX formats: `scale = 2^k` with k from the block maximum a, in the modes the field uses.

    floor   k = floor(log2 a) - e_max                      (OCP MX 1.0, section 6.3; clips values above max * 2^k)
    even    as floor, after rounding a half up to the element's mantissa width
    ceil    k = ceil(log2 a) - e_max
    rceil   k = ceil(log2(a / max))                        (never clips)
    best2   rceil or one less, whichever has the smaller squared error

k is clamped to [-127, 127]. Exponents are read from the bits of a, so powers of two are exact.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

import torch
from torch import Tensor

from dq.profiles import convention
from dq.scales import SCALE_RULES, Blocks, ScaleRule, amax, best_of, ceil_log2, divide, power


def floor_log2(a: Tensor) -> Tensor:
    """floor(log2 a) for float32 a > 0, exactly; int32."""
    return torch.frexp(a).exponent - 1


def _emax(blocks: Blocks) -> int:
    """floor(log2(max)) of the element, 2 for INT4 as for E2M1."""
    return math.frexp(blocks.spec.fmt.max)[1] - 1


def floor(blocks: Blocks) -> Tensor:
    """OCP: the element's largest binade holds the maximum; values above its largest number are clipped."""
    return power(floor_log2(amax(blocks.x)) - _emax(blocks))


def even(blocks: Blocks) -> Tensor:
    """The maximum is first rounded to the element's mantissa width: it moves up a binade where it would clip."""
    bits = amax(blocks.x).contiguous().view(torch.int32)
    mantissa = _mantissa_bits(blocks)
    rounded = (bits + (1 << (22 - mantissa))) & ~((1 << 23) - 1)
    return power((rounded >> 23) - 127 - _emax(blocks))


def _mantissa_bits(blocks: Blocks) -> int:
    """Mantissa bits of the element: E4M3 3, E2M1 1 ...; those of its largest value times a power of two."""
    fmt, other = blocks.spec.fmt, convention(blocks.spec).mantissa
    if other is not None:
        return other
    return {"fp8_e4m3": 3, "fp8_e5m2": 2, "fp6_e3m2": 2, "fp6_e2m3": 3, "fp4_e2m1": 1}.get(fmt.name, fmt.bits - 2)


def ceil(blocks: Blocks) -> Tensor:
    """One more than `floor` unless the maximum is a power of two."""
    return power(ceil_log2(amax(blocks.x)) - _emax(blocks))


def _rceil(blocks: Blocks) -> Tensor:
    ratio = divide(amax(blocks.x), blocks.spec.fmt.max)
    return ceil_log2(ratio.clamp(min=2.0**-149))  # the quotient of a subnormal maximum may be 0


def rceil(blocks: Blocks) -> Tensor:
    """The smallest power of two at which nothing is clipped."""
    return power(_rceil(blocks))


def best2(blocks: Blocks) -> Tensor:
    """`rceil` or half of it by squared error."""

    def candidates(part: Blocks) -> Iterator[Tensor]:
        k = _rceil(part)
        yield power(k)
        yield power(k - 1)

    return best_of(blocks, candidates)


for _rule in (floor, even, ceil, rceil, best2):
    SCALE_RULES.register(ScaleRule(_rule.__name__, _rule, formats=("e8m0",)))
