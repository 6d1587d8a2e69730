"""Recipes with rewrites, end to end: quantize, save, load; refusals before anything is changed."""

import pytest
import torch
from torch import nn

import dq
from dq.pipelines.experts import opened
from dq.records import digest
from dq.rewrites import rewrite

QUAROT = ("w4a4-int4-quarot", "w4a4-int4-quarot-gptq")


@pytest.fixture
def text(llm):
    return dq.Text(llm.text, llm.tokenizer(), samples=4, length=32)


def error(model, expected, ids):
    return float((model(ids).logits - expected).norm() / expected.norm())


@pytest.mark.parametrize("kind", ["Llama", "Qwen3", "Qwen2", "Gemma", "Phi3"])
@pytest.mark.parametrize("preset", QUAROT)
@pytest.mark.parametrize("tied", [False, True])
def test_quantized_saved_and_loaded(llm, tiny, text, kind, preset, tied, tmp_path):
    model = llm.spread(llm.decoder(kind, tie_word_embeddings=tied))
    with torch.no_grad():
        clean = model(text.ids).logits
    recipe = tiny.recipe(preset)
    calibration = text if recipe.needs_calibration else None
    dq.quantize(model, recipe, calibration=calibration, progress=False)
    naive = llm.spread(llm.decoder(kind, tie_word_embeddings=tied))
    dq.quantize(naive, tiny.recipe("w4a4-int4"), progress=False)
    assert error(model, clean, text.ids) < 0.9 * error(naive, clean, text.ids)
    down = model.model.layers[0].mlp.down_proj
    assert [name for name, _ in down.config.steps] == ["rotate"]
    attention = model.model.layers[0].self_attn
    assert not (attention.qkv_proj if kind == "Phi3" else attention.q_proj).config.steps
    model.save_pretrained(tmp_path)
    again = type(model).from_pretrained(tmp_path)
    assert again.lm_head.weight is not again.model.embed_tokens.weight
    assert torch.equal(again(text.ids).logits, model(text.ids).logits)
    assert again.generate(text.ids[:1, :8], max_new_tokens=4, do_sample=False).shape == (1, 12)


EXPERTS = dict(num_experts=4, num_experts_per_tok=2, moe_intermediate_size=48)
MIXTURES = {
    "Qwen3Moe": EXPERTS,
    "Qwen2Moe": EXPERTS | dict(shared_expert_intermediate_size=32),
    "Mixtral": dict(num_local_experts=4, num_experts_per_tok=2),
    "GptOss": dict(num_local_experts=4, num_experts_per_tok=2, layer_types=["full_attention"] * 2,
                   rope_parameters={"rope_type": "default", "rope_theta": 1e4}),
}  # fmt: skip


@pytest.mark.parametrize("kind", MIXTURES)
@torch.no_grad()
def test_a_mixture_keeps_its_function(llm, text, kind):
    """Through the views that opened experts are: the stack that transformers runs afterwards is rewritten."""
    model = llm.decoder(kind, **MIXTURES[kind])
    for name, p in model.named_parameters():
        if name.endswith("bias"):
            p.normal_(0, 0.3)
    expected = model(text.ids).logits
    with opened([model]):
        before = {n: p.clone() for n, p in model.named_parameters()}
        rewrite(model, ["norm_fusion", "r1", "r2"])
        same = {n for n, p in model.named_parameters() if torch.equal(p, before[n])}
    assert all(n.endswith(("_proj.bias", "router.bias", "sinks", "_norm.weight")) for n in same), same
    assert not [n for n in same if "experts" in n and "down_proj" in n]
    assert float((model(text.ids).logits - expected).norm() / expected.norm()) < 1e-4


@pytest.mark.parametrize("kind", MIXTURES)
@pytest.mark.parametrize("preset", [QUAROT[0], "w4a4-int4-spinquant"])
def test_mixtures_quantized_saved_and_loaded(llm, tiny, text, kind, preset, tmp_path):
    made = lambda: llm.spread(llm.decoder(kind, **MIXTURES[kind]))  # noqa: E731
    model, naive, recipe = made(), made(), tiny.recipe(preset)
    with torch.no_grad():
        clean = model(text.ids).logits
    dq.plan(model, recipe)
    if recipe.needs_calibration:
        steps = tuple((n, (("steps", 2), ("online", True))) if n == "spinquant" else (n, p) for n, p in recipe.rewrites)
        recipe = recipe.with_(rewrites=steps)
    dq.quantize(model, recipe, calibration=text if recipe.needs_calibration else None, progress=False)
    dq.quantize(naive, tiny.recipe("w4a4-int4"), progress=False)
    assert error(model, clean, text.ids) < 0.9 * error(naive, clean, text.ids)
    assert [n for n, _ in getattr(model.model.layers[0].mlp.experts, "0").down_proj.config.steps] == ["rotate"]
    model.save_pretrained(tmp_path)
    assert torch.equal(type(model).from_pretrained(tmp_path)(text.ids).logits, model(text.ids).logits)


def unchanged(model, call, match):
    before = digest(model)
    with pytest.raises(dq.DQError, match=match):
        call()
    assert digest(model) == before and not any(isinstance(m, dq.QuantizedLinear) for m in model.modules())


def test_layer_norms_are_refused_before_anything_changes(llm, tiny):
    model = llm.decoder("StableLm")
    kind = type(model.model.norm)
    unchanged(
        model,
        lambda: dq.quantize(model, tiny.recipe(QUAROT[0]), progress=False),
        "does not fit StableLmForCausalLM: model.layers.0.input_layernorm is a LayerNorm",
    )
    assert type(model.model.norm) is kind is nn.LayerNorm


def test_a_model_without_a_head_is_refused(llm, tiny):
    model = llm.decoder().model
    unchanged(model, lambda: dq.quantize(model, tiny.recipe(QUAROT[0]), progress=False), "nothing reads norm")


def test_missing_calibration_changes_nothing(llm, tiny):
    model = llm.decoder(tie_word_embeddings=True)
    unchanged(model, lambda: dq.quantize(model, tiny.recipe(QUAROT[1]), progress=False), r"pass calibration=dq\.Text")
    assert model.lm_head.weight is model.model.embed_tokens.weight


def test_a_model_that_a_failed_try_has_rewritten_is_refused(llm, tiny):
    """Rewritten twice it would still compute the same, but quantize to something else: no second try on it."""
    model = llm.decoder()

    def stop(*args, **kwargs):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt), pytest.warns(UserWarning, match="were rewritten by a try that failed"):
        dq.quantize(model, tiny.recipe(QUAROT[0]), progress=stop)
    for preset in (QUAROT[0], "int8"):
        unchanged(model, lambda p=preset: dq.quantize(model, tiny.recipe(p), progress=False), "load it anew")
    fresh = llm.decoder()
    dq.quantize(fresh, tiny.recipe(QUAROT[0]), progress=False)
    assert not hasattr(fresh, "dq_rewritten")


@pytest.mark.parametrize(
    ("kind", "match"),
    [
        ("Gemma2", "no rotation of the stream passes it"),
        ("Olmo2", "unknown to"),
        ("GraniteMoe", "has no decoder layers"),
    ],
)
def test_other_layouts_are_refused_by_the_plan_too(llm, tiny, kind, match):
    model = llm.decoder(kind)
    unchanged(model, lambda: dq.plan(model, tiny.recipe(QUAROT[0])), match)
    unchanged(model, lambda: dq.quantize(model, tiny.recipe(QUAROT[0]), progress=False), match)


def test_gemma_2_takes_what_does_not_turn_the_stream(llm, tiny, tmp_path):
    model = llm.decoder("Gemma2")
    recipe = tiny.recipe(QUAROT[0], rewrites=(("norm_fusion", ()), ("r2", ())))
    with torch.no_grad():
        dq.quantize(model, recipe, progress=False)
        model.save_pretrained(tmp_path)
        ids = torch.arange(3, 30)[None]
        assert torch.equal(type(model).from_pretrained(tmp_path)(ids).logits, model(ids).logits)


def test_diffusion_models_are_refused(tiny):
    model = tiny.flux()
    unchanged(model, lambda: dq.quantize(model, tiny.recipe(QUAROT[0]), progress=False), "has no decoder layers")


def test_the_plan_names_rewrites(llm, tiny):
    text = str(dq.plan(llm.decoder(tie_word_embeddings=True), tiny.recipe(QUAROT[0])))
    assert "rewritten first by norm_fusion, r1, r2: a tied output projection gets a weight of its own" in text
