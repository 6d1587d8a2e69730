"""A quantized linear while it learns: what `dq.correct` puts in its place, and makes a layer of again.

    y = Q_X(pre(x)) W^T + (x [L | A]^T) [U | B]^T + b      A [r, K] random, B [N, r] = 0 at the start

On demand scales learn too: those of a weight at fixed codes, `s f` with f = 1 at the start, whose gradient is exact (of
block scales in 8 bits the second level above them); and static activation scales by LSQ, see below.

L, U is the branch that the layer has already; [L | A], [U | B] is stored in its place, so that checkpoints and kernels
run the result as they run SVDQuant. Rounding of activations passes gradients straight through.
    LSQ: d xq / d s = Q(v) - v inside the grid, Q(v) where v = x / s is clipped;   times 1 / sqrt(numel * max)
Source: LSQ (arXiv 1902.08153, section 2).
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from dq.linear import QuantizedLinear
from dq.ops import pre_quantized
from dq.profiles import convention
from dq.qtensor import QTensor
from dq.transforms import apply_steps

RATES = {"factors": 1.0, "scales": 0.1, "norms": 0.5}  # times `rate`


@dataclass(frozen=True)
class Learned:
    """What learns in a layer: a branch of rank `rank` (0 for none), scales."""

    rank: int = 8
    scales: bool = False


class LSQ(torch.autograd.Function):
    """`Q(x / s) s` on a static grid, with the gradients of the module's docstring."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, scale: Tensor, fmt: Any) -> Tensor:
        v = x / scale
        q = fmt.round(v)
        ctx.save_for_backward(v, q)
        ctx.top, ctx.low = fmt.max, fmt.min
        return q * scale

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, None]:
        v, q = ctx.saved_tensors
        inside = (v >= ctx.low) & (v <= ctx.top)
        scale = (grad * torch.where(inside, q - v, q)).sum() / math.sqrt(v.numel() * ctx.top)
        return grad * inside, scale.reshape(1, 1), None


class SharedInput:
    """The rounded input of linears that read the same tensor and round it alike: computed once for all of them."""

    def __init__(self, layer: QuantizedLinear):
        self.layer, self.x, self.value = layer, None, None

    def serves(self, layer: QuantizedLinear) -> bool:
        mine, other = self.layer.config, layer.config
        names = ("activations", "steps", "residual", "dual", "step_groups")
        if any(getattr(mine, n) != getattr(other, n) for n in names) or self.layer.in_features != layer.in_features:
            return False
        ours, theirs = self._tensors(self.layer), self._tensors(layer)
        return all(a.shape == b.shape and torch.equal(a, b) for a, b in zip(ours, theirs, strict=True))

    @staticmethod
    def _tensors(layer: QuantizedLinear) -> list[Tensor]:
        found = [t for s in layer.steps for _, t in sorted(s.tensors.items())]
        return found + [getattr(layer, n) for n in ("input_scale", "input_edges") if hasattr(layer, n)]

    def of(self, x: Tensor, rounded: Any) -> Tensor:
        if self.x is not x:
            self.x, self.value = x, rounded(x)
        return self.value

    def clear(self) -> None:
        """Forgets the tensors of the last call, and the graph behind them."""
        self.x = self.value = None


class Corrected(nn.Module):
    """Stands in for a quantized linear while it learns. Weights in the layer's compute dtype."""

    def __init__(
        self, layer: QuantizedLinear, what: Learned, generator: torch.Generator, shared: SharedInput | None = None
    ):
        super().__init__()
        self.layer, self.in_features, self.out_features = layer, layer.in_features, layer.out_features
        self.shared = SharedInput(layer) if shared is None else shared
        device, spec, config = layer.qweight.device, layer.config.weights, layer.config
        self.down = self.up = self.factor = self.second = self.input_scale = None
        if what.rank:
            start = torch.randn(what.rank, layer.in_features, generator=generator) / math.sqrt(layer.in_features)
            self.down = nn.Parameter(start.to(device))
            self.up = nn.Parameter(torch.zeros(layer.out_features, what.rank, device=device))
        self.fixed = layer.qtensor.dequantize().to(layer.compute_dtype)
        parts = config.extra or spec.row_segments or spec.k_segments
        if what.scales and spec.global_scale == "tensor" and not (spec.row_segments or spec.k_segments):
            self.second = nn.Parameter(torch.ones(1, device=device))
        elif what.scales and spec.strategy in ("channel", "group") and spec.scale_format in ("fp32", "fp16", "bf16"):
            self.factor = None if parts else nn.Parameter(torch.ones(layer.weight_scale.shape, device=device))
        if what.scales and config.static and not config.step_groups:
            self.input_scale = nn.Parameter(layer.input_scale.clone())

    @property
    def weight(self) -> Tensor:
        """What code that looks at shape and dtype sees."""
        return self.layer.weight

    def groups(self) -> dict[str, list[nn.Parameter]]:
        """What learns, by the kind of its learning rate."""
        kinds = {"factors": (self.down, self.up), "scales": (self.factor, self.second, self.input_scale)}
        return {k: [p for p in found if p is not None] for k, found in kinds.items()}

    def _weight(self) -> Tensor:
        w = self.fixed
        if self.factor is not None:
            each = self.layer.config.weights.columns or w.shape[1]
            w = w * self.factor.repeat_interleave(each, 1)[:, : w.shape[1]].to(w)
        return w if self.second is None else w * self.second.to(w)

    def _rounded(self, x: Tensor) -> Tensor:
        """`Q_X(pre(x))`, residual columns appended, float32 [M, K']; its gradient is that of `pre(x)`."""
        params = self.layer.params
        rows = x.reshape(-1, self.in_features)
        pre = apply_steps(rows.to(torch.float32), params.steps)
        if params.activations is None:
            return pre
        if params.input_scale is not None:
            scale = params.input_scale if self.input_scale is None else self.input_scale
            return LSQ.apply(pre, scale, params.activations.fmt)
        with torch.no_grad():
            value = pre_quantized(rows, params)
        if params.residual:  # of what is added beside Q(x'), only the copy of Q(x') itself follows x'
            last = pre[:, -params.residual :]
            pre = torch.cat([pre, torch.zeros_like(last)] + [last] * params.dual, 1)
        return value + pre - pre.detach()

    def forward(self, x: Tensor) -> Tensor:
        """x [..., K] -> [..., N] in the dtype of x."""
        weight, params = self._weight(), self.layer.params
        value = self._rounded(x) if self.input_scale is not None else self.shared.of(x, self._rounded)
        y = (value.to(weight.dtype) @ weight.T).to(torch.float32)
        wide = x.reshape(-1, self.in_features).to(torch.float32)
        if params.down is not None:
            y = y + (wide @ params.down.to(wide).T) @ params.up.to(wide).T
        if self.down is not None:
            y = y + (wide @ self.down.T) @ self.up.T
        if params.bias is not None:
            y = y + params.bias.to(y)
        return y.to(x.dtype).reshape(*x.shape[:-1], self.out_features)

    @torch.no_grad()
    def finished(self) -> QuantizedLinear | None:
        """The layer with what was learned; None if nothing was."""
        old, params = self.layer, self.layer.params
        weight = self._learned_weight(params.weight)
        scale = params.input_scale if self.input_scale is None else self.input_scale.abs()
        if old.config.step_groups:
            scale = old.input_scale
        side = None if params.down is None else (params.down, params.up)
        if self.up is not None and self.up.any():
            side = self._branch()
        same = self.input_scale is None or torch.equal(scale, params.input_scale)
        if weight is params.weight and same and (side is None or side[0] is params.down):
            return None
        new = QuantizedLinear.build(
            weight, activations=params.activations, steps=params.steps, side=side, bias=params.bias,
            dtype=old.compute_dtype, input_scale=scale, input_edges=getattr(old, "input_edges", None),
            residual=params.residual, dual=params.dual,
        )  # fmt: skip
        new.activations_mode, new.step_context = old.activations_mode, old.step_context
        return new.train(old.training)

    def _branch(self) -> tuple[Tensor, Tensor]:
        """[L | A], [U | B] in 16 bits, both equally large as those of an SVD: a copy of either loses as little."""
        old, params = self.layer, self.layer.params
        kind = old.compute_dtype if old.compute_dtype in (torch.float16, torch.bfloat16) else torch.bfloat16
        kind = kind if params.down is None else params.down.dtype
        root = (self.up.norm(dim=0).clamp(min=1e-12) / self.down.norm(dim=1).clamp(min=1e-12)).sqrt()
        down, up = (self.down * root[:, None]).to(kind), (self.up / root).to(kind)
        return (down, up) if params.down is None else (torch.cat([params.down, down]), torch.cat([params.up, up], 1))

    def _learned_weight(self, old: QTensor) -> QTensor:
        """The same codes at learned scales; `old` itself if none moved."""
        weight = old
        if self.factor is not None and (self.factor != 1).any():
            scale = weight.scale.to(torch.float32) * self.factor
            weight = replace(weight, scale=scale.to(weight.scale.dtype))
        if self.second is not None and (self.second != 1).any():
            inverse = convention(weight.spec).levels == "inverse"
            level = weight.global_scale
            weight = replace(weight, global_scale=level / self.second if inverse else level * self.second)
        return weight


class Student:
    """The model with stand-ins that learn in the place of its linears, and gains of norms that learn; a context, behind
    which the linears, and the gains unless they are `kept`, are those from before."""

    def __init__(self, model: nn.Module, names: list[str], what: Learned, norms: bool, generator: torch.Generator):
        self.model, self.kept, inputs = model, False, {}
        self.originals = {n: model.get_submodule(n) for n in names}
        self.layers: dict[str, Corrected] = {}
        for name, layer in self.originals.items():
            beside = inputs.setdefault(name.rpartition(".")[0], [])
            shared = next((s for s in beside if s.serves(layer)), None)
            if shared is None:
                beside.append(shared := SharedInput(layer))
            self.layers[name] = made = Corrected(layer, what, generator, shared)
            if made.second is not None:  # q, k and v stay under one second level: other engines hold them as one matrix
                level = layer.weight_global_scale
                mates = (m for m in self.layers.values() if m.shared is shared)
                made.second = next(m.second for m in mates if torch.equal(m.layer.weight_global_scale, level))
        self.inputs = [s for found in inputs.values() for s in found]
        self.norms = _gains(model) if norms else []
        self.before = [p.detach().clone() for p in self.norms]
        self.masters = [nn.Parameter(p.detach().to(torch.float32).clone()) for p in self.norms]

    def __enter__(self) -> Student:
        for name, module in self.layers.items():
            self.model.set_submodule(name, module)
        for p in self.norms:
            p.requires_grad_(True)
        return self

    def __exit__(self, *problem: Any) -> None:
        for name, layer in self.originals.items():
            self.model.set_submodule(name, layer)
        for p, old in zip(self.norms, self.before, strict=True):
            p.grad = None
            if not self.kept:
                p.data.copy_(old)

    def optimizer(self, rate: float) -> torch.optim.Optimizer:
        found = {kind: [p for m in self.layers.values() for p in m.groups().get(kind, ())] for kind in RATES}
        found["norms"] = self.masters
        found = {kind: list(dict.fromkeys(ps)) for kind, ps in found.items() if ps}
        return torch.optim.Adam([{"params": ps, "lr": rate * RATES[kind]} for kind, ps in found.items()])

    def backward(self, loss: Tensor) -> None:
        """Gradients; those of gains go to their float32 copies, in which a small step is not lost."""
        loss.backward()
        for shared in self.inputs:
            shared.clear()
        for p, master in zip(self.norms, self.masters, strict=True):
            if p.grad is not None:
                master.grad = p.grad.to(torch.float32) + (0.0 if master.grad is None else master.grad)
                p.grad = None

    @torch.no_grad()
    def moved(self) -> None:
        """After a step of the optimizer."""
        for p, master in zip(self.norms, self.masters, strict=True):
            p.copy_(master)

    def finish(self) -> dict[str, nn.Module]:
        """The layers that changed; gains are kept."""
        self.kept = True
        return {n: layer for n, m in self.layers.items() if (layer := m.finished()) is not None}


def _gains(model: nn.Module) -> list[nn.Parameter]:
    """Weights and biases of the norms, which stay in 16 bits whatever the recipe."""
    found = [p for m in model.modules() if "norm" in type(m).__name__.lower() for p in m.parameters(recurse=False)]
    return [p for p in dict.fromkeys(found) if p.dim() == 1 and p.is_floating_point()]
