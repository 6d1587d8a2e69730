"""`QTensor`: codes and scales of one quantized 2-D tensor, in a kernel-independent layout that is saved as it is.

Source for NVFP4's two levels: `global = amax/(6*448)`, `block = E4M3(clamp(amax_b/6/global, 2^-9, 448))`,
`x ~ e2m1 * block * global` (NVIDIA's multiplier convention; compressed-tensors stores 1/global).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from torch import Tensor

from dq.granularity import from_blocks, pieces, to_blocks
from dq.profiles import convention
from dq.registry import DQError, Registry
from dq.scales import RANGE, Blocks, asymmetric, divide, find_rule, rounded, step_of, storable
from dq.scales import amax as block_amax
from dq.spec import DOUBLE_BLOCK, QuantSpec

_TINY = torch.finfo(torch.float32).tiny
FIT_ROWS = 64  # rows on which second levels are compared


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
        global_scale: None, or float32 of `spec.global_shape(rows, K)`; the inverse where the profile stores that.
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
            # Bytes may hold more than whole groups, and rows without groups more than the row.
            part = part[:, : self.spec.groups(width) * self.spec.columns if self.spec.columns else width]
            blocks = to_blocks(part, self.spec)
            if self.zero_point is not None:
                blocks = blocks - self.zero_point[i, j].to(torch.float32)[..., None]
            # In place, for nobody else has these values: fresh memory would take longer than the product.
            blocks = blocks.mul_(_step(self.scales, self.spec, r, i, j, (rows, width))[..., None])
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
        power = torch.ldexp(torch.ones_like(scales.scale, dtype=torch.float32), scales.scale.to(torch.int32) - 127)
        return power.masked_fill(scales.scale == 255, torch.nan)
    if spec.scale_format == "int8_double":
        second, mean = scales.global_scale[:-1], scales.global_scale[-1]
        flat = scales.scale.to(torch.float32).flatten()
        return (flat * second.repeat_interleave(DOUBLE_BLOCK)[: len(flat)] + mean).reshape(scales.scale.shape)
    return scales.scale.to(torch.float32)


def _step(scales: Scales, spec: QuantSpec, r: slice, i: slice, j: slice, shape: tuple[int, int]) -> Tensor:
    """What one code step is worth in one piece, float32 [R, G]."""
    return step_of(effective_scale(scales, spec)[i, j], _unit(scales.global_scale, spec, r, shape), spec)


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
    """Scales of a float tensor [rows, K] by the spec's rule.

    Args:
        x: computed with in float32, unless the spec's profile computes in the dtype of the tensor.
        amax: the largest |x| that the second level must cover: a float32 scalar for `global_scale="tensor"`, e.g. the
            maximum over q, k and v so that they share it; [rows] per token. Without a second level, what the one scale
            of the strategy `tensor` covers under the rule `absmax`. Default: this tensor's own.
        importance: float32 [K], E[x_k^2] of the input, for the weighted rules.
        hessian: float32 [K, K], E[x x^T] of the input, for `local_hessian`.
    """
    if spec.fmt.identity:
        return Scales(x.new_zeros(spec.scale_shape(*x.shape), dtype=spec.scale_dtype))
    rule, dtype, x = find_rule(spec), _dtype(x, spec), x.to(torch.float32)
    grid: list[tuple[slice, Tensor]] = []
    zeros: list[tuple[slice, Tensor]] = []
    units = []
    for r, c, _, _ in pieces(spec, *x.shape):
        part = x[r, c]
        unit = _second_level(part, spec, rule.ceiling, amax, dtype)
        blocks = Blocks(to_blocks(part, spec), spec, part.new_ones(1) if unit is None else unit, dtype=dtype)
        blocks = _with_statistics(blocks, part.shape, importance, hessian, c)
        scale, zero = _piece_scale(blocks, rule)
        if amax is not None and spec.strategy == "tensor" and unit is None and rule.name == "absmax":
            scale = torch.maximum(scale, storable(divide(amax.to(scale), spec.fmt.divisor), spec))
        grid.append((r, scale))
        zeros.append((r, zero))
        units.append(unit)
    scale = _join(grid, spec)
    zero_point = _join(zeros, spec).to(torch.uint8) if spec.has_zero_point else None
    return _stored(scale, _joined_units(units, spec), zero_point, spec)


def _dtype(x: Tensor, spec: QuantSpec) -> torch.dtype:
    """The dtype that scales are computed in."""
    return x.dtype if convention(spec).native else torch.float32


def _second_level(
    part: Tensor, spec: QuantSpec, ceiling: float | None, amax: Tensor | None, dtype: torch.dtype
) -> Tensor | None:
    """`amax / (format.max * ceiling)`, or its inverse where the profile says so: [rows, 1] per token, [1] a tensor."""
    if spec.global_scale is None:
        return None
    if spec.global_scale == "token":
        whole = (block_amax(part) if amax is None else amax.to(part))[:, None]
    else:
        whole = (block_amax(part.reshape(1, -1)) if amax is None else amax).to(part).reshape(1)
    top = spec.fmt.max * (ceiling or RANGE[spec.scale_format][1])
    if convention(spec).levels == "inverse":
        # As torch divides a number by a tensor: through the reciprocal.
        unit = rounded(rounded(1.0 / whole.clamp(min=_TINY), dtype) * top, dtype)
        return torch.where(torch.isfinite(unit), unit, 1.0)  # where it overflows, also for a tensor of zeros
    return torch.where(whole == 0, 1.0, divide(whole, top).clamp(min=_TINY))


def executed_amax(parts: Sequence[Tensor], spec: QuantSpec) -> Tensor | None:
    """What the second level covers where scales are chosen for execution in E4M3 (`sweep`, target e4m3); else None.

    Which products are exact there depends on the mantissas of the block scales, so on the second level above them: of
    `amax * 2^(j/8)`, j = 0..7, the one of least error on up to 64 rows of every part (about 0.3 % less on Gaussian
    data, 2 % with column outliers).

    Args:
        parts: tensors [rows, K] that share the second level: one weight, or fused ones.
    """
    params, rule, parts = dict(spec.rule_params), find_rule(spec), [p.detach() for p in parts if p.numel()]
    wanted = params.get("target") == "e4m3" and spec.global_scale == "tensor" and not rule.needs
    if not wanted or spec.row_segments or not parts:
        return None
    whole = torch.cat([block_amax(p.reshape(1, -1)) for p in parts]).amax(0, keepdim=True).to(torch.float32)
    rows = torch.cat([p[:: max(1, len(p) // FIT_ROWS)][:FIT_ROWS] for p in parts]).to(torch.float32)
    rows = to_blocks(rows, spec)
    tops, errors = [whole * 2.0 ** (j / 8) for j in range(8)], []
    for top in tops:
        blocks = Blocks(rows, spec, _second_level(rows, spec, rule.ceiling, top, torch.float32))
        errors.append(blocks.error(rule.choose(blocks, **params), target="e4m3").sum(dtype=torch.float64))
    return torch.cat(tops)[torch.stack(errors).argmin()]


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
        blocks = replace(blocks, importance=view)
    if hessian is not None:
        if not spec.group_size:
            raise DQError("a local Hessian needs groups")
        g, missing = spec.group_size, -hessian.shape[0] % spec.group_size  # a last, shorter group is padded with zeros
        hessian = torch.nn.functional.pad(hessian, (0, missing, 0, missing))
        tiles = hessian.to(blocks.x).reshape(-1, g, hessian.shape[0] // g, g)
        blocks = replace(blocks, hessian=tiles.diagonal(dim1=0, dim2=2).permute(2, 0, 1))
    return blocks


def _piece_scale(blocks: Blocks, rule) -> tuple[Tensor, Tensor]:
    """Scale and zero point of every block: for zeros the profile's choice, for NaN and Inf, which codes hide, NaN."""
    top, asym = block_amax(blocks.x), blocks.spec.has_zero_point
    scale, zero = asymmetric(blocks, rule) if asym else (rule.choose(blocks, **dict(blocks.spec.rule_params)), top)
    scale = scale if asym else torch.where((top > 0) & (scale > 0), scale, convention(blocks.spec).zero)
    return torch.where(torch.isfinite(top), scale, torch.nan), zero


def _stored(scale: Tensor, unit: Tensor | None, zero_point: Tensor | None, spec: QuantSpec) -> Scales:
    """Float32 scales in their storage format."""
    if spec.scale_format == "e8m0":
        code = (torch.frexp(scale).exponent + 126).clamp(0, 254)
        return Scales(code.masked_fill(scale.isnan(), 255).to(torch.uint8), unit, zero_point)
    if spec.scale_format == "int8_double":
        return Scales(*_double_quantized(scale), zero_point)
    return Scales(scale.to(spec.scale_dtype), unit, zero_point)


def _double_quantized(scale: Tensor) -> tuple[Tensor, Tensor]:
    """INT8 codes of `scale - mean` in blocks of 256, and [absmax / 127 of every block ..., mean]. Source: QLoRA.

    A code whose scale would come out at 0 or below is raised by one: a scale is always positive.
    """
    mean = scale.mean() if scale.numel() else scale.new_zeros(())
    flat = torch.nn.functional.pad((scale - mean).flatten(), (0, -scale.numel() % DOUBLE_BLOCK))
    blocks = flat.reshape(-1, DOUBLE_BLOCK)
    second = divide(block_amax(blocks), 127.0).clamp(min=_TINY)
    codes = torch.round(blocks / second[:, None]).clamp(-127, 127)
    codes = torch.where(codes * second[:, None] + mean > 0, codes, codes + 1).to(torch.int8)
    return codes.flatten()[: scale.numel()].reshape(scale.shape), torch.cat([second, mean.reshape(1)])


@dataclass(frozen=True)
class Accelerator:
    """A kernel that quantizes without importances, bit for bit like `quantize`; registered by dq.kernels.quantize.

    Attributes:
        refuse: `(x, spec) -> reason`, "" if it can.
        run: `(x, spec, amax, name) -> QTensor`; raises DQError as `quantize` does.
    """

    name: str
    refuse: Callable[[Tensor, QuantSpec], str]
    run: Callable[[Tensor, QuantSpec, Tensor | None, str], QTensor]


ACCELERATORS: Registry[Accelerator] = Registry("accelerator", "dq.kernels.quantize")


@dataclass(frozen=True)
class RowKernel:
    """A kernel for `fake_quantize`, with its bits: `(x [rows, K], spec) -> reason` why not, and what runs."""

    name: str
    refuse: Callable[[Tensor, QuantSpec], str]
    run: Callable[[Tensor, QuantSpec, Tensor | None], Tensor]


ROW_KERNELS: Registry[RowKernel] = Registry("row kernel", "dq.kernels.quantize")


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
    amax = executed_amax([x], spec) if amax is None else amax
    if x.is_cuda and importance is None and hessian is None:
        for kernel in ACCELERATORS:
            if not kernel.refuse(x, spec):
                return kernel.run(x, spec, amax, name)
    check_finite(x, name)
    scales = choose_scale(x.detach(), spec, amax, importance=importance, hessian=hessian)
    return encode(x.detach(), scales, spec)


def _scaled(x: Tensor, scale: Tensor, unit: Tensor | None, spec: QuantSpec, dtype: torch.dtype) -> Tensor:
    """Elements [R, G, E] in code steps, by the profile's operations; `scale` [R, G], second level `unit` or None."""
    rules = convention(spec)
    wide = unit is not None or spec.scale_format not in ("bf16", "fp16") or not rules.native
    dtype = torch.float32 if wide else torch.promote_types(dtype, spec.scale_dtype)
    if rules.reciprocal:
        factor = 1.0 / scale if unit is None else (1.0 / unit) / scale
        return rounded(x * rounded(factor, dtype)[..., None], dtype)
    step = step_of(scale, unit, spec)
    step = step.clamp(min=rules.divisor_low) if rules.divisor_low else step
    return rounded(x / step[..., None], dtype)


def _with_signed_zeros(codes: Tensor, scaled: Tensor, spec: QuantSpec) -> Tensor:
    """Codes of small floats, with the code of -0 where the profile has it."""
    rules = convention(spec)
    if rules.signed_zero == "never" or spec.fmt.exponent is None or spec.fmt.bits >= 8:
        return codes
    below = torch.signbit(scaled) if rules.signed_zero == "signbit" else scaled < 0
    return torch.where((codes == 0) & below, 1 << (spec.fmt.bits - 1), codes)


def encode(x: Tensor, scales: Scales, spec: QuantSpec) -> QTensor:
    """Codes of a float tensor [rows, K] at given scales, in float32 unless the spec's profile says otherwise."""
    dtype, x = x.dtype, x.to(torch.float32)
    out = []
    for r, c, i, j in pieces(spec, *x.shape):
        blocks = to_blocks(x[r, c], spec)
        if spec.fmt.identity:
            codes = spec.fmt.encode(blocks)
        else:
            unit = _unit(scales.global_scale, spec, r, x.shape)
            scaled = _scaled(blocks, effective_scale(scales, spec)[i, j], unit, spec, dtype)
            if scales.zero_point is not None:
                scaled = torch.round(scaled) + scales.zero_point[i, j].to(torch.float32)[..., None]
            codes = _with_signed_zeros(spec.fmt.encode(scaled), scaled, spec)
        out.append((r, from_blocks(codes, spec, x[r, c].shape[0], x[r, c].shape[1])))
    codes = _join(out, spec)
    padding = spec.padded_width(x.shape[1]) - codes.shape[1]
    if padding:
        codes = torch.nn.functional.pad(codes.view(torch.uint8), (0, padding)).view(codes.dtype)
    packed = spec.fmt.pack(codes).contiguous()
    return QTensor(packed, scales.scale, scales.global_scale, spec, tuple(x.shape), scales.zero_point)


def fake_quantize(x: Tensor, spec: QuantSpec, amax: Tensor | None = None) -> Tensor:
    """Quantize and dequantize along the last axis, any leading shape; float32 out. NaN propagates.

    Scales are per row (or per group of a row), so one sample never depends on another in its batch.

    Args:
        amax: as in `choose_scale`.
    """
    work = x.reshape(-1, x.shape[-1])
    if x.is_cuda and not torch.compiler.is_compiling() and not (x.requires_grad and torch.is_grad_enabled()):
        for kernel in ROW_KERNELS:
            if not kernel.refuse(work, spec):
                return kernel.run(work, spec, amax).reshape(x.shape)
    dtype = _dtype(work, spec)
    work = work.to(dtype)
    if spec.has_zero_point or spec.k_segments or spec.row_segments or spec.fmt.identity:
        return encode(work, choose_scale(work, spec), spec).dequantize().reshape(x.shape)
    scales, work = choose_scale(work, spec, amax), work.to(torch.float32)
    scale, unit = effective_scale(scales, spec), _unit(scales.global_scale, spec, slice(0, work.shape[0]), work.shape)
    codes = spec.fmt.round(_scaled(to_blocks(work, spec), scale, unit, spec, dtype))
    out = from_blocks(codes * step_of(scale, unit, spec)[..., None], spec, *work.shape)
    return out[:, : x.shape[-1]].reshape(x.shape)
