"""Rows of one matrix: quantized linears that the original names of a checkpoint hold together (q, k and v, say)."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor

from dq.pipelines.exported import Job, Stored, write_file
from dq.pipelines.naming import swap_halves
from dq.qtensor import QTensor
from dq.registry import DQError
from dq.transforms import Step


def unlike_rows(job: Job, name: str) -> str:
    """Why this linear and the others of its matrix in the original names cannot be one matrix; "" if they can."""
    mine = job.stored(name)
    for other in job.together(name):
        there = job.rules[other].original if other in job.rules else ""
        if other not in job.layers:
            return f"{other} stays in 16 bits, and the file holds the two as one matrix, {there}"
        why = _difference(mine, job.stored(other))
        if why:
            return f"{other} has {why}, and the file holds the two as one matrix, {there}"
    return ""


def _difference(a: Stored, b: Stored) -> str:
    if (a.weight.spec, a.activations) != (b.weight.spec, b.activations):
        return "another grid"
    if not _same_steps(a.steps, b.steps):
        return "other input steps"
    if a.side is not None or b.side is not None:
        return "its own low-rank branch" if a is not b and not _equal(a.side, b.side) else ""
    if not _equal(a.weight.global_scale, b.weight.global_scale):
        return "another second-level scale: quantize them as one group"
    if a.weight.spec.strategy == "tensor" and not torch.equal(a.weight.scale, b.weight.scale):
        return "another scale, of which such a matrix has one"
    if not _equal(a.input_scale, b.input_scale):
        return "another activation scale"
    block = a.weight.spec.block_size
    return "rows that end within a block" if block and (a.weight.shape[0] % block[0]) else ""


def _same_steps(a: Sequence[Step], b: Sequence[Step]) -> bool:
    if [(s.name, dict(s.params)) for s in a] != [(s.name, dict(s.params)) for s in b]:
        return False
    return all(torch.equal(x.tensors[k], y.tensors[k]) for x, y in zip(a, b, strict=True) for k in x.tensors)


def _equal(a, b) -> bool:
    if a is None or b is None:
        return a is b
    return all(torch.equal(x, y) for x, y in zip(a, b, strict=True)) if isinstance(a, tuple) else torch.equal(a, b)


def join(parts: Sequence[Stored], swap: bool = False) -> Stored:
    """One matrix of the rows of all parts, in order; nothing is rounded. `unlike_rows` must have found nothing."""
    first, spec = parts[0], parts[0].weight.spec
    if len(parts) == 1 and not swap:
        return first
    whole = lambda tensors: _swapped(torch.cat(list(tensors)), swap)  # noqa: E731 - used three lines long
    zero = None if first.weight.zero_point is None else whole(p.weight.zero_point for p in parts)
    scale = first.weight.scale if spec.strategy == "tensor" else whole(p.weight.scale for p in parts)
    codes = whole(p.weight.codes.view(torch.uint8) for p in parts).view(first.weight.codes.dtype)
    shape = (len(codes), first.weight.shape[1])
    weight = QTensor(codes, scale, first.weight.global_scale, spec, shape, zero)
    return replace(first, weight=weight)


def _swapped(tensor: Tensor, swap: bool) -> Tensor:
    return swap_halves(tensor) if swap else tensor


def split(stored: Stored, sizes: Sequence[int], swap: bool = False) -> list[Stored]:
    """The inverse of `join`.

    Args:
        sizes: rows of every part.

    Raises:
        DQError: they are not all rows of the matrix.
    """
    q, spec = stored.weight, stored.weight.spec
    if sum(sizes) != q.shape[0]:
        raise DQError(f"it has {q.shape[0]} rows, and {' + '.join(map(str, sizes))} are expected")
    every = spec.block_size[0] if spec.block_size else 1

    def parts(tensor: Tensor | None, per: int) -> list[Tensor | None]:
        if tensor is None or (tensor is q.scale and spec.strategy == "tensor"):  # one scale for all rows
            return [tensor] * len(sizes)
        return list(_swapped(tensor, swap).split([n // per for n in sizes]))

    codes = parts(q.codes.view(torch.uint8), 1)
    rows = zip(codes, parts(q.scale, every), parts(q.zero_point, every), sizes, strict=True)
    made = (QTensor(c.view(q.codes.dtype), s, q.global_scale, spec, (n, q.shape[1]), z) for c, s, z, n in rows)
    return [replace(stored, weight=w) for w in made]


def write_matrices(
    job: Job,
    folder: Path,
    encode: Callable[[str, str, Stored], dict[str, Tensor]],
    metadata: Callable[[], dict[str, str]],
) -> None:
    """One file under the original names, the linears of every matrix joined; a warning where these are not known.

    Args:
        encode: `(name there, name of a member here, matrix) -> tensors` by their last name.
        metadata: what the header says, asked after the last matrix.
    """
    tensors: dict[str, dict[str, Tensor]] = {}
    for name in job.layers:
        rule = job.rules.get(name)
        there, swap = (rule.original, rule.swap) if rule else (name, False)
        if there not in tensors:
            tensors[there] = encode(there, name, join([job.stored(m) for m in job.together(name)], swap))
    write_file(job, folder, tensors, metadata())
    if not job.rules:
        warnings.warn(
            f"the names that original checkpoints give to the layers of this {type(job.model).__name__} are not known: "
            "the file keeps those of diffusers. dq.load reads it, other tools look for the original ones",
            stacklevel=2,
        )
