"""The transformers plug-in, for text encoders and language models. Imported by dq.pipelines.hook."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from transformers import PretrainedConfig
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import ConversionOps, PrefixChange, WeightConverter
from transformers.quantizers.base import HfQuantizer
from transformers.utils.hub import PushToHubMixin
from transformers.utils.quantization_config import QuantizationConfigMixin

from dq.checkpoint import finish_model
from dq.linear import quantized_linears
from dq.loop import dequantize_model
from dq.pipelines.experts import stacked_layers
from dq.pipelines.fp8_source import SCALES, check_source
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
from dq.pipelines.hook import complete
from dq.pipelines.model_card import push_with_card
from dq.pipelines.on_load import OnLoad, element_bytes, own_memory, refuse_disk, refuse_second
from dq.pipelines.origin import note_origin
from dq.pipelines.own_config import held, own_config, within
from dq.registry import DQError

_OF_AN_EXPERT = re.compile(r"\.experts\.\d+\.")


class DQTransformersConfig(DQConfigBase, QuantizationConfigMixin):
    """`quantization_config` in transformers' config.json."""


MARKS = ("_is_hf_initialized",)  # what keeps transformers from initialising a layer


class TakeTensors(ConversionOps):
    """Hands what the loader read to the quantizer."""

    def __init__(self, quantizer: DQTransformersQuantizer):
        self.quantizer = quantizer

    def convert(self, input_dict, missing_keys=None, **kwargs):
        return self.quantizer.take(input_dict, missing_keys)


class DQTransformersQuantizer(HfQuantizer):
    """Loads dq checkpoints (transformers keeps each tensor in the dtype of the meta buffer, so ours survive). Of a
    16-bit model it quantizes each group of linears when the last of its tensors has been read."""

    requires_calibration = False

    def __init__(self, quantization_config: Any, **kwargs: Any):
        super().__init__(quantization_config, **kwargs)
        if quantization_config.on_load:
            self.pre_quantized = False
        self._on_load: OnLoad | None = None
        self._failed: DQError | None = None
        self._path: Any = None

    def validate_environment(self, *args, device_map=None, **kwargs):
        if not self.pre_quantized:
            refuse_disk(device_map)

    def _process_model_before_weight_loading(self, model, checkpoint_files=None, **kwargs):
        if not self.pre_quantized:
            self._check_16_bit(checkpoint_files)
            tied = {n.removesuffix(".weight") for pair in model.all_tied_weights_keys.items() for n in pair}
            self._on_load = OnLoad(model, self.quantization_config, tied, MARKS)
            return
        dtype = model.dtype or torch.float32
        in_fp32 = set(getattr(model, "_keep_in_fp32_modules_strict", None) or ()) if dtype != torch.float32 else set()
        if dtype == torch.float16:
            in_fp32 |= set(getattr(model, "_keep_in_fp32_modules", None) or ())
        fields = self.quantization_config.fields
        part = _Part()
        if isinstance(fields.get("layers"), dict):
            fields["layers"] = _layers_here(fields["layers"], model, self, part)
        prepare(model, self.quantization_config, dtype, in_fp32)
        headers = read_headers(checkpoint_files)
        if headers:
            _check_files(model, headers, self, part)
        # transformers initialises weights that it did not load, module by module and from parents; ours hold no data.
        for layer in quantized_linears(model).values():
            layer.weight_marks = dict.fromkeys(MARKS, True)
            for mark in MARKS:
                setattr(layer, mark, True)

    def _check_16_bit(self, checkpoint_files: Any) -> None:
        """The source is no FP8; unscaled FP8 is cast by the loader, which leaves scales unread."""
        kinds = {n: kind for n, (_, kind) in read_headers(checkpoint_files).items()}
        check_source(kinds, self.quantization_config.fp8_source, self.quantization_config.read)
        scales = [n for n in kinds if n.rpartition(".")[2] in SCALES]
        if scales:
            raise DQError(
                f"the source is scaled FP8 (it holds {scales[0]}): load it without dq, dequantize and save it, or take "
                "the 16-bit model"
            )
        if checkpoint_files:
            self._path = checkpoint_files[0]

    def update_weight_conversions(self, weight_conversions, *model):
        """Without what merges the experts of a layer into one tensor, where the checkpoint holds them as linears, and
        without what joins or splits the matrices of quantized linears."""
        names = list(self.quantization_config.fields.get("layers") or ())
        if any(_OF_AN_EXPERT.search(name) for name in names):
            weight_conversions = [c for c in weight_conversions if not _merges_experts(c)]
        weight_conversions = [c for c in weight_conversions if not _reshapes(c, names)]
        return super().update_weight_conversions(weight_conversions, *model)

    def _process_model_after_weight_loading(self, model, **kwargs):
        if self._failed is not None:
            raise self._failed
        if self._on_load is not None:
            self._on_load.finish(self._path)
            own_memory(model)
            self._on_load = None
            attach(model)
            return model
        for layer in quantized_linears(model).values():
            layer.__dict__.pop("weight_marks", None)
        finish_model(model)
        _share(model.config, self.quantization_config.follow(model))
        return model

    def param_needs_quantization(self, model, param_name, **kwargs) -> bool:
        return self._on_load is not None and self._on_load.wants(param_name)

    def param_element_size(self, model, param_name, param) -> float:
        if self.param_needs_quantization(model, param_name) and param_name.endswith(".weight"):
            return element_bytes(self._on_load, param_name)
        return param.element_size()

    def get_quantize_ops(self):
        return TakeTensors(self)

    def take(self, tensors: dict[str, Any], missing: set[str] | None) -> dict[str, Any]:
        """Keeps what belongs to quantized linears, hands the rest back. The loader collects exceptions for a table and
        goes on; the first of ours is raised when it has finished."""
        left = {}
        for name, value in tensors.items():
            value = value[0] if isinstance(value, list) else value
            if not self._on_load.wants(name):
                left[name] = value
                continue
            if missing is not None:
                missing.discard(name)
            if self._failed is None:
                try:
                    self._on_load.take(name, value)
                except DQError as error:
                    self._failed = error
        return left

    def _dequantize(self, model, dtype=None):
        return dequantize_model(model)

    def is_serializable(self):
        followed = self.quantization_config.followed
        if not getattr(followed, "_hf_peft_config_loaded", False):  # else `save_pretrained` saves the adapters alone
            self.quantization_config.refuse_adapters()
        return True

    @property
    def is_trainable(self):
        return True

    @property
    def is_compileable(self):
        return True


def _merges_experts(conversion: Any) -> bool:
    return isinstance(conversion, WeightConverter) and any("experts" in name for name in conversion.target_patterns)


def _reshapes(conversion: Any, names: Iterable[str]) -> bool:
    """Whether the files of such models hold one of these linears in another form, as rows of one matrix with others,
    say. Codes and scales are saved as they are, and their neighbours beside them."""
    if not isinstance(conversion, WeightConverter):
        return False
    back = conversion.reverse_transform()
    leaves = ("qweight", "weight", "bias")
    return any(back.rename_source_key(f"{name}.{leaf}")[1] is not None for name in names for leaf in leaves)


def _keep_forms(model: nn.Module) -> None:
    """Lets `save_pretrained` write quantized linears under names and in forms of their own."""
    known = getattr(model, "_weight_conversions", None)
    if known is None:
        # What the library takes for a model that it has not loaded itself.
        known = [c for c in get_model_conversion_mapping(model, add_legacy=False) if not isinstance(c, PrefixChange)]
    names = list(quantized_linears(model))
    kept = [c for c in known if not _reshapes(c, names)]
    if len(kept) < len(known):
        model._weight_conversions = kept


@dataclass
class _Part:
    """How the model that is loaded lies in the one that was saved: the prefixes that its names have there, if it is a
    part of it, and whether that one is a part of it."""

    inside: set[str] = field(default_factory=set)
    headed: bool = False


def _own_names(
    names: Iterable[str], model: nn.Module, known: Callable[[str], bool], quantizer: HfQuantizer, part: _Part
) -> dict[str, str]:
    """Name of a tensor in a checkpoint -> the model's own, renamed and the base model's prefix added or dropped as the
    loader does it; without what lies outside the part that is loaded. `part` learns from the names."""
    prefix, renamings = f"{model.base_model_prefix}.", get_model_conversion_mapping(model, hf_quantizer=quantizer)
    found = {}
    for name in names:
        own = name
        for renaming in renamings if not known(name) else ():
            own = renaming.rename_source_key(own)[0]
        if not known(own):
            if known(prefix + own):
                own, part.headed = prefix + own, True
            elif own.startswith(prefix) and known(own.removeprefix(prefix)):
                own = own.removeprefix(prefix)
        if name != own and name.endswith(f".{own}"):
            part.inside.add(name.removesuffix(own))
        found[name] = own
    skipped = getattr(model, "_keys_to_ignore_on_load_unexpected", None) or ()

    def outside(name: str) -> bool:
        return (part.inside and not name.startswith(tuple(part.inside))) or any(re.search(p, name) for p in skipped)

    return {n: own for n, own in found.items() if known(own) or not outside(n)}


def _layers_here(layers: dict[str, Any], model: nn.Module, quantizer: HfQuantizer, part: _Part) -> dict[str, Any]:
    """A checkpoint's table of layers for a model of another class than the one that was saved: the base model of a
    language model, or a base model with a head on top."""
    modules, stacks = {n for n, _ in model.named_modules()}, tuple(f"{n}." for n in stacked_layers(model))

    def known(name: str) -> bool:
        return name.removesuffix(".weight") in modules or (bool(stacks) and name.startswith(stacks))

    found = _own_names([f"{n}.weight" for n in layers], model, known, quantizer, part)
    return {own.removesuffix(".weight"): layers[n.removesuffix(".weight")] for n, own in found.items()}


def _check_files(model: nn.Module, headers: dict[str, Header], quantizer: HfQuantizer, part: _Part) -> None:
    """`check_tensors` under the model's own names; a head on top of a base model's checkpoint is new, as the library
    says in its report."""
    state, headed = model.state_dict(), part.headed
    found = _own_names(headers, model, state.__contains__, quantizer, part)
    new = [n for n in state if headed and not n.startswith(f"{model.base_model_prefix}.")]
    check_tensors(model, {own: headers[n] for n, own in found.items()}, new)


def attach(model: nn.Module) -> None:
    """Makes a model quantized in memory save and load like one that was loaded quantized."""
    own_config(model)
    release_gguf(model)
    note_origin(model)
    model.__dict__.pop("hf_quantizer", None)  # the artifact may have changed
    describe(model)
    model.is_quantized, model.quantization_method = True, DQMethod.DQ
    allow_casts(model)


def own(model: nn.Module) -> None:
    """Gives a model a configuration that can be changed without changing those of other models."""
    own_config(model)


def describe(model: nn.Module) -> None:
    """Names the quantized linears of a model in its configuration, and tells the library to save them as they are."""
    _keep_forms(model)
    if getattr(model, "hf_quantizer", None) is None:
        config = DQTransformersConfig(**config_fields(model)).follow(model)
        model.hf_quantizer = DQTransformersQuantizer(config, pre_quantized=True)
    _share(model.config, model.hf_quantizer.quantization_config)


def _share(config: Any, quantization_config: DQTransformersConfig) -> None:
    """Names the quantization in a model's configuration and in those within it: a part of the model that is loaded by
    itself (CLIP's text encoder) is given its own alone, and would start from random weights without."""
    config.quantization_config = quantization_config
    for name in getattr(config, "sub_configs", {}):
        if isinstance(getattr(config, name, None), PretrainedConfig):
            _share(getattr(config, name), quantization_config)


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
    """Undoes `attach`, of a model and of those in it, where nothing is quantized any more."""
    for one in list(model.modules()):
        if isinstance(vars(one).get("hf_quantizer"), DQTransformersQuantizer) and not quantized_linears(one):
            one.hf_quantizer.remove_quantization_config(one)
            if stacked_layers(one) and hasattr(one, "_weight_conversions"):
                del one._weight_conversions  # it may lack what splits stacked experts on saving: the class's own counts
    for config in {id(c): c for m in model.modules() for _, top in held(m) for c in within(top)}.values():
        described = vars(config).get("quantization_config")
        if isinstance(described, DQTransformersConfig) and not quantized_linears(described.followed or nn.Module()):
            del config.quantization_config


def register(auto: Any) -> None:
    """Adds dq to transformers' two mappings (its own register functions refuse a second call)."""
    PushToHubMixin._upload_modified_files = push_with_card(PushToHubMixin._upload_modified_files)
    refuse_second(auto.AutoHfQuantizer)
    auto.AUTO_QUANTIZER_MAPPING["dq"] = DQTransformersQuantizer
    auto.AUTO_QUANTIZATION_CONFIG_MAPPING["dq"] = DQTransformersConfig


complete(__name__)  # no-op unless this module was imported before the library that it registers in
