"""Rotation by Hadamard matrices: `x' = x (I kron H)`, `W' = W (I kron H)`, H orthonormal, in groups along K.

regular: `H4 = [[1,1,1,-1],[1,1,-1,1],[1,-1,1,1],[-1,1,1,1]] / 2`, `H_{4^k} = H4 kron ... kron H4`: symmetric, so its
own inverse, and all columns of the +-1 matrix sqrt(n) H sum to +sqrt(n), so a constant row is not gathered into one
coordinate as Sylvester's matrix does. Source: ConvRot (grouped regular Hadamard, default group 256).

sylvester: Sylvester's matrix, or `H_K0 kron H_{2^m}` for sizes that are no power of two; size -1 ("full") takes the
whole width. random: the same after random signs of the input channels, `x' = x D (I kron H)`, which keeps rows of one
sign from piling up in a coordinate. Source: QuaRot (arXiv 2404.00456, section 3).
"""

from __future__ import annotations

import random
from math import gcd

import torch
from torch import Tensor

from dq.constants import constant
from dq.registry import DQError
from dq.transforms import TRANSFORMS, GroupState, Planned, Step, Transform, fake, idle_word, round_weight
from dq.transforms.hadamard import multiply, split
from dq.transforms.lowrank import sketch_factors

SIZES = (256, 64, 16)
KINDS = ("regular", "sylvester", "random", "auto")
FULL = -1
_SIGNS: dict[tuple[int, int, torch.dtype, str], Tensor] = {}


def regular_hadamard(size: int, dtype: torch.dtype = torch.float32, device: str = "cpu") -> Tensor:
    """The orthonormal regular Hadamard matrix [size, size]; size must be a power of 4.

    Raises:
        DQError: for any other size.
    """
    return multiply(torch.eye(size, dtype=torch.float64), size, regular=True).to(dtype).to(device)


def signs(width: int, seed: int, dtype: torch.dtype = torch.float32, device: str = "cpu") -> Tensor:
    """D [K]: +-1, from Python's generator, whose sequences do not change between versions as those of torch may."""
    found = _SIGNS.get((width, seed, dtype, device))
    if found is None:
        found = _drawn(width, seed, dtype, device)
        if not torch.compiler.is_dynamo_compiling():  # as in dq.transforms.hadamard
            _SIGNS[width, seed, dtype, device] = found
    return found


@torch.compiler.assume_constant_result
def _drawn(width: int, seed: int, dtype: torch.dtype, device: str) -> Tensor:
    source = random.Random(seed)
    drawn = [1.0 if source.random() < 0.5 else -1.0 for _ in range(width)]
    return torch.tensor(drawn, dtype=dtype, device=device)


def rotate(x: Tensor, size: int, kind: str = "regular", seed: int = 0, inverse: bool = False) -> Tensor:
    """Each run of `size` elements along the last axis times H (or its inverse); the last axis must be a multiple."""
    if kind != "random":
        return multiply(x, size, kind == "regular", inverse)
    d = constant(lambda: signs(x.shape[-1], seed, x.dtype, str(x.device)), x)
    return multiply(x, size, inverse=True) * d if inverse else multiply(x * d, size)


def full_size(width: int) -> int:
    """`width` where a Hadamard matrix of that size exists, else the largest power of two that divides it; 0 for odd."""
    size = width if split(width) else width & -width
    return size if size > 1 else 0


def group_size(parts: tuple[int, ...], size: int | str = 0, name: str = "it") -> int:
    """`size`, or the largest of 256, 64, 16 that divides every part of the input (a group never straddles a seam); 0 if
    none does. -1 or "full": `full_size` of what the parts have in common.

    Raises:
        DQError: if a size was asked for that does not divide the parts.
    """
    if size in (FULL, "full"):
        return full_size(gcd(*parts))
    if size and any(p % size for p in parts):
        raise DQError(f"rotation size {size} does not divide the input width {parts} of {name}; 0 takes one that does")
    return size or next((n for n in SIZES if all(p % n == 0 for p in parts)), 0)


def _params(size: int, kind: str, seed: int) -> dict:
    """Parameters of the step: what differs from the regular rotation, and nothing for that."""
    extra = {} if kind == "regular" else {"kind": kind}
    return {"size": size} | extra | ({"seed": seed} if kind == "random" else {})


def candidates(parts: tuple[int, ...], size: int | str = 0, name: str = "it") -> list[tuple[str, int]]:
    """(kind, size) that `auto` compares beside no rotation: the sizes of `SIZES` that fit, and the full one."""
    fitting = [n for n in SIZES if all(p % n == 0 for p in parts)]
    sizes = [group_size(parts, size, name)] if size else [*fitting, full_size(gcd(*parts))]
    pairs = [("regular", n) for n in sizes if n and _is_regular(n)] + [("sylvester", n) for n in sizes if n > 2]
    return list(dict.fromkeys(pairs))


def _is_regular(size: int) -> bool:
    return size & (size - 1) == 0 and size.bit_length() % 2 == 1


def output_error(state: GroupState, choice: tuple[str, int] | None, limit: int) -> float:
    """Sum over the group of ||y_q - y||^2 on calibration rows, both grids, after the rotation (None: without)."""

    def turn(t: Tensor) -> Tensor:
        return t if choice is None else rotate(t, choice[1], choice[0])

    total = 0.0
    for members in state.inputs:
        x, w = state.rows(members[0], limit), torch.cat([state.weights[m] for m in members])
        xr, wr = turn(x), turn(w)
        low = torch.zeros_like(wr)
        if state.rank:
            up, down = sketch_factors(wr, state.rank)
            low = up @ down
        y = fake(xr, state.act_spec) @ round_weight(wr - low, state.weight_spec).T + xr @ low.T
        total += float((y - x @ w.T).square().sum())
    return total


def fit(state: GroupState, size: int | str = 0, kind: str = "regular", seed: int = 0, rows: int = 256) -> None:
    """Rotates the group, or leaves it alone if no size fits.

    Args:
        size: of the groups; 0 takes the largest of 256, 64, 16 that fits, -1 or "full" the whole width where a Hadamard
            matrix of that size exists and else the largest power of two in it.
        kind: `regular`, `sylvester`, `random`, or `auto`: none, regular or sylvester and its size, whichever gives the
            smallest output error on `rows` calibration rows.
        seed: of the signs of `random`.

    Raises:
        DQError: if a size was asked for that does not divide K; `auto` without calibration.
    """
    parts, name = state.k_parts or (state.width,), next(iter(state.weights))
    if kind == "auto":
        state.require_stats("rotate with kind = 'auto'")
        trials = [None, *candidates(parts, size, name)]
        best = min(trials, key=lambda choice: output_error(state, choice, rows))
        kind, size = best or ("regular", 0)
    else:
        size = group_size(parts, size, name)
    if size:
        state.add(Step("rotate", params=_params(size, kind, seed)))


def _apply(x: Tensor, tensors: dict, params: dict) -> Tensor:
    return rotate(x, params["size"], params.get("kind", "regular"), params.get("seed", 0))


def _unweight(w: Tensor, tensors: dict, params: dict) -> Tensor:
    return rotate(w, params["size"], params.get("kind", "regular"), params.get("seed", 0), inverse=True)


def _check(params: dict) -> str:
    kind, size = params.get("kind", "regular"), params.get("size", 0)
    if kind not in KINDS or params.get("rows", 1) < 1:
        return f"kind is one of {', '.join(KINDS)}, rows at least 1"
    idle = idle_word(params, {"seed": ("kind", "random"), "rows": ("kind", "auto")})
    if idle:
        return idle
    if kind == "regular":
        return "" if size in (0, 4, 16, 64, 256, 1024, 4096) else "size is a power of 4, or 0 for the largest"
    if size in (0, FULL, "full"):
        return ""
    good = isinstance(size, int) and size > 1 and split(size)
    return "" if good else "size is one that a Hadamard matrix is known for, 0 for the largest of 256, 64, 16, or -1"


def _planned(shape: tuple[int, int], parts: tuple[int, ...], params: dict, name: str) -> Planned:
    size, kind = group_size(parts or (shape[1],), params.get("size", 0), name), params.get("kind", "regular")
    # What `auto` will find is not known yet; a rotation has no run-time tensors, so nothing is estimated wrongly.
    kind = "regular" if kind == "auto" else kind
    return Planned((("rotate", _params(size, kind, params.get("seed", 0))),) if size else ())


TRANSFORMS.register(
    Transform(
        "rotate",
        fit,
        order=3,
        apply=_apply,
        weight=_apply,
        unweight=_unweight,
        needs_stats=lambda params: params.get("kind") == "auto",
        planned=_planned,
        check=_check,
    )
)
