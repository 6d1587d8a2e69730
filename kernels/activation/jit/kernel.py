"""One program a row: load, what stands in front, transform, scale, round, store, and the columns behind K."""

import triton
import triton.language as tl

from dq.kernels.activation.jit import front
from dq.kernels.activation.jit.grids import e4m3_bits, nibbles, round_signed, rounded, row_levels, scale_bytes
from dq.kernels.activation.jit.rotate import chunk_of, rotate
from dq.kernels.quantize.jit.floats import larger, largest


@triton.jit
def _places(t: tl.constexpr, FLIP: tl.constexpr, C: tl.constexpr):
    """Columns of the elements of tile t [C, 8]; FLIP reverses the chunks of a rotation's group (their count - 1)."""
    return (t * C + (chunk_of(C) ^ FLIP))[:, None] * 8 + tl.arange(0, 8)[None, :]


@triton.jit
def _vector(pointer, at, K: tl.constexpr, other: tl.constexpr):
    return tl.load(pointer + at, mask=at < K, other=other).to(tl.float32)


@triton.jit
def _loaded(
    x_ptr, gate_ptr, order_ptr, t: tl.constexpr,
    K: tl.constexpr, FRONT: tl.constexpr, GATE: tl.constexpr, PERMUTE: tl.constexpr, FLIP: tl.constexpr,
    C: tl.constexpr,
):  # fmt: skip
    """(columns of x, values after an elementwise front) of tile t; with a permutation x is gathered."""
    at = _places(t, FLIP, C)
    if PERMUTE:
        at = tl.load(order_ptr + at, mask=at < K, other=K)
    # Read once, but for gathered lines: what x takes in the cache is better left to the codes, which the product reads.
    keep: tl.constexpr = "" if PERMUTE else "evict_first"
    x = tl.load(x_ptr + at, mask=at < K, other=0.0, eviction_policy=keep).to(tl.float32)
    if FRONT == "gelu" or FRONT == "silu":
        x = front.activation(x, FRONT)
    if GATE:
        x = x * _vector(gate_ptr, at, K, 0.0)
    return at, x


# One thread asks for `$2` bytes at `$1`, multiples of 16, if `$3`.
FETCH = tl.constexpr("""{
    .reg .pred p;
    .reg .b32 t;
    mov.u32 t, %tid.x;
    setp.eq.u32 p, t, 0;
    setp.ne.and.b32 p, $3, 0, p;
    @p cp.async.bulk.prefetch.L2.global [$1], $2;
    mov.u32 $0, 0;
}""")


@triton.jit
def _fetch(x_ptr, there, K: tl.constexpr):
    """Has a row of x brought to the L2."""
    address = x_ptr.to(tl.int64) & -16
    size: tl.constexpr = K * x_ptr.dtype.element_ty.primitive_bitwidth // 8
    tl.inline_asm_elementwise(
        FETCH, "=r,l,r,r", [address, size, there.to(tl.int32)], tl.int32, is_pure=False, pack=1
    )  # fmt: skip


@triton.jit
def _normalized(
    tiles, at, weight_ptr, bias_ptr, eps,
    K: tl.constexpr, FRONT: tl.constexpr, WEIGHT: tl.constexpr, BIAS: tl.constexpr, TILES: tl.constexpr,
):  # fmt: skip
    """A row after RMSNorm or LayerNorm with weight and bias."""
    middle = 0.0
    if FRONT == "layernorm":
        middle = front.mean(tiles, K, TILES)
    factor = front.inverse_deviation(tiles, at, middle, eps, K, TILES)
    out = ()
    for t in tl.static_range(TILES):
        x = (tiles[t] - middle) * factor
        if WEIGHT:
            x = x * _vector(weight_ptr, at[t], K, 0.0)
        if BIAS:
            x = x + _vector(bias_ptr, at[t], K, 0.0)
        out = out + (tl.where(at[t] < K, x, 0.0),)
    return out


@triton.jit
def _transformed(
    x, at, scale_ptr, add_ptr, shift_ptr, inverse_ptr,
    K: tl.constexpr, ADALN: tl.constexpr, SHIFT: tl.constexpr, SMOOTH: tl.constexpr, ROTATE: tl.constexpr,
    C: tl.constexpr,
):  # fmt: skip
    """A tile through adaLN (`* (1 + scale) + add`), shift, smoothing (`* inverse` of the factor) and rotation."""
    if ADALN:
        x = x * (1.0 + _vector(scale_ptr, at, K, 0.0)) + _vector(add_ptr, at, K, 0.0)
    if SHIFT:
        x = x + _vector(shift_ptr, at, K, 0.0)
    if SMOOTH:
        x = x * _vector(inverse_ptr, at, K, 0.0)
    return rotate(x, ROTATE, C) if ROTATE else x


@triton.jit
def _behind(
    codes_ptr, extra_ptr, base, rank, width, HARDWARE: tl.constexpr, EXTRA: tl.constexpr, TAIL: tl.constexpr
):  # fmt: skip
    """TAIL or fewer columns: the low-rank input in two stages [T1 | T2 | T1] (3 rank columns), then zeros."""
    column = tl.arange(0, TAIL)
    v = tl.zeros((TAIL,), tl.float32)
    if EXTRA:
        t = tl.load(extra_ptr + column % rank, mask=column < 3 * rank, other=0.0).to(tl.float32)
        t = tl.div_rn(t, base)
        v = tl.where(column // rank == 1, t - round_signed(t, -6, 3, 448.0), t)
    tl.store(codes_ptr + column, e4m3_bits(v, HARDWARE), mask=column < width)


@triton.jit
def _store(
    out, blocks, v, share, scale, t: tl.constexpr, SHIFT: tl.constexpr, FROM: tl.constexpr,
    K: tl.constexpr, KIND: tl.constexpr, TARGET: tl.constexpr, GROUP: tl.constexpr, HARDWARE: tl.constexpr,
    C: tl.constexpr,
):  # fmt: skip
    """Columns FROM to K of tile t, SHIFT columns further: E4M3, whole numbers as INT8, or two codes a byte; and block
    scales where the target has them."""
    at = _places(t, 0, C)
    inside = (at >= FROM) & (at < K)
    start = (t * C + chunk_of(C)) * 8
    if TARGET == "int8":
        tl.store(out + at + SHIFT, (v + 12582912.0).to(tl.int32, bitcast=True).to(tl.uint8), mask=inside)
    elif TARGET == "packed":
        half = start[:, None] // 2 + tl.arange(0, 4)[None, :]
        inside = (half >= FROM // 2) & (half < (K + 1) // 2)
        tl.store(out + half + SHIFT // 2, nibbles(v, KIND, C), mask=inside)
    else:
        tl.store(out + at + SHIFT, e4m3_bits(v * share[:, None], HARDWARE), mask=inside)
    FLOATS: tl.constexpr = KIND == "fp8-group" or (KIND == "int4-group" and TARGET == "int8")
    if FLOATS or (TARGET == "packed" and GROUP > 0):
        begins = (start % GROUP == 0) & (start >= FROM) & (start < K)
        if not FLOATS:
            scale = scale_bytes(scale, KIND)
        tl.store(blocks + (start + SHIFT) // GROUP, scale, mask=begins)


@triton.jit
def activate_kernel(
    x_ptr, gate_ptr, weight_ptr, bias_ptr, mod_scale_ptr, mod_shift_ptr, shift_ptr, inverse_ptr, order_ptr, extra_ptr,
    codes_ptr, scale_ptr, block_ptr, stride, gate_stride, mod_stride, extra_stride, period, rank, width, eps,
    K: tl.constexpr, KIND: tl.constexpr, TARGET: tl.constexpr, GROUP: tl.constexpr, HALF: tl.constexpr,
    RULE: tl.constexpr, FRONT: tl.constexpr, GATE: tl.constexpr, WEIGHT: tl.constexpr, BIAS: tl.constexpr,
    ADALN: tl.constexpr, SHIFT: tl.constexpr, SMOOTH: tl.constexpr, PERMUTE: tl.constexpr, ROTATE: tl.constexpr,
    RESIDUAL: tl.constexpr, DUAL: tl.constexpr, EXTRA: tl.constexpr, TAIL: tl.constexpr, HARDWARE: tl.constexpr,
    FUSED: tl.constexpr, AHEAD: tl.constexpr, TILES: tl.constexpr, C: tl.constexpr,
):  # fmt: skip
    """Arguments as of `dq.kernels.activation.launch`; strides are those of rows, in elements.

    Args:
        period: rows of x that share a row of the adaLN tensors.
        block_ptr: block scales [M, groups]: float32 of `fp8-group` and of INT4 groups as INT8, bytes of `packed`.
        width: bytes of a row of codes; rank: columns of `extra`.
        EXTRA, TAIL: powers of two that hold rank, and the columns behind K and the residuals; 0 for none.
        AHEAD: how many rows later the row is that is fetched meanwhile, 0 for none.
        TILES, C: a row lies in TILES tiles of C chunks of 8 elements, the last ones masked.
    """
    row = tl.program_id(0).to(tl.int64)
    if AHEAD:
        _fetch(x_ptr + (row + AHEAD) * stride, row + AHEAD < tl.num_programs(0), K)
    FLIP: tl.constexpr = ROTATE // 8 - 1 if ROTATE else 0
    NORM: tl.constexpr = FRONT == "rmsnorm" or FRONT == "layernorm"
    places = ()
    tiles = ()
    for t in tl.static_range(TILES):
        at, x = _loaded(
            x_ptr + row * stride, gate_ptr + row * gate_stride, order_ptr, t, K, FRONT, GATE, PERMUTE, FLIP, C
        )
        places = places + (at,)
        tiles = tiles + (x,)
    if NORM:
        tiles = _normalized(tiles, places, weight_ptr, bias_ptr, eps, K, FRONT, WEIGHT, BIAS, TILES)
    group = row // period * mod_stride
    high = tl.zeros((C,), tl.float32)
    done = ()
    for t in tl.static_range(TILES):
        y = _transformed(
            tiles[t], places[t], mod_scale_ptr + group, mod_shift_ptr + group, shift_ptr, inverse_ptr,
            K, ADALN, SHIFT, SMOOTH, ROTATE, C,
        )  # fmt: skip
        high = larger(high, largest(tl.abs(y), 1, False, FUSED))
        done = done + (y,)
    top = largest(high, 0, False, FUSED)  # once for all tiles: warps wait for each other
    beside = 0.0
    if EXTRA:
        column = tl.arange(0, EXTRA)
        t = tl.load(extra_ptr + row * extra_stride + column, mask=column < rank, other=0.0).to(tl.float32)
        beside = largest(tl.abs(t), 0, False, FUSED)
    base, unit = row_levels(top, beside, KIND, HALF, RULE)
    EXACT: tl.constexpr = ROTATE == 0
    BLOCKS: tl.constexpr = (K + RESIDUAL + (RESIDUAL if DUAL else 0) + GROUP - 1) // GROUP if GROUP else 0
    out = codes_ptr + row * width
    blocks = scale_ptr + row if BLOCKS == 0 else block_ptr + row * BLOCKS
    for t in tl.static_range(TILES):
        v, share, scale = rounded(done[t], base, unit, KIND, GROUP, HALF, RULE, EXACT, FUSED, C)
        _store(out, blocks, v, share, scale, t, 0, 0, K, KIND, TARGET, GROUP, HARDWARE, C)
        if RESIDUAL and (t + 1) * C * 8 > K - RESIDUAL:
            FROM: tl.constexpr = K - RESIDUAL
            if KIND == "fp8":
                w, part, fine = v - round_signed(v, -6, 3, 448.0), share, scale
            else:
                rest = done[t] - v * (scale * unit)[:, None]
                w, part, fine = rounded(rest, base, unit, KIND, GROUP, HALF, RULE, EXACT, FUSED, C)
            _store(out, blocks, w, part, fine, t, RESIDUAL, FROM, K, KIND, TARGET, GROUP, HARDWARE, C)
            if DUAL:
                _store(out, blocks, v, share, scale, t, 2 * RESIDUAL, FROM, K, KIND, TARGET, GROUP, HARDWARE, C)
    if TAIL:
        COLUMNS: tl.constexpr = K + (2 * RESIDUAL if DUAL else RESIDUAL)
        BEHIND: tl.constexpr = (COLUMNS + 1) // 2 if TARGET == "packed" else COLUMNS
        _behind(out + BEHIND, extra_ptr + row * extra_stride, base * unit, rank, width - BEHIND, HARDWARE, EXTRA, TAIL)
    if KIND != "fp8-group" and not (KIND == "int4-group" and TARGET == "int8"):
        tl.store(scale_ptr + row, unit if TARGET == "packed" else base * unit)
