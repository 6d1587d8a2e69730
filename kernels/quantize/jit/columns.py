"""GPTQ's loop over the columns of a block: every row by itself, so that the whole loop is one launch."""

import triton
import triton.language as tl


@triton.jit
def _nearest(x, LOW: tl.constexpr, MANTISSA: tl.constexpr, MIN: tl.constexpr, MAX: tl.constexpr):
    """Nearest value of a grid, half to even, saturating: the addition of a number without bits below the step rounds.

    MANTISSA: of a float whose smallest binade is LOW; below 0: whole numbers.
    """
    x = tl.minimum(tl.maximum(x, MIN), MAX)
    if MANTISSA < 0:
        magic = 12582912.0  # 1.5 * 2^23
    else:
        exponent = tl.maximum(x.to(tl.int32, bitcast=True) & 0x7F800000, (LOW + 127) << 23)
        magic = (exponent + (((23 - MANTISSA) << 23) + (1 << 22))).to(tl.float32, bitcast=True)
    return (x + magic) - magic


@triton.jit
def _on_grid(
    column, step_ptr, zero_ptr, at, inside, ZERO: tl.constexpr,
    LOW: tl.constexpr, MANTISSA: tl.constexpr, MIN: tl.constexpr, MAX: tl.constexpr,
):  # fmt: skip
    step = tl.load(step_ptr + at, mask=inside, other=1.0)
    x = tl.div_rn(column, step)
    if ZERO:
        zero = tl.load(zero_ptr + at, mask=inside, other=0.0)
        x = _nearest(x, 0, -1, -4194304.0, 4194304.0) + zero
        return (tl.minimum(tl.maximum(x, MIN), MAX) - zero) * step
    return _nearest(x, LOW, MANTISSA, MIN, MAX) * step


@triton.jit
def columns_kernel(
    work_ptr, u_ptr, step_ptr, zero_ptr, step2_ptr, zero2_ptr, mask_ptr, main_ptr, rest_ptr, error_ptr, rows, width,
    TWO: tl.constexpr, ZERO: tl.constexpr, LOW: tl.constexpr, MANTISSA: tl.constexpr, MIN: tl.constexpr,
    MAX: tl.constexpr, ZERO2: tl.constexpr, LOW2: tl.constexpr, MANTISSA2: tl.constexpr, MIN2: tl.constexpr,
    MAX2: tl.constexpr, ROWS: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """One program: ROWS rows, which stay in registers while their columns are rounded one after the other.

    Args:
        work_ptr, step_ptr, zero_ptr, step2_ptr, zero2_ptr, main_ptr, rest_ptr, error_ptr: float32 [rows, width].
        u_ptr: float32 [width, width], upper triangular.
        mask_ptr: float32 [width], 1 where a column has a second stage (TWO).
    """
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    column = tl.arange(0, WIDTH)
    inside, within = row < rows, column < width
    tile = inside[:, None] & within[None, :]
    work = tl.load(work_ptr + row[:, None] * width + column[None, :], mask=tile, other=0.0)
    for i in range(width):
        at = row * width + i
        value = tl.sum(tl.where((column == i)[None, :], work, 0.0), axis=1)
        q = _on_grid(value, step_ptr, zero_ptr, at, inside, ZERO, LOW, MANTISSA, MIN, MAX)
        tl.store(main_ptr + at, q, mask=inside)
        if TWO:
            more = _on_grid(value - q, step2_ptr, zero2_ptr, at, inside, ZERO2, LOW2, MANTISSA2, MIN2, MAX2)
            more = more * tl.load(mask_ptr + i)
            tl.store(rest_ptr + at, more, mask=inside)
            q = q + more
        error = tl.div_rn(value - q, tl.load(u_ptr + i * width + i) + tl.zeros_like(value))
        tl.store(error_ptr + at, error, mask=inside)
        u = tl.load(u_ptr + i * width + column, mask=within, other=0.0)
        work = work - error[:, None] * u[None, :]
