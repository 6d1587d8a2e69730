"""Scales for each part of a concatenated input: `x = [x_1 | x_2]`, `y = Q(x_1) Q(W_1)^T + Q(x_2) Q(W_2)^T`.

Where two inputs of unlike range share one scale per token, the quiet one drowns. Nothing moves: only the grids change,
to `k_segments` of the same formats. For FLUX.1's proj_out (attention | MLP), FLUX.2's to_out, the skips of U-ViT and
UNets; which linears read a concatenation, the family says (`Family.k_parts`). Scales per group need no split.
Source: Q-Diffusion (arXiv 2302.04304, section 4.2, shortcut splitting).
"""

from __future__ import annotations

from dq.spec import QuantSpec
from dq.transforms import TRANSFORMS, GroupState, Planned, Transform


def split(spec: QuantSpec | None, parts: tuple[int, ...], strategies: tuple[str, ...]) -> QuantSpec | None:
    """The grid with scales per part, where one scale spans them all; else the grid as it is."""
    whole = spec is not None and spec.strategy in strategies and not spec.fmt.identity
    return spec.with_(k_segments=parts) if whole and len(parts) > 1 else spec


def fit(state: GroupState) -> None:
    """Gives every part of a concatenated input its own scales, in the activations (per token) and in the weights."""
    state.weight_spec = split(state.weight_spec, state.k_parts, ("tensor", "channel"))
    state.act_spec = split(state.act_spec, state.k_parts, ("token",))


def _planned(shape: tuple[int, int], parts: tuple[int, ...], params: dict, name: str) -> Planned:
    return Planned()


TRANSFORMS.register(Transform("ksplit", fit, order=0, planned=_planned))
