"""The input of a quantized linear as its GEMM takes it: transformed, scaled per row, rounded.

`activate` hands over to the fused kernel of dq.kernels.activation where that covers the case, else to plain torch.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from dq.columns import join_columns, take_columns
from dq.kernels.activation import api
from dq.kernels.gemm.expand import two_stages
from dq.ops import LinearParams
from dq.qtensor import choose_scale, effective_scale, encode
from dq.scales import amax as block_amax
from dq.scales import ceil_log2, divide, power
from dq.spec import QuantSpec
from dq.transforms import Step, apply_steps

FP8 = QuantSpec("fp8_e4m3", "token", dynamic=True)
INT8 = QuantSpec("int8", "token", dynamic=True)
_FUSED = (FP8, INT8)  # one maximum for a row, one rounding, nothing packed
_TINY = torch.finfo(torch.float32).tiny
_ELEMENTWISE = frozenset({"smooth", "shift"})
# Columns up to which a compiler's reduction pays. On an H200 inductor's kernel for LayerNorm, modulation and FP8 of
# 4608 x 3072 takes 57 us, about 12 less than two kernels; of GELU and FP8 at K = 15360, where it passes over the row
# twice and computes GELU anew, 276 us against about 169.
_WIDEST = 4096


def prepared(
    x: Tensor, params: LinearParams, grid: QuantSpec, target: str, extra: Tensor | None = None, width: int | None = None
) -> tuple[Tensor, Tensor]:
    """`activate` for a layer's x [M, K]; once for layers that get the same x and make the same of it."""
    job = (x, params.steps, grid, target, params.residual, params.dual, extra, width, params.fuse)
    return activate(*job) if extra is not None else _once(params, (grid, target, width), lambda: activate(*job))


def _once(params: LinearParams, key: tuple, make: Callable[[], Any]) -> Any:
    """What `make` gives, kept for other layers that get the same x, and make the same of it by the same steps."""
    if params.shared is None:
        return make()
    steps = tuple((s.name, str(s.params), *map(id, s.tensors.values())) for s in params.steps)
    key = (steps, *key, params.residual, params.dual)
    found = params.shared.get(key)
    if found is None:  # with the steps: as long as they live, no other tensor has the identity of one of theirs
        found = params.shared[key] = make(), params.steps
    return found[0]


def activate(
    x: Tensor,
    steps: list[Step],
    grid: QuantSpec,
    target: str,
    residual: int = 0,
    dual: bool = False,
    extra: Tensor | None = None,
    width: int | None = None,
    fuse: bool = False,
) -> tuple[Tensor, Tensor]:
    """(codes [M, width], scale float32 [M, 1]; [M, G] of INT4 and FP8 in groups) of `pre(x)` for x [M, K].

    Args:
        steps: input steps, applied in float32.
        fuse: the call is being compiled: plain operators where the compiler makes one kernel of them and what stands
            before them (a norm with its modulation, an activation function).
        grid: activation grid.
        target: `e4m3`: values in E4M3, of 4-bit grids `element * block scale` rounded to it; `int8`: integer codes.
        residual, dual: S columns Q(x'_o - q_o) for the last S ones o, and q_o again, behind the K of x.
        extra: low-rank input t [M, r], appended as [T1 | T2 | T1] (see dq.kernels.gemm.expand), `e4m3` only.
        width: columns of the result, the last ones zero.
    """
    plain = fuse and grid in _FUSED and x.shape[1] <= _WIDEST and not residual and extra is None
    if plain and _ELEMENTWISE.issuperset(s.name for s in steps):
        return by_torch(x, steps, grid, target, width=width)
    if not api.why_not(steps, grid, target, x.shape[1], residual):
        have = x.shape[1] + residual * (1 + dual) + (0 if extra is None else 3 * extra.shape[1])
        return api.unchecked(x, steps, grid, target, residual, dual, extra, width or have)[:2]
    return by_torch(x, steps, grid, target, residual, dual, extra, width)


def in_torch(params: LinearParams, grid: QuantSpec, target: str) -> str:
    """Why `activate` takes plain torch for a layer's input, "" if the kernel makes it."""
    if params.input_scale is not None:
        return "static activations"
    return api.why_not(params.steps, grid, target, params.width, params.residual)


def by_torch(
    x: Tensor,
    steps: list[Step],
    grid: QuantSpec,
    target: str,
    residual: int = 0,
    dual: bool = False,
    extra: Tensor | None = None,
    width: int | None = None,
) -> tuple[Tensor, Tensor]:
    """`activate` without a kernel."""
    x32 = apply_steps(x.to(torch.float32), steps)
    if grid == INT8:
        value, scale = _token(x32, None, 127.0)
        return torch.round(value).clamp(-127.0, 127.0).to(torch.int8), scale
    if target == "int8" or (grid.format == "fp8_e4m3" and grid.scale_format == "fp32" and grid.group_size):
        q = encode(x32, choose_scale(x32, grid), grid)
        codes = grid.fmt.unpack_values(q.codes, grid.padded_width(x.shape[1])) if target == "int8" else q.codes
        codes = codes.to(torch.int8) if target == "int8" else codes
        return codes[:, : x.shape[1]], q.scale.to(torch.float32)
    value, scale = _token(x32, extra) if grid == FP8 else _executed(x32, grid, extra)
    parts = [value]
    if residual:
        first = value[:, -residual:].to(torch.float8_e4m3fn).to(torch.float32)
        parts += [value[:, -residual:] - first] + [first] * dual
    if extra is not None:
        parts.append(two_stages(extra.to(torch.float32) / scale, (0, 1, 0)))
    have = sum(p.shape[1] for p in parts)
    if width is not None and width > have:
        parts.append(x32.new_zeros(x.shape[0], width - have))
    joined = torch.cat(parts, 1) if len(parts) > 1 else value
    return joined.clamp(-448.0, 448.0).to(torch.float8_e4m3fn), scale


def _token(x: Tensor, extra: Tensor | None, top: float = 448.0) -> tuple[Tensor, Tensor]:
    """(x / scale, scale) with one scale per token, which covers the low-rank input too."""
    amax = x.abs().amax(1, keepdim=True)
    if extra is not None:
        amax = torch.maximum(amax, extra.to(torch.float32).abs().amax(1, keepdim=True))
    scale = torch.where(amax == 0, 1.0, divide(amax, top).clamp(min=_TINY))
    return x / scale, scale


def _executed(x: Tensor, grid: QuantSpec, extra: Tensor | None) -> tuple[Tensor, Tensor]:
    """A 4-bit grid as FP8 tensor cores multiply it: (values to be rounded to E4M3, factor of each row)."""
    scales = choose_scale(x, grid)
    block = effective_scale(scales, grid)
    if grid.scale_format == "fp8_e4m3":
        row, factor = torch.full_like(block[:, :1], 8.0), scales.global_scale
    elif block.shape[1] == 1:
        row, factor = block, None
    else:
        row, factor = block.amax(1, keepdim=True) * (1 / 64 if grid.scale_format == "e8m0" else 1 / 32), None
    if extra is not None:
        whole = row if factor is None else row * factor
        ratio = extra.to(torch.float32).abs().amax(1, keepdim=True) / (448.0 * whole)
        row = row * power(ceil_log2(ratio.clamp(min=1.0))) + ratio * 0.0
    codes = grid.fmt.unpack_values(encode(x, scales, grid).codes, grid.padded_width(x.shape[1]))
    steps = (block / row).repeat_interleave(grid.columns or x.shape[1], 1)[:, : x.shape[1]]
    return codes[:, : x.shape[1]] * steps, row if factor is None else row * factor


def packed(x: Tensor, params: LinearParams) -> tuple[Tensor, Tensor, Tensor | None]:
    """`pack` for a layer's x [M, K]; once for layers that get the same x and make the same of it."""
    job = (x, params.steps, params.activations, params.residual, params.dual)
    return _once(params, (params.activations, "packed"), lambda: pack(*job))


def pack(
    x: Tensor, steps: list[Step], grid: QuantSpec, residual: int = 0, dual: bool = False
) -> tuple[Tensor, Tensor, Tensor | None]:
    """(codes, block scales [M, G], second level float32 [M] or None) of `pre(x)`, for block-scaled products.

    Codes and scales are those of whole groups: zeros fill the last one. Residual columns as of `dq.ops`: the codes of
    `x'_o - Q(x')_o` behind those of x', and with `dual` those of x'_o again.
    """
    k = x.shape[1]
    if grid.fmt.bits == 4 and not api.why_not(steps, grid, "packed", k, residual):
        width = grid.fmt.packed_width(grid.padded_width(k) + residual * (1 + dual))
        codes, row, scale = api.unchecked(x, steps, grid, "packed", residual, dual, None, width)
        two = grid.global_scale is not None
        return codes, scale.view(grid.scale_dtype), row.reshape(-1) if two else None
    x32 = apply_steps(x.to(torch.float32), steps)
    q = encode(x32, choose_scale(x32, grid), grid)
    if residual:
        rest = (x32 - q.dequantize())[:, -residual:]
        scales = choose_scale(rest, grid, block_amax(x32) if grid.global_scale == "token" else None)
        q = join_columns([q, encode(rest, scales, grid)] + [take_columns(q, k - residual)] * dual)
    return q.codes, q.scale, None if q.global_scale is None else q.global_scale.reshape(-1)
