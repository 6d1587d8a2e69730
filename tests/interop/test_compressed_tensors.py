"""Byte for byte against compressed-tensors: profile "compressed-tensors".

How its conventions are written here:
* integers over the full range, amax/7.5 and amax/127.5: the formats `int4_full` and `int8_full`;
* scales in the dtype of the weight: scale format fp32 or bf16; the quotient x / scale is rounded to that dtype too;
* NVFP4's second level is stored inverted, 2688 / amax: the profile stores and divides by it as it is;
* MX exponents: the mode `even`, with E2M1's mantissa of one bit for E4M3 elements too.

Where it is wrong, it is left out: the scale of an MX block with amax >= 1.75 * 2^127 overflows and a small one is
stored.
"""

import pytest
import torch

from dq.qtensor import quantize
from dq.spec import QuantSpec

pytest.importorskip("compressed_tensors", reason="needs compressed-tensors, see the extra interop")

from compressed_tensors.compressors import BaseCompressor
from compressed_tensors.quantization import QuantizationScheme, preset_name_to_scheme
from compressed_tensors.quantization.lifecycle.forward import fake_quantize as their_fake_quantize
from compressed_tensors.quantization.lifecycle.forward import quantize as their_quantize
from compressed_tensors.quantization.utils import calculate_qparams, compute_dynamic_scales_and_zp, generate_gparam

PROFILE = "compressed-tensors"
SCALE = {torch.float32: "fp32", torch.bfloat16: "bf16"}


def their_weight(preset: str, layout: str, weight: torch.Tensor, group: int | None = None) -> dict[str, torch.Tensor]:
    """The tensors of a compressed Linear: its min/max observer, its qparams, its compressor."""
    scheme = preset_name_to_scheme(preset, ["Linear"])
    if group:
        args = scheme.weights.model_copy(update={"group_size": group})
        scheme = QuantizationScheme(targets=["Linear"], weights=args)
    blocks = weight.unflatten(1, (-1, scheme.weights.group_size or weight.shape[1]))
    low, high = blocks.amin(-1), blocks.amax(-1)
    state = {"weight": weight}
    if preset == "NVFP4":
        state["weight_global_scale"] = generate_gparam(weight.amin().reshape(1), weight.amax().reshape(1))
    state["weight_scale"], _ = calculate_qparams(low, high, scheme.weights, state.get("weight_global_scale"))
    return BaseCompressor.get_value_from_registry(layout).compress(state, scheme)


def test_nvfp4(weight, check):
    theirs = their_weight("NVFP4", "nvfp4-pack-quantized", weight)
    q = quantize(weight, QuantSpec.parse("nvfp4").with_(profile=PROFILE))
    check(q, theirs["weight_packed"], theirs["weight_scale"], theirs["weight_global_scale"])


def test_mxfp4(weight, check):
    theirs = their_weight("MXFP4", "mxfp4-pack-quantized", weight)
    q = quantize(weight, QuantSpec.parse("mxfp4@even").with_(profile=PROFILE))
    check(q, theirs["weight_packed"], theirs["weight_scale"])


def test_mxfp8(weight, check):
    theirs = their_weight("MXFP8", "mxfp8-quantized", weight)
    q = quantize(weight, QuantSpec.parse("mxfp8@even").with_(profile=PROFILE))
    check(q, theirs["weight"], theirs["weight_scale"])


@pytest.mark.parametrize(
    ("preset", "layout", "spec"),
    [
        ("FP8_DYNAMIC", "float-quantized", "fp8_e4m3/channel"),
        ("W8A8", "int-quantized", "int8_full/channel"),
    ],
)
def test_channel(weight, check, preset, layout, spec):
    theirs = their_weight(preset, layout, weight)
    q = quantize(weight, QuantSpec.parse(spec).with_(scale_format=SCALE[weight.dtype], profile=PROFILE))
    check(q, theirs["weight"], theirs["weight_scale"])


@pytest.mark.parametrize("group", [32, 128])
def test_w4a16(weight, check, group):
    """int32 words, eight codes + 8 each, first code lowest: bytewise our nibbles with the top bit of each flipped."""
    theirs = their_weight("W4A16", "pack-quantized", weight, group)
    spec = QuantSpec.parse(f"int4_full/group{group}").with_(scale_format=SCALE[weight.dtype], profile=PROFILE)
    check(quantize(weight, spec), theirs["weight_packed"].view(torch.uint8) ^ 0x88, theirs["weight_scale"])


@pytest.mark.parametrize(("preset", "spec"), [("FP8_DYNAMIC", "fp8_e4m3/token"), ("W8A8", "int8_full/token")])
def test_token(weight, check, preset, spec):
    """Activations: scales per row, on the fly."""
    args = preset_name_to_scheme(preset, ["Linear"]).input_activations
    scale, _ = compute_dynamic_scales_and_zp(weight[None], args, torch.nn.Identity())  # [batch, tokens, K]
    codes = their_quantize(weight, scale[0], None, args, dtype=args.pytorch_dtype())
    q = quantize(weight, QuantSpec.parse(spec).with_(scale_format=SCALE[weight.dtype], profile=PROFILE))
    check(q, codes, scale)


def test_nvfp4_activation(weight, check):
    """Block scales on the fly below a calibrated second level, here of twice the weight's amax."""
    args = preset_name_to_scheme("NVFP4", ["Linear"]).input_activations
    top = (weight.abs().amax() * 2).reshape(1)
    inverse = generate_gparam(-top, top)
    scale, _ = compute_dynamic_scales_and_zp(weight, args, torch.nn.Identity(), inverse)
    q = quantize(weight, QuantSpec.parse("nvfp4").with_(profile=PROFILE), amax=top)
    theirs = their_fake_quantize(weight, scale, None, args, inverse)
    assert torch.equal(q.global_scale, inverse)
    assert torch.equal(q.scale.to(scale.dtype), scale)
    assert torch.equal(q.dequantize(weight.dtype), theirs)


def test_overflowing_mx_scale():
    """What is left out above: rounded up to 2^128, the maximum needs the exponent 126, stored as 253."""
    huge = torch.full((1, 32), 3.2e38)
    assert quantize(huge, QuantSpec.parse("mxfp4@even").with_(profile=PROFILE)).scale.item() == 253
    assert their_weight("MXFP4", "mxfp4-pack-quantized", huge)["weight_scale"].item() != 253
