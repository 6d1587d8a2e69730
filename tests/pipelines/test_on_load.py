"""Quantizing while loading: the same bits as loading first, in both libraries and both forms of a pipeline's config."""

import json
import shutil

import pytest
import torch
from diffusers import DiffusionPipeline, FluxPipeline, FluxTransformer2DModel, LTXVideoTransformer3DModel
from diffusers.quantizers import PipelineQuantizationConfig
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, LlamaForCausalLM, T5EncoderModel

import dq
from dq.linear import quantized_linears
from dq.recipe import presets

DATA_FREE = [p for p in presets(decoders=False) if not dq.Recipe.load(p).needs_calibration]
IDS = torch.tensor([[5, 9, 77, 3, 21, 4], [1, 2, 3, 4, 5, 6]])
CLASSES = {"flux": FluxTransformer2DModel, "llama": LlamaForCausalLM, "t5": T5EncoderModel}


def same_state(a, b):
    assert a.keys() == b.keys()
    for name, value in a.items():
        assert value.dtype == b[name].dtype and torch.equal(value.view(torch.uint8), b[name].view(torch.uint8)), name


@pytest.fixture(scope="module")
def sources(tiny, tmp_path_factory):
    """kind -> (folder of a sharded 16-bit model, arguments of a call)."""
    made = {}
    for kind in CLASSES:
        folder = tmp_path_factory.mktemp(kind)
        getattr(tiny, kind)(torch.bfloat16).save_pretrained(folder, max_shard_size="20KB")
        assert len(tiny.weight_files(folder)) > 3
        made[kind] = folder, tiny.flux_inputs(torch.bfloat16) if kind == "flux" else dict(input_ids=IDS)
    return made


@pytest.fixture(scope="module")
def pipe_folder(tiny, tmp_path_factory):
    folder = tmp_path_factory.mktemp("pipe")
    tiny.flux_pipeline().save_pretrained(folder)
    return folder


def config(tiny, preset, **kwargs):
    return dq.DQConfig(tiny.recipe(preset), **kwargs)


CASES = [("flux", p) for p in DATA_FREE] + [(kind, p) for kind in ("llama", "t5") for p in ("int8", "w4a4-nvfp4")]


@pytest.mark.parametrize("kind, preset", CASES)
def test_the_bits_of_loading_first(tiny, sources, tmp_path, kind, preset):
    """Also after saving in shards and loading that; the artifact names recipe and source."""
    folder, call = sources[kind]
    kwargs = dict(dtype=torch.bfloat16)
    model = CLASSES[kind].from_pretrained(folder, quantization_config=config(tiny, preset), **kwargs)
    reference = CLASSES[kind].from_pretrained(folder, **kwargs)
    report = dq.quantize(reference, tiny.recipe(preset), progress=False)
    same_state(model.state_dict(), reference.state_dict())
    assert [x.sqnr_db for x in dq.layer_info(model)] == [x.sqnr_db for x in report.layers]
    assert model.dq_artifact["source"] == str(folder) and model.dq_artifact["recipe"]["name"] == preset
    assert not model.training and not any("_is_hf_initialized" in vars(m) for m in quantized_linears(model).values())
    model.save_pretrained(tmp_path, max_shard_size="15KB")
    assert len(tiny.weight_files(tmp_path)) > 1
    again = CLASSES[kind].from_pretrained(tmp_path, **kwargs)
    same_state(again.state_dict(), reference.state_dict())
    with torch.no_grad():
        expected = reference(**call)[0]
        assert torch.equal(model(**call)[0], expected) and torch.equal(again(**call)[0], expected)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, None])
@pytest.mark.parametrize("kind", CLASSES)
def test_dtypes(tiny, sources, kind, dtype):
    """In another dtype than the files', modules that a library keeps in float32 included (T5's wo in FP16)."""
    folder, _ = sources[kind]
    model = CLASSES[kind].from_pretrained(folder, dtype=dtype, quantization_config=config(tiny, "int8"))
    reference = CLASSES[kind].from_pretrained(folder, dtype=dtype)
    dq.quantize(reference, tiny.recipe("int8"), progress=False)
    same_state(model.state_dict(), reference.state_dict())
    assert {n: m.weight.dtype for n, m in quantized_linears(model).items()} == {
        n: m.weight.dtype for n, m in quantized_linears(reference).items()
    }


@pytest.mark.parametrize("form", ["mapping", "backend"])
def test_pipelines(tiny, pipe_folder, tmp_path, form):
    recipe, parts = tiny.recipe("w4a4-nvfp4"), ["transformer", "text_encoder_2"]
    if form == "mapping":
        asked = PipelineQuantizationConfig(quant_mapping=dict.fromkeys(parts, dq.DQConfig(recipe)))
    else:
        asked = PipelineQuantizationConfig(
            quant_backend="dq", quant_kwargs={"recipe": recipe.to_dict(), "skip": ["wo"]}, components_to_quantize=parts
        )
    if form == "backend":
        with pytest.raises(dq.DQError, match="skip pattern 'wo' matches no linear"):
            FluxPipeline.from_pretrained(pipe_folder, quantization_config=asked)
        asked.quant_kwargs["skip"] = []
    pipe = FluxPipeline.from_pretrained(pipe_folder, quantization_config=asked)
    pipe.set_progress_bar_config(disable=True)
    reference = tiny.flux_pipeline()
    dq.quantize(reference, recipe, components=parts, progress=False)
    expected = tiny.denoise(reference)
    assert not quantized_linears(pipe.text_encoder)
    assert torch.equal(tiny.denoise(pipe), expected)
    pipe.save_pretrained(tmp_path, max_shard_size="30KB")
    again = DiffusionPipeline.from_pretrained(tmp_path)
    again.set_progress_bar_config(disable=True)
    assert torch.equal(tiny.denoise(again), expected)


def test_words_of_a_config(tiny, sources):
    """skip and activations mean what they mean in `dq.quantize`; a dict does too; a config is JSON-clean."""
    folder, _ = sources["flux"]
    asked = config(tiny, "w4a4-nvfp4", skip=["to_q", "ff"], activations="native")
    for given in (asked, json.loads(asked.to_json_string()), asked.to_dict()):
        model = FluxTransformer2DModel.from_pretrained(folder, quantization_config=given)
        names = quantized_linears(model)
        assert names and not any("to_q" in n or ".ff." in n for n in names)
        assert {m.activations_mode for m in names.values()} == {"native"}
    assert "w4a4-nvfp4" in repr(asked) and "on load" in repr(asked)
    model = AutoModelForCausalLM.from_pretrained(
        sources["llama"][0], quantization_config=asked.to_dict() | {"skip": []}
    )
    assert len(quantized_linears(model)) == 14


@pytest.mark.parametrize(
    "kwargs, message",
    [
        (
            dict(recipe="int8-smooth"),
            r"recipe 'int8-smooth' needs calibration.*dq\.quantize\(model, 'int8-smooth', cali",
        ),
        (dict(recipe="w4a4-auto"), "needs calibration, which cannot be done while loading"),
        (dict(recipe="w4a4-int4-quarot"), "rewrites the whole model, which cannot be done while loading"),
        (dict(recipe="int9"), "unknown recipe 'int9'; did you mean"),
        (dict(), r"DQConfig needs a recipe, e\.g\. DQConfig\('int8'\)"),
        (dict(recipe="int8", skp=[]), "DQConfig takes no 'skp'.*skip"),
        (dict(recipe="int8", skip="to_q"), "skip takes a list of patterns; got 'to_q'"),
        (dict(recipe="int8", skip=[3]), "a skip pattern is text; got 3"),
        (dict(recipe="int8", activations="fast"), "unknown activations 'fast'"),
        (dict(recipe="int8", fp8_source="ignore"), "unknown fp8_source 'ignore'"),
    ],
)
def test_bad_words_are_refused_before_anything_is_read(kwargs, message):
    with pytest.raises(dq.DQError, match=message):
        dq.DQConfig(**kwargs)


@pytest.mark.parametrize("kind", CLASSES)
def test_plans_are_refused_before_anything_is_read(tiny, sources, kind):
    folder, _ = sources[kind]
    for asked, message in (
        (config(tiny, "int8", skip=["to_qk"]), "skip pattern 'to_qk' matches no linear"),
        (dq.DQConfig(dq.Recipe.load("int8").with_(min_features=9999)), "nothing to quantize in"),
    ):
        with pytest.raises(dq.DQError, match=message):
            CLASSES[kind].from_pretrained(folder, quantization_config=asked)


def damaged(sources, tmp_path, tiny, kind, change):
    shutil.copytree(sources[kind][0], tmp_path / kind)
    tiny.edit(tmp_path / kind, change)
    return tmp_path / kind


def first(kind):
    return {"flux": "transformer_blocks.1.attn.to_k", "llama": "model.layers.1.self_attn.k_proj"}[kind]


@pytest.mark.parametrize("kind", ["flux", "llama"])
@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_F72_a_bad_weight_is_named(tiny, sources, tmp_path, kind, bad):
    name = first(kind) + ".weight"
    folder = damaged(sources, tmp_path, tiny, kind, lambda t: name in t and t[name].view(-1)[3:4].fill_(bad))
    with pytest.raises(dq.DQError, match=rf"{name}.*NaN or Inf"):
        CLASSES[kind].from_pretrained(folder, quantization_config=config(tiny, "int8"))


@pytest.mark.parametrize("kind", ["flux", "llama"])
def test_F52_a_missing_weight_is_named(tiny, sources, tmp_path, kind):
    name = first(kind) + ".weight"
    folder = damaged(sources, tmp_path, tiny, kind, lambda t: t.pop(name, None))
    with pytest.raises(dq.DQError, match=rf"the source lacks 1 tensors, e\.g\. {name}"):
        CLASSES[kind].from_pretrained(folder, quantization_config=config(tiny, "int8"))


def test_F55_tied_embeddings_stay_tied(tiny, tmp_path):
    tiny.llama(tied=True).save_pretrained(tmp_path, max_shard_size="20KB")
    model = LlamaForCausalLM.from_pretrained(tmp_path, quantization_config=config(tiny, "w4a16"))
    assert model.lm_head.weight is model.model.embed_tokens.weight
    reference = tiny.llama(tied=True)
    dq.quantize(reference, tiny.recipe("w4a16"), progress=False)
    with torch.no_grad():
        assert torch.equal(model(input_ids=IDS).logits, reference(input_ids=IDS).logits)


@pytest.mark.parametrize("kind", CLASSES)
def test_F61_a_second_quantization_is_refused_early(tiny, sources, tmp_path, kind):
    model = getattr(tiny, kind)()
    dq.quantize(model, tiny.recipe("int8"), progress=False)
    model.save_pretrained(tmp_path / "one")
    for asked in (config(tiny, "fp8"), config(tiny, "int8").to_dict()):
        with pytest.raises(dq.DQError, match=r"quantized already \(by dq\): load it without"):
            CLASSES[kind].from_pretrained(tmp_path / "one", quantization_config=asked)
    tiny.edit_config(tmp_path / "one", lambda c: c.clear())  # codes whose config was lost
    saved = json.loads((tmp_path / "one" / "config.json").read_text())
    saved.pop("quantization_config")
    (tmp_path / "one" / "config.json").write_text(json.dumps(saved))
    with pytest.raises(dq.DQError, match=r"quantized already \(it holds .*qweight\)"):
        CLASSES[kind].from_pretrained(tmp_path / "one", quantization_config=config(tiny, "fp8"))


def test_F61_models_of_other_tools_are_refused(tiny, tmp_path):
    """The libraries would load them as they are and only warn."""
    tiny.llama().save_pretrained(tmp_path)
    saved = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(saved | {"quantization_config": {"quant_method": "fp8"}}))
    with pytest.raises(dq.DQError, match=r"quantized already \(by fp8\)"):
        LlamaForCausalLM.from_pretrained(tmp_path, quantization_config=config(tiny, "int8"))


@pytest.mark.parametrize("device_map", ["cpu", "auto", {"": "cpu"}])
@pytest.mark.parametrize("kind", ["flux", "llama"])
def test_device_maps(tiny, sources, kind, device_map):
    folder, call = sources[kind]
    kwargs = dict(dtype=torch.bfloat16, quantization_config=config(tiny, "w4a16"))
    model, plain = (CLASSES[kind].from_pretrained(folder, **kwargs, **k) for k in (dict(device_map=device_map), {}))
    with torch.no_grad():
        assert torch.equal(model(**call)[0], plain(**call)[0])


@pytest.mark.parametrize("kind", ["flux", "llama"])
def test_weights_on_disk_are_refused(tiny, sources, tmp_path, kind):
    """Given so, or found by `auto` for lack of memory; in both cases nothing would be quantized there."""
    folder, _ = sources[kind]
    for device_map in ({"": "disk"}, "auto"):
        with pytest.raises(dq.DQError, match="leaves parts of the model on disk"):
            CLASSES[kind].from_pretrained(
                folder, quantization_config=config(tiny, "int8"), device_map=device_map, max_memory={"cpu": 30_000},
                offload_folder=tmp_path,
            )  # fmt: skip


@pytest.mark.parametrize("preset, factor", [("int8", 1.0), ("w4a16", 0.5)])
def test_automatic_device_maps_count_quantized_bytes(tiny, preset, factor):
    """Sizes of a model on the meta device, as the libraries ask for them: one byte, or half a one, per weight."""
    from accelerate import init_empty_weights
    from accelerate.utils import compute_module_sizes

    from dq.pipelines.hf_diffusers import DQDiffusersQuantizer
    from dq.pipelines.hf_transformers import DQTransformersQuantizer

    with init_empty_weights():
        model = tiny.flux(torch.bfloat16)
    quantizer = DQDiffusersQuantizer(config(tiny, preset), pre_quantized=False)
    quantizer._process_model_before_weight_loading(model)
    dtype = quantizer.adjust_target_dtype(torch.bfloat16)
    found = compute_module_sizes(
        model, dtype=dtype, special_dtypes=quantizer.get_special_dtypes_update(model, torch.bfloat16)
    )
    weights = {n: m for n, m in model.named_modules() if n in quantizer._on_load.rows}
    elements = sum(m.weight.numel() for m in weights.values())
    assert found[""] == sum(2 * p.numel() for p in model.parameters()) - (2 - factor) * elements

    with init_empty_weights():
        model = tiny.llama(torch.bfloat16)
    quantizer = DQTransformersQuantizer(config(tiny, preset), pre_quantized=False)
    quantizer._process_model_before_weight_loading(model)
    parameters = dict(model.named_parameters())
    size = {n: quantizer.param_element_size(model, n, p) for n, p in parameters.items()}
    assert size["model.layers.0.self_attn.k_proj.weight"] == pytest.approx(factor, rel=0.15)
    assert size["model.embed_tokens.weight"] == size["model.norm.weight"] == 2


def ltx(tiny):
    config = dict(
        in_channels=8, out_channels=8, num_attention_heads=2, attention_head_dim=16, cross_attention_dim=32,
        num_layers=2, caption_channels=32,
    )  # fmt: skip
    return tiny.seeded(lambda: LTXVideoTransformer3DModel(**config))


def original_ltx(state):
    """The names of the model's authors, as diffusers reads them."""
    renames = {"proj_in": "patchify_proj", "time_embed": "adaln_single", "norm_q": "q_norm", "norm_k": "k_norm"}
    out = {}
    for name, value in state.items():
        for ours, theirs in renames.items():
            name = name.replace(ours, theirs)
        out[f"model.diffusion_model.{name}"] = value.clone()
    return out


@pytest.mark.parametrize("names", ["diffusers", "original"])
def test_single_files(tiny, tmp_path, names):
    source = ltx(tiny)
    source.save_pretrained(tmp_path / "folder")
    state = source.state_dict()
    save_file(original_ltx(state) if names == "original" else dict(state), tmp_path / "one.safetensors")
    model = LTXVideoTransformer3DModel.from_single_file(
        str(tmp_path / "one.safetensors"), config=str(tmp_path / "folder"), quantization_config=config(tiny, "w4a8"),
        dtype=torch.float32,
    )  # fmt: skip
    dq.quantize(source, tiny.recipe("w4a8"), progress=False)
    same_state(model.state_dict(), source.state_dict())
    model.save_pretrained(tmp_path / "saved")
    again = LTXVideoTransformer3DModel.from_pretrained(tmp_path / "saved")
    same_state(again.state_dict(), source.state_dict())
    with pytest.raises(dq.DQError, match="quantized already"):
        LTXVideoTransformer3DModel.from_single_file(
            str(tiny.weight_files(tmp_path / "saved")[0]), config=str(tmp_path / "folder"),
            quantization_config=config(tiny, "int8"),
        )  # fmt: skip


def to_fp8(state, kind):
    """(what a file holds, what it stands for): linear weights in E4M3, plain, or with one scale, one per row or block.

    Scales are powers of two, so that what stands in the file is exact in BF16.
    """
    held, meant = {}, {}
    for name, value in state.items():
        if not name.endswith("weight") or value.dim() != 2:
            held[name] = meant[name] = value.clone()
            continue
        codes = (value.float() * (1 if kind == "plain" else 4)).clamp(-448, 448).to(torch.float8_e4m3fn)
        held[name], factor = codes, 1.0 if kind == "plain" else 0.25
        parent, rows = name.removesuffix(".weight"), len(value)
        if kind == "tensor":
            held[f"{parent}.scale_weight"] = torch.tensor(factor)
        elif kind == "row":
            held[f"{parent}.weight_scale"] = torch.full((rows,), factor)
            held[f"{parent}.input_scale"] = torch.ones(())
        elif kind == "block":
            blocks = [-(-n // 128) for n in value.shape]
            held[f"{parent}.weight_scale_inv"] = torch.full(blocks, factor)
        meant[name] = (codes.float() * factor).to(value.dtype)
    return held, meant


@pytest.mark.parametrize("single", [False, True])
@pytest.mark.parametrize("kind", ["plain", "tensor", "row", "block"])
def test_fp8_sources_are_refused_or_dequantized(tiny, tmp_path, kind, single):
    source = ltx(tiny).bfloat16()
    held, meant = to_fp8(source.state_dict(), kind)
    source.save_pretrained(tmp_path)
    (path,) = tiny.weight_files(tmp_path)
    save_file(held, path, metadata={"format": "pt"})

    def load(**kwargs):
        kwargs = dict(dtype=torch.bfloat16, quantization_config=config(tiny, "int8", **kwargs))
        if single:
            return LTXVideoTransformer3DModel.from_single_file(str(path), config=str(tmp_path), **kwargs)
        return LTXVideoTransformer3DModel.from_pretrained(tmp_path, **kwargs)

    with pytest.raises(dq.DQError, match=r"weights of the source are FP8 already.*fp8_source='dequantize'"):
        load()
    source.load_state_dict(meant)
    dq.quantize(source, tiny.recipe("int8"), progress=False)
    same_state(load(fp8_source="dequantize").state_dict(), source.state_dict())
    held[next(k for k in held if k.endswith("to_q.weight")).removesuffix("weight") + "weight_scale"] = torch.ones(3, 5)
    save_file(held, path, metadata={"format": "pt"})
    with pytest.raises(dq.DQError, match=r"scale of the FP8 weight .*to_q\.weight has shape \(3, 5\)"):
        load(fp8_source="dequantize")


def test_fp8_sources_of_transformers(tiny, tmp_path):
    """Plain FP8 is cast by the loader; scaled FP8 has loaders of its own there, and is refused."""
    source = tiny.llama(torch.bfloat16)
    source.save_pretrained(tmp_path)
    (path,) = tiny.weight_files(tmp_path)
    held, meant = to_fp8(load_file(path), "plain")
    save_file(held, path, metadata={"format": "pt"})
    with pytest.raises(dq.DQError, match="weights of the source are FP8 already"):
        LlamaForCausalLM.from_pretrained(tmp_path, quantization_config=config(tiny, "int8"))
    asked = config(tiny, "int8", fp8_source="dequantize")
    model = LlamaForCausalLM.from_pretrained(tmp_path, dtype=torch.bfloat16, quantization_config=asked)
    source.load_state_dict(meant, strict=False)
    dq.quantize(source, tiny.recipe("int8"), progress=False)
    same_state(model.state_dict(), source.state_dict())
    save_file(to_fp8(load_file(path), "row")[0], path, metadata={"format": "pt"})
    with pytest.raises(dq.DQError, match="the source is scaled FP8"):
        LlamaForCausalLM.from_pretrained(tmp_path, quantization_config=asked)
