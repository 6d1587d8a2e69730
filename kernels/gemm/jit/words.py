"""Expansion of 4-bit codes to E4M3, eight codes in a register at a time: what `expand_kernel` gives, faster.

All codes of a group become one of 16 bytes. Those are computed once per group, and a byte permutation looks four up in
one instruction: 2 instructions per value where arithmetic takes 8, so that memory is what limits. Assembly, so not for
the interpreter; `expand_kernel` is its twin there.
"""

import triton
import triton.language as tl

from dq.kernels.gemm.jit.decode import INT4, scale_value
from dq.kernels.gemm.jit.expand import _base, _low_rank, _unit

# Bytes of E4M3 of 0, 1, .. 7 times a factor (operand 4) in 0 and 1; of -8, .. -1 in 2 and 3.
INT4_BYTES = tl.constexpr("""{
    .reg .f32 b, c, d, e, f, g, h;
    .reg .b16 p, q, r, s, t;
    .reg .b32 u, n;
    mul.rn.f32 b, $4, 0f40000000;
    mul.rn.f32 c, $4, 0f40400000;
    mul.rn.f32 d, $4, 0f40800000;
    mul.rn.f32 e, $4, 0f40A00000;
    mul.rn.f32 f, $4, 0f40C00000;
    mul.rn.f32 g, $4, 0f40E00000;
    mul.rn.f32 h, $4, 0f41000000;
    cvt.rn.satfinite.e4m3x2.f32 p, $4, 0f00000000;
    cvt.rn.satfinite.e4m3x2.f32 q, c, b;
    cvt.rn.satfinite.e4m3x2.f32 r, e, d;
    cvt.rn.satfinite.e4m3x2.f32 s, g, f;
    cvt.rn.satfinite.e4m3x2.f32 t, 0f00000000, h;
    mov.b32 $0, {p, q};
    mov.b32 $1, {r, s};
    cvt.u32.u16 u, t;
    prmt.b32 $2, $1, u, 0x1234;
    prmt.b32 $3, $0, $1, 0x1234;
    or.b32 $2, $2, 0x80808080;
    or.b32 $3, $3, 0x80808080;
}""")
# Bytes of E4M3 of 0, 0.5, 1, 1.5 times a factor (operand 2) in 0, of 2, 3, 4, 6 in 1.
E2M1_BYTES = tl.constexpr("""{
    .reg .f32 a, c, d, e, f, g;
    .reg .b16 p, q, r, s;
    mul.rn.f32 a, $2, 0f3F000000;
    mul.rn.f32 c, $2, 0f3FC00000;
    mul.rn.f32 d, $2, 0f40000000;
    mul.rn.f32 e, $2, 0f40400000;
    mul.rn.f32 f, $2, 0f40800000;
    mul.rn.f32 g, $2, 0f40C00000;
    cvt.rn.satfinite.e4m3x2.f32 p, a, 0f00000000;
    cvt.rn.satfinite.e4m3x2.f32 q, c, $2;
    cvt.rn.satfinite.e4m3x2.f32 r, e, d;
    cvt.rn.satfinite.e4m3x2.f32 s, g, f;
    mov.b32 $0, {p, q};
    mov.b32 $1, {r, s};
}""")
# Eight codes (operand 2) looked up: 3 bits select among the bytes in 3 and 4 or, where the code is negative, 5 and 6.
INT4_WORD = tl.constexpr("""{
    .reg .b32 low, sign, next, far, a, b, m;
    and.b32 low, $2, 0x77777777;
    shr.u32 sign, $2, 3;
    and.b32 sign, sign, 0x11111111;
    shr.u32 next, low, 16;
    shr.u32 far, sign, 16;
    prmt.b32 a, $3, $4, low;
    prmt.b32 b, $5, $6, low;
    prmt.b32 m, 0x0000FF00, 0, sign;
    lop3.b32 $0, b, a, m, 0xE4;
    prmt.b32 a, $3, $4, next;
    prmt.b32 b, $5, $6, next;
    prmt.b32 m, 0x0000FF00, 0, far;
    lop3.b32 $1, b, a, m, 0xE4;
}""")
E2M1_WORD = tl.constexpr("""{
    .reg .b32 low, sign, next, far, a, m;
    and.b32 low, $2, 0x77777777;
    shr.u32 sign, $2, 3;
    and.b32 sign, sign, 0x11111111;
    shr.u32 next, low, 16;
    shr.u32 far, sign, 16;
    prmt.b32 a, $3, $4, low;
    prmt.b32 m, 0x00008000, 0, sign;
    or.b32 $0, a, m;
    prmt.b32 a, $3, $4, next;
    prmt.b32 m, 0x00008000, 0, far;
    or.b32 $1, a, m;
}""")


@triton.jit
def _bytes_of(word, factor, KIND: tl.constexpr):
    """Words of eight codes [BN, BG, W] -> the E4M3 of the first four and of the last four times factor [BN, BG]."""
    if KIND == INT4:
        a, b, c, d = tl.inline_asm_elementwise(
            INT4_BYTES, "=&r,=&r,=&r,=&r,f", [factor], (tl.int32, tl.int32, tl.int32, tl.int32), is_pure=True, pack=1
        )
        table = [word, a[:, :, None], b[:, :, None], c[:, :, None], d[:, :, None]]
        return tl.inline_asm_elementwise(
            INT4_WORD, "=&r,=&r,r,r,r,r,r", table, (tl.int32, tl.int32), is_pure=True, pack=1
        )
    else:
        a, b = tl.inline_asm_elementwise(
            E2M1_BYTES, "=&r,=&r,f", [factor], (tl.int32, tl.int32), is_pure=True, pack=1
        )  # fmt: skip
        table = [word, a[:, :, None], b[:, :, None]]
        return tl.inline_asm_elementwise(E2M1_WORD, "=&r,=&r,r,r,r", table, (tl.int32, tl.int32), is_pure=True, pack=1)


@triton.jit(do_not_specialize=["n", "rank", "steps"])
def expand_words_kernel(
    words_ptr, scale_ptr, unit_ptr, up_ptr, out_ptr, out_words_ptr, base_ptr,
    n, k, groups, stride, rank, width, rows_per_scale, steps,
    KIND: tl.constexpr, SCALE: tl.constexpr, UNIT: tl.constexpr, FP8: tl.constexpr, WORDS: tl.constexpr,
    GROUPS: tl.constexpr, RANK: tl.constexpr, EXTRA: tl.constexpr, BN: tl.constexpr, BG: tl.constexpr,
):  # fmt: skip
    """One program: BN rows, every `tl.num_programs(1)`-th step of BG groups.

    Args:
        words_ptr: int32 [N, stride], eight codes each; K is a multiple of 8.
        out_ptr, out_words_ptr: the same E4M3 [N, width], as bytes and as int32; width is a multiple of 4.
        WORDS: words that share a scale, or 8 where a row does.
        others: as those of `expand_kernel`.
    """
    row = tl.program_id(0).to(tl.int64) * BN + tl.arange(0, BN)
    inside = row < n
    scale_row = row // rows_per_scale
    unit = _unit(unit_ptr, row, inside, UNIT)
    base = _base(
        words_ptr, scale_ptr, unit, up_ptr, row, inside, scale_row, groups, stride, rank,
        KIND, SCALE, GROUPS, RANK, BN, WORDS,
    )  # fmt: skip
    if tl.program_id(1) == 0:
        tl.store(base_ptr + row, base * unit, mask=inside)
        if EXTRA > 0:
            _low_rank(up_ptr, out_ptr, base * unit, row, inside, k, rank, width, FP8, EXTRA)
    for step in range(tl.program_id(1), steps, tl.num_programs(1)):
        group = step * BG + tl.arange(0, BG)
        at = group[:, None] * WORDS + tl.arange(0, WORDS)[None, :]
        valid = inside[:, None, None] & (at < k // 8)[None, :, :]
        word = tl.load(words_ptr + row[:, None, None] * stride + at[None, :, :], mask=valid, other=0)
        column = tl.where(groups > 1, group, 0)[None, :]
        known = inside[:, None] & (column < groups)
        scale = scale_value(tl.load(scale_ptr + scale_row[:, None] * groups + column, mask=known, other=0.0), SCALE)
        factor = tl.div_rn(scale, tl.broadcast_to(base[:, None], scale.shape))
        first, second = _bytes_of(word, factor, KIND)
        result = tl.reshape(tl.join(first, second), (BN, BG * WORDS * 2))
        column = step * (BG * WORDS * 2) + tl.arange(0, BG * WORDS * 2)
        out_at = out_words_ptr + row[:, None] * (width // 4) + column[None, :]
        tl.store(out_at, result, mask=inside[:, None] & (column < k // 4)[None, :])
