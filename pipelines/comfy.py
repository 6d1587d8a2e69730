"""ComfyUI's quantized matrices: one `Matrix` format for each way in which comfy-kitchen holds a weight.

    float8_e4m3fn    weight E4M3 [N, K], weight_scale float32 scalar, input_scale scalar
    nvfp4            weight uint8 (high nibble first, padded to 16 x 16), weight_scale E4M3 in 128 x 4 tiles,
                     weight_scale_2 scalar, input_scale and pre_quant_scale [K] where there are any
    mxfp8            weight E4M3 (padded to 32 x 32), weight_scale E8M0 in 128 x 4 tiles
    int8_tensorwise  weight int8 [N, K], weight_scale [N, 1] or scalar; with `convrot` its rows were multiplied by
                     regular Hadamard matrices of `convrot_groupsize`
    convrot_w4a4     weight int8 [N, K / 2] (low nibble first, rotated), weight_scale float32 [N]
    awq_w4a16        weight int8 [N, K / 2] of codes 0..15, weight_scale and weight_zeros [K / g, N] in the dtype of the
                     model: (code - 8) * scale + zero

Source: comfy-kitchen 0.2.40 (tensor layouts and eager backend), ComfyUI's loader.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from dq.packing import PACKINGS
from dq.pipelines.exported import Stored, multiplier, values_of
from dq.qtensor import QTensor
from dq.registry import DQError
from dq.spec import QuantSpec
from dq.transforms import Step

Own = dict[str, Tensor]
Shape = tuple[int, int]


@dataclass(frozen=True)
class Matrix:
    """One format.

    Attributes:
        fits: `(weights, rotated) -> bool`.
        pack: `(q, dtype of the model) -> tensors`.
        unpack: `(tensors, (N, K) or None, conf) -> QTensor`.
        activations: grids that run beside it.
        steps: input steps that it can say.
        multiple: what K must be a multiple of.
    """

    fits: Callable[[QuantSpec, bool], bool]
    pack: Callable[[QTensor, torch.dtype], Own]
    unpack: Callable[[Own, Shape | None, dict[str, Any]], QTensor]
    activations: tuple[str, ...] = ()
    steps: tuple[str, ...] = ()
    multiple: int = 1


def _of(spec: QuantSpec, *formats: str, strategy: str) -> bool:
    return spec.format in formats and spec.strategy == strategy and spec.scale_format != "e8m0"


def _scalar(own: Own, name: str) -> Tensor:
    return own[name].reshape(1).to(torch.float32)


def _pack_fp8(q: QTensor, dtype: torch.dtype) -> Own:
    return {"weight": q.codes[:, : q.shape[1]], "weight_scale": q.scale.to(torch.float32).reshape(())}


def _unpack_fp8(own: Own, shape: Shape | None, conf: dict[str, Any]) -> QTensor:
    codes, spec = own["weight"], QuantSpec.parse("fp8_e4m3/tensor")
    return QTensor(codes, _scalar(own, "weight_scale")[None], None, spec, tuple(codes.shape))


def _pack_int8(q: QTensor, dtype: torch.dtype) -> Own:
    scale = q.scale.to(torch.float32)
    scale = scale.reshape(()) if q.spec.strategy == "tensor" else scale
    return {"weight": q.codes[:, : q.shape[1]], "weight_scale": scale}


def _unpack_int8(own: Own, shape: Shape | None, conf: dict[str, Any]) -> QTensor:
    codes, scale = own["weight"], own["weight_scale"].to(torch.float32)
    spec = QuantSpec.parse("int8/channel" if scale.dim() == 2 else "int8/tensor")
    return QTensor(codes, scale.reshape(spec.scale_shape(*codes.shape)), None, spec, tuple(codes.shape))


def _pack_int4(q: QTensor, dtype: torch.dtype) -> Own:
    packed = PACKINGS.get("nibble-s4").pack(values_of(q)).view(torch.int8)
    return {"weight": packed, "weight_scale": q.scale.to(torch.float32).reshape(-1)}


def _unpack_int4(own: Own, shape: Shape | None, conf: dict[str, Any]) -> QTensor:
    codes, scale = own["weight"].view(torch.uint8), own["weight_scale"].reshape(-1, 1).to(torch.float32)
    return QTensor(codes, scale, None, QuantSpec.parse("int4/channel"), (len(codes), 2 * codes.shape[1]))


def _pack_nvfp4(q: QTensor, dtype: torch.dtype) -> Own:
    codes = PACKINGS.get("comfy-nvfp4").pack(q.spec.fmt.unpack(q.codes, q.shape[1]))
    scale = PACKINGS.get("comfy-nvfp4-scale").pack(q.scale)
    return {"weight": codes, "weight_scale": scale, "weight_scale_2": multiplier(q).clone()}


def _unpack_nvfp4(own: Own, shape: Shape | None, conf: dict[str, Any]) -> QTensor:
    shape, spec = shape or (len(own["weight"]), 2 * own["weight"].shape[1]), QuantSpec.parse("nvfp4")
    codes = spec.fmt.pack(PACKINGS.get("comfy-nvfp4").unpack(own["weight"], shape))
    scale = own["weight_scale"].view(torch.float8_e4m3fn)
    scale = PACKINGS.get("comfy-nvfp4-scale").unpack(scale, spec.scale_shape(*shape))
    return QTensor(codes, scale, _scalar(own, "weight_scale_2"), spec, shape)


def _pack_mxfp8(q: QTensor, dtype: torch.dtype) -> Own:
    codes = pad(q.codes[:, : q.shape[1]].view(torch.uint8), (0, 0, 0, -q.shape[0] % 32)).view(q.codes.dtype)
    return {"weight": codes, "weight_scale": PACKINGS.get("comfy-nvfp4-scale").pack(q.scale)}


def _unpack_mxfp8(own: Own, shape: Shape | None, conf: dict[str, Any]) -> QTensor:
    codes, spec = own["weight"], QuantSpec.parse("mxfp8")
    rows, width = shape or tuple(codes.shape)
    scale = own["weight_scale"].view(torch.uint8)
    scale = PACKINGS.get("comfy-nvfp4-scale").unpack(scale, spec.scale_shape(rows, width))
    codes = codes.view(torch.uint8)[:rows, :width].contiguous().view(codes.dtype)
    return QTensor(codes, scale, None, spec, (rows, width))


def _pack_awq(q: QTensor, dtype: torch.dtype) -> Own:
    scale = q.scale.to(torch.float32)
    if q.spec.has_zero_point:
        codes, zero = values_of(q), (8.0 - q.zero_point.to(torch.float32)) * scale
    else:
        codes, zero = values_of(q) + 8, torch.zeros_like(scale)
    packed = PACKINGS.get("nibble-low").pack(codes).view(torch.int8)
    return {"weight": packed, "weight_scale": scale.T.to(dtype), "weight_zeros": zero.T.to(dtype)}


_SCALES = {torch.float32: "fp32", torch.float16: "fp16", torch.bfloat16: "bf16"}


def _unpack_awq(own: Own, shape: Shape | None, conf: dict[str, Any]) -> QTensor:
    shape = (len(own["weight"]), 2 * own["weight"].shape[1])
    codes = PACKINGS.get("nibble-low").unpack(own["weight"].view(torch.uint8), shape)
    scale, zero = own["weight_scale"].T.contiguous(), own["weight_zeros"].T
    return affine(codes, scale, zero, 8, int(conf.get("group_size", 64)))


def affine(codes: Tensor, scale: Tensor, zero: Tensor, middle: int, group: int) -> QTensor:
    """Weights `(code - middle) * scale + zero`: codes 0..15 [N, K]; scale and zero [N, K / group] of one dtype.

    Raises:
        DQError: a zero that is no whole multiple of its scale.
    """
    grid = {"strategy": "group", "group_size": group, "scale_format": _SCALES[scale.dtype]}
    points = middle - zero.to(torch.float32) / scale.to(torch.float32)
    if (points - points.round()).abs().max() > 2.0**-4 or points.min() < -0.5 or points.max() > 15.5:
        raise DQError("its zeros are no zero points 0..15 times the scales: dq has no such grid")
    points, signed = points.round(), bool((points.round() == 8).all())
    spec = QuantSpec("int4_wide" if signed else "uint4", **grid)
    packed = spec.fmt.pack(codes.to(torch.int8) - 8 if signed else codes)
    return QTensor(packed, scale, None, spec, tuple(codes.shape), None if signed else points.to(torch.uint8))


def _is_nvfp4(spec: QuantSpec, rotated: bool) -> bool:
    return (spec.format, spec.scale_format, spec.group_size) == ("fp4_e2m1", "fp8_e4m3", 16) and not rotated


def _is_awq(spec: QuantSpec, rotated: bool) -> bool:
    return _of(spec, "int4", "int4_wide", "int4_full", "uint4", strategy="group") and not rotated


_INT8, _INT4 = ("int8", "int8_wide", "int8_full"), ("int4", "int4_wide", "int4_full")
MATRICES: dict[str, Matrix] = {
    "float8_e4m3fn": Matrix(
        lambda s, rotated: _of(s, "fp8_e4m3", strategy="tensor") and not rotated, _pack_fp8, _unpack_fp8,
        ("fp8_e4m3/token", "fp8_e4m3/tensor"),
    ),
    "nvfp4": Matrix(_is_nvfp4, _pack_nvfp4, _unpack_nvfp4, ("nvfp4-token", "nvfp4"), ("smooth",), 16),
    "mxfp8": Matrix(
        lambda s, rotated: (s.format, s.scale_format) == ("fp8_e4m3", "e8m0") and not rotated, _pack_mxfp8,
        _unpack_mxfp8, ("mxfp8",), (), 32,
    ),
    "int8_tensorwise": Matrix(
        lambda s, rotated: _of(s, *_INT8, strategy="channel") or (_of(s, *_INT8, strategy="tensor") and not rotated),
        _pack_int8, _unpack_int8, ("int8/token",), ("rotate",),
    ),
    "convrot_w4a4": Matrix(
        lambda s, rotated: _of(s, *_INT4, strategy="channel") and rotated, _pack_int4, _unpack_int4,
        ("int4/token", "int8/token"), ("rotate",), 64,
    ),
    "awq_w4a16": Matrix(_is_awq, _pack_awq, _unpack_awq, (), (), 64),
}  # fmt: skip


def format_of(one: Stored) -> str:
    """The format of a matrix, "" if its weights have none."""
    rotated = [s.name for s in one.steps] == ["rotate"]
    return next((name for name, m in MATRICES.items() if m.fits(one.weight.spec, rotated)), "")


def encode(one: Stored, dtype: torch.dtype, scale: float | None = None) -> tuple[dict[str, Any], Own]:
    """`comfy_quant` of a matrix, and its other tensors.

    Args:
        dtype: of the model.
        scale: of the activations, where one is stored.
    """
    kind, turn = format_of(one), next((s.params for s in one.steps if s.name == "rotate"), None)
    conf, own = {"format": kind}, MATRICES[kind].pack(one.weight, dtype)
    if one.activations is None and kind != "awq_w4a16":
        conf["full_precision_matrix_mult"] = True
    if turn is not None:
        conf |= {"convrot_groupsize": turn["size"]} | ({"convrot": True} if kind == "int8_tensorwise" else {})
    if kind == "convrot_w4a4" and one.activations is not None and one.activations.fmt.bits == 8:
        conf["linear_dtype"] = "int8"
    if kind == "awq_w4a16":
        conf["group_size"] = one.weight.spec.group_size
    if scale is not None:
        own["input_scale"] = torch.tensor(scale)
    smooth = next((s for s in one.steps if s.name == "smooth"), None)
    if smooth is not None:
        own["pre_quant_scale"] = 1.0 / smooth.tensors["factor"].to(torch.float32)
    return conf, own


def decode(conf: dict[str, Any], own: Own, shape: Shape | None = None) -> Stored:
    """The inverse of `encode`.

    Args:
        shape: (N, K), which padding hides; default: all that is stored.

    Raises:
        DQError: a format that is not read.
    """
    kind = conf.get("format")
    if kind not in MATRICES:
        raise DQError(f"ComfyUI's format {kind!r} is not read, only {', '.join(MATRICES)}")
    weight, acts, steps, static = MATRICES[kind].unpack(own, shape, conf), None, (), None
    if conf.get("convrot") or kind == "convrot_w4a4":
        steps = (Step("rotate", params={"size": int(conf.get("convrot_groupsize", 256))}),)
    if "pre_quant_scale" in own:
        steps = (Step("smooth", {"factor": 1.0 / own["pre_quant_scale"].reshape(-1).to(torch.float32)}),)
    if kind != "awq_w4a16" and not conf.get("full_precision_matrix_mult"):
        acts = MATRICES[kind].activations[0]
        acts = "int8/token" if conf.get("linear_dtype") == "int8" else acts
        if kind == "float8_e4m3fn" and "input_scale" in own:
            acts, static = "fp8_e4m3/tensor", _scalar(own, "input_scale")[None]
    return Stored(weight, None if acts is None else QuantSpec.parse(acts), static, steps)
