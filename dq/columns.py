"""Columns of quantized tensors: taken, joined, measured in code steps, and carried twice as residual channels.

Source of the latter: ARCQuant (arXiv 2601.07475, section 3).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from dq.qtensor import QTensor, Scales, fake_quantize
from dq.scales import amax as block_amax
from dq.spec import QuantSpec


def residual_codes(x: Tensor, q: Tensor, spec: QuantSpec, count: int) -> Tensor:
    """`Q(x_o - q_o)` [n, count], o the last `count` columns of x [n, K] and of its rounded form q: on the grid of
    `spec`, under the second level that x itself has. Source: ARCQuant (arXiv 2601.07475, section 3)."""
    amax = block_amax(x) if spec.global_scale == "token" else None
    return fake_quantize(x[:, -count:] - q[:, -count:], spec, amax)


def with_residual(x: Tensor, q: Tensor, spec: QuantSpec, count: int) -> Tensor:
    """`q_o + Q(x_o - q_o)` [n, count]: the value that residual channels carry in the end."""
    return q[:, -count:] + residual_codes(x, q, spec, count)


def take_columns(q: QTensor, start: int) -> QTensor:
    """Columns `start:` of a quantized tensor, codes and scales as they are; `start` on a border of groups and bytes."""
    spec, (rows, width) = q.spec, q.shape
    group = start // spec.columns if spec.columns else 0
    codes = q.codes[:, spec.fmt.packed_width(start) :]
    zero = None if q.zero_point is None else q.zero_point[:, group:]
    return replace(q, codes=codes, scale=q.scale[:, group:], zero_point=zero, shape=(rows, width - start))


def join_columns(parts: Sequence[QTensor]) -> QTensor:
    """Quantized tensors of the same rows, spec and second level, side by side along K."""
    first = parts[0]
    zero = None if first.zero_point is None else torch.cat([p.zero_point for p in parts], 1)
    return replace(
        first,
        codes=torch.cat([p.codes.view(torch.uint8) for p in parts], 1).view(first.codes.dtype),
        scale=torch.cat([p.scale.view(torch.uint8) for p in parts], 1).view(first.scale.dtype)
        if first.scale.element_size() == 1
        else torch.cat([p.scale for p in parts], 1),
        zero_point=zero,
        shape=(first.shape[0], sum(p.shape[1] for p in parts)),
    )


def code_steps(scales: Scales, spec: QuantSpec, shape: tuple[int, int]) -> tuple[Tensor, Tensor | None]:
    """What one code step is worth at every element, and the zero point in code steps (or None): float32 [rows, K]."""

    def decoded(value: float, zero_point: Tensor | None) -> Tensor:
        filled = torch.full((shape[0], spec.padded_width(shape[1])), value, device=scales.scale.device)
        codes = spec.fmt.pack(spec.fmt.encode(filled))
        return QTensor(codes, scales.scale, scales.global_scale, spec, shape, zero_point).dequantize()

    step = decoded(1.0, None)
    return step, None if scales.zero_point is None else torch.round(-decoded(0.0, scales.zero_point) / step)
