"""LoRA on quantized pipelines through the methods that diffusers users call."""

import copy

import pytest
import torch

import dq
from dq.linear import QuantizedLinear, quantized_linears

peft = pytest.importorskip("peft")

RECIPES = ["int8-smooth", "w4a4-int4-svd", "w4a4-int4-convrot", "w4a4-nvfp4-arc"]
# A fused-row segment, a layer without transforms inside, a concatenated input and the last linear of a block.
TARGETS = ("transformer_blocks.0.attn.to_q", "transformer_blocks.1.ff.net.2", "single_transformer_blocks.0.proj_out",
           "single_transformer_blocks.1.proj_mlp", "transformer_blocks.1.attn.add_k_proj")  # fmt: skip


def lora(model, seed=0, targets=TARGETS, rank=4, scale=0.05, prefix="transformer.", dtype=torch.float32):
    """A LoRA in diffusers' form, with an output of the size of the layers' own."""
    g, out = torch.Generator().manual_seed(seed), {}
    for name in targets:
        layer = model.get_submodule(name)
        n, k = layer.out_features, layer.in_features
        out[f"{prefix}{name}.lora_A.weight"] = (torch.randn(rank, k, generator=g) / k**0.5).to(dtype)
        out[f"{prefix}{name}.lora_B.weight"] = (torch.randn(n, rank, generator=g) * scale).to(dtype)
    return out


def make(tiny, preset, dtype=torch.float32, before=()):
    """A quantized tiny FLUX; the adapters `before` are loaded before it is quantized."""
    pipe, recipe = tiny.flux_pipeline(dtype), tiny.recipe(preset)
    for name, state in before:
        pipe.load_lora_weights(state, adapter_name=name)
    records = [tiny.flux_inputs(dtype, seed=i) for i in range(2)] if recipe.needs_calibration else None
    dq.quantize(pipe, recipe, calibration=records, progress=False)
    return pipe


def bits(model):
    state = {k: v.detach().clone().view(torch.uint8) for k, v in model.state_dict().items() if "lora_" not in k}
    return {k.replace(".base_layer", ""): v for k, v in state.items()}


def same_bits(a, b):
    return a.keys() == b.keys() and all(torch.equal(a[k], b[k]) for k in a)


def relative(a, b):
    return float((a - b).norm() / b.norm())


@pytest.fixture(scope="module")
def flux(tiny):
    """preset -> (a pipeline to copy, its latents, two LoRAs), made once."""
    made, loras = {}, [lora(tiny.flux(), 1), lora(tiny.flux(), 2, rank=8)]

    def get(preset):
        if preset not in made:
            pipe = make(tiny, preset)
            made[preset] = (pipe, tiny.denoise(pipe))
        pipe, plain = made[preset]
        return copied(tiny, pipe), plain, loras

    return get


def copied(tiny, pipe):
    parts = {n: copy.deepcopy(m) if n == "transformer" else m for n, m in pipe.components.items()}
    parts |= {n: copy.deepcopy(parts[n]) for n in ("text_encoder", "text_encoder_2")}
    other = type(pipe)(**parts)
    other.set_progress_bar_config(disable=True)
    return other


@pytest.mark.parametrize("preset", RECIPES)
def test_on_off_on_weights_and_removal(tiny, flux, preset):
    """Every state is reached again with the same bits."""
    pipe, plain, (one, two) = flux(preset)
    before = bits(pipe.transformer)
    pipe.load_lora_weights(one, adapter_name="first")
    pipe.load_lora_weights(two, adapter_name="second")
    pipe.set_adapters(["first", "second"], [0.7, -0.4])
    mixed = tiny.denoise(pipe)
    assert relative(mixed, plain) > 0.01
    pipe.disable_lora()
    assert torch.equal(tiny.denoise(pipe), plain)
    pipe.enable_lora()
    assert torch.equal(tiny.denoise(pipe), mixed)
    pipe.set_adapters("first", 0.7)
    alone = tiny.denoise(pipe)
    assert not torch.equal(alone, mixed)
    pipe.set_adapters(["first", "second"], [0.7, 0.0])
    assert relative(tiny.denoise(pipe), alone) < 1e-5
    pipe.delete_adapters("second")
    pipe.set_adapters("first", 0.7)
    assert torch.equal(tiny.denoise(pipe), alone)
    pipe.unload_lora_weights()
    assert torch.equal(tiny.denoise(pipe), plain) and same_bits(bits(pipe.transformer), before)


@pytest.mark.parametrize("preset", RECIPES)
def test_every_layer_adds_exactly_its_delta(tiny, flux, preset):
    """`y = Q(x) + sum_i w_i B_i A_i x` on the raw x, whatever the layer does to it inside."""
    pipe, _, (one, two) = flux(preset)
    weights, seen = dict(first=0.7, second=-0.4), {}
    pipe.load_lora_weights(one, adapter_name="first")
    pipe.load_lora_weights(two, adapter_name="second")
    pipe.set_adapters(list(weights), list(weights.values()))
    for name in TARGETS:
        pipe.transformer.get_submodule(name).register_forward_hook(
            lambda m, args, y, name=name: seen.update({name: (m, args[0], y)})
        )
    with torch.no_grad():
        pipe.transformer(**tiny.flux_inputs())
        for name, (layer, x, y) in seen.items():
            assert isinstance(layer.base_layer, QuantizedLinear)
            delta = 0.0
            for state, weight in ((one, 0.7), (two, -0.4)):
                a, b = (state[f"transformer.{name}.lora_{s}.weight"].double() for s in "AB")
                delta = delta + weight * x.double() @ a.T @ b.T
            torch.testing.assert_close((y - layer.base_layer(x)).double(), delta, rtol=1e-4, atol=1e-5)
    assert len(seen) == len(TARGETS)


@pytest.mark.parametrize("preset", RECIPES)
def test_fused_unfused_saved_loaded(tiny, flux, preset, tmp_path):
    pipe, plain, (one, two) = flux(preset)
    before = bits(pipe.transformer)
    pipe.load_lora_weights(one, adapter_name="first")
    pipe.load_lora_weights(two, adapter_name="second")
    pipe.set_adapters(["first", "second"], [0.7, -0.4])
    beside = tiny.denoise(pipe)
    pipe.fuse_lora()
    fused = tiny.denoise(pipe)
    # A 4-bit activation grid turns a last-bit difference into a whole step now and then.
    assert relative(fused, beside) < (0.05 if "a4" in preset else 1e-3)
    table = dq.adapter_info(pipe)
    assert {x.state for x in table} == {"fused"} and min(x.retention for x in table) > 0.99999
    assert (
        repr(table).splitlines()[0]
        == "first: 5 layers (5 quantized), 5 fused, at least 100.00% of every fused delta kept"
    )
    pipe.unfuse_lora()
    assert torch.equal(tiny.denoise(pipe), beside) and same_bits(bits(pipe.transformer), before)
    pipe.fuse_lora()
    assert torch.equal(tiny.denoise(pipe), fused)
    with pytest.raises(dq.DQError, match=r"adapters are attached .* cannot be saved: unload_lora_weights"):
        pipe.save_pretrained(tmp_path / "no")
    pipe.unload_lora_weights()
    assert torch.equal(tiny.denoise(pipe), fused)
    pipe.save_pretrained(tmp_path / "yes")
    loaded = type(pipe).from_pretrained(tmp_path / "yes")
    loaded.set_progress_bar_config(disable=True)
    assert torch.equal(tiny.denoise(loaded), fused)
    loaded.load_lora_weights(one, adapter_name="more")  # a loaded model takes adapters and fuses them, too
    loaded.fuse_lora()
    loaded.unload_lora_weights()
    loaded.transformer.save_pretrained(tmp_path / "again")
    again = type(pipe.transformer).from_pretrained(tmp_path / "again")
    inputs = tiny.flux_inputs()
    with torch.no_grad():
        assert torch.equal(again(**inputs)[0], loaded.transformer(**inputs)[0])


@pytest.mark.parametrize("preset", ["int8-smooth", "w4a4-nvfp4-arc", "w4a4-int4-svd"])
def test_16_bit_model_with_a_32_bit_lora(tiny, preset):
    pipe = make(tiny, preset, torch.bfloat16)
    plain = tiny.denoise(pipe)
    pipe.load_lora_weights(lora(tiny.flux(), 1), adapter_name="style")
    beside = tiny.denoise(pipe)
    assert beside.dtype == torch.bfloat16
    before = bits(pipe.transformer)
    pipe.fuse_lora(lora_scale=0.8)
    kept = [x.retention for x in dq.adapter_info(pipe)]
    assert 0.99 < min(kept) < 1.0 and relative(tiny.denoise(pipe), beside) < 0.5
    pipe.unfuse_lora()
    assert same_bits(bits(pipe.transformer), before)
    pipe.disable_lora()
    assert torch.equal(tiny.denoise(pipe), plain)


def test_quantizing_around_fused_adapters_is_refused(tiny, flux):
    pipe, _, (one, _) = flux("int8-smooth")
    plain = tiny.flux_pipeline()
    for p in (plain, pipe):
        p.load_lora_weights(one, adapter_name="style")
        p.fuse_lora()
    for verb in (lambda: dq.plan(plain, "fp8"), lambda: dq.quantize(plain, "fp8"), lambda: dq.dequantize(pipe)):
        with pytest.raises(dq.DQError, match=r"has fused adapters: unfuse_lora.* takes them out"):
            verb()
    assert not quantized_linears(plain.transformer)
    plain.unload_lora_weights()
    fused = plain.transformer.get_submodule(TARGETS[0]).weight.clone()
    dq.quantize(plain, tiny.recipe("int8"), progress=False)
    w = plain.transformer.get_submodule(TARGETS[0]).dequantized_weight(torch.float32)
    assert relative(w, fused) < 0.01  # the delta is part of what was quantized


def test_plan_and_dequantize_see_the_base(tiny, flux):
    pipe, _, (one, _) = flux("int8-smooth")
    source = tiny.flux_pipeline()
    expected = repr(dq.plan(source, tiny.recipe("fp8")))
    source.load_lora_weights(one, adapter_name="style")
    assert repr(dq.plan(source, tiny.recipe("fp8"))) == expected
    pipe.load_lora_weights(one, adapter_name="style")
    on = tiny.denoise(pipe)
    dq.dequantize(pipe)
    assert not quantized_linears(pipe.transformer) and relative(tiny.denoise(pipe), on) < 0.1
    assert {x.state for x in dq.adapter_info(pipe)} == {"active"}


def test_folding_and_adapters_do_not_mix(tiny, flux):
    pipe, _, (one, _) = flux("int8-smooth")
    other = copied(tiny, pipe)
    other.load_lora_weights(one)
    with pytest.raises(dq.DQError, match=r"adapters are attached .* cannot be folded"):
        dq.fold(other)
    dq.fold(pipe)
    with pytest.warns(UserWarning, match="fold changed the inputs of this model's layers: an adapter trained on the"):
        pipe.load_lora_weights(one)


def test_a_lora_from_scratch_is_listed(tiny, flux):
    pipe, _, _ = flux("w4a4-int4")
    config = peft.LoraConfig(r=2, lora_alpha=6, target_modules=["to_q", "proj_out"], init_lora_weights="gaussian")
    pipe.transformer.add_adapter(config, "fresh")
    rows = dq.adapter_info(pipe)
    assert {(x.adapter, x.rank, x.weight, x.state) for x in rows} == {("fresh", 2, 3.0, "active")}
    assert any(not x.quantized for x in rows) and any(x.quantized for x in rows)  # the final proj_out stays in 16 bits
    assert all(x.layer.startswith("transformer.") for x in rows) and len(dq.adapter_info(pipe.transformer)) == len(rows)
    assert repr(dq.adapter_info(tiny.flux())) == "no adapters"


@pytest.mark.parametrize("change", [dict(init_lora_weights="pissa"), dict(init_lora_weights="olora")])
def test_kinds_that_need_the_16_bit_weight_are_refused(tiny, flux, change):
    pipe, plain, _ = flux("w4a4-int4")
    with pytest.raises(dq.DQError, match=r"transformer_blocks\.0\.attn\.to_q is quantized: .* 16-bit weight"):
        pipe.transformer.add_adapter(peft.LoraConfig(r=2, target_modules=[TARGETS[0]], **change))


def test_compiles_whole(tiny):
    """One block of each kind, with two adapters; steps inside the layers are compiled in the next test."""
    model, inputs = tiny.flux(num_layers=1, num_single_layers=1), tiny.flux_inputs()
    targets = ["transformer_blocks.0.attn.to_q", "single_transformer_blocks.0.proj_out"]
    dq.quantize(model, tiny.recipe("w4a16"), progress=False)
    for name, seed in (("first", 1), ("second", 2)):
        model.load_lora_adapter(lora(tiny.flux(), seed, targets), adapter_name=name)
    model.set_adapters(["first", "second"], [0.7, -0.4])
    with torch.no_grad():
        eager = model(**inputs)[0]
        torch._dynamo.reset()
        compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
        assert relative(compiled(**inputs)[0], eager) < 0.02


@pytest.mark.parametrize("preset", ["w4a4-int4-convrot", "w4a4-nvfp4-arc"])
def test_a_layer_compiles_beside_and_fused(tiny, preset):
    net = torch.nn.Sequential(tiny.layer(preset)[0])
    peft.inject_adapter_in_model(peft.LoraConfig(target_modules=["0"], init_lora_weights=False), net)
    x = torch.randn(6, 64)
    for fused in (False, True):
        if fused:
            net[0].merge()
        with torch.no_grad():
            eager = net(x)
            torch._dynamo.reset()
            compiled = torch.compile(net, backend="aot_eager", fullgraph=True)
            torch.testing.assert_close(compiled(x), eager, rtol=1e-4, atol=1e-5)


def test_hotswap(tiny, flux):
    """A LoRA of another rank in the place of the first, without another module."""
    pipe, _, (one, two) = flux("w4a4-int4-svd")
    reference = copied(tiny, pipe)
    reference.load_lora_weights(two, adapter_name="style")
    pipe.enable_lora_hotswap(target_rank=8)
    pipe.load_lora_weights(one, adapter_name="style")
    first = tiny.denoise(pipe)
    layer = pipe.transformer.get_submodule(TARGETS[0]).lora_A["style"]
    pipe.load_lora_weights(two, adapter_name="style", hotswap=True)
    assert pipe.transformer.get_submodule(TARGETS[0]).lora_A["style"] is layer
    swapped = tiny.denoise(pipe)
    assert relative(swapped, tiny.denoise(reference)) < 0.05 and not torch.equal(swapped, first)
    pipe.fuse_lora()
    assert relative(tiny.denoise(pipe), swapped) < 0.05


def test_a_copy_has_its_own_adapters(tiny, flux, tmp_path):
    pipe, plain, (one, _) = flux("w4a4-int4-svd")
    pipe.load_lora_weights(one, adapter_name="style")
    on = tiny.denoise(pipe)
    other = copied(tiny, pipe)
    assert torch.equal(tiny.denoise(other), on)
    other.fuse_lora()
    other.unload_lora_weights()
    fused = tiny.denoise(other)
    assert torch.equal(tiny.denoise(pipe), on)
    other.transformer.save_pretrained(tmp_path)  # says the ranks of the copy, not those of its origin
    other.register_modules(transformer=type(other.transformer).from_pretrained(tmp_path))
    assert torch.equal(tiny.denoise(other), fused)
    pipe.unload_lora_weights()
    pipe.transformer.save_pretrained(tmp_path / "plain")
    loaded = type(pipe.transformer).from_pretrained(tmp_path / "plain")
    assert same_bits(bits(loaded), bits(pipe.transformer)) and torch.equal(tiny.denoise(pipe), plain)


def test_a_damaged_file_leaves_the_pipeline_alone(tiny, flux):
    pipe, plain, loras = flux("int8")
    whole = loras[0]
    key = next(k for k in whole if "lora_A" in k)
    with pytest.raises(dq.DQError, match=r"lacks .*lora_A.*incomplete"):
        dq.load_lora(pipe, {k: v for k, v in whole.items() if k != key})
    with pytest.raises(dq.DQError, match=r"NaN or Inf in .*lora_A"):
        dq.load_lora(pipe, whole | {key: whole[key] * float("nan")})
    assert not pipe.get_list_adapters()
    assert torch.equal(tiny.denoise(pipe), plain)
