"""Small floats: FP8 E4M3FN and E5M2, FP6 E3M2 and E2M3, FP4 E2M1; NVFP4 and DeepSeek's FP8 built from them.

Generic codec: e = max(floor(log2 |x|), 1 - bias), step = 2^(e - mantissa bits), y = min(rne(|x| / step) * step, max).
Source: OCP OFP8 and OCP MX 1.0 for the element grids; NVIDIA's NVFP4 (E2M1, blocks of 16, E4M3 block scale, FP32 second
level amax/(6*448)); DeepSeek-V3 for 1x128 activations with 128x128 weights.
"""

import math

import torch
from torch import Tensor

from dq.constants import constant, look_up
from dq.spec import FORMATS, SPECS, Format, NamedSpec, QuantSpec


def _caster(dtype: torch.dtype, top: float):
    def encode(x: Tensor) -> Tensor:
        # Clamp first: the cast to E4M3 saturates only since torch 2.13; before that 465 became NaN, and E5M2 gives Inf.
        return x.clamp(-top, top).to(dtype)

    return encode


_WIDE: dict[torch.dtype, Tensor] = {}


def _values(dtype: torch.dtype) -> Tensor:
    """float32 [256] of all bytes of a dtype."""
    if dtype not in _WIDE:
        _WIDE[dtype] = torch.arange(256, dtype=torch.uint8).view(dtype).to(torch.float32)
    return _WIDE[dtype]


def _widen(codes: Tensor) -> Tensor:
    if codes.device.type != "cpu":
        return codes.to(torch.float32)
    # PyTorch's own conversion on a CPU takes three times as long.
    return look_up(constant(lambda: _values(codes.dtype), codes), codes.view(torch.uint8))


def grid(exponent_bits: int, mantissa_bits: int) -> tuple[float, ...]:
    """The non-negative values of a float grid without specials, in code order."""
    bias, values = 2 ** (exponent_bits - 1) - 1, []
    for code in range(2 ** (exponent_bits + mantissa_bits)):
        e, m = code >> mantissa_bits, code & (2**mantissa_bits - 1)
        fraction = m / 2**mantissa_bits
        values.append(fraction * 2.0 ** (1 - bias) if e == 0 else (1 + fraction) * 2.0 ** (e - bias))
    return tuple(values)


class _Binades:
    """Rounding to a float grid by one addition, on the bits of float32.

    The step of a value in binade e is 2^s, s = e - mantissa bits. `x + 1.5 * 2^(23 + s)` has no bits below 2^s: the sum
    itself rounds half to even, and its mantissa counts steps. What rounds up lands on the next binade, so the step of
    |x| itself is right at the seams too.
    """

    def __init__(self, low_exponent: int, mantissa_bits: int, top: float, bits: int):
        self.floor, self.top = (low_exponent + 127) << 23, top
        self.lift = ((23 - mantissa_bits) << 23) + (1 << 22)
        self.shift, self.sign = 23 - mantissa_bits, 1 << (bits - 1)

    def _magic(self, x: Tensor) -> Tensor:
        return (x.view(torch.int32) & 0x7F800000).clamp_(min=self.floor).add_(self.lift)

    def round(self, x: Tensor) -> Tensor:
        """Nearest value, ties to the even code, saturating; NaN stays, -0 becomes 0."""
        x = x.clamp(-self.top, self.top)
        magic = self._magic(x).view(torch.float32)
        return x.add_(magic).sub_(magic)

    def encode(self, x: Tensor) -> Tensor:
        """Codes: steps within the binade, plus the steps below it; the sign is the top bit, -0 and NaN become 0."""
        x = torch.nan_to_num(x, nan=0.0).clamp_(-self.top, self.top)
        magic = self._magic(x)
        steps = x.add_(magic.view(torch.float32)).view(torch.int32).sub_(magic)
        sign = (steps >> 31).bitwise_and_(self.sign)
        below = magic.sub_(self.floor + self.lift).bitwise_right_shift_(self.shift)
        return steps.abs_().add_(below).bitwise_or_(sign).to(torch.uint8)


def _decoder(values: tuple[float, ...], bits: int):
    table = torch.tensor(values + tuple(-v for v in values), dtype=torch.float32)

    def decode(codes: Tensor) -> Tensor:
        return look_up(table.to(codes.device), codes.to(torch.int32) & (2**bits - 1))

    return decode


def _register(name: str, exponent_bits: int, mantissa_bits: int) -> None:
    values, bits = grid(exponent_bits, mantissa_bits), 1 + exponent_bits + mantissa_bits
    binades = _Binades(2 - 2 ** (exponent_bits - 1), mantissa_bits, values[-1], bits)
    table = values + tuple(-v for v in values) if bits == 4 else None
    codec = (binades.encode, _decoder(values, bits), binades.round)
    exponent = math.frexp(values[-1])[1] - 1
    FORMATS.register(Format(name, bits, values[-1], -values[-1], torch.uint8, *codec, table, exponent=exponent))


for _name, _dtype, _top, _mantissa, _low in (
    ("fp8_e4m3", torch.float8_e4m3fn, 448.0, 3, -6),
    ("fp8_e5m2", torch.float8_e5m2, 57344.0, 2, -14),
):
    _codec = (_caster(_dtype, _top), _widen, _Binades(_low, _mantissa, _top, 8).round)
    FORMATS.register(Format(_name, 8, _top, -_top, _dtype, *_codec, exponent=math.frexp(_top)[1] - 1))
_register("fp6_e3m2", 3, 2)
_register("fp6_e2m3", 2, 3)
_register("fp4_e2m1", 2, 1)
E2M1 = grid(2, 1)

_NVFP4 = QuantSpec("fp4_e2m1", "group", 16, scale_format="fp8_e4m3", global_scale="tensor")
SPECS.register(NamedSpec("nvfp4", _NVFP4))
SPECS.register(NamedSpec("nvfp4-token", _NVFP4.with_(global_scale="token", dynamic=True)))
SPECS.register(NamedSpec("nvfp4-single", _NVFP4.with_(global_scale=None)))
SPECS.register(NamedSpec("fp8-block", QuantSpec("fp8_e4m3", "block", block_size=(128, 128))))
SPECS.register(NamedSpec("fp8-block-token", QuantSpec("fp8_e4m3", "group", 128, dynamic=True)))
