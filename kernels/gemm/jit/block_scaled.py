"""Block-scaled matrix products of Blackwell's tensor cores: NVFP4, MXFP4 and MXFP8 as they lie in memory."""

import triton
import triton.language as tl

from dq.kernels.gemm.jit.gemm import _low_rank, _tile


@triton.jit
def _loaded(at, place, left, EVEN: tl.constexpr):
    """A tile of a row-major matrix; 0 from column `left` on, where K ends within a step."""
    return tl.load(at) if EVEN else tl.load(at, mask=(place < left)[None, :], other=0.0)


@triton.jit(do_not_specialize=["m"])
def block_scaled_kernel(
    a_ptr, a_scale_ptr, b_ptr, b_scale_ptr, row_ptr, unit_ptr, bias_ptr, low_ptr, up_ptr, out_ptr,
    m, n, words, parts, rank,
    FORMAT: tl.constexpr, GROUP: tl.constexpr, PACK: tl.constexpr, ROW: tl.constexpr, UNIT: tl.constexpr,
    BIAS: tl.constexpr, LOW: tl.constexpr, dtype: tl.constexpr, EVEN: tl.constexpr, WORD: tl.constexpr,
    PART: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, BAND: tl.constexpr,
):  # fmt: skip
    """y[m, n] = row[m] unit sum_g sa[m, g] sb[n, g] sum_{k in g} a[m, k] b[n, k] + sum_r low[m, r] up[n, r] + bias[n],
    rounded once.

    Args:
        a_ptr, b_ptr: [M, stride] and [N, stride], stride = K / PACK: bytes of two E2M1 codes (PACK = 2), or E4M3.
        a_scale_ptr, b_scale_ptr: [M, groups] and [N, groups], K / GROUP or more (the rest is not read where K is EVEN,
            and meets codes of 0 otherwise): E4M3 (NVFP4) or biased exponents in uint8 (MX).
        row_ptr: float32 [M] if ROW; unit_ptr: float32 [1] (UNIT = 1) or [N] (UNIT = 2).
        low_ptr, up_ptr: [M, rank] and [N, rank] in 16 bits (LOW), multiplied as `dtype`.
        words, parts: stride / WORD and groups / PART. As constants WORD and PART tell the compiler how rows are
            aligned: single bytes could not be copied while the tensor cores work.
        EVEN: K is a multiple of BK; else what lies behind K counts as 0.
    """
    tile_m, tile_n = _tile(n, m, BM, BN, BAND)
    row = tile_m * BM + tl.arange(0, BM)
    column = tile_n * BN + tl.arange(0, BN)
    codes, scales = tl.arange(0, BK // PACK), tl.arange(0, BK // GROUP)
    stride, groups = words * WORD, parts * PART
    # Beyond the edge rows are read again instead of masked; what they give is not stored.
    a_row, b_row = (row % m).to(tl.int64)[:, None], (column % n).to(tl.int64)[:, None]
    a_at = a_ptr + a_row * stride + codes[None, :]
    b_at = b_ptr + b_row * stride + codes[None, :]
    sa_at = a_scale_ptr + a_row * groups + scales[None, :]
    sb_at = b_scale_ptr + b_row * groups + scales[None, :]
    total = tl.zeros((BM, BN), tl.float32)
    for step in range(tl.cdiv(stride, BK // PACK)):
        left, behind = stride - step * (BK // PACK), groups - step * (BK // GROUP)
        a, sa = _loaded(a_at, codes, left, EVEN), _loaded(sa_at, scales, behind, EVEN)
        b, sb = _loaded(b_at, codes, left, EVEN), _loaded(sb_at, scales, behind, EVEN)
        total = tl.dot_scaled(a, sa, FORMAT, tl.trans(b), sb, FORMAT, total)
        a_at += BK // PACK
        b_at += BK // PACK
        sa_at += BK // GROUP
        sb_at += BK // GROUP
    if ROW:
        total = total * tl.load(row_ptr + row, mask=row < m, other=0.0)[:, None]
    if UNIT == 1:
        total = total * tl.load(unit_ptr)
    elif UNIT == 2:
        total = total * tl.load(unit_ptr + column, mask=column < n, other=0.0)[None, :]
    if LOW:
        total = _low_rank(total, low_ptr, up_ptr, row, column, m, n, rank, dtype)
    if BIAS:
        total += tl.load(bias_ptr + column, mask=column < n, other=0.0).to(tl.float32)[None, :]
    at = out_ptr + row.to(tl.int64)[:, None] * n + column[None, :]
    tl.store(at, total.to(out_ptr.dtype.element_ty), mask=(row < m)[:, None] & (column < n)[None, :])
