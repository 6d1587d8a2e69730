"""R1, R2 and R3: a decoder computes what it did, and its stream has no outlier channels left."""

import pytest
import torch

from dq.registry import DQError
from dq.rewrites import REWRITES, rewrite
from dq.rewrites.decoder import decoder_structure
from dq.rewrites.quarot import after_rope, random_rotation, rotate_heads

EXACT = 1e-8
KINDS = [
    ("Llama", {}),
    ("Llama", {"attention_bias": True, "mlp_bias": True, "tie_word_embeddings": True}),
    ("Llama", {"num_key_value_heads": 4}),
    ("Llama", {"hidden_size": 44, "head_dim": 12}),  # no Hadamard matrix of 44: a random orthogonal one
    ("Qwen2", {}),
    ("Qwen3", {}),
    ("Mistral", {"num_key_value_heads": 1}),
    ("Gemma", {}),
    ("Phi3", {}),
    ("Phi3", {"num_key_value_heads": 4}),
]


@pytest.mark.parametrize(("kind", "changes"), KINDS)
def test_logits_are_unchanged(decoders, kind, changes):
    model = decoders.decoder(kind, **changes)
    expected = decoders.logits(model)
    for names in (["norm_fusion", "r1"], ["r2"]):
        before = {n: p.clone() for n, p in model.named_parameters()}
        rewrite(model, names)
        assert decoders.difference(model, expected) < EXACT
        assert sum(n not in before or not torch.equal(p, before[n]) for n, p in model.named_parameters()) > 3


def test_structure(decoders):
    model = decoders.decoder()
    s = decoder_structure(model)
    assert s.width == 48 and s.embeddings == ("model.embed_tokens",) and s.head == "lm_head"
    assert [n.name for n in s.norms][-1] == "model.norm" and s.norms[-1].consumers == ("lm_head",)
    assert s.norms[0].consumers == tuple(f"model.layers.0.self_attn.{n}_proj" for n in "qkv")
    assert s.writers[:2] == ("model.layers.0.self_attn.o_proj", "model.layers.0.mlp.down_proj")
    assert (s.attentions[1].heads, s.attentions[1].kv_heads, s.attentions[1].head_dim) == (4, 2, 16)


def test_r1_is_the_formula(decoders):
    """E Q, W Q of readers, Q^T W of writers, nothing else."""
    model = decoders.decoder()
    rewrite(model, ["norm_fusion"])
    before = {n: p.clone() for n, p in model.named_parameters()}
    rewrite(model, [("r1", {"seed": 3})])
    q = random_rotation(48, 3)(torch.eye(48, dtype=torch.float64))
    torch.testing.assert_close(q @ q.T, torch.eye(48, dtype=torch.float64))
    for name, p in model.named_parameters():
        w = before[name]
        leaf = name.split(".")[-2]
        if leaf in ("o_proj", "down_proj"):
            w = q.T @ w
        elif p.dim() == 2:
            w = w @ q
        torch.testing.assert_close(p.detach(), w)


def test_r1_wants_norms_without_weights(decoders):
    with pytest.raises(DQError, match=r"layers\.0\.input_layernorm has a weight .* run norm_fusion first"):
        rewrite(decoders.decoder(), ["r1"])


@pytest.mark.parametrize("kind", ["Gemma2", "Gemma3"])
def test_norms_on_the_output_fix_the_stream(decoders, kind):
    """Values can be rotated and norms before linears folded; the stream cannot."""
    model = decoders.decoder(kind)
    expected = decoders.logits(model)
    rewrite(model, ["norm_fusion", "r2"])
    assert decoders.difference(model, expected) < EXACT
    for name in ("r1", "spinquant"):
        with pytest.raises(DQError, match=r"post_attention_layernorm scales what attention adds .* no rotation"):
            rewrite(model, [name], batches=[decoders.tokens()])
    assert decoders.difference(model, expected) < EXACT


def test_only_the_values_of_a_fused_projection_turn(decoders):
    """Rows of Phi-3's qkv_proj: queries, keys, values."""
    model = decoders.decoder("Phi3")
    before = model.model.layers[0].self_attn.qkv_proj.weight.clone()
    rewrite(model, ["r2"])
    after = model.model.layers[0].self_attn.qkv_proj.weight
    assert torch.equal(after[:96], before[:96]) and not torch.allclose(after[96:], before[96:])
    torch.testing.assert_close(after[96:].norm(), before[96:].norm())


def test_models_without_a_head_are_refused(decoders):
    """Their output is the stream itself."""
    with pytest.raises(DQError, match="nothing here reads norm"):
        rewrite(decoders.decoder().model, ["norm_fusion", "r1"])


def test_outlier_channels_of_the_stream_are_spread(decoders):
    model = decoders.decoder()
    model.model.embed_tokens.weight.data[:, [5, 20]] *= 30
    peaks = []
    for names in ([], ["norm_fusion", "r1"]):
        rewrite(model, names)
        h = model.model.embed_tokens.weight
        peaks.append(float((h.abs().amax(1) / h.square().mean(1).sqrt()).mean()))
    assert peaks[0] > 5 and peaks[1] < 3


def test_quantized_outputs_are_better_after_rotation(decoders):
    import dq

    errors = []
    for names in ([], ["norm_fusion", "r1", "r2"]):
        model = decoders.decoder(dtype=torch.float32, exact=False)
        model.model.embed_tokens.weight.data[:, [5, 20]] *= 30
        expected = decoders.logits(model)
        rewrite(model, names)
        dq.quantize(model, dq.Recipe.load("w4a4-int4").with_(min_features=16), progress=False)
        errors.append(decoders.difference(model, expected))
    assert errors[1] < 0.8 * errors[0]


def test_r3_leaves_scores_alone():
    q, k = torch.randn(2, 3, 5, 16, dtype=torch.float64), torch.randn(2, 3, 7, 16, dtype=torch.float64)
    qr, kr = rotate_heads(q, k)
    torch.testing.assert_close(qr @ kr.mT, q @ k.mT)
    assert not torch.allclose(kr, k)
    loud = torch.randn(64, 16)
    loud[:, 3] *= 50
    assert rotate_heads(loud.bfloat16(), loud.bfloat16())[1].dtype == torch.bfloat16
    assert float(rotate_heads(loud, loud)[1].abs().amax()) < float(loud.abs().amax()) / 2


@pytest.mark.parametrize("kind", ["Llama", "Qwen3"])
def test_r3_at_its_hook_point(decoders, monkeypatch, kind):
    import sys

    model = decoders.decoder(kind)
    expected = decoders.logits(model)
    module = sys.modules[type(model).__module__]
    calls = []
    hooked = after_rope(module.apply_rotary_pos_emb)
    monkeypatch.setattr(module, "apply_rotary_pos_emb", lambda *a, **k: calls.append(1) or hooked(*a, **k))
    assert decoders.difference(model, expected) < EXACT
    assert len(calls) == 2


def test_r4_is_the_transform(decoders):
    """A full Sylvester rotation of the last MLP linear's input, in the recipe; 80 = 20 * 4."""
    import dq

    model = decoders.decoder(dtype=torch.float32, exact=False)
    plain = {"weights": "int8/channel", "activations": "int8/token"}
    down = plain | {"match": "*.down_proj", "transforms": [{"name": "rotate", "kind": "sylvester", "size": -1}]}
    recipe = dq.Recipe.from_dict({"name": "r4", "linear": plain, "rules": [down], "min_features": 16})
    expected = decoders.logits(model)
    dq.quantize(model, recipe, progress=False)
    layer = model.model.layers[0].mlp.down_proj
    assert layer.config.steps == (("rotate", {"size": 80, "kind": "sylvester"}),)
    assert decoders.difference(model, expected) < 0.05


def test_unknown_rewrites_are_refused(decoders):
    assert {"norm_fusion", "r1", "r2", "spinquant"} <= set(REWRITES.names())
    with pytest.raises(DQError, match="unknown rewrite 'r9'"):
        rewrite(decoders.decoder(), ["r9"])


@pytest.mark.parametrize(
    ("params", "words"),
    [
        ({"sed": 1}, "takes no parameter 'sed'; did you mean 'seed'"),
        ({"seed": "a"}, "takes seed as int; got 'a'"),
        ({"structure": None}, "takes no parameter 'structure'"),
    ],
)
def test_bad_parameters_are_refused_before_any_work(decoders, params, words):
    model = decoders.decoder()
    with pytest.raises(DQError, match=words):
        rewrite(model, ["norm_fusion", ("r1", params)])
    assert not (model.model.norm.weight == 1).all()
