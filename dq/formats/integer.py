"""Integers of 2, 3, 4 and 8 bits, in the conventions that tools use.

    int4         codes -7..7,  scale = amax / 7       restricted: SmoothQuant, SVDQuant; the default
    int4_wide    codes -8..7,  scale = amax / 7       QuaRot's activations, AWQ's INT3 example
    int4_full    codes -8..7,  scale = amax / 7.5     compressed-tensors, FP-Quant
    uint4        codes 0..15 with a zero point        asymmetric: scale = (max - min) / 15
    uint4_positive   codes 0..15, scale = max / 15    no zero point, negatives become 0: SVDQuant's shifted activations

and the same for the other widths (`_positive` for 4 and 8 bits). Codes of the signed ones rest as two's complement.
"""

import torch
from torch import Tensor

from dq.spec import FORMATS, SPECS, Format, NamedSpec, QuantSpec


def _encoder(low: int, high: int, dtype: torch.dtype):
    def encode(x: Tensor) -> Tensor:
        return torch.round(x).clamp_(low, high).to(dtype)

    return encode


def _rounder(low: int, high: int):
    def round_(x: Tensor) -> Tensor:
        return torch.round(x).clamp_(low, high)

    return round_


def _decoder(bits: int, signed: bool):
    half, mask = 2 ** (bits - 1), 2**bits - 1

    def decode(codes: Tensor) -> Tensor:
        if bits == 8:
            return codes.to(torch.float32)
        low = codes.to(torch.int32) & mask  # signed values and unsigned codes have the same low bits
        return (torch.where(low >= half, low - 2 * half, low) if signed else low).to(torch.float32)

    return decode


def _table(bits: int, signed: bool) -> tuple[float, ...] | None:
    if bits != 4:
        return None
    return tuple(map(float, [*range(8), *range(-8, 0)] if signed else range(16)))


def _register(name: str, bits: int, low: int, high: int, divisor: float, positive: bool = False) -> None:
    signed = low < 0
    dtype = torch.int8 if signed else torch.uint8
    FORMATS.register(
        Format(
            name,
            bits,
            float(high),
            float(low),
            dtype,
            _encoder(low, high, dtype),
            _decoder(bits, signed),
            _rounder(low, high),
            _table(bits, signed),
            divisor,
            positive=positive,
        )
    )


for _bits in (2, 3, 4, 8):
    _top = 2 ** (_bits - 1) - 1
    _register(f"int{_bits}", _bits, -_top, _top, _top)
    _register(f"int{_bits}_wide", _bits, -_top - 1, _top, _top)
    _register(f"int{_bits}_full", _bits, -_top - 1, _top, _top + 0.5)
    _register(f"uint{_bits}", _bits, 0, 2**_bits - 1, 2**_bits - 1)

for _bits in (4, 8):
    _register(f"uint{_bits}_positive", _bits, 0, 2**_bits - 1, 2**_bits - 1, positive=True)

# The counterpart of int4/group64/fp32 for activations that a shift has moved above 0.
SPECS.register(NamedSpec("uint4-positive-token", QuantSpec("uint4_positive", "group", 64, dynamic=True)))
