"""INT8 tensor cores (Ampere and later): INT8 and INT4 activations and weights, per token and channel or in groups.

Exactly the recipe's own grid: integer products and sums are exact, and scales are applied in float32. INT4 weights rest
in 4 bits and are widened to INT8 just before the product.
"""

from __future__ import annotations

import torch
from torch import Tensor

from dq.kernels.backends.scaled_mm import low_rank
from dq.kernels.gemm import gemm, layout, rows
from dq.kernels.gemm.expand import expand
from dq.kernels.library import why_not
from dq.ops import BACKENDS, Backend, LinearParams, own_grid
from dq.spec import QuantSpec

_INTEGERS = ("int4", "int4_wide", "int4_full", "int8", "int8_wide", "int8_full")


def _refuse_grid(grid: QuantSpec | None) -> str:
    if grid is None:
        return "16-bit activations"
    if grid.format not in _INTEGERS or grid.strategy not in ("token", "group") or grid.global_scale:
        return f"activations {grid}: only INT8 and INT4 per token or group"
    if grid.scale_format not in ("fp32", "fp16", "bf16"):
        return f"activation scales {grid.scale_format}"
    return ""


def _refuse(params: LinearParams, device: torch.device, dtype: torch.dtype) -> str:
    spec, grid = params.weight.spec, params.activations
    why = _refuse_grid(grid) or layout.why_not(spec) or why_not(device, (8, 0), runs_on_cpu=True)
    if why:
        return why
    if spec.format not in _INTEGERS or spec.scale_format not in ("fp32", "fp16", "bf16") or spec.global_scale:
        return "only INT8 and INT4 weights with one level of scales"
    if _group(params) not in gemm.GROUPS or (grid.group_size and spec.group_size not in (None, grid.group_size)):
        return f"weights in groups of {spec.group_size} with activations in groups of {grid.group_size}"
    if params.input_scale is not None or params.residual:
        return "static activations" if params.input_scale is not None else "residual columns"
    return "" if dtype in (torch.bfloat16, torch.float16) else f"input dtype {dtype}"


def _group(params: LinearParams) -> int:
    return params.weight.spec.group_size or params.activations.group_size or 0


def _scales(scale: Tensor, length: int, groups: int) -> Tensor:
    """Scales [R, 1] or [R, G] -> float32 [length, groups]: a side with one scale repeats it."""
    return scale.to(torch.float32).expand(length, groups).contiguous()


def _run(x: Tensor, params: LinearParams) -> Tensor:
    """x [M, K] -> [M, N]; int32 sums, scaled in float32, one rounding to the dtype of x."""
    weight, group = params.weight, _group(params)
    codes, scale = rows.prepared(x, params, params.activations, "int8")
    four = layout.layout_of(weight.spec).bits == 4
    values = expand(weight, torch.int8)[0] if four else weight.codes[:, : weight.shape[1]]
    groups = -(-weight.shape[1] // group) if group else 1
    sa, sb = _scales(scale, x.shape[0], groups), _scales(weight.scale, len(values), groups)
    return gemm.gemm(codes, values, sa, sb, params.bias, group, 1, x.dtype, *low_rank(x, params))


def _in_torch(params: LinearParams) -> str:
    return rows.in_torch(params, params.activations, "int8")


BACKENDS.register(Backend("int8-mma", 70, _refuse, _run, own_grid, in_torch=_in_torch))
