"""One row of a product with weights in E4M3 that have one scale per row; x in 16 bits, rounded on the way or before.

    y = x @ W^T + bias           or, rounded,  y = s (q @ W^T) + bias,  s = max |x| / 448,  q = E4M3(x / s)

Reading W takes the time, 8 to 20 us for the linears of an 8B Llama on an H200. To round x ahead of that, in a launch of
its own, would add 2 to 3 us.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from dq.kernels.activation.grids import grid_of
from dq.kernels.activation.reference import activate_reference
from dq.kernels.gemm.expand import as_bytes
from dq.kernels.gemm.rows import FP8
from dq.kernels.library import capability, define, launch, multiprocessors, native_fp8, reversed_lanes


def _converts(device: torch.device) -> bool:
    """Whether E4M3 becomes FP16 by an instruction."""
    return capability(device) >= (8, 9)


@lru_cache(maxsize=1024)  # of every launch
def _plan(n: int, k: int, round: bool, factor: bool, bias: bool, device: torch.device) -> tuple[dict[str, Any], int]:
    """(compile-time arguments and options, iterations): eight rows of W, for which a program rounds x once, loads of
    two steps at a time.

    Warps lie along K: two where rows alone fill every multiprocessor, for 64 threads leave the smaller rest at the end
    (18.8 us against 19.8, 4096 -> 14336 on an H200), else four (20.2 us against 27.9, 14336 -> 4096); eight: slower.
    """
    units = multiprocessors(device.index if device.type == "cuda" else None)
    warps = 2 if -(-n // 8) >= 12 * units else 4
    while warps > 1 and 256 * warps > k:
        warps //= 2
    flags = dict(ROUND=round, FACTOR=factor, BIAS=bias, NATIVE=_converts(device), HARDWARE=native_fp8(device))
    tile = dict(EVEN=k % (512 * warps) == 0, R=8, C=32 * warps, U=2, REVERSE=reversed_lanes())
    return flags | tile | dict(num_warps=warps, num_stages=1), -(-k // (512 * warps))


def _launch(x, factor, codes, scale, bias, round, dtype) -> Tensor:
    from dq.kernels.gemm.jit.row8 import row8_kernel

    k, n = x.shape[1], len(codes)
    out = torch.empty(1, n, dtype=dtype, device=x.device)
    if not n:
        return out
    constants, each = _plan(n, k, round, factor is not None, bias is not None, x.device)
    codes, scale = codes.contiguous(), scale.contiguous()
    data = (as_bytes(x.contiguous()), scale if factor is None else factor, as_bytes(codes), scale)
    data = (*data, out if bias is None else bias.contiguous(), out)
    launch(row8_kernel, (-(-n // constants["R"]),), (*data, n, k, codes.stride(0), each), constants)
    return out


def _reference(x, factor, codes, scale, bias, round, dtype) -> Tensor:
    if round:
        x, factor = activate_reference(x.to(torch.float32), grid_of(FP8), FP8, "e4m3", 0, False, None, x.shape[1])
    y = (x.to(torch.float32) @ codes[:, : x.shape[1]].to(torch.float32).T) * scale.reshape(-1)
    y = y if factor is None else y * factor
    return (y if bias is None else y + bias.to(torch.float32)).to(dtype)


def _fake(x, factor, codes, scale, bias, round, dtype) -> Tensor:
    return x.new_empty(x.shape[0], codes.shape[0], dtype=dtype)


_row8 = define(
    "row8(Tensor x, Tensor? factor, Tensor codes, Tensor scale, Tensor? bias, bool round, ScalarType dtype) -> Tensor",
    _launch, _fake, _reference,
)  # fmt: skip


def takes(codes: Tensor, scale: Tensor, unit: Tensor | None, kind: str, rows: int) -> bool:
    """Whether a weight, as `layout.parts` gives it, is one of the kernel's: E4M3 with a float scale for each row.

    Not before Ada, which converts E4M3 itself: by integer arithmetic a value takes longer than its byte, and `gemv`
    has assembly for four of them.
    """
    plain = kind == "e4m3" and rows == 1 and scale.shape[1] == 1 and unit is None and scale.is_floating_point()
    return plain and scale.dtype != torch.float8_e4m3fn and (not codes.is_cuda or _converts(codes.device))


def of_floats(x: Tensor, codes: Tensor, scale: Tensor, bias: Tensor | None, dtype: torch.dtype) -> Tensor:
    """y [1, N] in `dtype` for floats x [1, K], codes E4M3 [N, K] and scale [N, 1], x as it is."""
    return _launch(x, None, codes, scale.reshape(-1), bias, False, dtype)


def rounding(x: Tensor, codes: Tensor, scale: Tensor, bias: Tensor | None) -> Tensor:
    """y [1, N] in the dtype of x for floats x [1, K], rounded here; codes E4M3 [N, K], scale float32 [N, 1]."""
    return _row8(x.detach(), None, codes, scale.reshape(-1), bias, True, x.dtype)


def of_codes(
    x: Tensor, factor: Tensor, codes: Tensor, scale: Tensor, bias: Tensor | None, dtype: torch.dtype
) -> Tensor:
    """y [1, N] in `dtype` for rounded x: codes [1, K] with factor float32 [1, 1]; the weight as of `rounding`."""
    return _row8(x, factor, codes, scale.reshape(-1), bias, False, dtype)
