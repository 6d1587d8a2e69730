"""x [M, K] @ W^T for few rows: W is read once, at its width at rest, and decoded in registers.

Bound by the bytes of W. W stands left in the dot product, so that the rows of x fill its narrow side; even and odd
columns of 4-bit codes go in separate products, because a byte holds one of each. K is shared out to the warps of a
program (axis 0 of everything), each with loads of its own in flight, and their sums are added at the end.
"""

import triton
import triton.language as tl

from dq.kernels.gemm.jit.decode import E2M1, E4M3, INT4, SMALL_FLOAT, byte_value, nibble, scale_value
from dq.kernels.gemm.jit.split import merged

# Four bytes (operand 2) to two pairs of 16-bit lanes. Low and high nibbles apart: a block with four results would be
# computed once for each product that takes two of them.
# INT4: a code, its sign bit flipped, becomes the lowest bits of 128 (BF16) or 1024 (FP16); that and 8 are subtracted.
# The pairs are bytes 0 and 2, then 1 and 3: no byte moves, `_halves` brings x into the same order.
_INT4 = """{{
    .reg .b32 a, b, one, off;
    mov.b32 one, {one};
    mov.b32 off, {off};
    {shift}
    lop3.b32 $0, a, 0x000F000F, {magic}, 0x6A;
    lop3.b32 $1, b, 0x000F000F, {magic}, 0x6A;
    fma.rn.{t} $0, $0, one, off;
    fma.rn.{t} $1, $1, one, off;
}}"""
# The same without the subtraction, of signed codes or (bits as they are) of unsigned ones.
_RAW = """{{
    .reg .b32 a, b;
    {shift}
    lop3.b32 $0, a, 0x000F000F, {magic}, 0x6A;
    lop3.b32 $1, b, 0x000F000F, {magic}, 0x6A;
}}"""
# Small floats: a byte in the upper half of its lane, its sign moved to bit 15, exponent and mantissa to where a
# subnormal number has them; a power of two makes that normal. Operands 3 and 4, if any, scale each of the four bytes.
_FLOAT = """{{
    .reg .b32 a, b, c, d, up, zero;
    mov.b32 up, {up};
    mov.b32 zero, 0x80008000;
    prmt.b32 a, $2, 0, 0x1404;
    prmt.b32 b, $2, 0, 0x3424;
    {shift}
    shr.u32 c, a, {down};
    shr.u32 d, b, {down};
    and.b32 c, c, {mask};
    and.b32 d, d, {mask};
    lop3.b32 $0, a, 0x80008000, c, 0xEA;
    lop3.b32 $1, b, 0x80008000, d, 0xEA;
    {normal}
    {scale}
}}"""
_NORMAL = "fma.rn.{t} $0, $0, up, zero;\n    fma.rn.{t} $1, $1, up, zero;"
_LEFT = "shl.b32 a, a, 4;\n    shl.b32 b, b, 4;"
_LOW, _HIGH = "mov.b32 a, $2;\n    shr.u32 b, $2, 8;", "shr.u32 a, $2, 4;\n    shr.u32 b, $2, 12;"
_SCALE = "fma.rn.{t} $0, $0, $3, zero;\n    fma.rn.{t} $1, $1, $4, zero;"
_BF16 = dict(t="bf16x2", one="0x3F803F80", off="0xC308C308", magic="0x43084308")
_FP16 = dict(t="f16x2", one="0x3C003C00", off="0xE408E408", magic="0x64086408")
_E2M1_BF16 = dict(t="bf16x2", up="0x7E807E80", down=6, mask="0x01C001C0")
_E2M1_FP16 = dict(t="f16x2", up="0x74007400", down=3, mask="0x0E000E00")
_E4M3_BF16 = dict(t="bf16x2", up="0x7B807B80", down=4, mask="0x07F007F0")
_E4M3_FP16 = dict(t="f16x2", up="0x5C005C00", down=1, mask="0x3F803F80")


def _both(
    text: str, low: str, high: str, bf16: dict, fp16: dict, scale: str = "", normal: str = _NORMAL
) -> tuple[tl.constexpr, ...]:
    """Assembly for (low nibbles in BF16, high ones in BF16, low ones in FP16, high ones in FP16)."""
    ways = [dict(d, shift=shift) for d in (bf16, fp16) for shift in (low, high)]
    return tuple(tl.constexpr(text.format(scale=scale.format(**w), normal=normal.format(**w), **w)) for w in ways)


INT4_LB, INT4_HB, INT4_LH, INT4_HH = _both(_INT4, _LOW, _HIGH, _BF16, _FP16)
RAW_LB, RAW_HB, RAW_LH, RAW_HH = _both(_RAW, _LOW, _HIGH, _BF16, _FP16)
PLAIN_LB, PLAIN_HB, PLAIN_LH, PLAIN_HH = _both(
    _RAW, _LOW, _HIGH, dict(t="", magic="0x43004300"), dict(t="", magic="0x64006400")
)
E2M1_LB, E2M1_HB, E2M1_LH, E2M1_HH = _both(_FLOAT, _LEFT, "", _E2M1_BF16, _E2M1_FP16)
SCALED_LB, SCALED_HB, SCALED_LH, SCALED_HH = _both(_FLOAT, _LEFT, "", _E2M1_BF16, _E2M1_FP16, _SCALE)
# Where the scale itself makes the number normal: it comes times 2^117 (BF16), which 448 times still is in range.
FOLDED_LB, FOLDED_HB, _, _ = _both(_FLOAT, _LEFT, "", _E2M1_BF16, _E2M1_FP16, _SCALE, "")
E4M3_B, _, E4M3_H, _ = _both(_FLOAT, "", "", _E4M3_BF16, _E4M3_FP16)
ONE, TWO = tl.constexpr("=&r,=&r,r"), tl.constexpr("=&r,=&r,r,r,r")  # registers of one and of two arguments


@triton.jit
def _asm(code, LOW: tl.constexpr, HIGH: tl.constexpr, HALF: tl.constexpr):
    """Two pieces of assembly applied to bytes; the compiler wants the type of their results spelt out."""
    if HALF:
        low = tl.inline_asm_elementwise(LOW, ONE, [code], tl.float16, is_pure=True, pack=4)
        return low, tl.inline_asm_elementwise(HIGH, ONE, [code], tl.float16, is_pure=True, pack=4)
    else:
        low = tl.inline_asm_elementwise(LOW, ONE, [code], tl.bfloat16, is_pure=True, pack=4)
        return low, tl.inline_asm_elementwise(HIGH, ONE, [code], tl.bfloat16, is_pure=True, pack=4)


@triton.jit
def _raw(code, ZERO: tl.constexpr, dtype: tl.constexpr):
    """As `_pair` of INT4, plus 136 (BF16) or 1032 (FP16); of unsigned codes plus 128 or 1024."""
    HALF: tl.constexpr = dtype == tl.float16
    LOW: tl.constexpr = (PLAIN_LH if HALF else PLAIN_LB) if ZERO else (RAW_LH if HALF else RAW_LB)
    HIGH: tl.constexpr = (PLAIN_HH if HALF else PLAIN_HB) if ZERO else (RAW_HH if HALF else RAW_HB)
    return _asm(code, LOW, HIGH, HALF)


@triton.jit
def _pair(code, KIND: tl.constexpr, dtype: tl.constexpr, ASM: tl.constexpr):
    """Bytes -> (values of their low nibbles, of their high ones), exact in dtype; INT4 by assembly in crossed order."""
    if ASM:
        HALF: tl.constexpr = dtype == tl.float16
        LOW: tl.constexpr = (INT4_LH if HALF else INT4_LB) if KIND == INT4 else (E2M1_LH if HALF else E2M1_LB)
        HIGH: tl.constexpr = (INT4_HH if HALF else INT4_HB) if KIND == INT4 else (E2M1_HH if HALF else E2M1_HB)
        return _asm(code, LOW, HIGH, HALF)
    else:
        code = code.to(tl.int32)
        return nibble(code & 15, KIND).to(dtype), nibble(code >> 4, KIND).to(dtype)


@triton.jit
def _halves(x, CROSS: tl.constexpr, S: tl.constexpr, BM: tl.constexpr, BYTES: tl.constexpr):
    """(even, odd) columns of x [S, BM, 2 BYTES] as right operands [S, BYTES, BM]; CROSS: bytes 1 and 2 of every four
    changed places, as the codes of `_pair` lie."""
    if CROSS:
        x = tl.permute(tl.reshape(x, (S, BM, BYTES // 4, 2, 2, 2)), (0, 1, 2, 4, 3, 5))
    even, odd = tl.split(tl.reshape(x, (S, BM, BYTES, 2)))
    return tl.permute(even, (0, 2, 1)), tl.permute(odd, (0, 2, 1))


@triton.jit
def _scaled_pair(code, scale, FOLD: tl.constexpr, dtype: tl.constexpr, ASM: tl.constexpr):
    """`_pair` of E2M1 times a scale of the same shape: two and four significant bits, so exact. FOLD: times 2^-9."""
    if ASM and dtype == tl.float16:
        low = tl.inline_asm_elementwise(SCALED_LH, TWO, [code, scale], tl.float16, is_pure=True, pack=4)
        return low, tl.inline_asm_elementwise(SCALED_HH, TWO, [code, scale], tl.float16, is_pure=True, pack=4)
    elif ASM:
        LOW: tl.constexpr = FOLDED_LB if FOLD else SCALED_LB
        HIGH: tl.constexpr = FOLDED_HB if FOLD else SCALED_HB
        low = tl.inline_asm_elementwise(LOW, TWO, [code, scale], tl.bfloat16, is_pure=True, pack=4)
        return low, tl.inline_asm_elementwise(HIGH, TWO, [code, scale], tl.bfloat16, is_pure=True, pack=4)
    else:
        code, scale = code.to(tl.int32), scale.to(tl.float32)
        return (nibble(code & 15, E2M1) * scale).to(dtype), (nibble(code >> 4, E2M1) * scale).to(dtype)


@triton.jit
def _byte(code, KIND: tl.constexpr, dtype: tl.constexpr, ASM: tl.constexpr):
    """Bytes -> their values, exact in dtype."""
    if ASM and KIND == E4M3 and dtype == tl.float16:
        return tl.inline_asm_elementwise(E4M3_H, ONE, [code], tl.float16, is_pure=True, pack=4)
    elif ASM and KIND == E4M3:
        return tl.inline_asm_elementwise(E4M3_B, ONE, [code], tl.bfloat16, is_pure=True, pack=4)
    elif ASM:
        return code.to(tl.int8, bitcast=True).to(dtype)
    else:
        return byte_value(code, KIND).to(dtype)


@triton.jit
def _loaded(x_at, w_at, x_ok, left, EVEN: tl.constexpr, SIZE: tl.constexpr, BYTES: tl.constexpr, dtype: tl.constexpr):
    """(x [S, BM, SIZE], codes [S, BN, BYTES]) of a step; `left` [S] columns are left of K."""
    if EVEN:
        return tl.load(x_at, mask=x_ok, other=0.0).to(dtype), tl.load(w_at)
    else:
        # Bytes beyond a row belong to the next one; what stands there meets zeros of x.
        inside = (tl.arange(0, BYTES) * (SIZE // BYTES))[None, :] < left[:, None]
        code = tl.load(w_at, mask=inside[:, None, :], other=0)
        inside = tl.arange(0, SIZE)[None, :] < left[:, None]
        return tl.load(x_at, mask=x_ok & inside[:, None, :], other=0.0).to(dtype), code


@triton.jit
def _step(
    total, x_at, w_at, scale_at, zero_at, step, x_ok, k, groups,
    KIND: tl.constexpr, SCALE: tl.constexpr, ZERO: tl.constexpr, dtype: tl.constexpr, ASM: tl.constexpr,
    EVEN: tl.constexpr, BYTES: tl.constexpr, INSIDE: tl.constexpr, FOLD: tl.constexpr, PER_STEP: tl.constexpr,
    S: tl.constexpr, BN: tl.constexpr, BM: tl.constexpr,
):  # fmt: skip
    """`total` [S, BN, BM] plus what the next BYTES bytes of each row of W give; `step` [S] counts along K."""
    SIZE: tl.constexpr = BYTES * (2 if KIND < 2 else 1)
    # For one row of x its sum is cheaper than a subtraction from every code, and zero points need the sum anyway.
    RAW: tl.constexpr = ASM and KIND == INT4 and (BM == 1 or ZERO)
    x, code = _loaded(x_at, w_at, x_ok, k - step * SIZE, EVEN, SIZE, BYTES, dtype)
    part = total
    if PER_STEP:
        part = tl.zeros((S, BN, BM), tl.float32)
    if RAW or ZERO:
        own = (1024.0 if dtype == tl.float16 else 128.0) if RAW else 0.0
        own = tl.full((S, BN), own if ZERO else own + 8.0, tl.float32)
        if ZERO:
            own += tl.load(zero_at + step[:, None], mask=(step < groups)[:, None], other=0).to(tl.float32)
        part -= own[:, :, None] * tl.sum(x.to(tl.float32), axis=2)[:, None, :]
    if KIND < 2:
        even, odd = _halves(x, ASM and KIND == INT4, S, BM, BYTES)
        if INSIDE > 0:
            G: tl.constexpr = BYTES // INSIDE
            group = step[:, None] * G + tl.arange(0, G)[None, :]
            scale = tl.load(scale_at[:, :, None] + group[:, None, :], mask=(group < groups)[:, None, :], other=0)
            scale = (scale_value(scale, SCALE) * (1.661534994731145e35 if FOLD else 1.0)).to(dtype)
            scale = tl.reshape(tl.broadcast_to(scale[:, :, :, None], (S, BN, G, INSIDE)), (S, BN, BYTES))
            low, high = _scaled_pair(code, scale, FOLD, dtype, ASM)
        elif RAW:
            low, high = _raw(code, ZERO, dtype)
        elif ZERO:
            low, high = (code & 15).to(dtype), (code >> 4).to(dtype)
        else:
            low, high = _pair(code, KIND, dtype, ASM)
        part = tl.dot(low, even, part)
        part = tl.dot(high, odd, part)
    else:
        part = tl.dot(_byte(code, KIND, dtype, ASM), tl.permute(x, (0, 2, 1)), part)
    if PER_STEP:
        own = tl.load(scale_at + step[:, None], mask=(step < groups)[:, None], other=0)
        return total + part * scale_value(own, SCALE)[:, :, None]
    else:
        return part


@triton.jit
def of_row(
    scale_at, unit_ptr, bias_ptr, safe,
    SCALE: tl.constexpr, WHOLE: tl.constexpr, UNIT: tl.constexpr, FOLD: tl.constexpr, BIAS: tl.constexpr,
):  # fmt: skip
    """(factor, bias), float32, of each of the rows `safe`. WHOLE: `scale_at` is the scale of whole rows."""
    factor = tl.full(safe.shape, 512.0 if FOLD else 1.0, tl.float32)
    bias = tl.zeros(safe.shape, tl.float32)
    if WHOLE:
        factor = factor * scale_value(tl.load(scale_at), SCALE)
    if UNIT == 1:
        factor = factor * tl.load(unit_ptr)
    elif UNIT == 2:
        factor = factor * tl.load(unit_ptr + safe)
    if BIAS:
        bias = tl.load(bias_ptr + safe).to(tl.float32)
    return factor, bias


@triton.jit(do_not_specialize=["m", "each", "split"])
def gemv_kernel(
    x_ptr, w_ptr, scale_ptr, unit_ptr, bias_ptr, out_ptr, partial_ptr, counter_ptr,
    m, n, k, groups, stride, rows_per_scale, each, split,
    KIND: tl.constexpr, SCALE: tl.constexpr, UNIT: tl.constexpr, BIAS: tl.constexpr, dtype: tl.constexpr,
    ASM: tl.constexpr, EVEN: tl.constexpr, BYTES: tl.constexpr, INSIDE: tl.constexpr, PER_STEP: tl.constexpr,
    S: tl.constexpr, UNROLL: tl.constexpr, BN: tl.constexpr, BM: tl.constexpr, SPLIT: tl.constexpr,
):  # fmt: skip
    """out[m, n] = sum_k x[m, k] w[n, k] + bias[n]; a program takes BN rows of W and one of `split` ranges of K, each of
    its S warps `each` times UNROLL steps of it.

    Args:
        w_ptr: uint8 [N, stride]; scale_ptr: [ceil(N / rows_per_scale), groups].
        dtype: of x, in which codes are exact; float32 in the interpreter, which has no products of BF16.
        UNIT: second level as in `expand_kernel`; 3: unit_ptr is to zero points, uint8 like the scales.
        EVEN: K is what all steps together take, without a rest.
        INSIDE: bytes that share a scale, multiplied into the codes, for groups smaller than a step; else 0.
        PER_STEP: a step is one group, whose partial sum is scaled; else (both off) the row's scale comes at the end.
        partial_ptr, counter_ptr: float32 [split, M, N] and int32 zeros [programs(0)], if SPLIT (split > 1).
    """
    row = tl.program_id(0).to(tl.int64) * BN + tl.arange(0, BN)
    token = tl.arange(0, BM)
    safe = tl.where(row < n, row, 0)
    SIZE: tl.constexpr = BYTES * (2 if KIND < 2 else 1)
    # With E4M3 scales one factor does for two: see FOLDED_LB.
    FOLD: tl.constexpr = ASM and INSIDE > 0 and SCALE == SMALL_FLOAT and dtype == tl.bfloat16
    first = (tl.program_id(1) * S + tl.arange(0, S)) * (each * UNROLL)
    x_at = x_ptr + token[None, :, None] * k + first[:, None, None] * SIZE + tl.arange(0, SIZE)[None, None, :]
    w_at = w_ptr + safe[None, :, None] * stride + first[:, None, None] * BYTES + tl.arange(0, BYTES)[None, None, :]
    scale_row = (safe // rows_per_scale * groups)[None, :]
    total = tl.zeros((S, BN, BM), tl.float32)
    for i in range(each):
        for u in tl.static_range(UNROLL):
            total = _step(
                total, x_at, w_at, scale_ptr + scale_row, unit_ptr + scale_row, first + (i * UNROLL + u),
                (token < m)[None, :, None], k, groups, KIND, SCALE, UNIT == 3, dtype, ASM, EVEN, BYTES, INSIDE, FOLD,
                PER_STEP, S, BN, BM,
            )  # fmt: skip
            x_at += SIZE
            w_at += BYTES
    total = tl.sum(total, axis=0)
    at = token.to(tl.int64)[None, :] * n + row[:, None]
    inside = (row < n)[:, None] & (token < m)[None, :]
    last = True
    if SPLIT:
        size = tl.full((), 1, tl.int64) * m * n  # 64 bits, whatever m and n are
        total, last = merged(total, partial_ptr, counter_ptr, at, inside, size, split)
    if last:
        factor, bias = of_row(
            scale_ptr + safe // rows_per_scale * groups, unit_ptr, bias_ptr, safe,
            SCALE, INSIDE == 0 and not PER_STEP, UNIT, FOLD, BIAS,
        )  # fmt: skip
        total = total * factor[:, None] + bias[:, None]
        tl.store(out_ptr + at, total.to(out_ptr.dtype.element_ty), mask=inside)
