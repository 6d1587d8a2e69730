"""Blackwell's block-scaled tensor cores: NVFP4, MXFP4 and MXFP8 weights and activations as they rest.

Residual channels are further columns of both operands in the same blocks; a low-rank branch is added before the one
rounding of the result.
"""

from __future__ import annotations

import torch
from torch import Tensor

from dq.kernels.backends.scaled_mm import low_rank
from dq.kernels.gemm import layout, rows
from dq.kernels.gemm.block_scaled import block_scaled
from dq.kernels.library import capability, why_not
from dq.ops import BACKENDS, Backend, LinearParams, own_grid
from dq.spec import SPECS

_PAIRS = {"nvfp4": "nvfp4-token", "mxfp4": "mxfp4", "mxfp8": "mxfp8"}
_SPECS = [(SPECS.get(weights).spec, SPECS.get(grid).spec) for weights, grid in _PAIRS.items()]


def _refuse(params: LinearParams, device: torch.device, dtype: torch.dtype) -> str:
    weight, grid = params.weight.spec, params.activations
    if not any(layout.alike(weight, w) and layout.alike(grid, g) for w, g in _SPECS):
        return "only " + ", ".join(f"{w} weights with {a} activations" for w, a in _PAIRS.items())
    if dtype not in (torch.bfloat16, torch.float16):
        return f"input dtype {dtype}"
    why = why_not(device, (10, 0))
    if why or capability(device)[0] not in (10, 12):
        return why or f"no block-scaled tensor cores on compute capability {capability(device)}"
    whole = params.residual % grid.columns == 0 and (params.width % grid.columns == 0 or not params.residual)
    return "" if whole else f"{params.residual} residual columns of K={params.width}: no whole groups of {grid}"


def _run(x: Tensor, params: LinearParams) -> Tensor:
    """x [M, K] -> [M, N]; exact products, float32 sums, one rounding to the dtype of x."""
    lay = layout.layout_of(params.weight.spec)
    codes, scale, unit = layout.parts(params.weight)
    a, sa, row = rows.packed(x, params)
    bias, (low, up) = params.bias, low_rank(x, params)
    return block_scaled(a, sa, row, codes, scale, unit, bias, lay.kind, lay.group, x.dtype, low, up)


def _in_torch(params: LinearParams) -> str:
    four = params.activations.fmt.bits == 4
    return rows.in_torch(params, params.activations, "packed") if four else "MXFP8 blocks have no kernel of their own"


BACKENDS.register(Backend("block-scaled-mma", 110, _refuse, _run, own_grid, in_torch=_in_torch))
