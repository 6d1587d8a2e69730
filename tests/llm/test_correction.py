"""A low-rank correction beside a frozen quantized model: gradients, the divergence on other tokens, what is stored."""

import copy

import pytest
import torch
from torch import nn

import dq
from dq.linear import quantized_linears
from dq.pipelines.corrected import LSQ, Corrected, Learned
from dq.records import digest
from dq.spec import QuantSpec


@pytest.fixture
def text(llm):
    return dq.Text(llm.text, llm.tokenizer(), samples=16, length=32)


def quantized(llm, tiny, recipe, text, **changes):
    model = llm.decoder(**changes)
    recipe = tiny.recipe(recipe) if isinstance(recipe, str) else recipe
    dq.quantize(model, recipe, calibration=text if recipe.needs_calibration else None, progress=False)
    return model


def divergence(llm, model, reference):
    """KL on text that neither calibrated nor trained."""
    result = dq.evaluate_text(model, reference, llm.text[::-1], llm.tokenizer(), length=32, limit=8, progress=False)
    return result["candidate"]["kl[32]"].value


def test_lsq_is_torchs_learnable_quantization():
    """Values and both gradients against torch's own implementation of LSQ."""
    x, g = torch.randn(6, 32) * 3, torch.randn(6, 32)
    x[(x / 0.4).abs().sub(7.25).abs() < 0.3] = 0.1  # between the last point and half a step beyond the two differ
    fmt, found = QuantSpec.parse("int4/tensor").fmt, []
    for ours in (True, False):
        a, s = x.clone().requires_grad_(), torch.full((1,) if not ours else (1, 1), 0.4).requires_grad_()
        if ours:
            y = LSQ.apply(a, s, fmt)
        else:
            y = torch._fake_quantize_learnable_per_tensor_affine(
                a, s, torch.zeros(1), -7, 7, 1 / (x.numel() * 7) ** 0.5
            )
        (y * g).sum().backward()
        found.append((y.detach(), a.grad, s.grad.flatten()))
    for mine, theirs in zip(*found, strict=True):
        torch.testing.assert_close(mine, theirs)
    assert (found[0][1] == 0).any()  # some values were clipped


@pytest.mark.parametrize(
    "recipe", ["int8", "w4a16", "w4a4-int4-convrot", "w4a4-nvfp4-svd", "w4a4-nvfp4-arc", "fp8-static", "int8-outliers"]
)
@torch.no_grad()
def test_the_stand_in_computes_what_the_layer_does(llm, tiny, text, recipe):
    """Before training; and the finished layer what the stand-in does, up to the 16 bits of its factors."""
    model = quantized(llm, tiny, recipe, text)
    x = torch.randn(2, 9, 64)
    for layer in (model.model.layers[0].self_attn.q_proj, model.model.layers[1].mlp.up_proj):
        stand_in = Corrected(layer, Learned(4), torch.Generator().manual_seed(0))
        torch.testing.assert_close(stand_in(x), layer(x), rtol=1e-4, atol=1e-4)
        stand_in.up.normal_(0, 0.05)
        done = stand_in.finished()
        assert done.config.rank == layer.config.rank + 4
        torch.testing.assert_close(done(x), stand_in(x), rtol=1e-2, atol=2e-2)
        assert not torch.allclose(done(x), layer(x), atol=5e-2)


@pytest.mark.parametrize(("recipe", "gain"), [("w4a4-int4", 0.85), ("w4a4-nvfp4-svd", 0.95)])
def test_divergence_falls_on_other_tokens(llm, tiny, text, recipe, gain, tmp_path):
    model, reference = quantized(llm, tiny, recipe, text), llm.decoder()
    before, codes = divergence(llm, model, reference), model.model.layers[0].mlp.up_proj.qweight.clone()
    rank = model.model.layers[0].mlp.up_proj.config.rank
    report = dq.correct(model, reference, text, rank=8, steps=30, rate=5e-3, batch=2, progress=False)
    assert report.changed and report.after < 0.8 * report.before and len(report.layers) == 14
    assert "KL on held-out tokens" in str(report)
    assert divergence(llm, model, reference) < gain * before
    layer = model.model.layers[0].mlp.up_proj
    assert torch.equal(layer.qweight, codes) and layer.config.rank == rank + 8
    assert type(model.lm_head) is nn.Linear and not any(isinstance(m, Corrected) for m in model.modules())
    assert model.dq_artifact["correction"]["rank"] == 8
    model.save_pretrained(tmp_path)
    with torch.no_grad():
        again = type(model).from_pretrained(tmp_path)
        assert torch.equal(again(text.ids).logits, model(text.ids).logits)
    assert again.dq_artifact["correction"]["steps"] == 30
    assert digest(reference) == digest(llm.decoder())


def test_scales_learn_where_they_can(llm, tiny, text):
    """Weight scales at fixed codes, and static activation scales; a grid with E4M3 scales keeps its own."""
    recipe = dq.Recipe.from_dict(
        {"name": "t", "linear": {"weights": "int4/group32", "activations": "int8/tensor"}}
    ).with_(min_features=16)
    model, plain = quantized(llm, tiny, recipe, text), quantized(llm, tiny, recipe, text)
    old = copy.deepcopy(model.model.layers[0].mlp.up_proj)
    options = dict(rank=2, steps=20, rate=5e-3, batch=2, progress=False)
    report = dq.correct(model, llm.decoder(), text, scales=True, **options)
    new = model.model.layers[0].mlp.up_proj
    assert torch.equal(new.qweight, old.qweight)
    assert 1e-3 < float((new.weight_scale / old.weight_scale - 1).abs().max()) < 0.2
    assert not torch.equal(new.input_scale, old.input_scale)
    assert report.after < dq.correct(plain, llm.decoder(), text, **options).after
    fixed = Corrected(
        quantized(llm, tiny, "w4a4-nvfp4", text).model.layers[0].mlp.up_proj, Learned(2, scales=True), torch.Generator()
    )
    assert fixed.factor is None and fixed.input_scale is None


@pytest.mark.parametrize(("recipe", "scales", "gain"), [("w4a4-nvfp4", True, 0.98), ("w4a16-awq", False, 0.9)])
def test_norms_and_scales_learn_without_a_bit_more(llm, tiny, text, recipe, scales, gain, tmp_path):
    """Codes stay; the finished model is the one that learned; a later correction remembers the first."""
    model, reference = quantized(llm, tiny, recipe, text), llm.decoder()
    old = copy.deepcopy(model)
    options = dict(rank=0, norms=True, scales=scales, steps=40, rate=1e-2, batch=4, micro_batch=4, progress=False)
    report = dq.correct(model, reference, text, **options)
    assert report.changed and report.after < gain * report.before
    assert bool(report.layers) == scales
    for name, layer in quantized_linears(model).items():
        was = old.get_submodule(name)
        assert layer.config == was.config and torch.equal(layer.qweight, was.qweight)
        assert torch.equal(layer.weight_scale, was.weight_scale)
    assert not torch.equal(model.model.norm.weight, old.model.norm.weight)
    if scales:  # the second level moved, of q, k and v as of one matrix
        now, was = (m.model.layers[0].self_attn for m in (model, old))
        assert torch.equal(now.q_proj.weight_global_scale, now.k_proj.weight_global_scale)
        assert not torch.equal(now.q_proj.weight_global_scale, was.q_proj.weight_global_scale)
    again = dq.correct(model, reference, text, rank=0, norms=True, steps=1, rate=1e-9, progress=False)
    assert again.before == pytest.approx(report.after, rel=1e-3)  # what the stand-ins measured is what the layers do
    model.save_pretrained(tmp_path)
    with torch.no_grad():
        assert torch.equal(type(model).from_pretrained(tmp_path)(text.ids).logits, model(text.ids).logits)


def test_a_second_correction_remembers_the_first(llm, tiny, text):
    model = quantized(llm, tiny, "w4a4-int4", text)
    for rank in (2, 3):
        dq.correct(model, llm.decoder(), text, rank=rank, steps=10, rate=5e-3, progress=False)
    entry = model.dq_artifact["correction"]
    assert entry["rank"] == 3 and entry["earlier"]["rank"] == 2
    assert model.model.layers[0].mlp.up_proj.config.rank == 5


def test_records_side_by_side_are_the_same_loss(llm, tiny, text):
    one, four = (quantized(llm, tiny, "w4a4-int4", text) for _ in range(2))
    options = dict(rank=2, steps=3, batch=4, progress=False)
    found = [dq.correct(m, llm.decoder(), text, micro_batch=n, **options) for m, n in ((one, 1), (four, 4))]
    assert found[0].history == pytest.approx(found[1].history, rel=1e-4)
    assert found[0].before == pytest.approx(found[1].before, rel=1e-4)


def test_an_interruption_changes_nothing(llm, tiny, text):
    class Bar:
        def __init__(self, *args, **kwargs): ...
        def __enter__(self):
            return self

        def __exit__(self, *problem): ...
        def update(self, count):
            self.seen = getattr(self, "seen", 0) + count
            if self.seen == 2:
                raise KeyboardInterrupt

    model = quantized(llm, tiny, "w4a4-nvfp4", text)
    before = digest(model)
    with pytest.raises(KeyboardInterrupt):
        dq.correct(model, llm.decoder(), text, norms=True, scales=True, rate=1e-2, steps=5, progress=Bar)
    assert digest(model) == before and not any(isinstance(m, Corrected) for m in model.modules())


def test_chosen_layers_only(llm, tiny, text):
    model = quantized(llm, tiny, "w4a4-int4", text)
    report = dq.correct(model, llm.decoder(), text, rank=2, steps=3, layers=["down_proj"], progress=False)
    assert set(report.layers) == {f"model.layers.{i}.mlp.down_proj" for i in (0, 1)}
    assert model.model.layers[0].mlp.up_proj.config.rank == 0


def test_nothing_gained_changes_nothing(llm, tiny, text):
    model = quantized(llm, tiny, "w4a4-int4", text)
    before = digest(model)
    report = dq.correct(model, llm.decoder(), text, rank=2, steps=3, rate=30.0, progress=False)
    assert not report.changed and report.after == report.before and "nothing was gained" in str(report)
    assert digest(model) == before


def test_a_failure_changes_nothing(llm, tiny, text):
    model = quantized(llm, tiny, "w4a4-int4", text)
    before = digest(model)
    with pytest.raises(dq.DQError, match="the loss is nan at step"):
        dq.correct(model, llm.decoder(), text, rank=2, steps=5, rate=1e30, progress=False)
    assert digest(model) == before and not any(isinstance(m, Corrected) for m in model.modules())
    with pytest.raises(dq.DQError, match="another model"):
        dq.correct(model, llm.decoder(vocab_size=200), text, progress=False)
    with pytest.raises(dq.DQError, match=r"reference is a Qwen2ForCausalLM.*Give the 16-bit one"):
        dq.correct(model, llm.decoder("Qwen2"), text, progress=False)
    assert digest(model) == before


@pytest.mark.parametrize(
    ("change", "match"),
    [
        (dict(reference=None), "its reference is a NoneType"),
        (dict(calibration=None), "a correction learns from text"),
        (dict(calibration=[]), "calibration is empty"),
        (dict(calibration=[dict(inputs_embeds=torch.full((1, 4, 64), torch.nan))] * 2), "record 0 holds NaN or Inf"),
        (dict(rank=0), "nothing is to learn"),
        (dict(norms=1), "norms is True or False"),
        (dict(micro_batch=0), "micro_batch must be at least 1"),
        (dict(rate=0.0), "rate is a number above 0"),
        (dict(layers=["up_porj"]), r"matches no quantized linear; did you mean"),
        (dict(layers="up_proj"), "layers takes a list of patterns"),
        (dict(calibration=[dict(input_ids=torch.arange(3, 9)[None])]), "at least two calibration records"),
    ],
)
def test_what_is_refused(llm, tiny, text, change, match):
    model = quantized(llm, tiny, "int8", text)
    given = dict(reference=llm.decoder(), calibration=text, progress=False) | change
    with pytest.raises(dq.DQError, match=match):
        dq.correct(model, **given)


def test_models_that_are_refused(llm, tiny, text):
    model = quantized(llm, tiny, "int8", text)
    with pytest.raises(dq.DQError, match="nothing in LlamaForCausalLM is quantized"):
        dq.correct(llm.decoder(), llm.decoder(), text)
    with pytest.raises(dq.DQError, match="the reference of a correction is the 16-bit model"):
        dq.correct(model, model, text)
    broken = llm.decoder()
    broken.model.layers[0].mlp.up_proj.weight.data[0] = torch.nan
    with pytest.raises(dq.DQError, match="of its reference hold NaN or Inf"):
        dq.correct(model, broken, text, progress=False)


@pytest.mark.parametrize(
    ("recipe", "changed", "refused"),
    [
        ("w4a4-int4", (), ""),
        ("w4a4-int4", ("all",), r"model\.embed_tokens\.weight and 6 more of the 7 tensors"),
        ("w4a4-int4", ("model.norm.weight",), r"model\.norm\.weight of the 7 tensors"),
        ("w4a4-int4", ("model.layers.0.mlp.up_proj.weight",), ""),  # its codes cannot tell
        ("w4a4-int4-quarot", (), ""),  # rotated: nothing is as it was
        ("int8-smooth-fold", (), ""),
        ("int8-smooth-fold", ("all",), "and 6 more of the 7 tensors"),
    ],
)
def test_another_model_of_the_same_shape_is_no_reference(llm, tiny, text, recipe, changed, refused):
    """Another initialisation, a fine-tune; but not what folding or rewriting did to the model itself."""
    model, reference = quantized(llm, tiny, recipe, text), llm.decoder(seed=1 if "all" in changed else 0)
    if recipe.endswith("fold"):
        dq.fold(model)
    for name in set(changed) - {"all"}:
        reference.get_parameter(name).data[0] *= 1.01
    options = dict(rank=2, steps=1, progress=False)
    if refused:
        with pytest.raises(dq.DQError, match=f"{refused}.*another model.*any_reference=True"):
            dq.correct(model, reference, text, **options)
        dq.correct(model, reference, text, any_reference=True, **options)
    else:
        dq.correct(model, reference.to(torch.float64), text, **options)  # in another dtype it is the same model


def test_experts_are_corrected_too(llm, tiny, text, tmp_path):
    kinds = dict(num_experts=4, num_experts_per_tok=2, moe_intermediate_size=48)
    model = llm.decoder("Qwen3Moe", **kinds)
    dq.quantize(model, tiny.recipe("w4a16"), progress=False)
    report = dq.correct(model, llm.decoder("Qwen3Moe", **kinds), text, rank=4, steps=10, rate=5e-3, progress=False)
    assert report.changed and any(".experts." in n for n in report.layers)
    model.save_pretrained(tmp_path)
    with torch.no_grad():
        assert torch.equal(type(model).from_pretrained(tmp_path)(text.ids).logits, model(text.ids).logits)
