"""8-bit matrix products on tensor cores: INT8 with exact int32 sums, E4M3 with float32 sums."""

import triton
import triton.language as tl

from dq.kernels.gemm.jit.split import merged


@triton.jit
def _tile(n, m, BM: tl.constexpr, BN: tl.constexpr, BAND: tl.constexpr):
    """(row, column) of a program's tile; BAND tile rows run together, so that tiles in flight share what L2 holds."""
    down, across = tl.cdiv(m, BM), tl.cdiv(n, BN)
    program = tl.program_id(0)
    band = program // (BAND * across)
    size = tl.minimum(down - band * BAND, BAND)
    inner = program % (BAND * across)
    return band * BAND + inner % size, inner // size


@triton.jit
def _low_rank(result, low_ptr, up_ptr, row, column, m, n, rank, dtype: tl.constexpr):
    """result + low up^T, 32 ranks at a time."""
    for step in range(tl.cdiv(rank, 32)):
        at = step * 32 + tl.arange(0, 32)
        low = tl.load(
            low_ptr + (row % m).to(tl.int64)[:, None] * rank + at[None, :], mask=(at < rank)[None, :], other=0
        )
        up = tl.load(
            up_ptr + (column % n).to(tl.int64)[None, :] * rank + at[:, None], mask=(at < rank)[:, None], other=0
        )
        result = tl.dot(low.to(dtype), up.to(dtype), result)
    return result


@triton.jit(do_not_specialize=["m", "rank", "each", "split"])
def gemm_kernel(
    a_ptr, b_ptr, sa_ptr, sb_ptr, bias_ptr, low_ptr, up_ptr, out_ptr, partial_ptr, counter_ptr,
    m, n, k, groups, rows_per_scale, rank, each, split,
    LOW: tl.constexpr, dtype: tl.constexpr,
    INTEGER: tl.constexpr, GROUPED: tl.constexpr, BLOCK: tl.constexpr, BIAS: tl.constexpr, EVEN: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, BAND: tl.constexpr,
    SPLIT: tl.constexpr,
):  # fmt: skip
    """out[m, n] = sum_g sa[m, g] sb[n, g] sum_{k in g} a[m, k] b[n, k] + sum_r low[m, r] up[n, r] + bias[n], one
    BM x BN tile a program; rounded once.

    Args:
        a_ptr, b_ptr: int8 or E4M3, [M, K] and [N, K].
        sa_ptr, sb_ptr: float32 [M, groups] and [ceil(N / rows_per_scale), groups]; groups = 1 unless GROUPED.
        low_ptr, up_ptr: [M, rank] and [N, rank] in 16 bits (LOW), multiplied as `dtype`.
        GROUPED: a scale per BK columns, applied to each partial sum; else once at the end.
        BLOCK: the BN columns of a tile share their scale: rows_per_scale is a multiple of BN (with GROUPED).
        EVEN: K is a multiple of BK.
        SPLIT: `split` programs share a tile, `each` steps of BK columns for every one of them; not of integers, nor
            GROUPED. partial_ptr, counter_ptr: float32 [split, M, N] and int32 zeros [programs(0)].
    """
    tile_m, tile_n = _tile(n, m, BM, BN, BAND)
    row = tile_m * BM + tl.arange(0, BM)
    column = tile_n * BN + tl.arange(0, BN)
    # Beyond the edge rows are read again instead of masked; what they give is not stored.
    a_at = a_ptr + (row % m).to(tl.int64)[:, None] * k + tl.arange(0, BK)[None, :]
    b_at = b_ptr + (column % n).to(tl.int64)[None, :] * k + tl.arange(0, BK)[:, None]
    sa_at = sa_ptr + (row % m).to(tl.int64) * groups
    sb_at = sb_ptr + (column % n).to(tl.int64) // rows_per_scale * groups
    SUM: tl.constexpr = tl.int32 if INTEGER else tl.float32
    total = tl.zeros((BM, BN), tl.float32 if GROUPED else SUM)
    steps = tl.cdiv(k, BK)
    first = 0
    if SPLIT:
        first = tl.program_id(1) * each
        steps = tl.minimum(steps, first + each)
        a_at += first * BK
        b_at += first * BK
    for step in range(first, steps):
        if GROUPED:  # ahead of the product, which hides how long they take
            sa = tl.load(sa_at + step)
            sb = tl.load(sb_ptr + tile_n * BN // rows_per_scale * groups + step) if BLOCK else tl.load(sb_at + step)
        if EVEN:
            a, b = tl.load(a_at), tl.load(b_at)
        else:
            left = k - step * BK
            a = tl.load(a_at, mask=tl.arange(0, BK)[None, :] < left, other=0.0)
            b = tl.load(b_at, mask=tl.arange(0, BK)[:, None] < left, other=0.0)
        if GROUPED:
            part = tl.dot(a, b, out_dtype=SUM).to(tl.float32)
            total += part * ((sa * sb)[:, None] if BLOCK else sa[:, None] * sb[None, :])
        else:
            total = tl.dot(a, b, total, out_dtype=SUM)
        a_at += BK
        b_at += BK
    inside = (row < m)[:, None] & (column < n)[None, :]
    at = row.to(tl.int64)[:, None] * n + column[None, :]
    last = True
    if SPLIT:
        total, last = merged(total, partial_ptr, counter_ptr, at, inside, tl.full((), 1, tl.int64) * m * n, split)
    if last:
        result = total.to(tl.float32)
        if not GROUPED:
            result = result * (tl.load(sa_at)[:, None] * tl.load(sb_at)[None, :])
        if LOW:
            result = _low_rank(result, low_ptr, up_ptr, row, column, m, n, rank, dtype)
        if BIAS:
            result += tl.load(bias_ptr + column, mask=column < n, other=0.0).to(tl.float32)[None, :]
        tl.store(out_ptr + at, result.to(out_ptr.dtype.element_ty), mask=inside)
