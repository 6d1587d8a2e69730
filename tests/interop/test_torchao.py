"""Byte for byte against torchao: profile "torchao".

How its conventions are written here:
* integers over the full range, amax/7.5 and amax/127.5: the formats `int4_full` and `int8_full`; INT4's scale is in the
  dtype of the weight (scale format fp32 or bf16), INT8's and FP8's are computed in that dtype and stored as float32;
* integers and NVFP4 are multiplied by the reciprocal of the scale, FP8 is divided; block scales of NVFP4 are at least
  2^-6; the code of -0 is kept;
* MX: the scale modes are the rules floor, even, ceil, rceil; elements are divided by at least 2^-126.

Where it is wrong, it is left out:
* FP8 rows whose scale is 0 (rows of zeros too) become NaN; so does an NVFP4 tensor of zeros with two levels, and one
  with amax/2688 below 2^-128, whose reciprocal is infinite, has no defined codes;
* RCEIL takes ceil(log2(..)) in float32, which is one too low just above a power of two, and does not scale at all where
  the exponent is -127.
"""

import pytest
import torch

from dq.qtensor import quantize
from dq.spec import QuantSpec

pytest.importorskip("torchao", reason="needs torchao, see the extra interop")

from torchao.prototype.mx_formats.config import ScaleCalculationMode
from torchao.prototype.mx_formats.mx_tensor import to_mx
from torchao.prototype.mx_formats.nvfp4_tensor import nvfp4_quantize, per_tensor_amax_to_scale
from torchao.quantization import Float8Tensor, Int8Tensor, PerRow
from torchao.quantization.quant_primitives import MappingType
from torchao.quantization.quantize_.workflows import IntxUnpackedToInt8Tensor

SCALE = {torch.float32: "fp32", torch.bfloat16: "bf16"}
ELEMENTS = {"mxfp4": torch.float4_e2m1fn_x2, "mxfp8": torch.float8_e4m3fn, "mxfp8-e5m2": torch.float8_e5m2}
SMALLEST = 2688 * 2.0**-127  # amax of an NVFP4 tensor whose second level has a finite reciprocal


def spec_of(text: str, **changes) -> QuantSpec:
    return QuantSpec.parse(text).with_(profile="torchao", **changes)


def block_amax(x: torch.Tensor, size: int) -> torch.Tensor:
    return x.float().abs().unflatten(1, (-1, size)).amax(-1)


def test_nvfp4_one_level(weight, check):
    scale, codes = nvfp4_quantize(weight)
    check(quantize(weight, spec_of("nvfp4-single")), codes, scale)


def test_nvfp4_two_levels(weight, check):
    unit = per_tensor_amax_to_scale(weight.abs().amax())
    scale, codes = nvfp4_quantize(weight, per_tensor_scale=unit)
    q = quantize(weight, spec_of("nvfp4"))
    if weight.abs().amax() < SMALLEST:
        assert not torch.isfinite(1.0 / unit), "torchao has a defined result now: compare it"
        assert torch.isfinite(q.dequantize()).all()
        return
    check(q, codes, scale, unit)


@pytest.mark.parametrize("name", ELEMENTS)
@pytest.mark.parametrize("mode", ["floor", "even", "ceil", "rceil"])
def test_mx(weight, check, name, mode):
    scale, codes = to_mx(weight, ELEMENTS[name], 32, ScaleCalculationMode[mode.upper()])
    q = quantize(weight, spec_of(f"{name}@{mode}"))
    keep = torch.ones(q.scale.shape, dtype=torch.bool)
    if mode == "rceil":
        top = block_amax(weight, 32)
        mantissa, _ = torch.frexp(top / q.spec.fmt.max)
        keep = ((mantissa == 0.5) | (mantissa > 0.5 + 2.0**-18)) & (q.scale > 0) | (top == 0)
    if not keep.any():
        assert not q.spec.fmt.unpack_values(codes, weight.shape[1]).any(), "torchao scales these now: compare them"
        return
    check(q, codes, scale.view(torch.uint8), keep=keep)


def test_rceil_just_above_a_power():
    """What is left out above: 384 (1 + 2^-23) / 6 needs the exponent 7."""
    x = torch.full((1, 32), 384.0).nextafter(torch.tensor(1e9))
    assert quantize(x, spec_of("mxfp4@rceil")).scale.item() == 127 + 7
    assert to_mx(x, torch.float4_e2m1fn_x2, 32, ScaleCalculationMode.RCEIL)[0].view(torch.uint8).item() == 127 + 6


@pytest.mark.parametrize("strategy", ["channel", "token"])
def test_fp8(weight, check, strategy):
    """Weights per row and activations per token are computed alike."""
    theirs = Float8Tensor.from_hp(weight, torch.float8_e4m3fn, PerRow())
    q = quantize(weight, spec_of(f"fp8_e4m3/{strategy}"))
    keep = theirs.scale > 0
    if not keep.any():
        assert theirs.qdata.float().isnan().any(), "torchao has a defined result now: compare it"
        assert torch.isfinite(q.dequantize()).all()
        return
    check(q, theirs.qdata, theirs.scale, keep=keep)


@pytest.mark.parametrize("strategy", ["channel", "token"])
def test_int8(weight, check, strategy):
    theirs = Int8Tensor.from_hp(weight, PerRow())
    check(quantize(weight, spec_of(f"int8_full/{strategy}")), theirs.qdata, theirs.scale)


@pytest.mark.parametrize("group", [32, 128])
def test_int4_group(weight, check, group):
    """Weight-only INT4, one code per byte there."""
    theirs = IntxUnpackedToInt8Tensor.from_hp(weight, (1, group), torch.int4, mapping_type=MappingType.SYMMETRIC)
    q = quantize(weight, spec_of(f"int4_full/group{group}", scale_format=SCALE[weight.dtype]))
    check(q, q.spec.fmt.pack(theirs.qdata), theirs.scale)
