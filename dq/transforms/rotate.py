"""Grouped regular-Hadamard rotation: `x' = x (I kron H)`, `W' = W (I kron H)`.

`H4 = [[1,1,1,-1],[1,1,-1,1],[1,-1,1,1],[-1,1,1,1]] / 2`, `H_{4^k} = H4 kron ... kron H4`: symmetric, orthogonal, so its
own inverse, and all columns of the +-1 matrix sqrt(n) H sum to +sqrt(n), so a constant row is not gathered into one
coordinate as Sylvester's matrix does. Source: ConvRot (grouped regular Hadamard, default group 256).
"""

from __future__ import annotations

import torch
from torch import Tensor

from dq.registry import DQError
from dq.transforms import TRANSFORMS, GroupState, Step, Transform

SIZES = (256, 64, 16)
# A plain dict, not lru_cache: torch.compile ignores that wrapper and would rebuild the matrix in every call.
_MATRICES: dict[tuple[int, torch.dtype, str], Tensor] = {}


def regular_hadamard(size: int, dtype: torch.dtype = torch.float32, device: str = "cpu") -> Tensor:
    """The orthonormal regular Hadamard matrix [size, size]; size must be a power of 4.

    Raises:
        DQError: for any other size.
    """
    key = (size, dtype, device)
    if key not in _MATRICES:
        _MATRICES[key] = _build(size).to(dtype).to(device)
    return _MATRICES[key]


def _build(size: int) -> Tensor:
    h4 = torch.tensor([[1, 1, 1, -1], [1, 1, -1, 1], [1, -1, 1, 1], [-1, 1, 1, 1]], dtype=torch.float64) / 2
    h = torch.ones(1, 1, dtype=torch.float64)
    while h.shape[0] < size:
        h = torch.kron(h, h4)
    if h.shape[0] != size:
        raise DQError(f"a regular Hadamard matrix here has a power of 4 as size, got {size}")
    return h


def rotate(x: Tensor, size: int) -> Tensor:
    """Each run of `size` elements along the last axis times H; the last axis must be a multiple of `size`."""
    h = regular_hadamard(size, x.dtype, str(x.device))
    return (x.unflatten(-1, (-1, size)) @ h).flatten(-2)


def group_size(parts: tuple[int, ...], size: int = 0, name: str = "it") -> int:
    """`size`, or the largest of 256, 64, 16 that divides every part of the input (a group never straddles a seam); 0 if
    none does.

    Raises:
        DQError: if a size was asked for that does not divide the parts.
    """
    if size and any(p % size for p in parts):
        raise DQError(f"rotation size {size} does not divide the input width {parts} of {name}; 0 takes one that does")
    return size or next((n for n in SIZES if all(p % n == 0 for p in parts)), 0)


def fit(state: GroupState, size: int = 0) -> None:
    """Rotates the group; `size` 0 takes the largest that fits, and leaves the group alone if none does.

    Raises:
        DQError: if a size was asked for that does not divide K.
    """
    size = group_size(state.k_parts or (state.width,), size, next(iter(state.weights)))
    if size:
        state.add(Step("rotate", params={"size": size}))


def _apply(x: Tensor, tensors: dict, params: dict) -> Tensor:
    return rotate(x, params["size"])


def _check(params: dict) -> str:
    return (
        "" if params.get("size", 0) in (0, 4, 16, 64, 256, 1024, 4096) else "size is a power of 4, or 0 for the largest"
    )


TRANSFORMS.register(Transform("rotate", fit, order=3, apply=_apply, weight=_apply, unweight=_apply, check=_check))
