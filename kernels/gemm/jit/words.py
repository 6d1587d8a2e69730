"""Expansion of 4-bit codes to E4M3, eight codes in a register at a time: what `expand_kernel` gives, faster.

All codes of a group become one of 16 bytes. Those are computed from its scale by a few instructions, and a byte
permutation looks four up at once: 2 instructions per value where arithmetic takes 8, so that memory is what limits.

A lane takes chunks of two words: it loads 8 bytes and stores the 16 that they become, side by side with its neighbours,
and loads the one scale that both have. A warp, or a few of them where rows are long, has all of a row in registers
before the largest scale is known: nothing is loaded twice, and a row waits for memory once.
"""

import triton
import triton.language as tl

from dq.kernels.gemm.jit.decode import (
    INT4,
    SMALL_FLOAT,
    nibble,
    power_of_two,
    scale_value,
    shift_for,
    small_float,
    to_e4m3,
)
from dq.kernels.gemm.jit.expand import LEAST, second_level

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
def _four(word, factor, KIND: tl.constexpr):
    """The E4M3 of the first four codes of words times factor, by arithmetic."""
    out = tl.zeros(word.shape, tl.int32)
    for i in tl.static_range(4):
        out = out | (to_e4m3(nibble((word >> (4 * i)) & 15, KIND) * factor, False).to(tl.int32) << (8 * i))
    return out


@triton.jit
def _bytes_of(word, factor, KIND: tl.constexpr, ASM: tl.constexpr):
    """Words of eight codes [BN, C, 2] -> the E4M3 of the first four and of the last four times factor [BN, C, 1].

    The table is asked for at every word, so that it lies where its words do; the compiler makes one for both.
    """
    factor = tl.broadcast_to(factor, word.shape)
    if not ASM:
        return _four(word, factor, KIND), _four(word >> 16, factor, KIND)
    elif KIND == INT4:
        a, b, c, d = tl.inline_asm_elementwise(
            INT4_BYTES, "=&r,=&r,=&r,=&r,f", [factor], (tl.int32, tl.int32, tl.int32, tl.int32), is_pure=True, pack=1
        )
        return tl.inline_asm_elementwise(
            INT4_WORD, "=&r,=&r,r,r,r,r,r", [word, a, b, c, d], (tl.int32, tl.int32), is_pure=True, pack=1
        )
    else:
        a, b = tl.inline_asm_elementwise(
            E2M1_BYTES, "=&r,=&r,f", [factor], (tl.int32, tl.int32), is_pure=True, pack=1
        )  # fmt: skip
        return tl.inline_asm_elementwise(
            E2M1_WORD, "=&r,=&r,r,r,r", [word, a, b], (tl.int32, tl.int32), is_pure=True, pack=1
        )


@triton.jit
def _behind(
    out_ptr, up, base, row, inside, k, rank, width,
    FP8: tl.constexpr, RANK: tl.constexpr, EXTRA: tl.constexpr,
):  # fmt: skip
    """Columns K.. of rows [BN, 1]: [U1 | U1 | U2 | 0], U = up / base, U1 = E4M3(U), U2 = E4M3(U - U1)."""
    out_ptr += row * width + k
    column = tl.arange(0, EXTRA)[None, :]
    zeros = tl.zeros((row.shape[0], EXTRA), tl.uint8)
    tl.store(out_ptr + column, zeros, mask=inside & (column >= 3 * rank) & (column < width - k))
    if RANK > 0:
        column = tl.arange(0, RANK)[None, :]
        value = tl.div_rn(up, tl.broadcast_to(base, up.shape))
        first = to_e4m3(value, FP8)
        rest = to_e4m3(value - small_float(first.to(tl.int32)), FP8)
        known = inside & (column < rank)
        tl.store(out_ptr + column, first, mask=known)
        tl.store(out_ptr + rank + column, first, mask=known)
        tl.store(out_ptr + 2 * rank + column, rest, mask=known)


@triton.jit(do_not_specialize=["n", "rank"])
def expand_words_kernel(
    words_ptr, scale_ptr, unit_ptr, up_ptr, out_ptr, out_words_ptr, base_ptr,
    n, k, groups, stride, rank, width, rows_per_scale,
    KIND: tl.constexpr, SCALE: tl.constexpr, UNIT: tl.constexpr, FP8: tl.constexpr, ASM: tl.constexpr,
    WORDS: tl.constexpr, RANK: tl.constexpr, EXTRA: tl.constexpr, BN: tl.constexpr, C: tl.constexpr,
    TILES: tl.constexpr,
):  # fmt: skip
    """One program: BN whole rows, in TILES tiles of C chunks, the last ones masked.

    Args:
        words_ptr: int32 [N, stride], eight codes each; K is a multiple of 8.
        out_ptr, out_words_ptr: the same E4M3 [N, width], as bytes and as int32; width is a multiple of 4.
        ASM: look values up; else, for the interpreter, by arithmetic.
        WORDS: words that share a scale, 0 where a row does.
        others: as those of `expand_kernel`.
    """
    row = tl.program_id(0).to(tl.int64) * BN + tl.arange(0, BN)[:, None]
    inside = row < n
    unit = second_level(unit_ptr, row, inside, UNIT)
    # Of scales a tile has one dimension: of two the compiler would not know which to spread over lanes.
    flat = tl.arange(0, BN * C)
    flat_row = tl.program_id(0).to(tl.int64) * BN + flat // C
    words = ()
    scales = ()
    for t in tl.static_range(TILES):
        at = (t * C * 2 + tl.arange(0, C * 2))[None, :]
        word = tl.load(words_ptr + row * stride + at, mask=inside & (at < k // 8), other=0)
        words = words + (tl.reshape(word, (BN, C, 2)),)
        if WORDS > 0:
            group = (t * C + flat % C) // (WORDS // 2)
            known = (flat_row < n) & (group < groups)
            scale = tl.load(scale_ptr + flat_row // rows_per_scale * groups + group, mask=known, other=0)
            scales = scales + (tl.reshape(scale, (BN, C)),)
    if WORDS == 0:
        own = scale_value(tl.load(scale_ptr + row // rows_per_scale * groups, mask=inside, other=0), SCALE)
    up = tl.zeros((BN, 1), tl.float32)
    if RANK > 0:
        column = tl.arange(0, RANK)[None, :]
        up = tl.load(up_ptr + row * rank + column, mask=inside & (column < rank), other=0.0).to(tl.float32)

    if SCALE == SMALL_FLOAT:
        base = tl.full((BN, 1), 8.0, tl.float32)
    elif WORDS == 0:
        base = tl.where(inside, own, 1.0)
    else:  # a group of zeros does not count, and no chunk of it does
        largest = tl.zeros((BN, C), tl.float32)
        for t in tl.static_range(TILES):
            first, second = tl.split(words[t])
            largest = tl.maximum(largest, tl.where((first | second) != 0, scale_value(scales[t], SCALE), 0.0))
        base = tl.max(largest, axis=1, keep_dims=True)
        base = tl.where(base > LEAST, base, 1.0) * (0.03125 if KIND == INT4 else 0.015625)
    if RANK > 0:
        base = base * power_of_two(shift_for(tl.max(tl.abs(up), axis=1, keep_dims=True), base * unit))
    tl.store(base_ptr + row, base * unit, mask=inside)
    if EXTRA > 0:
        _behind(out_ptr, up, base * unit, row, inside, k, rank, width, FP8, RANK, EXTRA)

    factor = tl.div_rn(own, base) if WORDS == 0 else base
    for t in tl.static_range(TILES):
        if WORDS > 0:
            scale = scale_value(scales[t], SCALE)
            factor = tl.div_rn(scale, tl.broadcast_to(base, scale.shape))
        first, second = _bytes_of(words[t], factor[:, :, None], KIND, ASM)
        result = tl.reshape(tl.join(first, second), (BN, C * 4))
        at = (t * C * 4 + tl.arange(0, C * 4))[None, :]
        tl.store(out_words_ptr + row * (width // 4) + at, result, mask=inside & (at < k // 4))
