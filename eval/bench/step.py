"""Time of one denoising step: called as it is, with compiled blocks, and as a CUDA graph of either.

host-bound    the time of a call exceeds that of its graph: Python and launches decide
GPU-bound     both are equal
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn

from dq.eval.bench.generation import captured, seconds


def _median_ms(call: Callable[[], Any], device: torch.device, repeat: int) -> float:
    call()
    return 1e3 * statistics.median(seconds(call, device, repeat))


@torch.no_grad()
def measure(
    model: nn.Module,
    inputs: dict[str, Any],
    repeat: int = 10,
    compiled: bool = True,
    options: dict[str, Any] | None = None,
) -> tuple[dict[str, float], Tensor]:
    """Milliseconds of a step by the way it is called, and its output.

    Args:
        inputs: keyword arguments of a call.
        repeat: steps that are timed, one after the other as a sampler takes them; the median counts.
        compiled: also with compiled blocks (the model of diffusers is changed: its blocks stay compiled).
        options: further arguments of `compile_repeated_blocks`.

    Returns:
        `eager_ms`, `compiled_ms`; on CUDA `eager_graph_ms` and `compiled_graph_ms`; `first_s`, the first compiled call.
    """
    device = inputs["hidden_states"].device
    row: dict[str, float] = {}

    def call() -> Tensor:
        return model(**inputs)[0]

    def both(name: str) -> None:
        row[f"{name}_ms"] = _median_ms(call, device, repeat)
        if device.type == "cuda":
            row[f"{name}_graph_ms"] = _median_ms(captured(call, device), device, repeat)

    both("eager")
    if compiled:
        model.compile_repeated_blocks(fullgraph=True, **(options or {}))
        start = time.perf_counter()
        call().sum().item()
        row["first_s"] = time.perf_counter() - start
        both("compiled")
    return row, call()


@torch.no_grad()
def breakdown(model: nn.Module, inputs: dict[str, Any], top: int = 25) -> list[tuple[float, int, str]]:
    """(microseconds, launches, kernel) of the kernels of one step on CUDA that take the longest in all."""
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CUDA]) as found:
        model(**inputs)
        torch.cuda.synchronize()
    rows = [(e.self_device_time_total, e.count, e.key) for e in found.key_averages()]
    return sorted(rows, reverse=True)[:top]


def cosine(y: Tensor, reference: Tensor) -> float:
    """Of two outputs as vectors, in float64."""
    a, b = y.flatten().double(), reference.flatten().double()
    return float(a @ b / (a.norm() * b.norm()))


def text(rows: Iterable[dict[str, Any]]) -> str:
    """The rows as a table."""
    columns = {"engine": "", "gb": ".3g", "quantize_s": ".1f", "eager_ms": ".1f", "eager_graph_ms": ".1f",
               "compiled_ms": ".1f", "compiled_graph_ms": ".1f", "first_s": ".1f", "cosine": ".5f",
               "ran": ""}  # fmt: skip
    lines = [list(columns)]
    for r in rows:
        lines.append(["-" if r.get(c) is None else format(r[c], f) for c, f in columns.items()])
    wide = [max(map(len, column)) for column in zip(*lines, strict=True)]
    return "\n".join("  ".join(map(str.ljust, line, wide)).rstrip() for line in lines)
