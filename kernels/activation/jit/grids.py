"""Rounding of a tile [C, 8] to an activation grid, as what a GEMM on FP8 or INT8 tensor cores multiplies.

A row has a factor, applied after the product: `base` here, times a second level: that of NVFP4, or the scale of a whole
row. Values are code times block scale over base; blocks lie along the row, see `rotate.group_max`.

What is not finite leaves the scale of its row or block so, and with it all that the product makes of it: a code cannot
say it.
"""

import triton
import triton.language as tl

from dq.kernels.activation.jit.rotate import group_max, pair_sum
from dq.kernels.quantize.jit.floats import TINY, divide, e4m3_value, larger, largest, level, round_float
from dq.scales.block import WINDOW

LOW, HIGH = (tl.constexpr(i) for i in WINDOW)  # of `sweep`


@triton.jit
def round_signed(q, LOW: tl.constexpr, MANTISSA: tl.constexpr, TOP: tl.constexpr):
    """q rounded to a small float, half to even, saturating; -0 becomes 0. See `floats.round_float`."""
    q = tl.minimum(tl.maximum(q, -TOP), TOP)
    LEAST: tl.constexpr = 2.0**LOW
    LIFT: tl.constexpr = 1.5 * 2.0 ** (23 - MANTISSA)  # times the binade of q: whose last bit is a step
    binade = (tl.maximum(tl.abs(q), LEAST).to(tl.int32, bitcast=True) & 0x7F800000).to(tl.float32, bitcast=True)
    return tl.fma(binade, -LIFT, tl.fma(binade, LIFT, q))


@triton.jit
def round_whole(q):
    """q rounded to a whole number, half to even, |q| < 2^22; a quotient by the scale of its maximum never exceeds that
    of the maximum by half a step."""
    return (q + 12582912.0) - 12582912.0


@triton.jit
def e4m3_bits(v, HARDWARE: tl.constexpr):
    """Bytes of v in E4M3, saturating; by integer arithmetic where the device has no such type."""
    if HARDWARE:
        return v.to(tl.float8e4nv).to(tl.uint8, bitcast=True)
    else:
        _, code = round_float(tl.minimum(tl.abs(v), 448.0), -6, 3)
        return (code | ((v.to(tl.int32, bitcast=True) >> 24) & 0x80)).to(tl.uint8)


@triton.jit
def quotient(y, step, EXACT: tl.constexpr, FUSED: tl.constexpr):
    """y / step, to be rounded to a few bits; EXACT: as the reference divides. Else by the reciprocal, two ulps away at
    most: what went through a rotation has lost more than that.

    FUSED: corrected once by its exact remainder, that is the quotient within 2^-23 of an ulp before it is rounded. Then
    a code differs from that of `divide` only where the quotient is as close as that to half an ulp beside a tie.
    """
    if EXACT and FUSED:
        inverse = tl.div_rn(1.0, step)
        q = y * inverse
        return tl.fma(tl.fma(q, -step, y), inverse, q)
    elif EXACT:
        return divide(y, step, tl.div_rn(1.0, step), False)
    else:
        return y * (1.0 / step)


@triton.jit
def power_of_two(a, TOP: tl.constexpr, RULE: tl.constexpr, MANTISSA: tl.constexpr):
    """Shared exponent k of MX for block maxima a: modes `floor`, `even`, `ceil`, `rceil` of dq.scales.exponent."""
    if RULE == "rceil":
        a = tl.div_rn(a, TOP)
    bits = tl.maximum(a.to(tl.int32, bitcast=True), 1)
    if RULE == "even":
        bits = bits + (1 << (22 - MANTISSA))
    if RULE == "ceil" or RULE == "rceil":
        bits = bits + 0x7FFFFF
    k = (bits >> 23) - 127
    if RULE != "rceil":
        k = k - (8 if TOP == 448.0 else 2)
    return tl.minimum(tl.maximum(k, -126), 127)


@triton.jit
def exp2_int(k):
    """2^k for -126 <= k <= 127."""
    return ((k + 127) << 23).to(tl.float32, bitcast=True)


@triton.jit
def shared_exponent(a, TOP: tl.constexpr, RULE: tl.constexpr, MANTISSA: tl.constexpr):
    """Block scales of MX; NaN, which E8M0 has, where the maximum is not finite."""
    return exp2_int(power_of_two(a, TOP, RULE, MANTISSA)) + a * 0.0


@triton.jit
def stored(scale, HALF: tl.constexpr):
    """A group scale as its format holds it: float32, or FP16 within its range, and never 0; NaN if not finite."""
    if HALF:
        held = tl.minimum(tl.maximum(scale, 5.9604644775390625e-08), 65504.0).to(tl.float16).to(tl.float32)
        return held + scale * 0.0
    else:
        return larger(scale, TINY)


@triton.jit
def row_levels(top, beside, KIND: tl.constexpr, HALF: tl.constexpr, RULE: tl.constexpr):
    """(base, second level) of a row with maximum `top`; base is raised until `beside`, the maximum of its low-rank
    columns, fits E4M3 too."""
    unit = tl.full((), 1.0, tl.float32)
    if KIND == "fp8":
        base = level(larger(top, beside), 448.0)
    elif KIND == "int8" or KIND == "int4":
        base = unit
        unit = level(top, 127.0 if KIND == "int8" else 7.0)
    elif KIND == "int4-group":
        base = tl.where(top == 0, 1.0, stored(tl.div_rn(top, 7.0), HALF) * 0.03125)
    elif KIND == "nvfp4":  # 4over6 needs room above: its scales reach 384 where the second level is that of 256
        unit = level(top, 1536.0 if RULE == "4over6" else 2688.0)
        base = unit * 0.0 + 8.0
    elif KIND == "mxfp4":
        base = tl.where(top == 0, 1.0, exp2_int(tl.maximum(power_of_two(top, 6.0, RULE, 1) - 6, -126)) + top * 0.0)
    elif KIND == "mxfp8":
        base = tl.where(top == 0, 1.0, shared_exponent(top, 448.0, RULE, 3))
    else:
        base = unit
    if KIND != "fp8" and KIND != "int8":
        ratio = tl.maximum(tl.div_rn(beside, 448.0 * (base * unit)), 1.0)
        base = base * exp2_int(((ratio.to(tl.int32, bitcast=True) + 0x7FFFFF) >> 23) - 127) + beside * 0.0
    return base, unit


@triton.jit
def _block_scale(scale, unit, FUSED: tl.constexpr):
    """(value, code) of block scales, still times the second level, as E4M3 holds them."""
    scale = divide(scale, unit, tl.div_rn(1.0, unit), FUSED)
    return round_float(tl.minimum(tl.maximum(scale, 0.001953125), 448.0), -6, 3)


@triton.jit
def _elements(y, scale, unit, EXACT: tl.constexpr, FUSED: tl.constexpr, C: tl.constexpr):
    """(elements of E2M1 [C, 8], squared error of their blocks [C]) at block scales [C]."""
    step = (scale * unit)[:, None]
    v = round_signed(quotient(y, step, EXACT, FUSED), 0, 1, 6.0)
    return v, pair_sum(v * step - y, C)


@triton.jit
def _swept(y, scale, code, unit, EXACT: tl.constexpr, FUSED: tl.constexpr, C: tl.constexpr):
    """The block scale of least error among E4M3 codes in [code + LOW, code + HIGH]; of equals the nearest to `code`,
    then the lower: -1, 1, -2, 2, ... as far as both reach."""
    _, least = _elements(y, scale, unit, EXACT, FUSED, C)
    for i in range(1, HIGH - LOW + 1):
        offset = tl.where(i > -2 * LOW, i + LOW, tl.where(i % 2 == 1, -((i + 1) // 2), i // 2))
        other = e4m3_value(tl.minimum(tl.maximum(code + offset, 1), 126))
        _, now = _elements(y, other, unit, EXACT, FUSED, C)
        scale = tl.where(now < least, other, scale)
        least = tl.minimum(now, least)
    return scale


@triton.jit
def _nvfp4(y, top, unit, RULE: tl.constexpr, EXACT: tl.constexpr, FUSED: tl.constexpr, C: tl.constexpr):
    """(elements of E2M1 [C, 8], block scales [C]) for block maxima `top`, which land on 6; by rule `4over6` on 4 if
    that leaves the smaller squared error, by `sweep` where it is least."""
    scale, code = _block_scale(divide(top, 6.0, 0.16666667163372039795, FUSED), unit, FUSED)
    if RULE == "sweep":
        scale = _swept(y, scale, code, unit, EXACT, FUSED, C)
    v = round_signed(quotient(y, (scale * unit)[:, None], EXACT, FUSED), 0, 1, 6.0)
    if RULE == "4over6":
        larger, _ = _block_scale(top * 0.25, unit, FUSED)
        w, other = _elements(y, larger, unit, EXACT, FUSED, C)
        better = other < pair_sum(v * (scale * unit)[:, None] - y, C)
        scale, v = tl.where(better, larger, scale), tl.where(better[:, None], w, v)
    return v, scale


@triton.jit
def rounded(
    y, base, unit, KIND: tl.constexpr, GROUP: tl.constexpr, HALF: tl.constexpr, RULE: tl.constexpr,
    EXACT: tl.constexpr, FUSED: tl.constexpr, C: tl.constexpr,
):  # fmt: skip
    """(elements of the grid [C, 8], what to multiply them with [C], block scales [C]) of a tile.

    Elements times that factor are the values over `base`, elements times block scale and second level those that the
    grid means. FP8 elements come unrounded: the conversion to E4M3 rounds them.
    """
    scale = tl.full((C,), 1.0, tl.float32)
    if KIND == "fp8":
        return quotient(y, base, EXACT, FUSED), scale, scale
    elif KIND == "int8" or KIND == "int4":
        return round_whole(quotient(y, unit, EXACT, FUSED)), scale * tl.div_rn(1.0, base), scale
    else:
        top = group_max(largest(tl.abs(y), 1, False, FUSED), GROUP, FUSED, C)
        if KIND == "fp8-group":
            own = level(top, 448.0)
            v, share, scale = quotient(y, own[:, None], EXACT, FUSED), scale, own
        elif KIND == "int4-group":
            scale = tl.where(top == 0, 1.0, stored(tl.div_rn(top, 7.0), HALF))
            v = round_whole(quotient(y, scale[:, None], EXACT, FUSED))
            share = tl.div_rn(scale, base)
        elif KIND == "nvfp4":
            v, scale = _nvfp4(y, top, unit, RULE, EXACT, FUSED, C)
        elif KIND == "mxfp4":
            scale = shared_exponent(top, 6.0, RULE, 1)
            v = round_signed(y * (1.0 / scale)[:, None], 0, 1, 6.0)
        else:
            scale = shared_exponent(top, 448.0, RULE, 3)
            v = round_signed(y * (1.0 / scale)[:, None], -6, 3, 448.0)
        if KIND == "nvfp4" or KIND == "mxfp4" or KIND == "mxfp8":
            share = scale * tl.div_rn(1.0, base)  # base is a power of two
        return v, share, scale


@triton.jit
def nibbles(v, KIND: tl.constexpr, C: tl.constexpr):
    """Elements [C, 8] as bytes of two codes [C, 4], the first in the low nibble: E2M1, or two's complement."""
    if KIND == "int4":
        code = v.to(tl.int32) & 15
    else:
        _, code = round_float(tl.abs(v), 0, 1)
        code = tl.where(v < 0, code | 8, code)
    low, high = tl.split(tl.reshape(code, (C, 4, 2)))
    return (low | (high << 4)).to(tl.uint8)


@triton.jit
def scale_bytes(scale, KIND: tl.constexpr):
    """Block scales as they rest: E4M3, or biased exponents (0 for a block of zeros)."""
    if KIND == "nvfp4":
        _, code = round_float(scale, -6, 3)
    else:
        code = scale.to(tl.int32, bitcast=True) >> 23
        code = tl.where(code == 1, 0, code)
    return code.to(tl.uint8)
