"""ComfyUI files against comfy-kitchen's plain-torch backend: the weights that its layouts make of our tensors are ours,
its linears compute what ours do, and files of its own tensors are read with the same codes.

Layouts are built from a file as ComfyUI's loader of mixed precision builds them: `comfy_quant` names the layout and its
options, the scales go in as stored.
"""

import json

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

import dq
from dq.linear import quantized_linears
from dq.recipe import Recipe

pytest.importorskip("comfy_kitchen", reason="needs comfy-kitchen, see the extra interop")

import comfy_kitchen as kitchen
from comfy_kitchen import tensor as layouts

LAYOUTS = {
    "float8_e4m3fn": "TensorCoreFP8Layout", "nvfp4": "TensorCoreNVFP4Layout", "mxfp8": "TensorCoreMXFP8Layout",
    "int8_tensorwise": "TensorWiseINT8Layout", "convrot_w4a4": "TensorCoreConvRotW4A4Layout",
    "awq_w4a16": "TensorCoreAWQW4A16Layout",
}  # fmt: skip
GRIDS = {
    "float8_e4m3fn": ("fp8_e4m3/tensor", None, []),
    "nvfp4": ("nvfp4", "nvfp4-token", []),
    "mxfp8": ("mxfp8", "mxfp8", []),
    "int8_tensorwise": ("int8/channel", "int8/token", []),
    "int8_tensorwise one scale": ("int8/tensor", "int8/token", []),
    "int8_tensorwise convrot": ("int8/channel", "int8/token", ["rotate"]),
    "convrot_w4a4": ("int4/channel", "int4/token", ["rotate"]),
    "convrot_w4a4 int8": ("int4/channel", "int8/token", ["rotate"]),
    "awq_w4a16": ("int4/group64/fp32", None, []),
    "awq_w4a16 zeros": ("uint4/group64/fp32", None, []),
}  # fmt: skip


@pytest.fixture(autouse=True)
def _eager():
    with kitchen.use_backend("eager"):
        yield


def quantized(tiny, grid, dtype=torch.float32):
    weights, activations, transforms = GRIDS[grid]
    target = {"weights": weights, "transforms": transforms} | ({"activations": activations} if activations else {})
    entry = {"name": "test", "description": "", "linear": target, "modulation": {"weights": "int8/channel"}}
    model = tiny.flux(dtype)
    dq.quantize(model, Recipe.from_dict(entry).with_(min_features=16), progress=False)
    return model


def their(tensors, name, shape, dtype=torch.float32):
    """The quantized tensor that ComfyUI's loader makes of the matrix `name`."""
    conf = json.loads(tensors[f"{name}.comfy_quant"].numpy().tobytes())
    kind, scale = conf["format"], tensors[f"{name}.weight_scale"]
    params = {"scale": scale}
    if kind == "nvfp4":
        params = {"scale": tensors[f"{name}.weight_scale_2"], "block_scale": scale}
    if kind == "mxfp8":
        params = {"scale": scale.view(torch.float8_e8m0fnu)}
    if kind == "awq_w4a16":
        params |= {"zeros": tensors[f"{name}.weight_zeros"], "group_size": conf["group_size"]}
    for key in ("convrot", "convrot_groupsize", "linear_dtype"):
        params |= {key: conf[key]} if key in conf else {}
    params = layouts.get_layout_class(LAYOUTS[kind]).Params(**params, orig_dtype=dtype, orig_shape=shape)
    return layouts.QuantizedTensor(tensors[f"{name}.weight"], LAYOUTS[kind], params)


MATRICES = {  # of FLUX.1: name there -> members here
    "double_blocks.0.img_attn.qkv": [f"transformer_blocks.0.attn.to_{x}" for x in "qkv"],
    "double_blocks.1.txt_mlp.2": ["transformer_blocks.1.ff_context.net.2"],
    "single_blocks.1.linear1": [
        *(f"single_transformer_blocks.1.attn.to_{x}" for x in "qkv"), "single_transformer_blocks.1.proj_mlp",
    ],
    "single_blocks.0.linear2": ["single_transformer_blocks.0.proj_out"],
}  # fmt: skip


@pytest.mark.parametrize("grid", GRIDS)
def test_weights_are_ours(tiny, tmp_path, grid):
    model = quantized(tiny, grid)
    out = dq.export(model, tmp_path / "out", "comfyui", weight_only=grid == "float8_e4m3fn")
    tensors, layers = load_file(out / "out.safetensors"), quantized_linears(model)
    for name, members in MATRICES.items():
        ours = torch.cat([layers[m].dequantized_weight(torch.float32) for m in members])
        theirs = their(tensors, name, tuple(ours.shape)).dequantize()
        # Rotated back by another order of float32 additions; and a scale times a code, then times the second level.
        exact = not GRIDS[grid][2] and grid not in ("nvfp4", "awq_w4a16 zeros")
        assert torch.equal(theirs, ours) if exact else torch.allclose(theirs, ours, rtol=1e-5, atol=1e-6), name
    header = safe_open(out / "out.safetensors", "pt").metadata()["_quantization_metadata"]
    described = json.loads(header)["layers"]
    assert described["double_blocks.0.img_attn.qkv"]["format"] == grid.split()[0]
    assert {k.removesuffix(".comfy_quant") for k in tensors if k.endswith(".comfy_quant")} == set(described)


@pytest.mark.parametrize("grid", ["int8_tensorwise", "int8_tensorwise convrot", "convrot_w4a4"])
def test_linears_compute_the_same(tiny, tmp_path, grid):
    """Activations per token, rotated by the same matrices: the same integers, but for ties in float32. (Its plain-torch
    backend rounds activations of `convrot_w4a4` to INT4 whatever `linear_dtype` says.)"""
    model = quantized(tiny, grid)
    tensors = load_file(dq.export(model, tmp_path / "out", "comfyui") / "out.safetensors")
    for name in ("double_blocks.1.txt_mlp.2", "single_blocks.0.linear2"):
        layer = quantized_linears(model)[MATRICES[name][0]]
        x = torch.randn(32, layer.in_features)
        weight = their(tensors, name, (layer.out_features, layer.in_features))
        theirs = torch.nn.functional.linear(x, weight, tensors[f"{name}.bias"])
        assert (theirs - layer(x)).norm() < 2e-3 * layer(x).norm()


@pytest.mark.parametrize("grid", GRIDS)
def test_their_tensors_are_read(tiny, tmp_path, grid):
    """A file whose matrices comfy-kitchen quantized itself: what we make of it is what it makes of it."""
    if grid.startswith("awq"):
        pytest.skip("comfy-kitchen has no quantizer for awq_w4a16")
    model = quantized(tiny, grid)
    out = dq.export(model, tmp_path / "out", "comfyui", weight_only=grid == "float8_e4m3fn")
    tensors, expected = load_file(out / "out.safetensors"), {}
    g = torch.Generator().manual_seed(1)
    for name, members in MATRICES.items():
        layers = [quantized_linears(model)[m] for m in members]
        shape = (sum(x.out_features for x in layers), layers[0].in_features)
        conf = json.loads(tensors[f"{name}.comfy_quant"].numpy().tobytes())
        options = {k: conf[k] for k in ("convrot", "convrot_groupsize") if k in conf}
        options |= {"per_channel": tensors[f"{name}.weight_scale"].dim() == 2} if "int8" in conf["format"] else {}
        made = layouts.QuantizedTensor.from_float(torch.randn(shape, generator=g), LAYOUTS[conf["format"]], **options)
        expected[name] = made.dequantize()
        tensors |= made.state_dict(f"{name}.weight")
    tensors = {k: t.view(torch.uint8) if t.dtype == torch.float8_e8m0fnu else t for k, t in tensors.items()}
    save_file(
        {f"model.diffusion_model.{k}": t.contiguous() for k, t in tensors.items()}, tmp_path / "theirs.safetensors"
    )
    back = quantized_linears(dq.load_exported(tmp_path / "theirs.safetensors", config=out))
    for name, members in MATRICES.items():
        ours = torch.cat([back[m].dequantized_weight(torch.float32) for m in members])
        exact = not GRIDS[grid][2] and grid != "nvfp4"
        close = torch.allclose(ours, expected[name], rtol=1e-5, atol=1e-6)
        assert torch.equal(ours, expected[name]) if exact else close, name
