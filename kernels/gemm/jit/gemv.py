"""x [M, K] @ W^T for few rows: W is read once, at its width at rest, and decoded in registers.

Bound by the bytes of W. W stands left in the dot product, so that the rows of x fill its narrow side; even and odd
columns of 4-bit codes go in separate products, because a byte holds one of each.
"""

import triton
import triton.language as tl

from dq.kernels.gemm.jit.decode import E2M1, INT4, byte_value, nibble, scale_value

# Codes of four bytes to two pairs of 16-bit lanes. INT4: a code, its sign bit flipped, becomes the lowest bits of 128
# (BF16) or 1024 (FP16); that and 8 are subtracted. Low and high nibbles apart: the compiler computes a block with four
# results once for each product that takes two of them.
_INT4 = """{{
    .reg .b32 a, b, one, off;
    mov.b32 one, {one};
    mov.b32 off, {off};
    prmt.b32 a, $2, 0, 0x4140;
    prmt.b32 b, $2, 0, 0x4342;
    {shift}
    lop3.b32 $0, a, 0x000F000F, {magic}, 0x6A;
    lop3.b32 $1, b, 0x000F000F, {magic}, 0x6A;
    fma.rn.{t} $0, $0, one, off;
    fma.rn.{t} $1, $1, one, off;
}}"""
_SHIFT = "shr.u32 a, a, 4;\n    shr.u32 b, b, 4;"
# E2M1: sign to bit 15, exponent and mantissa to where a subnormal number has them; a power of two makes it normal.
# Operand 4 is four bytes, 5 and 6 are a scale for each of the four bytes.
_E2M1 = """{{
    .reg .b32 a, b, c, d, up, zero;
    mov.b32 up, {up};
    mov.b32 zero, 0x80008000;
    prmt.b32 a, $4, 0, 0x1404;
    prmt.b32 b, $4, 0, 0x3424;
    shr.u32 c, a, {high};
    shr.u32 d, b, {high};
    and.b32 $2, a, 0x80008000;
    and.b32 $3, b, 0x80008000;
    lop3.b32 $2, c, {mask}, $2, 0xEA;
    lop3.b32 $3, d, {mask}, $3, 0xEA;
    shl.b32 a, a, 4;
    shl.b32 b, b, 4;
    shr.u32 c, a, {high};
    shr.u32 d, b, {high};
    and.b32 $0, a, 0x80008000;
    and.b32 $1, b, 0x80008000;
    lop3.b32 $0, c, {mask}, $0, 0xEA;
    lop3.b32 $1, d, {mask}, $1, 0xEA;
    fma.rn.{t} $0, $0, up, zero;
    fma.rn.{t} $1, $1, up, zero;
    fma.rn.{t} $2, $2, up, zero;
    fma.rn.{t} $3, $3, up, zero;
    {scale}
}}"""
_SCALE = "\n".join(f"    fma.rn.{{t}} ${i}, ${i}, ${5 + i % 2}, zero;" for i in range(4))
_BF16 = dict(
    t="bf16x2", one="0x3F803F80", off="0xC308C308", magic="0x43084308", up="0x7E807E80", high=6, mask="0x01C001C0"
)
_FP16 = dict(
    t="f16x2", one="0x3C003C00", off="0xE408E408", magic="0x64086408", up="0x74007400", high=3, mask="0x0E000E00"
)
LOW_BF16, LOW_FP16 = (tl.constexpr(_INT4.format(shift="", **d)) for d in (_BF16, _FP16))
HIGH_BF16, HIGH_FP16 = (tl.constexpr(_INT4.format(shift=_SHIFT, **d)) for d in (_BF16, _FP16))
E2M1_BF16, E2M1_FP16 = (tl.constexpr(_E2M1.format(scale="", **d)) for d in (_BF16, _FP16))
SCALED_BF16, SCALED_FP16 = (tl.constexpr(_E2M1.format(scale=_SCALE.format(**d), **d)) for d in (_BF16, _FP16))

TWO, FOUR, FOUR_SCALED = (
    tl.constexpr("=&r,=&r,r"),
    tl.constexpr("=&r,=&r,=&r,=&r,r"),
    tl.constexpr("=&r,=&r,=&r,=&r,r,r,r"),
)  # registers


@triton.jit
def _pair(code, KIND: tl.constexpr, DTYPE: tl.constexpr, ASM: tl.constexpr):
    """Bytes -> (values of their low nibbles, of their high ones), exact in DTYPE."""
    if ASM and KIND == INT4:
        if tl.float16 == DTYPE:
            low = tl.inline_asm_elementwise(LOW_FP16, TWO, [code], tl.float16, is_pure=True, pack=4)
            high = tl.inline_asm_elementwise(HIGH_FP16, TWO, [code], tl.float16, is_pure=True, pack=4)
        else:
            low = tl.inline_asm_elementwise(LOW_BF16, TWO, [code], tl.bfloat16, is_pure=True, pack=4)
            high = tl.inline_asm_elementwise(HIGH_BF16, TWO, [code], tl.bfloat16, is_pure=True, pack=4)
        return low, high
    elif ASM:
        if tl.float16 == DTYPE:
            return tl.inline_asm_elementwise(E2M1_FP16, FOUR, [code], (tl.float16, tl.float16), is_pure=True, pack=4)
        else:
            return tl.inline_asm_elementwise(E2M1_BF16, FOUR, [code], (tl.bfloat16, tl.bfloat16), is_pure=True, pack=4)
    else:
        code = code.to(tl.int32)
        return nibble(code & 15, KIND).to(DTYPE), nibble(code >> 4, KIND).to(DTYPE)


@triton.jit
def _scaled_pair(code, scale, DTYPE: tl.constexpr, ASM: tl.constexpr):
    """`_pair` of E2M1 times a scale of the same shape: two and four significant bits, so exact."""
    if ASM:
        if tl.float16 == DTYPE:
            return tl.inline_asm_elementwise(
                SCALED_FP16, FOUR_SCALED, [code, scale], (tl.float16, tl.float16), is_pure=True, pack=4
            )
        else:
            return tl.inline_asm_elementwise(
                SCALED_BF16, FOUR_SCALED, [code, scale], (tl.bfloat16, tl.bfloat16), is_pure=True, pack=4
            )
    else:
        code = code.to(tl.int32)
        low, high = nibble(code & 15, E2M1), nibble(code >> 4, E2M1)
        return (low * scale.to(tl.float32)).to(DTYPE), (high * scale.to(tl.float32)).to(DTYPE)


@triton.jit
def _step(
    total, x_at, w_at, scale_at, step, k, x_ok, groups,
    KIND: tl.constexpr, SCALE: tl.constexpr, DTYPE: tl.constexpr, ASM: tl.constexpr, EVEN: tl.constexpr,
    BYTES: tl.constexpr, INSIDE: tl.constexpr, PER_STEP: tl.constexpr, BN: tl.constexpr, BM: tl.constexpr,
):  # fmt: skip
    """`total` [BN, BM] plus what the next BYTES bytes of each row of W give."""
    SIZE: tl.constexpr = BYTES * (2 if KIND < 2 else 1)
    if EVEN:
        code = tl.load(w_at)
        x = tl.load(x_at, mask=x_ok, other=0.0).to(DTYPE)
    else:
        # Bytes beyond a row belong to the next one; what stands there meets zeros of x.
        left = k - step * SIZE
        code = tl.load(w_at, mask=(tl.arange(0, BYTES) * (SIZE // BYTES) < left)[None, :], other=0)
        x = tl.load(x_at, mask=x_ok & (tl.arange(0, SIZE) < left)[None, :], other=0.0).to(DTYPE)
    part = total
    if PER_STEP:
        part = tl.zeros((BN, BM), tl.float32)
    if KIND < 2:
        even, odd = tl.split(tl.reshape(x, (BM, BYTES, 2)))
        if INSIDE > 0:
            G: tl.constexpr = BYTES // INSIDE
            group = step * G + tl.arange(0, G)
            scale = tl.load(scale_at[:, None] + group[None, :], mask=(group < groups)[None, :], other=0)
            scale = scale_value(scale, SCALE).to(DTYPE)
            scale = tl.reshape(tl.broadcast_to(scale[:, :, None], (BN, G, INSIDE)), (BN, BYTES))
            low, high = _scaled_pair(code, scale, DTYPE, ASM)
        else:
            low, high = _pair(code, KIND, DTYPE, ASM)
        part = tl.dot(low, tl.trans(even), part)
        part = tl.dot(high, tl.trans(odd), part)
    else:
        part = tl.dot(byte_value(code, KIND).to(DTYPE), tl.trans(x), part)
    if PER_STEP:
        return total + part * scale_value(tl.load(scale_at + step), SCALE)[:, None]
    else:
        return part


@triton.jit
def _merged(total, partial_ptr, counter_ptr, n, m, row, token, SPLIT: tl.constexpr):
    """(sum over all programs of this tile, whether this one came last). They add up in the order of their numbers, so
    bits do not depend on which came last; the counter is left at 0 for the next launch."""
    tile, mine = tl.program_id(0), tl.program_id(1)
    at = partial_ptr + token.to(tl.int64)[None, :] * n + row[:, None]
    inside = (row < n)[:, None] & (token < m)[None, :]
    size = m.to(tl.int64) * n
    tl.store(at + mine * size, total, mask=inside)
    tl.debug_barrier()
    last = tl.atomic_add(counter_ptr + tile, 1, sem="acq_rel") == SPLIT - 1
    if last:
        total = tl.zeros_like(total)
        for i in range(SPLIT):
            total += tl.load(at + i * size, mask=inside, other=0.0, cache_modifier=".cg")
        tl.store(counter_ptr + tile, 0)
    return total, last


@triton.jit
def gemv_kernel(
    x_ptr, w_ptr, scale_ptr, unit_ptr, bias_ptr, out_ptr, partial_ptr, counter_ptr,
    m, n, k, groups, stride, rows_per_scale, steps,
    KIND: tl.constexpr, SCALE: tl.constexpr, UNIT: tl.constexpr, BIAS: tl.constexpr, DTYPE: tl.constexpr,
    ASM: tl.constexpr, EVEN: tl.constexpr, BYTES: tl.constexpr, INSIDE: tl.constexpr, PER_STEP: tl.constexpr,
    BN: tl.constexpr, BM: tl.constexpr, SPLIT: tl.constexpr,
):  # fmt: skip
    """out[m, n] = sum_k x[m, k] w[n, k] + bias[n]; a program takes BN rows of W and every K range of `SPLIT`.

    Args:
        w_ptr: uint8 [N, stride]; scale_ptr: [ceil(N / rows_per_scale), groups].
        DTYPE: of x, in which codes are exact; float32 in the interpreter, which has no products of BF16.
        INSIDE: bytes that share a scale, multiplied into the codes, for groups smaller than a step; else 0.
        PER_STEP: a step is one group, whose partial sum is scaled; else (both off) the row's scale comes at the end.
        partial_ptr, counter_ptr: float32 [SPLIT, M, N] and int32 zeros [programs(0)], for SPLIT > 1.
    """
    row = tl.program_id(0).to(tl.int64) * BN + tl.arange(0, BN)
    token = tl.arange(0, BM)
    safe = tl.where(row < n, row, 0)
    SIZE: tl.constexpr = BYTES * (2 if KIND < 2 else 1)
    each = tl.cdiv(steps, SPLIT)
    first = tl.program_id(1) * each
    x_at = x_ptr + token[:, None] * k + first * SIZE + tl.arange(0, SIZE)[None, :]
    w_at = w_ptr + safe[:, None] * stride + first * BYTES + tl.arange(0, BYTES)[None, :]
    scale_at = scale_ptr + safe // rows_per_scale * groups
    total = tl.zeros((BN, BM), tl.float32)
    for step in range(first, tl.minimum(first + each, steps)):
        total = _step(
            total, x_at, w_at, scale_at, step, k, (token < m)[:, None], groups,
            KIND, SCALE, DTYPE, ASM, EVEN, BYTES, INSIDE, PER_STEP, BN, BM,
        )  # fmt: skip
        x_at += SIZE
        w_at += BYTES
    last = True
    if SPLIT > 1:
        total, last = _merged(total, partial_ptr, counter_ptr, n, m, row, token, SPLIT)
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
