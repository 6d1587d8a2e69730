"""The diffusers plug-in: `from_pretrained` and `save_pretrained` of quantized models. Imported by dq.pipelines.hook."""

from __future__ import annotations

from typing import Any

import torch
from accelerate.utils import CustomDtype, set_module_tensor_to_device
from diffusers.quantizers.base import DiffusersQuantizer
from diffusers.quantizers.quantization_config import QuantizationConfigMixin
from diffusers.utils.hub_utils import PushToHubMixin
from torch import nn

from dq.checkpoint import finish_model, stored_dtype
from dq.linear import QuantizedLinear, quantized_linears
from dq.loop import dequantize_model
from dq.pipelines.fp8_source import check_source, dequantized, without_scales
from dq.pipelines.hf_config import (
    DQConfigBase,
    DQMethod,
    Header,
    allow_casts,
    answer_weights,
    check_names,
    check_tensors,
    config_fields,
    float_buffers,
    prepare,
    read_headers,
)
from dq.pipelines.hook import complete
from dq.pipelines.model_card import push_with_card
from dq.pipelines.on_load import OnLoad, element_bytes, refuse_disk, refuse_second, sizes
from dq.pipelines.origin import note_origin
from dq.registry import DQError


class DQDiffusersConfig(DQConfigBase, QuantizationConfigMixin):
    """`quantization_config` in diffusers' config.json."""


class DQDiffusersQuantizer(DiffusersQuantizer):
    """Loads dq checkpoints: swaps the linears in before loading, keeps every stored dtype, checks keys. Of a 16-bit
    model it quantizes each group of linears when the last of its tensors has been read."""

    requires_calibration = False
    use_keep_in_fp32_modules = True  # what a model's class keeps in float32 stays there

    def __init__(self, quantization_config: Any, **kwargs: Any):
        super().__init__(quantization_config, **kwargs)
        if quantization_config.on_load:  # `from_single_file` does not say
            self.pre_quantized = False
        self._headers: dict[str, Header] = {}
        self._loaded: set[str] = set()
        self._dtype = torch.float32
        self._on_load: OnLoad | None = None
        self._path: Any = None

    def validate_environment(self, *args, device_map=None, **kwargs):
        if not self.pre_quantized:
            refuse_disk(device_map)

    def update_torch_dtype(self, torch_dtype):
        self._dtype = torch_dtype or torch.float32
        return torch_dtype

    def maybe_update_loaded_keys(self, loaded_keys, checkpoint_files):
        self._headers, self._loaded = read_headers(checkpoint_files), set(loaded_keys)
        if self.pre_quantized:
            return loaded_keys
        config = self.quantization_config
        check_source({n: kind for n, (_, kind) in self._headers.items()}, config.fp8_source, config.read)
        self._path = checkpoint_files[0]
        return without_scales(loaded_keys) if self.quantization_config.fp8_source == "dequantize" else loaded_keys

    def maybe_update_state_dict(self, state_dict):
        if self.pre_quantized:
            return state_dict
        choice = self.quantization_config.fp8_source
        check_source({n: t.dtype for n, t in state_dict.items() if hasattr(t, "dtype")}, choice)
        return dequantized(state_dict, self._dtype) if choice == "dequantize" else state_dict

    def _process_model_before_weight_loading(self, model, device_map=None, keep_in_fp32_modules=None, **kwargs):
        if not self.pre_quantized:
            self._on_load = OnLoad(model, self.quantization_config)
            return
        keep = [] if keep_in_fp32_modules is None else keep_in_fp32_modules
        prepare(model, self.quantization_config, self._dtype, keep)
        if self._headers:
            check_tensors(model, self._headers)
        else:  # not safetensors
            check_names(model, self._loaded)
        # diffusers casts every floating tensor to torch_dtype, unless a component of its name is in this list (then it
        # becomes float32, which holds all our dtypes exactly; `finish_model` narrows it again). The list may be the
        # class's own: what is added is taken out after loading.
        self._added = (keep, [n for n in float_buffers(model) if n not in keep])
        keep.extend(self._added[1])

    def _process_model_after_weight_loading(self, model, **kwargs):
        if self._on_load is not None:
            self._on_load.finish(self._path)
            self._on_load, self.pre_quantized = None, True
            self.quantization_config = DQDiffusersConfig(**config_fields(model)).follow(model)
            answer_weights(model)
            model.register_to_config(quantization_config=self.quantization_config)
            return model
        keep, names = self._added
        for name in names:
            keep.remove(name)
        finish_model(model)
        self.quantization_config.follow(model)
        answer_weights(model)
        return model

    def check_if_quantized_param(self, model, param_value, param_name, state_dict, **kwargs) -> bool:
        if self._on_load is not None:  # all of them: what the library sets itself may keep a whole file in memory
            return True
        parent, _, key = param_name.rpartition(".")
        layer = model.get_submodule(parent)
        return isinstance(layer, QuantizedLinear) and key in layer._buffers

    def create_quantized_param(self, model, param_value, param_name, target_device, *args, **kwargs):
        if self._on_load is not None and self._on_load.wants(param_name):
            return self._on_load.take(param_name, param_value.to(target_device))
        if self._on_load is not None:
            value = param_value.clone()  # as `own_memory` does, but a shard at a time
            return set_module_tensor_to_device(model, param_name, target_device, value=value, dtype=value.dtype)
        parent, _, key = param_name.rpartition(".")
        layer = model.get_submodule(parent)
        layer._buffers[key] = param_value.to(device=target_device, dtype=stored_dtype(layer, key))

    def check_quantized_param_shape(self, param_name, current_param, loaded_param):
        raise DQError(
            f"{param_name}: shape {tuple(loaded_param.shape)} in the checkpoint, not {tuple(current_param.shape)}"
        )

    @property
    def supports_parallel_loading(self):
        return self.pre_quantized  # groups are put together one tensor after the other

    def adjust_target_dtype(self, torch_dtype):
        """What a weight will take, for device maps by size: the library knows 8 and 4 bits."""
        if self._on_load is None:
            return torch_dtype
        size = max(element_bytes(self._on_load, f"{m}.weight") for m in self._on_load.rows)
        return CustomDtype.INT4 if size < 0.75 else torch.int8

    def get_special_dtypes_update(self, model, torch_dtype):
        if self._on_load is None:
            return {}
        return sizes(self._on_load, torch_dtype or torch.float32)

    def get_cuda_warm_up_factor(self):
        return 8

    def _dequantize(self, model):
        return dequantize_model(model)

    @property
    def is_serializable(self):
        self.quantization_config.refuse_adapters()
        return True

    @property
    def is_trainable(self):
        return True  # adapters beside the frozen layers train

    @property
    def is_compileable(self):
        return True


def attach(model: nn.Module) -> None:
    """Makes a model quantized in memory save and load like one that was loaded quantized."""
    note_origin(model)
    config = DQDiffusersConfig(**config_fields(model)).follow(model)
    model.hf_quantizer = DQDiffusersQuantizer(config, pre_quantized=True)
    model.is_quantized, model.quantization_method = True, DQMethod.DQ
    allow_casts(model)
    answer_weights(model)
    model.register_to_config(quantization_config=config)


def detach(model: nn.Module) -> None:
    """Undoes `attach`."""
    if quantized_linears(model):
        return
    for name in ("hf_quantizer", "is_quantized", "quantization_method"):
        model.__dict__.pop(name, None)
    config = dict(model.config)
    config.pop("quantization_config", None)
    model._internal_dict = type(model.config)(config)


def register(auto: Any) -> None:
    """Adds dq to diffusers' two mappings."""
    PushToHubMixin._upload_folder = push_with_card(PushToHubMixin._upload_folder)
    refuse_second(auto.DiffusersAutoQuantizer)
    auto.AUTO_QUANTIZER_MAPPING["dq"] = DQDiffusersQuantizer
    auto.AUTO_QUANTIZATION_CONFIG_MAPPING["dq"] = DQDiffusersConfig


complete(__name__)  # no-op unless this module was imported before the library that it registers in
