"""`QTensor`: codes and scales of one quantized 2-D tensor, in a kernel-independent layout that is saved as it is.

Source for NVFP4's two levels: `global = amax/(6*448)`, `block = E4M3(clamp(amax_b/6/global, 2^-9, 448))`,
`x ~ e2m1 * block * global` (NVIDIA's multiplier convention; compressed-tensors stores 1/global).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from dq.granularity import from_blocks, pieces, to_blocks
from dq.profiles import find_profile
from dq.registry import DQError
from dq.scales import RANGE, Blocks, divide, find_rule, storable
from dq.scales import amax as block_amax
from dq.spec import DOUBLE_BLOCK, QuantSpec

_TINY = torch.finfo(torch.float32).tiny


class Scales(NamedTuple):
    """Stored scales: [R, G] in `spec.scale_dtype`; second level (`spec.global_shape`) and uint8 zero points or None."""

    scale: Tensor
    global_scale: Tensor | None = None
    zero_point: Tensor | None = None


@dataclass
class QTensor:
    """A tensor [rows, K] as codes and scales: `x ~ (decode(codes) - zero_point) * scale * global_scale`.

    Attributes:
        codes: [rows, packed K], dtype `spec.fmt.storage`. K is padded with zeros to whole groups and bytes.
        scale: `spec.scale_shape(rows, K)` in `spec.scale_dtype`.
        global_scale: None, or float32 of `spec.global_shape(rows, K)`.
        spec: how to read them.
        shape: (rows, K), without padding.
        zero_point: None, or uint8 of the shape of `scale`.
    """

    codes: Tensor
    scale: Tensor
    global_scale: Tensor | None
    spec: QuantSpec
    shape: tuple[int, int]
    zero_point: Tensor | None = None

    @property
    def scales(self) -> Scales:
        return Scales(self.scale, self.global_scale, self.zero_point)

    def dequantize(self, dtype: torch.dtype = torch.float32) -> Tensor:
        """[rows, K] in `dtype`, computed in float32."""
        rows, width = self.shape
        values = self.spec.fmt.unpack_values(self.codes, self.spec.padded_width(width))
        if self.spec.fmt.identity:
            return values[:, :width].to(dtype)
        out = []
        for r, c, i, j in pieces(self.spec, rows, width):
            part = values[r] if not self.spec.k_segments else values[r, c]
            if self.spec.strategy == "tensor" or not self.spec.columns:
                part = part[:, :width]
            blocks = to_blocks(part, self.spec)
            if self.zero_point is not None:
                blocks = blocks - self.zero_point[i, j].to(torch.float32)[..., None]
            blocks = blocks * _step(self.scales, self.spec, r, i, j, (rows, width))[..., None]
            out.append((r, from_blocks(blocks, self.spec, part.shape[0], part.shape[1])))
        return _join(out, self.spec)[:, :width].to(dtype)

    @property
    def nbytes(self) -> int:
        parts = (self.codes, self.scale, self.global_scale, self.zero_point)
        return sum(t.numel() * t.element_size() for t in parts if t is not None)


def _join(parts: list[tuple[slice, Tensor]], spec: QuantSpec) -> Tensor:
    """Pieces in row-major order -> one tensor."""
    if len(parts) == 1:
        return parts[0][1]
    wide = len(spec.k_segments) if spec.k_segments else 1
    rows = [torch.cat([t for _, t in parts[i : i + wide]], 1) for i in range(0, len(parts), wide)]
    return torch.cat(rows)


def effective_scale(scales: Scales, spec: QuantSpec) -> Tensor:
    """[R, G] float32 scales without the second level, whatever they are stored as."""
    if spec.scale_format == "e8m0":
        return torch.ldexp(torch.ones_like(scales.scale, dtype=torch.float32), scales.scale.to(torch.int32) - 127)
    if spec.scale_format == "int8_double":
        second, mean = scales.global_scale[:-1], scales.global_scale[-1]
        flat = scales.scale.to(torch.float32).flatten()
        return (flat * second.repeat_interleave(DOUBLE_BLOCK)[: len(flat)] + mean).reshape(scales.scale.shape)
    return scales.scale.to(torch.float32)


def _step(scales: Scales, spec: QuantSpec, r: slice, i: slice, j: slice, shape: tuple[int, int]) -> Tensor:
    """What one code step is worth in one piece, float32 [R, G]."""
    step = effective_scale(scales, spec)[i, j]
    unit = _unit(scales.global_scale, spec, r, shape)
    return step if unit is None else step * unit


def _unit(global_scale: Tensor | None, spec: QuantSpec, r: slice, shape: tuple[int, int]) -> Tensor | None:
    """The second level of one piece, broadcastable to [R, G]."""
    if global_scale is None or spec.scale_format == "int8_double":
        return None
    if spec.global_scale == "token":
        return global_scale[r]
    if not spec.row_segments:
        return global_scale
    edges = [0]
    for n in spec.row_segments:
        edges.append(edges[-1] + n)
    return global_scale[edges.index(r.start)]


def check_finite(x: Tensor, what: str) -> None:
    """Raises DQError naming `what` if `x` holds NaN or Inf."""
    if x.numel() and not torch.isfinite(x).all():
        bad = x.numel() - int(torch.isfinite(x).sum())
        raise DQError(f"{what} holds {bad} NaN or Inf values; fix the source, nothing was quantized from it")


def choose_scale(
    x: Tensor,
    spec: QuantSpec,
    amax: Tensor | None = None,
    *,
    importance: Tensor | None = None,
    hessian: Tensor | None = None,
) -> Scales:
    """Scales of a float32 tensor [rows, K] by the spec's rule.

    Args:
        amax: for `global_scale="tensor"`, the largest |x| that the second level must cover (float32 scalar), e.g. the
            maximum over q, k and v so that they share it; default: this tensor's own.
        importance: float32 [K], E[x_k^2] of the input, for the weighted rules.
        hessian: float32 [K, K], E[x x^T] of the input, for `local_hessian`.
    """
    if spec.fmt.identity:
        return Scales(x.new_zeros(spec.scale_shape(*x.shape)))
    rule = find_rule(spec)
    grid: list[tuple[slice, Tensor]] = []
    zeros: list[tuple[slice, Tensor]] = []
    units = []
    for r, c, _, _ in pieces(spec, *x.shape):
        part = x[r, c]
        unit = _second_level(part, spec, rule.ceiling, amax)
        blocks = Blocks(to_blocks(part, spec), spec, part.new_ones(1) if unit is None else unit)
        blocks = _with_statistics(blocks, part.shape, importance, hessian, c)
        scale, zero = _piece_scale(blocks, rule)
        grid.append((r, scale))
        zeros.append((r, zero))
        units.append(unit)
    scale = _join(grid, spec)
    zero_point = _join(zeros, spec).to(torch.uint8) if spec.has_zero_point else None
    return _stored(scale, _joined_units(units, spec), zero_point, spec)


def _second_level(part: Tensor, spec: QuantSpec, ceiling: float | None, amax: Tensor | None) -> Tensor | None:
    """`amax / (format.max * ceiling)`: [rows, 1] per token, [1] per tensor."""
    if spec.global_scale is None:
        return None
    if spec.global_scale == "token":
        whole = block_amax(part)[:, None]
    else:
        whole = (block_amax(part.reshape(1, -1)) if amax is None else amax).to(part).reshape(1)
    top = spec.fmt.max * (ceiling or RANGE[spec.scale_format][1])
    return torch.where(whole > 0, divide(whole, top).clamp(min=_TINY), 1.0)


def _joined_units(units: list[Tensor | None], spec: QuantSpec) -> Tensor | None:
    if units[0] is None:
        return None
    if spec.global_scale == "token":
        return torch.cat(units) if spec.row_segments else units[0]
    return torch.stack(units) if spec.row_segments else units[0]


def _with_statistics(blocks: Blocks, shape, importance: Tensor | None, hessian: Tensor | None, c: slice) -> Blocks:
    """Importances [K] and Hessian [K, K] in the view of the blocks."""
    spec = blocks.spec
    if importance is not None:
        rows = 1 if spec.strategy in ("channel", "token", "group") else shape[0]
        view = to_blocks(importance[c].to(blocks.x).expand(rows, -1), spec)
        blocks = Blocks(blocks.x, spec, blocks.unit, view, None)
    if hessian is not None:
        if not spec.group_size or hessian.shape[0] % spec.group_size:
            raise DQError("a local Hessian needs groups that divide K")
        g = spec.group_size
        tiles = hessian.to(blocks.x).reshape(-1, g, hessian.shape[0] // g, g)
        blocks = Blocks(blocks.x, spec, blocks.unit, blocks.importance, tiles.diagonal(dim1=0, dim2=2).permute(2, 0, 1))
    return blocks


def _piece_scale(blocks: Blocks, rule) -> tuple[Tensor, Tensor]:
    """Scale and zero point of every block; blocks of zeros get the profile's choice."""
    spec, profile = blocks.spec, find_profile(blocks.spec.profile)
    if spec.has_zero_point:
        return _asymmetric(blocks, rule)
    scale = rule.choose(blocks, **dict(spec.rule_params))
    low = profile.low.get(spec.scale_format, 0.0)
    zero = max(profile.zero.get(spec.scale_format, 1.0), low)
    return torch.where(block_amax(blocks.x) > 0, scale.clamp(min=low), zero), scale


def _asymmetric(blocks: Blocks, rule) -> tuple[Tensor, Tensor]:
    """`s = (max - min) / n`, `z = clip(rne(-min / s), 0, n)`, the range widened to contain 0.

    Raises:
        DQError: a rule other than absmax (here: min and max), or a second level.
    """
    spec = blocks.spec
    if rule.name != "absmax" or spec.global_scale:
        raise DQError(f"asymmetric {spec.format} takes the rule absmax (min and max) and one level of scales")
    x = blocks.x
    low = x.amin(-1).clamp(max=0.0) if x.shape[-1] else x.new_zeros(x.shape[:-1])
    high = x.amax(-1).clamp(min=0.0) if x.shape[-1] else low
    scale = torch.where(high > low, storable(divide(high - low, spec.fmt.max), spec), 1.0)
    return scale, torch.round(-low / scale).clamp(0.0, spec.fmt.max)


def _stored(scale: Tensor, unit: Tensor | None, zero_point: Tensor | None, spec: QuantSpec) -> Scales:
    """Float32 scales in their storage format."""
    if spec.scale_format == "e8m0":
        exponent = torch.frexp(scale).exponent - 1
        return Scales((exponent + 127).clamp(0, 254).to(torch.uint8), unit, zero_point)
    if spec.scale_format == "int8_double":
        return Scales(*_double_quantized(scale), zero_point)
    return Scales(scale.to(spec.scale_dtype), unit, zero_point)


def _double_quantized(scale: Tensor) -> tuple[Tensor, Tensor]:
    """INT8 codes of `scale - mean` in blocks of 256, and [absmax / 127 of every block ..., mean]. Source: QLoRA."""
    mean = scale.mean() if scale.numel() else scale.new_zeros(())
    flat = torch.nn.functional.pad((scale - mean).flatten(), (0, -scale.numel() % DOUBLE_BLOCK))
    blocks = flat.reshape(-1, DOUBLE_BLOCK)
    second = divide(block_amax(blocks), 127.0).clamp(min=_TINY)
    codes = torch.round(blocks / second[:, None]).clamp(-127, 127).to(torch.int8)
    return codes.flatten()[: scale.numel()].reshape(scale.shape), torch.cat([second, mean.reshape(1)])


def quantize(
    x: Tensor,
    spec: QuantSpec,
    *,
    amax: Tensor | None = None,
    importance: Tensor | None = None,
    hessian: Tensor | None = None,
    name: str = "tensor",
) -> QTensor:
    """Rounds [rows, K] to the nearest codes (half to even) at the scales of the spec's rule, in float32.

    `q = clip(rne(x / (scale * global_scale)) + zero_point)`, division by the stored (rounded) scale. The keyword
    arguments are those of `choose_scale`.

    Raises:
        DQError: not 2-D, or NaN/Inf in `x` (the message names `name`).
    """
    if x.dim() != 2:
        raise DQError(f"{name} must be 2-D to be quantized, got shape {tuple(x.shape)}")
    check_finite(x, name)
    work = x.detach().to(torch.float32)
    scales = choose_scale(work, spec, amax, importance=importance, hessian=hessian)
    return encode(work, scales, spec)


def _scaled(x: Tensor, step: Tensor, spec: QuantSpec) -> Tensor:
    return x * (1.0 / step) if find_profile(spec.profile).reciprocal else x / step


def encode(x: Tensor, scales: Scales, spec: QuantSpec) -> QTensor:
    """Codes of a float32 tensor [rows, K] at given scales."""
    out = []
    for r, c, i, j in pieces(spec, *x.shape):
        blocks = to_blocks(x[r, c], spec)
        if spec.fmt.identity:
            codes = spec.fmt.encode(blocks)
        else:
            scaled = _scaled(blocks, _step(scales, spec, r, i, j, x.shape)[..., None], spec)
            if scales.zero_point is not None:
                scaled = torch.round(scaled) + scales.zero_point[i, j].to(torch.float32)[..., None]
            codes = spec.fmt.encode(scaled)
        out.append((r, from_blocks(codes, spec, x[r, c].shape[0], x[r, c].shape[1])))
    codes = _join(out, spec)
    padding = spec.padded_width(x.shape[1]) - codes.shape[1]
    if padding:
        codes = torch.nn.functional.pad(codes.view(torch.uint8), (0, padding)).view(codes.dtype)
    packed = spec.fmt.pack(codes).contiguous()
    return QTensor(packed, scales.scale, scales.global_scale, spec, tuple(x.shape), scales.zero_point)


def fake_quantize(x: Tensor, spec: QuantSpec) -> Tensor:
    """Quantize and dequantize along the last axis, any leading shape; float32 out. NaN propagates.

    Scales are per row (or per group of a row), so one sample never depends on another in its batch.
    """
    work = x.to(torch.float32).reshape(-1, x.shape[-1])
    if spec.has_zero_point or spec.k_segments or spec.row_segments or spec.fmt.identity:
        return encode(work, choose_scale(work, spec), spec).dequantize().reshape(x.shape)
    scales = choose_scale(work, spec)
    whole = slice(0, None)
    step = _step(scales, spec, slice(0, len(work)), whole, whole, work.shape)[..., None]
    blocks = to_blocks(work, spec)
    out = from_blocks(spec.fmt.round(_scaled(blocks, step, spec)) * step, spec, *work.shape)
    return out[:, : x.shape[-1]].reshape(x.shape)
