"""Failures of whole models that users of other tools reported: names, structure, moving, copying, compiling."""

import copy
import io

import pytest
import torch
from torch import nn

import dq
from dq.linear import quantized_linears
from dq.recipe import Rule, presets

PRESETS = presets(decoders=False)


@pytest.mark.parametrize("preset", PRESETS)
def test_F11_a_sample_does_not_depend_on_its_batch(tiny, quantized_flux, preset):
    """Seen elsewhere: batches above 1 were refused, or a sample changed with its companions."""
    model = quantized_flux(preset).model
    with torch.no_grad():
        alone = model(**tiny.flux_inputs())[0]
        for batch in (2, 4):
            together = model(**tiny.flux_inputs(batch=batch))[0]
            # 4-bit grids turn a last-bit difference of a GEMM into a whole step now and then: compare in the mean.
            assert (together[:1] - alone).norm() < 0.01 * alone.norm()


class MadeUpAttention(nn.Module):
    """An attention that no library has: other names, a fused projection."""

    def __init__(self, width: int):
        super().__init__()
        self.fused, self.leave = nn.Linear(width, 3 * width), nn.Linear(width, width)

    def forward(self, x):
        q, k, v = self.fused(x).chunk(3, -1)
        return x + self.leave(nn.functional.scaled_dot_product_attention(q, k, v))


class MadeUpModel(nn.Module):
    """Repeated blocks that dq has no data about."""

    def __init__(self, width: int = 32):
        super().__init__()
        self.tower = nn.ModuleList(MadeUpAttention(width) for _ in range(3))
        self.head = nn.Linear(width, width)

    def forward(self, x):
        for block in self.tower:
            x = block(x)
        return self.head(x)


@pytest.mark.parametrize("preset", PRESETS)
def test_F17_unknown_classes_take_the_generic_path(tiny, preset):
    """Seen elsewhere: KeyError for an attention class that a library update had renamed."""
    model, x, recipe = MadeUpModel().eval(), torch.randn(2, 9, 32), tiny.recipe(preset)
    y = model(x)
    report = dq.quantize(model, recipe, calibration=[dict(x=x)] if recipe.needs_calibration else None, progress=False)
    assert len(report.layers) == 6  # the head stands outside the repeated blocks and stays
    assert next(r for r in report.plan.rows if r.members == ("head",)).reason == "outside the repeated blocks"
    assert "MadeUpModel is no known family" in str(report.plan) and "tower (3)" in str(report.plan)
    assert {r.block for r in report.plan.rows} == {"tower.0", "tower.1", "tower.2", ""}
    assert 0 < (model(x) - y).norm() < 0.5 * y.norm()


@pytest.mark.parametrize("preset", PRESETS)
def test_F26_excluded_layers_keep_their_bits(tiny, preset):
    """Seen elsewhere: layers excluded after calibration had already been changed by smoothing."""
    source = tiny.flux()
    model, recipe = copy.deepcopy(source), tiny.recipe(preset)
    records = [tiny.flux_inputs()] if recipe.needs_calibration else None
    skip = ["to_q", "transformer_blocks.0.ff.net.2", "single_transformer_blocks.1.*"]
    report = dq.quantize(model, recipe, calibration=records, skip=skip, progress=False)
    assert {r.reason for r in report.plan.rows if "transformer_blocks.0.attn.to_q" in r.members} == {
        "skipped by the caller"
    }
    done, state = quantized_linears(model), model.state_dict()
    assert not any("to_q" in n or n.startswith("single_transformer_blocks.1.") for n in done)
    for name, value in source.state_dict().items():
        if name.rpartition(".")[0] not in done:
            assert torch.equal(state[name], value), name


def architectures():
    """name -> (builder of a small model, what must stay in 16 bits)."""
    import diffusers as d

    small = dict(num_layers=1, attention_head_dim=16, num_attention_heads=2)
    return {
        "sd3": (lambda: d.SD3Transformer2DModel(**small, caption_projection_dim=32, joint_attention_dim=32),
                {"context_embedder", "norm_out.linear", "proj_out", "time_text_embed.timestep_embedder.linear_1"}),
        "pixart": (lambda: d.PixArtTransformer2DModel(**small, cross_attention_dim=32, caption_channels=32,
                                                      sample_size=8),
                   {"adaln_single.linear", "adaln_single.emb.timestep_embedder.linear_2", "proj_out",
                    "caption_projection.linear_1", "transformer_blocks.0.attn2.to_k"}),
        "qwen": (lambda: d.QwenImageTransformer2DModel(**small, in_channels=16, joint_attention_dim=32,
                                                       axes_dims_rope=(4, 6, 6)),
                 {"img_in", "txt_in", "norm_out.linear", "proj_out", "time_text_embed.timestep_embedder.linear_1"}),
        "dit": (lambda: d.DiTTransformer2DModel(**small, sample_size=8, num_embeds_ada_norm=10),
                {"proj_out_1", "proj_out_2", "transformer_blocks.0.norm1.emb.timestep_embedder.linear_1"}),
    }  # fmt: skip


@pytest.mark.parametrize("name", ["flux", "sd3", "pixart", "qwen", "dit"])
def test_F30_sensitive_layers_stay_16_bit_by_default(tiny, name):
    """Seen elsewhere: FP8 on adaLN and embedders moved images by LPIPS 0.74."""
    if name == "flux":
        model, wanted = tiny.flux(), {"x_embedder", "context_embedder", "norm_out.linear", "proj_out"}
    else:
        build, wanted = architectures()[name]
        with torch.device("meta"):
            model = build()
    for preset in PRESETS:
        plan = dq.plan(model, tiny.recipe(preset))
        kept = {m: r.reason for r in plan.rows if r.target is None for m in r.members}
        assert wanted <= set(kept) and all(kept.values())
        for row in plan.quantized:
            assert not any("embed" in m for m in row.members), row.members
            if any("norm" in m or "_mod." in m for m in row.members):  # modulation: W8A16 or W4A16 in every recipe
                assert row.target == tiny.recipe(preset).modulation and row.target.activations is None


@pytest.mark.parametrize("preset", PRESETS)
def test_F31_quantized_is_not_the_original(quantized_flux, preset):
    """Seen elsewhere: a component's config was dropped and the output was the BF16 one, byte for byte."""
    q = quantized_flux(preset)
    assert not torch.equal(q.output, q.reference)
    assert (q.output - q.reference).norm() < 0.5 * q.reference.norm()
    assert len(quantized_linears(q.model)) == len(q.report.layers) == (40 if dq.Recipe.load(preset).modulation else 34)


@pytest.mark.parametrize("preset", PRESETS)
def test_F31_nothing_to_quantize_is_an_error(tiny, preset):
    """The same at its root: if no layer qualifies, say so and say why."""
    with pytest.raises(
        dq.DQError, match=r"nothing to quantize in FluxTransformer2DModel: of 50 linears, .* \(too small"
    ):
        dq.quantize(tiny.flux(), dq.Recipe.load(preset).with_(min_features=4096))
    with pytest.raises(dq.DQError, match="skipped by the caller"):
        dq.quantize(tiny.flux(), tiny.recipe(preset), skip=["*"])
    with pytest.raises(dq.DQError, match=r"it holds no nn\.Linear$"):
        dq.quantize(nn.Sequential(nn.LayerNorm(3)), preset)
    with pytest.raises(dq.DQError, match=r"too small to quantize|1 convolutions stay in 16 bits"):
        dq.quantize(nn.Sequential(nn.Conv2d(3, 3, 1)), preset)


def test_F32_words_that_match_nothing_are_errors(tiny):
    """Seen elsewhere: a misspelt component or skip pattern was ignored in silence."""
    model, recipe = tiny.flux(), tiny.recipe("int8")
    for skip, near in ((["to_qq"], "to_q"), (["transformer_block.0"], ""), (["norm1.linaer"], "norm1")):
        with pytest.raises(dq.DQError, match=f"skip pattern '{skip[0]}' matches no linear.*{near}"):
            dq.quantize(model, recipe, skip=skip)
    with pytest.raises(dq.DQError, match=r"unknown recipe 'int-8'; did you mean 'int8'"):
        dq.plan(model, "int-8")
    with pytest.raises(dq.DQError, match="unknown activations mode 'faitful'; did you mean 'faithful'"):
        dq.quantize(model, recipe, activations="faitful")
    rule = Rule("to_kk", recipe.modulation)
    assert "recipe rule 'to_kk' matches no linear here" in str(dq.plan(model, recipe.with_(rules=(rule,))))
    assert not quantized_linears(model)


@pytest.mark.parametrize("preset", PRESETS)
def test_F47_moving_between_devices(quantized_flux, preset):
    """Seen elsewhere: `.to()` after quantization failed or left parts behind."""
    q = quantized_flux(preset)
    model = copy.deepcopy(q.model).to("cpu")
    with torch.no_grad():
        assert torch.equal(model(**q.inputs)[0], q.output)
    state = {k: v.clone() for k, v in model.state_dict().items()}
    model.to("meta")
    assert {t.device.type for t in (*model.parameters(), *model.buffers())} == {"meta"}
    assert {m.weight.device.type for m in quantized_linears(model).values()} == {"meta"}
    model.to_empty(device="cpu").load_state_dict(state)
    with torch.no_grad():
        assert torch.equal(model(**q.inputs)[0], q.output)


def test_F47_F71_moving_and_casting_a_pipeline(tiny, tmp_path):
    """The same for a pipeline, made here or loaded: `.to(device)` changes no bit; a cast reaches every component, keeps
    codes and scales as they are, and the images close. (diffusers refused the denoiser after casting the rest.)"""
    from diffusers import FluxPipeline

    pipe, parts = tiny.flux_pipeline(), ["transformer", "text_encoder_2"]
    dq.quantize(pipe, tiny.recipe("w4a4-nvfp4"), components=parts, progress=False)
    latents = tiny.denoise(pipe)
    pipe.save_pretrained(tmp_path)
    loaded = FluxPipeline.from_pretrained(tmp_path)
    loaded.set_progress_bar_config(disable=True)
    for p in (pipe, loaded):
        assert torch.equal(tiny.denoise(p.to("cpu")), latents)
        state = {k: v.clone() for k, v in p.transformer.named_buffers()}
        for cast, dtype in (
            (lambda m: m.half(), torch.float16),
            (lambda m: m.to("cpu", torch.bfloat16), torch.bfloat16),
        ):
            model = cast(copy.deepcopy(p.transformer))
            assert model.is_quantized and {x.dtype for x in model.parameters()} == {dtype}
            assert {m.weight.dtype for m in quantized_linears(model).values()} == {dtype}
            for name, layer in quantized_linears(model).items():
                for key, value in layer.named_buffers():
                    assert torch.equal(value.view(torch.uint8), state[f"{name}.{key}"].view(torch.uint8))
        assert torch.equal(tiny.denoise(p), latents)
        for dtype in (torch.bfloat16, torch.float16, torch.float32):
            p.to(dtype)
            assert {getattr(p, n).dtype for n in ("transformer", "text_encoder", "text_encoder_2", "vae")} == {dtype}
            assert (tiny.denoise(p).float() - latents).norm() < 0.15 * latents.norm()
        assert p.text_encoder_2.half().dtype == torch.float16  # which transformers refused


@pytest.mark.parametrize("preset", PRESETS)
def test_F48_accelerate_offload_hooks(quantized_flux, preset):
    """Seen elsewhere: 8-bit blocks could not be offloaded. Model offload and per-module offload, with and without
    buffers (the payload is in buffers)."""
    accelerate = pytest.importorskip("accelerate")
    q = quantized_flux(preset)
    for offload_buffers in (False, True):
        model = copy.deepcopy(q.model)
        accelerate.cpu_offload(model, execution_device=torch.device("cpu"), offload_buffers=offload_buffers)
        assert {t.device.type for t in model.buffers()} == {"meta" if offload_buffers else "cpu"}
        with torch.no_grad():
            assert torch.equal(model(**q.inputs)[0], q.output)
    model, hook = accelerate.cpu_offload_with_hook(copy.deepcopy(q.model), execution_device="cpu")
    with torch.no_grad():
        assert torch.equal(model(**q.inputs)[0], q.output)
    hook.offload()


def test_F48_quantizing_offloaded_weights_is_refused(tiny):
    """The other order cannot work: the weights are not there. Say so before anything is touched."""
    accelerate = pytest.importorskip("accelerate")
    model = tiny.flux()
    accelerate.cpu_offload(model, execution_device=torch.device("cpu"))
    with pytest.raises(dq.DQError, match=r"weight holds no data.*quantize before offloading"):
        dq.quantize(model, tiny.recipe("int8"))


@pytest.mark.parametrize("preset", PRESETS)
def test_F51_deepcopy_and_pickle(quantized_flux, preset):
    """Seen elsewhere: `copy.deepcopy` of a quantized model failed."""
    q, file = quantized_flux(preset), io.BytesIO()
    torch.save(q.model, file)
    file.seek(0)
    for copied in (copy.deepcopy(q.model), torch.load(file, weights_only=False)):
        with torch.no_grad():
            assert torch.equal(copied(**q.inputs)[0], q.output)
        first, own = next(iter(quantized_linears(copied).values())), next(iter(quantized_linears(q.model).values()))
        first.qweight.zero_()
        assert own.qweight.any()  # a copy shares nothing


@pytest.mark.parametrize("preset", PRESETS)
def test_F53_plain_tensors_through_safetensors(tiny, quantized_flux, tmp_path, preset):
    """Seen elsewhere: tensor subclasses that safetensors could not write."""
    from safetensors.torch import load_file, save_file

    q = quantized_flux(preset)
    state = q.model.state_dict()
    assert {type(v) for v in state.values()} == {torch.Tensor}
    assert all(type(p) is nn.Parameter for p in q.model.parameters())
    assert not any(k.endswith(".weight") and k.rpartition(".")[0] in quantized_linears(q.model) for k in state)
    save_file(state, tmp_path / "x.safetensors")  # refuses shared and non-contiguous memory
    model = copy.deepcopy(q.model)
    for value in (*model.parameters(), *model.buffers()):
        value.data = torch.zeros_like(value)
    assert not any(model.load_state_dict(load_file(tmp_path / "x.safetensors")))
    with torch.no_grad():
        torch.testing.assert_close(model(**q.inputs)[0], q.output, atol=1e-4, rtol=1e-4)  # alignment may differ


@pytest.mark.parametrize("preset", PRESETS)
def test_F61_quantizing_twice_is_refused(tiny, quantized_flux, preset):
    """Seen elsewhere: quantizing a quantized encoder gave a late shape error, or silence."""
    model = quantized_flux(preset).model
    for other in PRESETS[:3]:
        with pytest.raises(dq.DQError, match=r"quantized already; dq\.dequantize\(\) it"):
            dq.quantize(model, tiny.recipe(other), calibration=[tiny.flux_inputs()])
    with pytest.raises(dq.DQError, match="quantized already"):
        dq.plan(model, tiny.recipe(preset))


def mixed_recipe(tiny, model):
    """Every target of every preset, on linears of one model in turn: one compilation covers them all."""
    names = [m for r in dq.plan(model, tiny.recipe("int8")).quantized for m in r.members]
    targets = [t for p in PRESETS for t in (dq.Recipe.load(p).linear, dq.Recipe.load(p).modulation) if t is not None]
    assert len(set(targets)) <= len(names)
    rules = tuple(Rule(n, targets[i % len(targets)]) for i, n in enumerate(names))
    return tiny.recipe("int8", rules=rules)


def test_F68_compiles_without_a_graph_break(tiny):
    """Seen elsewhere: torch.compile broke on tensor subclasses."""
    model, inputs = tiny.flux(num_layers=1, num_single_layers=2), tiny.flux_inputs()
    dq.quantize(model, mixed_recipe(tiny, model), calibration=[inputs], progress=False)
    with torch.no_grad():
        eager = model(**inputs)[0]
        torch._dynamo.reset()
        compiled = torch.compile(model, backend="aot_eager", fullgraph=True)(**inputs)[0]
    assert torch.equal(compiled, eager)


class Sequenced(nn.Module):
    """Linears inside nn.Sequential, as `img_mod.1` of Qwen-Image and `ff.net.2` are."""

    def __init__(self):
        super().__init__()
        self.img_mod = nn.Sequential(nn.SiLU(), nn.Linear(32, 32))
        self.mlp = nn.Sequential(nn.Linear(32, 32), nn.GELU(), nn.Sequential(nn.Linear(32, 32)))

    def forward(self, x):
        return self.mlp(self.img_mod(x))


@pytest.mark.parametrize(
    "pattern, left",
    [
        ("img_mod", {"mlp.0", "mlp.2.0"}),
        ("img_mod.1", {"mlp.0", "mlp.2.0"}),
        ("img_mod.*", {"mlp.0", "mlp.2.0"}),
        ("mlp", {"img_mod.1"}),
        ("mlp.2", {"img_mod.1", "mlp.0"}),
        ("mlp.2.0", {"img_mod.1", "mlp.0"}),
        ("*.0", {"img_mod.1"}),
    ],
)
def test_F78_patterns_reach_into_sequential(tiny, pattern, left):
    """Seen elsewhere: an exclude list said `img_mod`, the layer is `img_mod.1`: missed, and shapes clashed on load."""
    model = Sequenced()
    dq.quantize(model, tiny.recipe("int8"), skip=[pattern], progress=False)
    assert set(quantized_linears(model)) == left
    for wrong in ("mod", "od.1", "mlp.1", "2.1"):
        with pytest.raises(dq.DQError, match="matches no linear"):
            dq.plan(Sequenced(), tiny.recipe("int8"), skip=[wrong])
