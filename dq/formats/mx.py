"""The MX formats: blocks of 32 along K with a shared power of two (E8M0). Source: OCP Microscaling Formats 1.0.

MXFP8 (E4M3 or E5M2), MXFP6 (E3M2 or E2M3), MXFP4 (E2M1), MXINT8 (two's complement with an implied 2^-6). The exponent
mode is the scale rule: `floor` is the standard's, `mxfp4@rceil`, `@even`, `@ceil`, `@best2` are the others.
"""

import torch
from torch import Tensor

from dq.spec import FORMATS, SPECS, Format, NamedSpec, QuantSpec


def _encode(x: Tensor) -> Tensor:
    return torch.round(x * 64.0).clamp_(-127, 127).to(torch.int8)


def _decode(codes: Tensor) -> Tensor:
    return codes.to(torch.float32) / 64.0


def _round(x: Tensor) -> Tensor:
    return torch.round(x * 64.0).clamp_(-127, 127) / 64.0


_TOP = 127 / 64
FORMATS.register(Format("mxint8_element", 8, _TOP, -_TOP, torch.int8, _encode, _decode, _round, exponent=0))

for _name, _element in (
    ("mxfp8", "fp8_e4m3"),
    ("mxfp8-e5m2", "fp8_e5m2"),
    ("mxfp6", "fp6_e3m2"),
    ("mxfp6-e2m3", "fp6_e2m3"),
    ("mxfp4", "fp4_e2m1"),
    ("mxint8", "mxint8_element"),
):
    SPECS.register(NamedSpec(_name, QuantSpec(_element, "group", 32, scale_format="e8m0", scale_rule="floor")))
