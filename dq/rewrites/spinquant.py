"""SpinQuant: R1 and R2 learned on a frozen model whose linears are quantized in the loop, then fused.

    R = R0 (I - A/2)^-1 (I + A/2),  A = P - P^T        (Cayley: orthogonal for every P; R0 a random Hadamard matrix)

P is trained with Adam through the rounding of rotated weights and inputs; the loss is the divergence from the 16-bit
model, which needs few tokens, or that of the next token. The source takes the latter, and walks on the same manifold by
Cayley SGD. For weights that GPTQ will round, train with weights in 16 bits (the authors' advice).
Source: SpinQuant (arXiv 2405.16406, section 3).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call
from tqdm import tqdm

from dq.qtensor import fake_quantize
from dq.registry import DQError
from dq.rewrites import REWRITES, Rewrite, Structure, parameters
from dq.rewrites.norm_fusion import apply as fuse_norms
from dq.rewrites.quarot import Move, check_norms, fuse, moves, random_rotation, turn_by
from dq.spec import QuantSpec
from dq.transforms.hadamard import multiply
from dq.transforms.rotate import full_size

OBJECTIVES = ("kl", "ce")
ORTHOGONAL = 1e-5


class Rotation(nn.Module):
    """An orthogonal matrix [n, n] that gradient descent may change: `start @ cayley(P - P^T)`."""

    def __init__(self, start: Tensor):
        super().__init__()
        self.register_buffer("start", start.to(torch.float64))
        self.free = nn.Parameter(torch.zeros_like(start, dtype=torch.float32))

    def matrix(self, dtype: torch.dtype = torch.float32) -> Tensor:
        half = (self.free - self.free.T).to(dtype) / 2
        eye = torch.eye(len(half), dtype=dtype, device=half.device)
        return self.start.to(dtype) @ torch.linalg.solve(eye - half, eye + half)


def straight_through(x: Tensor, spec: QuantSpec | None) -> Tensor:
    """x on the grid of `spec`, with the gradient of `x + e max|x| / max|x|'`, ' a constant: e = Q(x) - x grows with the
    step, which the largest |x| of each row (or group of a row) sets.

    The plain straight-through gradient takes e as a constant. In exact arithmetic no rotation changes the function, so
    little is then left to learn from. Held-out divergence of two tiny random decoders at W4A4, 12 runs of 80 steps: -7
    to -37 % with this gradient, -12 to +29 % with the plain one.
    """
    if spec is None:
        return x
    width = spec.columns if spec.columns and x.shape[-1] % spec.columns == 0 else x.shape[-1]
    error = (fake_quantize(x.detach(), spec).to(x) - x.detach()).unflatten(-1, (-1, width))
    top = x.unflatten(-1, (-1, width)).abs().amax(-1, keepdim=True)
    growth = top / top.detach().clamp(min=torch.finfo(top.dtype).tiny)
    return x + (error * growth).flatten(-2)


class Trainer:
    """The frozen model seen through rotations: its parameters are computed anew in every forward pass.

    Args:
        online: the inputs of the last MLP linears are rotated at run time (R4), so they are here too.
    """

    def __init__(self, model: nn.Module, structure: Structure, weights, activations, online: bool, seed: int):
        self.model, self.structure = model, structure
        self.weights, self.activations = weights, activations
        first = model.get_submodule(structure.embeddings[0]).weight
        self.dtype, device = torch.promote_types(first.dtype, torch.float32), first.device
        eyes = [(structure.width, seed), *((a.head_dim, seed + 1 + i) for i, a in enumerate(structure.attentions))]
        starts = [random_rotation(n, s)(torch.eye(n, dtype=torch.float64)).to(device) for n, s in eyes]
        self.rotations = nn.ModuleList(Rotation(s) for s in starts)
        stays = {structure.head, *structure.routers}
        self.linears = [n for n in (*structure.readers, *structure.writers) if n not in stays]
        outputs = {a.output for a in structure.attentions}
        self.sizes = {n: full_size(model.get_submodule(n).in_features) for n in structure.writers if n not in outputs}
        self.sizes = {n: size for n, size in self.sizes.items() if size} if online else {}

    def moves(self, dtype: torch.dtype) -> dict[str, Move]:
        r1, *r2 = (turn_by(r.matrix(dtype)) for r in self.rotations)
        return moves(self.structure, r1, r2)

    def tensors(self) -> dict[str, Tensor]:
        """Every parameter that a rotation touches, rotated, and rounded where it will be."""
        out = {}
        for name, move in self.moves(self.dtype).items():
            module = self.model.get_submodule(name)
            w = move.weight(module.weight.detach().to(self.dtype))
            if name in self.linears:
                w = self._turned(name, w)
                w = straight_through(w, self.weights)
            out[f"{name}.weight"] = w.to(module.weight.dtype)
            bias = getattr(module, "bias", None)
            if bias is not None:
                out[f"{name}.bias"] = move.bias(bias.detach().to(self.dtype)).to(bias.dtype)
        return out

    def _turned(self, name: str, t: Tensor) -> Tensor:
        return multiply(t, self.sizes[name]) if name in self.sizes else t

    @contextmanager
    def rounded_inputs(self) -> Iterator[None]:
        """Inside, the inputs of the linears are on their grid."""

        def hook(name: str):
            return lambda module, args: (straight_through(self._turned(name, args[0]), self.activations), *args[1:])

        handles = [self.model.get_submodule(n).register_forward_pre_hook(hook(n)) for n in self.linears]
        try:
            yield
        finally:
            for h in handles:
                h.remove()

    def logits(self, batch: dict[str, Any]) -> Tensor:
        with self.rounded_inputs():
            return _logits(functional_call(self.model, self.tensors(), (), batch))

    def loss(self, batch: dict[str, Any], objective: str) -> Tensor:
        """Cross entropy of the next token, or KL(16-bit model || quantized model) per token."""
        logits = self.logits(batch)
        if objective == "ce":
            tokens = batch["input_ids"].to(logits.device)
            return nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), tokens[:, 1:].flatten())
        with torch.no_grad():
            teacher = _logits(self.model(**batch)).log_softmax(-1).flatten(0, -2)
        student = logits.log_softmax(-1).flatten(0, -2)
        return nn.functional.kl_div(student, teacher, log_target=True, reduction="batchmean")


def _logits(output: Any) -> Tensor:
    return output if isinstance(output, Tensor) else output.logits


def _batch(batch: Tensor | dict[str, Any], device: torch.device) -> dict[str, Any]:
    batch = {"input_ids": batch} if isinstance(batch, Tensor) else batch
    return {k: v.to(device) if isinstance(v, Tensor) else v for k, v in batch.items()}


def train(
    trainer: Trainer, batches: Sequence[Any], steps: int, rate: float, objective: str, tick: Callable = lambda n: None
) -> list[float]:
    """Adam with a cosine to zero; the loss of every step. A step of rate / sqrt(n) in every element of P turns by about
    the same angle at every size n.

    Raises:
        DQError: a loss that is not finite.
    """
    free = [r.free for r in trainer.rotations]
    optimizer = torch.optim.Adam([{"params": [p], "lr": rate / math.sqrt(len(p))} for p in free])
    decay = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda i: 0.5 * (1 + math.cos(math.pi * i / steps)))
    history, device = [], free[0].device
    for step in range(steps):
        loss = trainer.loss(_batch(batches[step % len(batches)], device), objective)
        history.append(float(loss.detach()))
        if not math.isfinite(history[-1]):
            raise DQError(f"spinquant: the loss is {history[-1]} at step {step}: take a smaller rate")
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        decay.step()
        tick(1)
    return history


@contextmanager
def frozen(model: nn.Module) -> Iterator[None]:
    """Inside, no parameter of the model takes a gradient, and it is in eval mode."""
    wanted, training = {p: p.requires_grad for p in model.parameters()}, model.training
    model.requires_grad_(False).eval()
    try:
        yield
    finally:
        model.train(training)
        for p, flag in wanted.items():
            p.requires_grad_(flag)


def check_orthogonal(q: Tensor) -> float:
    """`||Q^T Q - I||` (Frobenius) in float64.

    Raises:
        DQError: it is not below 1e-5, so that fusing Q would change the model.
    """
    q = q.detach().to(torch.float64)
    distance = float((q.T @ q - torch.eye(len(q), dtype=q.dtype, device=q.device)).norm())
    if not distance < ORTHOGONAL:
        raise DQError(f"a learned rotation is not orthogonal: ||R^T R - I|| = {distance:.2e}")
    return distance


def apply(
    model: nn.Module,
    structure: Structure,
    batches: Sequence[Any],
    weights: str = "int4/channel",
    activations: str = "int4/token",
    steps: int = 100,
    rate: float = 0.1,
    objective: str = "kl",
    online: bool = False,
    seed: int = 0,
    progress: Callable[..., Any] | None = None,
) -> dict[str, Any]:
    """Fuses the norms, learns R1 and one R2 per block, and fuses them.

    Args:
        batches: token ids [B, T], or dicts of keyword arguments with `input_ids`, taken in turn.
        weights, activations: grids in the loop; "" for 16 bits.
        steps, rate: of Adam, on P; see `train`.
        objective: `kl`, from the 16-bit model, or `ce`, of the next token.
        online: whether the recipe also rotates the input of the last MLP linear by `rotate`, kind `sylvester`, size -1.
        seed: of the random Hadamard matrices at the start.
        progress: a bar of tqdm's signature; None for none.

    Raises:
        DQError: norms that cannot be fused, a loss that is not finite, or a result that is not orthogonal.
    """
    specs = [QuantSpec.parse(s) if s else None for s in (weights, activations)]
    if structure.fixed:
        check_norms(model, structure)  # says why, before anything changes
    fuse_norms(model, structure)
    check_norms(model, structure)
    trainer = Trainer(model, structure, *specs, online, seed)
    parameters(model, trainer.linears)
    with frozen(model), torch.enable_grad():
        bar = progress or partial(tqdm, disable=True)
        with bar(total=steps, desc="spinquant", unit="step") as shown:
            history = train(trainer, batches, steps, rate, objective, shown.update)
    with torch.no_grad():
        distance = max(check_orthogonal(r.matrix(torch.float64)) for r in trainer.rotations)
        fuse(model, trainer.moves(torch.float64))
    return {"loss": history, "orthogonality": distance, "seed": seed}


def _check(params: dict) -> str:
    for word in ("weights", "activations"):
        if params.get(word):
            QuantSpec.parse(params[word])
    if params.get("objective", "kl") not in OBJECTIVES:
        return f"objective is one of {', '.join(OBJECTIVES)}"
    return "" if params.get("steps", 1) >= 1 and params.get("rate", 1) > 0 else "steps at least 1, rate above 0"


REWRITES.register(Rewrite("spinquant", apply, needs_batches=True, check=_check))
