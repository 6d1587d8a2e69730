"""Other libraries on the same language model, if they are installed: nvidia-modelopt, torchao, optimum-quanto, sdnq.

Every function quantizes the linears of the decoder's blocks in place by the library's own defaults, and says how many
bytes these then hold.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from dq.qtensor import fake_quantize
from dq.registry import DQError
from dq.spec import QuantSpec

HEAD = "lm_head"


def _library(name: str) -> Any:
    """A package of which nothing is required here."""
    return importlib.import_module(name)


def block_linears(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Every linear (or what a library put in its place) but the output projection."""
    for name, module in model.named_modules():
        if name.rpartition(".")[2] != HEAD and hasattr(module, "in_features") and hasattr(module, "out_features"):
            yield name, module


def held(tensor: Any) -> int:
    """Bytes of a tensor; of a tensor subclass, those of the plain tensors inside."""
    if hasattr(type(tensor), "__tensor_flatten__"):
        inside = tensor.__tensor_flatten__()[0]
        return sum(held(getattr(tensor, name)) for name in inside)
    return tensor.numel() * tensor.element_size()


def stored(module: nn.Module) -> int:
    """Bytes of a quantized linear's parameters and buffers, its bias excluded."""
    own = [*module.named_parameters(), *module.named_buffers()]
    return sum(held(t) for name, t in own if name != "bias" and isinstance(t, Tensor))


def elements(model: nn.Module) -> int:
    """Weights of `block_linears`."""
    return sum(m.in_features * m.out_features for _, m in block_linears(model))


# Bits per weight of what modelopt's fake quantization stands for: codes, and scales per block.
MODELOPT_BITS = {
    "NVFP4_DEFAULT_CFG": 4.5,
    "NVFP4_AWQ_LITE_CFG": 4.5,
    "NVFP4_SVDQUANT_DEFAULT_CFG": 4.5,
    "W4A8_NVFP4_FP8_CFG": 4.5,
    "INT8_SMOOTHQUANT_CFG": 8.0,
    "FP8_DEFAULT_CFG": 8.0,
    "INT4_AWQ_CFG": 4.125,
}


def modelopt(config: str) -> Callable[..., float]:
    """A row of nvidia-modelopt by the name of a configuration."""

    def run(model: nn.Module, batches: Sequence[Tensor]) -> float:
        mtq = _library("modelopt.torch.quantization")

        def calibrate(m: nn.Module) -> None:
            for ids in batches:
                m(input_ids=ids, use_cache=False)

        before = elements(model)
        _without_cuda(_library("modelopt.torch.quantization.tensor_quant"))
        mtq.quantize(model, getattr(mtq, config), forward_loop=calibrate)
        return MODELOPT_BITS[config] * before / 8 + sum(_extras(m) for _, m in block_linears(model))

    return run


def _without_cuda(kernels: Any) -> None:
    """Lets modelopt round NVFP4 blocks of CPU tensors too, which its own kernel refuses: by the same formula (absmax
    scales in E4M3 below `amax / (6 448)`). Calibration, search and factors stay its own."""
    own = kernels.dynamic_block_quantize_op
    if getattr(own, "dq", False):
        return

    def op(x: Tensor, size: int, amax: Tensor, *bits: int) -> Tensor:
        if x.is_cuda or bits != (4, 2, 8, 4) or amax is None:
            return own(x, size, amax, *bits)
        rows = x.reshape(-1, x.shape[-1]).to(torch.float32)
        spec = QuantSpec.parse("nvfp4").with_(group_size=size)
        return fake_quantize(rows, spec, amax.max()).reshape(x.shape).to(x.dtype)

    op.dq = True
    kernels.dynamic_block_quantize_op = op


def _extras(module: nn.Module) -> int:
    """Bytes of 16-bit smoothing factors and low-rank factors, and of INT8's float32 scales per channel."""
    scale = getattr(getattr(module, "input_quantizer", None), "_pre_quant_scale", None)
    weight = getattr(module, "weight_quantizer", None)
    factors = [scale, getattr(weight, "_svdquant_lora_a", None), getattr(weight, "_svdquant_lora_b", None)]
    total = sum(2 * t.numel() for t in factors if isinstance(t, Tensor))
    amax = getattr(weight, "_amax", None)
    return total + (4 * amax.numel() if getattr(weight, "num_bits", None) == 8 and isinstance(amax, Tensor) else 0)


def torchao(make: Callable[[Any], Any], dtype: torch.dtype | None = None) -> Callable[..., float]:
    """A row of torchao; `make` gets its module `quantization`. With `dtype` the whole model runs in it, as kernels that
    give nothing else demand."""

    def run(model: nn.Module, batches: Sequence[Tensor]) -> float:
        ao = _library("torchao.quantization")
        model.to(dtype)
        ao.quantize_(model, make(ao), filter_fn=lambda m, n: isinstance(m, nn.Linear) and HEAD not in n)
        return float(sum(stored(m) for _, m in block_linears(model)))

    return run


def _torchao_nvfp4(ao: Any) -> Any:
    formats = _library("torchao.prototype.mx_formats")
    return formats.NVFP4DynamicActivationNVFP4WeightConfig(use_triton_kernel=False)


def quanto(weights: str, activations: str | None = None) -> Callable[..., float]:
    """A row of optimum-quanto by the names of its types."""

    def run(model: nn.Module, batches: Sequence[Tensor]) -> float:
        q = _library("optimum.quanto")
        q.quantize(model, getattr(q, weights), activations and getattr(q, activations), exclude=f"*{HEAD}*")
        if activations:
            with q.Calibration():
                for ids in batches:
                    model(input_ids=ids, use_cache=False)
        q.freeze(model)
        return float(sum(stored(m) for _, m in block_linears(model)))

    return run


def sdnq(**options: Any) -> Callable[..., float]:
    """A row of sdnq by the options of its quantizer."""

    def run(model: nn.Module, batches: Sequence[Tensor]) -> float:
        library, before = _library("sdnq"), elements(model)
        library.sdnq_post_load_quant(
            model, modules_to_not_convert=[HEAD], torch_dtype=next(model.parameters()).dtype, **options
        )
        layers = [m for n, m in model.named_modules() if type(m).__name__.startswith("SDNQ") and HEAD not in n]
        if not layers:
            raise DQError(f"sdnq quantized none of {before} weights")
        return float(sum(stored(m) for m in layers))

    return run


# Row -> (package, function of the model and of token ids [1, L] that calibrate, which gives the bytes of the linears).
PEERS: dict[str, tuple[str, Callable[..., float]]] = {
    "modelopt W8A8 INT8 SmoothQuant": ("modelopt", modelopt("INT8_SMOOTHQUANT_CFG")),
    "modelopt W8A8 FP8": ("modelopt", modelopt("FP8_DEFAULT_CFG")),
    "modelopt W4A16 INT4 AWQ": ("modelopt", modelopt("INT4_AWQ_CFG")),
    "modelopt W4A4 NVFP4": ("modelopt", modelopt("NVFP4_DEFAULT_CFG")),
    "modelopt W4A4 NVFP4 AWQ-lite": ("modelopt", modelopt("NVFP4_AWQ_LITE_CFG")),
    "modelopt W4A4 NVFP4-SVDQuant": ("modelopt", modelopt("NVFP4_SVDQUANT_DEFAULT_CFG")),
    "modelopt W4A8 NVFP4, FP8": ("modelopt", modelopt("W4A8_NVFP4_FP8_CFG")),
    "torchao W8A8 INT8": ("torchao", torchao(lambda ao: ao.Int8DynamicActivationInt8WeightConfig())),
    "torchao W8A8 FP8 per row": (
        "torchao",
        torchao(lambda ao: ao.Float8DynamicActivationFloat8WeightConfig(granularity=ao.PerRow()), torch.bfloat16),
    ),
    "torchao W4A16 INT4 g64": (
        "torchao",
        torchao(lambda ao: ao.IntxWeightOnlyConfig(weight_dtype=torch.int4, granularity=ao.PerGroup(64))),
    ),
    "torchao W4A4 NVFP4": ("torchao", torchao(_torchao_nvfp4)),
    "optimum-quanto W8A8 INT8": ("optimum.quanto", quanto("qint8", "qint8")),
    "optimum-quanto W4A16 INT4": ("optimum.quanto", quanto("qint4")),
    "sdnq W8A8 INT8": ("sdnq", sdnq(weights_dtype="int8", use_quantized_matmul=True)),
    "sdnq W4A16 UINT4": ("sdnq", sdnq(weights_dtype="uint4")),
    "sdnq W4A16 UINT4 SVD": ("sdnq", sdnq(weights_dtype="uint4", use_svd=True)),
}


def quantize(name: str, model: nn.Module, batches: Sequence[Tensor]) -> float:
    """Quantizes the model by another library; returns the bytes of its linears.

    Raises:
        DQError: the library is not installed.
        Exception: whatever it raises itself.
    """
    package, run = PEERS[name]
    try:
        importlib.import_module(package)
    except ModuleNotFoundError as error:
        if error.name and package.startswith(error.name):
            raise DQError("not installed") from error
        raise
    with torch.no_grad():
        return run(model, batches)
