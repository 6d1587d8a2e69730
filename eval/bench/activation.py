"""Time of the activation kernel, plain against transformed: `python -m dq.eval.bench.activation [M K ...]`.

    floor = (bytes of x + bytes of codes) / copy bandwidth

Kernels run from a captured graph, so that the host's time to launch them does not count, each on an L2 that holds
nothing of its input.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import torch

from dq.eval.bench.speed import copy_bandwidth, timed
from dq.eval.environment import describe
from dq.kernels.activation.api import activate
from dq.kernels.activation.front import Front
from dq.spec import QuantSpec
from dq.transforms import Step

SHAPES = ((4608, 3072), (4608, 12288))
GRIDS = (
    ("fp8_e4m3/token", "e4m3"),
    ("int8/token", "int8"),
    ("int4/token", "e4m3"),
    ("nvfp4-token", "e4m3"),
    ("int4/group64/fp32", "e4m3"),
)


def variants(k: int, device: torch.device) -> dict[str, dict[str, Any]]:
    """What is timed: arguments of `activate` beside x, grid and target; the first is what others are compared with."""
    g = torch.Generator().manual_seed(0)
    smooth = Step("smooth", {"factor": (torch.rand(k, generator=g) + 0.5).to(device)})
    turned = Step("rotate", params={"size": 256})
    modulation = [torch.randn(1, k, generator=g).to(device, torch.bfloat16) for _ in range(2)]
    return {
        "plain": dict(steps=[]),
        "rotate": dict(steps=[turned]),
        "smooth": dict(steps=[smooth]),
        "both": dict(steps=[smooth, turned]),
        "adaln": dict(steps=[], front=Front("layernorm", scale=modulation[0], shift=modulation[1])),
        "gelu": dict(steps=[], front=Front("gelu")),
    }


def _graph(call: Callable[[], Any], device: torch.device) -> Callable[[], Any]:
    """The same work as a replay of one graph."""
    call()
    if device.type != "cuda":
        return call
    torch.cuda.synchronize(device)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        call()
    return graph.replay


def measure(
    shapes: tuple[tuple[int, int], ...] = SHAPES, device: str | torch.device = "cuda", repeat: int = 50
) -> dict[str, Any]:
    """Microseconds of every variant, grid and shape [M, K]; BF16 input."""
    where = torch.device(device)
    bandwidth, rows = copy_bandwidth(where, repeat), []
    for m, k in shapes:
        x = torch.randn(m, k, generator=torch.Generator().manual_seed(0)).to(where, torch.bfloat16)
        for grid, target in GRIDS:
            row: dict[str, Any] = {"shape": [m, k], "grid": grid, "floor_us": 3 * m * k / bandwidth * 1e6}
            for name, arguments in variants(k, where).items():
                spec = QuantSpec.parse(grid)
                call = _graph(lambda x=x, s=spec, t=target, a=arguments: activate(x, grid=s, target=t, **a), where)
                row[name] = timed(call, where, repeat) * 1e6
            rows.append(row)
    return {"environment": describe(where), "copy_gb_per_s": bandwidth / 1e9, "repeat": repeat, "rows": rows}


def text(result: dict[str, Any]) -> str:
    """The table for a terminal; times in microseconds, ratios to `plain` beside them."""
    where, names = result["environment"], list(variants(256, torch.device("cpu")))
    lines = [
        f"BF16 input on {where['device']}, torch {where['versions']['torch']}; "
        f"copy {result['copy_gb_per_s']:.0f} GB/s; medians of {result['repeat']}, us",
        f"{'shape':<14} {'grid':<18} {'floor':>6} " + " ".join(f"{n:>13}" for n in names),
    ]
    for r in result["rows"]:
        cells = " ".join(f"{r[n]:>6.1f} ({r[n] / r['plain']:.2f})" for n in names)
        lines.append(f"{r['shape'][0]} x {r['shape'][1]:<7} {r['grid']:<18} {r['floor_us']:>6.1f} {cells}")
    return "\n".join(lines)


if __name__ == "__main__":
    sizes = [int(a) for a in sys.argv[1:]]
    pairs = tuple(zip(sizes[::2], sizes[1::2], strict=True)) or SHAPES
    print(text(measure(pairs, "cuda" if torch.cuda.is_available() else "cpu")))
