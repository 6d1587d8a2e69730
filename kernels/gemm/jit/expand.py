"""A weight [N, K] at rest in 4 or 8 bits, expanded to E4M3, a 16-bit float or INT8, with low-rank columns behind it.

Bound by memory: 4.5 bits are read and 8 written per value. Codes are loaded and results stored 16 bytes at a time.
"""

import triton
import triton.language as tl

from dq.kernels.gemm.jit.decode import (
    INT4,
    SMALL_FLOAT,
    byte_value,
    nibble,
    power_of_two,
    scale_value,
    shift_for,
    small_float,
    to_e4m3,
)  # fmt: skip

TO_E4M3, TO_FLOAT, TO_INT8 = (tl.constexpr(i) for i in range(3))
LEAST = tl.constexpr(1e-36)  # of scales: below it their 64th would be subnormal; MX gives 2^-127 to zeros


@triton.jit
def second_level(unit_ptr, row, inside, UNIT: tl.constexpr):
    """Second level of each row: none, one for the tensor, one per row (3: the pointer is to zero points instead)."""
    unit = tl.full(row.shape, 1.0, tl.float32)
    if UNIT == 1:
        unit = unit * tl.load(unit_ptr)
    elif UNIT == 2:
        unit = tl.load(unit_ptr + row, mask=inside, other=1.0)
    return unit


@triton.jit
def _largest(
    scale, scale_ptr, codes_ptr, row, inside, scale_row, groups, stride, SCALE: tl.constexpr, SIZE: tl.constexpr
):
    """Largest scale of each row [BN] among groups that hold anything; 1 for a row of zeros. The scale of a group of
    zeros is 1.0 by convention, far above those of weights; only where a scale is 1.0 the codes have to tell."""
    largest = tl.max(scale, axis=1)
    if tl.max(tl.max((scale == 1.0).to(tl.int32), axis=1), axis=0) > 0:
        largest = tl.zeros_like(largest)
        for group in range(groups):
            at = row[:, None] * stride + group * SIZE + tl.arange(0, SIZE)[None, :]
            code = tl.load(codes_ptr + at, mask=inside[:, None], other=0)
            filled = tl.max((code != 0).to(tl.int32), axis=1) > 0
            own = scale_value(tl.load(scale_ptr + scale_row * groups + group, mask=inside, other=0), SCALE)
            largest = tl.maximum(largest, tl.where(filled, own, 0.0))
    return tl.where(largest > LEAST, largest, 1.0)


@triton.jit
def _base(
    codes_ptr, scale_ptr, unit, up_ptr, row, inside, scale_row, groups, stride, rank,
    KIND: tl.constexpr, SCALE: tl.constexpr, GROUPS: tl.constexpr, RANK: tl.constexpr, BN: tl.constexpr,
    SIZE: tl.constexpr,
):  # fmt: skip
    """b [BN]: in E4M3 a value is code * scale / b, and its row is worth b * unit.

    E4M3 scales: 8. One scale for the row: itself, codes stay as they are. Else the largest scale of the row over a
    power of two that keeps its largest value within 448. Times a power of two that fits the columns behind.
    """
    if SCALE == SMALL_FLOAT:
        b = tl.full((BN,), 8.0, tl.float32)
    else:
        column = tl.arange(0, GROUPS)[None, :]
        known = inside[:, None] & (column < groups)
        scale = tl.load(scale_ptr + scale_row[:, None] * groups + column, mask=known, other=0.0)
        scale = tl.where(known, scale_value(scale, SCALE), 0.0)
        if GROUPS > 1:
            b = _largest(scale, scale_ptr, codes_ptr, row, inside, scale_row, groups, stride, SCALE, SIZE)
            b = b * (0.03125 if KIND == INT4 else 0.015625)
        else:
            b = tl.where(inside, tl.max(scale, axis=1), 1.0)
    if RANK > 0:
        column = tl.arange(0, RANK)[None, :]
        up = tl.load(up_ptr + row[:, None] * rank + column, mask=inside[:, None] & (column < rank), other=0.0)
        b = b * power_of_two(shift_for(tl.max(tl.abs(up.to(tl.float32)), axis=1), b * unit))
    return b


@triton.jit
def _low_rank(
    up_ptr, out_ptr, base, row, inside, k, rank, width,
    FP8: tl.constexpr, EXTRA: tl.constexpr,
):  # fmt: skip
    """Columns K.. of the result: [U1 | U1 | U2 | 0], U = up / base, U1 = E4M3(U), U2 = E4M3(U - U1)."""
    column = tl.arange(0, EXTRA)[None, :]
    behind = inside[:, None] & (column < width - k)
    value = tl.zeros((row.shape[0], EXTRA), tl.float32)
    if rank > 0:
        at = row[:, None] * rank + column % rank
        value = tl.load(up_ptr + at, mask=behind & (column < 3 * rank), other=0.0).to(tl.float32)
        value = tl.div_rn(value, tl.broadcast_to(base[:, None], value.shape))
    first = to_e4m3(value, FP8)
    rest = to_e4m3(value - small_float(first.to(tl.int32)), FP8)
    tl.store(out_ptr + row[:, None] * width + k + column, tl.where(column < 2 * rank, first, rest), mask=behind)


@triton.jit
def _scaled(value, factor, TARGET: tl.constexpr, FP8: tl.constexpr, out_ptr):
    """[BN, BG, E] codes as values of the target."""
    if TARGET == TO_INT8:
        return value.to(tl.int8)
    elif TARGET == TO_E4M3:
        return to_e4m3(value * factor, FP8)
    else:
        return (value * factor).to(out_ptr.dtype.element_ty)


@triton.jit(do_not_specialize=["n", "rank", "steps"])
def expand_kernel(
    codes_ptr, scale_ptr, unit_ptr, up_ptr, out_ptr, base_ptr,
    n, k, groups, stride, rank, width, rows_per_scale, steps,
    KIND: tl.constexpr, SCALE: tl.constexpr, UNIT: tl.constexpr, TARGET: tl.constexpr, FP8: tl.constexpr,
    BYTES: tl.constexpr, GROUPS: tl.constexpr, RANK: tl.constexpr, EXTRA: tl.constexpr,
    BN: tl.constexpr, BG: tl.constexpr,
):  # fmt: skip
    """One program: BN rows, every `tl.num_programs(1)`-th step of BG groups.

    Args:
        codes_ptr: uint8 [N, stride].
        scale_ptr: [ceil(N / rows_per_scale), groups]; groups = 1 for a scale per row.
        unit_ptr: second level, see UNIT of `second_level`.
        up_ptr: [N, rank] or unused (RANK = 0).
        out_ptr: [N, width]: bytes of E4M3, floats, or int8. base_ptr: float32 [N] (E4M3 only).
        BYTES: bytes of codes in a group, of 32 elements at least where a scale spans more.
        GROUPS: a power of two, at least `groups`, where the largest scale of a row is needed; 1 for a scale per row.
    """
    row = tl.program_id(0).to(tl.int64) * BN + tl.arange(0, BN)
    inside = row < n
    scale_row = row // rows_per_scale
    unit = second_level(unit_ptr, row, inside, UNIT)
    factor = unit
    if TARGET == TO_E4M3:
        base = _base(
            codes_ptr, scale_ptr, unit, up_ptr, row, inside, scale_row, groups, stride, rank,
            KIND, SCALE, GROUPS, RANK, BN, BYTES,
        )  # fmt: skip
        factor = base
        if tl.program_id(1) == 0:
            tl.store(base_ptr + row, base * unit, mask=inside)
            if EXTRA > 0:
                _low_rank(up_ptr, out_ptr, base * unit, row, inside, k, rank, width, FP8, EXTRA)
    FOUR: tl.constexpr = KIND < 2
    SIZE: tl.constexpr = BYTES * (2 if FOUR else 1)
    for step in range(tl.program_id(1), steps, tl.num_programs(1)):
        group = step * BG + tl.arange(0, BG)
        byte = group[:, None] * BYTES + tl.arange(0, BYTES)[None, :]
        valid = inside[:, None, None] & (byte < stride)[None, :, :]
        code = tl.load(codes_ptr + row[:, None, None] * stride + byte[None, :, :], mask=valid, other=0)
        if TARGET == TO_INT8:
            step_of = tl.full((BN, BG), 1.0, tl.float32)
        else:
            column = tl.where(groups > 1, group, 0)[None, :]
            known = inside[:, None] & (column < groups)
            scale = tl.load(scale_ptr + scale_row[:, None] * groups + column, mask=known, other=0.0)
            scale = scale_value(scale, SCALE)
            if TARGET == TO_E4M3:
                step_of = tl.div_rn(scale, tl.broadcast_to(factor[:, None], scale.shape))
            else:
                step_of = scale * factor[:, None]
        step_of = step_of[:, :, None]
        if FOUR:
            code = code.to(tl.int32)
            if UNIT == 3:
                zero = tl.load(unit_ptr + scale_row[:, None] * groups + column, mask=known, other=8).to(tl.float32)
                code, zero = code ^ 0x88, zero[:, :, None] - 8.0  # 0..15 as -8..7
            else:
                zero = 0.0
            low = _scaled(nibble(code & 15, KIND) - zero, step_of, TARGET, FP8, out_ptr)
            high = _scaled(nibble(code >> 4, KIND) - zero, step_of, TARGET, FP8, out_ptr)
            result = tl.reshape(tl.join(low, high), (BN, BG * SIZE))
        else:
            result = tl.reshape(_scaled(byte_value(code, KIND), step_of, TARGET, FP8, out_ptr), (BN, BG * SIZE))
        column = step * (BG * SIZE) + tl.arange(0, BG * SIZE)
        at = row[:, None] * width + column[None, :]
        tl.store(out_ptr + at, result, mask=inside[:, None] & (column < k)[None, :])
