"""What users do with a pipeline after it was quantized: offload, compile, cast, cache, tile, control.

Compared with the same done to the quantized model alone where that must not change a bit, else with the 16-bit one.
"""

import copy

import pytest
import torch
from diffusers import FluxControlNetModel, FluxTransformer2DModel, NucleusMoEImageTransformer2DModel
from diffusers.hooks import (
    FasterCacheConfig,
    FirstBlockCacheConfig,
    MagCacheConfig,
    PyramidAttentionBroadcastConfig,
    TaylorSeerCacheConfig,
    TextKVCacheConfig,
    apply_group_offloading,
    apply_layerwise_casting,
)
from torch import nn
from torch._dynamo.testing import CompileCounter

import dq
from dq.linear import quantized_linears

PRESETS = (
    "int8",
    "w4a4-nvfp4",
    "w4a4-int4-svd",
)  # one payload each: codes, second-level scales, factors and transforms
CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def made(tiny):
    """preset -> (quantized model, inputs, its output, output of the 16-bit model)."""
    source, inputs, found = tiny.flux(), tiny.flux_inputs(), {}

    def make(preset):
        if preset not in found:
            model, recipe = copy.deepcopy(source), tiny.recipe(preset)
            dq.quantize(model, recipe, calibration=[inputs] if recipe.needs_calibration else None, progress=False)
            found[preset] = model, inputs, run(model, inputs), run(source, inputs)
        model, *rest = found[preset]
        return copy.deepcopy(model), *rest

    return make


@pytest.fixture
def pipe(tiny):
    pipe = tiny.flux_pipeline()
    dq.quantize(pipe, tiny.recipe("w4a4-nvfp4"), components=["transformer", "text_encoder_2"], progress=False)
    return pipe


@torch.no_grad()
def run(model, inputs):
    return model(**inputs)[0]


def devices(model):
    return {b.device.type for m in quantized_linears(model).values() for b in m.buffers()}


def close(a, b, limit):
    return (a - b).float().norm() < limit * b.float().norm()


# --- offload: F47, F48 ------------------------------------------------------------------------------------------------


def test_F48_model_offload_of_a_pipeline(tiny, pipe):
    """accelerate moves a model when it is called and its predecessor away. F47: a pipeline still moves afterwards."""
    expected = tiny.denoise(pipe)
    pipe.enable_model_cpu_offload(device="cpu")
    assert all(hasattr(m, "_hf_hook") for m in (pipe.transformer, pipe.text_encoder_2))
    assert torch.equal(tiny.denoise(pipe), expected)
    pipe.remove_all_hooks()
    pipe.to("cpu")
    assert torch.equal(tiny.denoise(pipe), expected)


@pytest.fixture
def unnumbered(monkeypatch):
    """diffusers numbers the device: tensors are never on "cpu:0", and accelerate would copy them again and again."""
    import accelerate

    offload = accelerate.cpu_offload
    monkeypatch.setattr(accelerate, "cpu_offload", lambda model, device, **kwargs: offload(model, CPU, **kwargs))


def test_F48_sequential_offload_takes_the_payload_along(tiny, pipe, unnumbered):
    """diffusers offloads parameters; buffers, which hold the codes, would all stay on the accelerator."""
    expected = tiny.denoise(pipe)
    pipe.enable_sequential_cpu_offload(device="cpu")
    assert devices(pipe.transformer) == devices(pipe.text_encoder_2) == {"meta"}  # only in while they run
    assert torch.equal(tiny.denoise(pipe), expected)
    assert devices(pipe.transformer) == {"meta"}
    assert {b.device.type for b in pipe.text_encoder.buffers()} == {"cpu"}  # of 16-bit models, as ever
    pipe.remove_all_hooks()
    assert devices(pipe.transformer) == {"cpu"} and torch.equal(tiny.denoise(pipe), expected)


@pytest.mark.parametrize("preset", PRESETS)
@pytest.mark.parametrize("kind", ["block_level", "leaf_level"])
def test_F48_group_offload(made, tmp_path, preset, kind):
    """With groups on disk the tensors in memory are emptied: what is computed was read back."""
    model, inputs, expected, _ = made(preset)
    groups = dict(num_blocks_per_group=1) if kind == "block_level" else {}
    model.enable_group_offload(CPU, CPU, offload_type=kind, offload_to_disk_path=str(tmp_path), **groups)
    for layer in quantized_linears(model).values():  # emptied is not zeroed: make it visible
        for buffer in layer.buffers():
            buffer.data.view(torch.uint8).fill_(255)
    for _ in range(2):
        assert torch.equal(run(model, inputs), expected)
    assert list(tmp_path.glob("*.safetensors"))


def test_F48_group_offload_in_memory_and_of_a_pipeline(tiny, made, pipe):
    for kind in ("block_level", "leaf_level"):
        model, inputs, expected, _ = made("w4a4-nvfp4")
        model.enable_group_offload(CPU, CPU, offload_type=kind, num_blocks_per_group=1)
        assert torch.equal(run(model, inputs), expected)
    expected = tiny.denoise(pipe)
    pipe.enable_group_offload(CPU, CPU, offload_type="leaf_level")
    assert torch.equal(tiny.denoise(pipe), expected)


# --- compile: F68 -----------------------------------------------------------------------------------------------------


def test_F68_repeated_blocks_compile(tiny):
    """Regional compilation of a model that never ran before: no break, no import in a graph, the same bits."""
    model = tiny.flux(num_layers=1, num_single_layers=2)
    dq.quantize(model, tiny.recipe("w4a4-nvfp4"), progress=False)
    inputs, plain = tiny.flux_inputs(), copy.deepcopy(model)
    torch._dynamo.reset()
    model.compile_repeated_blocks(backend="aot_eager", fullgraph=True)
    assert torch.equal(run(model, inputs), run(plain, inputs))


class Blocks(nn.Module):
    """Three equal blocks."""

    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(32, 64), nn.GELU(), nn.Linear(64, 32)) for _ in range(3))

    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        return x


def blocks(tiny, preset):
    model, x = Blocks().eval(), torch.randn(5, 32)
    dq.quantize(model, tiny.recipe(preset), progress=False)
    return model, x


@pytest.mark.parametrize("preset", ["int8", "w4a4-nvfp4"])
def test_F68_equal_blocks_share_one_graph(tiny, preset):
    """Compiled once for all of them, and once more when the number of tokens begins to vary."""
    model, x = blocks(tiny, preset)
    torch._dynamo.reset()
    counter = CompileCounter()
    for block in model.blocks:
        block.compile(backend=counter, fullgraph=True)
    with torch.no_grad():
        model(x)
        assert counter.frame_count == 1
        for tokens in (9, 11, 30):
            model(torch.randn(tokens, 32))
    assert counter.frame_count == 2


def test_F68_inductor(tiny):
    """The code generator that users get; it may reorder sums."""
    model, x = blocks(tiny, "int8")
    torch._dynamo.reset()
    with torch.no_grad():
        compiled = torch.compile(model.blocks[0], fullgraph=True)(x)
        torch.testing.assert_close(compiled, model.blocks[0](x), atol=1e-4, rtol=1e-3)


def test_F68_compiled_and_offloaded(tiny, tmp_path):
    """Both at once, in the order that diffusers documents: offload, then compile."""
    model, x = blocks(tiny, "w4a4-nvfp4")
    with torch.no_grad():
        expected = model(x)
        torch._dynamo.reset()
        apply_group_offloading(model, CPU, CPU, offload_type="leaf_level", offload_to_disk_path=str(tmp_path))
        for block in model.blocks:
            block.compile(backend="aot_eager")
        for _ in range(2):
            assert torch.equal(model(x), expected)


# --- casts: F71 -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("loaded", [False, True])
def test_F71_layerwise_casting_is_refused(tiny, made, tmp_path, loaded):
    """Storing what is left of a quantized model in FP8 would round its biases; nothing is touched."""
    model, inputs, expected, _ = made("int8")
    if loaded:
        model.save_pretrained(tmp_path)
        model = FluxTransformer2DModel.from_pretrained(tmp_path)
    dtypes = {n: p.dtype for n, p in model.named_parameters()}
    with pytest.raises(dq.DQError, match="is quantized by dq: layerwise casting would store its biases"):
        model.enable_layerwise_casting(torch.float8_e4m3fn, torch.float32)
    assert {n: p.dtype for n, p in model.named_parameters()} == dtypes and torch.equal(run(model, inputs), expected)
    layer = next(iter(quantized_linears(model).values()))
    for cast in (lambda: apply_layerwise_casting(layer, torch.float8_e5m2, torch.float32), layer.to):
        with pytest.raises(dq.DQError, match="a quantized linear cannot be cast to float8_e"):
            cast(torch.float8_e5m2) if cast == layer.to else cast()
    # what the message offers works: the other layers alone
    apply_layerwise_casting(model, torch.float8_e4m3fn, torch.float32, ("norm", "embed"), (dq.QuantizedLinear,))
    assert model.proj_out.weight.dtype == torch.float8_e4m3fn and layer.bias.dtype == torch.float32
    assert close(run(model, inputs), expected, 0.1)


def test_F71_layerwise_casting_of_16_bit_models_is_as_before(tiny, made):
    made("int8")  # dq has wrapped the class
    model = tiny.flux()
    model.enable_layerwise_casting(torch.float8_e4m3fn, torch.float32)
    assert model.transformer_blocks[0].attn.to_q.weight.dtype == torch.float8_e4m3fn


def test_projections_are_not_fused(tiny, made):
    """Afterwards diffusers would join weights that hold no data; before, what is saved would have names of its own."""
    model, inputs, expected, _ = made("int8")
    with pytest.raises(dq.DQError, match="FluxTransformer2DModel is quantized by dq: q, k and v cannot be fused"):
        model.fuse_qkv_projections()
    assert torch.equal(run(model, inputs), expected)
    plain = tiny.flux()
    plain.fuse_qkv_projections()  # the class is wrapped, a 16-bit model as before
    assert plain.transformer_blocks[0].attn.fused_projections
    with pytest.raises(dq.DQError, match=r"blocks.0.attn has fused projections.* unfuse_qkv_projections\(\) first"):
        dq.quantize(plain, tiny.recipe("int8"), progress=False)
    plain.unfuse_qkv_projections()
    dq.quantize(plain, tiny.recipe("int8"), progress=False)
    assert torch.equal(run(plain, inputs), expected)


# --- the rest of a pipeline -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("parts", [["transformer"], ["transformer", "vae"]])
def test_vae_slicing_and_tiling(tiny, parts):
    """Beside a quantized denoiser, and with the VAE's own linears quantized."""
    pipe = tiny.flux_pipeline()
    dq.quantize(pipe, tiny.recipe("int8").with_(min_features=8), components=parts, progress=False)
    prompts = tiny.PROMPTS[:2]
    whole = tiny.denoise(pipe, prompts, output_type="pt")
    assert len(whole) == 2 and whole.isfinite().all()
    pipe.vae.enable_slicing()
    # Convolutions of one image and of two may differ in the last bit, and then a code of an activation by one.
    assert close(tiny.denoise(pipe, prompts, output_type="pt"), whole, 0.01 if "vae" in parts else 1e-5)
    pipe.vae.enable_tiling()
    pipe.vae.tile_latent_min_size, pipe.vae.tile_sample_min_size = 16, 16
    tiled = tiny.denoise(pipe, prompts, output_type="pt")
    plain = tiny.flux_pipeline()
    plain.vae.enable_tiling()
    plain.vae.tile_latent_min_size, plain.vae.tile_sample_min_size = 16, 16
    assert tiled.shape == whole.shape and close(tiled, tiny.denoise(plain, prompts, output_type="pt"), 0.2)


@pytest.mark.parametrize("quantized", [False, True])
def test_controlnet_residuals(tiny, made, quantized):
    """Residuals of a ControlNet, itself in 16 bits or quantized, enter a quantized model as they enter the original."""
    model, inputs, alone, _ = made("w4a4-nvfp4")
    net = tiny.seeded(
        lambda: FluxControlNetModel(
            in_channels=16, num_layers=1, num_single_layers=1, attention_head_dim=32, num_attention_heads=2,
            joint_attention_dim=32, pooled_projection_dim=32, guidance_embeds=True, axes_dims_rope=[8, 12, 12],
        ), 1,
    )  # fmt: skip
    if quantized:
        dq.quantize(net, tiny.recipe("int8"), progress=False)
    with torch.no_grad():
        blocks, singles = net(controlnet_cond=torch.randn(1, 16, 16), conditioning_scale=0.5, **inputs)
    residuals = dict(controlnet_block_samples=blocks, controlnet_single_block_samples=singles)
    steered, reference = run(model, inputs | residuals), run(tiny.flux(), inputs | residuals)
    assert not close(steered, alone, 0.3) and close(steered, reference, 0.3)
    assert all(m.calls for m in quantized_linears(model).values())


def ip_adapter(width=64, text=32, image=24, blocks=2):
    """A FLUX IP-adapter's files: image projection to four tokens, keys and values of the double blocks."""
    g = torch.Generator().manual_seed(3)

    def draw(*shape):
        return torch.randn(*shape, generator=g) / shape[-1] ** 0.5

    projection = {"proj.weight": draw(4 * text, image), "proj.bias": draw(4 * text)}
    projection |= {"norm.weight": torch.ones(text), "norm.bias": torch.zeros(text)}
    adapter = {}
    for i in range(blocks):
        for part in ("to_k_ip", "to_v_ip"):
            adapter |= {f"{i}.{part}.weight": draw(width, text), f"{i}.{part}.bias": draw(width)}
    return {"image_proj": projection, "ip_adapter": adapter}


def test_ip_adapter(tiny, made):
    """Loaded into a quantized model through diffusers' own loader."""
    model, inputs, alone, _ = made("w4a4-nvfp4")
    source = tiny.flux()
    given = inputs | {"joint_attention_kwargs": {"ip_adapter_image_embeds": [torch.randn(1, 1, 24)]}}
    outputs = []
    for m in (model, source):
        m._load_ip_adapter_weights([ip_adapter()])
        outputs.append(run(m, copy.deepcopy(given)))
    assert not close(outputs[0], alone, 0.1) and close(*outputs, 0.3)
    model.unload_ip_adapter() if hasattr(model, "unload_ip_adapter") else None


# --- caches -----------------------------------------------------------------------------------------------------------


def steps(model, inputs, count=4):
    """Outputs of successive denoising steps that hardly differ, as a pipeline calls the model."""
    out = []
    with model.cache_context("cond"):
        for i in range(count):
            NOW[0] = 1000 - 100 * i
            now = inputs | {"timestep": torch.full((1,), 0.9 - 0.001 * i)}
            out.append(run(model, now))
    return torch.stack(out)


NOW = [0]  # the step that attention caches ask for: the first is always computed
ATTENTION = dict(
    spatial_attention_block_skip_range=2, spatial_attention_timestep_skip_range=(-1, 901),
    spatial_attention_block_identifiers=("transformer_blocks",), current_timestep_callback=lambda: NOW[0],
)  # fmt: skip
CACHES = {
    "pyramid": PyramidAttentionBroadcastConfig(**ATTENTION),
    "faster": FasterCacheConfig(**ATTENTION, attention_weight_callback=lambda _: 0.5, is_guidance_distilled=True),
    "first block": FirstBlockCacheConfig(threshold=0.2),
    "mag": MagCacheConfig(threshold=0.5, num_inference_steps=4, retention_ratio=0.25, mag_ratios=torch.ones(4)),
    "taylor": TaylorSeerCacheConfig(cache_interval=2, disable_cache_before_step=1, max_order=1),
}


@pytest.mark.parametrize("name", CACHES)
def test_caches(tiny, made, name):
    """Blocks are left out where the 16-bit model leaves them out, and the outputs are as close."""
    model, inputs, _, _ = made("int8")
    plain, source = steps(model, inputs), tiny.flux()
    late = model.single_transformer_blocks[-1].attn.to_q
    late.calls = 0
    counted = []
    source.single_transformer_blocks[-1].attn.to_q.register_forward_hook(lambda *_: counted.append(1))
    for m in (model, source):
        m.enable_cache(copy.deepcopy(CACHES[name]))
    cached, reference = steps(model, inputs), steps(source, inputs)
    assert late.calls == len(counted) < 4
    assert close(cached, reference, 0.05)
    model.disable_cache()
    assert torch.equal(steps(model, inputs), plain)


def test_a_cache_that_never_hits_changes_nothing(made):
    model, inputs, _, _ = made("int8")
    plain = steps(model, inputs)
    model.enable_cache(FirstBlockCacheConfig(threshold=-1.0))
    assert torch.equal(steps(model, inputs), plain)


def test_text_kv_cache(tiny):
    """Lossless: text keys and values are computed once per prompt, by quantized linears, and stay bit-equal."""
    config = dict(
        in_channels=16, out_channels=4, num_layers=4, attention_head_dim=32, num_attention_heads=2,
        joint_attention_dim=32, axes_dims_rope=(8, 12, 12), num_experts=4, moe_intermediate_dim=48,
        capacity_factors=2.0, dense_moe_strategy="leave_first_block_dense",
    )  # fmt: skip
    model = tiny.seeded(lambda: NucleusMoEImageTransformer2DModel(**config))
    dq.quantize(model, tiny.recipe("int8"), progress=False)
    inputs = dict(
        hidden_states=torch.randn(1, 16, 16), encoder_hidden_states=torch.randn(1, 7, 32), img_shapes=[(1, 4, 4)],
        encoder_hidden_states_mask=torch.ones(1, 7, dtype=torch.bool), return_dict=False,
    )  # fmt: skip
    plain = steps(model, inputs)
    once = {n: m for n, m in quantized_linears(model).items() if n.endswith("add_k_proj")}
    before = {n: m.calls for n, m in once.items()}
    model.enable_cache(TextKVCacheConfig())
    assert torch.equal(steps(model, inputs), plain)
    assert once and all(m.calls == before[n] + 1 for n, m in once.items())


def test_modules_that_hold_the_class_stay_linear(made):
    """Hooks, offload and casting of diffusers look for nn.Linear."""
    model, *_ = made("int8")
    assert all(isinstance(m, nn.Linear) for m in quantized_linears(model).values())
