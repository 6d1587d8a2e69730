"""Byte layouts of codes and scales in other tools' files and kernels, one file per family, discovered here.

The plain side has dq's shapes: codes of a weight [N, K], zero points and scales [N, K/g]; leading axes are batches. The
stored side has the tool's own. Words and bytes are little-endian, as safetensors demands.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from dq.registry import DQError, Registry


@dataclass(frozen=True)
class Packing:
    """One layout; `unpack(pack(codes), codes.shape)` equals `codes` for every size, odd and empty ones included.

    Attributes:
        name: registry key, e.g. `gptq-int4`.
        bits: bits of one code; 8 for layouts of one-byte scales.
        pack: `(codes) -> stored`, any integer dtype with values in [first, first + 2^bits - 1]. Layouts of scales take
            any one-byte dtype and keep it. Raises DQError for a value outside, a float tensor or too few axes.
        unpack: `(stored, shape) -> codes`, contiguous; uint8 if `first` is 0, int8 if negative, int16 otherwise.
            Raises DQError if `stored` has not the dtype and shape that `pack` gives for `shape`.
        description: dtype and shape of the stored tensor, and the place of each code.
        source: which tool or document defines it.
        first: smallest code.
    """

    name: str
    bits: int
    pack: Callable[[Tensor], Tensor]
    unpack: Callable[[Tensor, Sequence[int]], Tensor]
    description: str
    source: str
    first: int = 0


PACKINGS: Registry[Packing] = Registry("packing", "dq.packing")


def to_unsigned(codes: Tensor, bits: int, first: int = 0, axes: int = 1) -> Tensor:
    """`codes - first` as uint8. Raises DQError as `Packing.pack` says: a wrong code would spill into its neighbours."""
    if codes.dim() < axes:
        raise DQError(f"this layout needs codes with at least {axes} axes, got shape {list(codes.shape)}")
    if codes.is_floating_point():
        raise DQError(f"pack takes integer codes, got {codes.dtype}; encode the values first")
    if codes.numel():
        low, high = (int(v) for v in codes.aminmax())
        if low < first or high >= first + 2**bits:
            raise DQError(f"this layout holds codes from {first} to {first + 2**bits - 1}, got {low} to {high}")
    return codes.to(torch.uint8) + (-first) % 256  # uint8 wraps around, so this is exact for every first


def from_unsigned(codes: Tensor, first: int) -> Tensor:
    """The inverse of `to_unsigned`, in the dtype that `Packing.unpack` promises."""
    if first > 0:
        return codes.to(torch.int16) + first
    return (codes + first % 256).view(torch.int8) if first else codes


def expect(stored: Tensor, dtype: torch.dtype, shape: Sequence[int]) -> None:
    """Raises DQError unless `stored` has this dtype and shape."""
    if stored.dtype != dtype or list(stored.shape) != list(shape):
        got = f"{stored.dtype} {list(stored.shape)}"
        raise DQError(
            f"packed tensor must be {dtype} {list(shape)}, got {got}; check the layout and the unpacked shape"
        )
