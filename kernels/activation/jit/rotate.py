"""Where a row lies in a tile [C, 8], and the grouped regular-Hadamard rotation of such a tile by radix-4 butterflies.

    H4 = (J / 2 - I) R,   J all ones, R the reversal of four;   H_{4^k} = (J / 2 - I)^{(x) k} R'

R' is the reversal of 4^k elements: all but the place of a result comes from `h - x_i`, h half the sum of the four, in
each of k stages. A chunk is 8 elements, 16 bytes of BF16, which one thread loads. The 32 chunks q4..q0 of 256 elements
lie in a tile such that q3 and q1 count registers, q4, q2 and q0 lanes of a warp: then in each stage one of two sums
stays within a thread and the other one takes one shuffle for two elements.
"""

import triton
import triton.language as tl

from dq.kernels.quantize.jit.floats import largest


@triton.jit
def chunk_of(C: tl.constexpr):
    """Chunk of a row at each place of the tile [C]; bits of the place: q3 q1, those above q4, q4 q2 q0."""
    place = tl.arange(0, C)
    return (
        (place & 1) | ((place & 2) << 1) | ((place & 4) << 2)
        | ((place // (C // 4) % 2) << 1) | ((place // (C // 2)) << 3)
        | (((place >> 3) & (C // 32 - 1)) << 5)
    )  # fmt: skip


@triton.jit
def split_bits(m, C: tl.constexpr):
    """[C] by the bits of `chunk_of`: [q3, q1, above, q4, q2, q0]."""
    return tl.reshape(m, (2, 2, C // 32, 2, 2, 2))


@triton.jit
def group_max(m, GROUP: tl.constexpr, FUSED: tl.constexpr, C: tl.constexpr):
    """Maximum of m >= 0 over the chunks of each group of 8, 16, 32, 64 or 128 elements, at all their places: [C] to
    [C]."""
    if GROUP == 8:
        return m
    wide = tl.zeros((2, 2, C // 32, 2, 2, 2), tl.float32)
    m = largest(split_bits(m, C), 5, True, FUSED)
    if GROUP >= 32:
        m = largest(m, 1, True, FUSED)
    if GROUP >= 64:
        m = largest(m, 4, True, FUSED)
    if GROUP >= 128:
        m = largest(m, 0, True, FUSED)
    return tl.reshape(m + wide, (C,))


@triton.jit
def pair_sum(x, C: tl.constexpr):
    """Sums of squares of x [C, 8] over groups of 16, at both of their places, [C]; by neighbouring pairs, as
    dq.scales.tree_sum adds."""
    x = tl.sum(tl.reshape(x * x, (C, 4, 2)), axis=2)
    x = tl.sum(tl.sum(tl.reshape(x, (C, 2, 2)), axis=2), axis=1)
    wide = tl.zeros((2, 2, C // 32, 2, 2, 2), tl.float32)
    return tl.reshape(tl.sum(split_bits(x, C), axis=5, keep_dims=True) + wide, (C,))


@triton.jit
def _swap(x):
    """The two halves of the last axis of [C, 2, 2, 2] exchanged: registers change their names, nothing moves."""
    a, b = tl.split(x)
    return tl.join(b, a)


@triton.jit
def _reversed(x, C: tl.constexpr):
    """The last axis of [C, 8] backwards; the lowest bit last, so that registers end in the order of elements."""
    x = tl.permute(tl.reshape(x, (C, 2, 2, 2)), (0, 3, 2, 1))
    x = tl.permute(_swap(x), (0, 3, 1, 2))
    x = tl.permute(_swap(x), (0, 1, 3, 2))
    return tl.reshape(_swap(x), (C, 8))


@triton.jit
def _stage(x, A: tl.constexpr, B: tl.constexpr, SHARE: tl.constexpr):
    """`2 (h - x)` times SHARE, h half the sum over the digit of 4 whose bits are the axes A and B."""
    s = tl.sum(x, axis=A, keep_dims=True)
    s = tl.sum(s, axis=B, keep_dims=True)
    return tl.fma(x, -2.0 * SHARE, s * SHARE)


@triton.jit
def rotate(x, SIZE: tl.constexpr, C: tl.constexpr):
    """x [C, 8] rotated in groups of SIZE (16, 64 or 256), given with the chunks of each group in reverse order.

    What each stage is too large by, a factor of 2, the last one takes back: the same bits for |x| < 2^120. On an H200
    that takes up to 5 % less time than to halve in each stage at K = 3072, and at K = 12288 after smoothing 4 % less,
    but alone 2 to 8 % more.
    """
    x = tl.reshape(_reversed(x, C), (2, 2, C // 32, 2, 2, 2, 2, 2, 2))
    x = _stage(x, 8, 7, 1.0)
    x = _stage(x, 6, 5, 0.25 if SIZE == 16 else 1.0)
    if SIZE >= 64:
        x = _stage(x, 1, 4, 0.125 if SIZE == 64 else 1.0)
    if SIZE >= 256:
        x = _stage(x, 0, 3, 0.0625)
    return tl.reshape(x, (C, 8))
