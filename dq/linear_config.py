"""`LinearConfig`: all of a quantized linear that is not a tensor, and which tensors go with it."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from dq.ops import LinearParams
from dq.qtensor import QTensor
from dq.registry import DQError
from dq.spec import QuantSpec
from dq.transforms import TRANSFORMS, Step


@dataclass(frozen=True)
class LinearConfig:
    """All of a quantized linear that is not a tensor; JSON-clean through `to_dict`.

    Attributes:
        weights, activations: grids; activations None means weight-only.
        steps: (transform name, params) per input step.
        rank: rank of the low-rank branch, 0 for none.
        side_dtype: dtype of its factors.
        residual: number S of residual channels; the weight is stored K + S wide, or K + 2 S if `dual`.
        step_groups: G > 0: a static activation grid has one scale for each of G groups of denoising steps.
    """

    weights: QuantSpec
    activations: QuantSpec | None = None
    steps: tuple[tuple[str, dict[str, Any]], ...] = ()
    rank: int = 0
    side_dtype: str = "bfloat16"
    residual: int = 0
    dual: bool = False
    step_groups: int = 0

    @property
    def extra(self) -> int:
        """Columns of the stored weight beyond K."""
        return self.residual * (1 + self.dual)

    def to_dict(self) -> dict[str, Any]:
        out: dict[str, Any] = {"weights": self.weights.to_dict()}
        if self.activations is not None:
            out["activations"] = self.activations.to_dict()
        if self.steps:
            out["steps"] = [[n, p] for n, p in self.steps]
        if self.rank:
            out |= {"rank": self.rank, "side_dtype": self.side_dtype}
        if self.residual:
            out |= {"residual": self.residual, "dual": self.dual}
        if self.step_groups:
            out["step_groups"] = self.step_groups
        return out

    @classmethod
    def from_dict(cls, data: dict[str, Any]) -> LinearConfig:
        unknown = set(data) - set(cls.__dataclass_fields__)
        if unknown:
            raise DQError(
                f"unknown word {min(unknown)!r} in the description of a quantized linear; a newer dq wrote it?"
            )
        grids = {k: QuantSpec.from_dict(data[k]) for k in ("weights", "activations") if data.get(k) is not None}
        steps = tuple((TRANSFORMS.get(n).name, dict(p)) for n, p in data.get("steps", ()))
        return cls(**data | grids | {"steps": steps})

    @property
    def shifted(self) -> bool:
        """Whether the input steps add a constant: such a layer has a bias, whatever its 16-bit original had."""
        return any(name == "shift" for name, _ in self.steps)

    @property
    def static(self) -> bool:
        """Whether activations are rounded at one calibrated scale instead of one per token."""
        return self.activations is not None and self.activations.strategy == "tensor"

    def tensors(self, rows: int, width: int) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
        """Every buffer of a [rows, width] linear: name -> (shape, dtype). The one place that fixes names and layout."""
        spec, wide = self.weights, width + self.extra
        out = {
            "qweight": ((rows, spec.fmt.packed_width(spec.padded_width(wide))), spec.fmt.storage),
            "weight_scale": (spec.scale_shape(rows, wide), spec.scale_dtype),
        }
        second = spec.global_shape(rows, wide)
        if second is not None:
            out["weight_global_scale"] = (second, torch.float32)
        if spec.has_zero_point:
            out["weight_zero_point"] = (spec.scale_shape(rows, wide), torch.uint8)
        if self.static:
            out["input_scale"] = ((max(1, self.step_groups), 1), torch.float32)
        if self.step_groups:
            out["input_edges"] = ((self.step_groups - 1,), torch.float32)
        for name, params in self.steps:
            for key, kind in TRANSFORMS.get(name).tensors(width, params).items():
                out[f"{name}_{key}"] = kind
        if self.rank:
            dtype = getattr(torch, self.side_dtype)
            out |= {"lowrank_down": ((self.rank, width), dtype), "lowrank_up": ((rows, self.rank), dtype)}
        return out

    def steps_of(self, parts: Mapping[str, Tensor], width: int) -> list[Step]:
        """The input steps with their tensors out of the layer's."""
        out = []
        for name, params in self.steps:
            keys = TRANSFORMS.get(name).tensors(width, params)
            out.append(Step(name, {k: parts[f"{name}_{k}"] for k in keys}, params))
        return out

    def qtensor(self, parts: Mapping[str, Tensor], rows: int, width: int) -> QTensor:
        """The quantized W' [rows, width + extra] of the layer's tensors."""
        scale2, zero = parts.get("weight_global_scale"), parts.get("weight_zero_point")
        shape = (rows, width + self.extra)
        return QTensor(parts["qweight"], parts["weight_scale"], scale2, self.weights, shape, zero)

    def params(self, parts: Mapping[str, Tensor], bias: Tensor | None, rows: int, width: int) -> LinearParams:
        """What a kernel needs, of the tensors that `tensors` names."""
        weight, steps = self.qtensor(parts, rows, width), self.steps_of(parts, width) if self.steps else []
        down, up, scale = parts.get("lowrank_down"), parts.get("lowrank_up"), parts.get("input_scale")
        return LinearParams(weight, self.activations, steps, down, up, bias, scale, self.residual, self.dual)

    def text(self, rows: int, width: int) -> str:
        """The config of a [rows, width] linear as one line of JSON; `read` takes it back."""
        return json.dumps([rows, width, self.to_dict()])

    @classmethod
    def read(cls, text: str) -> tuple[LinearConfig, int, int]:
        """(config, rows, width) of a text that `text` wrote."""
        rows, width, data = json.loads(text)
        return cls.from_dict(data), rows, width
