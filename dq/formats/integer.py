"""Symmetric signed integers: codes in [-qmax, qmax] with qmax = 2^(bits-1) - 1, scale = amax / qmax.

The restricted range of SmoothQuant and SVDQuant; -8 (INT4) and -128 (INT8) are decoded but never produced.
"""

import torch
from torch import Tensor

from dq.spec import FORMATS, Format


def _encoder(qmax: int):
    def encode(x: Tensor) -> Tensor:
        return torch.round(x).clamp_(-qmax, qmax).to(torch.int8)

    return encode


def _rounder(qmax: int):
    def round_(x: Tensor) -> Tensor:
        return torch.round(x).clamp_(-qmax, qmax)

    return round_


def _decode(codes: Tensor) -> Tensor:
    return codes.to(torch.float32)


def _decode_int4(codes: Tensor) -> Tensor:
    # Codes arrive as int8 values or as unsigned nibbles: both have the same low four bits.
    low = codes.to(torch.int32) & 0xF
    return torch.where(low >= 8, low - 16, low).to(torch.float32)


FORMATS.register(Format("int8", 8, 127.0, -127.0, torch.int8, _encoder(127), _decode, _rounder(127)))
_INT4_TABLE = tuple(map(float, [*range(8), *range(-8, 0)]))
FORMATS.register(Format("int4", 4, 7.0, -7.0, torch.int8, _encoder(7), _decode_int4, _rounder(7), _INT4_TABLE))
