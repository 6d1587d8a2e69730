"""Block scales in 128x4 tiles, as block-scaled tensor cores read them (tcgen05, cuBLAS, `torch._scaled_mm`).

Scale (r, c) of [R, C] lies at byte `((r//128)*ceil(C/4) + c//4)*512 + (r%32)*16 + ((r%128)//32)*4 + c%4`. Rows are
padded to 128 and columns to 4, with zeros. Files of most tools hold scales linear; they are swizzled when loaded.
"""

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn.functional import pad

from dq.packing import PACKINGS, Packing, expect
from dq.registry import DQError


def scale_bytes(scale: Tensor) -> Tensor:
    """One-byte scales as uint8. Raises DQError for another size."""
    if scale.element_size() != 1:
        raise DQError(f"packed scales have one byte each (E4M3, E8M0 or uint8), got {scale.dtype}")
    return scale.contiguous().view(torch.uint8)  # torch pads and permutes not every float8 dtype


def swizzle(scale: Tensor) -> Tensor:
    """One-byte scales [..., R, C] -> [..., ceil(R/128) * ceil(C/4) * 512], same dtype; errors as in `Packing.pack`."""
    if scale.dim() < 2:
        raise DQError(f"scales must be [..., R, C] to be swizzled, got shape {list(scale.shape)}")
    rows, cols = scale.shape[-2:]
    tiles = pad(scale_bytes(scale), (0, -cols % 4, 0, -rows % 128))
    tiles = tiles.unflatten(-1, (-(-cols // 4), 4)).unflatten(-3, (-(-rows // 128), 4, 32))
    # [r//128, r%128//32, r%32, c//4, c%4] -> [r//128, c//4, r%32, r%128//32, c%4]
    return tiles.movedim((-2, -3, -4), (-4, -3, -2)).flatten(-5).view(scale.dtype)


def unswizzle(stored: Tensor, shape: Sequence[int]) -> Tensor:
    """The inverse of `swizzle`, [..., R, C] = `shape`; errors as in `Packing.unpack`."""
    *lead, rows, cols = shape
    down, across = -(-rows // 128), -(-cols // 4)
    expect(stored, stored.dtype, [*lead, down * across * 512])
    tiles = scale_bytes(stored).reshape(*lead, down, across, 32, 4, 4)
    linear = tiles.movedim((-4, -3, -2), (-2, -3, -4)).reshape(*lead, down * 128, across * 4)
    return linear[..., :rows, :cols].contiguous().view(stored.dtype)


_TEXT = "one byte per scale, flat: tiles of 128 rows x 4 columns, padded with zeros"
PACKINGS.register(Packing("swizzle-128x4", 8, swizzle, unswizzle, _TEXT, "cuBLAS, block scaling factors layout"))
