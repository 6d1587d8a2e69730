"""Whether a 16-bit model can be the one that a quantized model was: what a recipe leaves alone is the same in both."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from dq.linear import QuantizedLinear
from dq.registry import DQError

GIVE = "another model? Give the 16-bit one that it was"


def check_reference(reference: nn.Module, model: nn.Module, any_of_its_shape: bool = False) -> nn.Module:
    """The reference, if it can be the model in 16 bits.

    Every parameter outside quantized linears (embeddings, norms, layers in 16 bits) must have the same values, in the
    narrower of the two dtypes. Where norms have learned since, or smoothing was folded into them, one that is not
    constant must; where the model was rewritten before it was quantized (rotated, norms fused) nothing is the same, and
    nothing is compared.

    Args:
        any_of_its_shape: compare classes and shapes only.

    Raises:
        DQError: saying what differs.
    """
    if type(reference) is not type(model):
        raise DQError(f"the reference is a {type(reference).__name__}, the model a {type(model).__name__}: {GIVE}")
    theirs = dict(reference.named_parameters())
    for name, own in model.named_parameters():
        if name in theirs and theirs[name].shape != own.shape:
            what = f"{name} of the reference is {tuple(theirs[name].shape)}, of the model {tuple(own.shape)}"
            raise DQError(f"{what}: {GIVE}")
    artifact = getattr(model, "dq_artifact", {})
    if any_of_its_shape or artifact.get("recipe", {}).get("rewrites"):
        return reference
    pairs = [(n, p, theirs[n]) for n, p in _untouched(model) if n in theirs and not (p.is_meta or theirs[n].is_meta)]
    moved = artifact.get("folded") or _norms_learned(artifact.get("correction"))
    if moved:  # constants (norms of ones, biases of zeros) are alike in all models
        pairs = [(n, p, q) for n, p, q in pairs if p.numel() > 1 and (p != p.flatten()[0]).any()]
    unlike = [n for n, p, q in pairs if not _same(p.detach(), q.detach())]
    if unlike and (not moved or len(unlike) == len(pairs)):
        what = f"{unlike[0]}{f' and {len(unlike) - 1} more' * (len(unlike) > 1)} of the {len(pairs)} tensors that the"
        raise DQError(
            f"{what} recipe left in 16 bits are others in the reference: {GIVE}, or say any_reference=True "
            "(--any-reference) to learn from another"
        )
    return reference


def _untouched(model: nn.Module) -> Iterator[tuple[str, nn.Parameter]]:
    """Parameters that belong to no quantized linear, tied ones once."""
    quantized = {n for n, m in model.named_modules() if isinstance(m, QuantizedLinear)}
    return ((n, p) for n, p in model.named_parameters() if n.rpartition(".")[0] not in quantized)


def _norms_learned(entry: dict[str, Any] | None) -> bool:
    """Whether a correction, or one before it, let the gains of norms learn."""
    return bool(entry) and (bool(entry.get("norms")) or _norms_learned(entry.get("earlier")))


def _same(a: Tensor, b: Tensor) -> bool:
    """Equal in the narrower dtype; of BF16 and FP16, which round differently, up to BF16's rounding."""
    b = b.to(a.device)
    if a.itemsize == b.itemsize == 2 and a.dtype != b.dtype:
        return torch.allclose(a.to(torch.float32), b.to(torch.float32), rtol=2.0**-7, atol=2.0**-24)
    kind = min((a.dtype, b.dtype), key=lambda d: d.itemsize)
    return torch.equal(a.to(kind), b.to(kind))
