"""Which quantized weights the kernels read, and how: element kind, scales, second level."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from dq.profiles import convention
from dq.qtensor import QTensor
from dq.spec import QuantSpec

KINDS = {
    "uint4": "uint4", "int4": "int4", "int4_wide": "int4", "int4_full": "int4", "fp4_e2m1": "e2m1",
    "int8": "int8", "int8_wide": "int8", "int8_full": "int8", "fp8_e4m3": "e4m3",
}  # fmt: skip
SCALES = ("fp32", "fp16", "bf16", "fp8_e4m3", "e8m0")
_E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)


@dataclass(frozen=True)
class Layout:
    """How a kernel reads a weight [N, K].

    Attributes:
        kind: `int4`, `uint4` (with a zero point for every scale), `e2m1` (these: two codes a byte, the first in the low
            nibble), `int8` or `e4m3`.
        group: columns that share a scale; 0 where a whole row does.
        rows: rows that share a scale; 0 where all do.
    """

    kind: str
    group: int
    rows: int

    @property
    def bits(self) -> int:
        return 4 if self.kind in ("int4", "uint4", "e2m1") else 8


def why_not(spec: QuantSpec) -> str:
    """Why the kernels cannot read weights of this spec, "" if they can."""
    if spec.format not in KINDS:
        return f"weights {spec.format}"
    if spec.scale_format not in SCALES or convention(spec).levels == "inverse":
        return f"scales {spec.scale_format} of profile {spec.profile}"
    if spec.row_segments or spec.k_segments:
        return "weights with segments"
    if spec.has_zero_point and (not spec.columns or spec.columns < 32 or spec.global_scale or spec.block_size):
        return f"zero points of {spec}: only one level of scales, groups of 32 or more"
    group = spec.columns or 16
    return "" if group in (16, 32, 64, 128, 256) else f"groups of {group}: only 16, 32, 64, 128 and 256"


def layout_of(spec: QuantSpec) -> Layout:
    """The layout of a spec that `why_not` accepts."""
    rows = {"tensor": 0, "block": spec.block_size[0] if spec.block_size else 1}.get(spec.strategy, 1)
    return Layout(KINDS[spec.format], spec.columns or 0, rows)


_SAME = ("format", "strategy", "group_size", "block_size", "scale_format", "global_scale", "row_segments", "k_segments",
         "profile")  # fmt: skip


def alike(spec: QuantSpec | None, wanted: QuantSpec) -> bool:
    """Whether codes and scales mean the same: two specs but for the rule that chose the scales. Compares fields, and
    makes no spec: layers choose their backend while `torch.compile` traces them."""
    return spec is not None and all(getattr(spec, name) == getattr(wanted, name) for name in _SAME)


def values(codes: Tensor, kind: str, width: int) -> Tensor:
    """float32 [N, width] of stored codes."""
    if kind in ("int8", "e4m3"):
        return codes[:, :width].to(torch.float32)
    low = torch.stack([codes & 15, codes >> 4], -1).flatten(1)[:, :width].to(torch.int32)
    if kind == "uint4":
        return low.to(torch.float32)
    if kind == "int4":
        return ((low ^ 8) - 8).to(torch.float32)
    magnitude = torch.tensor(_E2M1, device=codes.device)[low & 7]
    return torch.where(low > 7, -magnitude, magnitude)


def scale_values(scale: Tensor) -> Tensor:
    """float32 of stored scales; bytes are biased exponents (E8M0)."""
    if scale.dtype == torch.uint8:
        return torch.ldexp(torch.ones_like(scale, dtype=torch.float32), scale.to(torch.int32) - 127)
    return scale.to(torch.float32)


def element_values(
    codes: Tensor, scale: Tensor, unit: Tensor | None, layout: Layout, width: int
) -> tuple[Tensor, Tensor]:
    """(codes less their zero points [N, width], second level [N]), float32, of what `parts` gives."""
    value, rows = values(codes, layout.kind, width), len(codes)
    if layout.kind == "uint4":
        return value - spread(unit.to(torch.float32), layout, rows, width), torch.ones(rows)
    return value, torch.ones(rows) if unit is None else unit.expand(rows)


def spread(scale: Tensor, layout: Layout, rows: int, width: int) -> Tensor:
    """Scales [R, G] -> one for each row and group, [rows, G]; with `width` > 0 one for each element, [rows, width]."""
    scale = scale.expand(rows, -1) if layout.rows == 0 else scale.repeat_interleave(layout.rows, 0)[:rows]
    if not width:
        return scale
    return scale.repeat_interleave(layout.group, 1)[:, :width] if layout.group else scale.expand(-1, width)


def parts(weight: QTensor) -> tuple[Tensor, Tensor, Tensor | None]:
    """(codes, scale, second level) as the operators take them, dense; in the place of a second level, zero points if
    any."""
    codes, scale, unit = weight.codes.contiguous(), weight.scale.contiguous(), weight.zero_point
    if unit is None and weight.global_scale is not None:
        unit = weight.global_scale.reshape(-1)
    return codes, scale, unit if unit is None else unit.contiguous()
