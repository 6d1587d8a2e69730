"""NVFP4 of a row-major weight [N, K]: the tensor maximum, then blocks of 16 along K to packed E2M1 and E4M3 scales.

Both kernels are bound by memory at `absmax`: the weight is read twice and 4.5 bits per value are written.
"""

import triton
import triton.language as tl

from dq.kernels.quantize.jit.floats import divide, e4m3_value, inverse_power, level, pair_sum, round_float


@triton.jit
def amax_kernel(x_ptr, bits_ptr, total, TILE: tl.constexpr, STEPS: tl.constexpr):
    """max |x| as the bits of a float32, merged into *bits_ptr (int32, 0 before).

    Bits of non-negative floats are ordered like the floats, and Inf and NaN lie above all finite ones: one integer
    maximum finds the range and shows whether anything was not finite.
    """
    start = tl.program_id(0).to(tl.int64) * (TILE * STEPS)
    best = tl.zeros((TILE,), tl.int32)
    for step in tl.static_range(STEPS):
        at = start + step * TILE + tl.arange(0, TILE)
        x = tl.load(x_ptr + at, mask=at < total, other=0.0).to(tl.float32)
        best = tl.maximum(best, x.to(tl.int32, bitcast=True) & 0x7FFFFFFF)
    tl.atomic_max(bits_ptr, tl.max(best, axis=0), sem="relaxed")


@triton.jit
def second_level(amax_ptr, TWO_LEVELS: tl.constexpr):
    """`amax / (6 * 448)`, at least the smallest normal number; 1 for a tensor of zeros and without a second level."""
    unit = tl.full((), 1.0, tl.float32)
    if TWO_LEVELS:
        amax = tl.load(amax_ptr)
        unit = level(amax, 2688.0)
    return unit


@triton.jit
def _elements(near, step, power, FUSED: tl.constexpr):
    """(value, code) of E2M1 for |x| / step. `near` is |x| * power: with both in the middle of the range of float32 the
    quotient keeps its bits, and what over- or underflows is far beyond 6 or far below 0.25."""
    step = step * power
    quotient = divide(near, step[:, None], tl.div_rn(1.0, step)[:, None], FUSED)
    return round_float(tl.minimum(quotient, 6.0), 0, 1)


@triton.jit
def _error(a, near, scale, unit, power, E4M3: tl.constexpr, FUSED: tl.constexpr, BLOCKS: tl.constexpr):
    """Squared error of |x| [BLOCKS, 16] at block scales [BLOCKS]; E4M3: of the value as FP8 tensor cores run it."""
    value, _ = _elements(near, scale * unit, power, FUSED)
    if E4M3:
        value, _ = round_float(value * (scale * 0.125)[:, None], -6, 3)
        delta = value * (unit * 8.0) - a
    else:
        delta = value * (scale * unit)[:, None] - a
    return pair_sum(delta * delta, BLOCKS)


@triton.jit
def _swept(
    a, near, base, unit, power,
    E4M3: tl.constexpr, FUSED: tl.constexpr, LOW: tl.constexpr, HIGH: tl.constexpr, BLOCKS: tl.constexpr,
):  # fmt: skip
    """The E4M3 code of least error in [base + LOW, base + HIGH]; of equals the nearest to base, then the lower."""
    best = base
    least = _error(a, near, e4m3_value(base), unit, power, E4M3, FUSED, BLOCKS)
    REACH: tl.constexpr = HIGH if HIGH > -LOW else -LOW
    for i in range(2, 2 * REACH + 2):
        offset = tl.where(i % 2 == 0, -(i // 2), i // 2)  # -1, 1, -2, 2, ...
        if (offset >= LOW) & (offset <= HIGH):
            code = tl.minimum(tl.maximum(base + offset, 1), 126)
            now = _error(a, near, e4m3_value(code), unit, power, E4M3, FUSED, BLOCKS)
            best = tl.where(now < least, code, best)
            least = tl.minimum(now, least)
    return best


@triton.jit
def quantize_blocks(
    x, unit,
    SWEEP: tl.constexpr, E4M3: tl.constexpr, LOW: tl.constexpr, HIGH: tl.constexpr,
    FUSED: tl.constexpr, BLOCKS: tl.constexpr,
):  # fmt: skip
    """(bytes of two E2M1 codes [BLOCKS, 8], E4M3 codes [BLOCKS]) of x [BLOCKS, 16], both int32."""
    power = inverse_power(unit)
    a = tl.abs(x)
    near = a * power
    top = tl.max(a, axis=1)
    scale = tl.div_rn(tl.div_rn(top, 6.0), unit)
    scale, code = round_float(tl.minimum(tl.maximum(scale, 0.001953125), 448.0), -6, 3)
    if SWEEP:
        code = _swept(a, near, code, unit, power, E4M3, FUSED, LOW, HIGH, BLOCKS)
    code = tl.where(top > 0, code, 1)
    _, element = _elements(near, e4m3_value(code) * unit, power, FUSED)
    element = tl.where((x < 0) & (element > 0), element | 8, element)
    low, high = tl.split(tl.reshape(element, (BLOCKS, 8, 2)))
    return low | (high << 4), code


@triton.jit
def quantize_kernel(
    x_ptr, amax_ptr, codes_ptr, scale_ptr, global_ptr, total, width, groups,
    TWO_LEVELS: tl.constexpr, SWEEP: tl.constexpr, E4M3: tl.constexpr, LOW: tl.constexpr, HIGH: tl.constexpr,
    FULL: tl.constexpr, FUSED: tl.constexpr, BLOCKS: tl.constexpr,
):  # fmt: skip
    """One program: BLOCKS consecutive blocks of 16, counted over all rows.

    Args:
        amax_ptr: float32 scalar that the second level covers.
        codes_ptr, scale_ptr: uint8 [rows, 8 * groups] and [rows, groups]; global_ptr: float32 [1].
        total: blocks of the tensor, rows * groups.
        FULL: width is a multiple of 16.
        FUSED: the device has fused multiply-adds (all but the interpreter).
    """
    # Backwards: what the maximum read last still lies in L2.
    first = (tl.num_programs(0) - 1 - tl.program_id(0)).to(tl.int64) * BLOCKS
    block = first + tl.arange(0, BLOCKS)
    inside = block < total
    if FULL:
        at = block[:, None] * 16 + tl.arange(0, 16)[None, :]
        x = tl.load(x_ptr + at, mask=inside[:, None], other=0.0).to(tl.float32)
    else:
        column = (block % groups)[:, None] * 16 + tl.arange(0, 16)[None, :]
        at = (block // groups)[:, None] * width + column
        x = tl.load(x_ptr + at, mask=inside[:, None] & (column < width), other=0.0).to(tl.float32)
    unit = second_level(amax_ptr, TWO_LEVELS)
    pair, code = quantize_blocks(x, unit, SWEEP, E4M3, LOW, HIGH, FUSED, BLOCKS)
    tl.store(scale_ptr + block, code.to(tl.uint8), mask=inside)
    at = block[:, None] * 8 + tl.arange(0, 8)[None, :]
    tl.store(codes_ptr + at, pair.to(tl.uint8), mask=inside[:, None])
    if TWO_LEVELS:
        tl.store(global_ptr, unit, mask=tl.program_id(0) == 0)
