"""NVFP4, MXFP4 and MXFP8 products of both operands as they rest, on Blackwell's block-scaled tensor cores.

    y[m, n] = row[m] unit sum_g sa[m, g] sb[n, g] sum_{k in g} a[m, k] b[n, k] + bias[n]

Products and scales are exact, sums are float32. Elsewhere the compiler widens both to BF16: right, but of no use.
"""

from __future__ import annotations

import torch
from torch import Tensor

from dq.kernels.gemm.expand import unit_kind
from dq.kernels.gemm.layout import Layout, scale_values, spread, values
from dq.kernels.library import define


def _launch(a, sa, row, b, sb, unit, bias, kind, group, dtype) -> Tensor:
    from dq.kernels.gemm.jit.block_scaled import block_scaled_kernel

    m, n, pack = len(a), len(b), 2 if kind == "e2m1" else 1
    k = a.shape[1] * pack
    out = torch.empty(m, n, dtype=dtype, device=a.device)
    if not m or not n:
        return out
    step = next(s for s in (128 * pack, 128, 64) if k % s == 0)
    big = dict(BM=128, BN=256, num_warps=8) if m > 128 and n % 256 == 0 else dict(BM=128, BN=128, num_warps=4)
    block_scaled_kernel[(-(-m // big["BM"]) * -(-n // big["BN"]),)](
        a.contiguous(), sa.contiguous(), b, sb, out if row is None else row, out if unit is None else unit,
        out if bias is None else bias, out, m, n, k,
        FORMAT=kind, GROUP=group, PACK=pack, ROW=row is not None, UNIT=unit_kind(unit), BIAS=bias is not None,
        BK=step, BAND=8, num_stages=3, **big,
    )  # fmt: skip
    return out


def _side(codes: Tensor, scale: Tensor, kind: str, group: int) -> Tensor:
    k = codes.shape[1] * (2 if kind == "e2m1" else 1)
    return values(codes, kind, k) * spread(scale_values(scale), Layout(kind, group, 1), len(codes), k)


def _reference(a, sa, row, b, sb, unit, bias, kind, group, dtype) -> Tensor:
    y = _side(a, sa, kind, group) @ _side(b, sb, kind, group).T
    y = y if row is None else y * row[:, None]
    y = y if unit is None else y * unit
    return (y if bias is None else y + bias.to(torch.float32)).to(dtype)


def _fake(a, sa, row, b, sb, unit, bias, kind, group, dtype) -> Tensor:
    return a.new_empty(a.shape[0], b.shape[0], dtype=dtype)


_product = define(
    "block_scaled(Tensor a, Tensor sa, Tensor? row, Tensor b, Tensor sb, Tensor? unit, Tensor? bias, str kind, "
    "int group, ScalarType dtype) -> Tensor",
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
) -> Tensor:
    """y [M, N] in `dtype` by the formula of the module.

    Args:
        a, b: codes as they rest: bytes of E2M1 [M, K / 2] and [N, K / 2], or E4M3 [M, K] and [N, K]; 64 divides K.
        sa, sb: [M, K / group] and [N, K / group]: E4M3, or uint8 biased exponents.
        row, unit: float32 second levels, [M] and [1] or [N], or None.
        kind: `e2m1` or `e4m3`.
    """
    return _product(a, sa, row, b, sb, unit, bias, kind, group, dtype)
