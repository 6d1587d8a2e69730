"""LLM.int8(): channels whose input is ever large leave the quantized path and are multiplied in 16 bits.

    O = {k: max |x_k| >= threshold};  x'_k = 0, W'_k = 0 for k in O;  side branch: down = rows of I, up = W[:, O]

Here O is fixed at calibration and at most `count` channels are in it, so that shapes are known; the source detects it
in every call. An upper bound on what isolating channels can give ("oracle"), not a fast path: the branch multiplies a
matrix of ones and zeros. `up` is exact where the model itself is in 16 bits.
Source: LLM.int8() (arXiv 2208.07339, section 3.2).
"""

from __future__ import annotations

import torch
from torch import Tensor

from dq.transforms import TRANSFORMS, GroupState, Planned, Step, Transform
from dq.transforms.lowrank import absorb


def limit(count: int, width: int) -> int:
    """Most channels that may leave: `count`, or K/64 (at least 1) if it is 0."""
    return min(count or max(1, width // 64), width)


def fit(state: GroupState, threshold: float = 6.0, count: int = 0) -> None:
    """Isolates the channels of the group's input that reach the threshold, the largest first.

    Args:
        threshold: in units of the input; 0 takes the `count` largest channels whatever their size.
        count: most channels; 0 takes K/64.

    Raises:
        DQError: without calibration.
    """
    state.require_stats("outlier isolation")
    top = torch.stack([s.amax() for s in state.stats.values()]).amax(0)
    order = top.argsort(descending=True, stable=True)[: limit(count, state.width)]
    chosen = order[top[order] >= threshold].sort().values
    if not len(chosen):
        return
    mask = torch.ones(state.width)
    mask[chosen] = 0.0
    for name, w in state.weights.items():
        at = chosen.to(w.device)
        down = torch.eye(state.width, dtype=state.side_dtype, device=w.device)[at]
        absorb(state, name, down, w[:, at].to(state.side_dtype))
    state.add(Step("outliers", {"mask": mask}))


def _apply(x: Tensor, tensors: dict, params: dict) -> Tensor:
    return x * tensors["mask"].to(x)


def _planned(shape: tuple[int, int], parts: tuple[int, ...], params: dict, name: str) -> Planned:
    return Planned((("outliers", {}),), rank=limit(params.get("count", 0), shape[1]))


def _buffers(width: int, params: dict) -> dict[str, tuple[int, ...]]:
    return {"mask": (width,)}


def _check(params: dict) -> str:
    good = params.get("threshold", 0.0) >= 0 and params.get("count", 0) >= 0
    return "" if good else "threshold and count are at least 0"


# Before a shift: both are of order 0, and what is masked stays masked.
TRANSFORMS.register(
    Transform("outliers", fit, 0, _apply, _apply, _apply, _buffers, needs_stats=True, planned=_planned, check=_check)
)
