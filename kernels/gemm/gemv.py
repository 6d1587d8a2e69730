"""Weight-only products, x in 16 bits: for few rows W is decoded in registers, above that expanded for cuBLAS.

    y = x @ W^T + bias,  W = (code - zero point) * scale * second level

Up to `LIMIT` rows the bytes of W decide, so it is read once at its width at rest; with more rows the arithmetic does,
and one pass that writes W in 16 bits pays off.
"""

from __future__ import annotations

import torch
from torch import Tensor

from dq.kernels.gemm import expand as expansion
from dq.kernels.gemm import layout as layouts
from dq.kernels.gemm.layout import Layout
from dq.kernels.library import define, multiprocessors
from dq.qtensor import QTensor

LIMIT = 16
_COUNTERS: dict[tuple[torch.device, int], Tensor] = {}


def _counters(device: torch.device, size: int) -> Tensor:
    """int32 zeros, which every launch leaves at zero; one set per stream, so that launches side by side do not meet."""
    key = (device, torch.cuda.current_stream(device).cuda_stream if device.type == "cuda" else 0)
    found = _COUNTERS.get(key)
    if found is None or found.numel() < size:
        found = _COUNTERS[key] = torch.zeros(max(4096, size), dtype=torch.int32, device=device)
    return found


def _geometry(lay: Layout, scale: Tensor, half: bool) -> dict[str, int | bool]:
    """How far a step goes, and where its scale is applied. E2M1 times its scale is exact in BF16, so many groups fit in
    a step; INT4 times a float is not, so a step is one group."""
    groups = scale.shape[1]
    per_byte = 2 if lay.bits == 4 else 1
    exact = lay.kind == "e2m1" and (scale.dtype == torch.float8_e4m3fn or (scale.dtype == torch.uint8 and not half))
    if groups == 1:
        return dict(BYTES=64, INSIDE=0, PER_STEP=False)
    if exact and lay.group <= 32:
        return dict(BYTES=64, INSIDE=lay.group // per_byte, PER_STEP=False)
    return dict(BYTES=lay.group // per_byte, INSIDE=0, PER_STEP=True)


def _too_small(lay: Layout, scale: Tensor, half: bool) -> bool:
    """Whether a step would be smaller than the 16 columns of one kind that a product takes."""
    return lay.bits == 4 and scale.shape[1] > 1 and _geometry(lay, scale, half)["BYTES"] < 16


def _blocks(m: int, n: int, steps: int, device: torch.device) -> tuple[dict[str, int], int]:
    """Tile and split of K: enough programs of one warp to keep the memory of every multiprocessor busy."""
    on_gpu = device.type == "cuda"
    bn, bm = 32 if on_gpu else 16, 8 if m <= 8 else 16
    tiles = -(-n // bn)
    split = max(1, min(16 * multiprocessors(device.index if on_gpu else None) // tiles, steps // 4, 32))
    return dict(BN=bn, BM=bm, SPLIT=split > 1, num_warps=1, num_stages=3 if on_gpu else 1), split


def _launch(x, codes, scale, unit, bias, kind, group, rows) -> Tensor:
    import triton.language as tl

    from dq.kernels.gemm.jit.gemv import gemv_kernel

    (m, k), n = x.shape, len(codes)
    out = torch.empty(m, n, dtype=x.dtype, device=x.device)
    if not m or not n:
        return out
    half = x.dtype == torch.float16
    lay = Layout(kind, group if scale.shape[1] > 1 else 0, rows)
    shape = _geometry(lay, scale, half)
    size = shape["BYTES"] * (2 if lay.bits == 4 else 1)
    steps = -(-k // size)
    tile, split = _blocks(m, n, steps, x.device)
    dtype = tl.float32 if not x.is_cuda else tl.float16 if half else tl.bfloat16
    partial, counter = out, out
    if split > 1:
        partial = torch.empty(split, m, n, dtype=torch.float32, device=x.device)
        counter = _counters(x.device, -(-n // tile["BN"]))
    scale_bytes = expansion.as_bytes(scale)
    gemv_kernel[(-(-n // tile["BN"]), split)](
        x.contiguous(), expansion.as_bytes(codes).view(torch.uint8), scale_bytes, scale_bytes if unit is None else unit,
        out if bias is None else bias, out, partial, counter,
        m, n, k, scale.shape[1], codes.shape[1], rows or n, steps, split,
        KIND=expansion.KINDS[kind], SCALE=expansion.scale_kind(scale), UNIT=expansion.unit_kind(unit),
        BIAS=bias is not None, dtype=dtype, ASM=x.is_cuda, EVEN=k % size == 0, **shape, **tile,
    )  # fmt: skip
    return out


def _wide(x, codes, scale, unit, bias, kind, group, rows) -> Tensor:
    """Many rows: W in the dtype of x, then cuBLAS."""
    arguments = (codes, scale, unit, None, kind, group, rows, x.shape[1], x.shape[1], x.dtype)
    weight, _ = torch.ops.dq.expand.default(*arguments)
    return torch.nn.functional.linear(x, weight, None if bias is None else bias.to(x.dtype))


def _run(x, codes, scale, unit, bias, kind, group, rows) -> Tensor:
    small = len(x) <= LIMIT and not _too_small(Layout(kind, group, rows), scale, x.dtype == torch.float16)
    return (_launch if small else _wide)(x, codes, scale, unit, bias, kind, group, rows)


def _reference(x, codes, scale, unit, bias, kind, group, rows) -> Tensor:
    n, k = len(codes), x.shape[1]
    lay = Layout(kind, group if scale.shape[1] > 1 else 0, rows)
    value, second = layouts.element_values(codes, scale, unit, lay, k)
    weight = value * layouts.spread(layouts.scale_values(scale), lay, n, k) * second[:, None]
    y = x.to(torch.float32) @ weight.T
    return (y if bias is None else y + bias.to(torch.float32)).to(x.dtype)


def _fake(x, codes, scale, unit, bias, kind, group, rows) -> Tensor:
    return x.new_empty(x.shape[0], codes.shape[0])


_linear = define(
    "weight_only(Tensor x, Tensor codes, Tensor scale, Tensor? unit, Tensor? bias, str kind, int group, int rows) "
    "-> Tensor",
    _run, _fake, _reference,
)  # fmt: skip


def weight_only(x: Tensor, weight: QTensor, bias: Tensor | None = None) -> Tensor:
    """y [M, N] in the dtype of x (bfloat16 or float16), by the formula of the module; float32 sums.

    Args:
        x: [M, K], K that of the weight.
        weight: one that `layout.why_not` accepts.
        bias: [N] or None.
    """
    lay = layouts.layout_of(weight.spec)
    codes, scale, unit = layouts.parts(weight)
    return _linear(x, codes, scale, unit, bias, lay.kind, lay.group, lay.rows)
