"""Small floats by integer arithmetic on float32 bits: the same in the interpreter and on GPUs without these types."""

import triton
import triton.language as tl

TINY = tl.constexpr(1.1754943508222875e-38)  # smallest normal float32


@triton.jit
def larger(a, b):
    """The larger one; NaN if either is."""
    return tl.maximum(a, b, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def largest(a, AXIS: tl.constexpr, KEEP: tl.constexpr, FUSED: tl.constexpr):
    """Maximum of a >= 0 along an axis, with a NaN among them NaN: `tl.max` would leave it out.

    FUSED: as of `divide`. The interpreter is quick about maxima that it knows; bits are ordered like such numbers, with
    NaN above all.
    """
    if FUSED:
        return tl.reduce(a, AXIS, larger, keep_dims=KEEP)
    else:
        return tl.max(a.to(tl.int32, bitcast=True), axis=AXIS, keep_dims=KEEP).to(tl.float32, bitcast=True)


@triton.jit
def level(top, TOP: tl.constexpr):
    """Scale at which the maximum `top` lands on TOP: normal, 1 where all is 0, not finite where `top` is not."""
    return tl.where(top == 0, 1.0, larger(tl.div_rn(top, TOP), TINY))


@triton.jit
def round_float(a, LOW: tl.constexpr, MANTISSA: tl.constexpr):
    """Rounds a >= 0, at most the grid's largest value, half to even; returns (value, code).

    The step in the binade 2^e of a is 2^s, s = e - MANTISSA, e at least LOW. `a + 2^(23 + s)` has no bits below 2^s,
    and its mantissa counts steps; the code is that count plus the steps below the binade.
    """
    FLOOR: tl.constexpr = (LOW + 127) << 23
    exponent = tl.maximum(a.to(tl.int32, bitcast=True) & 0x7F800000, FLOOR)
    lift = exponent + ((23 - MANTISSA) << 23)
    magic = lift.to(tl.float32, bitcast=True)
    moved = a + magic
    code = (moved.to(tl.int32, bitcast=True) - lift) + ((exponent - FLOOR) >> (23 - MANTISSA))
    return moved - magic, code


@triton.jit
def e4m3_value(code):
    """float32 of positive E4M3 codes 0..126 (int32)."""
    return tl.where(
        code < 8, code.to(tl.float32) * 0.001953125, ((code << 20) + (120 << 23)).to(tl.float32, bitcast=True)
    )


@triton.jit
def divide(a, b, inverse, FUSED: tl.constexpr):
    """a / b correctly rounded, given `inverse`, 1 / b correctly rounded.

    FUSED: the quotient by the reciprocal, corrected twice by its exact remainder: five instructions where IEEE division
    takes some fifteen. The first correction leaves less than one ulp, and from there the second gives the rounded
    quotient (Markstein, 1990). Needs fused multiply-adds (the interpreter has none) and b far from under- and overflow.
    """
    if FUSED:
        q = a * inverse
        q = tl.fma(tl.fma(q, -b, a), inverse, q)  # the sign with b, of which there are fewer: some compilers subtract
        return tl.fma(tl.fma(q, -b, a), inverse, q)
    else:
        return tl.div_rn(a, b)


@triton.jit
def inverse_power(x):
    """2^-k for a normal x in [2^k, 2^(k + 1)), k at most 126: brings x into [1, 2) exactly."""
    return ((254 << 23) - (x.to(tl.int32, bitcast=True) & 0x7F800000)).to(tl.float32, bitcast=True)


@triton.jit
def pair_sum(x, BLOCKS: tl.constexpr):
    """Sum of [BLOCKS, 16] over its last axis, neighbouring pairs first: the order of the reference.

    A sum of two does not depend on their order, so the bits do not depend on how the compiler reduces.
    """
    x = tl.sum(tl.reshape(x, (BLOCKS, 8, 2)), axis=2)
    x = tl.sum(tl.reshape(x, (BLOCKS, 4, 2)), axis=2)
    x = tl.sum(tl.reshape(x, (BLOCKS, 2, 2)), axis=2)
    return tl.sum(x, axis=1)
