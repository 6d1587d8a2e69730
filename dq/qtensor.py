"""`QTensor`: codes and scales of one quantized 2-D tensor, in a kernel-independent layout that is saved as it is.

Source for NVFP4's two levels: `global = amax/(6*448)`, `block = E4M3(clamp(amax_b/6/global, 2^-9, 448))`,
`x ~ e2m1 * block * global` (NVIDIA's multiplier convention; compressed-tensors stores 1/global).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from dq.registry import DQError
from dq.spec import QuantSpec

_E4M3_MIN, _E4M3_MAX = 2.0**-9, 448.0
_TINY = torch.finfo(torch.float32).tiny
_SCALE_RANGE = {
    torch.float32: (_TINY, torch.finfo(torch.float32).max),
    torch.float16: (2.0**-24, 65504.0),
    torch.bfloat16: (_TINY, torch.finfo(torch.bfloat16).max),
    torch.float8_e4m3fn: (_E4M3_MIN, _E4M3_MAX),
}


@dataclass
class QTensor:
    """A tensor [rows, K] as codes and scales: `x ~ decode(codes) * scale * global_scale`.

    Attributes:
        codes: [rows, packed K], dtype `spec.fmt.storage`. K is padded with zeros to whole groups and bytes.
        scale: `spec.scale_shape(rows, K)` in `spec.scale_dtype`.
        global_scale: None, float32 [1] (`tensor`) or float32 [rows, 1] (`token`).
        spec: how to read them.
        shape: (rows, K), without padding.
    """

    codes: Tensor
    scale: Tensor
    global_scale: Tensor | None
    spec: QuantSpec
    shape: tuple[int, int]

    def dequantize(self, dtype: torch.dtype = torch.float32) -> Tensor:
        """[rows, K] in `dtype`, computed in float32."""
        values = self.spec.fmt.unpack_values(self.codes, self.spec.padded_width(self.shape[1]))
        step = effective_scale(self.scale, self.global_scale)
        if self.spec.group_size:
            rows, groups = self.scale.shape
            values = values[:, : groups * self.spec.group_size].unflatten(1, (groups, -1)) * step[..., None]
            values = values.flatten(1)
        else:
            values = values * step
        return values[:, : self.shape[1]].to(dtype)

    @property
    def nbytes(self) -> int:
        return sum(t.numel() * t.element_size() for t in (self.codes, self.scale, self.global_scale) if t is not None)


def effective_scale(scale: Tensor, global_scale: Tensor | None) -> Tensor:
    """`scale * global_scale` in float32: what one code step is worth."""
    scale = scale.to(torch.float32)
    return scale if global_scale is None else scale * global_scale


def check_finite(x: Tensor, what: str) -> None:
    """Raises DQError naming `what` if `x` holds NaN or Inf."""
    if x.numel() and not torch.isfinite(x).all():
        bad = x.numel() - int(torch.isfinite(x).sum())
        raise DQError(f"{what} holds {bad} NaN or Inf values; fix the source, nothing was quantized from it")


def _amax(x: Tensor) -> Tensor:
    """max |x| over the last axis, kept; 0 for an empty axis."""
    if not x.shape[-1]:
        return x.new_zeros(*x.shape[:-1], 1)
    return torch.maximum(x.amax(-1, keepdim=True), -x.amin(-1, keepdim=True))  # no copy of |x|


def _grouped(x: Tensor, spec: QuantSpec) -> Tensor:
    """[rows, K] -> [rows, groups, group_size] (zero padded), or [rows, 1, K] without groups."""
    if not spec.group_size:
        return x[:, None, :]
    groups = spec.groups(x.shape[1])
    missing = groups * spec.group_size - x.shape[1]
    if missing:
        x = torch.nn.functional.pad(x, (0, missing))
    return x.unflatten(1, (groups, spec.group_size))


def choose_scale(x: Tensor, spec: QuantSpec, amax: Tensor | None = None) -> tuple[Tensor, Tensor | None]:
    """Scales of a float32 tensor [rows, K] by the absmax rule.

    Args:
        amax: for `global_scale="tensor"`, the largest |x| that the second level must cover (float32 scalar), e.g. the
            maximum over q, k and v so that they share it; default: this tensor's own.

    Returns:
        scale in `spec.scale_dtype`, and the global scale or None. A block of zeros gets the smallest scale (E4M3) or 1.
    """
    fmt, top = spec.fmt, _amax(_grouped(x, spec))[..., 0]  # [rows, groups]
    if spec.strategy == "tensor":
        top = top.amax().reshape(1, 1) if top.numel() else top.new_zeros(1, 1)
    # Divisors are tensors: by a Python number torch divides on CUDA through its reciprocal, and codes at ties differ.
    scale, global_scale = top / torch.full_like(top, fmt.max), None
    low, high = _SCALE_RANGE[spec.scale_dtype]
    if spec.global_scale:
        if spec.global_scale == "token":
            whole = _amax(top)
        else:
            whole = (top.amax() if top.numel() else top.new_zeros(())) if amax is None else amax
            whole = whole.to(x).reshape(1)
        global_scale = torch.where(whole > 0, (whole / torch.full_like(whole, fmt.max * high)).clamp(min=_TINY), 1.0)
        scale = scale / global_scale
    zero = torch.full_like(scale, low if spec.scale_dtype == torch.float8_e4m3fn else 1.0)
    scale = torch.where(top > 0, scale.clamp(low, high), zero)
    return scale.to(spec.scale_dtype), global_scale


def quantize(x: Tensor, spec: QuantSpec, *, amax: Tensor | None = None, name: str = "tensor") -> QTensor:
    """Rounds [rows, K] to the nearest codes (half to even) at absmax scales, in float32.

    `q = clip(rne(x / (scale * global_scale)))`, division by the stored (rounded) scale.

    Raises:
        DQError: not 2-D, or NaN/Inf in `x` (the message names `name`).
    """
    if x.dim() != 2:
        raise DQError(f"{name} must be 2-D to be quantized, got shape {tuple(x.shape)}")
    check_finite(x, name)
    work = x.detach().to(torch.float32)
    scale, global_scale = choose_scale(work, spec, amax)
    return encode(work, scale, global_scale, spec)


def encode(x: Tensor, scale: Tensor, global_scale: Tensor | None, spec: QuantSpec) -> QTensor:
    """Codes of a float32 tensor [rows, K] at given scales."""
    step = effective_scale(scale, global_scale)
    codes = spec.fmt.encode(_grouped(x, spec) / step[..., None]).flatten(1)
    padding = spec.padded_width(x.shape[1]) - codes.shape[1]
    if padding:
        codes = torch.nn.functional.pad(codes.view(torch.uint8), (0, padding)).view(codes.dtype)
    return QTensor(spec.fmt.pack(codes).contiguous(), scale, global_scale, spec, tuple(x.shape))


def fake_quantize(x: Tensor, spec: QuantSpec) -> Tensor:
    """Quantize and dequantize along the last axis, any leading shape; float32 out. NaN propagates.

    Scales are per row (or per group of a row), so one sample never depends on another in its batch.
    """
    work = x.to(torch.float32).reshape(-1, x.shape[-1])
    scale, global_scale = choose_scale(work, spec)
    step = effective_scale(scale, global_scale)[..., None]
    out = (spec.fmt.round(_grouped(work, spec) / step) * step).flatten(1)
    return out[:, : x.shape[-1]].reshape(x.shape)
