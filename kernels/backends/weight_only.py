"""16-bit activations: W4A16 and W8A16, decoded in registers for few rows, expanded for cuBLAS above.

w4a16-gemv    recipes that leave activations in 16 bits
expand-bf16   recipes that do not, where no kernel runs their grid (Ampere for FP4 and FP8): as fast there as any
"""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor

from dq.kernels.backends.scaled_mm import add_low_rank
from dq.kernels.gemm import layout
from dq.kernels.gemm.gemv import weight_only
from dq.kernels.library import why_not
from dq.ops import BACKENDS, Backend, LinearParams
from dq.transforms import apply_steps


def _refuse(params: LinearParams, device: torch.device, dtype: torch.dtype, own: bool) -> str:
    if dtype not in (torch.bfloat16, torch.float16):
        return f"input dtype {dtype}: weights are decoded to 16 bits"
    if own and params.activations is not None:
        return f"activations {params.activations}, not 16-bit"
    return layout.why_not(params.weight.spec) or why_not(device, runs_on_cpu=True)


def run_16bit(x: Tensor, params: LinearParams) -> Tensor:
    """x [M, K] -> [M, N] with activations in 16 bits; float32 sums, one rounding to the dtype of x."""
    pre = apply_steps(x.to(torch.float32), params.steps).to(x.dtype) if params.steps else x
    residual = params.residual
    if residual:  # nothing was rounded: what is missing of the last channels is 0
        last = pre[:, -residual:]
        pre = torch.cat([pre, torch.zeros_like(last)] + [last] * params.dual, 1)
    return add_low_rank(weight_only(pre, params.weight, params.bias), x, params)


for _name, _priority, _own in (("w4a16-gemv", 60, True), ("expand-bf16", 10, False)):
    _backend = Backend(
        _name, _priority, partial(_refuse, own=_own), run_16bit, lambda params: "16-bit", faithful=_own,
        in_torch=lambda params: f"input steps {', '.join(s.name for s in params.steps)}" if params.steps else "",
    )  # fmt: skip
    BACKENDS.register(_backend)
