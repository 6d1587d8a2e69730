"""The quantized linear as an equation, and the choice of the kernel that runs it.

    y = Q_X(pre(x)) @ Q_W(W')^T + (x @ down^T) @ up^T + b

With S residual channels (ARCQuant, arXiv 2601.07475), o the last S of x' = pre(x), both operands grow along K:
`[Q(x') | Q(x'_o - Q(x')_o)] @ [Q(W') | Q(W')_o]^T`; dual adds the columns `Q(x')_o` against `Q(W'_o - Q(W')_o)`.

`reference_qlinear` is the definition: plain torch, float32, any device. Backends in dq/kernels are tested against it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from dq.columns import residual_codes
from dq.qtensor import QTensor, fake_quantize
from dq.registry import DQError, Registry, suggest
from dq.spec import QuantSpec
from dq.transforms import Step, apply_steps

MODES = ("auto", "faithful", "native")


@dataclass
class LinearParams:
    """What a kernel needs of one quantized linear [N, K].

    Attributes:
        weight: the quantized W' [N, K], or [N, K + S] with residual channels, [N, K + 2 S] with dual ones.
        activations: grid of the input, or None for 16-bit activations (weight-only).
        steps: input steps, in order.
        down, up: low-rank factors [r, K] and [N, r] on the raw x, or None.
        bias: [N] or None.
        input_scale: float32 [1, 1], the calibrated scale of a static activation grid (strategy `tensor`), or None.
        residual: S residual channels, 0 for none.
        dual: whether their weight columns have a residual too.
        fuse: whether the call is being compiled, so that plain operators cost no passes over memory of their own.
        shared: what other layers have already made of the same input, or None.
    """

    weight: QTensor
    activations: QuantSpec | None = None
    steps: list[Step] = field(default_factory=list)
    down: Tensor | None = None
    up: Tensor | None = None
    bias: Tensor | None = None
    input_scale: Tensor | None = None
    residual: int = 0
    dual: bool = False
    fuse: bool = False
    shared: dict[Any, Any] | None = None

    @property
    def width(self) -> int:
        """K of the linear itself."""
        return self.weight.shape[1] - self.residual * (1 + self.dual)


@dataclass(frozen=True)
class Backend:
    """One way to run a quantized linear.

    Attributes:
        name: registry key, shown in reports.
        priority: the highest that accepts a layer runs it.
        refuse: `(params, device, dtype) -> reason`, "" if it can run.
        run: `(x [M, K], params) -> y [M, N]` in the dtype of x.
        grid: `(params) -> name` of the activation grid that this backend really applies.
        faithful: whether that grid is always the recipe's own.
        available: `() -> reason` why it cannot run on this machine at all, "" if it can.
        in_torch: `(params) -> reason` why plain torch, not a kernel, prepares the input, "" if that is not so.
    """

    name: str
    priority: int
    refuse: Callable[[LinearParams, torch.device, torch.dtype], str]
    run: Callable[[Tensor, LinearParams], Tensor]
    grid: Callable[[LinearParams], str]
    faithful: bool = True
    available: Callable[[], str] = lambda: ""
    in_torch: Callable[[LinearParams], str] = lambda params: ""


BACKENDS: Registry[Backend] = Registry("backend", "dq.kernels.backends")


def pre_quantized(x: Tensor, params: LinearParams) -> Tensor:
    """`Q_X(pre(x))` in float32 for x [..., K], residual columns appended."""
    x = apply_steps(x.to(torch.float32), params.steps)
    if params.activations is None:
        return x
    if params.input_scale is not None:
        return params.activations.fmt.round(x / params.input_scale) * params.input_scale
    q = fake_quantize(x, params.activations)
    if not params.residual:
        return q
    rows, shape = q.reshape(-1, q.shape[-1]), (*q.shape[:-1], -1)
    columns = [rows, residual_codes(x.reshape(rows.shape), rows, params.activations, params.residual)]
    if params.dual:
        columns.append(rows[:, -params.residual :])
    return torch.cat(columns, 1).reshape(shape) if rows.shape[0] else q.new_zeros(*q.shape[:-1], params.weight.shape[1])


def reference_qlinear(x: Tensor, params: LinearParams) -> Tensor:
    """The equation above for x [M, K], computed in float32 and cast to the dtype of x once, at the end.

    In float32 no intermediate overflows where the result fits: scales multiply values, never 16-bit accumulators.
    """
    y = pre_quantized(x, params) @ params.weight.dequantize().T
    if params.down is not None:
        y += (x.to(torch.float32) @ params.down.to(torch.float32).T) @ params.up.to(torch.float32).T
    if params.bias is not None:
        y += params.bias.to(torch.float32)
    return y.to(x.dtype)


def own_grid(params: LinearParams) -> str:
    """The recipe's own activation grid."""
    return "16-bit" if params.activations is None else str(params.activations)


BACKENDS.register(Backend("torch-reference", 0, lambda p, device, dtype: "", reference_qlinear, own_grid))


@dataclass(frozen=True)
class Choice:
    """A chosen backend and, for each one refused, the reason."""

    backend: Backend
    refused: dict[str, str]


def choose_backend(params: LinearParams, device: torch.device, dtype: torch.dtype, mode: str = "auto") -> Choice:
    """The backend of highest priority that accepts the layer.

    Args:
        mode: `faithful` runs the recipe's own activation grid; `native` takes the fastest grid that loses nothing;
            `auto` is native on a GPU and faithful on a CPU.

    Raises:
        DQError: unknown mode.
    """
    if mode not in MODES:
        raise DQError(f"unknown activations mode {mode!r}{suggest(mode, MODES)}")
    faithful = mode == "faithful" or (mode == "auto" and device.type == "cpu")
    refused: dict[str, str] = {}
    for backend in sorted(BACKENDS, key=lambda b: -b.priority):
        why = backend.available() or backend.refuse(params, device, dtype)
        if not why and faithful and not backend.faithful:
            why = f"runs the grid {backend.grid(params)}, and faithful activations were asked for"
        if not why:
            return Choice(backend, refused)
        refused[backend.name] = why
    raise DQError("no backend accepts this layer: " + "; ".join(f"{n}: {w}" for n, w in refused.items()))
