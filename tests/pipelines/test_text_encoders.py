"""Text encoders of pipelines through the same path as any model: T5, CLIP, and Qwen2.5-VL with its vision tower."""

import pytest
import torch
from torch import nn

import dq
from dq.family import find_family
from dq.linear import quantized_linears
from dq.planning import make_plan

KWARGS = dict(height=32, width=32, max_sequence_length=16, output_type="latent")


@pytest.fixture(scope="module")
def qwen():
    """Qwen2.5-VL as QwenImage holds it, three layers of text and two of vision."""
    from transformers import Qwen2_5_VLConfig, Qwen2_5_VLForConditionalGeneration

    torch.manual_seed(0)
    text = dict(
        vocab_size=128, hidden_size=64, intermediate_size=96, num_hidden_layers=3, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=128, bos_token_id=1, eos_token_id=2, pad_token_id=0,
        rope_parameters={"rope_type": "default", "mrope_section": [2, 3, 3], "rope_theta": 1e4},
    )  # fmt: skip
    vision = dict(depth=2, hidden_size=64, intermediate_size=96, num_heads=4, out_hidden_size=64, patch_size=4)
    config = Qwen2_5_VLConfig(text_config=text, vision_config=vision, image_token_id=120, video_token_id=121,
                              vision_start_token_id=118, vision_end_token_id=119)  # fmt: skip
    return lambda: Qwen2_5_VLForConditionalGeneration(config).eval()


def test_a_recipe_for_each_component(tiny, tmp_path):
    """Denoiser, T5 and CLIP in one call, each calibrated by the same prompts on what it is called with."""
    from diffusers import FluxPipeline

    pipe = tiny.flux_pipeline()
    recipes = {
        "transformer": tiny.recipe("w4a4-int4-convrot"), "text_encoder_2": tiny.recipe("w4a16-gptq"),
        "text_encoder": tiny.recipe("int8-smooth"),
    }  # fmt: skip
    plans = dq.plan(pipe, recipes)
    assert {n: p.recipe.name for n, p in plans.items()} == {n: r.name for n, r in recipes.items()}
    prompts = dq.Prompts(tiny.PROMPTS[:3], steps=2, **KWARGS)
    report = dq.quantize(pipe, recipes, calibration=prompts, progress=False)
    assert report.recipe == "w4a4-int4-convrot + w4a16-gptq + int8-smooth"
    kinds = {n: {str(x.config.weights) for x in quantized_linears(getattr(pipe, n)).values()} for n in recipes}
    assert kinds["text_encoder_2"] == {"int4/group64@imatrix"} and kinds["text_encoder"] == {"int8/channel"}
    t5 = pipe.text_encoder_2
    assert t5.shared.weight is t5.encoder.embed_tokens.weight
    image = tiny.denoise(pipe)
    pipe.save_pretrained(tmp_path)
    again = FluxPipeline.from_pretrained(tmp_path, dtype=torch.float32)
    again.set_progress_bar_config(disable=True)
    assert torch.equal(tiny.denoise(again), image)
    assert again.text_encoder_2.shared.weight is again.text_encoder_2.encoder.embed_tokens.weight


@pytest.mark.parametrize(
    ("recipe", "kwargs", "match"),
    [
        ({"transformr": "fp8"}, {}, "no component 'transformr'; did you mean 'transformer'"),
        ({"transformer": "fp8", "text_encoder_2": "fp9"}, {}, "unknown recipe 'fp9'"),
        ({"transformer": "fp8"}, {"components": ["transformer"]}, "leave components out"),
        ({"name": "x", "linear": {"weights": "int8/channel"}}, {}, r"of a dict: Recipe\.from_dict"),
        ({}, {}, r"of a dict: Recipe\.from_dict"),
    ],
)
def test_what_is_refused(tiny, recipe, kwargs, match):
    pipe = tiny.flux_pipeline()
    for call in (dq.plan, dq.quantize):
        with pytest.raises(dq.DQError, match=match):
            call(pipe, recipe, **kwargs)
    assert not quantized_linears(pipe.transformer)


def test_qwen_vl_keeps_its_vision_tower(qwen, tiny, tmp_path):
    """Prompts never reach it, so recipes that calibrate need not be told."""
    model = qwen()
    plan = make_plan(model, tiny.recipe("w4a16-gptq"))
    assert plan.family.name == "qwen2" and plan.blocks() == [f"model.language_model.layers.{i}" for i in range(3)]
    assert all("language_model" in m for row in plan.quantized for m in row.members)
    assert {r.reason for r in plan.rows if r.target is None} >= {"vision tower"}
    ids = torch.randint(3, 100, (6, 40), generator=torch.Generator().manual_seed(0))
    records = [dict(input_ids=row[None], attention_mask=torch.ones(1, 40, dtype=torch.long)) for row in ids]
    with torch.no_grad():
        before = model(ids[:1], output_hidden_states=True).hidden_states[-1]
        dq.quantize(model, tiny.recipe("w4a16-gptq"), calibration=records, progress=False)
        after = model(ids[:1], output_hidden_states=True).hidden_states[-1]
        assert 0 < float((after - before).norm() / before.norm()) < 0.3
        assert len(quantized_linears(model)) == 21
        model.save_pretrained(tmp_path)
        again = type(model).from_pretrained(tmp_path)
        assert torch.equal(again(ids[:1], output_hidden_states=True).hidden_states[-1], after)
    assert type(again.lm_head) is nn.Linear
    base = type(model.model).from_pretrained(tmp_path)  # whose names in files have changed since, beside the prefix
    with torch.no_grad():
        assert torch.equal(base(ids[:1]).last_hidden_state, model.model(ids[:1]).last_hidden_state)


@pytest.mark.parametrize("kind", ["t5", "clip"])
@pytest.mark.parametrize("preset", ["w4a16-gptq", "w4a4-nvfp4-svd", "int8-smooth"])
def test_encoders_alone(tiny, kind, preset, tmp_path):
    """A model by itself, calibrated by records; embeddings and their ties are left alone."""
    model = getattr(tiny, kind)()
    ids = torch.randint(3, 100, (4, 12), generator=torch.Generator().manual_seed(0))
    records = [dict(input_ids=row[None]) for row in ids]
    tables = {n: m.weight.clone() for n, m in model.named_modules() if isinstance(m, nn.Embedding)}
    dq.quantize(model, tiny.recipe(preset), calibration=records, progress=False)
    assert all(torch.equal(model.get_submodule(n).weight, w) for n, w in tables.items())
    assert find_family(model).assumed  # detected: no family of its own
    with torch.no_grad():
        expected = model(ids)[0]
    model.save_pretrained(tmp_path)
    with torch.no_grad():
        assert torch.equal(type(model).from_pretrained(tmp_path)(ids)[0], expected)
