"""Small floats: FP8 E4M3FN and FP4 E2M1, and NVFP4, the block format built from them.

Source: OCP OFP8 and OCP MX 1.0 for the element grids; NVIDIA's NVFP4 (E2M1, blocks of 16, E4M3 block scale, FP32 second
level amax/(6*448)).
"""

import torch
from torch import Tensor

from dq.spec import FORMATS, SPECS, Format, NamedSpec, QuantSpec

E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
_MAGNITUDE_CODE = torch.tensor([0, 1, 2, 3, 4, -1, 5, -1, 6, -1, -1, -1, 7], dtype=torch.uint8)  # index: 2*|value|


def _encode_e4m3(x: Tensor) -> Tensor:
    # Clamp first: the cast saturates only since torch 2.13; before that 465 became NaN.
    return x.clamp(-448.0, 448.0).to(torch.float8_e4m3fn)


def _decode_e4m3(codes: Tensor) -> Tensor:
    return codes.to(torch.float32)


def round_e2m1(x: Tensor) -> Tensor:
    """Nearest E2M1 value, ties to the even code, saturating at 6. NaN stays NaN.

    Steps are .5 below 2, 1 below 4, 2 above. Rounding at the step of |x| itself is right at the seams too: a value that
    rounds up lands on the first number of the next binade.
    """
    a = x.abs().clamp_(max=6.0)
    step = (a >= 2.0).to(a.dtype).add_(a >= 4.0, alpha=2).add_(1.0).mul_(0.5)
    return a.div_(step).round_().mul_(step).copysign_(x)


def _encode_e2m1(x: Tensor) -> Tensor:
    value = round_e2m1(torch.nan_to_num(x, nan=0.0))
    magnitude = _MAGNITUDE_CODE.to(x.device)[(value.abs() * 2).to(torch.int64)]
    return magnitude | ((value < 0).to(torch.uint8) << 3)  # -0 becomes code 0, so bytes are deterministic


def _decode_e2m1(codes: Tensor) -> Tensor:
    table = torch.tensor(_E2M1_TABLE, dtype=torch.float32, device=codes.device)
    return table[codes.to(torch.int64)]


def _round_e4m3(x: Tensor) -> Tensor:
    return _encode_e4m3(x).to(torch.float32)


_E2M1_TABLE = E2M1 + tuple(-v for v in E2M1)
FORMATS.register(Format("fp8_e4m3", 8, 448.0, -448.0, torch.float8_e4m3fn, _encode_e4m3, _decode_e4m3, _round_e4m3))
FORMATS.register(Format("fp4_e2m1", 4, 6.0, -6.0, torch.uint8, _encode_e2m1, _decode_e2m1, round_e2m1, _E2M1_TABLE))

_NVFP4 = QuantSpec("fp4_e2m1", "group", 16, scale_format="fp8_e4m3", global_scale="tensor")
SPECS.register(NamedSpec("nvfp4", _NVFP4))
SPECS.register(NamedSpec("nvfp4-token", _NVFP4.with_(global_scale="token", dynamic=True)))
SPECS.register(NamedSpec("nvfp4-single", _NVFP4.with_(global_scale=None)))
