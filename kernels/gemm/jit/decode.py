"""Codes and scales to values, and values to E4M3, in arithmetic that the interpreter and every GPU since sm_80 has."""

import triton
import triton.language as tl

from dq.kernels.quantize.jit.floats import round_float

INT4, E2M1, INT8, E4M3 = (tl.constexpr(i) for i in range(4))
PLAIN, SMALL_FLOAT, POWER = (tl.constexpr(i) for i in range(3))  # scales: floats, bytes of E4M3, biased exponents


@triton.jit
def nibble(code, KIND: tl.constexpr):
    """float32 of 4-bit codes (int32, 0..15). E2M1: exponent and mantissa bits moved to a subnormal float32, whose value
    is then 2^-126 of what it stands for."""
    if KIND == INT4:
        return ((code ^ 8) - 8).to(tl.float32)
    else:
        bits = ((code & 7) << 22) | ((code & 8) << 28)
        return bits.to(tl.float32, bitcast=True) * 8.507059173023462e37  # 2^126


@triton.jit
def small_float(code):
    """float32 of E4M3 bytes (as int32), by the same move: their exponents are biased by 7."""
    bits = ((code & 0x7F) << 20) | ((code & 0x80) << 24)
    return bits.to(tl.float32, bitcast=True) * 1.329227995784916e36  # 2^120


@triton.jit
def byte_value(code, KIND: tl.constexpr):
    """float32 of 8-bit codes, loaded as uint8."""
    if KIND == INT8:
        return code.to(tl.int8, bitcast=True).to(tl.float32)
    else:
        return small_float(code.to(tl.int32))


@triton.jit
def scale_value(scale, SCALE: tl.constexpr):
    """float32 of stored scales."""
    if SCALE == SMALL_FLOAT:
        return small_float(scale.to(tl.int32))
    elif SCALE == POWER:
        code = scale.to(tl.int32)
        # 2^-127 is subnormal: half of 2^-126
        return tl.where(code == 0, 5.877471754111438e-39, (code << 23).to(tl.float32, bitcast=True))
    else:
        return scale.to(tl.float32)


@triton.jit
def to_e4m3(x, NATIVE: tl.constexpr):
    """Bytes of E4M3 of |x| <= 448, rounded half to even. NATIVE: by the device's own conversion."""
    if NATIVE:
        return x.to(tl.float8e4nv).to(tl.uint8, bitcast=True)
    else:
        _, code = round_float(tl.minimum(tl.abs(x), 448.0), -6, 3)
        return (code | ((x.to(tl.int32, bitcast=True) >> 24) & 0x80)).to(tl.uint8)


@triton.jit
def shift_for(amax, base):
    """j = max(0, ceil(log2(amax / (448 base)))): base * 2^j holds amax in E4M3."""
    ratio = tl.div_rn(amax, 448.0 * base)
    return tl.maximum(((ratio.to(tl.int32, bitcast=True) + 0x7FFFFF) >> 23) - 127, 0)


@triton.jit
def power_of_two(j):
    """2^j for -126 <= j <= 127 (int32)."""
    return ((j + 127) << 23).to(tl.float32, bitcast=True)
