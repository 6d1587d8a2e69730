"""Values of NVFP4 with one second level per row: what a token looks like after rounding, without codes in between."""

import triton
import triton.language as tl

from dq.kernels.quantize.jit.floats import e4m3_value, inverse_power, level, round_float
from dq.kernels.quantize.jit.nvfp4 import _elements, _swept


@triton.jit
def values_kernel(
    x_ptr, amax_ptr, y_ptr, total, width, groups,
    SWEEP: tl.constexpr, LOW: tl.constexpr, HIGH: tl.constexpr,
    FULL: tl.constexpr, FUSED: tl.constexpr, BLOCKS: tl.constexpr,
):  # fmt: skip
    """One program: BLOCKS consecutive blocks of 16, counted over all rows. A row with what is not finite is NaN.

    Args:
        amax_ptr: float32 [rows], what the second level of each row covers.
        y_ptr: float32 [rows, width].
        total: blocks of the tensor, rows * groups.
        FULL: width is a multiple of 16.
        FUSED: the device has fused multiply-adds (all but the interpreter).
    """
    block = tl.program_id(0).to(tl.int64) * BLOCKS + tl.arange(0, BLOCKS)
    inside, row = block < total, block // groups
    if FULL:
        at, mask = block[:, None] * 16 + tl.arange(0, 16)[None, :], inside[:, None]
    else:
        column = (block % groups)[:, None] * 16 + tl.arange(0, 16)[None, :]
        at, mask = row[:, None] * width + column, inside[:, None] & (column < width)
    x = tl.load(x_ptr + at, mask=mask, other=0.0).to(tl.float32)
    whole = tl.load(amax_ptr + row, mask=inside, other=0.0)
    unit = level(whole, 2688.0)
    power = inverse_power(unit)
    a = tl.abs(x)
    near, top = a * power[:, None], tl.max(a, axis=1)
    scale = tl.div_rn(tl.div_rn(top, 6.0), unit)
    scale, code = round_float(tl.minimum(tl.maximum(scale, 0.001953125), 448.0), -6, 3)
    if SWEEP:
        code = _swept(a, near, code, unit, power, False, FUSED, LOW, HIGH, BLOCKS)
    step = e4m3_value(tl.where(top > 0, code, 1)) * unit
    value, _ = _elements(near, step, power, FUSED)
    value = tl.where(x < 0, -value, value) * step[:, None]
    tl.store(y_ptr + at, value + (x - x), mask=mask)
