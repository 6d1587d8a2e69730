"""Failures with LoRA on quantized models that users of other tools reported."""

import copy
import logging

import pytest
import torch
from torch import nn

import dq
from dq.linear import QuantizedLinear

peft = pytest.importorskip("peft")

FOUR_BIT = ["w4a16", "w4a4-int4", "w4a4-nvfp4", "w4a4-nvfp4-svd"]
PROJ, FFN, LAST = (
    "transformer_blocks.0.attn.to_out.0",
    "transformer_blocks.1.ff.net.2",
    "single_transformer_blocks.0.proj_out",
)
QKV = tuple(f"transformer_blocks.1.attn.to_{x}" for x in "qkv")


def pairs(scale=0.05, rank=4, seed=0):
    """name of the target (q, k and v as one) -> (down [r, K], up [N, r]) for the tiny FLUX of width 64."""
    g, sizes = torch.Generator().manual_seed(seed), {PROJ: (64, 64), FFN: (64, 256), LAST: (64, 320), QKV: (192, 64)}
    return {
        name: (torch.randn(rank, k, generator=g) / k**0.5, torch.randn(n, rank, generator=g) * scale)
        for name, (n, k) in sizes.items()
    }


def deltas(loras, alpha=None):
    """name of each linear -> what is added to its weight, float64, `alpha / r` included."""
    out = {}
    for name, (down, up) in loras.items():
        delta = up.double() @ down.double() * (1.0 if alpha is None else alpha / len(down))
        names = [name] if isinstance(name, str) else name
        out |= dict(zip(names, delta.chunk(len(names)), strict=True))
    return out


def diffusers_form(loras):
    out = {}
    for name, (down, up) in loras.items():
        names = [name] if isinstance(name, str) else name
        for one, part in zip(names, up.chunk(len(names)), strict=True):
            out |= {f"transformer.{one}.lora_A.weight": down, f"transformer.{one}.lora_B.weight": part}
    return out


ORIGINAL = {PROJ: "double_blocks.0.img_attn.proj", FFN: "double_blocks.1.img_mlp.2", LAST: "single_blocks.0.linear2",
            QKV: "double_blocks.1.img_attn.qkv"}  # fmt: skip


def original_form(loras, prefix, dotted, alpha=None):
    """Black Forest Labs' names: kohya joins them with underscores, ComfyUI with dots."""
    out = {}
    for name, (down, up) in loras.items():
        key = prefix + (ORIGINAL[name] if dotted else ORIGINAL[name].replace(".", "_"))
        out |= {f"{key}.lora_down.weight": down, f"{key}.lora_up.weight": up}
        if alpha is not None:
            out[f"{key}.alpha"] = torch.tensor(float(alpha))
    return out


FORMS = {
    "diffusers": (lambda x: diffusers_form(x), None),
    "kohya with alpha": (lambda x: original_form(x, "lora_unet_", False, 2), 2),
    "kohya without alpha": (lambda x: original_form(x, "lora_unet_", False), None),
    "ComfyUI with alpha": (lambda x: original_form(x, "diffusion_model.", True, 2), 2),
    "ComfyUI without alpha": (lambda x: original_form(x, "diffusion_model.", True), None),
}


@pytest.fixture(scope="module")
def quantized(tiny):
    """preset -> a fresh copy of a quantized tiny FLUX in a pipeline without text encoders."""
    made = {}

    def get(preset):
        if preset not in made:
            made[preset] = calibrated(tiny, tiny.flux(), preset)
        return pipeline(copy.deepcopy(made[preset]))

    return get


def calibrated(tiny, obj, preset):
    recipe = tiny.recipe(preset)
    records = [tiny.flux_inputs(seed=i) for i in range(2)] if recipe.needs_calibration else None
    dq.quantize(obj, recipe, calibration=records, progress=False)
    return obj


def pipeline(transformer):
    from diffusers import FlowMatchEulerDiscreteScheduler, FluxPipeline

    empty = dict.fromkeys(("vae", "text_encoder", "tokenizer", "text_encoder_2", "tokenizer_2"))
    return FluxPipeline(scheduler=FlowMatchEulerDiscreteScheduler(), transformer=transformer, **empty)


def output(tiny, pipe):
    with torch.no_grad():
        return pipe.transformer(**tiny.flux_inputs())[0]


def layers(pipe):
    return {n: m for n, m in pipe.transformer.named_modules() if hasattr(m, "get_delta_weight")}


def bits(model):
    return {
        k.replace(".base_layer", ""): v.clone().view(torch.uint8)
        for k, v in model.state_dict().items()
        if "lora_" not in k
    }


@pytest.mark.parametrize("preset", FOUR_BIT)
@pytest.mark.parametrize("scale", [1e-7, 1e-2])
def test_F34_tiny_deltas_survive_fusing(tiny, quantized, preset, scale):
    """Seen elsewhere: merged into 4-bit codes, all of a small delta vanished. Every layer must keep 99 % of it."""
    pipe, loras = quantized(preset), pairs(scale)
    before = bits(pipe.transformer)
    pipe.load_lora_weights(diffusers_form(loras), adapter_name="small")
    ranks = {n: m.base_layer.config.rank for n, m in layers(pipe).items()}
    pipe.fuse_lora()
    for name, delta in deltas(loras).items():
        base = pipe.transformer.get_submodule(name).base_layer
        added = base.lowrank_up[:, ranks[name] :].double() @ base.lowrank_down[ranks[name] :].double()
        assert float((added - delta).norm() / delta.norm()) < 0.01, name
    assert min(x.retention for x in dq.adapter_info(pipe)) > 0.99
    pipe.unfuse_lora()
    pipe.unload_lora_weights()
    after = bits(pipe.transformer)
    assert after.keys() == before.keys() and all(torch.equal(after[k], before[k]) for k in before)


@pytest.mark.parametrize("preset", FOUR_BIT)
def test_F35_fusing_keeps_the_effect(tiny, quantized, preset):
    """Seen elsewhere: `fuse_lora` returned, and the LoRA had no effect any more. Measured per layer on raw inputs."""
    pipe, loras = quantized(preset), pairs()
    pipe.load_lora_weights(diffusers_form(loras), adapter_name="style")
    x = {n: torch.randn(50, m.base_layer.in_features) for n, m in layers(pipe).items()}
    with torch.no_grad():
        base = {n: m.base_layer(x[n]) for n, m in layers(pipe).items()}
        pipe.fuse_lora()
        for name, delta in deltas(loras).items():
            got = (pipe.transformer.get_submodule(name)(x[name]) - base[name]).double()
            wanted = x[name].double() @ delta.T
            assert float((got * wanted).sum() / wanted.square().sum()) == pytest.approx(1.0, abs=0.01), name


@pytest.mark.parametrize("safe", [False, True])
def test_F35_what_cannot_be_fused_raises(tiny, quantized, safe):
    """Other kinds of adapters work beside the layer; fusing them must fail, and change nothing."""
    pipe = quantized("w4a4-int4")
    model = pipe.transformer
    plain, before = output(tiny, pipe), bits(model)
    peft.inject_adapter_in_model(peft.LoKrConfig(r=2, target_modules=[FFN], init_weights=False), model)
    on = output(tiny, pipe)
    assert not torch.equal(on, plain)
    with pytest.raises((RuntimeError, ValueError)):
        model.get_submodule(FFN).merge(safe_merge=safe)
    assert torch.equal(output(tiny, pipe), on)
    assert all(torch.equal(v, before[k]) for k, v in bits(model).items() if k in before)


@pytest.mark.parametrize("preset", FOUR_BIT)
def test_F38_before_and_after_quantizing_are_the_same(tiny, quantized, preset):
    """Seen elsewhere: state_dict mismatches when a LoRA met a quantized model. Both orders must agree to the bit."""
    after, state = quantized(preset), diffusers_form(pairs())
    after.load_lora_weights(state, adapter_name="style")
    before = pipeline(tiny.flux())
    before.load_lora_weights(state, adapter_name="style")
    calibrated(tiny, before, preset)
    assert torch.equal(output(tiny, before), output(tiny, after))
    for p in (before, after):
        assert all(isinstance(m.base_layer, QuantizedLinear) for m in layers(p).values()) and len(layers(p)) == 6
        p.fuse_lora()
    assert torch.equal(output(tiny, before), output(tiny, after))
    for p in (before, after):
        p.unload_lora_weights()
    assert before.transformer.state_dict().keys() == after.transformer.state_dict().keys()


def test_F38_a_state_dict_says_shapes_and_stays_plain(quantized):
    """diffusers asks it for the shape of `<layer>.weight`; it must not be saved with it."""
    state = quantized("w4a4-int4").transformer.state_dict()
    assert state[f"{FFN}.weight"].shape == (64, 256) and f"{FFN}.weight" not in state
    with pytest.raises(KeyError):
        state["nothing.weight"]
    for copied in (copy.deepcopy(state), copy.copy(state)):
        assert type(copied).__name__ == "OrderedDict" and list(copied) == list(state)


@pytest.mark.parametrize("how", ["pipeline", "model", "component", "loaded"])
def test_F39_quantized_by_a_call(tiny, tmp_path, how):
    """Seen elsewhere: TypeError unless the model had been quantized by `from_pretrained` with a config."""
    pipe = pipeline(tiny.flux())
    dq.quantize(
        pipe.transformer if how == "model" else pipe, tiny.recipe("w4a4-int4"), progress=False,
        components=["transformer"] if how == "component" else None,
    )  # fmt: skip
    if how == "loaded":
        pipe.transformer.save_pretrained(tmp_path)
        pipe.register_modules(transformer=type(pipe.transformer).from_pretrained(tmp_path))
    plain = output(tiny, pipe)
    pipe.load_lora_weights(diffusers_form(pairs()), adapter_name="style")
    on = output(tiny, pipe)
    assert len(layers(pipe)) == 6 and not torch.equal(on, plain)
    pipe.fuse_lora()
    pipe.unfuse_lora()
    assert torch.equal(output(tiny, pipe), on)
    pipe.unload_lora_weights()
    assert torch.equal(output(tiny, pipe), plain)


def test_F39_models_of_no_library():
    net = nn.Sequential(nn.Linear(64, 48), nn.ReLU(), nn.Linear(48, 32))
    dq.quantize(net, dq.Recipe.load("int8").with_(min_features=1), progress=False)
    x = torch.randn(3, 64)
    plain = net(x)
    model = peft.get_peft_model(net, peft.LoraConfig(target_modules=["0", "2"], init_lora_weights=False))
    assert not torch.equal(model(x), plain)
    merged = model.merge_and_unload()
    assert merged is net and type(net[0]) is QuantizedLinear and net[0].config.rank == 8


@pytest.mark.parametrize("form", FORMS)
def test_F41_key_forms(quantized, form):
    """The delta that arrives in every layer, against what the file says: up @ down times alpha / r."""
    pipe, loras = quantized("w4a4-int4"), pairs()
    write, alpha = FORMS[form]
    dq.load_lora(pipe, write(loras), adapter_name="style")
    expected = deltas(loras, alpha)
    assert layers(pipe).keys() == expected.keys()
    for name, layer in layers(pipe).items():
        torch.testing.assert_close(layer.get_delta_weight("style").double(), expected[name], rtol=1e-5, atol=1e-8)


def test_F41_unmatched_keys_are_listed(tiny, quantized):
    pipe = quantized("w4a4-int4")
    plain, state = output(tiny, pipe), diffusers_form(pairs())
    state |= diffusers_form({"transformer_blocks.7.attn.to_out.0": pairs(seed=1)[PROJ]})
    state["transformer.norm_out.diff_b"] = torch.ones(8)
    with pytest.raises(dq.DQError) as error:
        dq.load_lora(pipe, state, adapter_name="style")
    message = str(error.value)
    assert "2 of 8" in message and "transformer_blocks.7.attn.to_out.0" in message and "norm_out.diff_b" in message
    assert not layers(pipe) and torch.equal(output(tiny, pipe), plain)
    with pytest.warns(UserWarning, match=r"transformer_blocks\.7\.attn\.to_out\.0"):
        dq.load_lora(pipe, state, adapter_name="style", strict=False)
    assert len(layers(pipe)) == 6


def test_F41_an_alpha_that_is_not_applied_is_an_error(tiny, quantized):
    """diffusers drops alphas of files that mix its own names with kohya's: the LoRA would be twice as strong."""
    pipe, plain = quantized("w4a4-int4"), None
    plain = output(tiny, pipe)
    renamed = {"lora_A": "lora_down", "lora_B": "lora_up"}
    state = {}
    for key, value in diffusers_form(pairs()).items():
        name, _, side = key.removesuffix(".weight").rpartition(".")
        state |= {f"{name}.{renamed[side]}.weight": value, f"{name}.alpha": torch.tensor(2.0)}
    with pytest.raises(dq.DQError, match=r"loaded with 2\.00 times the strength"):
        dq.load_lora(pipe, state, adapter_name="style")
    assert not layers(pipe) and torch.equal(output(tiny, pipe), plain)


def test_F41_foreign_names_do_not_load_silently(tiny, quantized, caplog):
    """Through diffusers alone: nothing matches, and it says so."""
    pipe = quantized("w4a4-int4")
    state = {k.replace("transformer.", "somewhere_else."): v for k, v in diffusers_form(pairs()).items()}
    logging.getLogger("diffusers").propagate = True
    with caplog.at_level(logging.WARNING, logger="diffusers"):
        pipe.load_lora_weights(state, adapter_name="style")
    assert "No LoRA keys associated to FluxTransformer2DModel found" in caplog.text and not layers(pipe)
    with pytest.raises(dq.DQError, match=r"6 of 6 .*somewhere_else\.transformer_blocks"):
        dq.load_lora(pipe, state, adapter_name="style")
