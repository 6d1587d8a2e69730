"""ComfyUI's NVFP4 file: high nibble first, weights padded to 16x16, block scales swizzled and kept two-dimensional."""

from collections.abc import Sequence

from torch import Tensor
from torch.nn.functional import pad

from dq.packing import PACKINGS, Packing, expect, to_unsigned
from dq.packing.nibbles import pack_high, unpack_high
from dq.packing.swizzle import swizzle, unswizzle


def _up(shape: Sequence[int], rows: int, cols: int) -> list[int]:
    return [*shape[:-2], shape[-2] + -shape[-2] % rows, shape[-1] + -shape[-1] % cols]


def pack_comfy(codes: Tensor) -> Tensor:
    """Codes 0..15 [..., N, K] -> uint8 [..., up(N, 16), up(K, 16)/2]: `pack_high` after padding with zeros."""
    codes = to_unsigned(codes, 4, axes=2)
    return pack_high(pad(codes, (0, -codes.shape[-1] % 16, 0, -codes.shape[-2] % 16)))


def unpack_comfy(stored: Tensor, shape: Sequence[int]) -> Tensor:
    """The inverse of `pack_comfy`."""
    return unpack_high(stored, _up(shape, 16, 16))[..., : shape[-2], : shape[-1]].contiguous()


def pack_comfy_scale(scale: Tensor) -> Tensor:
    """One-byte scales [..., N, K/16] -> [..., up(N, 128), up(K/16, 4)], same dtype: the bytes of `swizzle`."""
    return swizzle(scale).reshape(_up(scale.shape, 128, 4))


def unpack_comfy_scale(stored: Tensor, shape: Sequence[int]) -> Tensor:
    """The inverse of `pack_comfy_scale`."""
    expect(stored, stored.dtype, _up(shape, 128, 4))
    return unswizzle(stored.flatten(-2), shape)


_SOURCE = "ComfyUI and comfy-kitchen, format nvfp4"
_TEXT = "weight uint8 [up(N,16), up(K,16)/2]: element 2i in the HIGH nibble, zero padded"
PACKINGS.register(Packing("comfy-nvfp4", 4, pack_comfy, unpack_comfy, _TEXT, _SOURCE))
_TEXT = "weight_scale [up(N,128), up(K/16,4)]: the bytes of swizzle-128x4"
PACKINGS.register(Packing("comfy-nvfp4-scale", 8, pack_comfy_scale, unpack_comfy_scale, _TEXT, _SOURCE))
