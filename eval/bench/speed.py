"""Time to quantize one weight, against the time a copy takes to move as many bytes.

    floor = (bytes of the weight + bytes of codes and scales) / copy bandwidth

The bandwidth is measured in the same run, bytes read and written both counted. On CUDA every call starts with an L2
that holds none of the weight.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from dq.eval.environment import describe
from dq.kernels.quantize.nvfp4 import enqueue, why_not
from dq.qtensor import choose_scale, encode, quantize
from dq.spec import QuantSpec

SPECS = (
    "nvfp4",
    "nvfp4@sweep",
    "nvfp4@sweep:e4m3",
    "mxfp4",
    "mxfp8",
    "fp8_e4m3/channel",
    "int8/channel",
    "int4/group64",
)


def _parse(text: str) -> QuantSpec:
    """A spec; `:e4m3` behind it sets the target of the rule."""
    plain, _, target = text.partition(":")
    spec = QuantSpec.parse(plain)
    return spec.with_(rule_params=(("target", target),)) if target else spec


def timed(call: Callable[[], Any], device: torch.device, repeat: int) -> float:
    """Median seconds of one call, after one that does not count."""
    call()
    if device.type != "cuda":
        times = []
        for _ in range(repeat):
            start = time.perf_counter()
            call()
            times.append(time.perf_counter() - start)
        return statistics.median(times)
    flush = torch.empty(1 << 29, dtype=torch.uint8, device=device)  # larger than any L2; hides the launch as well
    marks = [[torch.cuda.Event(enable_timing=True) for _ in range(2)] for _ in range(repeat)]
    for start, end in marks:
        flush.zero_()
        start.record()
        call()
        end.record()
    torch.cuda.synchronize(device)
    return statistics.median(start.elapsed_time(end) for start, end in marks) / 1e3


def copy_bandwidth(device: torch.device, repeat: int) -> float:
    """Bytes per second of a large copy, read and written ones."""
    source = torch.zeros(1 << (30 if device.type == "cuda" else 27), dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    return 2 * source.numel() / timed(lambda: target.copy_(source), device, repeat)


def _reference(weight: Tensor, spec: QuantSpec) -> None:
    encode(weight, choose_scale(weight, spec), spec)


def measure(
    shape: tuple[int, int],
    specs: tuple[str, ...] = SPECS,
    device: str | torch.device = "cpu",
    dtype: torch.dtype = torch.bfloat16,
    repeat: int = 20,
    reference: bool = False,
) -> dict[str, Any]:
    """Times per spec: `call` is `dq.qtensor.quantize` to its return, refusal of NaN included; `kernels` only what the
    device does, where a kernel of dq does it; `reference` (on request) the torch reference on the same device."""
    where = torch.device(device)
    weight = torch.randn(shape, generator=torch.Generator().manual_seed(0)).to(where, dtype)
    bandwidth, rows = copy_bandwidth(where, repeat), []
    for name in specs:
        spec = _parse(name)
        moved = weight.numel() * weight.element_size() + spec.nbytes(*shape)
        row: dict[str, Any] = {"spec": name, "bytes": moved, "floor_us": moved / bandwidth * 1e6}
        why = why_not(weight, spec)
        row["path"] = f"torch ({why})" if why else "triton"
        row["call_us"] = timed(lambda spec=spec: quantize(weight, spec), where, repeat) * 1e6
        if not why:
            row["kernels_us"] = timed(lambda spec=spec: enqueue(weight, spec), where, repeat) * 1e6
        if reference:
            row["reference_us"] = timed(lambda spec=spec: _reference(weight, spec), where, max(1, repeat // 4)) * 1e6
        row["ratio"] = row.get("kernels_us", row["call_us"]) / row["floor_us"]
        rows.append(row)
    return {
        "environment": describe(where),
        "shape": list(shape),
        "dtype": str(dtype).removeprefix("torch."),
        "repeat": repeat,
        "copy_gb_per_s": bandwidth / 1e9,
        "rows": rows,
    }


def text(result: dict[str, Any]) -> str:
    """The table for a terminal."""
    (n, k), where = result["shape"], result["environment"]
    lines = [
        f"{n} x {k} {result['dtype']} on {where['device']}, torch {where['versions']['torch']}; "
        f"copy {result['copy_gb_per_s']:.0f} GB/s; medians of {result['repeat']}, us",
        f"{'spec':<20} {'floor':>9} {'kernels':>9} {'call':>10} {'reference':>10} {'x floor':>8}  path",
    ]
    for r in result["rows"]:
        cells = [f"{r[key]:.1f}" if key in r else "" for key in ("floor_us", "kernels_us", "call_us", "reference_us")]
        lines.append(
            f"{r['spec']:<20} {cells[0]:>9} {cells[1]:>9} {cells[2]:>10} {cells[3]:>10} {r['ratio']:>8.1f}  {r['path']}"
        )
    return "\n".join(lines)
