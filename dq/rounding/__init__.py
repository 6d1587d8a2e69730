"""Roundings: one function each, `(weight, spec, *, x, amax, name) -> QTensor`, in files discovered here.

`weight` is W' [N, K] in the basis of the transformed input, `x` a sample [n, K] of that input or None, `amax` the
largest |W'| over linears that must share a second-level scale.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from dq.qtensor import QTensor
from dq.registry import Registry


@dataclass(frozen=True)
class Rounding:
    """A named way from real weights to codes."""

    name: str
    round: Callable[..., QTensor]
    needs_stats: bool = False


ROUNDINGS: Registry[Rounding] = Registry("rounding", "dq.rounding")
