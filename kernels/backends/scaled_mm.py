"""FP8 W8A8 by cuBLASLt (`torch._scaled_mm`, row-wise scales): per-token or static activations, per-channel weights."""

from __future__ import annotations

import torch
from torch import Tensor

from dq.kernels.gemm import gemm, layout, row8, rows
from dq.kernels.library import why_not
from dq.ops import BACKENDS, Backend, LinearParams, own_grid
from dq.spec import QuantSpec
from dq.transforms import apply_steps

_WEIGHTS = QuantSpec("fp8_e4m3", "channel")
_STATIC = QuantSpec("fp8_e4m3", "tensor")


def refuse_fp8(params: LinearParams, device: torch.device, dtype: torch.dtype) -> str:
    """What a row-wise FP8 product on this device cannot do for a layer, whatever its weights."""
    if dtype not in (torch.bfloat16, torch.float16):
        return f"input dtype {dtype}: the result is BF16, too coarse for it"
    n = params.weight.shape[0]
    return why_not(device, (8, 9), runs_on_cpu=True) or ("" if n % 16 == 0 else f"N={n} must be a multiple of 16")


def _refuse(params: LinearParams, device: torch.device, dtype: torch.dtype) -> str:
    grids = (_STATIC,) if params.input_scale is not None else (rows.FP8,)
    if not layout.alike(params.weight.spec, _WEIGHTS) or params.activations not in grids:
        return "only fp8_e4m3/channel weights with fp8_e4m3/token or static fp8_e4m3/tensor activations"
    if params.residual and params.input_scale is not None:
        return "residual columns need scales per token"
    k = params.weight.shape[1]
    return refuse_fp8(params, device, dtype) or ("" if k % 16 == 0 else f"K={k} must be a multiple of 16")


def _static(x: Tensor, params: LinearParams) -> tuple[Tensor, Tensor]:
    scaled = apply_steps(x.to(torch.float32), params.steps) / params.input_scale
    codes = scaled.clamp(-448.0, 448.0).to(torch.float8_e4m3fn)
    return codes, params.input_scale.expand(x.shape[0], 1).contiguous()


def _run(x: Tensor, params: LinearParams) -> Tensor:
    """x [M, K] -> [M, N]; products in E4M3, accumulation in float32, one rounding to BF16, of one row to x's dtype."""
    weight = params.weight
    if not x.shape[0]:
        return x.new_zeros(0, weight.shape[0])
    alone = x.shape[0] == 1 and params.down is None
    if alone and params.input_scale is None and not (params.steps or params.residual):
        return row8.rounding(x, weight.codes, weight.scale, params.bias)
    if params.input_scale is not None:
        codes, scale = _static(x, params)
    else:
        codes, scale = rows.prepared(x, params, rows.FP8, "e4m3")
    if alone:
        return row8.of_codes(codes, scale, weight.codes, weight.scale, params.bias, x.dtype)
    factors = low_rank(x, params)
    return gemm.scaled_mm(codes, weight.codes, scale, weight.scale.reshape(-1), params.bias, *factors).to(x.dtype)


def low_rank(x: Tensor, params: LinearParams) -> tuple[Tensor | None, Tensor | None]:
    """(x @ down^T, up), the branch's two factors as a product adds them before it rounds; (None, None) without one."""
    if params.down is None:
        return None, None
    return x.to(params.down.dtype) @ params.down.T, params.up.to(params.down.dtype)


def add_low_rank(y: Tensor, x: Tensor, params: LinearParams) -> Tensor:
    """`y + (x @ down^T) @ up^T` for y [M, N], in one pass over y; for products that cannot add it before they round."""
    low, up = low_rank(x, params)
    return y if low is None else torch.addmm(y, low.to(y.dtype), up.T.to(y.dtype))


BACKENDS.register(
    Backend(
        "cublaslt-fp8", 100, _refuse, _run, own_grid, in_torch=lambda params: rows.in_torch(params, rows.FP8, "e4m3")
    )
)
