"""Layouts of nunchaku and nunchaku_lite: values in the order in which lanes of a tensor core read their tile.

A row n and a column k are taken apart, most significant part first; the stored order names the parts.

    4-bit weight   n = (N/128, p 8, h 2, l 8)   k = (K/64, q 2, c 4, r 8)
                   stored N/128, K/64, p, l, c, h, q, r, low nibble first: int8 [N, K / 2]
    group scales   n = (N/128, a 8, b 2, c 4, d 2)
                   stored N/128, g, a, c, b, d, as [G, N]; vectors alike
    micro scales   n = (N/128, s 4, c 4, l 8)   g = (G/4, j 4)
                   stored N/128, G/4, l, c, s, j, as [G, N]
    low rank       n = (N/16, h 2, l 8)   k = (K/16, q 2, c 4, r 2)
                   stored N/16, K/16, l, c, h, q, r; of a down factor [R, K] n is the rank, and K/16 comes before R/16
    AWQ weight     n = (N/4, i 4)   k = (K/64, t 2, j 4, c 8)
                   stored N/4, K/64, i, t, c, j: int32 [N / 4, K / 2]

Source: the weight packers of deepcompressor (nunchaku, tinychat backends) as nunchaku ships them.
"""

from collections.abc import Sequence
from functools import partial
from math import prod

import torch
from torch import Tensor
from torch.nn.functional import pad

from dq.packing import PACKINGS, Packing, expect, from_unsigned, to_unsigned
from dq.packing.dense import pack_stream, unpack_stream
from dq.packing.swizzle import scale_bytes

_WEIGHT = ((8, 2, 8), (2, 4, 8), "N K 0 2 4 1 3 5")  # parts of n and k below their tiles; the order stored
_SCALE = ((8, 2, 4, 2), (), "N K 0 2 1 3")
_MICRO = ((4, 4, 8), (4,), "N K 2 1 0 3")
_LOWRANK = ((2, 8), (2, 4, 2), "N K 1 3 0 2 4")
_AWQ = ((4,), (2, 4, 8), "N K 0 1 3 2")


def _axes(form) -> tuple[tuple[int, ...], list[int]]:
    """Sizes of the parts below both tiles, and where each stored part lies in (N/tile, n parts, K/tile, k parts)."""
    rows, cols, order = form
    places = {"N": 0, "K": len(rows) + 1}
    places |= {str(i): i + 1 if i < len(rows) else i + 2 for i in range(len(rows) + len(cols))}
    return (*rows, *cols), [places[x] for x in order.split()]


def arrange(x: Tensor, form, swap: bool = False) -> Tensor:
    """[..., N, K] of whole tiles -> flat [..., N * K] in the stored order; `swap` exchanges the order of the tiles."""
    rows, cols, _ = form
    _, order = _axes(form)
    order = [order[1], order[0], *order[2:]] if swap else order
    count, lead = len(order), x.dim() - 2
    x = x.unflatten(-1, (-1, *cols)).unflatten(lead, (-1, *rows))
    return x.permute(*range(lead), *(lead + i for i in order)).reshape(*x.shape[:lead], -1) if count else x


def restore(flat: Tensor, form, shape: Sequence[int], swap: bool = False) -> Tensor:
    """The inverse of `arrange`; `shape` [..., N, K] of whole tiles."""
    rows, cols, _ = form
    *lead, n, k = shape
    sizes = [n // prod(rows), *rows, k // prod(cols), *cols]
    _, order = _axes(form)
    order = [order[1], order[0], *order[2:]] if swap else order
    back = sorted(range(len(order)), key=order.__getitem__)
    x = flat.reshape(*lead, *(sizes[i] for i in order))
    return x.permute(*range(len(lead)), *(len(lead) + i for i in back)).reshape(*lead, n, k)


def _padded(shape: Sequence[int], form) -> list[int]:
    rows, cols, _ = form
    return [*shape[:-2], shape[-2] + -shape[-2] % prod(rows), shape[-1] + -shape[-1] % prod(cols)]


def _pad(x: Tensor, form) -> Tensor:
    *_, n, k = _padded(x.shape, form)
    return pad(x, (0, k - x.shape[-1], 0, n - x.shape[-2]))


def pack_weight(codes: Tensor, first: int = 0) -> Tensor:
    """Codes of 4 bits [..., N, K] -> int8 [..., up(N, 128), up(K, 64) / 2]; negative ones in two's complement."""
    codes = _pad(to_unsigned(codes, 4, first, axes=2) ^ (8 if first else 0), _WEIGHT)
    stored = pack_stream(arrange(codes, _WEIGHT), 4)
    return stored.reshape(*codes.shape[:-1], codes.shape[-1] // 2).view(torch.int8)


def unpack_weight(stored: Tensor, shape: Sequence[int], first: int = 0) -> Tensor:
    """The inverse of `pack_weight`."""
    whole = _padded(shape, _WEIGHT)
    expect(stored, torch.int8, [*whole[:-1], whole[-1] // 2])
    flat = stored.contiguous().view(torch.uint8).reshape(*whole[:-2], -1)
    codes = restore(unpack_stream(flat, 4, flat.shape[-1] * 2), _WEIGHT, whole)
    return from_unsigned((codes ^ (8 if first else 0))[..., : shape[-2], : shape[-1]].contiguous(), first)


def pack_micro_scale(scale: Tensor) -> Tensor:
    """One-byte scales [..., N, G] -> [..., up(G, 4), up(N, 128)], same dtype."""
    whole = _pad(scale_bytes(scale), _MICRO)
    flat = arrange(whole, _MICRO)
    return flat.reshape(*whole.shape[:-2], whole.shape[-1], whole.shape[-2]).view(scale.dtype).contiguous()


def unpack_micro_scale(stored: Tensor, shape: Sequence[int]) -> Tensor:
    """The inverse of `pack_micro_scale`."""
    whole = _padded(shape, _MICRO)
    expect(stored, stored.dtype, [*whole[:-2], whole[-1], whole[-2]])
    flat = scale_bytes(stored).reshape(*whole[:-2], -1)
    scale = restore(flat, _MICRO, whole)[..., : shape[-2], : shape[-1]]
    return scale.contiguous().view(stored.dtype)


def pack_scale(scale: Tensor) -> Tensor:
    """Scales [N, G] of any dtype -> [G, N]; N a multiple of 128."""
    return arrange(scale, _SCALE).reshape(scale.shape[1], scale.shape[0])


def unpack_scale(stored: Tensor) -> Tensor:
    """The inverse of `pack_scale`."""
    return restore(stored.reshape(-1), _SCALE, (stored.shape[1], stored.shape[0]))


def pack_vector(vector: Tensor) -> Tensor:
    """Biases [N] or smoothing factors [K] of any dtype -> the same shape; a multiple of 128."""
    return pack_scale(vector[:, None])[0]


def unpack_vector(stored: Tensor) -> Tensor:
    """The inverse of `pack_vector`."""
    return unpack_scale(stored[None])[:, 0]


def pack_lowrank(factor: Tensor, down: bool) -> Tensor:
    """Down factor [R, K] -> [K, R], up factor [N, R] -> [N, R]; all multiples of 16."""
    flat = arrange(factor, _LOWRANK, swap=down)
    return flat.reshape(factor.shape[1], factor.shape[0]) if down else flat.reshape(factor.shape)


def unpack_lowrank(stored: Tensor, down: bool) -> Tensor:
    """The inverse of `pack_lowrank`."""
    shape = (stored.shape[1], stored.shape[0]) if down else tuple(stored.shape)
    return restore(stored.reshape(-1), _LOWRANK, shape, swap=down)


def pack_awq(codes: Tensor) -> Tensor:
    """Codes 0..15 [..., N, K] -> int32 [..., up(N, 4) / 4, up(K, 64) / 2]."""
    codes = _pad(to_unsigned(codes, 4, axes=2), _AWQ)
    stored = pack_stream(arrange(codes, _AWQ), 4)
    return stored.view(torch.int32).reshape(*codes.shape[:-2], codes.shape[-2] // 4, codes.shape[-1] // 2)


def unpack_awq(stored: Tensor, shape: Sequence[int]) -> Tensor:
    """The inverse of `pack_awq`."""
    whole = _padded(shape, _AWQ)
    expect(stored, torch.int32, [*whole[:-2], whole[-2] // 4, whole[-1] // 2])
    flat = stored.contiguous().reshape(*whole[:-2], -1).view(torch.uint8)
    codes = restore(unpack_stream(flat, 4, flat.shape[-1] * 2), _AWQ, whole)
    return codes[..., : shape[-2], : shape[-1]].contiguous()


_SOURCE = "nunchaku, diffusers' nunchaku_lite"
for _name, _first in (("nunchaku-int4", -8), ("nunchaku-fp4", 0)):
    _text = "qweight int8 [up(N,128), up(K,64)/2], in the order of its tensor-core tiles"
    _pack, _unpack = partial(pack_weight, first=_first), partial(unpack_weight, first=_first)
    PACKINGS.register(Packing(_name, 4, _pack, _unpack, _text, _SOURCE, _first))
_TEXT = "wscales of NVFP4 [up(K/16,4), up(N,128)], in the order of its tensor-core tiles"
PACKINGS.register(Packing("nunchaku-micro-scale", 8, pack_micro_scale, unpack_micro_scale, _TEXT, _SOURCE))
_TEXT = "qweight int32 [up(N,4)/4, up(K,64)/2] of the weight-only GEMV"
PACKINGS.register(Packing("nunchaku-awq", 4, pack_awq, unpack_awq, _TEXT, _SOURCE))
