"""The peft plug-in: LoRA layers beside quantized linears. Imported by dq.pipelines.hook when peft is.

peft takes the tuner of a method from a mapping, as diffusers takes quantizers; `register` puts a subclass there that
offers one more layer class through peft's custom modules. Everything else is peft's: adapters, weights, on and off.
"""

from __future__ import annotations

import copy
import warnings
from dataclasses import dataclass
from typing import Any

import torch
from peft.tuners.lora.layer import Conv2d, Linear
from peft.tuners.lora.model import LoraModel
from peft.tuners.lora.variants import DoraLinearVariant
from peft.tuners.tuners_utils import BaseTunerLayer, check_adapters_to_merge
from peft.utils.peft_types import PeftType
from torch import Tensor, nn

from dq.conv import QuantizedConv2d, plain
from dq.fusing import fuse, unfuse
from dq.linear import QuantizedLinear
from dq.pipelines.hf_dora import QuantizedDora, QuantizedDoraVariant
from dq.registry import DQError

# Initialisations that leave the base weight as it is. The others (PiSSA, OLoRA, LoftQ, ..) take the adapter out of it.
_INITS = (True, False, None, "gaussian", "eva", "orthogonal")
_VARIANTS = {"kasa_config": "KaSA"}  # rewrite the base weight


@dataclass(frozen=True)
class Fused:
    """What one fusion changed, so that it can be undone.

    Attributes:
        adapter: its name.
        rank, side_dtype: of the layer's branch before.
        bias: the layer's bias before, if the adapter has one, else None.
        retention: see `dq.fusing.retention`.
    """

    adapter: str
    rank: int
    side_dtype: str
    bias: Tensor | None
    retention: float


class _Beside:
    """What both layer classes share: fusing goes into the quantized layer's 16-bit branch, its codes stay.

    The forward pass is peft's: `base(x) + sum_i scaling_i B_i A_i x`.
    """

    def __init__(self, base: nn.Module, *args: Any, **kwargs: Any):
        super().__init__(_stand_in(base), *args, **kwargs)
        self.base_layer, self.fused = base, []

    def update_layer(self, *args: Any, **kwargs: Any) -> None:
        """Adds or changes an adapter, as peft does it over a 16-bit layer of this shape."""
        base, self.base_layer = self.base_layer, _stand_in(self.base_layer)
        try:
            super().update_layer(*args, **kwargs)
        finally:
            self.base_layer = base

    @property
    def weight(self) -> Tensor:
        """The layer's own `.weight`, of the logical shape: peft's would hand out the codes."""
        return self.get_base_layer().weight

    def merge(self, safe_merge: bool = False, adapter_names: list[str] | None = None) -> None:
        """Fuses adapters, default all active ones.

        Raises:
            DQError: one holds NaN or Inf, or would lose more than 1 % of its effect; layers before it stay fused.
        """
        if not isinstance(self.get_base_layer(), QuantizedLinear):
            return super().merge(safe_merge, adapter_names)
        for adapter in check_adapters_to_merge(self, adapter_names):
            if adapter in self.lora_variant:
                raise DQError(
                    f"cannot fuse {adapter}: DoRA scales the rows of the quantized weight; keep it beside the layer, "
                    "or dq.dequantize() first"
                )
            if adapter in self.lora_A:
                self.fused.append(self._fuse(self.get_base_layer(), adapter))
                self.merged_adapters.append(adapter)
        return None

    def unmerge(self) -> None:
        """Takes fused adapters out again; the layer has then the same bits as before."""
        if not self.fused:
            return super().unmerge()
        base = self.get_base_layer()
        while self.fused:
            record = self.fused.pop()
            self.merged_adapters.remove(record.adapter)
            unfuse(base, record.rank, record.side_dtype)
            if record.bias is not None:
                base.bias.data = record.bias.to(base.bias)
        return None

    def _fuse(self, base: QuantizedLinear, adapter: str) -> Fused:
        config, extra = base.config, self.lora_B[adapter].bias
        if extra is not None and base.bias is None:
            raise DQError(f"cannot fuse {adapter}: it adds to the bias of a layer that has none")
        if isinstance(base, QuantizedConv2d) and (set(base.dilation) != {1} or base.padding_mode != "zeros"):
            raise DQError(f"cannot fuse {adapter}: its convolution is not dilated or padded as the layer's is")
        with torch.no_grad():
            down, up = self.lora_A[adapter].weight.flatten(1), self.lora_B[adapter].weight.flatten(1)
            factor = torch.as_tensor(self.scaling[adapter], dtype=torch.float64, device=up.device)
            kept = fuse(base, down, up.to(factor) * factor, f"the layer of adapter {adapter!r}")
            bias = None if extra is None else base.bias.detach().clone()
            if extra is not None:
                base.bias.data = base.bias + (extra.to(factor) * factor).to(base.bias)
        return Fused(adapter, config.rank, config.side_dtype, bias, kept)


class QuantizedLora(_Beside, Linear):
    """peft's LoRA layer over a `QuantizedLinear`."""

    def resolve_lora_variant(self, **kwargs: Any) -> Any:
        """peft's choice, with our own DoRA."""
        found = super().resolve_lora_variant(**kwargs)
        return QuantizedDoraVariant() if _is_dora(found) else found


class QuantizedLoraConv(_Beside, Conv2d):
    """peft's LoRA layer over a `QuantizedConv2d`: A is a convolution of its geometry, B one of 1 x 1."""


_LAYERS = {QuantizedConv2d: QuantizedLoraConv, QuantizedLinear: QuantizedLora}  # the first that fits


def _stand_in(base: nn.Module) -> nn.Module:
    """A 16-bit convolution for a quantized one while peft reads its geometry: it makes A and B of the base's type."""
    if not isinstance(base, QuantizedConv2d):
        return base
    conv = plain(base)
    conv.weight = nn.Parameter(base.weight, requires_grad=False)
    return conv


def _is_dora(variant: Any) -> bool:
    return DoraLinearVariant in (variant, type(variant))  # peft keeps the class, newer versions an object of it


def adopt(layer: nn.Module) -> None:
    """Makes peft's own LoRA layer, whose base was quantized under it, one of ours: same parameters, same settings."""
    kind = _LAYERS.get(type(layer.get_base_layer()))
    if kind is not None and type(layer) in kind.__bases__:
        layer.__class__ = kind  # parameters keep their identity: optimizers and hooks hold them
        layer.fused = []
        for name, variant in layer.lora_variant.items():
            if _is_dora(variant):
                layer.lora_variant[name] = QuantizedDoraVariant()
                layer.lora_magnitude_vector[name].__class__ = QuantizedDora


class QuantizedLoraModel(LoraModel):
    """peft's LoRA tuner, which also knows quantized linears."""

    def _create_and_replace(self, lora_config, adapter_name, target, target_name, parent, current_key, **kwargs):
        base = target.get_base_layer() if isinstance(target, BaseTunerLayer) else target
        if isinstance(base, QuantizedLinear):
            refuse(lora_config, current_key, isinstance(base, QuantizedConv2d))
            _remark(self.model)
        super()._create_and_replace(lora_config, adapter_name, target, target_name, parent, current_key, **kwargs)

    @staticmethod
    def _create_new_module(lora_config: Any, adapter_name: str, target: nn.Module, **kwargs: Any) -> nn.Module:
        base = target.get_base_layer() if isinstance(target, BaseTunerLayer) else target
        if isinstance(base, QuantizedLinear):
            lora_config = copy.copy(lora_config)
            lora_config.fan_in_fan_out = False
            lora_config._register_custom_module(_LAYERS)
        return LoraModel._create_new_module(lora_config, adapter_name, target, **kwargs)


def refuse(config: Any, name: str, convolution: bool = False) -> None:
    """Raises DQError for kinds of LoRA that read or rewrite the 16-bit weight, which is no longer there."""
    if config.init_lora_weights not in _INITS:
        raise DQError(
            f"{name} is quantized: init_lora_weights={config.init_lora_weights!r} takes its start out of the 16-bit "
            "weight; attach it before quantizing, or use True, 'gaussian', 'orthogonal' or 'eva'"
        )
    if getattr(config, "use_dora", False) and convolution:
        raise DQError(f"{name} is a quantized convolution: DoRA beside it needs its 16-bit weight; use plain LoRA")
    for field, title in _VARIANTS.items():
        if getattr(config, field, None):
            raise DQError(f"{name} is quantized: {title} computes with the 16-bit weight in every step; use plain LoRA")


def _remark(model: nn.Module) -> None:
    """Once per model: adapters of the original do not fit where the model's own streams were changed."""
    artifact = getattr(model, "dq_artifact", {})
    recipe = artifact.get("recipe")
    rewrites = [r["name"] for r in recipe.get("rewrites", ())] if isinstance(recipe, dict) else []
    changed = rewrites + ["fold"] * bool(artifact.get("folded"))
    if changed and not model.__dict__.get("_dq_remarked"):
        model._dq_remarked = True
        warnings.warn(
            f"{', '.join(changed)} changed the inputs of this model's layers: an adapter trained on the original model "
            "gives wrong results here, one trained on this model is right",
            stacklevel=2,
        )


def register(peft: Any) -> None:
    """Adds dq to peft's mapping of tuners."""
    peft.mapping.PEFT_TYPE_TO_TUNER_MAPPING[PeftType.LORA] = QuantizedLoraModel
