"""What is in a pipeline: layers, bytes, and opening lazily given candidates."""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import nn

from dq.eval.result import clean
from dq.linear import layer_info
from dq.loop import model_bytes
from dq.registry import DQError


def open_candidate(value: Any, name: str) -> tuple[Any, Any]:
    """Return (pipeline, report or None) of a pipeline, of (pipeline, report) or of a function that returns either."""
    if inspect.isfunction(value) or inspect.ismethod(value) or type(value).__name__ == "partial":
        value = value()
    pipe, report = value if isinstance(value, tuple) and len(value) == 2 else (value, None)
    if not callable(pipe):
        raise DQError(f"{name} is a {type(pipe).__name__}, not a pipeline")
    return pipe, report


def denoiser_bytes(modules: Iterable[nn.Module]) -> int:
    """Return the bytes of all parameters and buffers; 32-bit parameters count as the 16 bits they are shipped in."""
    return sum(model_bytes(module) for module in modules)


def describe_layers(modules: Mapping[str, nn.Module]) -> list[dict[str, Any]]:
    """Return one JSON-clean dict per quantized layer of each component, in model order."""
    rows = []
    for component, module in modules.items():
        for info in layer_info(module):
            row = as_dict(info)
            row["component"] = component
            rows.append(row)
    return rows


def as_dict(info: Any) -> dict[str, Any]:
    """Return a layer description (dataclass, mapping or object) as a JSON-clean dict."""
    if isinstance(info, Mapping) or dataclasses.is_dataclass(info):
        return clean(info)
    return clean(vars(info))


def device_of(module: nn.Module) -> torch.device:
    """Return the device of the module's first parameter or buffer; CPU if it has none."""
    return next((t.device for t in [*module.parameters(), *module.buffers()]), torch.device("cpu"))
