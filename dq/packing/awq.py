"""AWQ's GEMM layout: eight output channels per int32, interleaved."""

from collections.abc import Sequence

from torch import Tensor
from torch.nn.functional import pad

from dq.packing import PACKINGS, Packing, to_unsigned
from dq.packing.dense import pack_words, unpack_words

_ORDER, _INVERSE = [0, 2, 4, 6, 1, 3, 5, 7], [0, 4, 1, 5, 2, 6, 3, 7]  # of the rows in each run of eight


def _permute(codes: Tensor, order: list[int]) -> Tensor:
    return codes.unflatten(-2, (codes.shape[-2] // 8, 8))[..., order, :].flatten(-3, -2)


def pack_awq(codes: Tensor) -> Tensor:
    """Codes 0..15 [..., N, K] -> int32 [..., K, ceil(N/8)]: nibble i of word j is channel 8j + [0,2,4,6,1,3,5,7][i]."""
    codes = to_unsigned(codes, 4, axes=2)
    return pack_words(_permute(pad(codes, (0, 0, 0, -codes.shape[-2] % 8)), _ORDER), 4, before=True)


def unpack_awq(stored: Tensor, shape: Sequence[int]) -> Tensor:
    """The inverse of `pack_awq`."""
    *lead, rows, width = shape
    codes = unpack_words(stored, [*lead, rows + -rows % 8, width], 4, before=True)
    return _permute(codes, _INVERSE)[..., :rows, :].contiguous()


_TEXT = "qweight int32 [K, ceil(N/8)], qzeros [K/g, ceil(N/8)]: nibble i of word j is channel 8j + [0,2,4,6,1,3,5,7][i]"
PACKINGS.register(Packing("awq-int4", 4, pack_awq, unpack_awq, _TEXT, "AutoAWQ, version gemm"))
