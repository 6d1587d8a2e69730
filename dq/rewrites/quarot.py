"""Rotations fused into a decoder's weights (QuaRot): R1 of the residual stream, R2 of the values, head by head.

With row vectors, `h' = h Q`: embeddings `E Q`, readers `W Q`, writers `Q^T W` and `b Q`; norms between must have no
weight. Values: `v' = v R` per head, `W_v <- R^T W_v` on the rows of every kv head, `W_o <- W_o R` on the columns of
every head (softmax mixes tokens, not channels, and repeating kv heads commutes). R3, of queries and keys after the
position embedding, cannot be fused and is a function here; R4, of the input of the last MLP linear, is the transform
`rotate` with kind `sylvester` and size -1. Source: QuaRot (arXiv 2404.00456, section 4).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from dq.registry import DQError
from dq.rewrites import REWRITES, Rewrite, Structure, parameters
from dq.rewrites.norm_fusion import norm_scale, update
from dq.transforms.hadamard import multiply, split

Turn = Callable[[Tensor], Tensor]  # t [..., n] -> t Q, Q orthogonal


def random_rotation(width: int, seed: int = 0) -> Turn:
    """Random signs, then a Hadamard matrix of this size; where none is known, a random orthogonal matrix (both are
    fused, so a dense one costs nothing later)."""
    generator = torch.Generator().manual_seed(seed)
    if split(width):
        d = torch.randint(0, 2, (width,), generator=generator, dtype=torch.float64) * 2 - 1
        return lambda t: multiply(t * d.to(t), width)
    q = torch.linalg.qr(torch.randn(width, width, generator=generator, dtype=torch.float64)).Q
    return turn_by(q)


def turn_by(q: Tensor) -> Turn:
    """Products with a given matrix [n, n]."""
    return lambda t: t @ q.to(t)


def per_head(turn: Turn, dim: int, first: int = 0) -> Turn:
    """The same rotation of every run of `dim` elements from `first` on."""

    def heads(t: Tensor) -> Tensor:
        return turn(t.unflatten(-1, (-1, dim))).flatten(-2)

    return heads if not first else lambda t: torch.cat([t[..., :first], heads(t[..., first:])], -1)


class Move(NamedTuple):
    """`W <- out^T W inp`, `b <- b out` of one linear, or `E <- E inp` of an embedding."""

    inp: Turn | None = None
    out: Turn | None = None

    def weight(self, w: Tensor) -> Tensor:
        w = w if self.inp is None else self.inp(w)
        return w if self.out is None else self.out(w.T).T

    def bias(self, b: Tensor) -> Tensor:
        return b if self.out is None else self.out(b)


def moves(structure: Structure, r1: Turn | None = None, r2: Sequence[Turn] = ()) -> dict[str, Move]:
    """What R1, and R2 of every attention, do to each module."""
    found: dict[str, Move] = {}
    if r1 is not None:
        found |= {name: Move(inp=r1) for name in (*structure.embeddings, *structure.readers)}
        found |= {name: Move(out=r1) for name in structure.writers}
    for attention, turn in zip(structure.attentions, r2, strict=bool(r2)):
        a = attention
        found[a.value] = found.get(a.value, Move())._replace(out=per_head(turn, a.head_dim, a.first))
        found[a.output] = found.get(a.output, Move())._replace(inp=per_head(turn, a.head_dim))
    return found


def fuse(model: nn.Module, found: dict[str, Move]) -> None:
    """Moves the weights in float64; a weight that two modules share is moved once."""
    done = set()
    for name, module in parameters(model, found).items():
        move, bias = found[name], getattr(module, "bias", None)
        if id(module.weight) not in done:
            update(module.weight, move.weight)
        if bias is not None:
            update(bias, move.bias)
        done.add(id(module.weight))


def check_norms(model: nn.Module, structure: Structure) -> None:
    """Raises DQError unless every norm of the stream only normalizes, subtracts no mean, and is read by linears, and
    nothing else fixes its channels."""
    if structure.fixed:
        raise DQError(f"{structure.fixed}: no rotation of the stream passes it")
    for site in structure.norms:
        if not site.consumers:
            raise DQError(f"nothing here reads {site.name}: without its output projection a model cannot be rotated")
        kind, scale = norm_scale(model.get_submodule(site.name), site.name)
        if kind == "layer" or not torch.equal(scale, torch.ones_like(scale)):
            raise DQError(f"{site.name} has a weight that no rotation of the stream may pass: run norm_fusion first")


def rotate_residual(model: nn.Module, structure: Structure, seed: int = 0) -> dict[str, Any]:
    """R1: the residual stream times a random Hadamard matrix.

    Raises:
        DQError: norms that still have weights.
    """
    check_norms(model, structure)
    fuse(model, moves(structure, r1=random_rotation(structure.width, seed)))
    return {"seed": seed}


def rotate_values(model: nn.Module, structure: Structure, seed: int = 0) -> dict[str, Any]:
    """R2: the values of each head times a random Hadamard matrix, another one in every block."""
    turns = [random_rotation(a.head_dim, seed + i) for i, a in enumerate(structure.attentions)]
    fuse(model, moves(structure, r2=turns))
    return {"seed": seed}


def rotate_heads(q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
    """R3: queries and keys [..., head_dim] times H after the position embedding; `q' k'^T = q k^T`, and keys that go to
    a low-bit cache have no outlier channels left. Computed in float32 at least.

    Raises:
        DQError: no Hadamard matrix of size head_dim.
    """
    kind = torch.promote_types(q.dtype, torch.float32)
    return tuple(multiply(t.to(kind), t.shape[-1]).to(t.dtype) for t in (q, k))


def after_rope(rope: Callable[..., tuple[Tensor, Tensor]]) -> Callable[..., tuple[Tensor, Tensor]]:
    """The hook point of R3: a position embedding `(q, k, ...) -> (q, k)` whose results are rotated.

    In transformers that function is `apply_rotary_pos_emb` of the model's module, called by every attention before
    the cache is updated; whoever quantizes the cache puts the result of this in its place.
    """

    def rotated(*args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        return rotate_heads(*rope(*args, **kwargs))

    return rotated


REWRITES.register(Rewrite("r1", rotate_residual))
REWRITES.register(Rewrite("r2", rotate_values))
