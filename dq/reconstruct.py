"""Block reconstruction: the rounding of all linears of a block is learned together, against the block's 16-bit output.

    M L / L0 + strength * sum over ALL linears of (1 - |2h - 1|^beta),   L = sum over outputs of |f_q - f|^2 / |f|^2

h is AdaRound's soft choice (dq.rounding.adaround), M the number of choices, L0 the error of the rounding that it starts
from. Scales stay. Activations are rounded as at run time; gradients pass through that rounding. Sources: BRECQ
(arXiv 2102.05426); Q-Diffusion (arXiv 2302.04304), whose code forgets the second half of split layers in the
regulariser. The unit M / L0, and starting from any rounding, are our own.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from dq.linear import QuantizedLinear
from dq.ops import pre_quantized
from dq.qtensor import encode
from dq.records import map_tensors, tensors
from dq.registry import DQError
from dq.replay import call, device_of
from dq.rounding.adaround import Soft, beta, choice, regulariser
from dq.transforms import TRANSFORMS, apply_steps

Call = tuple[tuple, dict[str, Any]]  # args and kwargs of the block


class Reconstruction(NamedTuple):
    """Layers by name, and the block's relative output error L before and after; `after` is never larger."""

    layers: dict[str, QuantizedLinear]
    before: float
    after: float


class _Learned(nn.Module):
    """A quantized linear whose codes are being learned; stands in for its 16-bit original.

    With dual residual channels the last S columns stay as they are: their weight residual belongs to these codes.
    """

    def __init__(self, layer: QuantizedLinear, raw: Tensor):
        super().__init__()
        self.layer, self.params = layer, layer.params
        self.in_features, self.out_features = layer.in_features, layer.out_features
        stored = self.params.weight
        width, extra, s = layer.in_features, layer.config.extra, layer.config.residual
        self.start = stored.dequantize()
        goal = raw.detach().to(self.start)
        if layer.config.rank:
            goal = goal - self.params.up.to(goal) @ self.params.down.to(goal)
        for step in self.params.steps:
            goal = TRANSFORMS.get(step.name).weight(goal, step.tensors, step.params)
        wide = torch.cat([goal, self.start[:, width:]], 1) if extra else goal
        whole = Soft.of(wide, stored.scales, stored.spec, self.start)
        free = width - s if layer.config.dual else width
        self.soft = Soft(*(t[:, :free].contiguous() for t in (whole.lower, whole.gap, whole.v)))
        self.soft.v.requires_grad_(True)
        self.base = apply_steps(goal.new_zeros(1, width), self.params.steps) if layer.config.shifted else None

    @property
    def weight(self) -> Tensor:
        return self.layer.weight

    @property
    def bias(self) -> Tensor | None:
        return self.layer.bias

    def stored(self, free: Tensor) -> Tensor:
        """The stored weight [N, K + extra] for values [N, F] of the free columns."""
        width, s = self.in_features, self.layer.config.residual
        if not s:
            return free
        if self.layer.config.dual:
            return torch.cat([free, self.start[:, free.shape[1] :]], 1)
        return torch.cat([free, free[:, width - s :]], 1)

    def _constant(self, stored: Tensor) -> Tensor | float:
        """What the bias still has to take off, because the shifted input now meets another weight: [N]."""
        if self.base is None:
            return 0.0
        return (self.base @ (self.start - stored)[:, : self.in_features].T)[0]

    def forward(self, x: Tensor) -> Tensor:
        weight = self.stored(self.soft.values())
        wide = x.to(torch.float32)
        moved = apply_steps(wide, self.params.steps)
        with torch.no_grad():
            executed = pre_quantized(wide, self.params)
        # The rounded input in value; for the gradient, the input itself (residual columns only refine it).
        straight = torch.nn.functional.pad(moved - moved.detach(), (0, executed.shape[-1] - moved.shape[-1]))
        y = (executed + straight) @ weight.T + self._constant(weight)
        if self.params.down is not None:
            y = y + (wide @ self.params.down.to(wide).T) @ self.params.up.to(wide).T
        if self.params.bias is not None:
            y = y + self.params.bias.to(y)
        return y.to(x.dtype)

    def hardened(self) -> QuantizedLinear:
        """The layer with the codes that were learned."""
        with torch.no_grad():
            values = self.stored(self.soft.hard())
            layer, stored = copy.deepcopy(self.layer), self.params.weight
            layer.qweight = encode(values, stored.scales, stored.spec).codes
            if self.base is not None:
                bias = self.params.bias.to(torch.float32) + self._constant(values)
                layer.bias = nn.Parameter(bias.to(layer.bias.dtype), requires_grad=False)
        return layer


@contextmanager
def _inside(block: nn.Module, layers: dict[str, nn.Module]):
    """The block with these in place of its linears."""
    originals = {name: block.get_submodule(name) for name in layers}
    try:
        for name, layer in layers.items():
            block.set_submodule(name, layer)
        yield
    finally:
        for name, old in originals.items():
            block.set_submodule(name, old)


class _Loss:
    """L of a block over fixed calls; outputs and their powers are kept on the CPU."""

    def __init__(self, block: nn.Module, inputs: Sequence[Call], outputs: Sequence[Any] | None):
        self.block, self.inputs, self.device = block, inputs, device_of(block)
        found = [call(block, *i, self.device) for i in inputs] if outputs is None else outputs
        self.outputs = [[t.to("cpu", torch.float32) for t in _floating(o)] for o in found]
        powers = [[float(t.square().mean()) for t in o] for o in self.outputs]
        self.powers = [max(sum(p) / len(p), 1e-30) for p in zip(*powers, strict=True)]

    def of(self, index: int) -> Tensor:
        """L of one call, with gradients if they are on."""
        args, kwargs = map_tensors(self.inputs[index], lambda t: t.to(self.device, copy=True))
        got = _floating(self.block(*args, **kwargs))
        pairs = zip(got, self.outputs[index], self.powers, strict=True)
        return torch.stack([(g.float() - o.to(g.device)).square().mean() / p for g, o, p in pairs]).sum()

    def mean(self) -> float:
        with torch.no_grad():
            return sum(float(self.of(i)) for i in range(len(self.inputs))) / len(self.inputs)


def _floating(tree: Any) -> list[Tensor]:
    tree = tree.to_tuple() if hasattr(tree, "to_tuple") else tree
    return [t for t in tensors(tree) if t.is_floating_point()]


def reconstruct(
    block: nn.Module,
    layers: dict[str, QuantizedLinear],
    inputs: Sequence[Call],
    outputs: Sequence[Any] | None = None,
    *,
    iters: int = 200,
    lr: float = 0.1,
    strength: float = 10.0,
    warmup: float = 0.2,
    seed: int = 0,
) -> Reconstruction:
    """Learns the rounding of a block's linears together. Deterministic; `block` and `layers` are left as they are.

    Args:
        block: the 16-bit block.
        layers: quantized linears by their name inside the block, rounded by any rounding: where it starts from.
        inputs: (args, kwargs) of calls of the block.
        outputs: what the 16-bit block returns on them; default: computed here.
        iters: steps, each on one of the calls.
        lr, strength, warmup: as in AdaRound.
        seed: of the order of the calls.

    Returns:
        new layers; those it started from, if they turn out better over all calls.

    Raises:
        DQError: no calls, no layers, a layer that the block lacks, or a number out of its range.
    """
    _check(block, layers, inputs, iters, lr, strength, warmup)
    loss = _Loss(block, inputs, outputs)
    learned = {n: _Learned(x.to(device_of(block)), block.get_submodule(n).weight) for n, x in layers.items()}
    with _inside(block, layers):
        before = loss.mean()
    if before > 0:
        with _inside(block, learned), torch.enable_grad():
            _learn([m.soft for m in learned.values()], loss, before, iters, lr, strength, warmup, seed)
    hard = {n: m.hardened() for n, m in learned.items()}
    with _inside(block, hard):
        after = loss.mean()
    return Reconstruction(hard, before, after) if after < before else Reconstruction(dict(layers), before, before)


def _learn(softs: list[Soft], loss: _Loss, unit: float, iters, lr, strength, warmup, seed) -> None:
    count, rng = sum(s.v.numel() for s in softs), torch.Generator().manual_seed(seed)
    variables, order = [s.v for s in softs], []
    optimizer = torch.optim.Adam(variables, lr)
    for i in range(iters):
        order = order or torch.randperm(len(loss.inputs), generator=rng).tolist()
        total, exponent = loss.of(order.pop()) * (count / unit), beta(i, iters, warmup)
        if exponent is not None:
            total = total + strength * sum(regulariser(choice(v), exponent) for v in variables)
        for v, grad in zip(variables, torch.autograd.grad(total, variables), strict=True):
            v.grad = grad
        optimizer.step()


def _check(block, layers, inputs, iters, lr, strength, warmup) -> None:
    if not inputs or not layers:
        raise DQError(f"reconstruction needs {'calls of the block' if not inputs else 'quantized linears'}; got none")
    if iters < 1 or lr <= 0 or strength < 0 or not 0 <= warmup < 1:
        raise DQError(
            "reconstruction takes iters from 1, lr above 0, strength from 0 and warmup from 0 to below 1; got "
            f"iters {iters}, lr {lr}, strength {strength}, warmup {warmup}"
        )
    known = dict(block.named_modules())
    for name in layers:
        if not isinstance(known.get(name), nn.Linear) or isinstance(known[name], QuantizedLinear):
            raise DQError(f"reconstruction found no 16-bit linear {name!r} in {type(block).__name__}")
