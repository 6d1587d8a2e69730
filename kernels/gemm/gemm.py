"""8-bit matrix products with one scale per row, or one per group of columns, of either side.

    y[m, n] = sum_g sa[m, g] sb[n, g] sum_{k in g} a[m, k] b[n, k] + sum_r low[m, r] up[n, r] + bias[n]

INT8 codes (INT4 ones too, a byte each) give exact int32 sums; E4M3 sums are float32. A group's partial sum is scaled
before it is added, so `int4/group64` and DeepSeek's FP8 (1x128 activations, 128x128 weights) run as they are defined.
A low-rank branch is added before the result is rounded, once: next to a rounded result a small branch rounds away.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from dq.kernels.library import capability, counters, define, launch, multiprocessors

FEW = 16  # rows up to which cuBLASLt refuses some shapes (1 x 14336 by 14336 x 4096 on an H200)
GROUPS = (0, 32, 64, 128)  # columns of a group that the kernel takes; 0 for one scale per row


def _tiles(m: int, n: int, group: int, device: torch.device) -> dict[str, int]:
    """Block sizes: of Hopper as measured on an H200; 128 x 256 suits other large shared memories (A100, B200); Ada and
    its like have 99 KB; fewer rows take smaller tiles, the interpreter the smallest."""
    if device.type != "cuda":
        return dict(BM=16, BN=16, BK=group or 32, BAND=2, num_warps=4, num_stages=1)
    large = capability(device) in ((8, 0), (9, 0), (10, 0), (10, 3))
    if group:
        # Partial sums leave the tensor cores after each group: small tiles, so that others multiply in the meantime.
        return dict(BM=64, BN=128 if m > 64 else 64, BK=group, BAND=32, num_warps=4, num_stages=4 if large else 3)
    if m > 64 and capability(device)[0] == 9:  # two programs share a multiprocessor: one multiplies, one stores
        return dict(BM=128, BN=128, BK=128, BAND=8, num_warps=4, num_stages=3)
    if m > 512 and n >= 1024 and large:
        return dict(BM=128, BN=256, BK=128, BAND=16, num_warps=8, num_stages=3)
    if m > 64:
        return dict(BM=128, BN=128, BK=128 if large else 64, BAND=8, num_warps=8, num_stages=3)
    return dict(BM=64 if m > 32 else 32 if m > 16 else 16, BN=64, BK=128, BAND=8, num_warps=4, num_stages=4)


def _launch(a, b, sa, sb, bias, low, up, group, rows, dtype) -> Tensor:
    from dq.kernels.gemm.jit.gemm import gemm_kernel

    (m, k), n = a.shape, len(b)
    out = torch.empty(m, n, dtype=dtype, device=a.device)
    if not m or not n:
        return out
    half = None if low is None else low.dtype == torch.float16
    constants, grid, each = _plan(m, n, k, group, rows, a.dtype == torch.int8, bias is not None, half, a.device)
    partial, counter = out, out
    if grid[1] > 1:
        partial = torch.empty(grid[1], m, n, dtype=torch.float32, device=a.device)
        counter = counters(a.device, grid[0])
    factors = (out, out) if low is None else (low.contiguous(), up.contiguous())
    data = (
        a.contiguous(),
        b.contiguous(),
        sa.contiguous(),
        sb.contiguous(),
        out if bias is None else bias.contiguous(),
        *factors,
    )
    rank = 0 if low is None else low.shape[1]
    sizes = (m, n, k, sa.shape[1], rows, rank, each, grid[1])
    launch(gemm_kernel, grid, (*data, out, partial, counter, *sizes), constants)
    return out


@lru_cache(maxsize=1024)  # of every launch
def _plan(
    m: int, n: int, k: int, group: int, rows: int, integer: bool, bias: bool, half: bool | None, device: torch.device
) -> tuple[dict[str, Any], tuple[int, int], int]:
    """(compile-time arguments and options, grid, steps along K of a program). half: of a low-rank branch; None for
    none. Of few rows there are few tiles, and several programs share one."""
    import triton.language as tl

    tile = _tiles(m, n, group, device)
    block = group > 0 and rows % tile["BN"] == 0
    flags = dict(INTEGER=integer, GROUPED=group > 0, BLOCK=block, BIAS=bias, EVEN=k % tile["BK"] == 0)
    # The interpreter has no products of BF16.
    flags |= dict(
        LOW=half is not None, dtype=tl.float16 if half else tl.bfloat16 if device.type == "cuda" else tl.float32
    )
    tiles, steps, split = -(-m // tile["BM"]) * -(-n // tile["BN"]), -(-k // tile["BK"]), 1
    if m <= FEW and not group and not integer:
        split = max(1, min(2 * multiprocessors(device.index if device.type == "cuda" else None) // tiles, steps // 4))
    each = -(-steps // split)
    split = -(-steps // each)
    return flags | tile | dict(SPLIT=split > 1), (tiles, split), each


def _reference(a, b, sa, sb, bias, low, up, group, rows, dtype) -> Tensor:
    k, y = a.shape[1], 0
    for g in range(sa.shape[1]):
        cut = slice(g * group, (g + 1) * group) if group else slice(0, k)
        # Integers below 2^53 are exact in float64.
        part = (a[:, cut].to(torch.float64) @ b[:, cut].to(torch.float64).T).to(torch.float32)
        y = y + part * (sa[:, g : g + 1] * sb[:, g].repeat_interleave(rows)[: len(b)])
    if low is not None:
        y = y + low.to(torch.float32) @ up.to(torch.float32).T
    return (y if bias is None else y + bias.to(torch.float32)).to(dtype)


def _fake(a, b, sa, sb, bias, low, up, group, rows, dtype) -> Tensor:
    return a.new_empty(a.shape[0], b.shape[0], dtype=dtype)


_gemm = define(
    "gemm8(Tensor a, Tensor b, Tensor sa, Tensor sb, Tensor? bias, Tensor? low, Tensor? up, int group, int rows, "
    "ScalarType dtype) -> Tensor",
    _launch, _fake, _reference,
)  # fmt: skip


def gemm(
    a: Tensor,
    b: Tensor,
    sa: Tensor,
    sb: Tensor,
    bias: Tensor | None = None,
    group: int = 0,
    rows: int = 1,
    dtype: torch.dtype = torch.bfloat16,
    low: Tensor | None = None,
    up: Tensor | None = None,
) -> Tensor:
    """y [M, N] in `dtype` by the formula of the module.

    Args:
        a, b: both int8 or both float8_e4m3fn, [M, K] and [N, K].
        sa, sb: float32 [M, G] and [ceil(N / rows), G]; G = 1 without groups, else ceil(K / group).
        bias: [N] or None.
        group: columns that share a scale, one of `GROUPS`.
        rows: rows of b that share a scale.
        low, up: 16-bit [M, r] and [N, r] of one dtype, or None.
    """
    return _gemm(a, b, sa, sb, bias, low, up, group, rows, dtype)


def scaled_mm(
    a: Tensor,
    b: Tensor,
    sa: Tensor,
    sb: Tensor,
    bias: Tensor | None,
    low: Tensor | None = None,
    up: Tensor | None = None,
) -> Tensor:
    """`(a sa) (b sb)^T + low up^T + bias` in BF16 by cuBLASLt, for E4M3 a [M, K], b [N, K], sa [M, 1], sb [N].

    K and N must be multiples of 16. Sums stay in the tensor cores' accumulators (about 14 bits of mantissa): that loses
    1e-3 where the operands' own rounding loses 4e-2, and gains 15 %. Up to `FEW` rows, with a low-rank branch (cuBLASLt
    would round first, and a second pass over a wide result costs more than its lead), and on the CPU: `gemm`.
    """
    bias = None if bias is None else bias.to(torch.bfloat16)
    if a.shape[0] <= FEW or a.device.type == "cpu" or low is not None:
        return gemm(a, b, sa, sb[:, None], bias, low=low, up=up)
    return torch._scaled_mm(
        a.contiguous(), b.t(), scale_a=sa, scale_b=sb[None], bias=bias, out_dtype=torch.bfloat16, use_fast_accum=True
    )
