"""NVIDIA Model Optimizer's own export of a diffusers model, read by us; and its low-rank linear on our NVFP4_SVD file.
Of a language model, its files and ours beside each other.

Its NVFP4 runs on GPUs only, its calibration of maxima and its export run here. What an NVFP4 file says is decoded by
diffusers' reader of Black Forest Labs' files, whose layout is the same.
"""

import copy
import json

import pytest
import torch
from safetensors.torch import load_file

import dq
from dq.linear import quantized_linears
from dq.recipe import Recipe

pytest.importorskip("modelopt.torch.quantization", reason="needs nvidia-modelopt, which this suite does not install")

import modelopt.torch.quantization as mtq
from diffusers.quantizers.bfl.utils import dequantize_nvfp4
from modelopt.torch.export import export_hf_checkpoint
from modelopt.torch.quantization.conversion import create_and_replace_svdquant_linear_on_the_fly
from modelopt.torch.quantization.nn import SVDQuantLinear

KEPT = ("embed", "norm_out", "time_text")


def calibrated(tiny):
    """A small FLUX with NVFP4 quantizers, their maxima taken from two calls."""
    model = tiny.flux(torch.bfloat16, num_layers=1, num_single_layers=1)
    records = [tiny.flux_inputs(torch.bfloat16, seed=s) for s in (0, 1)]
    config = copy.deepcopy(mtq.NVFP4_DEFAULT_CFG)
    model = mtq.quantize(model, config, forward_loop=lambda m: [m(**r) for r in records])
    mtq.disable_quantizer(model, lambda name: name.startswith("proj_out") or any(w in name for w in KEPT))
    return model


def exported(model, folder):
    export_hf_checkpoint(model, export_dir=str(folder))
    tensors = {k: v for f in folder.glob("*.safetensors") for k, v in load_file(f).items()}
    return tensors, quantized_linears(dq.load_exported(folder))


def residual(tensors, name):
    return dequantize_nvfp4(*(tensors[f"{name}.{k}"] for k in ("weight", "weight_scale", "weight_scale_2")))


def test_their_nvfp4_is_read(tiny, tmp_path):
    tensors, layers = exported(calibrated(tiny), tmp_path / "out")
    assert "transformer_blocks.0.attn.to_q" in layers and "x_embedder" not in layers
    for name, layer in layers.items():
        assert torch.equal(layer.dequantized_weight(torch.float32), residual(tensors, name)), name
        assert str(layer.config.activations) == "nvfp4-token"


def test_their_nvfp4_svd_is_read(tiny, tmp_path):
    """Smoothing and factors of our choice: its search for them runs NVFP4, on a GPU."""
    model = calibrated(tiny)
    create_and_replace_svdquant_linear_on_the_fly(model=model)
    originals = {}
    for name, linear in model.named_modules():
        if isinstance(linear, SVDQuantLinear) and linear.weight_quantizer.is_enabled:
            scale = (torch.rand(linear.in_features) + 0.5).bfloat16()
            originals[name] = linear.weight.detach().float()
            smooth = originals[name] / scale.float()
            u, s, v = torch.linalg.svd(smooth)
            up, down = (u[:, :8] * s[:8]).bfloat16(), v[:8].bfloat16()
            linear.input_quantizer._enable_pre_quant_scale = True
            linear.input_quantizer.pre_quant_scale = scale
            linear.weight_quantizer.svdquant_lora_a, linear.weight_quantizer.svdquant_lora_b = down, up
            linear.weight.data = (smooth - up.float() @ down.float()).bfloat16()
            linear.weight_quantizer.reset_amax()
            linear.weight_quantizer.amax = linear.weight.abs().max().float()
    tensors, layers = exported(model, tmp_path / "out")
    assert set(layers) == set(originals)
    for name, layer in layers.items():
        scale, down, up = (
            tensors[f"{name}.{k}"].float() for k in ("pre_quant_scale", "svdquant_lora_a", "svdquant_lora_b")
        )
        said = (residual(tensors, name) + up @ down) * scale
        ours = layer.dequantized_weight(torch.float32)
        assert layer.config.rank == 8 and torch.allclose(ours, said, rtol=1e-5, atol=1e-6), name
        assert (ours - originals[name]).norm() < 0.12 * originals[name].norm()


def test_their_linear_computes_our_file(tiny, tmp_path):
    """`SVDQuantLinear` with our tensors and its quantizers off: x times the weight that our layer stands for."""
    entry = {"weights": "nvfp4", "activations": "nvfp4-token",
             "transforms": [{"name": "smooth"}, {"name": "lowrank", "rank": 8}]}  # fmt: skip
    plan = Recipe.from_dict({"name": "test", "description": "", "linear": entry, "modulation": {"weights": "nvfp4"}})
    model = tiny.flux(num_layers=1, num_single_layers=1)
    records = [tiny.flux_inputs()]
    dq.quantize(model, plan.with_(min_features=16), calibration=records, progress=False)
    dq.export(model, tmp_path / "out", "modelopt", calibration=records)
    tensors = load_file(tmp_path / "out" / "diffusion_pytorch_model.safetensors")
    name = "transformer_blocks.0.ff.net.2"
    ours = quantized_linears(model)[name]
    holder = torch.nn.Sequential(torch.nn.Linear(ours.in_features, ours.out_features))
    mtq.quantize(holder, copy.deepcopy(mtq.NVFP4_DEFAULT_CFG), forward_loop=None)
    create_and_replace_svdquant_linear_on_the_fly(model=holder)
    theirs = holder[0]
    theirs.weight.data, theirs.bias.data = residual(tensors, name), tensors[f"{name}.bias"]
    theirs.input_quantizer._enable_pre_quant_scale = True
    theirs.input_quantizer.pre_quant_scale = tensors[f"{name}.pre_quant_scale"]
    theirs.weight_quantizer.svdquant_lora_a = tensors[f"{name}.svdquant_lora_a"].float()
    theirs.weight_quantizer.svdquant_lora_b = tensors[f"{name}.svdquant_lora_b"].float()
    theirs.input_quantizer.disable()
    theirs.weight_quantizer.disable()
    x = torch.randn(8, ours.in_features)
    expected = torch.nn.functional.linear(x, ours.dequantized_weight(torch.float32), ours.bias)
    assert (theirs(x) - expected).norm() < 2.0**-9 * expected.norm()  # lora_a was rounded to 16 bits


def test_language_models_have_its_layout(tiny, tmp_path):
    """The same tensors by name, type and shape, equal second levels and block scales, the same words in both configs;
    one second level for q, k and v, and for gate and up; its file read by us gives its values."""
    config, records = copy.deepcopy(mtq.NVFP4_DEFAULT_CFG), [dict(input_ids=torch.arange(3, 35).view(2, 16))]
    theirs, ours = (tiny.llama(torch.bfloat16, hidden_size=128, intermediate_size=256) for _ in range(2))
    theirs.config.architectures = ["LlamaForCausalLM"]
    theirs = mtq.quantize(theirs, config, forward_loop=lambda m: [m(**r) for r in records])
    export_hf_checkpoint(theirs, export_dir=str(tmp_path / "theirs"))
    entry = {"weights": "nvfp4", "activations": "nvfp4-token"}
    plan = Recipe.from_dict({"name": "test", "description": "", "linear": entry}).with_(min_features=16)
    dq.quantize(ours, plan, progress=False)
    dq.export(ours, tmp_path / "ours", "modelopt", calibration=records)
    a, b = (load_file(tmp_path / n / "model.safetensors") for n in ("theirs", "ours"))
    assert {n: (t.dtype, t.shape) for n, t in a.items()} == {n: (t.dtype, t.shape) for n, t in b.items()}
    for name in (n for n in a if "weight_scale" in n):
        x, y = a[name].float(), b[name].float()
        one = name.endswith("scale_2")  # block scales between two E4M3 numbers go either way
        assert torch.equal(x, y) if one else ((x - y).abs() <= x / 8).all() and (x == y).float().mean() > 0.99, name
    for block in range(2):
        for group in (("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"), ("mlp.gate_proj", "mlp.up_proj")):
            for leaf in ("weight_scale_2", "input_scale"):
                assert len({b[f"model.layers.{block}.{m}.{leaf}"].item() for m in group}) == 1
    said = [json.loads((tmp_path / n / "config.json").read_text())["quantization_config"] for n in ("theirs", "ours")]
    assert said[0]["config_groups"] == said[1]["config_groups"]
    assert said[0]["quant_algo"] == said[1]["quant_algo"] == "NVFP4" and "lm_head" in said[1]["ignore"]
    layers = quantized_linears(dq.load_exported(tmp_path / "theirs"))
    assert len(layers) == 14
    for name, layer in layers.items():
        assert torch.equal(layer.dequantized_weight(torch.float32), residual(a, name)), name
