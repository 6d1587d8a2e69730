"""Profiles: the choices in which tools differ at the edges, so that the bytes of each can be reproduced.

A profile changes what is stored for a block of zeros, how small a scale may get, and whether elements are divided by
their scale or multiplied by its reciprocal. `dq` is this library's own and the default.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from dq.registry import DQError, suggest


@dataclass(frozen=True)
class Profile:
    """One tool's conventions.

    Attributes:
        zero: scale format -> scale of a block of zeros, before it is clamped to `low`.
        low: scale format -> smallest scale.
        reciprocal: multiply by `1 / step` instead of dividing by the step.
        source: where it was read.
    """

    name: str
    zero: dict[str, float] = field(default_factory=dict)
    low: dict[str, float] = field(default_factory=dict)
    reciprocal: bool = False
    source: str = ""


PROFILES = {
    p.name: p
    for p in (
        Profile("dq", {"fp8_e4m3": 2.0**-9, "e8m0": 2.0**-127}, source="this library"),
        Profile("modelopt", {"fp8_e4m3": 1.0, "e8m0": 2.0**-127}, source="NVIDIA Model Optimizer, NVFP4QTensor"),
        Profile(
            "torchao",
            {"fp8_e4m3": 2.0**-6, "e8m0": 2.0**-127},
            {"fp8_e4m3": 2.0**-6},
            reciprocal=True,
            source="torchao, nvfp4_quantize",
        ),
        Profile("compressed-tensors", {"fp8_e4m3": 0.125, "e8m0": 2.0**-127}, source="compressed-tensors"),
    )
}


def find_profile(name: str) -> Profile:
    """The profile of that name.

    Raises:
        DQError: unknown.
    """
    if name not in PROFILES:
        raise DQError(f"unknown profile {name!r}{suggest(name, PROFILES)}")
    return PROFILES[name]
