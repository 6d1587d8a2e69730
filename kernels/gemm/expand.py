"""Expansion of a weight at rest into what a GEMM takes, just before it runs; memory stays that of the codes.

    E4M3   w = e4m3 * base,  base float32 [N]: one factor per row, which the GEMM applies at its end
           scale per row                       base = scale (codes are exact in E4M3)
           E4M3 block scales (NVFP4)           base = 8 * second level,  e4m3 = E4M3(code * scale / 8)
           other groups                        base = largest scale of the row / 32 (INT4) or / 64 (MXFP4),
                                               e4m3 = E4M3(code * scale / base)
    float  (code - zero point) * scale * second level, rounded once
    INT8   the codes of INT4

With a low-rank branch, E4M3 rows continue with `up` in two stages, [U1 | U1 | U2], to meet [T1 | T2 | T1] of the input:
three cross terms keep 2^-8 of the product (relative error 2e-3, a BF16 branch has 2.9e-3). `base` is then raised by a
power of two until up / base fits E4M3.

The result is an ordinary tensor of the caching allocator: layers that run one after the other share its memory.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from dq.kernels.gemm import layout as layouts
from dq.kernels.gemm.layout import Layout
from dq.kernels.library import capability, define, launch, native_fp8
from dq.qtensor import QTensor
from dq.scales import ceil_log2, divide, power

_TARGETS = {torch.float8_e4m3fn: 0, torch.bfloat16: 1, torch.float16: 1, torch.int8: 2}
KINDS = {"int4": 0, "uint4": 0, "e2m1": 1, "int8": 2, "e4m3": 3}  # as kernels count them


def _pow2(n: int) -> int:
    return 1 << max(0, n - 1).bit_length()


def scale_kind(scale: Tensor) -> int:
    """How kernels read stored scales: 0 floats, 1 E4M3, 2 biased exponents."""
    return {torch.float8_e4m3fn: 1, torch.uint8: 2}.get(scale.dtype, 0)


def as_bytes(t: Tensor) -> Tensor:
    """E4M3 as bytes: kernels decode it themselves, and Ampere's compiler has no such type."""
    return t.view(torch.uint8) if t.dtype == torch.float8_e4m3fn else t


def unit_kind(unit: Tensor | None) -> int:
    """How kernels read the second level: 0 none, 1 one for the tensor, 2 one per row; 3: these are zero points."""
    return 0 if unit is None else 3 if unit.dtype == torch.uint8 else 1 + (unit.numel() > 1)


def _launch(codes, scale, unit, up, kind, group, rows, k, width, dtype) -> tuple[Tensor, Tensor]:
    n, groups = len(codes), scale.shape[1]
    out = torch.empty(n, width, dtype=dtype, device=codes.device)
    base = torch.empty(n, dtype=torch.float32, device=codes.device)
    if not n or not width:
        return out, base
    rank, stride = 0 if up is None else up.shape[1], codes.shape[1]
    scales, target = as_bytes(scale), as_bytes(out)
    words = dtype == torch.float8_e4m3fn and not (k % 8 or width % 4 or stride % 4)
    words = words and (not codes.is_cuda or capability(codes.device) >= (8, 9))
    facts = (kind, scale_kind(scale), unit_kind(unit), native_fp8(codes.device), rank, width - k, codes.is_cuda)
    vectors = (scales, scales if unit is None else unit, scales if up is None else up)
    if words:
        from dq.kernels.gemm.jit.words import expand_words_kernel

        options, rows_of_one = _plan_words(k, group if groups > 1 else 0, *facts)
        data = (codes.view(torch.int32), *vectors, target, out.view(torch.int32), base)
        numbers = (n, k, groups, stride // 4, rank, width, rows or n)
        launch(expand_words_kernel, (-(-n // rows_of_one),), (*data, *numbers), options)
    else:
        from dq.kernels.gemm.jit.expand import expand_kernel

        options, grid, steps = _plan(n, k, groups, group, _TARGETS[dtype], *facts)
        data = (as_bytes(codes).view(torch.uint8), *vectors, target, base)
        launch(expand_kernel, grid, (*data, n, k, groups, stride, rank, width, rows or n, steps), options)
    return out, base


def _constants(kind: str, scale: int, unit: int, fp8: bool, rank: int, extra: int) -> dict[str, Any]:
    """Compile-time arguments that both kernels have."""
    behind = dict(RANK=_pow2(rank) if rank else 0, EXTRA=_pow2(extra) if extra else 0)
    return dict(KIND=KINDS[kind], SCALE=scale, UNIT=unit, FP8=fp8, **behind)


@lru_cache(maxsize=1024)  # of every launch
def _plan(
    n: int, k: int, groups: int, group: int, target: int,
    kind: str, scale: int, unit: int, fp8: bool, rank: int, extra: int, on_gpu: bool,
) -> tuple[dict[str, Any], tuple[int, int], int]:  # fmt: skip
    """(compile-time arguments and options, grid, steps along K) of the kernel for values."""
    options = _constants(kind, scale, unit, fp8, rank, extra)
    # E4M3 scales need no row maximum: one compiled kernel for every K.
    options |= dict(GROUPS=1 if scale == 1 else _pow2(groups), TARGET=target, BN=4 if on_gpu else 8, num_warps=4)
    size = (group if groups > 1 else 0) or 64  # elements that a tile takes at one scale
    options |= dict(BYTES=size if options["KIND"] >= 2 else size // 2, BG=max(1, (1024 if on_gpu else 128) // size))
    steps, blocks = -(-k // (size * options["BG"])), -(-n // options["BN"])
    # Programs over rows, and over columns where rows alone are too few to fill a GPU.
    return options, (blocks, max(1, min(steps, 2048 // blocks))), steps


@lru_cache(maxsize=1024)
def _plan_words(
    k: int, group: int, kind: str, scale: int, unit: int, fp8: bool, rank: int, extra: int, on_gpu: bool
) -> tuple[dict[str, Any], int]:
    """(compile-time arguments and options, rows of a program) of the kernel for words: a lane has at most 8 chunks."""
    chunks = -(-k // 16)
    warps = _pow2(-(-chunks // 256))  # of a row
    rows = max(1, 4 // warps)
    options = _constants(kind, scale, unit, fp8, rank, extra)
    options |= dict(ASM=on_gpu, WORDS=group // 8, BN=rows, C=32 * warps, TILES=-(-chunks // (32 * warps)))
    return options | dict(num_warps=rows * warps), rows


def _reference(codes, scale, unit, up, kind, group, rows, k, width, dtype) -> tuple[Tensor, Tensor]:
    """The formulas of the module, in float32."""
    lay, n = Layout(kind, group if scale.shape[1] > 1 else 0, rows), len(codes)
    value, second = layouts.element_values(codes, scale, unit, lay, k)
    base = torch.ones(n)
    if dtype == torch.int8:
        return value.to(torch.int8), base
    steps = layouts.spread(layouts.scale_values(scale), lay, n, 0)
    if dtype != torch.float8_e4m3fn:
        return (value * layouts.spread(steps * second[:, None], Layout(kind, lay.group, 1), n, k)).to(dtype), base
    if scale.dtype == torch.float8_e4m3fn:
        base = torch.full((n,), 8.0)
    else:
        base = _largest(steps, value, lay.group) * (1.0 if not lay.group else 1 / 32 if kind == "int4" else 1 / 64)
    if up is not None:
        ratio = divide(up.to(torch.float32).abs().amax(1), 1.0) / (448.0 * (base * second))
        base = base * power(ceil_log2(ratio.clamp(min=1.0)))
    out = torch.zeros(n, width)
    out[:, :k] = value * layouts.spread(steps / base[:, None], Layout(kind, lay.group, 1), n, k)
    base = base * second
    if up is not None:
        out[:, k : k + 3 * up.shape[1]] = two_stages(up.to(torch.float32) / base[:, None], (0, 0, 1))
    return out.clamp(-448, 448).to(torch.float8_e4m3fn), base


def _largest(steps: Tensor, value: Tensor, group: int) -> Tensor:
    """Largest scale of each row among groups that hold anything: the scale of a group of zeros is 1.0 by convention."""
    if not group:
        return steps[:, 0]
    full = torch.nn.functional.pad(value, (0, steps.shape[1] * group - value.shape[1]))
    filled = (full.unflatten(1, (-1, group)) != 0).any(-1)
    largest = torch.where(filled, steps, 0.0).amax(1)
    return torch.where(largest > 1e-36, largest, 1.0)


def two_stages(x: Tensor, order: tuple[int, ...]) -> Tensor:
    """x [N, r] as E4M3 values and what they miss of x, in E4M3 too; these stages side by side in the given order."""
    first = x.clamp(-448, 448).to(torch.float8_e4m3fn).to(torch.float32)
    rest = (x - first).clamp(-448, 448).to(torch.float8_e4m3fn).to(torch.float32)
    return torch.cat([(first, rest)[i] for i in order], 1)


def _fake(codes, scale, unit, up, kind, group, rows, k, width, dtype) -> tuple[Tensor, Tensor]:
    return codes.new_empty(len(codes), width, dtype=dtype), codes.new_empty(len(codes), dtype=torch.float32)


_expand = define(
    "expand(Tensor codes, Tensor scale, Tensor? unit, Tensor? up, str kind, int group, int rows, int k, int width, "
    "ScalarType dtype) -> (Tensor, Tensor)",
    _launch, _fake, _reference,
)  # fmt: skip


def expand(
    weight: QTensor, dtype: torch.dtype, up: Tensor | None = None, width: int | None = None
) -> tuple[Tensor, Tensor]:
    """(w [N, width] in `dtype`, base float32 [N]); see the module for the values.

    Args:
        weight: one that `layout.why_not` accepts.
        dtype: float8_e4m3fn (from 4-bit codes), bfloat16, float16, or int8 (from INT4); base is unset but for E4M3.
        up: [N, r] low-rank factor whose 3r columns follow the K of the weight (E4M3 only).
        width: columns of the result, the last ones zero; default K, or K + 3r.
    """
    lay, k = layouts.layout_of(weight.spec), weight.shape[1]
    codes, scale, unit = layouts.parts(weight)
    width = width or k + (0 if up is None else 3 * up.shape[1])
    return _expand(codes, scale, unit, up, lay.kind, lay.group, lay.rows, k, width, dtype)
