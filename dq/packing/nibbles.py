"""Two 4-bit codes per byte, in either order. A row of odd length ends in a nibble of zeros."""

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from dq.packing import PACKINGS, Packing, expect, from_unsigned, to_unsigned
from dq.packing.dense import pack_bytes, pack_stream, unpack_bytes


def pack_s4(codes: Tensor) -> Tensor:
    """Codes -8..7 [..., K] -> uint8 [..., ceil(K/2)]: two's complement, element 2i in the low nibble."""
    return pack_stream(to_unsigned(codes, 4, -8) ^ 8, 4)


def unpack_s4(stored: Tensor, shape: Sequence[int]) -> Tensor:
    """The inverse of `pack_s4`."""
    return from_unsigned(unpack_bytes(stored, shape, 4) ^ 8, -8)


def pack_high(codes: Tensor) -> Tensor:
    """Codes 0..15 [..., K] -> uint8 [..., ceil(K/2)]: element 2i in the HIGH nibble, 2i+1 in the low one."""
    low = pack_bytes(codes, 4)
    return (low << 4) | (low >> 4)


def unpack_high(stored: Tensor, shape: Sequence[int]) -> Tensor:
    """The inverse of `pack_high`."""
    expect(stored, torch.uint8, [*shape[:-1], (shape[-1] + 1) // 2])
    return unpack_bytes((stored << 4) | (stored >> 4), shape, 4)


def pack_bnb(codes: Tensor) -> Tensor:
    """Codes 0..15 of any shape -> uint8 [ceil(numel/2), 1]: `pack_high` of the flattened tensor."""
    return pack_high(codes.flatten())[:, None]


def unpack_bnb(stored: Tensor, shape: Sequence[int]) -> Tensor:
    """The inverse of `pack_bnb`."""
    expect(stored, torch.uint8, [(math.prod(shape) + 1) // 2, 1])
    return unpack_high(stored[:, 0], [math.prod(shape)]).reshape(tuple(shape))


_TEXT = "uint8 [..., ceil(K/2)]: element 2i in the LOW nibble, two's complement"
PACKINGS.register(Packing("nibble-s4", 4, pack_s4, unpack_s4, _TEXT, "CUTLASS int4b_t, QuaRot", -8))
_TEXT = "uint8 [..., ceil(K/2)]: element 2i in the HIGH nibble"
PACKINGS.register(Packing("nibble-high", 4, pack_high, unpack_high, _TEXT, "comfy-kitchen, pack_uint4"))
_TEXT = "uint8 [ceil(N*K/2), 1]: nibble-high, flattened (bitsandbytes ends an odd count with the code of 0.0, not 0)"
PACKINGS.register(Packing("bnb-nf4", 4, pack_bnb, unpack_bnb, _TEXT, "bitsandbytes, NF4 and FP4"))
