"""DeepSeek's FP8: activations with a scale per 1 x 128, weights per 128 x 128, each partial sum scaled in float32."""

from __future__ import annotations

import torch
from torch import Tensor

from dq.kernels.backends.scaled_mm import low_rank
from dq.kernels.gemm import gemm, layout, rows
from dq.kernels.library import why_not
from dq.ops import BACKENDS, Backend, LinearParams, own_grid
from dq.spec import SPECS

_WEIGHTS, _ACTIVATIONS = SPECS.get("fp8-block").spec, SPECS.get("fp8-block-token").spec


def _refuse(params: LinearParams, device: torch.device, dtype: torch.dtype) -> str:
    if not layout.alike(params.weight.spec, _WEIGHTS) or params.activations != _ACTIVATIONS:
        return "only fp8-block weights with fp8-block-token activations"
    if params.residual or dtype not in (torch.bfloat16, torch.float16):
        return "residual columns" if params.residual else f"input dtype {dtype}"
    return why_not(device, (8, 9), runs_on_cpu=True)


def _run(x: Tensor, params: LinearParams) -> Tensor:
    """x [M, K] -> [M, N]; float32 sums, one rounding to the dtype of x."""
    weight = params.weight
    codes, scale = rows.prepared(x, params, _ACTIVATIONS, "e4m3")
    values = weight.codes[:, : weight.shape[1]]
    return gemm.gemm(codes, values, scale, weight.scale, params.bias, 128, 128, x.dtype, *low_rank(x, params))


def _in_torch(params: LinearParams) -> str:
    return rows.in_torch(params, _ACTIVATIONS, "e4m3")


BACKENDS.register(Backend("fp8-block", 80, _refuse, _run, own_grid, in_torch=_in_torch))
