"""Norm weights folded into the linears behind them: `norm(x) = x / rms(x) * g`, so `W (g * n) = (W diag(g)) n`.

A LayerNorm subtracts the mean first: its mean is folded into what writes to the stream (every writer's output and every
embedding row is centred, which no LayerNorm can see), its bias b into `W b`, and an RMSNorm takes its place. RMSNorm
models are never centred: an RMSNorm does see the mean. Source: SliceGPT (arXiv 2401.15024, section 3.1) and QuaRot
(arXiv 2404.00456, section 4), whose code centres embeddings for RMSNorm too, which changes the function.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from dq.registry import DQError
from dq.rewrites import REWRITES, Norm, Rewrite, Structure, parameters


@torch.no_grad()
def update(parameter: nn.Parameter, change: Callable[[Tensor], Tensor]) -> None:
    """`parameter <- change(parameter)`, computed in float64 and rounded to the parameter's dtype once."""
    parameter.copy_(change(parameter.to(torch.float64)))


@torch.no_grad()
def norm_scale(norm: nn.Module, name: str) -> tuple[str, Tensor]:
    """(kind, g [d] in float64) of a norm, found by what it does to a probe: `rms` (g = weight), `rms+1`
    (g = 1 + weight) or `layer`.

    Raises:
        DQError: it is none of them.
    """
    weight = norm.weight.detach().to(torch.float64)
    kind = torch.float32 if norm.weight.itemsize < 4 else norm.weight.dtype
    probe = torch.randn(4, len(weight), generator=torch.Generator().manual_seed(0), dtype=torch.float64) + 0.5
    probe = probe.to(weight.device)
    found = norm(probe.to(norm.weight.dtype)).to(torch.float64)
    bias = 0.0 if getattr(norm, "bias", None) is None else norm.bias.detach().to(torch.float64)
    rms = probe / probe.square().mean(-1, keepdim=True).sqrt()
    layer = nn.functional.layer_norm(probe, weight.shape)
    guesses = {"rms": rms * weight + bias, "rms+1": rms * (1 + weight) + bias, "layer": layer * weight + bias}
    errors = {k: float((found - y).norm() / y.norm().clamp(min=1e-30)) for k, y in guesses.items()}
    best = min(errors, key=errors.get)
    if errors[best] > (1e-3 if kind == norm.weight.dtype else 2e-2):
        raise DQError(f"{name} ({type(norm).__name__}) is neither an RMSNorm nor a LayerNorm with a weight")
    return best, weight + (best == "rms+1")


def untie(model: nn.Module, structure: Structure) -> bool:
    """Gives the output projection a weight of its own where it shares the embedding's; tells whether it did."""
    if not structure.head:
        return False
    head = model.get_submodule(structure.head)
    if not any(head.weight is model.get_submodule(e).weight for e in structure.embeddings):
        return False
    head.weight = nn.Parameter(head.weight.detach().clone(), head.weight.requires_grad)
    config = getattr(model, "config", None)
    if getattr(config, "tie_word_embeddings", False):
        config.tie_word_embeddings = False
    keys = getattr(model, "all_tied_weights_keys", None)
    if isinstance(keys, dict):
        keys.pop(f"{structure.head}.weight", None)
    return True


def _centre(model: nn.Module, structure: Structure) -> None:
    """Subtracts the mean over the stream from every writer's output and every embedding row."""
    for name in structure.embeddings:
        update(model.get_submodule(name).weight, lambda e: e - e.mean(1, keepdim=True))
    for name in structure.writers:
        linear = model.get_submodule(name)
        update(linear.weight, lambda w: w - w.mean(0, keepdim=True))
        if linear.bias is not None:
            update(linear.bias, lambda b: b - b.mean())


def _fold(model: nn.Module, site: Norm, kind: str, scale: Tensor) -> None:
    """Moves g, and a LayerNorm's bias, into the consumers; leaves a norm that only normalizes."""
    norm = model.get_submodule(site.name)
    shift = getattr(norm, "bias", None)
    for name in site.consumers:
        linear = model.get_submodule(name)
        if shift is not None:
            moved = (linear.weight.detach().to(torch.float64) @ shift.detach().to(torch.float64)).to(linear.weight)
            if linear.bias is None:
                linear.bias = nn.Parameter(moved, linear.weight.requires_grad)
            else:
                update(linear.bias, lambda b, moved=moved: b + moved)
        update(linear.weight, lambda w: w * scale)
    if kind == "layer":
        plain = nn.RMSNorm(len(scale), eps=norm.eps, device=norm.weight.device, dtype=norm.weight.dtype)
        plain.weight.requires_grad_(norm.weight.requires_grad)
        model.set_submodule(site.name, plain.train(norm.training))
    else:
        update(norm.weight, lambda w: torch.full_like(w, 0.0 if kind == "rms+1" else 1.0))


def apply(model: nn.Module, structure: Structure) -> dict[str, Any]:
    """Folds every norm of the structure; an output projection tied to the embedding becomes its own first.

    A final norm without a consumer (a model without output projection) keeps its weight.

    Raises:
        DQError: a norm of another kind, or both kinds in one model.
    """
    parameters(
        model, (*structure.embeddings, *structure.readers, *structure.writers, *(n.name for n in structure.norms))
    )
    sites = [n for n in structure.norms if n.consumers]
    found = {n.name: norm_scale(model.get_submodule(n.name), n.name) for n in sites}
    kinds = {kind for kind, _ in found.values()}
    if "layer" in kinds and len(kinds) > 1:
        raise DQError("norm_fusion: the model mixes LayerNorms with RMSNorms; the mean of its stream cannot be removed")
    untied = untie(model, structure)
    if "layer" in kinds:
        _centre(model, structure)
    for site in sites:
        _fold(model, site, *found[site.name])
    return {"norms": len(sites), "centred": "layer" in kinds, "untied": untied}


REWRITES.register(Rewrite("norm_fusion", apply))
