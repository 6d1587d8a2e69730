"""GPTQ's loop over a block of columns in one launch: the bits of the loop in `dq.rounding.gptq`.

A column waits for the one before it, and as operators each takes some thirty launches of a few rows; here a row's block
stays in the registers of one warp.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from contextlib import nullcontext
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from dq.kernels.quantize.nvfp4 import why_no_kernel
from dq.rounding.gptq import BLOCK_KERNELS, BlockKernel, Grid
from dq.spec import FORMATS, Format

_FLOATS = {"fp4_e2m1": (0, 1), "fp6_e3m2": (-2, 2), "fp6_e2m3": (0, 3), "fp8_e4m3": (-6, 3), "fp8_e5m2": (-14, 2)}
_TILE = dict(ROWS=2, num_warps=1)


def _codec(fmt: Format) -> tuple[int, int] | None:
    """(smallest binade, bits of the mantissa), the latter -1 for whole numbers; None for other formats."""
    if re.fullmatch(r"u?int[2348](_\w+)?", fmt.name):
        return 0, -1
    return _FLOATS.get(fmt.name)


@lru_cache(maxsize=64)
def _constants(names: tuple[str, ...], zeros: tuple[bool, ...], width: int) -> dict[str, Any]:
    out: dict[str, Any] = dict(TWO=len(names) > 1, WIDTH=1 << (width - 1).bit_length())
    for i, end in enumerate(("", "2")):
        fmt, zero = FORMATS.get(names[min(i, len(names) - 1)]), zeros[min(i, len(names) - 1)]
        low, mantissa = _codec(fmt)
        out |= {f"ZERO{end}": zero, f"LOW{end}": low, f"MANTISSA{end}": mantissa}
        out |= {f"MIN{end}": fmt.min, f"MAX{end}": fmt.max}
    return out | _TILE | dict(enable_fp_fusion=False)


def why_not(block: Tensor, grids: Sequence[Grid]) -> str:
    """Why the kernel cannot round this block, "" if it can."""
    for grid in grids:
        if _codec(grid.fmt) is None:
            return f"no kernel rounds to {grid.fmt.name}"
    return why_no_kernel(block)


def run(block: Tensor, u: Tensor, grids: Sequence[Grid], kept: Sequence[bool]) -> tuple[Tensor, Tensor, Tensor]:
    """`dq.rounding.gptq._block` of block [N, b], which stays as it is."""
    from dq.kernels.quantize.jit.columns import columns_kernel

    work, u, second = block.contiguous(), u.contiguous(), grids[-1]
    rows, width = work.shape
    main, errors, rest = torch.empty_like(work), torch.empty_like(work), torch.zeros_like(work)
    mask = torch.tensor(kept, dtype=torch.float32).to(work.device) if len(grids) > 1 else work
    tensors = [t for g in (grids[0], second) for t in (g.step, g.step if g.zero is None else g.zero)]
    constants = _constants(tuple(g.fmt.name for g in grids), tuple(g.zero is not None for g in grids), width)
    with torch.cuda.device(work.device) if work.is_cuda else nullcontext():
        grid = (-(-rows // _TILE["ROWS"]),)
        columns_kernel[grid](work, u, *tensors, mask, main, rest, errors, rows, width, **constants)
    return main, rest, errors


BLOCK_KERNELS.register(BlockKernel("columns", why_not, run))
