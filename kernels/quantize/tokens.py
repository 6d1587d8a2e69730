"""Activations in NVFP4 as values: `fake_quantize` under the rules `absmax` and `sweep` in one launch.

What a recipe with swept activation scales costs without it: 17 candidates times twenty launches for every linear.
"""

from __future__ import annotations

from contextlib import nullcontext

import torch
from torch import Tensor

from dq.kernels.quantize.nvfp4 import rule_constants, why_no_kernel
from dq.qtensor import ROW_KERNELS, RowKernel
from dq.scales import amax as block_amax
from dq.spec import SPECS, QuantSpec

_TILE = dict(BLOCKS=128, num_warps=4)


def why_not(x: Tensor, spec: QuantSpec) -> str:
    """Why the kernel cannot round these rows, "" if it can."""
    if spec.with_(scale_rule="absmax", rule_params=()) != SPECS.get("nvfp4-token").spec:
        return "only nvfp4-token, without segments or foreign profiles"
    constants = rule_constants(spec)
    if constants is None or constants["E4M3"]:
        return f"no kernel for {spec} {dict(spec.rule_params) or ''}"
    return why_no_kernel(x)


def fake_quantize(x: Tensor, spec: QuantSpec, amax: Tensor | None = None) -> Tensor:
    """`dq.qtensor.fake_quantize` of x [rows, K] by the kernel."""
    from dq.kernels.quantize.jit.tokens import values_kernel

    x = x.detach().contiguous()
    rows, width = x.shape
    top = (block_amax(x) if amax is None else amax).to(x.device, torch.float32).contiguous()
    out = torch.empty(rows, width, dtype=torch.float32, device=x.device)
    groups = spec.groups(width)
    constants = {k: v for k, v in rule_constants(spec).items() if k != "E4M3"}
    constants |= dict(FULL=width % 16 == 0, FUSED=x.is_cuda, enable_fp_fusion=False)
    with torch.cuda.device(x.device) if x.is_cuda else nullcontext():
        grid = (-(-rows * groups // _TILE["BLOCKS"]),)
        values_kernel[grid](x, top, out, rows * groups, width, groups, **constants, **_TILE)
    return out


ROW_KERNELS.register(RowKernel("nvfp4-token", why_not, fake_quantize))
