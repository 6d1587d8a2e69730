"""Hadamard matrices by construction, and products with them: `H H^T = n I`, entries +-1, here divided by sqrt(n).

Powers of two are Sylvester's, powers of four may be regular (all column sums of the +-1 matrix equal +sqrt(n)), and
other sizes are `K0 * 2^m` with K0 from `ORDERS`: Paley's constructions over a prime field, or four circulants in the
Goethals-Seidel array. Every matrix is checked against its definition when it is built.
Source: Paley (1933); Goethals and Seidel (1967); the list of K0 is the one that QuaRot (arXiv 2404.00456) covers.
"""

from __future__ import annotations

from functools import partial
from math import sqrt

import torch
from torch import Tensor

from dq.constants import constant
from dq.registry import DQError

# From large to small: 15360 is 60 * 256, not 12 * 1280.
ORDERS = (172, 156, 140, 108, 60, 52, 40, 36, 28, 20, 12)
LARGEST = 256  # a product with a dense matrix beats a butterfly up to about here; larger sizes are Kronecker products

# order -> (n, multiplier m, signs): four +-1 rows of length n = order / 4, constant on the orbits of a -> a m (mod n),
# whose power spectra sum to 4 n. Entry 0 is +, then one sign per orbit in the order of its least member. Found by an
# exhaustive search over such rows.
_CIRCULANTS = {
    52: (13, 3, ("+--+", "+--+", "++--", "+++-")),
    156: (39, 16, ("+++++-----+--+", "+-+-+++-+---++", "+++--+++---+--", "++-+-+++-+--+-")),
    172: (43, 37, ("++---++", "++-++--", "-+-+-+-", "+-++-+-")),
}
_PALEY = {12: 11, 20: 19, 28: 13, 36: 17, 60: 59, 108: 107, 140: 139}
# A plain dict, not lru_cache: torch.compile ignores that wrapper and would rebuild the matrix in every call.
_MATRICES: dict[tuple[str, int, torch.dtype, str], Tensor] = {}


def split(size: int) -> tuple[int, int] | None:
    """(K0, 2^m) with `K0 * 2^m = size`, K0 = 1 or of `ORDERS`, the largest first; None if there is none."""
    for order in (*ORDERS, 1):
        rest = size // order
        if size > 0 and size % order == 0 and rest & (rest - 1) == 0:
            return order, rest
    return None


def factors(size: int, regular: bool = False) -> tuple[tuple[str, int], ...]:
    """(kind, order) of the Kronecker factors of the matrix of this size, none above `LARGEST`.

    Raises:
        DQError: a regular matrix of a size that is no power of 4, or a size that no construction here reaches.
    """
    if regular:
        exponent = (size.bit_length() - 1) // 2
        if size < 1 or 4**exponent != size:
            raise DQError(f"a regular Hadamard matrix here has a power of 4 as size, got {size}")
        return tuple(("regular", 4**e) for e in _even(exponent, 4))
    parts = split(size)
    if parts is None:
        raise DQError(
            f"no Hadamard matrix of size {size} here; sizes are K0 * 2^m with K0 of 1, {str(ORDERS[::-1])[1:-1]}"
        )
    head = (("order", parts[0]),) if parts[0] > 1 else ()
    return head + tuple(("sylvester", 2**e) for e in _even(parts[1].bit_length() - 1, 8))


def _even(total: int, most: int) -> list[int]:
    """`total` as a sum of as few numbers of at most `most` as possible, as equal as possible."""
    count = -(-total // most)
    return [(total + i) // count for i in reversed(range(count))] if count else []


def matrix(kind: str, order: int, dtype: torch.dtype = torch.float32, device: str = "cpu") -> Tensor:
    """One orthonormal factor [order, order]: kind `regular`, `sylvester` or `order` (any of `ORDERS`)."""
    # A plain dict: while a model is traced it is looked up like any other; only what is missing is made aside, and not
    # kept then, because the trace would no longer fit what it saw.
    found = _MATRICES.get((kind, order, dtype, device))
    if found is None:
        found = _made(kind, order, dtype, device)
        if not torch.compiler.is_dynamo_compiling():
            _MATRICES[kind, order, dtype, device] = found
    return found


@torch.compiler.assume_constant_result
def _made(kind: str, order: int, dtype: torch.dtype, device: str) -> Tensor:
    return (_built(kind, order) / sqrt(order)).to(dtype).to(device)


def _built(kind: str, order: int) -> Tensor:
    """The +-1 matrix, float64, checked."""
    if kind == "order":
        h = _of_order(order)
    else:
        seed = _REGULAR if kind == "regular" else _SYLVESTER
        h = torch.ones(1, 1, dtype=torch.float64)
        while h.shape[0] < order:
            h = torch.kron(h, torch.tensor(seed, dtype=torch.float64))
    if h.shape[0] != order or not torch.equal(h @ h.T, order * torch.eye(order, dtype=torch.float64)):
        raise DQError(f"no {kind} Hadamard matrix of order {order} here")
    return h


_SYLVESTER = [[1, 1], [1, -1]]
_REGULAR = [[1, 1, 1, -1], [1, 1, -1, 1], [1, -1, 1, 1], [-1, 1, 1, 1]]


def _of_order(order: int) -> Tensor:
    if order in _PALEY:
        return _paley(_PALEY[order])
    if order in _CIRCULANTS:
        return _goethals_seidel(*_CIRCULANTS[order])
    return torch.kron(_of_order(order // 2), torch.tensor(_SYLVESTER, dtype=torch.float64))


def _paley(p: int) -> Tensor:
    """From the squares modulo a prime p: order p + 1 if p = 3 mod 4 (type I), 2 (p + 1) if p = 1 mod 4 (type II)."""
    squares = {i * i % p for i in range(1, p)}
    chi = torch.tensor([0.0] + [1.0 if i in squares else -1.0 for i in range(1, p)], dtype=torch.float64)
    index = torch.arange(p)
    core = torch.zeros(p + 1, p + 1, dtype=torch.float64)
    core[1:, 1:] = chi[(index[:, None] - index) % p]
    core[0, 1:], core[1:, 0] = 1, -1 if p % 4 == 3 else 1
    eye = torch.eye(p + 1, dtype=torch.float64)
    if p % 4 == 3:
        return eye + core
    two = torch.tensor(_SYLVESTER, dtype=torch.float64)
    return torch.kron(core, two) + torch.kron(eye, torch.tensor([[1, -1], [-1, -1]], dtype=torch.float64))


def _goethals_seidel(n: int, multiplier: int, signs: tuple[str, ...]) -> Tensor:
    """The array [[A, BR, CR, DR], [-BR, A, D'R, -C'R], [-CR, -D'R, A, B'R], [-DR, C'R, -B'R, A]] of circulants; R
    reverses columns, ' transposes."""
    index = torch.arange(n)
    a, b, c, d = (_orbit_row(n, multiplier, s)[(index - index[:, None]) % n] for s in signs)
    rows = [
        [a, b.flip(1), c.flip(1), d.flip(1)],
        [-b.flip(1), a, d.T.flip(1), -c.T.flip(1)],
        [-c.flip(1), -d.T.flip(1), a, b.T.flip(1)],
        [-d.flip(1), c.T.flip(1), -b.T.flip(1), a],
    ]
    return torch.cat([torch.cat(row, 1) for row in rows])


def _orbit_row(n: int, multiplier: int, signs: str) -> Tensor:
    row, rest = torch.ones(n, dtype=torch.float64), iter(signs)
    seen = {0}
    for i in range(1, n):
        sign = 0.0 if i in seen else 1.0 if next(rest) == "+" else -1.0
        while i not in seen:
            row[i] = sign
            seen.add(i)
            i = i * multiplier % n
    return row


def multiply(x: Tensor, size: int, regular: bool = False, inverse: bool = False) -> Tensor:
    """`x (I kron H)`: every run of `size` elements of the last axis times H, or times H^T = H^-1.

    Factor by factor, so that a size of 12288 = 12 * 32 * 32 costs 76 products per element.

    Args:
        x: [..., K], K a multiple of `size`.

    Raises:
        DQError: no such matrix.
    """
    shape, right = x.shape, 1
    for kind, order in reversed(factors(size, regular)):
        h = constant(partial(matrix, kind, order, x.dtype, str(x.device)), x)
        h = h.T if inverse else h
        count = x.numel() // (order * right)
        x = x.reshape(count, order) @ h if right == 1 else h.T @ x.reshape(count, order, right)
        right *= order
    return x.reshape(shape)
