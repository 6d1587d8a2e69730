"""One row of Q(x) @ W^T in E4M3: every program rounds the row itself, so that nothing runs ahead of the product.

Bytes of W decide. A lane holds eight columns of every row of a step, in x and in W alike, so nothing passes between
lanes but a maximum at the beginning and the sums at the end. Codes become floats by the device's own conversion, and
products are added in float32, exact but for the order of sums.
"""

import triton
import triton.language as tl

from dq.kernels.activation.jit.grids import quotient, round_signed
from dq.kernels.gemm.jit.decode import E4M3, byte_value
from dq.kernels.quantize.jit.floats import larger, largest, level


@triton.jit
def _value(code, NATIVE: tl.constexpr):
    """float32 of bytes of E4M3."""
    if NATIVE:
        return code.to(tl.float8e4nv, bitcast=True).to(tl.float16).to(tl.float32)
    else:
        return tl.where((code & 0x7F) == 0x7F, float("nan"), byte_value(code, E4M3))


@triton.jit
def _rounded(x, scale, NATIVE: tl.constexpr, HARDWARE: tl.constexpr):
    """x / scale as E4M3 holds it, in float32."""
    q = quotient(x, tl.broadcast_to(scale, x.shape), True, NATIVE)
    if HARDWARE:
        return q.to(tl.float8e4nv).to(tl.float16).to(tl.float32)
    else:
        return round_signed(q, -6, 3, 448.0)


@triton.jit
def _places(row, column, REVERSE: tl.constexpr):
    """row [R] + column [C, 8], in the order of loads."""
    if REVERSE:
        return row[:, None, None] + column[None, :, :]
    else:
        return row[None, :, None] + column[:, None, :]


@triton.jit
def _read(w_ptr, row, column, k, U: tl.constexpr, C: tl.constexpr, EVEN: tl.constexpr, REVERSE: tl.constexpr):
    """U steps of bytes of W, [R, C, 8] each, of columns from `column` [C, 8] on; 0 beyond K."""
    ws = ()
    for u in tl.static_range(U):
        at = column + u * (C * 8)
        inside = at < k
        at = w_ptr + _places(row, at, REVERSE)
        if EVEN:
            w = tl.load(at)
        else:
            w = tl.load(at, mask=inside[None, :, :] if REVERSE else inside[:, None, :], other=0)
        ws = ws + (w if REVERSE else tl.permute(w, (1, 0, 2)),)
    return ws


@triton.jit
def _added(total, w, x, R: tl.constexpr, C: tl.constexpr):
    """`total` [R, C, 2] plus w [R, C, 8] times x [1, C, 8], four products on each: few registers for many rows."""
    w02, w13 = tl.split(tl.reshape(w, (R, C, 4, 2)))
    x02, x13 = tl.split(tl.reshape(x, (1, C, 4, 2)))
    w0, w2 = tl.split(tl.reshape(w02, (R, C, 2, 2)))
    w1, w3 = tl.split(tl.reshape(w13, (R, C, 2, 2)))
    x0, x2 = tl.split(tl.reshape(x02, (1, C, 2, 2)))
    x1, x3 = tl.split(tl.reshape(x13, (1, C, 2, 2)))
    return tl.fma(w3, x3, tl.fma(w2, x2, tl.fma(w1, x1, tl.fma(w0, x0, total))))


@triton.jit
def _row_scale(x_ptr, column, k, each, NATIVE: tl.constexpr, C: tl.constexpr):
    """max |x| / 448, as dq.kernels.activation gives it; many loads at a time, for nothing else is under way yet."""
    top = tl.zeros((C, 8), tl.float32)
    for i in range(0, each, 8):
        xs = ()
        for u in tl.static_range(8):
            at = column + (i + u) * (C * 8)
            xs = xs + (tl.load(x_ptr + at, mask=at < k, other=0.0),)
        for u in tl.static_range(8):
            top = larger(top, tl.abs(xs[u].to(tl.float32)))
    return level(largest(largest(top, 1, False, NATIVE), 0, False, NATIVE), 448.0)


@triton.jit(do_not_specialize=["each"])
def row8_kernel(
    x_ptr, factor_ptr, w_ptr, scale_ptr, bias_ptr, out_ptr, n, k, stride, each,
    ROUND: tl.constexpr, FACTOR: tl.constexpr, BIAS: tl.constexpr, NATIVE: tl.constexpr, HARDWARE: tl.constexpr,
    EVEN: tl.constexpr, R: tl.constexpr, C: tl.constexpr, U: tl.constexpr, REVERSE: tl.constexpr,
):  # fmt: skip
    """out[n] = factor scale[n] sum_k q[k] w[n, k] + bias[n]; a program takes R rows of W.

    Args:
        x_ptr: [K] floats, with ROUND rounded here by factor = max |x| / 448, else as they are (factor 1); or, FACTOR,
            bytes of E4M3 with `factor_ptr` float32 [1].
        w_ptr: bytes of E4M3 [N, stride]; scale_ptr: float32 [N].
        each: iterations of U steps of C chunks of eight columns.
        NATIVE, HARDWARE: conversions from and to E4M3 by the device.
        EVEN: K is what all steps take, without a rest.
        REVERSE: what this version of the compiler wants, see dq.kernels.gemm.jit.row.
    """
    row = tl.program_id(0).to(tl.int64) * R + tl.arange(0, R)
    safe = tl.where(row < n, row, 0)
    column = tl.arange(0, C)[:, None] * 8 + tl.arange(0, 8)[None, :]
    factor = 1.0
    if ROUND:
        factor = _row_scale(x_ptr, column, k, each * U, NATIVE, C)
    elif FACTOR:
        factor = tl.load(factor_ptr)
    total = tl.zeros((R, C, 2), tl.float32)
    for _ in range(each):
        ws = _read(w_ptr, safe * stride, column, k, U, C, EVEN, REVERSE)
        for u in tl.static_range(U):
            at = column + u * (C * 8)
            x = tl.load(x_ptr + at) if EVEN else tl.load(x_ptr + at, mask=at < k, other=0)
            if FACTOR:
                x = _value(x, NATIVE)
            else:
                x = x.to(tl.float32)
                x = _rounded(x, factor, NATIVE, HARDWARE) if ROUND else x
            total = _added(total, _value(ws[u], NATIVE), x[None, :, :], R, C)
        column += U * (C * 8)
    total = tl.sum(tl.sum(total, axis=2), axis=1)
    total = total * (factor * tl.load(scale_ptr + safe).to(tl.float32))
    if BIAS:
        total += tl.load(bias_ptr + safe).to(tl.float32)
    tl.store(out_ptr + row, total.to(out_ptr.dtype.element_ty), mask=row < n)
