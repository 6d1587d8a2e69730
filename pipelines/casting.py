"""What the libraries refuse of a quantized model and dq allows (casts), and what they allow and dq refuses."""

from __future__ import annotations

import functools
from typing import Any

from torch import nn

from dq.linear import QuantizedLinear
from dq.registry import DQError

DQ = "dq"  # what `model.quantization_method` says
LAYERWISE = "enable_layerwise_casting"
FUSE = "fuse_qkv_projections"


def allow_casts(model: nn.Module) -> None:
    """Lets `.to(dtype)`, `.half()` and `.float()` cast a dq model: 16-bit layers, biases and the compute dtype follow,
    codes and scales stay (`QuantizedLinear._apply`).

    The libraries refuse casts of what is quantized, for the sake of methods whose payload a cast destroys; a pipeline
    would be left half cast. Layerwise casting and fusing q, k and v are refused. The methods are wrapped once, on the
    class: on the instance they would make a reference cycle, which keeps a model's memory after its last use. Models
    that are not dq's see no difference.
    """
    wraps = {"to": _castable, "half": _castable, "float": _castable, LAYERWISE: _not_layerwise, FUSE: _not_fused}
    for name, wrap in wraps.items():
        owner = next((c for c in type(model).__mro__ if name in vars(c)), nn.Module)
        if owner is not nn.Module and not hasattr(vars(owner)[name], "dq_wrapped"):
            setattr(owner, name, wrap(vars(owner)[name]))
            vars(owner)[name].dq_wrapped = True


def _castable(original: Any) -> Any:
    @functools.wraps(original)
    def cast(self, *args, **kwargs):
        if getattr(self, "quantization_method", None) != DQ:
            return original(self, *args, **kwargs)
        self.is_quantized = False
        try:
            return original(self, *args, **kwargs)
        finally:
            self.is_quantized = True

    return cast


def _not_layerwise(original: Any) -> Any:
    @functools.wraps(original)
    def enable_layerwise_casting(self, *args, **kwargs):
        if getattr(self, "quantization_method", None) == DQ:
            raise DQError(
                f"{type(self).__name__} is quantized by dq: layerwise casting would store its biases and what it keeps "
                "in 16 bits in 8 bits, for next to no memory; leave it off (for the other layers alone: "
                "diffusers.hooks.apply_layerwise_casting(..., skip_modules_classes=(dq.QuantizedLinear,)))"
            )
        return original(self, *args, **kwargs)

    return enable_layerwise_casting


def _not_fused(original: Any) -> Any:
    """diffusers would concatenate the `.weight`s of q, k and v, which hold no data: the model would give NaN."""

    @functools.wraps(original)
    def fuse_qkv_projections(self, *args, **kwargs):
        ours = getattr(self, "quantization_method", None) == DQ
        owners = (m for m in self.modules() if hasattr(m, "fuse_projections")) if ours else ()
        if any(isinstance(c, QuantizedLinear) for m in owners for c in m.children()):
            raise DQError(
                f"{type(self).__name__} is quantized by dq: q, k and v cannot be fused after that, and gain little, "
                "since they round their common input once already"
            )
        return original(self, *args, **kwargs)

    return fuse_qkv_projections


def refuse_fused(model: nn.Module) -> None:
    """Raises DQError for a model whose q, k and v are fused: diffusers builds it unfused, so that it could not load."""
    found = next((n for n, m in model.named_modules() if getattr(m, "fused_projections", False)), None)
    if found is not None:
        raise DQError(
            f"{found} has fused projections, and diffusers could not load what is saved: call "
            "unfuse_qkv_projections() first (a UNet stays fused: load it anew)"
        )
