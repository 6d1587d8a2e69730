"""Recipes made for language models: learned rotations, 16-bit outlier channels, smoothing that folds away, and narrow
keys and values."""

from dataclasses import replace

import pytest
import torch

import dq
from dq.planning import make_plan


@pytest.fixture
def text(llm):
    return dq.Text(llm.text, llm.tokenizer(), samples=8, length=32)


def loud(llm, kind="Llama", factor=30.0, **changes):
    return llm.spread(llm.decoder(kind, **changes), factor)


def divergence(llm, model, reference):
    """KL to the 16-bit model on text that calibrated nothing."""
    result = dq.evaluate_text(model, reference, llm.text[::-1], llm.tokenizer(), length=32, limit=8, progress=False)
    return result["candidate"]["kl[32]"].value


def test_learned_rotations_beat_random_ones(llm, tiny, text, tmp_path):
    found = {}
    for preset in ("w4a4-int4-quarot-gptq", "w4a4-int4-spinquant"):
        model = loud(llm)
        dq.quantize(model, tiny.recipe(preset), calibration=text, progress=False)
        found[preset] = divergence(llm, model, loud(llm))
    assert found["w4a4-int4-spinquant"] < found["w4a4-int4-quarot-gptq"]
    down = model.model.layers[0].mlp.down_proj
    assert [name for name, _ in down.config.steps] == ["rotate"]
    model.save_pretrained(tmp_path)
    with torch.no_grad():
        assert torch.equal(type(model).from_pretrained(tmp_path)(text.ids).logits, model(text.ids).logits)


def test_learning_rotations_shows_a_bar(llm, tiny, text):
    """Minutes on a real model: its steps are shown, in front of those of quantization."""
    from tqdm import tqdm

    seen = []

    class Bar(tqdm):
        def __init__(self, *args, **kwargs):
            super().__init__(*args, **kwargs | {"disable": True})
            seen.append([kwargs.get("desc"), kwargs.get("total"), 0])

        def update(self, n=1):
            seen[-1][2] += n

    recipe = tiny.recipe("w4a4-int4-spinquant")
    recipe = recipe.with_(rewrites=(("norm_fusion", ()), ("spinquant", (("steps", 5),))))
    dq.quantize(llm.decoder(), recipe, calibration=text, progress=Bar)
    assert [s[0] for s in seen] == ["spinquant", "w4a4-int4-spinquant"] and seen[0][1:] == [5, 5]
    with pytest.raises(dq.DQError, match="takes no parameter 'progress'"):
        recipe.with_(rewrites=(("spinquant", (("progress", 1),)),))


def test_outlier_channels_in_16_bits(llm, tiny, text, tmp_path):
    """Against plain INT8 on the same model; the channel that is large is the one that leaves, and no other layer has
    one."""
    plain, isolated = loud(llm), loud(llm)
    dq.quantize(plain, tiny.recipe("int8"), progress=False)
    dq.quantize(isolated, tiny.recipe("int8-outliers"), calibration=text, progress=False)
    assert divergence(llm, isolated, loud(llm)) < 0.5 * divergence(llm, plain, loud(llm))
    layer = isolated.model.layers[1].self_attn.q_proj
    assert layer.config.rank == 1 and layer.lowrank_down.argmax() == 3
    assert isolated.model.layers[1].mlp.gate_proj.lowrank_down.argmax() == 5
    isolated.save_pretrained(tmp_path)
    with torch.no_grad():
        assert torch.equal(type(plain).from_pretrained(tmp_path)(text.ids).logits, isolated(text.ids).logits)


WIDE = dict(hidden_size=128, intermediate_size=256, head_dim=32)
PLAIN_W4A16 = {"name": "plain", "linear": {"weights": "uint4/group128"}}


def test_smoothing_that_folds_is_exported(llm, tiny, text, tmp_path):
    """Grouped queries: o_proj is plain, everything else folds, and compressed-tensors takes the whole model."""
    model = loud(llm)
    dq.quantize(model, tiny.recipe("int8-smooth-fold"), calibration=text, progress=False)
    folded = dq.fold(model)
    assert not folded.kept and len(folded.layers) == 12
    with torch.no_grad():
        expected = model(text.ids).logits
        back = dq.load_exported(dq.export(model, tmp_path / "out"))
        assert torch.equal(back(text.ids).logits, expected)
    plain = loud(llm)
    dq.quantize(plain, tiny.recipe("int8"), progress=False)
    assert divergence(llm, model, loud(llm)) < 0.7 * divergence(llm, plain, loud(llm))


def test_smoothquant_with_gptq(llm, tiny, text, tmp_path):
    """W8A8 as it is usually made: smoothed, rounded by GPTQ, nearer to the 16-bit model than rounded to nearest, and
    exported once folded."""
    recipe, found = dq.Recipe.load(tiny.recipe("int8-smooth-fold")), {}
    target = replace(recipe.linear, rounding="gptq")
    both = recipe.with_(
        linear=target, rules=tuple(replace(r, target=replace(r.target, rounding="gptq")) for r in recipe.rules)
    )
    for way, mine in (("nearest", recipe), ("gptq", both)):
        model = loud(llm)
        dq.quantize(model, mine, calibration=text, progress=False)
        found[way] = divergence(llm, model, loud(llm))
    assert found["gptq"] < found["nearest"]
    assert not dq.fold(model).kept
    with torch.no_grad():
        expected = model(text.ids).logits
        assert torch.equal(dq.load(dq.export(model, tmp_path / "out"))(text.ids).logits, expected)


def test_awq_that_folds_is_exported(llm, tiny, text, tmp_path):
    """Into norms, and into the float16 scales of up_proj, which is quantized itself."""
    model = loud(llm, **WIDE)
    dq.quantize(model, tiny.recipe("w4a16-awq-fold"), calibration=text, progress=False)
    with torch.no_grad():
        before = model(text.ids).logits
        with pytest.raises(dq.DQError, match=r"goes through smooth at run time; dq\.fold\(model\) \(--fold\)"):
            dq.export(model, tmp_path / "out")
        folded = dq.fold(model)
        assert not folded.kept and len(folded.layers) == 12
        expected = model(text.ids).logits
        assert float((expected - before).norm() / before.norm()) < 5e-3
        with pytest.warns(UserWarning, match="zero points"):
            back = dq.load_exported(dq.export(model, tmp_path / "out"))
        assert torch.equal(back(text.ids).logits, expected)
    plain = loud(llm, **WIDE)
    dq.quantize(plain, dq.Recipe.from_dict(PLAIN_W4A16).with_(min_features=16), progress=False)
    assert divergence(llm, model, loud(llm, **WIDE)) < 0.7 * divergence(llm, plain, loud(llm, **WIDE))


@pytest.mark.parametrize(("kind", "groups"), [("Llama", 1), ("Phi3", 1), ("Llama", 2), ("Phi3", 2)])
@torch.no_grad()
def test_outputs_fold_into_values_where_each_head_has_its_own(llm, tiny, text, kind, groups, tmp_path):
    model = llm.decoder(kind, num_key_value_heads=4 // groups)
    dq.quantize(model, tiny.recipe("int8-smooth"), calibration=text, progress=False)
    before = model(text.ids).logits
    folded = dq.fold(model)
    own = [n for n in folded.layers if n.endswith("o_proj")]
    assert len(own) == (2 if groups == 1 else 0)
    assert float((model(text.ids).logits - before).norm() / before.norm()) < 0.05
    if groups == 1:
        dq.export(model, tmp_path / "out")
    else:
        assert all("rows are not" in why for n, why in folded.kept.items() if n.endswith("o_proj"))


def test_narrow_keys_and_values_are_quantized(llm):
    """64 rows of grouped queries at a width of 256: no preset's bound of 256 keeps them in 16 bits, one given does."""
    sizes = dict(hidden_size=256, intermediate_size=512, num_attention_heads=8, num_key_value_heads=2, head_dim=32)
    model = llm.decoder(**sizes)
    plan = make_plan(model, "w4a16")
    names = {m.rpartition(".")[2] for row in plan.quantized for m in row.members}
    assert names == {"q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"}
    wide = make_plan(model, dq.Recipe.load("w4a16").with_(min_features=256))
    kept = {m.rpartition(".")[2]: r.reason for r in wide.rows if r.target is None for m in r.members}
    assert kept["k_proj"] == "too small to quantize (64x256, bound 256)"
    assert plan.bytes_after < wide.bytes_after
    other = make_plan(llm.decoder("Olmo2", **sizes), "w4a16")
    assert any("k_proj" in m for row in other.quantized for m in row.members)
    tiny_heads = llm.decoder(**sizes | dict(num_key_value_heads=1))
    kept = {r.reason for r in make_plan(tiny_heads, "w4a16").rows if r.target is None}
    assert "too small to quantize (32x256, bound 64)" in kept


def test_other_models_keep_their_bound():
    from torch import nn

    net = nn.Sequential(nn.Linear(256, 128), nn.Linear(256, 256))
    plan = make_plan(net, "int8")
    assert {r.members[0]: r.reason for r in plan.rows if r.target is None} == {
        "0": "too small to quantize (128x256, bound 256)"
    }
