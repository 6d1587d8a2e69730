"""What shares a scale, as one view: every strategy turns a [rows, K] tensor into blocks [R, G, E] with one scale each.

    tensor       [1, 1, rows*K]            channel, token   [rows, 1, K]
    group        [rows, K/g, g]            block            [rows/bn, K/bk, bn*bk]

Segments (fused rows, concatenated columns) cut the tensor into pieces first; each piece has blocks of its own.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise

import torch
from torch import Tensor

from dq.registry import DQError
from dq.spec import QuantSpec

Piece = tuple[slice, slice, slice, slice]


def _cuts(parts: tuple[int, ...] | None, size: int, what: str) -> list[slice]:
    if not parts:
        return [slice(0, size)]
    if sum(parts) != size:
        raise DQError(f"{what} {parts} do not add up to {size}")
    edges = [0]
    for part in parts:
        edges.append(edges[-1] + part)
    return [slice(a, b) for a, b in pairwise(edges)]


def pieces(spec: QuantSpec, rows: int, width: int) -> Iterator[Piece]:
    """(rows, columns, scale rows, scale columns) of every piece; one piece without segments.

    Raises:
        DQError: segments that do not add up to the tensor's size.
    """
    row_cuts = _cuts(spec.row_segments, rows, "row_segments")
    col_cuts = _cuts(spec.k_segments, width, "k_segments")
    scales = spec.scale_shape(rows, width)
    for i, r in enumerate(row_cuts):
        # Where rows have scales of their own, fused rows differ only in the second level.
        scale_rows = slice(i, i + 1) if spec.strategy == "tensor" else r if spec.row_segments else slice(0, scales[0])
        if spec.row_segments and spec.block_size:
            raise DQError("row_segments do not go with 2-D blocks: quantize the fused linears one by one")
        for j, c in enumerate(col_cuts):
            yield r, c, scale_rows, slice(j, j + 1) if spec.k_segments else slice(0, scales[1])


def to_blocks(x: Tensor, spec: QuantSpec) -> Tensor:
    """One piece [rows, K] -> [R, G, E], padded with zeros where a group or tile is not full."""
    if spec.strategy == "tensor":
        return x.reshape(1, 1, -1)
    if not spec.columns:
        return x[:, None, :]
    missing = -x.shape[1] % spec.columns
    tall = -x.shape[0] % spec.block_size[0] if spec.block_size else 0
    if missing or tall:
        x = torch.nn.functional.pad(x, (0, missing, 0, tall))
    if not spec.block_size:
        return x.unflatten(1, (-1, spec.group_size)) if x.shape[1] else x.reshape(len(x), 0, spec.group_size)
    high, wide = spec.block_size
    tiles = x.reshape(x.shape[0] // high, high, x.shape[1] // wide, wide)
    return tiles.transpose(1, 2).flatten(2)


def from_blocks(blocks: Tensor, spec: QuantSpec, rows: int, width: int) -> Tensor:
    """The inverse of `to_blocks`: [rows, K rounded up to whole groups]."""
    if spec.strategy == "tensor":
        return blocks.reshape(rows, width)
    if not spec.block_size:
        return blocks.flatten(1)
    high, wide = spec.block_size
    tiles = blocks.unflatten(2, (high, wide)).transpose(1, 2)
    return tiles.reshape(tiles.shape[0] * high, tiles.shape[2] * wide)[:rows]
