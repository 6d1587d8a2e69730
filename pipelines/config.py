"""`dq.DQConfig`: what users pass to `from_pretrained` of either library."""

from __future__ import annotations

from dq.pipelines.hf_diffusers import DQDiffusersConfig
from dq.pipelines.hf_transformers import DQTransformersConfig


class DQConfig(DQDiffusersConfig, DQTransformersConfig):
    """`from_pretrained(..., quantization_config=dq.DQConfig("int8"))` quantizes while it loads, without calibration.

    One class for both libraries, and for `PipelineQuantizationConfig(quant_mapping={"transformer": DQConfig("fp8")})`.
    The arguments are those of `dq.pipelines.hf_config.DQConfigBase`.
    """
