"""Block-scaled matrix products of Blackwell's tensor cores: NVFP4, MXFP4 and MXFP8 as they lie in memory."""

import triton
import triton.language as tl


@triton.jit(do_not_specialize=["m"])
def block_scaled_kernel(
    a_ptr, a_scale_ptr, b_ptr, b_scale_ptr, row_ptr, unit_ptr, bias_ptr, out_ptr,
    m, n, k,
    FORMAT: tl.constexpr, GROUP: tl.constexpr, PACK: tl.constexpr, ROW: tl.constexpr, UNIT: tl.constexpr,
    BIAS: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, BAND: tl.constexpr,
):  # fmt: skip
    """out[m, n] = row[m] unit sum_g sa[m, g] sb[n, g] sum_{k in g} a[m, k] b[n, k] + bias[n].

    Args:
        a_ptr, b_ptr: [M, K / PACK] and [N, K / PACK]: bytes of two E2M1 codes (PACK = 2), or E4M3.
        a_scale_ptr, b_scale_ptr: [M, K / GROUP] and [N, K / GROUP]: E4M3 (NVFP4) or biased exponents in uint8 (MX).
        row_ptr: float32 [M] if ROW; unit_ptr: float32 [1] (UNIT = 1) or [N] (UNIT = 2).
        k: a multiple of BK, so that no code beyond a row is multiplied.
    """
    down, across = tl.cdiv(m, BM), tl.cdiv(n, BN)
    program = tl.program_id(0)
    band = program // (BAND * across)
    size = tl.minimum(down - band * BAND, BAND)
    inner = program % (BAND * across)
    row = (band * BAND + inner % size) * BM + tl.arange(0, BM)
    column = inner // size * BN + tl.arange(0, BN)
    codes, scales = tl.arange(0, BK // PACK), tl.arange(0, BK // GROUP)
    # Beyond the edge rows are read again instead of masked; what they give is not stored.
    a_row, b_row = (row % m).to(tl.int64)[:, None], (column % n).to(tl.int64)[:, None]
    a_at = a_ptr + a_row * (k // PACK) + codes[None, :]
    b_at = b_ptr + b_row * (k // PACK) + codes[None, :]
    sa_at = a_scale_ptr + a_row * (k // GROUP) + scales[None, :]
    sb_at = b_scale_ptr + b_row * (k // GROUP) + scales[None, :]
    total = tl.zeros((BM, BN), tl.float32)
    for _ in range(k // BK):
        total = tl.dot_scaled(
            tl.load(a_at), tl.load(sa_at), FORMAT, tl.trans(tl.load(b_at)), tl.load(sb_at), FORMAT, total
        )
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
    if BIAS:
        total += tl.load(bias_ptr + column, mask=column < n, other=0.0).to(tl.float32)[None, :]
    at = out_ptr + row.to(tl.int64)[:, None] * n + column[None, :]
    tl.store(at, total.to(out_ptr.dtype.element_ty), mask=(row < m)[:, None] & (column < n)[None, :])
