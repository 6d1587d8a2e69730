"""Save in one process, load in another that only imports dq: the same bits, the promised bytes."""

import copy
import json
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

import dq
from dq.linear import quantized_linears
from dq.recipe import presets

PRESETS = presets(decoders=False)
DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}
LLM_PRESETS = ("w4a16", "fp8", "int8")
IDS = torch.tensor([[5, 9, 77, 3, 21, 4], [1, 2, 3, 4, 5, 6]])

# What a user of a checkpoint writes; nothing of dq but the import.
LOADER = """
import json, sys
import dq
import torch
from safetensors.torch import save_file

out = {}
for job in json.load(open(sys.argv[1])):
    dtype = getattr(torch, job["dtype"])
    if job["kind"] == "flux":
        from diffusers import FluxPipeline
        pipe = FluxPipeline.from_pretrained(job["folder"], dtype=dtype)
        pipe.set_progress_bar_config(disable=True)
        generator = torch.Generator().manual_seed(7)
        out[job["key"]] = pipe("a red circle", generator=generator, return_dict=False, **job["kwargs"])[0]
    elif job["kind"] == "llama":
        from transformers import LlamaForCausalLM
        model = LlamaForCausalLM.from_pretrained(job["folder"], dtype=dtype)
        ids = torch.tensor(job["ids"])
        with torch.no_grad():
            out[job["key"]] = model(input_ids=ids).logits
        out[job["key"] + "/tokens"] = model.generate(input_ids=ids, max_new_tokens=8, do_sample=False)
    else:
        from transformers import T5EncoderModel
        model = T5EncoderModel.from_pretrained(job["folder"], dtype=dtype)
        with torch.no_grad():
            out[job["key"]] = model(input_ids=torch.tensor(job["ids"]))[0]
assert all(t.isfinite().all() for t in out.values())
save_file({k: v.contiguous() for k, v in out.items()}, sys.argv[2])
"""


# One fixture quantizes and saves everything; whichever test comes first waits for it.
pytestmark = pytest.mark.timeout(1800)


@dataclass
class Saved:
    """One saved model: where it is, what it gave before, what was promised."""

    folder: Path
    expected: dict[str, torch.Tensor]
    report: dq.QuantizeReport
    model: torch.nn.Module


@pytest.fixture(scope="module")
def saved(tiny, tmp_path_factory):
    """key -> Saved: pipelines of every preset (FP32 in one file; BF16 sharded, two components), LLMs and encoders."""
    root, made = tmp_path_factory.mktemp("checkpoints"), {}
    for preset in PRESETS:
        for name, dtype in DTYPES.items():
            made |= _pipelines(tiny, preset, name, dtype, root)
    for preset in LLM_PRESETS:
        for name, dtype in DTYPES.items():
            made |= _language_models(tiny, preset, name, dtype, root)
    return made


def _pipelines(tiny, preset, name, dtype, root):
    pipe, recipe = tiny.flux_pipeline(dtype), tiny.recipe(preset)
    components = ["transformer", "text_encoder_2"] if name == "bf16" else None
    prompts = dq.Prompts(tiny.PROMPTS[:2], steps=2, records=2, height=32, width=32, max_sequence_length=16)
    calibration = prompts if recipe.needs_calibration else None
    report = dq.quantize(pipe, recipe, calibration=calibration, components=components, progress=False)
    # images of one, latents of the other: the decoder adds nothing of ours
    expected = tiny.denoise(pipe, output_type="pt" if name == "bf16" else "latent")
    key = f"flux/{preset}/{name}"
    pipe.save_pretrained(root / key, max_shard_size="30KB" if name == "bf16" else "1GB")
    return {key: Saved(root / key, {key: expected}, report, pipe.transformer)}


def _language_models(tiny, preset, name, dtype, root):
    out = {}
    for kind, model in (("llama", tiny.llama(dtype)), ("t5", tiny.t5(dtype))):
        report = dq.quantize(model, tiny.recipe(preset), progress=False)
        key = f"{kind}/{preset}/{name}"
        with torch.no_grad():
            expected = {key: model(input_ids=IDS)[0]}
        if kind == "llama":
            expected[f"{key}/tokens"] = model.generate(input_ids=IDS, max_new_tokens=8, do_sample=False)
        model.save_pretrained(root / key, max_shard_size="9KB")
        out[key] = Saved(root / key, expected, report, model)
    return out


@pytest.fixture(scope="module")
def reloaded(tiny, saved, tmp_path_factory):
    """What a new process gets out of all of them."""
    folder = tmp_path_factory.mktemp("reloaded")
    jobs = []
    for key, item in saved.items():
        kind, _, name = key.split("/")[:3]
        kwargs = tiny.LATENTS | ({"output_type": "pt"} if name == "bf16" else {})
        dtype = str(DTYPES[name]).removeprefix("torch.")
        jobs.append(dict(key=key, kind=kind, folder=str(item.folder), dtype=dtype, kwargs=kwargs, ids=IDS.tolist()))
    (folder / "jobs.json").write_text(json.dumps(jobs))
    command = [sys.executable, "-W", "ignore", "-c", LOADER, folder / "jobs.json", folder / "out.safetensors"]
    run = subprocess.run(command, cwd=folder, capture_output=True, text=True)
    assert run.returncode == 0, run.stderr[-3000:]
    return load_file(folder / "out.safetensors")


KINDS = {"flux": PRESETS, "llama": LLM_PRESETS, "t5": LLM_PRESETS}
KEYS = [f"{kind}/{preset}/{name}" for kind, names in KINDS.items() for preset in names for name in DTYPES]


@pytest.mark.parametrize("key", KEYS)
def test_a_new_process_gives_the_same_bits(saved, reloaded, key):
    for name, expected in saved[key].expected.items():
        assert torch.equal(reloaded[name], expected), name
        assert reloaded[name].dtype == expected.dtype


@pytest.mark.parametrize("key", KEYS)
def test_sharding_did_happen(tiny, saved, key):
    folder = saved[key].folder / ("transformer" if key.startswith("flux") else "")
    count = len(tiny.weight_files(folder))
    assert count == 1 if key.startswith("flux") and key.endswith("fp32") else count > 2
    assert bool(list(folder.glob("*.index.json"))) == (count > 1)


@pytest.mark.parametrize("preset", PRESETS)
def test_bytes_are_those_of_the_plan(tiny, preset):
    """In BF16, all of a model on disk (without the header) and in memory within 2 % of what the plan said."""
    model, recipe = tiny.flux(torch.bfloat16), tiny.recipe(preset)
    plan = dq.plan(model, recipe)
    before = sum(p.nbytes for p in model.parameters())
    assert plan.bytes_before == before
    records = [tiny.flux_inputs(torch.bfloat16)] if recipe.needs_calibration else None
    report = dq.quantize(model, recipe, calibration=records, progress=False)
    memory = sum(t.nbytes for t in (*model.parameters(), *model.buffers()))
    if preset == "int8-outliers":  # the plan counts as many 16-bit channels as there may be
        assert 0.85 * plan.bytes_after < memory <= plan.bytes_after
    elif recipe.auto is None:
        assert memory == pytest.approx(plan.bytes_after, rel=0.02)
    else:  # a budget: never more, and what single groups leave over
        assert 0.85 * plan.bytes_after < memory <= 1.02 * plan.bytes_after
    assert report.bytes_after == memory and report.bytes_before == before
    if recipe.auto is None and preset != "int8-outliers":
        assert sum(x.nbytes for x in report.layers) == pytest.approx(sum(r.nbytes for r in plan.quantized), rel=0.02)
    assert memory < 0.75 * before


@pytest.mark.parametrize("key", [k for k in KEYS if "/bf16" in k])
def test_bytes_on_disk_are_those_of_the_plan(tiny, saved, key):
    item, disk = saved[key], 0
    parts = ["transformer", "text_encoder_2"] if key.startswith("flux") else [""]
    for path in (p for part in parts for p in tiny.weight_files(item.folder / part)):
        header = int.from_bytes(path.read_bytes()[:8], "little") + 8
        disk += path.stat().st_size - header
    promised = sum(r.nbytes for r in item.report.plan.rows if r.target is not None)
    other = item.report.bytes_after - sum(x.nbytes for x in item.report.layers)
    if "int8-outliers" in key:
        assert disk == pytest.approx(item.report.bytes_after, rel=0.02) and disk <= promised + other
    else:
        assert disk == pytest.approx(promised + other, rel=0.02)


@pytest.mark.parametrize("preset", PRESETS)
def test_config_names_every_layer(saved, preset):
    item = saved[f"flux/{preset}/fp32"]
    config = json.loads((item.folder / "transformer" / "config.json").read_text())["quantization_config"]
    assert set(config["layers"]) == set(quantized_linears(item.model))
    assert all(0 <= x["kind"] < len(config["kinds"]) and x["sqnr_db"] > 5 for x in config["layers"].values())
    assert config["recipe"]["name"] == preset


def test_loading_again_and_again(saved, tiny, tmp_path):
    """Loaded, saved, loaded: no drift, and the artifact travels along."""
    from diffusers import FluxTransformer2DModel

    item = saved["flux/w4a4-nvfp4-svd/bf16"]
    first = FluxTransformer2DModel.from_pretrained(item.folder / "transformer", dtype=torch.bfloat16)
    first.save_pretrained(tmp_path / "again", max_shard_size="50KB")
    second = FluxTransformer2DModel.from_pretrained(tmp_path / "again", dtype=torch.bfloat16)
    for model in (first, second):
        state = model.state_dict()
        assert state.keys() == item.model.state_dict().keys()
        for name, value in item.model.state_dict().items():
            assert state[name].dtype == value.dtype and torch.equal(state[name], value), name
        assert model.dq_artifact == item.model.dq_artifact
        assert [x.sqnr_db for x in dq.layer_info(model)] == [x.sqnr_db for x in dq.layer_info(item.model)]


@pytest.mark.parametrize("kwargs", [dict(device_map="cpu"), dict(device_map="auto"), dict(low_cpu_mem_usage=True)])
def test_other_ways_to_load(tiny, saved, kwargs):
    from diffusers import FluxTransformer2DModel
    from transformers import LlamaForCausalLM

    inputs, item = tiny.flux_inputs(torch.bfloat16), saved["flux/w4a16/bf16"]
    model = FluxTransformer2DModel.from_pretrained(item.folder / "transformer", dtype=torch.bfloat16, **kwargs)
    with torch.no_grad():
        assert torch.equal(model(**inputs)[0], item.model(**inputs)[0])
    item = saved["llama/w4a16/bf16"]
    model = LlamaForCausalLM.from_pretrained(item.folder, dtype=torch.bfloat16, **kwargs)
    with torch.no_grad():
        assert torch.equal(model(input_ids=IDS).logits, item.expected["llama/w4a16/bf16"])


@pytest.mark.parametrize("preset", PRESETS)
def test_another_dtype_casts_no_scale(saved, preset):
    """A checkpoint made in BF16 loads in FP32 and FP16: same codes and scales, another compute dtype."""
    from diffusers import FluxTransformer2DModel

    item = saved[f"flux/{preset}/bf16"]
    for dtype in (torch.float32, torch.float16, None):
        model = FluxTransformer2DModel.from_pretrained(item.folder / "transformer", dtype=dtype)
        for name, layer in quantized_linears(model).items():
            own = item.model.get_submodule(name)
            assert layer.weight.dtype == (dtype or torch.float32)
            for key, value in own.named_buffers():
                assert layer.get_buffer(key).dtype == value.dtype and torch.equal(layer.get_buffer(key), value)


@pytest.mark.parametrize("preset", LLM_PRESETS)
def test_what_a_library_keeps_in_float32_stays_there(tiny, tmp_path, preset):
    """Wan keeps norms and tables in float32 in BF16 pipelines, T5 its `wo` in FP16: also after reloading."""
    from diffusers import WanTransformer3DModel
    from transformers import T5EncoderModel

    config = dict(
        patch_size=(1, 2, 2), num_attention_heads=2, attention_head_dim=16, in_channels=4, out_channels=4, text_dim=32,
        freq_dim=32, ffn_dim=64, num_layers=2, cross_attn_norm=True, rope_max_seq_len=32,
    )  # fmt: skip
    listed = list(WanTransformer3DModel._keep_in_fp32_modules)
    wan = dict(
        hidden_states=torch.randn(1, 4, 2, 8, 8).bfloat16(), timestep=torch.tensor([500]), return_dict=False,
        encoder_hidden_states=torch.randn(1, 6, 32).bfloat16(),
    )  # fmt: skip
    cases = [
        (WanTransformer3DModel, tiny.seeded(lambda: WanTransformer3DModel(**config)), wan,
         dict(dtype=torch.bfloat16)),
        (T5EncoderModel, tiny.t5(), dict(input_ids=IDS), dict(dtype=torch.float16)),
    ]  # fmt: skip
    for cls, source, inputs, dtype in cases:
        source.save_pretrained(tmp_path / cls.__name__)
        model = cls.from_pretrained(tmp_path / cls.__name__, **dtype)
        dq.quantize(model, tiny.recipe(preset), progress=False)
        model.save_pretrained(tmp_path / "quantized" / cls.__name__)
        loaded = cls.from_pretrained(tmp_path / "quantized" / cls.__name__, **dtype)
        assert {k: v.dtype for k, v in loaded.state_dict().items()} == {
            k: v.dtype for k, v in model.state_dict().items()
        }
        with torch.no_grad():
            assert torch.equal(loaded(**inputs)[0], model(**inputs)[0])
    assert loaded.encoder.block[0].layer[1].DenseReluDense.wo.weight.dtype == torch.float32
    assert WanTransformer3DModel._keep_in_fp32_modules == listed


def test_a_dequantized_model_saves_as_a_plain_one(tiny, tmp_path):
    from diffusers import FluxTransformer2DModel
    from transformers import LlamaForCausalLM

    inputs = tiny.flux_inputs()
    for cls, model, call in (
        (FluxTransformer2DModel, tiny.flux(), inputs),
        (LlamaForCausalLM, tiny.llama(), dict(input_ids=IDS)),
    ):
        dq.quantize(model, tiny.recipe("int8"), progress=False)
        quantized = copy.deepcopy(model)
        dq.dequantize(model)
        model.save_pretrained(tmp_path / cls.__name__)
        config = json.loads((tmp_path / cls.__name__ / "config.json").read_text())
        assert "quantization_config" not in config
        loaded = cls.from_pretrained(tmp_path / cls.__name__)
        with torch.no_grad():
            assert torch.equal(loaded(**call)[0], model(**call)[0])
            assert 0 < (loaded(**call)[0] - quantized(**call)[0]).norm() < 0.1 * loaded(**call)[0].norm()
