"""Source checkpoints whose weights are FP8 already: found before anything is read, refused, or dequantized first."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from dq.registry import DQError

# Names under which writers keep the factor of an FP8 weight; all of them multiply, `weight_scale_inv` too.
SCALES = ("weight_scale", "scale_weight", "weight_scale_inv")
# What such files hold beside it and 16-bit layers do not need: scales of activations, and marks of the writer.
LEFT_OVER = (*SCALES, "input_scale", "scale_input", "input_scale_inv", "comfy_quant", "scaled_fp8")
BLOCK = 128  # of `weight_scale_inv`


def is_fp8(dtype: Any) -> bool:
    """Whether a torch dtype, or one as a safetensors header writes it, is an FP8 of weights."""
    return dtype in (torch.float8_e4m3fn, torch.float8_e5m2, "F8_E4M3", "F8_E5M2")


def check_source(kinds: Mapping[str, Any], choice: str, own: bool = False) -> None:
    """Refuses a source that is quantized already, unless FP8 is to be dequantized.

    Args:
        kinds: dtype of every tensor, in torch's or a safetensors header's writing.
        choice: `refuse` or `dequantize`.
        own: whether the request to quantize stands in the source's own config.

    Raises:
        DQError: codes of dq, or FP8 weights that nobody asked to dequantize.
    """
    codes = next((n for n in kinds if n.endswith(".qweight")), None)
    if codes and own:
        raise DQError(
            f"the files hold codes ({codes}), and the quantization_config beside them lost the table of quantized "
            "layers (format_version, kinds, layers): restore config.json as it was saved"
        )
    if codes:
        raise DQError(
            f"the source is quantized already (it holds {codes}): load it with from_pretrained and no "
            "quantization_config, or quantize the 16-bit model"
        )
    found = [n for n, dtype in kinds.items() if is_fp8(dtype)]
    if found and choice != "dequantize":
        raise DQError(
            f"{len(found)} weights of the source are FP8 already, e.g. {found[0]}: a second quantization adds its "
            "error to theirs. Take the 16-bit model, or DQConfig(..., fp8_source='dequantize')"
        )


def without_scales(names: list[str]) -> list[str]:
    """The names that are left when FP8 weights have been dequantized."""
    return [n for n in names if n.rpartition(".")[2] not in LEFT_OVER]


def dequantized(state: dict[str, Tensor], dtype: torch.dtype) -> dict[str, Tensor]:
    """`weight * scale` in float32, rounded to `dtype`, for every FP8 weight; other tensors as they are.

    A weight without a scale is a plain cast. A scale has one value, one per row [N] or [N, 1], or one per block of
    128 x 128.

    Raises:
        DQError: a scale of another shape.
    """
    out = {}
    for name in without_scales(list(state)):
        value = state[name]
        if is_fp8(value.dtype):
            parent = name.rpartition(".")[0]
            scale = next((state[k] for s in SCALES if (k := f"{parent}.{s}") in state), None)
            wide = value.to(torch.float32)
            value = (wide if scale is None else wide * _expanded(scale.to(torch.float32), wide, name)).to(dtype)
        out[name] = value
    return out


def _expanded(scale: Tensor, weight: Tensor, name: str) -> Tensor:
    """The scale in a shape that multiplies the weight."""
    if scale.numel() == 1:
        return scale.reshape(())
    rows, columns = weight.shape[0], weight[0].numel()
    if scale.numel() == rows:
        return scale.reshape(rows, *[1] * (weight.dim() - 1))
    if tuple(scale.shape) == (-(-rows // BLOCK), -(-columns // BLOCK)):
        wide = scale.repeat_interleave(BLOCK, 0).repeat_interleave(BLOCK, 1)
        return wide[:rows, :columns]
    was = tuple(scale.shape)
    raise DQError(f"the scale of the FP8 weight {name} has shape {was}, which fits no {tuple(weight.shape)}")
