"""Adapters (LoRA) and quantization: what the public verbs need to know of them. peft itself is reached in hf_peft.

An adapter sits outside of a layer and reads its raw input: `y = Q(x) + sum_i w_i B_i A_i x`. So it is the same beside a
quantized layer as beside the 16-bit one, whatever transforms the layer applies inside, loaded before or after.
"""

from __future__ import annotations

import functools
import importlib
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from torch import nn

from dq.linear import QuantizedLinear, quantized_linears
from dq.registry import DQError


def base_model(obj: Any) -> Any:
    """The model inside a `peft.PeftModel`, whose modules are the same objects; anything else as it is."""
    wrapped = isinstance(obj, nn.Module) and any(c.__module__ == "peft.peft_model" for c in type(obj).__mro__)
    return obj.get_base_model() if wrapped else obj


def adapted(obj: Any) -> dict[str, nn.Module]:
    """name -> wrapper of every layer of a model, or of a pipeline's models (component in front), that has adapters."""
    if "peft" not in sys.modules:
        return {}
    from peft.tuners.tuners_utils import BaseTunerLayer

    if isinstance(obj, nn.Module):
        return {n: m for n, m in base_model(obj).named_modules() if n and isinstance(m, BaseTunerLayer)}
    held = getattr(obj, "components", None) or {}
    models = {n: m for n, m in held.items() if isinstance(m, nn.Module)}
    return {f"{c}.{n}": layer for c, m in models.items() for n, layer in adapted(m).items()}


@contextmanager
def aside(obj: Any) -> Iterator[None]:
    """Takes adapters off a model or pipeline while it is planned, calibrated and quantized, and puts them back.

    What is quantized, and with which statistics, then does not depend on whether they were loaded before or after.

    Raises:
        DQError: adapters are fused or read the weight below, or whole modules were replaced by trained copies (peft's
            `modules_to_save`).
    """
    models = [obj] if isinstance(obj, nn.Module) else (getattr(obj, "components", None) or {}).values()
    models = [m for m in models if isinstance(m, nn.Module)]
    held = [(model, name, layer) for model in models for name, layer in adapted(model).items()]
    for _, name, layer in held:
        if layer.merged:
            raise DQError(
                f"{name} has fused adapters: unfuse_lora() takes them out and unload_lora_weights() (in peft "
                "merge_and_unload()) keeps them in the weight; do one of these first"
            )
        _refuse_variants(name, layer)
    for model in models if held else ():
        _refuse_copies(model)
    for model, name, layer in held:
        model.set_submodule(name, layer.base_layer)
    try:
        yield
    finally:
        for model, name, layer in held:
            layer.base_layer = model.get_submodule(name)
            importlib.import_module("dq.pipelines.hf_peft").adopt(layer)
            model.set_submodule(name, layer)


def _refuse_variants(name: str, layer: nn.Module) -> None:
    """Raises DQError for kinds of LoRA that read the weight below in every step, but for DoRA beside a linear."""
    for variant in getattr(layer, "lora_variant", {}).values():
        kind = variant.__name__ if isinstance(variant, type) else type(variant).__name__
        if kind.startswith(("Kasa", "DoraConv")):
            raise DQError(f"{name} has a {kind} adapter, which reads its 16-bit weight: quantize the model without it")


def _refuse_copies(model: nn.Module) -> None:
    from peft.utils.other import AuxiliaryTrainingWrapper

    found = next((n for n, m in model.named_modules() if isinstance(m, AuxiliaryTrainingWrapper)), None)
    if found is not None:
        raise DQError(
            f"an adapter replaces the whole of {found} (peft's modules_to_save or trainable tokens): quantize the "
            "model without the adapter and load it afterwards"
        )


def without_adapters(verb: Callable[..., Any]) -> Callable[..., Any]:
    """A public verb whose first argument is a model or pipeline, run with its adapters aside."""

    @functools.wraps(verb)
    def run(obj: Any, *args: Any, **kwargs: Any) -> Any:
        obj = base_model(obj)
        with aside(obj):
            return verb(obj, *args, **kwargs)

    return run


def refuse_plain(model: nn.Module) -> None:
    """Raises DQError if dq has quantized nothing in a model."""
    if quantized_linears(model):
        return
    method = getattr(model, "quantization_method", None)
    other, name = str(getattr(method, "value", method) or ""), type(model).__name__
    if other:
        raise DQError(f"{name} is in the form of {other}: this takes what dq.quantize made")
    raise DQError(f"nothing in {name} is quantized: dq.quantize it first")


def refuse_adapters(obj: Any, what: str) -> None:
    """Raises DQError if adapters are attached to a model or pipeline."""
    found = next(iter(adapted(obj)), None)
    if found is not None:
        raise DQError(
            f"adapters are attached (to {found} and others), so the model cannot be {what}: unload_lora_weights() "
            "first; fuse_lora() before that keeps them in the model, save_lora_weights() saves them alone"
        )


@dataclass(frozen=True)
class AdapterInfo:
    """One adapter on one layer.

    Attributes:
        layer, adapter: their names.
        rank: r.
        weight: what `B A x` is multiplied by: alpha / r times the weight that was set.
        state: `active`, `off`, or `fused`.
        quantized: whether the layer below is.
        retention: of a fused one on a quantized layer `1 - |delta kept - delta| / |delta|` (Frobenius), else None.
    """

    layer: str
    adapter: str
    rank: int
    weight: float
    state: str
    quantized: bool
    retention: float | None


class AdapterTable(list):
    """A list of `AdapterInfo` that prints as one row per adapter."""

    def __repr__(self) -> str:
        lines = []
        for adapter in dict.fromkeys(x.adapter for x in self):
            rows = [x for x in self if x.adapter == adapter]
            states = ", ".join(f"{sum(x.state == s for x in rows)} {s}" for s in dict.fromkeys(x.state for x in rows))
            kept = [x.retention for x in rows if x.retention is not None]
            line = f"{adapter}: {len(rows)} layers ({sum(x.quantized for x in rows)} quantized), {states}"
            lines.append(line + (f", at least {min(kept):.2%} of every fused delta kept" if kept else ""))
        return "\n".join(lines) or "no adapters"


def adapter_info(obj: Any) -> list[AdapterInfo]:
    """Which LoRAs a model or pipeline has, with which weights, and how much of each a fusion kept."""
    rows = AdapterTable()
    for name, layer in adapted(obj).items():
        records = {r.adapter: r for r in getattr(layer, "fused", ())}
        for adapter in getattr(layer, "r", {}):
            state = "fused" if adapter in layer.merged_adapters else "off"
            if state == "off" and not layer.disable_adapters and adapter in layer.active_adapters:
                state = "active"
            weight = layer.scaling.get(adapter, 1.0)
            kept = records[adapter].retention if adapter in records else None
            quantized = isinstance(layer.base_layer, QuantizedLinear)
            rows.append(AdapterInfo(name, adapter, layer.r[adapter], float(weight), state, quantized, kept))
    return rows
