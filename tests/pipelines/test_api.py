"""The public verbs on pipelines and models: what is quantized, what is refused, what comes back."""

import copy
import time

import pytest
import torch
from torch import nn
from tqdm import tqdm

import dq
from dq.linear import quantized_linears
from dq.recipe import presets

IDS = torch.tensor([[5, 9, 77, 3, 21, 4], [1, 2, 3, 4, 5, 6]])
KWARGS = dict(height=32, width=32, max_sequence_length=16)


def prompts(tiny, **kwargs):
    return dq.Prompts(tiny.PROMPTS[:2], steps=2, records=4, **KWARGS | kwargs)


def test_a_pipeline_by_default_its_denoiser(tiny):
    pipe = tiny.flux_pipeline()
    plan = dq.plan(pipe, tiny.recipe("fp8"))
    assert plan.model == "FluxTransformer2DModel" and not quantized_linears(pipe.transformer)
    report = dq.quantize(pipe, tiny.recipe("fp8"), progress=False)
    assert len(report.layers) == len(quantized_linears(pipe.transformer)) == 40
    assert not quantized_linears(pipe.text_encoder) and not quantized_linears(pipe.text_encoder_2)
    assert report.recipe == "fp8" and report.seconds > 0 and report.bytes_after < report.bytes_before
    assert "40 linears" in str(report) and "FluxTransformer2DModel: recipe fp8, family flux.1" in str(report.plan)


def test_pipeline_and_model_are_the_same_work(tiny):
    pipe, model = tiny.flux_pipeline(), tiny.flux()
    dq.quantize(pipe, tiny.recipe("w4a4-nvfp4"), progress=False)
    dq.quantize(model, tiny.recipe("w4a4-nvfp4"), progress=False)
    for name, value in model.state_dict().items():
        assert torch.equal(pipe.transformer.state_dict()[name].view(torch.uint8), value.view(torch.uint8)), name


@pytest.mark.parametrize("components", ["text_encoder_2", ["text_encoder_2"], ("text_encoder_2",)])
def test_components_by_name(tiny, components):
    pipe = tiny.flux_pipeline()
    report = dq.quantize(pipe, tiny.recipe("int8"), components=components, progress=False)
    assert not quantized_linears(pipe.transformer)
    assert len(report.layers) == len(quantized_linears(pipe.text_encoder_2)) == 14


def test_two_components_one_report(tiny):
    pipe, parts = tiny.flux_pipeline(), ["transformer", "text_encoder_2"]
    plans = dq.plan(pipe, tiny.recipe("int8"), components=parts)
    report = dq.quantize(pipe, tiny.recipe("int8"), components=parts, progress=False)
    assert list(plans) == parts
    assert report.bytes_after == sum(p.bytes_after for p in plans.values())
    assert {x.name.partition(".")[0] for x in report.layers} == set(parts)
    assert len(report.layers) == 54 and report.plan.model == "FluxTransformer2DModel + T5EncoderModel"


def test_component_typos(tiny):
    pipe, recipe = tiny.flux_pipeline(), tiny.recipe("int8")
    for wrong, near in (("transformr", "transformer"), ("text_encoder_3", "text_encoder_2"), ("unet", "vae")):
        for call in (dq.quantize, dq.plan):
            with pytest.raises(dq.DQError, match=f"FluxPipeline has no component '{wrong}'.*{near}"):
                call(pipe, recipe, components=[wrong])
    with pytest.raises(dq.DQError, match="has no component 'scheduler'"):  # there, but no model
        dq.quantize(pipe, recipe, components=["scheduler"])
    with pytest.raises(dq.DQError, match=r"components=\['transformer'\] goes with a pipeline; this is the model"):
        dq.quantize(pipe.transformer, recipe, components=["transformer"])
    with pytest.raises(dq.DQError, match="has no component 'transformr'"):
        dq.dequantize(pipe, components=["transformr"])
    assert not quantized_linears(pipe.transformer)


def test_skip_typos_and_types(tiny):
    pipe, recipe = tiny.flux_pipeline(), tiny.recipe("int8")
    with pytest.raises(dq.DQError, match="skip pattern 'to_qk' matches no linear; did you mean 'to_q'"):
        dq.quantize(pipe, recipe, skip=["to_q", "to_qk"])
    for call in (dq.quantize, dq.plan):
        with pytest.raises(dq.DQError, match="skip takes a list of patterns, got the string 'to_q'"):
            call(pipe, recipe, skip="to_q")
        with pytest.raises(dq.DQError, match="skip takes a list of patterns, got the string 'to_q'"):
            call(pipe, recipe, skip="to_q", components=["transformer", "text_encoder_2"])
    assert not quantized_linears(pipe.transformer)
    # with several components a pattern must match in one of them
    parts = ["transformer", "text_encoder_2"]
    dq.quantize(pipe, recipe, components=parts, skip=["DenseReluDense", "to_q"], progress=False)
    names = [*quantized_linears(pipe.transformer), *quantized_linears(pipe.text_encoder_2)]
    assert names and not any("to_q" in n or "DenseReluDense" in n for n in names)
    with pytest.raises(dq.DQError, match="skip pattern 'nothing' matches no linear"):
        dq.quantize(tiny.flux_pipeline(), recipe, components=parts, skip=["nothing"])


def test_things_that_cannot_be_quantized(tiny):
    for thing in ("flux", None, 3, {"transformer": nn.Linear(4, 4)}):
        with pytest.raises(dq.DQError, match="expected a diffusers pipeline or a model, got"):
            dq.quantize(thing, "int8")
    with pytest.raises(dq.DQError, match=r"got str: open it by dq\.load first"):
        dq.plan("a/folder", "int8")
    with pytest.raises(dq.DQError, match="device 'nowhere' cannot be used here"):
        dq.quantize(tiny.flux(), tiny.recipe("int8"), device="nowhere")
    with pytest.raises(dq.DQError, match=r"unknown recipe 'fp9'; did you mean 'fp8'"):
        dq.quantize(tiny.flux(), "fp9")
    with pytest.raises(dq.DQError, match=r"cannot read the recipe .*none\.toml"):
        dq.quantize(tiny.flux(), "none.toml")
    with pytest.raises(dq.DQError, match="nothing to quantize in FluxTransformer2DModel"):
        dq.quantize(tiny.flux(), "fp8")  # with the default bound


@pytest.mark.parametrize("preset", presets(decoders=False))
def test_dequantize_and_quantize_again(tiny, preset):
    """Back to nn.Linear with the weights that the codes stood for; those are a fixed point of plain recipes."""
    model, inputs, recipe = tiny.flux(), tiny.flux_inputs(), tiny.recipe(preset)
    records = [inputs] if recipe.needs_calibration else None
    source = copy.deepcopy(model)
    dq.quantize(model, recipe, calibration=records, progress=False)
    state = {k: v.clone() for k, v in model.state_dict().items()}
    weights = {n: m.dequantized_weight() for n, m in quantized_linears(model).items()}
    assert dq.dequantize(model) is model
    assert not quantized_linears(model) and not hasattr(model, "dq_artifact") and not hasattr(model, "hf_quantizer")
    assert model.state_dict().keys() == source.state_dict().keys()
    for name, weight in weights.items():
        layer = model.get_submodule(name)
        assert type(layer) is nn.Linear and torch.equal(layer.weight, weight)
        assert recipe.corrects_bias or torch.equal(layer.bias, source.get_submodule(name).bias)
    with pytest.raises(dq.DQError, match="nothing in FluxTransformer2DModel is quantized"):
        dq.dequantize(model)
    report = dq.quantize(model, recipe, calibration=records, progress=False)
    assert len(report.layers) == 40
    if not recipe.needs_calibration:  # a scale may change its last bit, hardly a code may
        for name, codes in state.items():
            if name.endswith("qweight"):
                assert (model.state_dict()[name].view(torch.uint8) != codes.view(torch.uint8)).float().mean() < 0.01


def test_dequantize_a_pipeline(tiny):
    pipe, parts = tiny.flux_pipeline(torch.bfloat16), ["transformer", "text_encoder_2"]
    dq.quantize(pipe, tiny.recipe("int8"), components=parts, progress=False)
    before = tiny.denoise(pipe)
    dq.dequantize(pipe, components=parts)
    assert not quantized_linears(pipe.transformer) and not quantized_linears(pipe.text_encoder_2)
    after = tiny.denoise(pipe)
    assert 0 < (after - before).float().norm() < 0.2 * before.float().norm()
    assert not hasattr(pipe.text_encoder_2.config, "quantization_config")
    assert "quantization_config" not in pipe.transformer.config
    with pytest.raises(dq.DQError, match="nothing in FluxPipeline is quantized"):
        dq.dequantize(pipe)


def test_activation_modes(tiny):
    outputs, inputs = {}, tiny.flux_inputs()
    for mode in (None, "auto", "faithful", "native"):
        model = tiny.flux()
        dq.quantize(model, tiny.recipe("w4a4-nvfp4"), activations=mode, progress=False)
        assert {m.activations_mode for m in quantized_linears(model).values()} == {mode or "auto"}
        with torch.no_grad():
            outputs[mode] = model(**inputs)[0]
        assert all(x.grid and x.backend and x.calls == 1 for x in dq.layer_info(model))
    assert {x.grid for x in dq.layer_info(model)} <= {"16-bit", "nvfp4-token", "fp8_e4m3/token", "int8/token"}
    assert torch.equal(outputs[None], outputs["faithful"]) and torch.equal(outputs["auto"], outputs["faithful"])
    model = tiny.flux()
    for wrong in ("fast", "Native"):
        with pytest.raises(dq.DQError, match=f"unknown activations mode '{wrong}'"):
            dq.quantize(model, tiny.recipe("w4a4-nvfp4"), activations=wrong)
    assert not quantized_linears(model)


@pytest.mark.parametrize("device", ["cpu", torch.device("cpu")])
def test_device_of_the_arithmetic(tiny, device):
    model, plain = tiny.flux(), tiny.flux()
    dq.quantize(model, tiny.recipe("int8"), device=device, progress=False)
    dq.quantize(plain, tiny.recipe("int8"), progress=False)
    for name, value in plain.state_dict().items():
        assert torch.equal(model.state_dict()[name], value) and model.state_dict()[name].device.type == "cpu"


def test_training_mode_and_hooks_survive(tiny):
    model = tiny.flux()
    model.transformer_blocks[0].train()
    dq.quantize(model, tiny.recipe("int8"), progress=False)
    assert model.transformer_blocks[0].attn.to_q.training and not model.transformer_blocks[1].attn.to_q.training
    assert not any(m._forward_pre_hooks for m in model.modules())
    assert not any(p.requires_grad for m in quantized_linears(model).values() for p in m.parameters())


class Interrupting(tqdm):
    """A progress bar that stops the run at its n-th update."""

    updates = limit = 0

    def update(self, n=1):
        Interrupting.updates += 1
        if Interrupting.updates == Interrupting.limit:
            raise KeyboardInterrupt
        return super().update(n)


@pytest.mark.parametrize("preset, stops", [("w4a4-int4-svd", (2, 9, 30)), ("int8", (2, 9, 15))])
def test_interrupt_and_resume(tiny, tmp_path, preset, stops):
    """Ctrl-C at any point, then the same call again: the pipeline works in between, the bits are those of one run."""
    recipe = tiny.recipe(preset)
    calibration = prompts(tiny) if recipe.needs_calibration else None
    whole = tiny.flux_pipeline()
    report = dq.quantize(whole, recipe, calibration=calibration, progress=False)
    pipe, images = tiny.flux_pipeline(), None
    reference = tiny.denoise(pipe)
    for Interrupting.limit in stops:
        Interrupting.updates = 0
        with pytest.raises(KeyboardInterrupt):
            dq.quantize(pipe, recipe, calibration=calibration, resume=tmp_path, progress=lambda *a, **k: Interrupting(
                *a, **k | {"disable": True}))  # fmt: skip
        assert not quantized_linears(pipe.transformer)
        images = tiny.denoise(pipe)
        assert torch.equal(images, reference)
    assert 0 < len(list((tmp_path / "transformer").glob("*.safetensors"))) < 5
    again = dq.quantize(pipe, recipe, calibration=calibration, resume=tmp_path, progress=False)
    for name, value in whole.transformer.state_dict().items():
        assert torch.equal(pipe.transformer.state_dict()[name].view(torch.uint8), value.view(torch.uint8)), name
    assert [x.sqnr_db for x in again.layers] == [x.sqnr_db for x in report.layers]
    assert torch.equal(tiny.denoise(pipe), tiny.denoise(whole))


def test_a_resume_folder_belongs_to_one_job(tiny, tmp_path):
    source = tiny.flux()
    records = [tiny.flux_inputs(seed=i) for i in range(2)]
    smooth = tiny.recipe("int8-smooth")
    dq.quantize(copy.deepcopy(source), smooth, calibration=records, resume=str(tmp_path), progress=False)
    changed = copy.deepcopy(source)
    changed.transformer_blocks[1].attn.to_v.weight.data[0, 0] += 1
    others = [
        (copy.deepcopy(source), tiny.recipe("int8"), records, {}, "recipe and choice of linears"),
        (copy.deepcopy(source), smooth, records[:1], {}, "calibration"),  # fewer records
        (
            copy.deepcopy(source),
            smooth,
            [records[0], tiny.flux_inputs(seed=9)],
            {},
            "calibration",
        ),  # as many, but others
        (changed, smooth, records, {}, "model"),  # one other weight
        (copy.deepcopy(source), smooth, records, {"skip": ["to_q"]}, "choice of linears"),
    ]
    for model, recipe, found, kwargs, other in others:
        with pytest.raises(dq.DQError, match=f"holds blocks of another {other};"):
            dq.quantize(model, recipe, calibration=found, resume=str(tmp_path), progress=False, **kwargs)
        assert not quantized_linears(model)


def test_a_language_model_data_free(tiny):
    model = tiny.llama()
    with torch.no_grad():
        before = model(input_ids=IDS).logits
    plan = dq.plan(model, tiny.recipe("int8"))
    groups = [r.inputs[0] for r in plan.quantized if len(r.members) > 1]
    assert groups == [
        tuple(f"model.layers.{i}.{part}.{n}" for n in names)
        for i in range(2)
        for part, names in (("self_attn", ("q_proj", "k_proj", "v_proj")), ("mlp", ("gate_proj", "up_proj")))
    ]
    assert {r.reason for r in plan.rows if r.target is None} == {"output projection"}
    assert {r.block for r in plan.quantized} == {"model.layers.0", "model.layers.1"}
    report = dq.quantize(model, tiny.recipe("int8"), progress=False)
    with torch.no_grad():
        after = model(input_ids=IDS).logits
    assert len(report.layers) == 14 and 0 < (after - before).norm() < 0.05 * before.norm()
    assert model.generate(input_ids=IDS, max_new_tokens=5, do_sample=False).shape == (2, 11)


def test_a_language_model_with_calibration(tiny):
    """Records are dicts of keyword arguments; q, k and v get one smoothing factor, gate and up another."""
    model, g = tiny.llama(), torch.Generator().manual_seed(0)
    with torch.no_grad():
        # outlier channels that smoothing must move; a norm's gain makes them
        for block in model.model.layers:
            block.input_layernorm.weight[:2] = 40.0
        before = model(input_ids=IDS).logits
    rough = copy.deepcopy(model)
    dq.quantize(rough, tiny.recipe("int8"), progress=False)
    records = [dict(input_ids=torch.randint(3, 128, (2, 16), generator=g)) for _ in range(4)]
    report = dq.quantize(model, tiny.recipe("int8-smooth"), calibration=records, progress=False)
    assert report.calibration["records"] == 4 and len(report.calibration["sha256"]) == 64
    for block in model.model.layers:
        a, m = block.self_attn, block.mlp
        assert torch.equal(a.q_proj.smooth_factor, a.k_proj.smooth_factor)
        assert torch.equal(a.q_proj.smooth_factor, a.v_proj.smooth_factor)
        assert torch.equal(m.gate_proj.smooth_factor, m.up_proj.smooth_factor)
        assert (a.q_proj.smooth_factor[:2] > 3 * a.q_proj.smooth_factor[2:].median()).all()
    with torch.no_grad():
        after, plain = model(input_ids=IDS).logits, rough(input_ids=IDS).logits
    assert (after - before).norm() < 0.7 * (plain - before).norm()


def test_arguments_of_wrong_types(tiny):
    pipe, recipe = tiny.flux_pipeline(), tiny.recipe("int8")
    for kwargs, message in (
        ({"components": 5}, "components is a name or a list of names; got 5"),
        ({"components": [5]}, "has no component 5"),
        ({"skip": 5}, "skip takes a list of patterns; got 5"),
        ({"skip": [5]}, "a skip pattern is text; got 5"),
        ({"skip": [5], "components": ["transformer", "text_encoder_2"]}, "a skip pattern is text; got 5"),
        ({"activations": 5}, "unknown activations mode 5"),
        ({"resume": 5}, "resume is the path of a folder; got 5"),
    ):
        with pytest.raises(dq.DQError, match=message):
            dq.quantize(pipe, recipe, **kwargs)
    assert dq.plan(pipe, recipe, skip=None) == dq.plan(pipe, recipe)
    with pytest.raises(dq.DQError, match="a lone Linear has no name"):
        dq.quantize(nn.Linear(512, 512), "int8")


def test_records_that_do_not_fit(tiny):
    model, good = tiny.llama(), dict(input_ids=IDS)
    for records, message in (
        ([good, dict(input_idz=IDS)], "record 1 does not fit LlamaForCausalLM: .*input_idz"),
        ([good, dict(input_ids="hello")], "record 1 holds no tensor; give what LlamaForCausalLM is called with"),
        ([{}], "record 0 holds no tensor"),
        ([good, dict(input_ids=IDS + 1000)], "record 1 does not fit LlamaForCausalLM: token 10.* vocabulary of 128"),
        ([dict(input_ids=IDS - 200)], "record 0 does not fit .*: token -1.* is outside the vocabulary of 128"),
        ([good, good, dict(input_ids=IDS[:, :0])], r"record 2 does not fit .*: input_ids of shape \(\d, 0\) hold no"),
        ([dict(input_ids=IDS.float())], "record 0 does not fit .*: input_ids are torch.float32, token ids are torch.i"),
        ([good, dict(input_ids=IDS[0])], r"record 1 .*: input_ids have shape \(\d+,\), expected \[batch, tokens\]"),
        ([good | dict(attention_mask=torch.ones(7, 3))], r"record 0 .*: attention_mask has shape \(7, 3\), input_ids"),
        (good, "wrap the dict in a list"),
        (IDS, "wrap the Tensor in a list"),
        (dq.Record((), good), "wrap the Record in a list"),
    ):
        model.forward = without_kwargs(type(model).forward.__get__(model))
        with pytest.raises(dq.DQError, match=message):
            dq.quantize(model, tiny.recipe("int8-smooth"), calibration=records, progress=False)
    assert not quantized_linears(model)


def without_kwargs(forward):
    """The forward of a model that takes two arguments and no others."""

    def narrow(input_ids=None, attention_mask=None):
        return forward(input_ids=input_ids, attention_mask=attention_mask)

    return narrow


def test_dequantize_finds_every_component(tiny):
    pipe = tiny.flux_pipeline()
    for parts in (["text_encoder_2"], ["transformer", "text_encoder_2"]):
        dq.quantize(pipe, tiny.recipe("int8"), components=parts, progress=False)
        dq.dequantize(pipe)
        assert not quantized_linears(pipe.transformer) and not quantized_linears(pipe.text_encoder_2)


def test_prompts_of_a_data_free_recipe(tiny):
    pipe = tiny.flux_pipeline()
    with pytest.warns(UserWarning, match="recipe 'int8' needs no calibration"):
        report = dq.quantize(pipe, tiny.recipe("int8"), calibration=prompts(tiny), progress=False)
    assert len(report.calibration["records_sha256"]) == 64


def test_seconds_count_calibration(tiny, monkeypatch):
    monkeypatch.setattr(
        dq.Prompts, "collect", lambda self, *args, _f=dq.Prompts.collect: (time.sleep(1), _f(self, *args))[1]
    )
    report = dq.quantize(tiny.flux_pipeline(), tiny.recipe("int8-smooth"), calibration=prompts(tiny), progress=False)
    assert report.seconds > 1
