"""NF4: 16 quantiles of a normal distribution, blocks of 64 scaled by absmax, scales optionally quantized again.

Source: QLoRA (arXiv 2305.14314); the codebook is that of bitsandbytes. Double quantization here is linear INT8 in
blocks of 256 scales around their mean: 8/64 + 32/(64*256) = 0.127 bits per value instead of 0.5.
"""

import torch
from torch import Tensor

from dq.spec import FORMATS, SPECS, Format, NamedSpec, QuantSpec

CODEBOOK = (
    -1.0,
    -0.6961928009986877,
    -0.5250730514526367,
    -0.39491748809814453,
    -0.28444138169288635,
    -0.18477343022823334,
    -0.09105003625154495,
    0.0,
    0.07958029955625534,
    0.16093020141124725,
    0.24611230194568634,
    0.33791524171829224,
    0.44070982933044434,
    0.5626170039176941,
    0.7229568362236023,
    1.0,
)
_TABLE = torch.tensor(CODEBOOK, dtype=torch.float32)
_BOUNDS = (_TABLE[1:] + _TABLE[:-1]) / 2


def _encode(x: Tensor) -> Tensor:
    """Index of the nearest codebook entry; exactly between two, the lower one."""
    return torch.bucketize(torch.nan_to_num(x, nan=0.0).contiguous(), _BOUNDS.to(x.device)).to(torch.uint8)


def _decode(codes: Tensor) -> Tensor:
    return _TABLE.to(codes.device)[codes.to(torch.int64) & 0xF]


def _round(x: Tensor) -> Tensor:
    return torch.where(torch.isnan(x), x, _decode(_encode(x)))


FORMATS.register(Format("nf4_element", 4, 1.0, -1.0, torch.uint8, _encode, _decode, _round, CODEBOOK))
SPECS.register(NamedSpec("nf4", QuantSpec("nf4_element", "group", 64)))
SPECS.register(NamedSpec("nf4-double", QuantSpec("nf4_element", "group", 64, scale_format="int8_double")))
