"""Residual channels (ARCQuant): the S strongest input channels are carried twice, as codes and as what those lost.

    y = Q(x') Q(W')^T + Q(x'_o - Q(x')_o) Q(W'_o)^T                       K + S columns
      + Q(x')_o Q(W'_o - Q(W')_o)^T                                        dual: K + 2 S

with o the last S channels after the sort of `permute`. One GEMM of the same kind, only wider. Source: ARCQuant
(arXiv 2601.07475, sections 3.2 and 3.3); the dual form, which mends the weights of these channels too, is our own.
"""

from __future__ import annotations

from torch import Tensor

from dq.registry import DQError
from dq.spec import QuantSpec
from dq.transforms import TRANSFORMS, GroupState, Planned, Transform
from dq.transforms.permute import channel_amax
from dq.transforms.permute import fit as sort_channels

MULTIPLE = 16  # of NVFP4 blocks; what tensor cores take


def auto_channels(width: int, multiple: int = MULTIPLE) -> int:
    """K/48 rounded to a multiple of 16, at least 16 (64 at K = 3072), at most half of K."""
    return min(max(multiple, round(width / 48 / multiple) * multiple), width // 2 // multiple * multiple)


def reaching_channels(top: Tensor, multiple: int = MULTIPLE) -> int:
    """How many channels have a maximum of at least M / 8, M the largest, rounded up to whole groups, at most half of K.

    An eighth is the gap of three exponent bits between E5M2 and E2M1 (the source's threshold).
    """
    count = int((top >= top.max() / 8.0).sum())
    return max(multiple, min(-(-count // multiple), len(top) // 2 // multiple) * multiple)


def fit(state: GroupState, channels: int = 0, dual: bool = False, threshold: bool = False) -> None:
    """Sorts the channels of the group and makes the last S residual.

    Args:
        channels: S; 0 takes `auto_channels(K)`, and leaves a group alone that is too narrow or no whole groups wide.
        dual: also for the weights.
        threshold: S is what `reaching_channels` finds instead (a plan shows `channels`).

    Raises:
        DQError: without calibration, with 16-bit activations, or if groups do not divide S and K.
    """
    state.require_stats("residual channels")
    name, specs = next(iter(state.weights)), (state.weight_spec, state.act_spec)
    for spec in specs:
        if spec is None or spec.strategy != "group" or spec.k_segments:
            raise DQError(f"{name}: residual channels go with weights and activations in groups along K, not {spec}")
    multiple = max(MULTIPLE, *(spec.group_size for spec in specs))
    if not channels and _misfit(state.width, multiple):
        return
    count = channels or auto_channels(state.width, multiple)
    count = reaching_channels(channel_amax(state), multiple) if threshold else count
    for spec in specs:
        if count % spec.group_size or state.width % spec.group_size:
            raise DQError(f"{name}: {count} residual channels of {state.width} are no whole groups of {spec}")
    sort_channels(state)
    state.residual, state.dual = count, dual


def _misfit(width: int, multiple: int) -> bool:
    return width % multiple != 0 or width < 2 * multiple


def _planned(shape: tuple[int, int], parts: tuple[int, ...], params: dict, name: str) -> Planned:
    if not params.get("channels") and _misfit(shape[1], MULTIPLE):
        return Planned()
    count = params.get("channels") or auto_channels(shape[1])
    if not 0 < count <= shape[1] or shape[1] % MULTIPLE:
        whole = f"they are at most K, and K a multiple of {MULTIPLE}; without channels such layers are left alone "
        whole += "(w4a4-nvfp4-arc does so; skip=[...], in the shell --skip, leaves the layer in 16 bits)"
        raise DQError(f"{count} residual channels do not fit the input width {shape[1]} of {name}: {whole}")
    return Planned((("permute", {}),), residual=count, dual=params.get("dual", False))


def _check(params: dict) -> str:
    count = params.get("channels", 0)
    if count and params.get("threshold"):
        return "threshold finds the number of channels: give one of the two"
    return "" if count >= 0 and count % MULTIPLE == 0 else f"channels is a multiple of {MULTIPLE}, 0 for K/48"


def _grids(params: dict, weights: QuantSpec, activations: QuantSpec | None) -> str:
    for spec in (weights, activations):
        if spec is None or spec.strategy != "group":
            return f"residual channels go with weights and activations in groups along K, not {spec or '16 bits'}"
        if params.get("channels", 0) % spec.group_size:
            return f"channels must be whole groups of {spec}"
    return ""


TRANSFORMS.register(Transform("arc", fit, 2, needs_stats=True, planned=_planned, check=_check, grids=_grids))
