"""The definition of the activation kernel in plain torch, float32; the formulas are in dq.kernels.activation.grids."""

from __future__ import annotations

import torch
from torch import Tensor

from dq.kernels.activation.grids import Grid
from dq.qtensor import Scales, choose_scale, effective_scale, encode
from dq.scales import ceil_log2, divide, power
from dq.spec import QuantSpec

_WHOLE = {"int8": 127.0, "int4": 7.0}


def two_stages(t: Tensor) -> Tensor:
    """[T1 | T2 | T1] of t [M, r]: its value in E4M3, and what that misses, to be rounded too."""
    first = _e4m3(t)
    return torch.cat([first, t - first, first], 1)


def _e4m3(x: Tensor) -> Tensor:
    return x.clamp(-448.0, 448.0).to(torch.float8_e4m3fn).to(torch.float32)


def _spread(scale: Tensor, spec: QuantSpec, width: int) -> Tensor:
    return scale.repeat_interleave(spec.columns, 1)[:, :width]


def _base(x: Tensor, scales: Scales, grid: Grid, spec: QuantSpec, beside: Tensor) -> tuple[Tensor, Tensor]:
    """(base, second level) of each row [M, 1]; raised by a power of two until `beside` fits."""
    second = torch.ones_like(beside)
    amax = x.abs().amax(1, keepdim=True)
    if grid.kind == "fp8":
        amax = torch.maximum(amax, beside)
        tiny = torch.finfo(torch.float32).tiny
        return torch.where(amax == 0, 1.0, divide(amax, 448.0).clamp(min=tiny)), second
    scale = effective_scale(scales, spec)
    if grid.kind in _WHOLE:
        base, second = second, scale
    elif grid.kind == "nvfp4":
        base, second = torch.full_like(amax, 8.0), scales.global_scale
    else:
        # Of the groups that are not zero (NaN is not): a zero one has any scale.
        filled = torch.nn.functional.pad(x, (0, -x.shape[1] % spec.columns)).unflatten(1, (-1, spec.columns))
        top = torch.where(filled.abs().amax(2) == 0, 0.0, scale).amax(1, keepdim=True)
        share = {"int4-group": 1 / 32, "mxfp4": 1 / 64, "mxfp8": 1.0}[grid.kind]
        base = torch.where(top == 0, 1.0, top * share)
    return base * power(ceil_log2((beside / (448.0 * (base * second))).clamp(min=1.0))) + beside * 0.0, second


def _values(x: Tensor, scales: Scales, grid: Grid, spec: QuantSpec, base: Tensor) -> tuple[Tensor, Tensor]:
    """(values over base, values that the grid means) of x [M, K]."""
    if grid.kind == "fp8":
        return x / base, x
    q = encode(x, scales, spec)
    codes = spec.fmt.unpack_values(q.codes, spec.padded_width(x.shape[1]))[:, : x.shape[1]]
    if grid.kind in _WHOLE:
        return codes / base, q.dequantize()
    steps = _spread(effective_scale(scales, spec) / base, spec, x.shape[1])
    return codes * steps, q.dequantize()


def activate_reference(
    x: Tensor, grid: Grid, spec: QuantSpec, target: str, residual: int, dual: bool, extra: Tensor | None, width: int
) -> tuple[Tensor, Tensor]:
    """(codes [M, width], factors) of a transformed x, float32 [M, K]; see `dq.kernels.activation.api.activate`."""
    scales = choose_scale(x, spec)
    if grid.kind == "fp8-group":
        codes = encode(x, scales, spec).codes[:, : x.shape[1]]
        return _padded(codes, width), scales.scale
    if grid.kind == "int4-group" and target == "int8":
        codes = spec.fmt.unpack_values(encode(x, scales, spec).codes, x.shape[1]).to(torch.int8)
        return _padded(codes, width), scales.scale.to(torch.float32)
    beside = x.new_zeros(len(x), 1) if extra is None else extra.to(torch.float32).abs().amax(1, keepdim=True)
    base, second = _base(x, scales, grid, spec, beside)
    value, meant = _values(x, scales, grid, spec, base)
    parts = [value]
    if residual:
        tail = slice(x.shape[1] - residual, None)
        if grid.kind == "fp8":
            rest = value[:, tail] - _e4m3(value[:, tail])
        else:
            rest = x[:, tail] - meant[:, tail]
            rest = _values(rest, _under(rest, spec, x), grid, spec, base)[0]
        parts += [rest] + [value[:, tail]] * dual
    factor = base * second
    if extra is not None:
        parts.append(two_stages(extra.to(torch.float32) / factor))
    out = torch.cat(parts, 1)
    out = torch.nn.functional.pad(out, (0, width - out.shape[1]))
    return (out.to(torch.int8) if target == "int8" else out.clamp(-448.0, 448.0).to(torch.float8_e4m3fn)), factor


def _padded(codes: Tensor, width: int) -> Tensor:
    return torch.nn.functional.pad(codes.view(torch.uint8), (0, width - codes.shape[1])).view(codes.dtype)


def _under(rest: Tensor, spec: QuantSpec, whole: Tensor) -> Scales:
    """E4M3 block scales of rest [M, S] under the second level of the rows `whole` [M, K]."""
    scales = choose_scale(rest, spec, whole.abs().amax(1))
    filled = rest.unflatten(1, (-1, spec.columns)).abs().amax(2) > 0
    return scales._replace(scale=torch.where(filled, scales.scale.to(torch.float32), 2.0**-9).to(torch.float8_e4m3fn))


def packed_reference(
    x: Tensor, spec: QuantSpec, residual: int, dual: bool, width: int
) -> tuple[Tensor, Tensor, Tensor]:
    """(bytes [M, width], factors [M, 1], block scales uint8 [M, groups]); see `dq.kernels.activation.api.pack`."""
    scales = choose_scale(x, spec)
    q = encode(x, scales, spec)
    used = -(-x.shape[1] // 2)
    parts, blocks = [q.codes[:, :used]], [scales.scale]
    if residual:
        rest = (x - q.dequantize())[:, -residual:]
        own = _under(rest, spec, x)
        parts += [encode(rest, own, spec).codes] + [parts[0][:, -residual // 2 :]] * dual
        blocks += [own.scale] + [scales.scale[:, -residual // spec.columns :]] * dual
    codes = _padded(torch.cat(parts, 1), width)
    if not spec.columns:
        return codes, scales.scale, x.new_empty(len(x), 0, dtype=torch.uint8)
    second = x.new_ones(len(x), 1) if scales.global_scale is None else scales.global_scale
    return codes, second, torch.cat(blocks, 1).view(torch.uint8)
