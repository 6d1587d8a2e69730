"""NVFP4 weights through Triton: rules `absmax` and `sweep`, one and two levels, on CUDA or in Triton's interpreter.

Codes and scales are those of the torch reference, bit for bit: division is correctly rounded, nothing is contracted to
a fused multiply-add, sums have a fixed order, and E2M1 and E4M3 are rounded by integer arithmetic (no FP8 type needed).
"""

from __future__ import annotations

import importlib.util
import os
from contextlib import nullcontext
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from dq.qtensor import ACCELERATORS, Accelerator, QTensor, check_finite, executed_amax, quantize
from dq.scales.block import WINDOW
from dq.spec import SPECS, QuantSpec

_INF = 0x7F800000  # bits of a float32 that is not finite, at least
_AMAX = dict(TILE=2048, STEPS=4, num_warps=4)
_TILES = {"absmax": dict(BLOCKS=256, num_warps=4), "sweep": dict(BLOCKS=128, num_warps=4)}


def _plain(spec: QuantSpec) -> bool:
    """Whether the spec is NVFP4 with one or two levels, whatever its rule."""
    base = SPECS.get("nvfp4").spec
    wanted = base.with_(global_scale=None if spec.global_scale is None else "tensor")
    return spec.with_(scale_rule="absmax", rule_params=(), dynamic=False) == wanted


def rule_constants(spec: QuantSpec) -> dict[str, Any] | None:
    """Compile-time arguments of the kernel for a scale rule it has, else None."""
    given = dict(spec.rule_params)
    low, high = given.pop("low", WINDOW[0]), given.pop("high", WINDOW[1])
    target = given.pop("target", "native")
    if given or spec.scale_rule not in ("absmax", "sweep") or target not in ("native", "e4m3") or not low <= 0 <= high:
        return None
    if spec.scale_rule == "absmax":
        return None if spec.rule_params else dict(SWEEP=False, E4M3=False, LOW=0, HIGH=0)
    return dict(SWEEP=True, E4M3=target == "e4m3", LOW=low, HIGH=high)


@lru_cache(maxsize=1)
def _has_triton() -> bool:
    return importlib.util.find_spec("triton") is not None


def why_no_kernel(x: Tensor) -> str:
    """Why no kernel of this package takes the tensor, whatever the spec, "" if they do."""
    interpreted = os.environ.get("TRITON_INTERPRET") == "1"
    if x.device.type != "cuda" and not (interpreted and x.device.type == "cpu"):
        return f"the tensor is on {x.device.type}, the kernels need CUDA"
    if not _has_triton():
        return "triton is not installed"
    if x.device.type == "cuda" and torch.cuda.get_device_capability(x.device) < (8, 0):
        return "the kernels need compute capability 8.0"
    if x.dim() != 2 or not x.numel():
        return f"shape {tuple(x.shape)} is not a filled matrix"
    return "" if x.dtype in (torch.bfloat16, torch.float16, torch.float32) else f"dtype {x.dtype}"


def why_not(weight: Tensor, spec: QuantSpec) -> str:
    """Why the kernels cannot quantize this tensor to this spec here, "" if they can."""
    why = why_no_kernel(weight)
    if why:
        return why
    if not _plain(spec):
        return "only NVFP4 with at most one global scale for the tensor, without segments or foreign profiles"
    return f"no kernel for {spec} {dict(spec.rule_params) or ''}" if rule_constants(spec) is None else ""


def _pairs(x: Tensor, spec: QuantSpec) -> bool:
    """Whether `absmax` can take two values at a time: whole blocks of BF16, as int32 words where they lie."""
    whole = x.shape[1] % 16 == 0 and x.data_ptr() % 16 == 0
    return spec.scale_rule == "absmax" and x.dtype == torch.bfloat16 and whole


def enqueue(x: Tensor, spec: QuantSpec, amax: Tensor | None = None) -> tuple[QTensor, Tensor]:
    """Enqueues both kernels; returns the result and the bits of max |x|, without waiting for either."""
    from dq.kernels.quantize.jit.nvfp4 import amax_kernel, quantize_kernel
    from dq.kernels.quantize.jit.pairs import absmax_kernel

    x = x.detach().contiguous()
    rows, width = x.shape
    groups = spec.groups(width)
    total, tile = rows * groups, _TILES[spec.scale_rule]
    bits = torch.zeros(1, dtype=torch.int32, device=x.device)
    codes = torch.empty(rows, 8 * groups, dtype=torch.uint8, device=x.device)
    scale = torch.empty(rows, groups, dtype=torch.uint8, device=x.device)
    unit = torch.empty(1, dtype=torch.float32, device=x.device)
    amax_kernel[(-(-x.numel() // (_AMAX["TILE"] * _AMAX["STEPS"])),)](x, bits, x.numel(), **_AMAX)
    top = bits.view(torch.float32) if amax is None else amax.to(unit).reshape(1)
    # No fused multiply-adds but those that the kernels ask for: the reference rounds products before it subtracts.
    levels = dict(TWO_LEVELS=spec.global_scale is not None, FUSED=x.is_cuda, enable_fp_fusion=False)
    grid = (-(-total // tile["BLOCKS"]),)
    if _pairs(x, spec):
        absmax_kernel[grid](x, x.view(torch.int32), top, codes, scale, unit, total, **levels, **tile)
    else:
        constants = rule_constants(spec) | levels | dict(FULL=width % 16 == 0)
        quantize_kernel[grid](x, top, codes, scale, unit, total, width, groups, **constants, **tile)
    second = unit if spec.global_scale else None
    return QTensor(codes, scale.view(torch.float8_e4m3fn), second, spec, (rows, width)), bits


def _run(x: Tensor, spec: QuantSpec, amax: Tensor | None, name: str) -> QTensor:
    with torch.cuda.device(x.device) if x.is_cuda else nullcontext():
        out, bits = enqueue(x, spec, amax)
    if int(bits) >= _INF:  # the kernels have run, but nothing of them is handed out
        check_finite(x, name)
    return out


def quantize_nvfp4(weight: Tensor, rule: str = "absmax", target: str = "native", amax: Tensor | None = None) -> QTensor:
    """NVFP4 of a weight [N, K]: packed E2M1 [N, K/2], E4M3 scales [N, K/16], one float32 global scale.

    Runs the Triton kernels where they can (`why_not` gives the reason where not), else the torch reference.

    Args:
        rule: any scale rule that goes with E4M3 scales and needs no calibration; kernels exist for `absmax`, `sweep`.
        target: for `sweep`: `native`, or `e4m3` to choose scales by the value as FP8 tensor cores execute it.
        amax: what the global scale must cover (float32 scalar); default: the weight's own maximum.

    Raises:
        DQError: not 2-D, NaN/Inf in the weight, unknown rule.
    """
    params = (("target", target),) if target != "native" else ()
    spec = SPECS.get("nvfp4").spec.with_(scale_rule=rule, rule_params=params)
    if why_not(weight, spec):
        return quantize(weight, spec, amax=amax, name="weight")
    return _run(weight, spec, executed_amax([weight], spec) if amax is None else amax, "weight")


ACCELERATORS.register(Accelerator("nvfp4", why_not, _run))
