"""Exports of diffusers models and pipelines without the tools that read them: names, layouts, refusals, reading."""

import json
import warnings
from functools import partial

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

import dq
from dq.linear import quantized_linears
from dq.recipe import Recipe, Rule
from dq.registry import DQError

QKV = [f"transformer_blocks.0.attn.to_{x}" for x in "qkv"]


def recipe(weights, activations=None, modulation=None, **more):
    target = {"weights": weights} | ({"activations": activations} if activations else {}) | more
    entry = {"name": "test", "description": "", "linear": target, "modulation": {"weights": modulation or weights}}
    return Recipe.from_dict(entry).with_(min_features=16)


def kept(plan, *patterns):
    """The plan with modulation linears, or those of the patterns, in 16 bits."""
    patterns = patterns or ("norm1.linear", "norm1_context.linear", "norm.linear")
    return plan.with_(rules=tuple(Rule(p, None, "for a test") for p in patterns))


@pytest.fixture
def made(tiny):
    def make(plan, dtype=torch.bfloat16, calibration=None):
        model = tiny.flux(dtype, num_layers=1, num_single_layers=1)
        dq.quantize(model, plan, calibration=calibration, progress=False)
        return model

    return make


@pytest.fixture
def records(tiny):
    return [tiny.flux_inputs(torch.bfloat16, seed=s) for s in (0, 1)]


def same_weights(a, b, exact=True):
    a, b = quantized_linears(a), quantized_linears(b)
    assert list(a) == list(b)
    for name in a:
        assert torch.equal(a[name].qweight, b[name].qweight), name
        x, y = (m.dequantized_weight(torch.float32) for m in (a[name], b[name]))
        assert torch.equal(x, y) if exact else torch.allclose(x, y, rtol=1e-5, atol=1e-6), name


def output(tiny, model):
    with torch.no_grad():
        return model(**tiny.flux_inputs(torch.bfloat16))[0]


SMOOTH = {"transforms": [{"name": "smooth"}]}
SVD = {"transforms": [{"name": "smooth"}, {"name": "lowrank", "rank": 8}]}
ROTATED = {"transforms": ["rotate"]}
EXACT = {
    "int8": ("comfyui", recipe("int8/channel", "int8/token")),
    "int8, one scale": ("comfyui", recipe("int8/tensor", "int8/token")),
    "convrot int8": ("comfyui", recipe("int8/channel", "int8/token", **ROTATED)),
    "convrot w4a4": ("comfyui", recipe("int4/channel", "int4/token", "int4/group64/bf16", **ROTATED)),
    "convrot w4a8": ("comfyui", recipe("int4/channel", "int8/token", "int8/channel", **ROTATED)),
    "fp8": ("comfyui", recipe("fp8_e4m3/tensor", "fp8_e4m3/token")),
    "nvfp4": ("comfyui", recipe("nvfp4", "nvfp4-token")),
    "nvfp4, swept": ("comfyui", recipe("nvfp4@sweep")),
    "mxfp8": ("comfyui", recipe("mxfp8", "mxfp8")),
    "zeros": ("comfyui", recipe("uint4/group64/bf16")),
    "bfl fp8": ("bfl", recipe("fp8_e4m3/channel", "fp8_e4m3/token")),
    "bfl nvfp4": ("bfl", kept(recipe("nvfp4", "nvfp4-token"))),
    "modelopt": ("modelopt", recipe("nvfp4", "nvfp4-token")),
    "modelopt, weights": ("modelopt", recipe("nvfp4@sweep")),
}  # fmt: skip


@pytest.mark.parametrize("case", EXACT)
def test_there_and_back(made, tiny, records, tmp_path, case):
    kind, plan = EXACT[case]
    model = made(plan)
    out = dq.export(model, tmp_path / "out", kind, calibration=records)
    assert json.loads((out / "config.json").read_text())["_class_name"] == "FluxTransformer2DModel"
    back = dq.load_exported(out)
    same_weights(model, back)
    if case not in ("fp8", "bfl fp8"):  # dynamic scales became the stored one; weight-only layers were not said
        assert torch.equal(output(tiny, model), output(tiny, back))
    again = dq.load_exported(dq.export(back, tmp_path / "again", kind, calibration=records))
    same_weights(model, again)


@pytest.mark.parametrize("kind", ["comfyui", "modelopt"])
def test_smoothing_goes_along(made, tiny, records, tmp_path, kind):
    """NVFP4 with a smoothing factor: pre_quant_scale is its reciprocal, input_scale that of the divided input."""
    plan = recipe("nvfp4", "nvfp4-token", **SMOOTH)
    model = made(plan, calibration=records)
    out = dq.export(model, tmp_path / "out", kind, calibration=records)
    same_weights(model, dq.load_exported(out), exact=False)
    tensors = {k: v for f in out.glob("*.safetensors") for k, v in load_file(f).items()}
    name = "double_blocks.0.img_attn.proj" if kind == "comfyui" else "transformer_blocks.0.attn.to_out.0"
    layer = quantized_linears(model)["transformer_blocks.0.attn.to_out.0"]
    assert torch.equal(tensors[f"{name}.pre_quant_scale"], 1 / layer.smooth_factor)
    seen = []
    layer.register_forward_pre_hook(lambda m, a: seen.append(a[0].float() / layer.smooth_factor))
    for record in records:
        model(**record)
    top = torch.cat([s.flatten() for s in seen]).abs().max()
    assert tensors[f"{name}.input_scale"].item() == pytest.approx(top.item() / 2688)


def test_nvfp4_svd(made, tiny, records, tmp_path):
    """y = NVFP4(x s) W^T + (x s) A^T B^T, as modelopt's SVDQuantLinear computes it."""
    plan = recipe("nvfp4", "nvfp4-token", "nvfp4", **SVD)
    model = made(plan, calibration=records)
    out = dq.export(model, tmp_path / "out", "modelopt", calibration=records)
    config = json.loads((out / "config.json").read_text())["quantization_config"]
    assert config["quant_algo"] == "MIXED_PRECISION"
    listed = config["quantized_layers"]
    assert listed[QKV[0]]["quant_algo"] == "NVFP4_SVD"
    assert listed["transformer_blocks.0.norm1.linear"]["quant_algo"] == "W4A16_NVFP4"
    tensors = {k: v for f in out.glob("*.safetensors") for k, v in load_file(f).items()}
    for name, layer in quantized_linears(model).items():
        if not layer.config.rank:
            continue
        own = {k: tensors[f"{name}.{k}"] for k in ("pre_quant_scale", "svdquant_lora_a", "svdquant_lora_b")}
        whole = layer._transformed_weight() + own["svdquant_lora_b"].float() @ own["svdquant_lora_a"].float()
        whole = whole * own["pre_quant_scale"]
        # The factor is rounded to BF16 once more: 2^-8 of every term of the branch.
        ours, branch = (
            layer.dequantized_weight(torch.float32),
            layer.lowrank_up.float().abs() @ layer.lowrank_down.float().abs(),
        )
        assert ((whole - ours).abs() <= 2.0**-8 * branch + 1e-6).all()
        back = dq.load_exported(out).get_submodule(name)
        assert back.config.rank == 8 and torch.equal(back.qweight, layer.qweight)
        assert torch.allclose(back.dequantized_weight(torch.float32), whole, rtol=1e-5, atol=1e-6)


def test_one_algorithm_is_said_once(made, records, tmp_path):
    model = made(recipe("nvfp4"))
    config = json.loads((dq.export(model, tmp_path / "a", "modelopt") / "config.json").read_text())
    quantization = config["quantization_config"]
    assert quantization["quant_algo"] == "W4A16_NVFP4" and quantization["config_groups"]["group_0"]["targets"] == [
        "Linear"
    ]
    assert "x_embedder" in quantization["ignore"] and "quantized_layers" not in quantization


def test_comfyui_file(made, tmp_path):
    """One file under the original names; the header and every matrix say the format."""
    model = made(recipe("int8/channel", "int8/token", **ROTATED))
    out = dq.export(model, tmp_path / "flux-int8", "comfyui")
    assert sorted(p.name for p in out.iterdir()) == ["config.json", "flux-int8.safetensors"]
    tensors = load_file(out / "flux-int8.safetensors")
    layers = quantized_linears(model)
    assert torch.equal(tensors["double_blocks.0.img_attn.qkv.weight"], torch.cat([layers[m].qweight for m in QKV]))
    scale = tensors["double_blocks.0.img_attn.qkv.weight_scale"]
    assert scale.shape == (192, 1) and torch.equal(scale, torch.cat([layers[m].weight_scale for m in QKV]))
    said = json.loads(tensors["double_blocks.0.img_attn.qkv.comfy_quant"].numpy().tobytes())
    assert said == {"format": "int8_tensorwise", "convrot": True, "convrot_groupsize": 64}
    modulation = json.loads(tensors["double_blocks.0.img_mod.lin.comfy_quant"].numpy().tobytes())
    assert modulation == {"format": "int8_tensorwise", "full_precision_matrix_mult": True}
    header = json.loads(safe_open(out / "flux-int8.safetensors", "pt").metadata()["_quantization_metadata"])
    assert header["format_version"] == "1.0" and header["layers"]["double_blocks.0.img_attn.qkv"] == said
    assert torch.equal(tensors["img_in.weight"], model.x_embedder.weight)
    half = dq.load_exported(out, torch.float16)
    assert half.x_embedder.weight.dtype == half.transformer_blocks[0].attn.to_q.bias.dtype == torch.float16
    halves = model.norm_out.linear.weight.chunk(2)
    assert torch.equal(tensors["final_layer.adaLN_modulation.1.weight"], torch.cat([halves[1], halves[0]]))


def test_names_that_are_not_known(tiny, tmp_path):
    """Another architecture keeps the names of diffusers, with a warning; FLUX has its own."""
    from diffusers import SanaTransformer2DModel

    build = partial(SanaTransformer2DModel, in_channels=4, out_channels=4, num_attention_heads=2, attention_head_dim=32,
                    num_layers=1, num_cross_attention_heads=2, cross_attention_head_dim=32, cross_attention_dim=64,
                    caption_channels=32, sample_size=8)  # fmt: skip
    model = tiny.seeded(build, dtype=torch.bfloat16)
    dq.quantize(model, recipe("int8/channel", "int8/token"), progress=False)
    with pytest.warns(UserWarning, match=r"of this SanaTransformer2DModel are not known: .* dq\.load reads it"):
        out = dq.export(model, tmp_path / "out", "comfyui")
    assert "transformer_blocks.0.attn1.to_q.comfy_quant" in load_file(out / "out.safetensors")
    same_weights(model, dq.load_exported(out))
    model = tiny.flux()
    dq.quantize(model, recipe("int8/channel"), progress=False)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        dq.export(model, tmp_path / "flux", "comfyui")


SYLVESTER = {"name": "rotate", "kind": "sylvester"}
REFUSED = {
    "FP8 per row": ("comfyui", recipe("fp8_e4m3/channel"), r"its FP8 has one scale per matrix, fp8_e4m3/tensor"),
    "FP8 without a scale": ("comfyui", recipe("fp8_e4m3/tensor", "fp8_e4m3/token"), "one stored scale there.*calibrat"),
    "INT4 unrotated": ("comfyui", recipe("int4/channel", "int4/token"), "INT4 per channel has one behind a rotation"),
    "Sylvester": ("comfyui", recipe("int8/channel", transforms=[SYLVESTER]), "only regular Hadamard"),
    "low rank": ("comfyui", recipe("nvfp4", transforms=["lowrank"]), "low-rank branch of rank 8"),
    "activations": ("comfyui", recipe("nvfp4", "fp8_e4m3/token"), "nvfp4 does not go with activations fp8_e4m3/token"),
    "BFL INT8": ("bfl", recipe("int8/channel"), "only fp8_e4m3/channel and nvfp4"),
    "BFL weights": ("bfl", recipe("nvfp4"), "NVFP4 always quantizes activations there"),
    "BFL without a scale": ("bfl", recipe("nvfp4", "nvfp4-token"), "have one stored scale there: give calibration="),
    "modelopt FP8": ("modelopt", recipe("fp8_e4m3/channel"), "only NVFP4 is written"),
    "a rotation": ("modelopt", recipe("nvfp4", transforms=["rotate"]), "goes through rotate"),
    "nunchaku's tiles": (
        "nunchaku-lite", recipe("int4/group64", "int4/group64/fp32", "int4/group64"), "64 x 64 is no multiple of 128",
    ),
    "nunchaku FP8": ("nunchaku-lite", recipe("fp8_e4m3/channel", "fp8_e4m3/token"), "only INT4 in groups of 64"),
    "nunchaku NVFP4 weights": ("nunchaku-lite", recipe("nvfp4"), "16-bit activations have no form there, only INT4"),
    "SVD weights": ("modelopt", recipe("nvfp4", transforms=["lowrank"]), "only beside NVFP4 activations"),
}  # fmt: skip


@pytest.mark.parametrize("case", REFUSED)
def test_refusals_name_the_layer_and_write_nothing(made, tmp_path, case):
    kind, plan, words = REFUSED[case]
    with pytest.raises(DQError, match=rf"cannot export to {kind}: \S*transformer_blocks\.0\.\S+ .*{words}"):
        dq.export(made(plan), tmp_path / "out", kind)
    assert not list(tmp_path.iterdir())


def test_rows_of_one_matrix_must_agree(made, tmp_path):
    base = recipe("int8/channel", "int8/token")
    mixed = base.with_(rules=(Rule("transformer_blocks.0.attn.to_k", recipe("fp8_e4m3/tensor").linear),))
    with pytest.raises(
        DQError, match=r"to_q .*to_k has another grid, and the file holds the two as one matrix, double_b"
    ):
        dq.export(made(mixed), tmp_path / "out", "comfyui", weight_only=True)
    plan = kept(base, "transformer_blocks.0.attn.to_k")
    with pytest.raises(DQError, match=r"to_k stays in 16 bits, and the file holds the two as one matrix"):
        dq.export(made(plan), tmp_path / "out", "comfyui")
    model = made(recipe("nvfp4"))
    model.transformer_blocks[0].attn.to_v.weight_global_scale *= 2
    with pytest.raises(DQError, match="to_v has another second-level scale: quantize them as one group"):
        dq.export(model, tmp_path / "out", "comfyui")


PRESETS = [
    ("fp8", "bfl"), ("int8", "comfyui"), ("w4a16", "comfyui"), ("w4a16", "nunchaku-lite"),
    ("w4a4-nvfp4", "comfyui"), ("w4a4-nvfp4", "nunchaku-lite"),
]  # fmt: skip


@pytest.mark.parametrize(("preset", "kind"), PRESETS)
def test_presets_as_they_are(tiny, tmp_path, preset, kind):
    """docs/exports.md says which recipe goes where; scales of INT4 modulation are rounded to BF16."""
    model = tiny.flux(torch.bfloat16, num_layers=1, num_single_layers=1, num_attention_heads=4)
    dq.quantize(model, tiny.recipe(preset), progress=False)
    back = quantized_linears(dq.load_exported(dq.export(model, tmp_path / "out", kind)))
    for name, layer in quantized_linears(model).items():
        assert torch.equal(layer.qweight, back[name].qweight)
        a, b = (x.dequantized_weight(torch.float32) for x in (layer, back[name]))
        assert torch.allclose(a, b, rtol=2.0**-8, atol=0)


def test_convolutions_have_no_form(tiny, tmp_path):
    from diffusers import UNet2DConditionModel

    build = partial(UNet2DConditionModel, block_out_channels=(32, 64), layers_per_block=1, cross_attention_dim=32,
                    down_block_types=("CrossAttnDownBlock2D", "DownBlock2D"), sample_size=8, attention_head_dim=8,
                    up_block_types=("UpBlock2D", "CrossAttnUpBlock2D"), norm_num_groups=8)  # fmt: skip
    model = tiny.seeded(build, dtype=torch.bfloat16)
    dq.quantize(model, tiny.recipe("int8"), progress=False)
    with pytest.raises(DQError, match=r"it is a convolution, and quantized ones have no form there"):
        dq.export(model, tmp_path / "out", "comfyui")


def test_linears_of_one_input_share_their_one_scale(made):
    """Per-tensor FP8: q, k and v are one matrix elsewhere, so they have one scale."""
    layers = quantized_linears(made(recipe("fp8_e4m3/tensor"), torch.float32))
    scales = {layers[m].weight_scale.item() for m in QKV}
    assert len(scales) == 1
    assert layers[QKV[0]].weight_scale.item() != layers["transformer_blocks.0.attn.to_out.0"].weight_scale.item()


def test_what_each_library_has(made, tiny, tmp_path):
    model = made(recipe("int8/channel"))
    with pytest.raises(DQError, match=r"compressed-tensors describes no diffusers model; for Flux.*bfl, comfyui"):
        dq.export(model, tmp_path / "out")
    with pytest.raises(DQError, match=r"comfyui describes no transformers model; for Llama.*compressed-tensors"):
        llm = tiny.llama()
        dq.quantize(llm, recipe("int8/channel"), progress=False)
        dq.export(llm, tmp_path / "out", "comfyui")
    from peft import LoraConfig

    model.add_adapter(LoraConfig(r=2, target_modules=["to_q"]))
    with pytest.raises(DQError, match=r"has adapters .*unload or fuse"):
        dq.export(model, tmp_path / "out", "comfyui")


def test_a_failed_export_leaves_nothing(made, tmp_path, monkeypatch):
    """Neither a half-written folder nor the one it was written in; a folder that was there keeps what it had."""
    from dq.pipelines import exported

    model = made(recipe("int8/channel"))
    (tmp_path / "kept").mkdir()
    (tmp_path / "kept" / "notes.txt").write_text("mine")

    def full(*args, **kwargs):
        raise OSError("No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(exported, "write_config", full)
        for name in ("new", "kept"):
            with pytest.raises(DQError, match=rf"cannot export to \S*{name}: No space left"):
                dq.export(model, tmp_path / name, "comfyui")
    assert [p.name for p in tmp_path.rglob("*")] == ["kept", "notes.txt"]
    dq.export(model, tmp_path / "kept", "comfyui")
    assert sorted(p.name for p in (tmp_path / "kept").iterdir()) == ["config.json", "kept.safetensors", "notes.txt"]


def test_pipelines(tiny, tmp_path):
    """modelopt: the whole pipeline, as it lays it out itself; ComfyUI: the file of what is quantized."""
    pipe = tiny.flux_pipeline(torch.bfloat16)
    with pytest.raises(DQError, match="nothing in FluxPipeline is quantized"):
        dq.export(pipe, tmp_path / "out", "comfyui")
    dq.quantize(pipe, recipe("nvfp4", "nvfp4-token"), progress=False)
    prompts = dq.Prompts(tiny.PROMPTS[:2], steps=2, **{k: v for k, v in tiny.LATENTS.items() if "steps" not in k})
    out = dq.export(pipe, tmp_path / "out", "modelopt", calibration=prompts)
    index = json.loads((out / "model_index.json").read_text())
    assert index["_class_name"] == "FluxPipeline" and (out / "vae" / "config.json").is_file()
    assert (out / "tokenizer").is_dir() and (out / "transformer" / "diffusion_pytorch_model.safetensors").is_file()
    same_weights(pipe.transformer, dq.load_exported(out / "transformer"))
    with pytest.raises(DQError, match="is a whole pipeline: name the folder of the component"):
        dq.load_exported(out)
    dq.export(pipe, tmp_path / "comfy", "comfyui", components="transformer")
    assert sorted(p.name for p in (tmp_path / "comfy").iterdir()) == ["comfy.safetensors", "config.json"]
    with pytest.raises(DQError, match="has no quantized component 'vae'"):
        dq.export(pipe, tmp_path / "b", "comfyui", components=["vae"])


def test_several_components(tiny, tmp_path):
    pipe = tiny.flux_pipeline(torch.bfloat16)
    dq.quantize(pipe, recipe("int8/channel"), components=["transformer", "text_encoder_2"], progress=False)
    with pytest.raises(DQError, match="comfyui describes no transformers model; for T5EncoderModel"):
        dq.export(pipe, tmp_path / "out", "comfyui")
    out = dq.export(pipe, tmp_path / "out", "comfyui", components=["transformer"])
    assert (out / "out.safetensors").is_file()


def test_files_that_cannot_be_read(made, tmp_path):
    model = made(recipe("int8/channel"))
    out = dq.export(model, tmp_path / "out", "comfyui")
    path = out / "out.safetensors"
    good, tensors = path.read_bytes(), load_file(path)
    alone = tmp_path / "alone" / "file.safetensors"
    alone.parent.mkdir()
    alone.write_bytes(good)
    with pytest.raises(DQError, match=r"has no config.json beside it: name the model's own with config="):
        dq.load_exported(alone)
    same_weights(model, dq.load_exported(alone, config=out))

    def broken(words, **changes):
        save_file({k: t for k, t in (tensors | changes).items() if t is not None}, path)
        with pytest.raises(DQError, match=words):
            dq.load_exported(out)

    name = "double_blocks.0.img_attn.qkv"
    said = torch.tensor(list(b'{"format": "int9"}'), dtype=torch.uint8)
    broken("qkv: ComfyUI's format 'int9' is not read, only", **{f"{name}.comfy_quant": said})
    broken("lacks the tensors that belong to double_blocks.0.img_attn.qkv.weight", **{f"{name}.comfy_quant": None})
    broken("it lacks x_embedder.bias", **{"img_in.bias": None})
    broken("it holds extra.weight, which FluxTransformer2DModel has not", **{"extra.weight": torch.zeros(2)})
    few = {f"{name}.weight": torch.zeros(3, 64, dtype=torch.int8), f"{name}.weight_scale": torch.ones(3, 1)}
    broken("qkv: it has 3 rows, and 64 \\+ 64 \\+ 64 are expected", **few)
    broken("NaN or Inf", **{f"{name}.weight_scale": torch.full((192, 1), float("nan"))})
    path.write_bytes(good[:-100])
    with pytest.raises(DQError, match=r"out.safetensors cannot be read"):
        dq.load_exported(out)


def test_command(tiny, tmp_path, capsys):
    from dq import cli

    pipe = tiny.flux_pipeline(torch.bfloat16)
    dq.quantize(pipe, kept(recipe("nvfp4", "nvfp4-token")), progress=False)
    pipe.save_pretrained(tmp_path / "native")
    (tmp_path / "prompts.txt").write_text("a cat\n")
    base = ["export", str(tmp_path / "native"), str(tmp_path / "out"), "--device", "cpu", "--format", "bfl"]
    assert cli.main(base) == 2
    assert "give calibration=" in capsys.readouterr().err
    prompts = ["--prompts", str(tmp_path / "prompts.txt"), "--steps", "2"]
    assert cli.main([*base, *prompts, "--text", "a"]) == 2
    assert "give one of them" in capsys.readouterr().err
    assert cli.main([*base, *prompts]) == 0
    assert "bfl: " in capsys.readouterr().out
    same_weights(pipe.transformer, dq.load_exported(tmp_path / "out"))
