"""Permutation of the input channels by their calibrated maxima, ascending: `x' = x[:, p]`, `W' = W[:, p]`.

Blocks then hold channels of like size, and the strongest channels come last, where residual channels are taken from.
Source: ARCQuant (arXiv 2601.07475, section 3.2).
"""

from __future__ import annotations

import torch
from torch import Tensor

from dq.transforms import TRANSFORMS, GroupState, Step, Transform, apply_steps


def channel_amax(state: GroupState) -> Tensor:
    """float32 [K]: max over calibration inputs and the group's linears of |x'_k|.

    Maxima over all tokens go through the input steps where these act on each channel alone; else the sample counts.
    """
    tops = []
    for members in state.inputs:
        rows = state.rows(members[0]).abs().amax(0)
        if all(step.name == "smooth" for step in state.steps):
            whole = state.stat(members[0]).amax().to(rows)
            rows = torch.maximum(rows, apply_steps(whole[None], state.steps)[0])
        tops.append(rows)
    return torch.stack(tops).amax(0).float()


def fit(state: GroupState) -> None:
    """Sorts the channels of the group, weakest first.

    Raises:
        DQError: without calibration.
    """
    state.require_stats("a permutation by channel maxima")
    index = channel_amax(state).argsort(stable=True)
    state.add(Step("permute", {"order": index.to(torch.int32)}))


def _apply(x: Tensor, tensors: dict, params: dict) -> Tensor:
    return x.index_select(-1, tensors["order"].to(x.device))


def _unweight(w: Tensor, tensors: dict, params: dict) -> Tensor:
    return torch.empty_like(w).index_copy_(-1, tensors["order"].to(w.device, torch.int64), w)


def _buffers(width: int, params: dict) -> dict:
    return {"order": ((width,), torch.int32)}


TRANSFORMS.register(Transform("permute", fit, 2, _apply, _apply, _unweight, _buffers, needs_stats=True))
