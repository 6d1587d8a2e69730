"""FP8 W8A8 through cuBLASLt (`torch._scaled_mm`, row-wise scales): per-token activations, per-channel weights."""

from __future__ import annotations

import torch
from torch import Tensor

from dq.ops import BACKENDS, Backend, LinearParams, own_grid
from dq.qtensor import choose_scale, encode
from dq.spec import QuantSpec
from dq.transforms import apply_steps

_WEIGHTS = QuantSpec("fp8_e4m3", "channel")
_ACTIVATIONS = QuantSpec("fp8_e4m3", "token", dynamic=True)


def _available() -> str:
    if not torch.cuda.is_available():
        return "no CUDA device"
    major, minor = torch.cuda.get_device_capability()
    return "" if (major, minor) >= (8, 9) else f"FP8 tensor cores need compute capability 8.9, this is {major}.{minor}"


def _refuse(params: LinearParams, device: torch.device, dtype: torch.dtype) -> str:
    if device.type != "cuda":
        return f"the layer is on {device.type}"
    if params.weight.spec != _WEIGHTS or params.activations != _ACTIVATIONS:
        return "only fp8_e4m3/channel weights with fp8_e4m3/token activations"
    if dtype not in (torch.bfloat16, torch.float16):
        return f"input dtype {dtype}: the result is BF16, too coarse for it"
    n, k = params.weight.shape
    return "" if n % 16 == 0 and k % 16 == 0 else f"K={k} and N={n} must be multiples of 16"


def _run(x: Tensor, params: LinearParams) -> Tensor:
    """x [M, K] -> [M, N]; products in E4M3, accumulation in float32, one rounding to BF16."""
    x32 = apply_steps(x.to(torch.float32), params.steps)
    scales = choose_scale(x32, _ACTIVATIONS)
    codes = encode(x32, scales, _ACTIVATIONS).codes
    bias = None if params.bias is None else params.bias.to(torch.bfloat16)
    weight = params.weight
    if not len(x):
        return x.new_zeros(0, weight.shape[0])
    y = torch._scaled_mm(
        codes, weight.codes.t(), scale_a=scales.scale, scale_b=weight.scale.t(), bias=bias, out_dtype=torch.bfloat16
    )
    if params.down is not None:
        y = y + (x.to(params.down.dtype) @ params.down.T) @ params.up.T
    return y.to(x.dtype)


BACKENDS.register(
    Backend("cublaslt-fp8", 100, _refuse, _run, own_grid, available=_available),
)
