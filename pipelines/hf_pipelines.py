"""What diffusers' pipelines must know of quantized models. Imported by dq.pipelines.hook."""

from __future__ import annotations

import functools
from typing import Any

from dq.linear import quantized_linears


def register(module: Any) -> None:
    """Wraps `DiffusionPipeline.enable_sequential_cpu_offload`, once."""
    cls = module.DiffusionPipeline
    original = cls.enable_sequential_cpu_offload
    if not hasattr(original, "dq_wrapped"):
        cls.enable_sequential_cpu_offload = _with_buffers(original)
        cls.enable_sequential_cpu_offload.dq_wrapped = True


def _with_buffers(original: Any) -> Any:
    """diffusers offloads parameters only and puts the buffers on the GPU, which hold all of a quantized model."""

    @functools.wraps(original)
    def enable_sequential_cpu_offload(self, *args, **kwargs):
        import accelerate

        offload = accelerate.cpu_offload

        def cpu_offload(model, *args, offload_buffers=False, **kwargs):
            return offload(model, *args, offload_buffers=offload_buffers or bool(quantized_linears(model)), **kwargs)

        accelerate.cpu_offload = cpu_offload  # diffusers looks it up when it runs
        try:
            return original(self, *args, **kwargs)
        finally:
            accelerate.cpu_offload = offload

    return enable_sequential_cpu_offload
