"""Text encoders, UNets with convolutions, and other pipelines' loaders."""

import pytest
import torch
from tiny_models import CASES

import dq
from dq.conv import QuantizedConv2d
from dq.linear import QuantizedLinear

peft = pytest.importorskip("peft")


def bits(model):
    state = {k: v.detach().clone().view(torch.uint8) for k, v in model.state_dict().items() if "lora_" not in k}
    return {k.replace(".base_layer", ""): v for k, v in state.items()}


def same(a, b):
    return a.keys() == b.keys() and all(torch.equal(a[k], b[k]) for k in a)


@pytest.mark.parametrize("preset", ["int8", "w4a16"])
def test_text_encoder(tiny, preset):
    """Kohya's and diffusers' files hold both; the encoder is a transformers model."""
    pipe = tiny.flux_pipeline()
    dq.quantize(pipe, tiny.recipe(preset), components=["transformer", "text_encoder"], progress=False)
    name, g = "text_model.encoder.layers.0.self_attn.q_proj", torch.Generator().manual_seed(0)
    state = {f"text_encoder.{name}.lora_{s}.weight": torch.randn(*shape, generator=g) * 0.3
             for s, shape in (("A", (4, 32)), ("B", (32, 4)))}  # fmt: skip
    plain = tiny.denoise(pipe)
    dq.load_lora(pipe, state, adapter_name="style")
    (row,) = dq.adapter_info(pipe)
    assert row.layer.startswith("text_encoder.") and row.quantized and row.state == "active"
    on = tiny.denoise(pipe)
    assert not torch.equal(on, plain)
    pipe.fuse_lora(components=["text_encoder"])
    assert dq.adapter_info(pipe)[0].retention > 0.99 and not torch.equal(tiny.denoise(pipe), plain)
    pipe.unfuse_lora(components=["text_encoder"])
    assert torch.equal(tiny.denoise(pipe), on)
    pipe.unload_lora_weights()
    assert torch.equal(tiny.denoise(pipe), plain)


@pytest.mark.parametrize("order", ["before", "after"])
def test_unet_with_convolutions(tiny, order):
    case = CASES["UNet2DConditionModel@sdxl"]
    model, inputs = case.build(), case.inputs()
    quantized = case.build()
    dq.quantize(quantized, tiny.recipe("int8"), progress=False)
    names = [n for n, m in quantized.named_modules() if isinstance(m, QuantizedLinear)][::2]
    config = peft.LoraConfig(r=2, lora_alpha=3, target_modules=names, init_lora_weights=False)
    torch.manual_seed(1)
    for step in ["lora", "quantize"] if order == "before" else ["quantize", "lora"]:
        if step == "quantize":
            dq.quantize(model, tiny.recipe("int8"), progress=False)
        else:
            model.add_adapter(config, "style")
    held = {n: m for n, m in model.named_modules() if hasattr(m, "lora_A")}
    kinds = {type(m.base_layer) for m in held.values()}
    assert {QuantizedConv2d, QuantizedLinear} <= kinds and len(held) == len(names)
    seen = {}
    for name, layer in held.items():
        layer.register_forward_hook(lambda m, args, y, name=name: seen.update({name: (args[0], y)}))
    with torch.no_grad():
        on = model(**inputs)[0]
        for name, (x, y) in dict(seen).items():
            layer = held[name]
            a, b = layer.lora_A["style"], layer.lora_B["style"]
            wanted = b(a(x)) * 1.5
            torch.testing.assert_close(y - layer.base_layer(x), wanted, rtol=1e-3, atol=1e-4)
        before = bits(model)
        model.fuse_lora()
        for name, (x, y) in dict(seen).items():
            if isinstance(held[name].base_layer, QuantizedLinear):
                torch.testing.assert_close(held[name](x), y, rtol=1e-3, atol=1e-4)
        model.unfuse_lora()
        assert same(bits(model), before) and torch.equal(model(**inputs)[0], on)
        model.disable_adapters()
        off = model(**inputs)[0]
    model.unload_lora()
    with torch.no_grad():
        assert torch.equal(model(**inputs)[0], off) and not torch.equal(on, off)


_IMAGE = ("Flux", "Flux2", "Chroma", "SD3", "Sana", "QwenImage", "ZImage", "Lumina2")
_VIDEO = ("CogVideoX", "HunyuanVideo", "LTXVideo", "Wan")
LOADERS = [f"{name}Transformer2DModel" for name in _IMAGE] + [f"{name}Transformer3DModel" for name in _VIDEO]


@pytest.mark.parametrize("name", LOADERS)
def test_every_model_takes_a_lora_file(tiny, name, tmp_path):
    """Written by `save_lora_adapter` of the 16-bit model, read by the quantized one: the same deltas arrive."""
    case = CASES[name]
    source, model, inputs = case.build(), case.build(), case.inputs()
    dq.quantize(model, tiny.recipe("w4a4-int4"), progress=False)
    chosen = [n for n, m in model.named_modules() if isinstance(m, QuantizedLinear)][::3]
    source.add_adapter(peft.LoraConfig(r=2, target_modules=chosen, init_lora_weights=False), "style")
    source.save_lora_adapter(tmp_path, adapter_name="style")
    with torch.no_grad():
        off = model(**inputs)[0]
        file = "pytorch_lora_weights.safetensors"
        model.load_lora_adapter(tmp_path, prefix=None, adapter_name="style", weight_name=file)
        for n in chosen:
            mine, theirs = (m.get_submodule(n).get_delta_weight("style") for m in (model, source))
            assert torch.equal(mine, theirs)
        on = model(**inputs)[0]
        model.fuse_lora()
        assert min(x.retention for x in dq.adapter_info(model)) > 0.99
        model.unfuse_lora()
        first = lambda y: y[0] if isinstance(y, (list, tuple)) else y  # noqa: E731
        assert torch.equal(first(model(**inputs)[0]), first(on)) and not torch.equal(first(on), first(off))
