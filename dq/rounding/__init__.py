"""Roundings: one function each, `(job, **params) -> (QTensor, QTensor | None)`, in files discovered here.

The first result is W' [N, K]; the second, asked for by dual residual channels, what W' left over on its last S columns.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from dq.qtensor import QTensor, quantize
from dq.registry import Registry
from dq.scales import find_rule
from dq.spec import QuantSpec


@dataclass
class Job:
    """One weight to be rounded.

    Attributes:
        name: what messages call it.
        weight: W' [N, K] in the basis of the transformed input.
        spec: the grid.
        x: sample [n, K] of the transformed input, or None.
        amax: largest |W'| over linears that must share a second-level scale, or None for the weight's own.
        hessian: E[x' x'^T] [K, K], or None if it was not collected.
        mean: E[x'] [K] if the bias will take up what the mean loses: only deviations from it count then; else None.
        gain, noise: [K], the executed input as `gain * x' + e`, E[e^2] = noise; None for 16-bit activations.
        residual: S > 0 for dual residual channels: the last S columns are rounded twice.
    """

    name: str
    weight: Tensor
    spec: QuantSpec
    x: Tensor | None = None
    amax: Tensor | None = None
    hessian: Tensor | None = None
    mean: Tensor | None = None
    gain: Tensor | None = None
    noise: Tensor | None = None
    residual: int = 0

    @cached_property
    def importance(self) -> Tensor | None:
        """E[x_k^2] [K], from the Hessian, or from the sample."""
        if self.hessian is not None:
            return self.hessian.diagonal()
        return None if self.x is None else self.x.square().mean(0)

    def statistics(self, start: int = 0) -> dict[str, Tensor]:
        """What the spec's scale rule asks for, of columns `start:`; {} if it asks for nothing or there is none."""
        needs = find_rule(self.spec).needs
        if needs == "importance" and self.importance is not None:
            return {"importance": self.importance[start:]}
        if needs == "hessian" and (self.hessian is not None or self.x is not None):
            whole = self.x.T @ self.x / max(len(self.x), 1) if self.hessian is None else self.hessian
            return {"hessian": whole[start:, start:]}
        return {}

    def left_over(self, main: QTensor) -> QTensor | None:
        """The weight residual `Q(W'_o - Q(W')_o)` of the last S columns, under the second level of `main`."""
        if not self.residual:
            return None
        start = self.weight.shape[1] - self.residual
        rest = (self.weight - main.dequantize().to(self.weight))[:, start:]
        amax = self.weight.abs().amax() if self.amax is None else self.amax
        return quantize(rest.to(torch.float32), self.spec, amax=amax, name=self.name, **self.statistics(start))


@dataclass(frozen=True)
class Rounding:
    """A named way from real weights to codes.

    Attributes:
        round: `(job, **params) -> (QTensor, QTensor | None)`.
        needs_stats: whether it cannot work without calibration.
        needs_gram: whether it wants `job.hessian`.
        check: `(params) -> complaint`, "" if it can work with them.
    """

    name: str
    round: Callable[..., tuple[QTensor, QTensor | None]]
    needs_stats: bool = False
    needs_gram: bool = False
    check: Callable[[dict], str] = lambda params: ""


ROUNDINGS: Registry[Rounding] = Registry("rounding", "dq.rounding")
