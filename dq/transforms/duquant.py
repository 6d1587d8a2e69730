"""DuQuant: `x' = x R1 P R2`, `W' = W (R1 P R2)^-T`; R1, R2 block-diagonal orthogonal, P a permutation of channels.

R1 is built greedily against the largest entries of calibration rows, P deals the channels, strongest first, to the
blocks in zigzag (1..n, n..1, ...) so that all blocks carry alike, and R2 smooths within the blocks once more. The
authors put SmoothQuant (alpha 0.6) before it. Source: DuQuant (arXiv 2406.01721, section 3).
"""

from __future__ import annotations

import torch
from torch import Tensor

from dq.registry import DQError
from dq.transforms import TRANSFORMS, GroupState, Planned, Step, Transform

SIZES = (128, 64, 32, 16)


def block_size(width: int, block: int = 0, name: str = "it") -> int:
    """`block`, or the largest of 128, 64, 32, 16 that divides K; 0 if none does.

    Raises:
        DQError: if a block was asked for that does not divide K.
    """
    if block and width % block:
        raise DQError(f"duquant block {block} does not divide the input width {width} of {name}; 0 takes one that does")
    return block or next((n for n in SIZES if width % n == 0), 0)


def uniform_orthogonal(size: int, generator: torch.Generator) -> Tensor:
    """Random orthogonal [size, size] in float64 whose first row is `1 / sqrt(size)` everywhere: it spreads coordinate 0
    evenly over all of them."""
    a = torch.randn(size, size, generator=generator, dtype=torch.float64)
    a[:, 0] = 1.0
    q = torch.linalg.qr(a).Q
    return (q * torch.sign(q[0, 0])).T.contiguous()


def greedy_rotations(x: Tensor, steps: int, seed: int = 0) -> Tensor:
    """One orthogonal [B, B] per block of x [n, blocks, B], float64 [blocks, B, B].

    Each step spreads the channel that holds a block's largest |entry|: `R <- R S U S`, U orthogonal with a uniform
    first row, S the swap of channel 0 and that channel. Kept is the prefix after which `max - min` of `x R` is
    smallest, the empty one included.
    """
    x = x.to(torch.float64).transpose(0, 1).contiguous()
    count, _, size = x.shape
    block, generator = torch.arange(count, device=x.device), torch.Generator().manual_seed(seed)
    turn = torch.eye(size, dtype=torch.float64, device=x.device).repeat(count, 1, 1)
    best, spread = turn.clone(), x.amax((1, 2)) - x.amin((1, 2))
    for _ in range(steps):
        worst = x.abs().amax(1).argmax(1)
        swap = torch.arange(size, device=x.device).repeat(count, 1)
        swap[block, 0], swap[block, worst] = worst, torch.zeros_like(worst)
        u = uniform_orthogonal(size, generator).to(x.device)
        # S U S of every block: rows and columns of U in swapped order.
        move = u[swap[:, :, None], swap[:, None, :]]
        x, turn = x @ move, turn @ move
        now = x.amax((1, 2)) - x.amin((1, 2))
        better = now < spread
        best[better], spread[better] = turn[better], now[better]
    return best


def zigzag(strength: Tensor, block: int) -> Tensor:
    """Channels [K] in the order that deals them, strongest first, to blocks 1..n, n..1, 1..n, ...; the channels of one
    block stand together."""
    count = strength.numel() // block
    dealt = strength.argsort(descending=True, stable=True).reshape(block, count)
    dealt[1::2] = dealt[1::2].flip(1)
    return dealt.T.reshape(-1)


def block_multiply(x: Tensor, blocks: Tensor) -> Tensor:
    """x [..., K] times a block-diagonal matrix given as [K / B, B, B]."""
    count, size = blocks.shape[:2]
    rows = x.numel() // (count * size)
    return (x.reshape(rows, count, size).transpose(0, 1) @ blocks.to(x)).transpose(0, 1).reshape(x.shape)


def fit(state: GroupState, block: int = 0, steps: int = 256, rows: int = 128, seed: int = 0) -> None:
    """Rotates, permutes and rotates the group; leaves it alone where no block size divides K.

    Args:
        block: width of the rotated blocks; 0 takes the largest of 128, 64, 32, 16 that divides K.
        steps: bound on the greedy search of each rotation.
        rows: calibration rows that it looks at.

    Raises:
        DQError: without calibration, or for a block that does not divide K.
    """
    state.require_stats("duquant")
    block = block_size(state.width, block, next(iter(state.weights)))
    if not block:
        return
    x = torch.cat([state.rows(members[0], rows) for members in state.inputs])
    first = greedy_rotations(x.unflatten(1, (-1, block)), steps, seed).to(torch.float32)
    x = block_multiply(x, first)
    order = zigzag(x.abs().amax(0), block)
    second = greedy_rotations(x[:, order].unflatten(1, (-1, block)), steps, seed + 1).to(torch.float32)
    tensors = {"first": first, "order": order.to(torch.int32), "second": second}
    state.add(Step("duquant", tensors, {"block": block}))


def _apply(x: Tensor, tensors: dict, params: dict) -> Tensor:
    x = block_multiply(x, tensors["first"])
    return block_multiply(x.index_select(-1, tensors["order"]), tensors["second"])


def _inverse(blocks: Tensor) -> Tensor:
    """Stored in float32 the blocks are orthogonal to seven digits only; the weight takes their true inverse."""
    return torch.linalg.inv(blocks.to(torch.float64))


def _weight(w: Tensor, tensors: dict, params: dict) -> Tensor:
    w = block_multiply(w, _inverse(tensors["first"]).mT)
    return block_multiply(w.index_select(-1, tensors["order"]), _inverse(tensors["second"]).mT)


def _unweight(w: Tensor, tensors: dict, params: dict) -> Tensor:
    w = block_multiply(w, tensors["second"].mT).index_select(-1, tensors["order"].argsort())
    return block_multiply(w, tensors["first"].mT)


def _buffers(width: int, params: dict) -> dict:
    block = params.get("block") or block_size(width)
    blocks = (width // block, block, block) if block else (0, 0, 0)
    return {"first": blocks, "order": ((width,), torch.int32), "second": blocks}


def _planned(shape: tuple[int, int], parts: tuple[int, ...], params: dict, name: str) -> Planned:
    block = block_size(shape[1], params.get("block", 0), name)
    return Planned((("duquant", {"block": block}),) if block else ())


def _check(params: dict) -> str:
    good = params.get("block", 0) >= 0 and params.get("steps", 1) >= 1 and params.get("rows", 1) >= 1
    return "" if good and params.get("block", 0) != 1 else "block is 0 or at least 2, steps and rows at least 1"


TRANSFORMS.register(
    Transform(
        "duquant",
        fit,
        3,
        apply=_apply,
        weight=_weight,
        unweight=_unweight,
        buffers=_buffers,
        needs_stats=True,
        planned=_planned,
        check=_check,
    )
)
