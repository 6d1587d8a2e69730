"""What is in a pipeline: layers, bytes, and opening lazily given candidates."""

from __future__ import annotations

import dataclasses
import inspect
import json
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
    if isinstance(pipe, nn.Module):
        raise DQError(f"{name} is the model {type(pipe).__name__}, not a pipeline: pass the pipeline that holds it")
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


def _artifacts(modules: Iterable[nn.Module]) -> list[dict[str, Any]]:
    """What quantization recorded in each model that still holds it."""
    found = [getattr(m, "dq_artifact", None) for m in modules]
    return [a for a in found if isinstance(a, Mapping)]


def recipe_names(modules: Iterable[nn.Module]) -> list[str]:
    """Names of the recipes that the models were quantized with, each once."""
    recipes = [a.get("recipe") or {} for a in _artifacts(modules)]
    return list(dict.fromkeys(str(r.get("name", "")) if isinstance(r, Mapping) else str(r) for r in recipes))


def describe_artifacts(modules: Mapping[str, nn.Module]) -> str | None:
    """Recipe, calibration and source of every quantized component as JSON text; None if there is none."""
    keys = ("recipe", "family", "calibration", "source", "revision", "versions")
    found = {}
    for component, module in modules.items():
        for artifact in _artifacts([module]):
            found[component] = {k: artifact[k] for k in keys if artifact.get(k)}
    return json.dumps(clean(found), indent=1) if found else None


def as_dict(info: Any) -> dict[str, Any]:
    """Return a layer description (dataclass, mapping or object) as a JSON-clean dict."""
    if isinstance(info, Mapping) or dataclasses.is_dataclass(info):
        return clean(info)
    return clean(vars(info))


def device_of(module: nn.Module) -> torch.device:
    """Return the device of the module's first parameter or buffer; CPU if it has none."""
    return next((t.device for t in [*module.parameters(), *module.buffers()]), torch.device("cpu"))
