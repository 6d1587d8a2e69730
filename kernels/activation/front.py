"""`Front`: what stands before a quantized linear and is computed in the same launch; and its definition in torch.

Everything is float32: the 16-bit roundings between separate operators fall away, so results are closer to the exact
ones, not equal to those of 16-bit operators one after the other.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from dq.registry import DQError

KINDS = ("", "rmsnorm", "layernorm", "gelu", "silu")


@dataclass(frozen=True)
class Front:
    """An operator in front of a linear with K inputs.

    Attributes:
        kind: `rmsnorm` (x / sqrt(mean x^2 + eps)), `layernorm`, `gelu` (tanh form), `silu`; "" for none.
        weight, bias: [K] of a norm, or None.
        scale, shift: [B, K], both or none: `y * (1 + scale) + shift` (adaLN); row i of x takes row i // (M / B).
        gate: [M, K] or [..., K]; the result of gelu or silu (or x itself) is multiplied by it: GEGLU, SwiGLU.
        eps: of a norm.
    """

    kind: str = ""
    weight: Tensor | None = None
    bias: Tensor | None = None
    scale: Tensor | None = None
    shift: Tensor | None = None
    gate: Tensor | None = None
    eps: float = 1e-6

    def __post_init__(self):
        if self.kind not in KINDS:
            raise DQError(f"unknown front {self.kind!r}: one of {', '.join(filter(None, KINDS))}, or none")
        if (self.scale is None) != (self.shift is None):
            raise DQError("adaLN takes scale and shift together")
        if self.kind not in ("rmsnorm", "layernorm") and not (self.weight is self.bias is None):
            raise DQError("weight and bias belong to a norm")


def apply_front(x: Tensor, front: Front) -> Tensor:
    """x float32 [M, K] through the operator, in float32."""
    if front.kind == "gelu":
        x = torch.nn.functional.gelu(x, approximate="tanh")
    elif front.kind == "silu":
        x = torch.nn.functional.silu(x)
    if front.gate is not None:
        x = x * front.gate.reshape(x.shape).to(x)
    if front.kind in ("rmsnorm", "layernorm"):
        x = x - x.mean(-1, keepdim=True) if front.kind == "layernorm" else x
        x = x * torch.rsqrt(x.square().mean(-1, keepdim=True) + front.eps)
    x = x if front.weight is None else x * front.weight.to(x)
    x = x if front.bias is None else x + front.bias.to(x)
    if front.scale is None:
        return x
    rows = len(x) // max(1, len(front.scale))
    return x * (1.0 + _spread(front.scale, rows).to(x)) + _spread(front.shift, rows).to(x)


def _spread(t: Tensor, rows: int) -> Tensor:
    return t.repeat_interleave(rows, 0)
