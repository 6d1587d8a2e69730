"""4-bit weights on FP8 tensor cores (Ada, Hopper): expanded to E4M3 just before cuBLASLt multiplies them.

Weights rest in 4 bits, the GEMM runs at the speed of FP8. Low rank and residual channels are further columns of the
same product. Such GPUs have no 4-bit tensor cores, so 4-bit activations would buy no speed:

    expand-fp8            activations in FP8, one scale per token; up to 16 rows in 16 bits: there the bytes of the
                          weights decide, so these are decoded in registers instead
    expand-fp8-faithful   activations on the recipe's own grid; of a 4-bit one `element * block scale` rounded to E4M3
"""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor

from dq.kernels.activation import api
from dq.kernels.backends.scaled_mm import refuse_fp8
from dq.kernels.backends.weight_only import run_16bit
from dq.kernels.gemm import gemm, gemv, layout, rows
from dq.kernels.gemm.expand import expand
from dq.ops import BACKENDS, Backend, LinearParams, own_grid

_ALIGN, _ALIGN_EXTRA = 16, 128  # columns of a product; with columns behind K cuBLASLt is faster at whole tiles
_GRIDS = ("int4", "int4_wide", "int4_full", "fp4_e2m1")


def _refuse(params: LinearParams, device: torch.device, dtype: torch.dtype, faithful: bool) -> str:
    spec, grid = params.weight.spec, params.activations
    why = layout.why_not(spec) or refuse_fp8(params, device, dtype)
    if why or layout.layout_of(spec).bits != 4:
        return why or "only 4-bit weights"
    if spec.has_zero_point:
        return "weights with zero points"
    if spec.scale_format == "fp8_e4m3" and spec.global_scale is None:
        return "block scales in E4M3 without a second level may leave the range of their product"
    if grid is None or params.input_scale is not None:
        return "16-bit activations" if grid is None else "static activations"
    if faithful and grid != rows.FP8 and (grid.format not in _GRIDS or grid.strategy not in ("token", "group")):
        return f"activations {grid}: only 4-bit grids per token or group, and FP8 per token"
    if faithful and (grid.columns or 16) not in (16, 32, 64, 128):
        return f"activations in groups of {grid.columns}"
    return api.why_not(params.steps, grid, "e4m3", params.width, params.residual) if faithful else ""


def _width(params: LinearParams) -> int:
    """Columns of the product: K, residual ones, three for each rank, zeros up to a whole tile."""
    k = params.weight.shape[1]
    if params.up is None:
        return k + -k % _ALIGN
    k += 3 * params.up.shape[1]
    return k + -k % _ALIGN_EXTRA


def _run(x: Tensor, params: LinearParams, faithful: bool) -> Tensor:
    """x [M, K] -> [M, N]; products in E4M3, accumulation in float32, one rounding to BF16; few rows: see the module."""
    if not x.shape[0]:
        return x.new_zeros(0, params.weight.shape[0])
    if not faithful and x.shape[0] <= gemv.LIMIT:
        return run_16bit(x, params)
    low = None if params.down is None else x.to(params.down.dtype) @ params.down.T
    grid, width = params.activations if faithful else rows.FP8, _width(params)
    codes, scale = rows.prepared(x, params, grid, "e4m3", low, width)
    weight, base = expand(params.weight, torch.float8_e4m3fn, params.up, width)
    return gemm.scaled_mm(codes, weight, scale, base, params.bias).to(x.dtype)


BACKENDS.register(
    Backend(
        "expand-fp8", 90, partial(_refuse, faithful=False), partial(_run, faithful=False),
        lambda params: f"{rows.FP8}, 16-bit up to {gemv.LIMIT} rows", faithful=False,
        in_torch=lambda params: rows.in_torch(params, rows.FP8, "e4m3"),
    )
)  # fmt: skip
BACKENDS.register(
    Backend("expand-fp8-faithful", 40, partial(_refuse, faithful=True), partial(_run, faithful=True), own_grid)
)
