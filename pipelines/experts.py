"""Experts that transformers keeps in one tensor [experts, N, K], opened into linears, so that recipes reach them.

    y_t = sum over j of g_tj * down_e(act(gate_e(x_t), up_e(x_t))),  e = e_tj the experts that the router chose

An opened layer holds one small module per expert (`experts.3.gate_proj`, `up_proj`, `down_proj`; `gate_up_proj` where
gate and up interleave or have a gating of their own), whose weights are views of the tensor: nothing is copied, and the
planner, the loop and the checkpoint see ordinary linears. Each expert then has scales, statistics and a rounding of its
own, from the tokens that the router sent to it. The router is no part of it and stays in 16 bits.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn

_FLAGS = ("num_experts", "has_gate", "has_bias", "is_transposed", "is_concatenated", "_apply_gate")


def is_stacked(module: nn.Module) -> bool:
    """Whether the module is a layer of experts in transformers' common form: parameters `gate_up_proj` (or `up_proj`)
    and `down_proj` [experts, N, K], or [experts, K, N] if `is_transposed`, and the flags that say how they are used."""
    if not all(hasattr(module, flag) for flag in _FLAGS):
        return False
    names = _names(module)
    found, known = [module._parameters.get(n) for n in names], {*names, *(f"{n}_bias" for n in names)}
    plain = all(p is not None and p.dim() == 3 and p.is_floating_point() and p.itemsize > 1 for p in found)
    return plain and known >= {n for n, p in module._parameters.items() if p is not None}


def _names(module: nn.Module) -> tuple[str, str]:
    return ("gate_up_proj" if module.has_gate else "up_proj", "down_proj")


class Expert(nn.Module):
    """The linears of one expert."""


class OpenedExperts(nn.Module):
    """A layer of experts with one `Expert` each, called like the layer that it replaces.

    Args:
        closed: the layer that it stands for; its stacked parameters move to the meta device when the layer is released
            (`release`), everything else of it (gating, activation, a norm) is used as it is.

    Attributes:
        split: whether gate and up are linears of their own.
    """

    def __init__(self, closed: nn.Module):
        super().__init__()
        self._closed = (closed,)  # in a tuple: it is no child, its stacked parameters are no parameters of this
        self.num_experts = closed.num_experts
        default = type(closed)._apply_gate.__name__ == "_default_apply_gate"
        self.split = closed.has_gate and closed.is_concatenated and default
        for i in range(self.num_experts):
            self.add_module(str(i), self._expert(i))
        for name, child in closed.named_children():  # the activation, a norm after each expert
            self.add_module(name, child)
        self.train(closed.training)

    @property
    def closed(self) -> nn.Module:
        """The layer that this stands for."""
        return self._closed[0]

    def _expert(self, index: int) -> Expert:
        expert, (first, last) = Expert(), _names(self.closed)
        for name in (first, last):
            weight = self.closed._parameters[name]
            bias = self.closed._parameters[f"{name}_bias"] if self.closed.has_bias else None
            w = weight.detach()[index]
            w, b = (w.T if self.closed.is_transposed else w), None if bias is None else bias.detach()[index]
            parts = {"gate_proj": 0, "up_proj": 1} if self.split and name == first else {name: None}
            for part, at in parts.items():
                mine, own = (w, b) if at is None else (w.chunk(2)[at], None if b is None else b.chunk(2)[at])
                expert.add_module(part, _linear(mine, own, weight.requires_grad))
        return expert

    def forward(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        """Tokens [T, d], chosen experts and their weights [T, k] -> [T, d]. Index `num_experts` stands for no expert.

        Every chosen expert runs once on all its tokens; a token's k results are summed in their order.
        """
        chosen, width = top_k_index.reshape(-1), top_k_index.shape[-1]
        out = hidden_states.new_zeros(len(chosen), hidden_states.shape[-1])
        for i in chosen.unique().tolist():
            if i < self.num_experts:
                rows = (chosen == i).nonzero()[:, 0]
                out[rows] = self._run(getattr(self, str(i)), hidden_states[rows // width]).to(out.dtype)
        weighted = out * top_k_weights.reshape(-1, 1)
        return weighted.view(-1, width, out.shape[-1]).sum(1).to(hidden_states.dtype)

    def _run(self, expert: Expert, x: Tensor) -> Tensor:
        if self.split:
            h = self.closed.act_fn(expert.gate_proj(x)) * expert.up_proj(x)
        elif self.closed.has_gate:
            h = self.closed._apply_gate(expert.gate_up_proj(x))
        else:
            h = self.closed.act_fn(expert.up_proj(x))
        y = expert.down_proj(h)
        return self.closed.post_expert_norm(y) if getattr(self.closed, "has_post_expert_norm", False) else y

    def linears(self) -> Iterator[tuple[Expert, str, nn.Linear]]:
        """(expert, name, linear) of every linear."""
        for i in range(self.num_experts):
            expert = getattr(self, str(i))
            for name, linear in expert.named_children():
                yield expert, name, linear

    def release(self) -> None:
        """Lets go of the stacked tensors: linears that were not replaced get weights of their own."""
        for _, _, linear in self.linears():
            for p in (linear._parameters.get("weight"), linear.bias):
                if p is not None and not p.is_meta and p.untyped_storage().nbytes() > p.nbytes:
                    p.data = p.data.clone()
        for name, p in self.closed._parameters.items():
            if p is not None:
                self.closed._parameters[name] = nn.Parameter(torch.empty_like(p, device="meta"), p.requires_grad)

    def close(self) -> nn.Module:
        """The original layer with the weights that the (16-bit) linears hold now, stacked anew."""
        first, last = _names(self.closed)
        for name in (first, last):
            parts = ("gate_proj", "up_proj") if self.split and name == first else (name,)
            experts = [getattr(self, str(i)) for i in range(self.num_experts)]
            rows = [torch.cat([getattr(e, p).weight.detach() for p in parts]) for e in experts]
            rows = [w.T for w in rows] if self.closed.is_transposed else rows
            self.closed._parameters[name] = nn.Parameter(torch.stack(rows), requires_grad=False)
            if self.closed.has_bias:
                biases = torch.stack([torch.cat([getattr(e, p).bias.detach() for p in parts]) for e in experts])
                self.closed._parameters[f"{name}_bias"] = nn.Parameter(biases, requires_grad=False)
        return self.closed.train(self.training)


def _linear(weight: Tensor, bias: Tensor | None, trainable: bool) -> nn.Linear:
    """A linear whose parameters are these tensors. Its own constructor would draw random weights first: seconds for
    thousands of experts."""
    linear = nn.Linear.__new__(nn.Linear)
    nn.Module.__init__(linear)
    linear.out_features, linear.in_features = weight.shape
    linear.weight = nn.Parameter(weight, trainable)
    linear.register_parameter("bias", None if bias is None else nn.Parameter(bias, trainable))
    return linear


def stacked_layers(model: nn.Module) -> dict[str, nn.Module]:
    """name -> every layer of stacked experts that can be opened."""
    return {n: m for n, m in model.named_modules() if n and is_stacked(m)}


def opened_layers(model: nn.Module) -> dict[str, OpenedExperts]:
    """name -> every layer that is open."""
    return {n: m for n, m in model.named_modules() if isinstance(m, OpenedExperts)}


def open_experts(model: nn.Module) -> dict[str, nn.Module]:
    """Opens every layer of stacked experts in place; returns the originals by name, for `restore`."""
    found = stacked_layers(model)
    for name, module in found.items():
        model.set_submodule(name, OpenedExperts(module))
    return found


def restore(model: nn.Module, originals: dict[str, nn.Module]) -> None:
    """Puts layers back that `open_experts` took out and nothing has released."""
    for name, module in originals.items():
        model.set_submodule(name, module)


@contextmanager
def opened(models: Iterable[nn.Module]) -> Iterator[None]:
    """Inside, the experts of all models are linears; afterwards the layers are the very ones from before."""
    found = [(model, open_experts(model)) for model in models]
    try:
        yield
    finally:
        for model, originals in found:
            restore(model, originals)


def settle(model: nn.Module, originals: dict[str, nn.Module]) -> None:
    """After quantization: releases what was opened; where no expert was quantized at all, the originals come back."""
    mine = [model.get_submodule(name) for name in originals]
    if all(type(linear) is nn.Linear for layer in mine for _, _, linear in layer.linears()):
        return restore(model, originals)
    for layer in mine:
        layer.release()


def open_named(model: nn.Module, names: Iterable[str]) -> None:
    """Opens all experts of an empty model if a checkpoint names linears of one of them."""
    inside = tuple(f"{n}." for n in stacked_layers(model))
    if inside and any(name.startswith(inside) for name in names):
        for name in open_experts(model):
            model.get_submodule(name).release()


def close_experts(model: nn.Module) -> None:
    """Stacks the experts of every opened layer again; their linears must be 16-bit ones."""
    for name, layer in opened_layers(model).items():
        model.set_submodule(name, layer.close())
