"""DoRA beside a quantized linear: `y = m / ||W + s B A|| * (W x + s B A x) + b`, norms of rows, m [N] learned.

W is the raw-basis weight [N, K] that the layer stands for; it is expanded only for the norms, which are kept as long as
adapter and mode stay as they are. Source: DoRA (arXiv 2402.09353, section 4).
"""

from __future__ import annotations

from typing import Any

import torch
from peft.tuners.lora.dora import DoraLinearLayer
from peft.tuners.lora.variants import DoraLinearVariant
from torch import Tensor, nn

from dq.linear import QuantizedLinear


def _weight(base: nn.Module) -> Tensor:
    """[N, K] in float32."""
    wide = base.dequantized_weight(torch.float32) if isinstance(base, QuantizedLinear) else base.weight
    return wide.detach().to(torch.float32)


def _bias(base: nn.Module) -> Tensor | float:
    """What the base layer adds to `W x`."""
    bias = 0.0 if base.bias is None else base.bias
    constant = base.constant() if isinstance(base, QuantizedLinear) else None
    return bias if constant is None else bias + constant.to(base.bias)


class QuantizedDora(DoraLinearLayer):
    """The magnitudes m of one adapter, and the row norms that they are divided by."""

    def update_layer(self, *, base_layer: nn.Module, lora_A: Tensor, lora_B: Tensor, scaling: float, **kwargs: Any):
        """m starts as the norms: the adapter then changes nothing but through A and B."""
        norms = self._norms(base_layer, lora_A, lora_B, scaling)
        self.weight = nn.Parameter(norms.to(lora_A.dtype), requires_grad=True)

    def forward(self, x, *, lora_A, lora_B, scaling, base_layer, base_result=None, adapter_name="default") -> Tensor:
        """What is added to the output of the base layer."""
        base = base_layer(x) if base_result is None else base_result
        factor = self.weight / self._kept(base_layer, lora_A.weight, lora_B.weight, scaling).to(self.weight)
        return (factor - 1) * (base - _bias(base_layer)) + factor * lora_B(lora_A(x)) * scaling

    @torch.no_grad()
    def _norms(self, base: nn.Module, a: Tensor, b: Tensor, scaling: float) -> Tensor:
        product = b.detach().to(torch.float32) @ a.detach().to(torch.float32)
        return torch.linalg.vector_norm(_weight(base).to(product.device) + scaling * product, dim=1)

    def _kept(self, base: nn.Module, a: Tensor, b: Tensor, scaling: float) -> Tensor:
        """The norms, computed again where A, B or their factor changed."""
        if torch.compiler.is_compiling():
            return self._norms(base, a, b, scaling)
        state = (id(base), float(scaling), *((t.data_ptr(), _version(t)) for t in (a, b)))
        if self._dora_cache.get("state") != state:  # which peft empties when training begins
            self._dora_cache.update(state=state, norms=self._norms(base, a, b, scaling))
        return self._dora_cache["norms"]


def _version(tensor: Tensor) -> int:
    return -1 if tensor.is_inference() else tensor._version


class QuantizedDoraVariant(DoraLinearVariant):
    """How peft attaches DoRA to a quantized linear."""

    @staticmethod
    def init(module: Any, adapter_name: str, **kwargs: Any) -> None:
        if not module.lora_magnitude_vector:  # the first one
            module.adapter_layer_names = (*module.adapter_layer_names, "lora_magnitude_vector")
        a, b = (getattr(module, n)[adapter_name].weight for n in ("lora_A", "lora_B"))
        layer = QuantizedDora(False)
        layer.update_layer(base_layer=module.get_base_layer(), lora_A=a, lora_B=b, scaling=module.scaling[adapter_name])
        module.lora_magnitude_vector[adapter_name] = layer
