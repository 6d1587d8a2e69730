"""Black Forest Labs' files through diffusers' own reader: the weights that `from_single_file` holds are ours, and what
it computes from them with 16-bit activations. Files of its own quantizer are read."""

import pytest
import torch
from diffusers import BFLQuantizationConfig, Flux2Transformer2DModel
from diffusers.quantizers.bfl.utils import (
    BFLFP8RLinear,
    BFLNVFP4Linear,
    dequantize_fp8r,
    dequantize_nvfp4,
    quantize_fp8r,
    quantize_nvfp4,
)
from safetensors.torch import load_file, save_file
from tiny_models import CASES

import dq
from dq.linear import quantized_linears
from dq.recipe import Recipe

GRIDS = {"fp8r": ("fp8_e4m3/channel", "fp8_e4m3/token"), "nvfp4": ("nvfp4", "nvfp4-token")}
CASE = CASES["Flux2Transformer2DModel"]


@pytest.fixture
def made(tmp_path):
    def make(scheme):
        weights, activations = GRIDS[scheme]
        target = {"weights": weights, "activations": activations}
        entry = {"name": "test", "description": "", "linear": target, "modulation": {"weights": "int4/group64"}}
        model = CASE.build()
        dq.quantize(model, Recipe.from_dict(entry).with_(min_features=16), progress=False)
        return model, dq.export(model, tmp_path / "out", "bfl", calibration=[CASE.inputs()])

    return make


def their_weight(linear):
    if isinstance(linear, BFLNVFP4Linear):
        return dequantize_nvfp4(linear.weight, linear.weight_scale, linear.weight_scale_2)
    assert isinstance(linear, BFLFP8RLinear)
    return dequantize_fp8r(linear.weight, linear.weight_scale)


@pytest.mark.parametrize("scheme", GRIDS)
def test_diffusers_reads_our_file(made, scheme):
    model, out = made(scheme)
    theirs = Flux2Transformer2DModel.from_single_file(
        str(out / "out.safetensors"), config=str(out), dtype=torch.float32,
        quantization_config=BFLQuantizationConfig(torch.float32),
    )  # fmt: skip
    layers = quantized_linears(model)
    assert layers and set(layers) == {
        n for n, m in theirs.named_modules() if isinstance(m, BFLFP8RLinear | BFLNVFP4Linear)
    }
    for name, layer in layers.items():
        assert torch.equal(their_weight(theirs.get_submodule(name)), layer.dequantized_weight(torch.float32)), name
    plain = dq.dequantize(model)  # what its reader computes on a CPU: 16-bit activations
    with torch.no_grad():
        ours, their = (m(**CASE.inputs())[0] for m in (plain, theirs))
    assert torch.allclose(ours, their, atol=1e-5)


@pytest.mark.parametrize("scheme", GRIDS)
def test_their_tensors_are_read(made, scheme):
    """Matrices that diffusers' own functions quantized, put into the file."""
    _, out = made(scheme)
    path = out / "out.safetensors"
    tensors, expected = load_file(path), {}
    names = {"double_blocks.0.img_attn.proj": "transformer_blocks.0.attn.to_out.0",
             "single_blocks.0.linear2": "single_transformer_blocks.0.attn.to_out"}  # fmt: skip
    for there, here in names.items():
        shape = tensors[f"{there}.weight"].shape
        weight = torch.randn(shape[0], shape[1] * (2 if scheme == "nvfp4" else 1))
        parts = (quantize_nvfp4 if scheme == "nvfp4" else quantize_fp8r)(weight)
        keys = ("weight", "weight_scale", "weight_scale_2")[: len(parts)]
        tensors |= {f"{there}.{k}": t.contiguous() for k, t in zip(keys, parts, strict=True)}
        expected[here] = (dequantize_nvfp4 if scheme == "nvfp4" else dequantize_fp8r)(*parts)
    save_file(tensors, path)
    back = quantized_linears(dq.load_exported(out))
    for name, weight in expected.items():
        assert torch.equal(back[name].dequantized_weight(torch.float32), weight)
