"""Profiles: the conventions in which tools differ at the edges, as data, so that the bytes of each can be reproduced.

A profile maps kinds of grids to a `Convention`; `QuantSpec.profile` names it. `dq` is this library's own and the
default. tests/interop compares the others with the installed tools byte for byte.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from dq.registry import DQError, suggest
from dq.spec import QuantSpec

_TINY, _EPS = 2.0**-126, 2.0**-23  # smallest normal float32, and the distance from 1 to the next float32


@dataclass(frozen=True)
class Convention:
    """How scales and codes are computed. The defaults are this library's.

    Attributes:
        zero: the scale of a block whose scale comes out as 0.
        low: smallest scale before it is rounded to its storage format; None takes the format's smallest.
        native: a scale is computed in the dtype of the tensor, and x / scale in the wider of that and the stored
            scale's dtype, as tensor code without an upcast does; else all in float32.
        reciprocal: elements are multiplied by `1 / scale` (with two levels `(1 / global) / scale`), not divided.
        levels: a block scale under a second level, and what an element is divided by:
            `nested`   global = amax/(6*448)   block = (amax_b/6) / global   step = block * global
            `joint`    global = amax/(6*448)   block = amax_b / (6*global)   step = block * global
            `inverse`  global = (1/amax)*6*448 block = global * (amax_b/6)   step = block / global
        mantissa: mantissa bits to which the MX mode `even` rounds a maximum; None takes the element's.
        divisor_low: elements are divided by at least this.
        signed_zero: which zeros get the code of -0 in floats under 8 bits: `never`; `negative`, what was below 0 before
            it was rounded; `signbit`, -0 itself too.
        include_zero: an asymmetric range is widened to contain 0.
        middle: the zero point of an asymmetric block of zeros is the middle of the range, (n + 1) / 2, not 0.
    """

    zero: float = 1.0
    low: float | None = None
    native: bool = False
    reciprocal: bool = False
    levels: str = "nested"
    mantissa: int | None = None
    divisor_low: float = 0.0
    signed_zero: str = "never"
    include_zero: bool = True
    middle: bool = False


def _float32(x: float, n: int) -> float:
    """x / n as float32 arithmetic gives it: what a clamp of x to a float32 limit before the division leads to."""
    return float(np.float32(x) / np.float32(n))


# Keys are "element/scale format"; the most telling one wins: "a/b", then "*/b", "a/*", "*/*".
PROFILES: dict[str, dict[str, Convention]] = {
    "dq": {
        "*/fp8_e4m3": Convention(zero=2.0**-9),
        "*/e8m0": Convention(zero=2.0**-127),
        "*/int8_double": Convention(zero=_TINY),  # 1 would pull the mean and the range of all other scales
        "*/*": Convention(),
    },
    # NVFP4QTensor of NVIDIA Model Optimizer, the dynamic path.
    "modelopt": {
        "*/fp8_e4m3": Convention(zero=1.0, levels="joint", signed_zero="negative"),
        "*/e8m0": Convention(zero=2.0**-127),
        "*/*": Convention(),
    },
    # compressed-tensors 0.20: calculate_qparams, generate_gparam, quantize. Integers are the `_full` formats, amax/7.5;
    # the scale format is the weight's dtype; MX takes the rule `even` - with E2M1's mantissa for MXFP8 too.
    "compressed-tensors": {
        "*/fp8_e4m3": Convention(zero=0.125, low=0.0, native=True, levels="inverse", signed_zero="negative"),
        "*/e8m0": Convention(zero=2.0**-127, mantissa=1, signed_zero="negative"),
        "fp6_e2m3/e8m0": Convention(zero=2.0**-127, mantissa=3, signed_zero="negative"),
        "*/bf16": Convention(zero=2.0**-7, low=0.0, native=True),
        "*/fp16": Convention(zero=2.0**-10, low=0.0, native=True),
        "*/*": Convention(zero=_EPS, low=0.0, native=True),
    },
    # torchao 0.18: nvfp4_quantize, to_mx, Float8Tensor, Int8Tensor and IntxUnpackedToInt8Tensor. Integers are the
    # `_full` formats; of the last kind the scale format is the weight's dtype, of the others float32.
    "torchao": {
        "*/fp8_e4m3": Convention(zero=2.0**-6, low=2.0**-6, reciprocal=True, signed_zero="signbit"),
        "*/e8m0": Convention(zero=2.0**-127, divisor_low=_TINY, signed_zero="signbit"),
        "fp8_e4m3/*": Convention(low=0.0, native=True),
        "fp8_e5m2/*": Convention(low=0.0, native=True),
        "int8_full/*": Convention(zero=_EPS, low=_EPS, native=True, reciprocal=True),
        "*/*": Convention(zero=_TINY, low=_TINY, native=True, reciprocal=True),
    },
    # The quantizer of the original GPTQ: asymmetric `uint`; symmetric with the zero point 2^(b-1), which is
    # `int*_full` with 2^(b-1) added to the codes. A row of zeros counts as -1..1.
    "gptq": {
        **{f"uint{b}/*": Convention(zero=_float32(2, 2**b - 1), low=0.0, middle=True) for b in (2, 3, 4, 8)},
        **{f"int{b}_full/*": Convention(zero=_float32(2, 2**b - 1), low=0.0) for b in (2, 3, 4, 8)},
        "*/*": Convention(low=0.0),
    },
    # The quantizer of the original AWQ: asymmetric `uint` over min..max as it is, symmetric `int*_wide`; ranges of at
    # least 1e-5.
    "awq": {
        **{
            f"uint{b}/*": Convention(*[_float32(1e-5, 2**b - 1)] * 2, native=True, include_zero=False)
            for b in (2, 3, 4, 8)
        },
        **{f"int{b}_wide/*": Convention(*[_float32(1e-5, 2 ** (b - 1) - 1)] * 2, native=True) for b in (2, 3, 4, 8)},
        "*/*": Convention(native=True),
    },
}


def convention(spec: QuantSpec) -> Convention:
    """The convention of a spec's profile for its kind of grid.

    Raises:
        DQError: unknown profile.
    """
    if spec.profile not in PROFILES:
        raise DQError(f"unknown profile {spec.profile!r}{suggest(spec.profile, PROFILES)}")
    rules = PROFILES[spec.profile]
    for key in (f"{spec.format}/{spec.scale_format}", f"*/{spec.scale_format}", f"{spec.format}/*"):
        if key in rules:
            return rules[key]
    return rules["*/*"]
