"""Dense bit streams: code i of a row is its bits [i*b, (i+1)*b), lowest first, in bytes or int32, padded with zeros."""

from collections.abc import Sequence
from functools import partial

import torch
from torch import Tensor
from torch.nn.functional import pad

from dq.packing import PACKINGS, Packing, expect, from_unsigned, to_unsigned


def _join(places: Tensor, bits: int, count: int) -> Tensor:
    """uint8 [..., n*count] -> int64 [..., n]: place i of each run of `count` is worth 2^(bits*i)."""
    return sum(places[..., i::count].to(torch.int64) << (bits * i) for i in range(count))


def _split(words: Tensor, bits: int, count: int) -> Tensor:
    """Integers [..., n] -> uint8 [..., n*count], the inverse of `_join`."""
    places = [((words >> (bits * i)) & ((1 << bits) - 1)).to(torch.uint8) for i in range(count)]
    return torch.stack(places, dim=-1).flatten(-2)


def pack_stream(codes: Tensor, bits: int) -> Tensor:
    """uint8 codes [..., K] below 2^bits -> uint8 [..., ceil(K*bits/8)]; eight codes fill exactly `bits` bytes."""
    width = codes.shape[-1]
    stream = _split(_join(pad(codes, (0, -width % 8)), bits, 8), 8, bits)
    return stream[..., : -(-width * bits // 8)].contiguous()


def unpack_stream(stream: Tensor, bits: int, width: int) -> Tensor:
    """uint8 [..., at least ceil(width*bits/8)] -> uint8 codes [..., width]; the inverse of `pack_stream`."""
    size = -(-width * bits // 8)
    codes = _split(_join(pad(stream[..., :size], (0, -size % bits)), 8, bits), bits, 8)
    return codes[..., :width].contiguous()


def pack_bytes(codes: Tensor, bits: int) -> Tensor:
    """Codes [..., K] -> uint8 [..., ceil(K*bits/8)]; errors as in `Packing.pack`."""
    return pack_stream(to_unsigned(codes, bits), bits)


def unpack_bytes(stored: Tensor, shape: Sequence[int], bits: int) -> Tensor:
    """The inverse of `pack_bytes`; errors as in `Packing.unpack`."""
    expect(stored, torch.uint8, [*shape[:-1], -(-shape[-1] * bits // 8)])
    return unpack_stream(stored, bits, shape[-1])


def pack_words(codes: Tensor, bits: int, first: int = 0, before: bool = False, after: bool = False) -> Tensor:
    """Codes [..., N, K] -> int32 [..., N, ceil(K*bits/32)]; errors as in `Packing.pack`.

    `before` transposes the codes first, so that words run along N; `after` transposes the words.
    """
    codes = to_unsigned(codes, bits, first, axes=2)
    stream = pack_stream(codes.mT if before else codes, bits)
    words = _join(pad(stream, (0, -stream.shape[-1] % 4)), 8, 4).to(torch.int32)  # wraps: bit 31 is the sign
    return (words.mT if after else words).contiguous()


def unpack_words(
    stored: Tensor, shape: Sequence[int], bits: int, first: int = 0, before: bool = False, after: bool = False
) -> Tensor:
    """The inverse of `pack_words`; errors as in `Packing.unpack`."""
    *lead, rows, width = (*shape[:-2], shape[-1], shape[-2]) if before else shape
    words = -(-width * bits // 32)
    expect(stored, torch.int32, [*lead, words, rows] if after else [*lead, rows, words])
    codes = from_unsigned(unpack_stream(_split(stored.mT if after else stored, 8, 4), bits, width), first)
    return codes.mT.contiguous() if before else codes


def word_packing(name: str, description: str, source: str, bits: int, first: int = 0, **transpose: bool) -> Packing:
    """`pack_words` and `unpack_words` with these arguments as a `Packing`."""
    pack = partial(pack_words, bits=bits, first=first, **transpose)
    unpack = partial(unpack_words, bits=bits, first=first, **transpose)
    return Packing(name, bits, pack, unpack, description, source, first)


for _name, _b, _what, _source in (
    ("bytes-2", 2, "four codes in a byte, lowest bits first", "dq; no other tool fixes an order"),
    ("bytes-6", 6, "four codes in three bytes, lowest bits first", "dq, for MXFP6; torchao stores a byte per code"),
    ("nibble-low", 4, "element 2i in the LOW nibble", "NVFP4 and MXFP4 of modelopt, compressed-tensors, torchao"),
):
    _pack, _unpack = partial(pack_bytes, bits=_b), partial(unpack_bytes, bits=_b)
    PACKINGS.register(Packing(_name, _b, _pack, _unpack, f"uint8 [..., ceil(K*{_b}/8)]: {_what}", _source))

_SOURCE = "compressed-tensors, format pack-quantized"
for _b in range(2, 9):
    _first = -(1 << (_b - 1))
    _text = f"weight_packed int32 [N, ceil(K*{_b}/32)]: code + {-_first}, dense along K, lowest bits first"
    PACKINGS.register(word_packing(f"ct-int{_b}", _text, _SOURCE, _b, _first))
    _text = f"weight_zero_point int32 [ceil(N*{_b}/32), K/g]: zero point + {-_first}, dense along N"
    PACKINGS.register(word_packing(f"ct-int{_b}-zeros", _text, _SOURCE, _b, _first, before=True, after=True))
