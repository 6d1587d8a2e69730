"""The transformers plug-in, for text encoders and language models. Imported by dq.pipelines.hook."""

from __future__ import annotations

import re
from typing import Any

import torch
from torch import nn
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import WeightConverter
from transformers.quantizers.base import HfQuantizer
from transformers.utils.quantization_config import QuantizationConfigMixin

from dq.checkpoint import finish_model
from dq.linear import quantized_linears
from dq.loop import dequantize_model
from dq.pipelines.experts import stacked_layers
from dq.pipelines.hf_config import (
    DQConfigBase,
    DQMethod,
    Header,
    allow_casts,
    check_tensors,
    config_fields,
    prepare,
    read_headers,
)
from dq.registry import DQError

_OF_AN_EXPERT = re.compile(r"\.experts\.\d+\.")


class DQTransformersConfig(DQConfigBase, QuantizationConfigMixin):
    """`quantization_config` in transformers' config.json."""


class DQTransformersQuantizer(HfQuantizer):
    """Loads dq checkpoints. transformers keeps each tensor in the dtype of the meta buffer, so ours survive."""

    requires_calibration = False

    def _process_model_before_weight_loading(self, model, checkpoint_files=None, **kwargs):
        dtype = model.dtype or torch.float32
        in_fp32 = set(getattr(model, "_keep_in_fp32_modules_strict", None) or ()) if dtype != torch.float32 else set()
        if dtype == torch.float16:
            in_fp32 |= set(getattr(model, "_keep_in_fp32_modules", None) or ())
        prepare(model, self.quantization_config, self.pre_quantized, dtype, in_fp32)
        headers = read_headers(checkpoint_files)
        if headers:
            check_tensors(model, _renamed(headers, model, self))
        # transformers initialises weights that it did not load, module by module and from parents; ours hold no data.
        for layer in quantized_linears(model).values():
            layer._is_hf_initialized, layer.weight_marks = True, {"_is_hf_initialized": True}

    def update_weight_conversions(self, weight_conversions, *model):
        """Without what merges the experts of a layer into one tensor, where the checkpoint holds them as linears."""
        if any(_OF_AN_EXPERT.search(name) for name in self.quantization_config.fields.get("layers") or ()):
            weight_conversions = [c for c in weight_conversions if not _merges_experts(c)]
        return super().update_weight_conversions(weight_conversions, *model)

    def _process_model_after_weight_loading(self, model, **kwargs):
        for layer in quantized_linears(model).values():
            layer.__dict__.pop("weight_marks", None)
        finish_model(model)
        self.quantization_config.follow(model)
        return model

    def _dequantize(self, model, dtype=None):
        return dequantize_model(model)

    def is_serializable(self):
        return True

    @property
    def is_trainable(self):
        return True

    @property
    def is_compileable(self):
        return True


def _merges_experts(conversion: Any) -> bool:
    return isinstance(conversion, WeightConverter) and any("experts" in name for name in conversion.target_patterns)


def _renamed(headers: dict[str, Header], model: nn.Module, quantizer: HfQuantizer) -> dict[str, Header]:
    """The headers under the model's own names: renamed, and the base-model prefix added or dropped, as the loader
    does it."""
    state, out = set(model.state_dict()), {}
    prefix, renamings = f"{model.base_model_prefix}.", get_model_conversion_mapping(model, hf_quantizer=quantizer)
    for name, header in headers.items():
        for renaming in renamings:
            name = renaming.rename_source_key(name)[0]
        swapped = name.removeprefix(prefix) if name.startswith(prefix) else prefix + name
        out[swapped if name not in state and swapped in state else name] = header
    return out


def attach(model: nn.Module) -> None:
    """Makes a model quantized in memory save and load like one that was loaded quantized."""
    release_gguf(model)
    config = DQTransformersConfig(**config_fields(model)).follow(model)
    model.config.quantization_config = config
    model.hf_quantizer = DQTransformersQuantizer(config, pre_quantized=True)
    model.is_quantized, model.quantization_method = True, DQMethod.DQ
    allow_casts(model)


def release_gguf(model: nn.Module) -> None:
    """Makes a model that was read from a GGUF file an ordinary 16-bit one; does nothing to others.

    transformers goes on calling it quantized by gguf after it unpacked all weights, and refuses to save it.

    Raises:
        DQError: its weights are still packed.
    """
    quantizer = getattr(model, "hf_quantizer", None)
    method = getattr(getattr(quantizer, "quantization_config", None), "quant_method", None)
    if str(getattr(method, "value", method)) != "gguf":
        return
    if getattr(quantizer, "packed_modules", None):
        raise DQError(
            "the weights are still GGUF blocks: load with quantization_config=transformers.GgufConfig(dequantize=True)"
        )
    quantizer.remove_quantization_config(model)


def detach(model: nn.Module) -> None:
    """Undoes `attach`."""
    if not quantized_linears(model) and getattr(model, "hf_quantizer", None) is not None:
        model.hf_quantizer.remove_quantization_config(model)
        if stacked_layers(model) and hasattr(model, "_weight_conversions"):
            del model._weight_conversions  # it may lack what splits stacked experts on saving: the class's own counts


def register(auto: Any) -> None:
    """Adds dq to transformers' two mappings (its own register functions refuse a second call)."""
    auto.AUTO_QUANTIZER_MAPPING["dq"] = DQTransformersQuantizer
    auto.AUTO_QUANTIZATION_CONFIG_MAPPING["dq"] = DQTransformersConfig
