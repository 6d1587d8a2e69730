"""Shift of an input that is bounded below: `x' = x + c >= 0`, `W' = W`, `b' = b - c sum_k W_nk`.

After a GELU the smallest value is -0.17, so half of a signed grid's codes lie idle. Moved above 0, the input takes the
unsigned grid of the same width: INT4 codes 0..15 at scale max/15 instead of -7..7 at max/7, a third of the squared
error. A low-rank branch reads the raw x; see `dq.transforms.lowrank.absorb`. Not for float grids, whose codes are dense
around 0, and not below a rotation, which makes both signs again.
Source: SVDQuant (arXiv 2411.05007) and its reference implementation.
"""

from __future__ import annotations

import re

from torch import Tensor

from dq.spec import FORMATS, QuantSpec
from dq.transforms import TRANSFORMS, GroupState, Planned, Step, Transform

# c of activation functions, a multiple of 1/64 above their depth: ReLU 0, GELU 0.170041 (tanh form; erf 0.169971),
# SiLU 0.278465. The source's 0.2734375 for SiLU would clip.
CONSTANTS = (0.0, 0.171875, 0.28125)
ACTIVE = 0.5  # an input that never exceeds this is small, not cut off


def constant(low: float, top: float) -> float | None:
    """c for an input with smallest value `low` and largest `top`; None if no known function bounds it."""
    return next((c for c in CONSTANTS if low >= -c), None) if top > ACTIVE else None


def unsigned(spec: QuantSpec | None) -> QuantSpec | None:
    """The grid of the same width without a sign and without a zero point; None if there is none."""
    name = "" if spec is None else re.sub(r"^int(\d+)(_wide|_full)?$", r"uint\1_positive", spec.format)
    return spec.with_(format=name) if spec is not None and name != spec.format and name in FORMATS else None


def fit(state: GroupState, value: float = -1.0) -> None:
    """Moves the group's input above 0 and its activation grid to the unsigned one; for integer activations only.

    Args:
        value: c; below 0 takes it from the calibrated range: 0.171875 after a GELU, 0.28125 after a SiLU, 0 after a
            ReLU, and leaves every other input alone.

    Raises:
        DQError: without calibration, if `value` does not say c.
    """
    if value < 0:
        state.require_stats("a shift without a value")
    spec = unsigned(state.act_spec)
    if spec is None:
        return
    if value < 0:
        low, top = _range(state)
        found = constant(low, top)
        if found is None:
            return
        value = found
    state.act_spec = spec
    if value:
        state.add(Step("shift", params={"value": value}))


def _range(state: GroupState) -> tuple[float, float]:
    stats = state.stats.values()
    return min(float(s.low.min()) for s in stats), max(float(s.amax().max()) for s in stats)


def _apply(x: Tensor, tensors: dict, params: dict) -> Tensor:
    return x + params["value"]


def _same(w: Tensor, tensors: dict, params: dict) -> Tensor:
    return w


def _planned(shape: tuple[int, int], parts: tuple[int, ...], params: dict, name: str) -> Planned:
    return Planned()  # found at calibration, and no tensor of its own


def _check(params: dict) -> str:
    return "" if params.get("value", 0.0) < 16 else "value is c in x + c, below 16; below 0 finds it"


TRANSFORMS.register(Transform("shift", fit, 0, _apply, _same, _same, needs_stats=True, planned=_planned, check=_check))
