"""NVFP4 at `absmax` of a BF16 weight, two values at a time in the halves of a 32-bit word.

    code = #{i : |x| / step, rounded to float32, lies beyond t_i},  t = 1/4, 3/4, 5/4, 7/4, 5/2, 7/2, 5

Ties go to the even code: the bounds between an even code and the odd one above are exclusive, the others inclusive. A
quotient rounds to a number beyond t exactly if it is more than t + h (inclusive: at least t - h), h half a float32 step
at t. So a block has seven exact bounds (t +- h) * step, of which BF16 values need only the upper 16 bits; no element is
divided. Bits of non-negative floats are ordered like the floats, and two halves compare in one subtraction.
"""

import triton
import triton.language as tl

from dq.kernels.quantize.jit.floats import divide, e4m3_value, round_float
from dq.kernels.quantize.jit.nvfp4 import quantize_blocks, second_level

SIGNS = tl.constexpr(-0x7FFF8000)  # 0x80008000, the sign bits of both halves


@triton.jit
def _bound(step, T: tl.constexpr, H: tl.constexpr, FUSED: tl.constexpr):
    """Upper 16 bits of (T + H) * step rounded down, or, where H < 0, of the largest float32 below it.

    `near` is the bound rounded to nearest and `rest` what it lacks: its sign is exact, since `T * step - near` is.
    """
    if FUSED:
        near = tl.fma(step, T, step * H)
        rest = tl.fma(step, H, tl.fma(step, T, -near))
        low = rest <= 0 if H < 0 else rest < 0
    else:  # the interpreter has no fused multiply-add; 24 times 25 bits fit a float64
        wide = step.to(tl.float64) * (T + H)
        near = wide.to(tl.float32)
        low = wide <= near.to(tl.float64) if H < 0 else wide < near.to(tl.float64)
    return (near.to(tl.int32, bitcast=True) - low.to(tl.int32)) >> 16


@triton.jit
def _beyond(a, bound):
    """Bits 15 and 31: whether the lower and the upper half of a lie above the bound [BLOCKS]. Other bits are noise."""
    both = bound * 0x10001 | SIGNS
    return ~(both[:, None] - a)


@triton.jit
def _codes(word, step, FUSED: tl.constexpr):
    """Two E2M1 codes in the low byte, the lower half's first, for pairs of BF16 [BLOCKS, 8] and steps [BLOCKS]."""
    a = word & 0x7FFF7FFF
    quarter = (step * 0.25).to(tl.int32, bitcast=True) >> 16
    five = _bound(step, 1.25, 2.0**-24, FUSED)
    seven = _bound(step, 1.75, -(2.0**-24), FUSED)
    d1 = _beyond(a, quarter)
    d2 = _beyond(a, _bound(step, 0.75, -(2.0**-25), FUSED))
    d3 = _beyond(a, five)
    d4 = _beyond(a, seven)
    d5 = _beyond(a, five + 0x80)  # a power of two further: the exponent of BF16 starts at bit 7
    d6 = _beyond(a, seven + 0x80)
    d7 = _beyond(a, five + 0x100)
    # The bits are a thermometer, so their parity is that of the count; -0 is never written.
    ones, twos = d1 ^ d2 ^ d3 ^ d4 ^ d5 ^ d6 ^ d7, (d2 & ~d4) | d6
    code = (word & d1 & SIGNS) | ((d4 >> 1) & 0x40004000)
    code = code | ((twos >> 2) & 0x20002000)
    code = code | ((ones >> 3) & 0x10001000)
    return (code * 0x1001) >> 24  # bits 12 to 15 move below bits 28 to 31


@triton.jit
def _scales(top, unit, FUSED: tl.constexpr):
    """E4M3 codes of `top / 6 / unit`, unit far from under- and overflow; bounded, so that corrections stay finite."""
    bounded = tl.minimum(top, tl.minimum(unit, 1e34) * 8192.0)
    sixth = divide(bounded, 6.0, 0.16666667163372039795, FUSED)
    ratio = divide(sixth, unit, tl.div_rn(1.0, unit), FUSED)
    _, code = round_float(tl.minimum(tl.maximum(ratio, 0.001953125), 448.0), -6, 3)
    return tl.where(top > 0, code, 1)


@triton.jit
def absmax_kernel(
    x_ptr, word_ptr, amax_ptr, codes_ptr, scale_ptr, global_ptr, total,
    TWO_LEVELS: tl.constexpr, FUSED: tl.constexpr, BLOCKS: tl.constexpr,
):  # fmt: skip
    """One program: BLOCKS consecutive blocks of 16 values. Arguments as of `nvfp4.quantize_kernel`.

    Args:
        x_ptr, word_ptr: the same BF16 weight, as values and as int32; its width is a multiple of 16.
    """
    # Backwards: what the maximum read last still lies in L2.
    first = (tl.num_programs(0) - 1 - tl.program_id(0)).to(tl.int64) * BLOCKS
    block = first + tl.arange(0, BLOCKS)
    inside = block < total
    at = block[:, None] * 8 + tl.arange(0, 8)[None, :]
    word = tl.load(word_ptr + at, mask=inside[:, None], other=0)
    unit = second_level(amax_ptr, TWO_LEVELS)
    if unit > 3.0e-27:  # all that follows stays normal: step / 2^26 at least 2^-126
        a = word & 0x7FFF7FFF
        top = tl.maximum(tl.max(a, axis=1) & 0x7FFF0000, tl.max(a << 16, axis=1))
        code = _scales(top.to(tl.float32, bitcast=True), unit, FUSED)
        pair = _codes(word, e4m3_value(code) * unit, FUSED)
    else:
        column = block[:, None] * 16 + tl.arange(0, 16)[None, :]
        x = tl.load(x_ptr + column, mask=inside[:, None], other=0.0).to(tl.float32)
        pair, code = quantize_blocks(x, unit, False, False, 0, 0, FUSED, BLOCKS)
    tl.store(scale_ptr + block, code.to(tl.uint8), mask=inside)
    tl.store(codes_ptr + at, pair.to(tl.uint8), mask=inside[:, None])
    if TWO_LEVELS:
        tl.store(global_ptr, unit, mask=tl.program_id(0) == 0)
