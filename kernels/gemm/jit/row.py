"""One row of x @ W^T for W in 4 bits: every load of W and of its scales is one run of memory, nothing is shuffled.

A product m16n8k16 has eight columns, one row of x fills one of them. Here eight pieces of x that follow each other fill
them, and eight groups of four lanes hold the same pieces of one row of W: lane (g, t) the 16 codes t of piece g. What
piece g of W gives with piece g of x stands on the diagonal of the result; the rest of it is not used. So a warp reads
256 bytes of a row at once, x stays in registers for all rows of a program, and each lane has one scale for each row.

Tensors are [t, g, S, R, ..], S warps along K and R rows: memory is read in that order or (REVERSE) in [R, S, g, t, ..],
so that the compiler gives dimensions to lanes, warps and registers as written; then operands stand where a product
wants them. Another order is slower, not wrong.
"""

import triton
import triton.language as tl

from dq.kernels.gemm.jit.decode import E2M1, SMALL_FLOAT, nibble, scale_value
from dq.kernels.gemm.jit.gemv import of_row

PIECE = tl.constexpr(64)  # columns: four lanes with two words of eight codes
_OUT = "=&h,=&h,=&h,=&h,=&h,=&h,=&h,=&h,r"
# Eight codes (operand 8) to four pairs of 16-bit lanes, columns 0 and 4, 1 and 5, 2 and 6, 3 and 7.
# INT4: the bits of a code, its sign flipped, become the lowest of 128 (BF16) or 1024 (FP16), which is taken from sums.
_INTEGER = """{{
    .reg .b32 a;
    shr.u32 a, $8, {right};
    lop3.b32 a, a, 0x000F000F, {magic}, 0x6A;
    mov.b32 {{{{${low}, ${high}}}}}, a;
}}"""
# E2M1: sign, exponent and mantissa go where a subnormal number has them; a power of two makes that normal, and operand
# 9 scales it.
_FLOAT = """{{
    .reg .b32 a, b, s, up, zero;
    mov.b32 up, {up};
    mov.b32 zero, 0x80008000;
    mov.b32 s, {{{{$9, $9}}}};
    {bits} a, $8, {by};
    and.b32 a, a, {mask};
    shl.b32 b, $8, {left};
    lop3.b32 a, b, 0x80008000, a, 0xEA;
    {normal}
    fma.rn.{t} a, a, s, zero;
    mov.b32 {{{{${low}, ${high}}}}}, a;
}}"""


def _words(text: str, at: int = 0, normal: str = "", **given: str) -> tl.constexpr:
    """Assembly of all four pairs; `at`: lowest bit of a magnitude of E2M1."""
    pairs = []
    for i in range(4):
        move = dict(bits="shl.b32" if at >= 4 * i else "shr.u32", by=abs(at - 4 * i), left=12 - 4 * i, right=4 * i)
        pairs.append(text.format(low=2 * i, high=2 * i + 1, normal=normal.format(**given), **move, **given))
    return tl.constexpr("\n".join(pairs).replace("{{", "{").replace("}}", "}"))


_NORMAL = "fma.rn.{t} a, a, up, zero;"
_BF16 = dict(t="bf16x2", up="0x7E807E80", mask="0x01C001C0")
_FP16 = dict(t="f16x2", up="0x74007400", mask="0x0E000E00")
SIGNED_B, SIGNED_H = _words(_INTEGER, magic="0x43084308"), _words(_INTEGER, magic="0x64086408")
PLAIN_B, PLAIN_H = _words(_INTEGER, magic="0x43004300"), _words(_INTEGER, magic="0x64006400")
E2M1_B, E2M1_H = _words(_FLOAT, 6, _NORMAL, **_BF16), _words(_FLOAT, 9, _NORMAL, **_FP16)
FOLDED_B = _words(_FLOAT, 6, **_BF16)  # the scale comes times 2^117 and makes the number normal, see gemv.FOLDED_LB
ONE, TWO = tl.constexpr(_OUT), tl.constexpr(_OUT + ",h")


@triton.jit
def _asm(CODE: tl.constexpr, REGISTERS: tl.constexpr, arguments, HALF: tl.constexpr):
    if HALF:
        return tl.inline_asm_elementwise(
            CODE, REGISTERS, arguments,
            (tl.float16, tl.float16, tl.float16, tl.float16,
             tl.float16, tl.float16, tl.float16, tl.float16),
            is_pure=True, pack=1,
        )  # fmt: skip
    else:
        return tl.inline_asm_elementwise(
            CODE, REGISTERS, arguments,
            (tl.bfloat16, tl.bfloat16, tl.bfloat16, tl.bfloat16,
             tl.bfloat16, tl.bfloat16, tl.bfloat16, tl.bfloat16),
            is_pure=True, pack=1,
        )  # fmt: skip


@triton.jit
def _column(word, scale, c: tl.constexpr, KIND: tl.constexpr, ZERO: tl.constexpr, dtype: tl.constexpr):
    code = (word >> (4 * c)) & 15
    if KIND == E2M1:
        return (nibble(code, KIND) * scale.to(tl.float32)).to(dtype)
    else:
        return (code if ZERO else nibble(code, KIND)).to(dtype)


@triton.jit
def _codes(
    word, scale, KIND: tl.constexpr, ZERO: tl.constexpr, FOLD: tl.constexpr, dtype: tl.constexpr, ASM: tl.constexpr
):
    """Values of the columns (0, 4, 1, 5, 2, 6, 3, 7) of each word: of E2M1 times their scale, exact; of INT4 by
    assembly plus 136 or 1032, of unsigned codes plus 128 or 1024."""
    HALF: tl.constexpr = dtype == tl.float16
    if ASM and KIND == E2M1:
        CODE: tl.constexpr = FOLDED_B if FOLD else E2M1_H if HALF else E2M1_B
        return _asm(CODE, TWO, [word, scale], HALF)
    elif ASM:
        INTEGER: tl.constexpr = (PLAIN_H if HALF else PLAIN_B) if ZERO else (SIGNED_H if HALF else SIGNED_B)
        return _asm(INTEGER, ONE, [word], HALF)
    else:
        out = ()
        for i in tl.static_range(4):
            out = out + (_column(word, scale, i, KIND, ZERO, dtype), _column(word, scale, i + 4, KIND, ZERO, dtype))
        return out


@triton.jit
def _ordered(p, S: tl.constexpr, N: tl.constexpr, WIDTH: tl.constexpr):
    """[S, N, words, t, bit, bit, pair] as [S, N, PIECE], so that WIDTH columns of a lane lie side by side. The compiler
    wants 2 of what is 16 bits wide, more of what came from narrower numbers; with others, it shuffles."""
    if WIDTH == 2:
        p = tl.permute(p, (0, 1, 2, 4, 5, 3, 6))
    elif WIDTH == 4:
        p = tl.permute(p, (0, 1, 2, 4, 3, 5, 6))
    return tl.reshape(p, (S, N, PIECE))


@triton.jit
def _left(codes, WIDTH: tl.constexpr, S: tl.constexpr, R: tl.constexpr):
    """Eight columns [t, g, S, R, 2] as a left operand [S, 8 R, PIECE]."""
    a, b, c, d, e, f, g, h = codes
    p = tl.join(tl.join(tl.join(a, e), tl.join(c, g)), tl.join(tl.join(b, f), tl.join(d, h)))
    p = tl.permute(tl.reshape(p, (4, 8, S, R, 2, 2, 2, 2)), (2, 3, 1, 4, 0, 5, 6, 7))
    return _ordered(tl.reshape(p, (S, R * 8, 2, 4, 2, 2, 2)), S, R * 8, WIDTH)


@triton.jit
def _right(x, WIDTH: tl.constexpr, S: tl.constexpr):
    """x [t, g, S, 2, 8] as a right operand [S, PIECE, 8]."""
    x = tl.permute(tl.reshape(x, (4, 8, S, 2, 2, 2, 2)), (2, 1, 3, 0, 5, 6, 4))
    return tl.permute(_ordered(x, S, 8, WIDTH), (0, 2, 1))


@triton.jit
def _read(pointer, lane, row, inner, inside, EVEN: tl.constexpr, REVERSE: tl.constexpr):
    """[t, g, S, R, W] of what lies at `lane` [t, g, S] + `row` [R] + `inner` [W], where inside [t, g, S]; else 0. What
    the compiler knows of row and inner becomes part of the instructions: one address a lane for all rows."""
    if REVERSE:
        lane, inside = tl.permute(lane, (2, 1, 0)), tl.permute(inside, (2, 1, 0))
        at = (pointer + lane)[None, :, :, :, None] + row[:, None, None, None, None] + inner[None, None, None, None, :]
        inside = inside[None, :, :, :, None]
    else:
        at = (pointer + lane)[:, :, :, None, None] + row[None, None, None, :, None] + inner[None, None, None, None, :]
        inside = inside[:, :, :, None, None]
    x = tl.load(at) if EVEN else tl.load(at, mask=inside, other=0)
    return tl.permute(x, (3, 2, 1, 0, 4)) if REVERSE else x


@triton.jit
def _spread(scale, S: tl.constexpr, R: tl.constexpr):
    """[t, g, S, R, 1], alike for all t, as [S, 8 R, 8]."""
    scale = tl.permute(scale.to(tl.float32), (2, 3, 1, 0, 4))
    return tl.reshape(tl.broadcast_to(scale, (S, R, 8, 4, 2)), (S, R * 8, 8))


@triton.jit
def _product(
    total, word, x, scale, zero,
    KIND: tl.constexpr, SCALE: tl.constexpr, ZERO: tl.constexpr, FOLD: tl.constexpr, PER_PIECE: tl.constexpr,
    dtype: tl.constexpr, ASM: tl.constexpr, NARROW: tl.constexpr, S: tl.constexpr, R: tl.constexpr,
):  # fmt: skip
    """`total` plus the pieces `word` of W times those of x."""
    if KIND == E2M1:
        own = (scale_value(scale, SCALE) * (1.661534994731145e35 if FOLD else 1.0)).to(dtype)
        own = tl.broadcast_to(own, word.shape)
        return tl.dot(_left(_codes(word, own, KIND, ZERO, FOLD, dtype, ASM), 8, S, R), _right(x, 8, S), total)
    part = tl.dot(_left(_codes(word, word, KIND, ZERO, FOLD, dtype, ASM), NARROW, S, R), _right(x, NARROW, S))
    if ASM or ZERO:  # what `_codes` added, and zero points, times the sum of x
        own = ((1024.0 if dtype == tl.float16 else 128.0) if ASM else 0.0) + (0.0 if ZERO else 8.0)
        sums = tl.dot(tl.full((S, R * 8, PIECE), 1.0, dtype), _right(x, 2, S))
        part -= (own + _spread(zero, S, R) if ZERO else own) * sums
    return total + (part * _spread(scale_value(scale, SCALE), S, R) if PER_PIECE else part)


@triton.jit(do_not_specialize=["each", "scale_stride"])
def row_kernel(
    x_ptr, w_ptr, scale_ptr, unit_ptr, bias_ptr, out_ptr, n, rows_per_scale, each, scale_stride,
    K: tl.constexpr, GROUPS: tl.constexpr, STRIDE: tl.constexpr, OWN: tl.constexpr,
    KIND: tl.constexpr, SCALE: tl.constexpr, UNIT: tl.constexpr, BIAS: tl.constexpr, dtype: tl.constexpr,
    ASM: tl.constexpr, EVEN: tl.constexpr, GROUP: tl.constexpr, S: tl.constexpr, R: tl.constexpr, U: tl.constexpr,
    ONCE: tl.constexpr, EARLY: tl.constexpr, REVERSE: tl.constexpr, NARROW: tl.constexpr,
):  # fmt: skip
    """out[n] = sum_k x[k] w[n, k] + bias[n]; a program takes R rows of W (the last one the last R: N >= R), each of its
    S warps `each` times U steps of eight pieces. Arguments as of `gemv_kernel`, but

    Args:
        w_ptr: int32 [N, STRIDE], eight codes each; K is a multiple of 16.
        scale_stride: from one group to the next, 1; as a number that the compiler does not know it keeps a scale with
            its lane, where else one lane would load those of its neighbours.
        OWN: every row has scales of its own, GROUPS of them (rows_per_scale is 1).
        GROUP: lanes (16 columns) that share a scale, 0 for all of a row.
        ONCE: `each` is 1.
        EARLY: a barrier keeps the loads of an iteration together, ahead of its products; left alone, the compiler moves
            some behind the products of the rows before them, to save registers.
        REVERSE, NARROW: what this version of the compiler wants: see the module, and `_ordered` for INT4.
    """
    ZERO: tl.constexpr = UNIT == 3
    FOLD: tl.constexpr = ASM and KIND == E2M1 and SCALE == SMALL_FLOAT and dtype == tl.bfloat16
    start = tl.minimum(tl.program_id(0) * R, n - R)
    start = start.to(tl.int64)
    row = tl.arange(0, R)
    lane = (tl.arange(0, S)[None, :] * (each * U * 8) + tl.arange(0, 8)[:, None])[None, :, :] * 4
    lane += tl.arange(0, 4)[:, None, None]  # [t, g, S], in 16 columns
    none = tl.zeros((1,), tl.int32)
    two, eight = tl.arange(0, 2), tl.arange(0, 8)
    first, own = start * 0, (start + row) // rows_per_scale * GROUPS
    if OWN:
        first, own = start * GROUPS, row * GROUPS
    # Ahead of the loop, which hides how long they take.
    factor, bias = of_row(
        scale_ptr + first + own, unit_ptr, bias_ptr, start + row, SCALE, GROUP == 0, UNIT, FOLD, BIAS
    )  # fmt: skip
    total = tl.zeros((S, R * 8, 8), tl.float32)
    for i in range(1 if ONCE else each):
        words, xs, scales, zeros = (), (), (), ()
        for u in tl.static_range(U):
            at = lane + (i * U + u) * 32
            words = words + (_read(w_ptr + start * STRIDE, at * 2, row * STRIDE, two, at * 16 < K, EVEN, REVERSE),)
            group = at // GROUP * scale_stride if GROUP > 0 else at * 0
            # All four lanes of a piece that begins within K hold its scale, for all of them hold its results.
            inside = at * 16 < K if KIND == E2M1 else at // 4 * 64 < K
            scales = scales + (_read(scale_ptr + first, group, own, none, inside, EVEN, REVERSE),)
            zeros = zeros + (_read(unit_ptr + first, group, own, none, inside, EVEN, REVERSE) if ZERO else 0,)
        if EARLY:
            tl.debug_barrier()
        for u in tl.static_range(U):
            at = lane + (i * U + u) * 32
            xs = xs + (_read(x_ptr, at * 16, two * 8, eight, at * 16 < K, EVEN, REVERSE).to(dtype),)
        for u in tl.static_range(U):
            total = _product(
                total, words[u], xs[u], scales[u], zeros[u],
                KIND, SCALE, ZERO, FOLD, GROUP > 0, dtype, ASM, NARROW, S, R,
            )  # fmt: skip
    total = tl.reshape(total, (S, R, 8, 8))
    diagonal = tl.arange(0, 8)[:, None] == tl.arange(0, 8)[None, :]
    total = tl.where(diagonal[None, None, :, :], total, 0.0)
    total = tl.sum(tl.sum(tl.sum(total, axis=3), axis=2), axis=0)
    tl.store(out_ptr + start + row, (total * factor + bias).to(out_ptr.dtype.element_ty))
