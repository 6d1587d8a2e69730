"""Small floats: FP8 E4M3FN and E5M2, FP6 E3M2 and E2M3, FP4 E2M1; NVFP4 and DeepSeek's FP8 built from them.

Generic codec: e = max(floor(log2 |x|), 1 - bias), step = 2^(e - mantissa bits), y = min(rne(|x| / step) * step, max).
Source: OCP OFP8 and OCP MX 1.0 for the element grids; NVIDIA's NVFP4 (E2M1, blocks of 16, E4M3 block scale, FP32 second
level amax/(6*448)); DeepSeek-V3 for 1x128 activations with 128x128 weights.
"""

import torch
from torch import Tensor

from dq.spec import FORMATS, SPECS, Format, NamedSpec, QuantSpec


def _caster(dtype: torch.dtype, top: float):
    def encode(x: Tensor) -> Tensor:
        # Clamp first: the cast to E4M3 saturates only since torch 2.13; before that 465 became NaN, and E5M2 gives Inf.
        return x.clamp(-top, top).to(dtype)

    return encode


def _widen(codes: Tensor) -> Tensor:
    return codes.to(torch.float32)


def _cast_rounder(dtype: torch.dtype, top: float):
    def round_(x: Tensor) -> Tensor:
        return x.clamp(-top, top).to(dtype).to(torch.float32)

    return round_


def grid(exponent_bits: int, mantissa_bits: int) -> tuple[float, ...]:
    """The non-negative values of a float grid without specials, in code order."""
    bias, values = 2 ** (exponent_bits - 1) - 1, []
    for code in range(2 ** (exponent_bits + mantissa_bits)):
        e, m = code >> mantissa_bits, code & (2**mantissa_bits - 1)
        fraction = m / 2**mantissa_bits
        values.append(fraction * 2.0 ** (1 - bias) if e == 0 else (1 + fraction) * 2.0 ** (e - bias))
    return tuple(values)


def _rounder(low_exponent: int, mantissa_bits: int, top: float):
    def round_(x: Tensor) -> Tensor:
        """Rounding at the step of |x| itself is right at the seams too: what rounds up lands on the next binade."""
        a = x.abs().clamp_(max=top)
        exponent = torch.frexp(a).exponent.sub_(1).clamp_(min=low_exponent).sub_(mantissa_bits)
        step = torch.ldexp(torch.ones_like(a), exponent)
        return a.div_(step).round_().mul_(step).copysign_(x)

    return round_


def round_e2m1(x: Tensor) -> Tensor:
    """Nearest E2M1 value, ties to the even code, saturating at 6; NaN stays. Steps: .5 below 2, 1 below 4, then 2."""
    a = x.abs().clamp_(max=6.0)
    step = (a >= 2.0).to(a.dtype).add_(a >= 4.0, alpha=2).add_(1.0).mul_(0.5)
    return a.div_(step).round_().mul_(step).copysign_(x)


def _coder(values: tuple[float, ...], round_, bits: int):
    """Codes by a look-up of |value| in units of the smallest one; the sign is the top bit, -0 becomes 0."""
    unit = values[1]
    index = torch.zeros(int(values[-1] / unit) + 1, dtype=torch.uint8)
    for code, value in enumerate(values):
        index[int(value / unit)] = code

    def encode(x: Tensor) -> Tensor:
        value = round_(torch.nan_to_num(x, nan=0.0))
        magnitude = index.to(x.device)[(value.abs() / unit).to(torch.int64)]
        return magnitude | ((value < 0).to(torch.uint8) << (bits - 1))

    return encode


def _decoder(values: tuple[float, ...], bits: int):
    table = torch.tensor(values + tuple(-v for v in values), dtype=torch.float32)

    def decode(codes: Tensor) -> Tensor:
        return table.to(codes.device)[codes.to(torch.int64) & (2**bits - 1)]

    return decode


def _register(name: str, exponent_bits: int, mantissa_bits: int, low_exponent: int, exponent: int, round_=None) -> None:
    values, bits = grid(exponent_bits, mantissa_bits), 1 + exponent_bits + mantissa_bits
    round_ = round_ or _rounder(low_exponent, mantissa_bits, values[-1])
    table = values + tuple(-v for v in values) if bits == 4 else None
    codec = (_coder(values, round_, bits), _decoder(values, bits), round_)
    FORMATS.register(Format(name, bits, values[-1], -values[-1], torch.uint8, *codec, table, exponent=exponent))


for _name, _dtype, _top, _exponent in (
    ("fp8_e4m3", torch.float8_e4m3fn, 448.0, 8),
    ("fp8_e5m2", torch.float8_e5m2, 57344.0, 15),
):
    _codec = (_caster(_dtype, _top), _widen, _cast_rounder(_dtype, _top))
    FORMATS.register(Format(_name, 8, _top, -_top, _dtype, *_codec, exponent=_exponent))
_register("fp6_e3m2", 3, 2, -2, 4)
_register("fp6_e2m3", 2, 3, 0, 2)
_register("fp4_e2m1", 2, 1, 0, 2, round_e2m1)
E2M1 = grid(2, 1)

_NVFP4 = QuantSpec("fp4_e2m1", "group", 16, scale_format="fp8_e4m3", global_scale="tensor")
SPECS.register(NamedSpec("nvfp4", _NVFP4))
SPECS.register(NamedSpec("nvfp4-token", _NVFP4.with_(global_scale="token", dynamic=True)))
SPECS.register(NamedSpec("nvfp4-single", _NVFP4.with_(global_scale=None)))
SPECS.register(NamedSpec("fp8-block", QuantSpec("fp8_e4m3", "block", block_size=(128, 128))))
SPECS.register(NamedSpec("fp8-block-token", QuantSpec("fp8_e4m3", "group", 128, dynamic=True)))
