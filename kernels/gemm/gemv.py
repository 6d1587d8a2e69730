"""Weight-only products, x in 16 bits: for few rows W is decoded in registers, above that expanded for cuBLAS.

    y = x @ W^T + bias,  W = (code - zero point) * scale * second level

Up to `LIMIT` rows the bytes of W decide, so it is read once at its width at rest; with more rows the arithmetic does,
and one pass that writes W in 16 bits pays off.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from dq.kernels.gemm import expand as expansion
from dq.kernels.gemm import layout as layouts
from dq.kernels.gemm import row8
from dq.kernels.gemm.layout import Layout
from dq.kernels.library import counters, define, launch, multiprocessors, reversed_lanes
from dq.qtensor import QTensor

LIMIT = 16


def _geometry(lay: Layout, groups: int, scale: int, half: bool) -> dict[str, int | bool]:
    """How far a step goes, and where its scale is applied. E2M1 times its scale is exact in BF16, so many groups fit in
    a step; INT4 times a float is not, so a step is one group."""
    per_byte = 2 if lay.bits == 4 else 1
    exact = _exact(lay, scale, half)
    if groups == 1:
        return dict(BYTES=64, INSIDE=0, PER_STEP=False)
    if exact and lay.group <= 32:
        return dict(BYTES=64, INSIDE=lay.group // per_byte, PER_STEP=False)
    return dict(BYTES=lay.group // per_byte, INSIDE=0, PER_STEP=True)


def _exact(lay: Layout, scale: int, half: bool) -> bool:
    """Whether a code times its scale is a 16-bit float: E2M1 with scales in E4M3 or, of BF16, powers of two."""
    return lay.kind == "e2m1" and (scale == 1 or (scale == 2 and not half))


def _dtype(half: bool, on_gpu: bool) -> Any:
    """What products are of; the interpreter has none of BF16."""
    import triton.language as tl

    return tl.float32 if not on_gpu else tl.float16 if half else tl.bfloat16


def _too_small(lay: Layout, scale: Tensor, half: bool) -> bool:
    """Whether a step would be smaller than the 16 columns of one kind that a product takes."""
    groups = scale.shape[1]
    return lay.bits == 4 and groups > 1 and _geometry(lay, groups, expansion.scale_kind(scale), half)["BYTES"] < 16


def _blocks(m: int, n: int, steps: int, small: bool, device: torch.device) -> tuple[dict[str, int], int]:
    """Tile and split of K: among few warps, so that each has steps to keep its loads in flight over; among programs
    where rows of W alone are too few to keep the memory of every multiprocessor busy. Of `small` steps, two at a
    time."""
    on_gpu = device.type == "cuda"
    bn, bm = 32 if on_gpu and m > 1 else 16, 1 if m == 1 else 8 if m <= 8 else 16
    tiles, units = -(-n // bn), multiprocessors(device.index if on_gpu else None)
    warps = 2
    while warps < 8 and (tiles * warps < 16 * units or warps < 4) and steps >= 6 * warps:
        warps *= 2
    split = max(1, min(8 * units // (tiles * warps), steps // (2 * warps), 32))
    # As many parts of K as warps: with two for each, products of one row came out wrong on an H200 (Triton 3.6).
    tile = dict(BN=bn, BM=bm, S=warps, UNROLL=2 if small else 1, SPLIT=split > 1, num_warps=warps)
    return tile | dict(num_stages=3 if on_gpu else 1), split


@lru_cache(maxsize=1024)  # of every launch
def _plan(
    m: int, n: int, k: int, lay: Layout, groups: int, scale: int, unit: int, bias: bool, half: bool,
    device: torch.device,
) -> tuple[dict[str, Any], int, int]:  # fmt: skip
    """(compile-time arguments and options, programs over K, steps of one warp)."""
    shape = _geometry(lay, groups, scale, half)
    size = shape["BYTES"] * (2 if lay.bits == 4 else 1)
    steps = -(-k // size)
    tile, split = _blocks(m, n, steps, shape["BYTES"] < 64, device)
    each = -(-steps // (split * tile["S"] * tile["UNROLL"]))
    on_gpu = device.type == "cuda"
    flags = dict(KIND=expansion.KINDS[lay.kind], SCALE=scale, UNIT=unit, BIAS=bias, ASM=on_gpu)
    flags |= dict(dtype=_dtype(half, on_gpu))
    return flags | shape | tile | dict(EVEN=k == each * tile["UNROLL"] * tile["S"] * split * size), split, each


def _one_row(x: Tensor, codes: Tensor, scale: Tensor, lay: Layout, groups: int) -> bool:
    """Whether `row_kernel` takes this: x of one row, whole words, and scales that its products can apply."""
    half = x.dtype == torch.float16
    if len(x) != 1 or len(codes) < 8 or lay.bits != 4 or x.shape[1] % 16:
        return False
    if codes.data_ptr() % 8 or codes.stride(0) % 8:
        return False
    if lay.kind == "e2m1":
        return _exact(lay, expansion.scale_kind(scale), half) and groups > 1
    return groups == 1 or lay.group >= 64


def _launch_row(x, codes, scale, unit, bias, kind, group, rows) -> Tensor:
    from dq.kernels.gemm.jit.row import row_kernel

    k, n, groups = x.shape[1], len(codes), scale.shape[1]
    out = torch.empty(1, n, dtype=x.dtype, device=x.device)
    words, scales = codes.view(torch.int32), expansion.as_bytes(scale)
    constants, each = _row_plan(
        n, k, groups, words.stride(0), rows == 1, kind, group if groups > 1 else 0, expansion.scale_kind(scale),
        expansion.unit_kind(unit), bias is not None, x.dtype == torch.float16, x.device,
    )  # fmt: skip
    data = (
        x.contiguous(),
        words,
        scales,
        scales if unit is None else unit,
        out if bias is None else bias.contiguous(),
        out,
    )
    launch(row_kernel, (-(-n // constants["R"]),), (*data, n, rows or n, each, 1), constants)
    return out


@lru_cache(maxsize=1024)  # of every launch
def _row_plan(
    n: int, k: int, groups: int, stride: int, own: bool, kind: str, group: int, scale: int, unit: int, bias: bool,
    half: bool, device: torch.device,
) -> tuple[dict[str, Any], int]:  # fmt: skip
    """(compile-time arguments and options, iterations of a warp)."""
    on_gpu, steps = device.type == "cuda", -(-k // 512)
    tile = _row_tile(n, steps, kind, multiprocessors(device.index if on_gpu else None))
    each = -(-steps // (tile["S"] * tile["U"]))
    flags = dict(K=k, GROUPS=groups, STRIDE=stride, OWN=own, KIND=expansion.KINDS[kind], SCALE=scale, UNIT=unit)
    flags |= dict(BIAS=bias, dtype=_dtype(half, on_gpu), ASM=on_gpu, EVEN=k == each * tile["S"] * tile["U"] * 512)
    options = dict(num_warps=tile["S"], num_stages=1)
    registers = tile.pop("registers")
    if on_gpu:
        options["maxnreg"] = registers
    return flags | tile | dict(GROUP=group // 16, ONCE=each == 1) | _habits() | options, each


def _row_tile(n: int, steps: int, kind: str, units: int) -> dict[str, int | bool]:
    """Rows and warps of a program, steps that a warp loads at a time, and registers of a lane.

    Many registers keep many loads in flight; fewer let more programs run side by side. Most are given that do not make
    the programs run in more waves: 4096 -> 14336, INT4 in groups of 64, takes an H200 11.7 us with 96 of them, 12.2
    with 112, 12.9 with 80, and 13.8 with four rows for one warp each; 4096 -> 6144 takes 6.7 with 80 and 7.0 with 112.
    """
    rows, warps = 8 if n >= 16 * units else 4, 4
    while warps > 1 and warps > steps:
        warps //= 2
    if -(-n // rows) * warps < 12 * units and steps >= 2 * warps:
        warps *= 2
    if kind == "e2m1" and steps > 2 * warps:  # 13.9 us where eight rows take 14.7
        return dict(R=4, S=warps, U=1, EARLY=False, registers=72)
    waves = {r: -(-n // (rows * units * max(1, 2048 // (r * warps)))) for r in (80, 96, 112)}
    registers = max(r for r in waves if waves[r] == min(waves.values()))
    two = steps % (2 * warps) == 0 and registers > 80
    early = two and kind != "e2m1" and waves[registers] > 1
    return dict(R=rows, S=warps, U=2 if two else 1, EARLY=early, registers=registers)


@lru_cache(maxsize=1)
def _habits() -> dict[str, int | bool]:
    """How this version of Triton gives out lanes and operands (see `row_kernel`), as found by compiling for each."""
    import triton

    version = tuple(int(part) for part in triton.__version__.split(".")[:2])
    return dict(REVERSE=reversed_lanes(), NARROW=2 if version >= (3, 8) else 4)


def _launch(x, codes, scale, unit, bias, kind, group, rows) -> Tensor:
    from dq.kernels.gemm.jit.gemv import gemv_kernel

    (m, k), n, groups = x.shape, len(codes), scale.shape[1]
    if m == 1 and n and row8.takes(codes, scale, unit, kind, rows):
        return row8.of_floats(x, codes, scale, bias, x.dtype)
    if n and _one_row(x, codes, scale, Layout(kind, group, rows), groups):
        return _launch_row(x, codes, scale, unit, bias, kind, group, rows)
    out = torch.empty(m, n, dtype=x.dtype, device=x.device)
    if not m or not n:
        return out
    constants, split, each = _plan(
        m, n, k, Layout(kind, group if groups > 1 else 0, rows), groups, expansion.scale_kind(scale),
        expansion.unit_kind(unit), bias is not None, x.dtype == torch.float16, x.device,
    )  # fmt: skip
    tiles = -(-n // constants["BN"])
    partial, counter = out, out
    if split > 1:
        partial = torch.empty(split, m, n, dtype=torch.float32, device=x.device)
        counter = counters(x.device, tiles)
    scales = expansion.as_bytes(scale)
    data = (
        x.contiguous(), expansion.as_bytes(codes).view(torch.uint8), scales, scales if unit is None else unit,
        out if bias is None else bias.contiguous(), out, partial, counter,
    )  # fmt: skip
    launch(gemv_kernel, (tiles, split), (*data, m, n, k, groups, codes.shape[1], rows or n, each, split), constants)
    return out


def _wide(x, codes, scale, unit, bias, kind, group, rows) -> Tensor:
    """Many rows: W in the dtype of x, then cuBLAS."""
    arguments = (codes, scale, unit, None, kind, group, rows, x.shape[1], x.shape[1], x.dtype)
    weight, _ = torch.ops.dq.expand.default(*arguments)
    return torch.nn.functional.linear(x, weight, None if bias is None else bias.to(x.dtype))


def _run(x, codes, scale, unit, bias, kind, group, rows) -> Tensor:
    small = x.shape[0] <= LIMIT and not _too_small(Layout(kind, group, rows), scale, x.dtype == torch.float16)
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
