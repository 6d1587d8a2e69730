"""NVFP4, MXFP4 and MXFP8 products of both operands as they rest, on Blackwell's block-scaled tensor cores.

    y[m, n] = row[m] unit sum_g sa[m, g] sb[n, g] sum_{k in g} a[m, k] b[n, k] + sum_r low[m, r] up[n, r] + bias[n]

Products and scales are exact, sums are float32, the result is rounded once. Elsewhere the compiler widens both operands
to BF16: right, but of no use.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from dq.kernels.gemm.expand import as_bytes, unit_kind
from dq.kernels.gemm.layout import Layout, scale_values, spread, values
from dq.kernels.library import capability, define, launch


def _launch(a, sa, row, b, sb, unit, bias, low, up, kind, group, dtype) -> Tensor:
    from dq.kernels.gemm.jit.block_scaled import block_scaled_kernel

    m, n, stride = len(a), len(b), a.shape[1]
    out = torch.empty(m, n, dtype=dtype, device=a.device)
    if not m or not n:
        return out
    if sa.shape[1] % 4:  # scales of 2 bytes at a time could not be copied while the tensor cores work
        sa, sb = _whole_lines(sa), _whole_lines(sb)
    groups, half = sa.shape[1], None if low is None else low.dtype == torch.float16
    constants, grid = _plan(
        m, n, stride, groups, kind, group, row is not None, unit_kind(unit), bias is not None, half, a.device
    )
    data = [out if t is None else t.contiguous() for t in (a, sa, b, sb, row, unit, bias, low, up)]
    sizes = (m, n, stride // constants["WORD"], groups // constants["PART"], 0 if low is None else low.shape[1])
    launch(block_scaled_kernel, grid, (*data, out, *sizes), constants)
    return out


def _whole_lines(scale: Tensor) -> Tensor:
    """Scales [R, G] with zeros behind them up to a multiple of 16."""
    return torch.nn.functional.pad(as_bytes(scale), (0, -scale.shape[1] % 16)).view(scale.dtype)


def _tiles(m: int, n: int, pack: int, device: torch.device) -> dict[str, int]:
    """Block sizes; what they take of shared memory is tested for each generation (sm_120 has 99 KB of it)."""
    if device.type != "cuda":
        return dict(BM=16, BN=16, BK=64, BAND=2, num_warps=4, num_stages=1)
    large = capability(device)[0] == 10
    wide = large and m > 128 and n % 256 == 0
    tile = dict(BM=128, BN=256 if wide else 128, BK=128 * pack, BAND=8, num_stages=3)
    return tile | dict(num_warps=8 if wide or not large else 4)


def _power(n: int) -> int:
    """The largest power of two that divides n, at most 16."""
    return min(n & -n, 16)


@lru_cache(maxsize=1024)  # of every launch
def _plan(
    m: int, n: int, stride: int, groups: int, kind: str, group: int, row: bool, unit: int, bias: bool,
    half: bool | None, device: torch.device,
) -> tuple[dict[str, Any], tuple[int]]:  # fmt: skip
    """(compile-time arguments and options, grid). half: of a low-rank branch; None for none."""
    import triton.language as tl

    pack = 2 if kind == "e2m1" else 1
    tile = _tiles(m, n, pack, device)
    flags = dict(FORMAT=kind, GROUP=group, PACK=pack, ROW=row, UNIT=unit, BIAS=bias, LOW=half is not None)
    # The interpreter has no products of BF16.
    flags |= dict(dtype=tl.float16 if half else tl.bfloat16 if device.type == "cuda" else tl.float32)
    flags |= dict(EVEN=stride * pack % tile["BK"] == 0, WORD=_power(stride), PART=_power(groups))
    return flags | tile, (-(-m // tile["BM"]) * -(-n // tile["BN"]),)


def _side(codes: Tensor, scale: Tensor, kind: str, group: int) -> Tensor:
    k = codes.shape[1] * (2 if kind == "e2m1" else 1)
    return values(codes, kind, k) * spread(scale_values(scale), Layout(kind, group, 1), len(codes), k)


def _reference(a, sa, row, b, sb, unit, bias, low, up, kind, group, dtype) -> Tensor:
    y = _side(a, sa, kind, group) @ _side(b, sb, kind, group).T
    y = y if row is None else y * row[:, None]
    y = y if unit is None else y * unit
    y = y if low is None else y + low.to(torch.float32) @ up.to(torch.float32).T
    return (y if bias is None else y + bias.to(torch.float32)).to(dtype)


def _fake(a, sa, row, b, sb, unit, bias, low, up, kind, group, dtype) -> Tensor:
    return a.new_empty(a.shape[0], b.shape[0], dtype=dtype)


_product = define(
    "block_scaled(Tensor a, Tensor sa, Tensor? row, Tensor b, Tensor sb, Tensor? unit, Tensor? bias, Tensor? low, "
    "Tensor? up, str kind, int group, ScalarType dtype) -> Tensor",
    _launch, _fake, _reference,
)  # fmt: skip


def block_scaled(
    a: Tensor,
    sa: Tensor,
    row: Tensor | None,
    b: Tensor,
    sb: Tensor,
    unit: Tensor | None,
    bias: Tensor | None,
    kind: str,
    group: int,
    dtype: torch.dtype = torch.bfloat16,
    low: Tensor | None = None,
    up: Tensor | None = None,
) -> Tensor:
    """y [M, N] in `dtype` by the formula of the module.

    Args:
        a, b: codes as they rest: bytes of E2M1 [M, K / 2] and [N, K / 2], or E4M3 [M, K] and [N, K]; whole groups.
        sa, sb: [M, K / group] and [N, K / group]: E4M3, or uint8 biased exponents.
        row, unit: float32 second levels, [M] and [1] or [N], or None.
        kind: `e2m1` or `e4m3`.
        low, up: 16-bit [M, r] and [N, r] of one dtype, or None.
    """
    return _product(a, sa, row, b, sb, unit, bias, low, up, kind, group, dtype)
