"""x [M, K] @ W^T for few rows: W is read once, at its width at rest, and decoded in registers.

Bound by the bytes of W. W stands left in the dot product, so that the rows of x fill its narrow side; even and odd
columns of 4-bit codes go in separate products, because a byte holds one of each.
"""

import triton
import triton.language as tl

from dq.kernels.gemm.jit.decode import E2M1, E4M3, INT4, byte_value, nibble, scale_value

# Four bytes (operand 2) to two pairs of 16-bit lanes. Low and high nibbles apart: a block with four results would be
# computed once for each product that takes two of them.
# INT4: a code, its sign bit flipped, becomes the lowest bits of 128 (BF16) or 1024 (FP16); that and 8 are subtracted.
# The pairs are bytes 0 and 2, then 1 and 3: no byte moves, `_crossed` brings x into the same order.
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
    fma.rn.{t} $0, $0, up, zero;
    fma.rn.{t} $1, $1, up, zero;
    {scale}
}}"""
_LEFT = "shl.b32 a, a, 4;\n    shl.b32 b, b, 4;"
_LOW, _HIGH = "mov.b32 a, $2;\n    shr.u32 b, $2, 8;", "shr.u32 a, $2, 4;\n    shr.u32 b, $2, 12;"
_SCALE = "fma.rn.{t} $0, $0, $3, zero;\n    fma.rn.{t} $1, $1, $4, zero;"
_BF16 = dict(t="bf16x2", one="0x3F803F80", off="0xC308C308", magic="0x43084308")
_FP16 = dict(t="f16x2", one="0x3C003C00", off="0xE408E408", magic="0x64086408")
_E2M1_BF16 = dict(t="bf16x2", up="0x7E807E80", down=6, mask="0x01C001C0")
_E2M1_FP16 = dict(t="f16x2", up="0x74007400", down=3, mask="0x0E000E00")
_E4M3_BF16 = dict(t="bf16x2", up="0x7B807B80", down=4, mask="0x07F007F0", shift="", scale="")
_E4M3_FP16 = dict(t="f16x2", up="0x5C005C00", down=1, mask="0x3F803F80", shift="", scale="")


def _both(text: str, low: str, high: str, bf16: dict, fp16: dict, scale: str = "") -> tuple[tl.constexpr, ...]:
    """Assembly for (low nibbles in BF16, high ones in BF16, low ones in FP16, high ones in FP16)."""
    ways = [(d, shift) for d in (bf16, fp16) for shift in (low, high)]
    return tuple(tl.constexpr(text.format(shift=shift, scale=scale.format(**d), **d)) for d, shift in ways)


INT4_LB, INT4_HB, INT4_LH, INT4_HH = _both(_INT4, _LOW, _HIGH, _BF16, _FP16)
E2M1_LB, E2M1_HB, E2M1_LH, E2M1_HH = _both(_FLOAT, _LEFT, "", _E2M1_BF16, _E2M1_FP16)
SCALED_LB, SCALED_HB, SCALED_LH, SCALED_HH = _both(_FLOAT, _LEFT, "", _E2M1_BF16, _E2M1_FP16, _SCALE)
E4M3_B, E4M3_H = (tl.constexpr(_FLOAT.format(**d)) for d in (_E4M3_BF16, _E4M3_FP16))
ONE, TWO = tl.constexpr("=&r,=&r,r"), tl.constexpr("=&r,=&r,r,r,r")  # registers of one and of two arguments


@triton.jit
def _pair(code, KIND: tl.constexpr, dtype: tl.constexpr, ASM: tl.constexpr):
    """Bytes -> (values of their low nibbles, of their high ones), exact in dtype; INT4 by assembly in crossed order."""
    if ASM and dtype == tl.float16:
        LOW: tl.constexpr = INT4_LH if KIND == INT4 else E2M1_LH
        HIGH: tl.constexpr = INT4_HH if KIND == INT4 else E2M1_HH
        low = tl.inline_asm_elementwise(LOW, ONE, [code], tl.float16, is_pure=True, pack=4)
        return low, tl.inline_asm_elementwise(HIGH, ONE, [code], tl.float16, is_pure=True, pack=4)
    elif ASM:
        LOW: tl.constexpr = INT4_LB if KIND == INT4 else E2M1_LB
        HIGH: tl.constexpr = INT4_HB if KIND == INT4 else E2M1_HB
        low = tl.inline_asm_elementwise(LOW, ONE, [code], tl.bfloat16, is_pure=True, pack=4)
        return low, tl.inline_asm_elementwise(HIGH, ONE, [code], tl.bfloat16, is_pure=True, pack=4)
    else:
        code = code.to(tl.int32)
        return nibble(code & 15, KIND).to(dtype), nibble(code >> 4, KIND).to(dtype)


@triton.jit
def _crossed(x, BM: tl.constexpr, BYTES: tl.constexpr):
    """Columns [BM, 2 BYTES] with bytes 1 and 2 of every four changed places, as the codes of `_pair` lie."""
    x = tl.reshape(x, (BM, BYTES // 4, 2, 2, 2))
    return tl.reshape(tl.permute(x, (0, 1, 3, 2, 4)), (BM, 2 * BYTES))


@triton.jit
def _scaled_pair(code, scale, dtype: tl.constexpr, ASM: tl.constexpr):
    """`_pair` of E2M1 times a scale of the same shape: two and four significant bits, so exact."""
    if ASM and dtype == tl.float16:
        low = tl.inline_asm_elementwise(SCALED_LH, TWO, [code, scale], tl.float16, is_pure=True, pack=4)
        return low, tl.inline_asm_elementwise(SCALED_HH, TWO, [code, scale], tl.float16, is_pure=True, pack=4)
    elif ASM:
        low = tl.inline_asm_elementwise(SCALED_LB, TWO, [code, scale], tl.bfloat16, is_pure=True, pack=4)
        return low, tl.inline_asm_elementwise(SCALED_HB, TWO, [code, scale], tl.bfloat16, is_pure=True, pack=4)
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
def _step(
    total, x_at, w_at, scale_at, zero_at, step, k, x_ok, groups,
    KIND: tl.constexpr, SCALE: tl.constexpr, ZERO: tl.constexpr, dtype: tl.constexpr, ASM: tl.constexpr,
    EVEN: tl.constexpr, BYTES: tl.constexpr, INSIDE: tl.constexpr, PER_STEP: tl.constexpr,
    BN: tl.constexpr, BM: tl.constexpr,
):  # fmt: skip
    """`total` [BN, BM] plus what the next BYTES bytes of each row of W give."""
    SIZE: tl.constexpr = BYTES * (2 if KIND < 2 else 1)
    if EVEN:
        code = tl.load(w_at)
        x = tl.load(x_at, mask=x_ok, other=0.0).to(dtype)
    else:
        # Bytes beyond a row belong to the next one; what stands there meets zeros of x.
        left = k - step * SIZE
        code = tl.load(w_at, mask=(tl.arange(0, BYTES) * (SIZE // BYTES) < left)[None, :], other=0)
        x = tl.load(x_at, mask=x_ok & (tl.arange(0, SIZE) < left)[None, :], other=0.0).to(dtype)
    part = total
    if PER_STEP:
        part = tl.zeros((BN, BM), tl.float32)
    if ZERO:  # codes 0..15 as -8..7; what their zero points are worth comes from the sum of x
        code = code ^ 0x88
        zero = tl.load(zero_at + step).to(tl.float32) - 8.0
        part -= zero[:, None] * tl.sum(x.to(tl.float32), axis=1)[None, :]
    if KIND < 2:
        if ASM and KIND == INT4:
            x = _crossed(x, BM, BYTES)
        even, odd = tl.split(tl.reshape(x, (BM, BYTES, 2)))
        if INSIDE > 0:
            G: tl.constexpr = BYTES // INSIDE
            group = step * G + tl.arange(0, G)
            scale = tl.load(scale_at[:, None] + group[None, :], mask=(group < groups)[None, :], other=0)
            scale = scale_value(scale, SCALE).to(dtype)
            scale = tl.reshape(tl.broadcast_to(scale[:, :, None], (BN, G, INSIDE)), (BN, BYTES))
            low, high = _scaled_pair(code, scale, dtype, ASM)
        else:
            low, high = _pair(code, KIND, dtype, ASM)
        part = tl.dot(low, tl.trans(even), part)
        part = tl.dot(high, tl.trans(odd), part)
    else:
        part = tl.dot(_byte(code, KIND, dtype, ASM), tl.trans(x), part)
    if PER_STEP:
        return total + part * scale_value(tl.load(scale_at + step), SCALE)[:, None]
    else:
        return part


@triton.jit
def _merged(total, partial_ptr, counter_ptr, n, m, row, token, split):
    """(sum over all programs of this tile, whether this one came last). They add up in the order of their numbers, so
    bits do not depend on which came last; the counter is left at 0 for the next launch."""
    tile, mine = tl.program_id(0), tl.program_id(1)
    at = partial_ptr + token.to(tl.int64)[None, :] * n + row[:, None]
    inside = (row < n)[:, None] & (token < m)[None, :]
    size = tl.full((), 1, tl.int64) * m * n  # 64 bits, whatever m and n are
    tl.store(at + mine * size, total, mask=inside)
    tl.debug_barrier()
    last = tl.atomic_add(counter_ptr + tile, 1, sem="acq_rel") == split - 1
    if last:
        total = tl.zeros_like(total)
        for i in range(split):
            total += tl.load(at + i * size, mask=inside, other=0.0, cache_modifier=".cg")
        tl.store(counter_ptr + tile, 0)
    return total, last


@triton.jit(do_not_specialize=["m", "steps", "split"])
def gemv_kernel(
    x_ptr, w_ptr, scale_ptr, unit_ptr, bias_ptr, out_ptr, partial_ptr, counter_ptr,
    m, n, k, groups, stride, rows_per_scale, steps, split,
    KIND: tl.constexpr, SCALE: tl.constexpr, UNIT: tl.constexpr, BIAS: tl.constexpr, dtype: tl.constexpr,
    ASM: tl.constexpr, EVEN: tl.constexpr, BYTES: tl.constexpr, INSIDE: tl.constexpr, PER_STEP: tl.constexpr,
    BN: tl.constexpr, BM: tl.constexpr, SPLIT: tl.constexpr,
):  # fmt: skip
    """out[m, n] = sum_k x[m, k] w[n, k] + bias[n]; a program takes BN rows of W and one of `split` ranges of K.

    Args:
        w_ptr: uint8 [N, stride]; scale_ptr: [ceil(N / rows_per_scale), groups].
        dtype: of x, in which codes are exact; float32 in the interpreter, which has no products of BF16.
        UNIT: second level as in `expand_kernel`; 3: unit_ptr is to zero points, uint8 like the scales.
        INSIDE: bytes that share a scale, multiplied into the codes, for groups smaller than a step; else 0.
        PER_STEP: a step is one group, whose partial sum is scaled; else (both off) the row's scale comes at the end.
        partial_ptr, counter_ptr: float32 [split, M, N] and int32 zeros [programs(0)], if SPLIT (split > 1).
    """
    row = tl.program_id(0).to(tl.int64) * BN + tl.arange(0, BN)
    token = tl.arange(0, BM)
    safe = tl.where(row < n, row, 0)
    SIZE: tl.constexpr = BYTES * (2 if KIND < 2 else 1)
    each = tl.cdiv(steps, split)
    first = tl.program_id(1) * each
    x_at = x_ptr + token[:, None] * k + first * SIZE + tl.arange(0, SIZE)[None, :]
    w_at = w_ptr + safe[:, None] * stride + first * BYTES + tl.arange(0, BYTES)[None, :]
    scale_at = scale_ptr + safe // rows_per_scale * groups
    zero_at = unit_ptr + safe // rows_per_scale * groups
    total = tl.zeros((BN, BM), tl.float32)
    for step in range(first, tl.minimum(first + each, steps)):
        total = _step(
            total, x_at, w_at, scale_at, zero_at, step, k, (token < m)[:, None], groups,
            KIND, SCALE, UNIT == 3, dtype, ASM, EVEN, BYTES, INSIDE, PER_STEP, BN, BM,
        )  # fmt: skip
        x_at += SIZE
        w_at += BYTES
    last = True
    if SPLIT:
        total, last = _merged(total, partial_ptr, counter_ptr, n, m, row, token, split)
    if last:
        if INSIDE == 0 and not PER_STEP:
            total = total * scale_value(tl.load(scale_at), SCALE)[:, None]
        if UNIT == 1:
            total = total * tl.load(unit_ptr)
        elif UNIT == 2:
            total = total * tl.load(unit_ptr + safe)[:, None]
        if BIAS:
            total += tl.load(bias_ptr + safe).to(tl.float32)[:, None]
        at = out_ptr + token[None, :] * n + row[:, None]
        tl.store(at, total.to(out_ptr.dtype.element_ty), mask=(row < n)[:, None] & (token < m)[None, :])
