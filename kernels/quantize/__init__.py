"""Quantization of weights by Triton kernels, bit for bit what `dq.qtensor.quantize` gives; one file a format.

Modules here register an `Accelerator`; the kernels themselves are in `jit/`, imported only where Triton can run.
"""
