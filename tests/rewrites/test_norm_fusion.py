"""Norm weights folded into linears: RMSNorm, RMSNorm of 1 + weight, LayerNorm, and tied embeddings."""

import pytest
import torch
from torch import nn

from dq.registry import DQError
from dq.rewrites import Norm, Structure, rewrite
from dq.rewrites.decoder import decoder_structure
from dq.rewrites.norm_fusion import norm_scale

EXACT = 1e-8


class LayerNormModel(nn.Module):
    """Two embeddings, a block of one MLP, a final norm and a head; half of the linears without a bias."""

    def __init__(self, d=24):
        super().__init__()
        self.tokens, self.places = nn.Embedding(31, d), nn.Embedding(16, d)
        self.norm, self.up, self.down = nn.LayerNorm(d), nn.Linear(d, 40, bias=False), nn.Linear(40, d)
        self.last, self.head = nn.LayerNorm(d), nn.Linear(d, 31)

    def forward(self, ids):
        h = self.tokens(ids) + self.places.weight[: ids.shape[-1]]
        h = h + self.down(torch.nn.functional.gelu(self.up(self.norm(h))))
        return self.head(self.last(h))


LAYERS = Structure(24, ("tokens", "places"), (Norm("norm", ("up",)), Norm("last", ("head",))), ("down",), (), "head")


def layer_model():
    torch.manual_seed(0)
    model = LayerNormModel().double().eval()
    with torch.no_grad():
        for norm in (model.norm, model.last):
            norm.weight.uniform_(0.5, 1.5)
            norm.bias.normal_()
        model.tokens.weight.add_(1.0)  # a mean that the first norm must see removed
    return model


@pytest.mark.parametrize(
    ("kind", "changes"),
    [
        ("Llama", {}),
        ("Llama", {"attention_bias": True, "mlp_bias": True, "tie_word_embeddings": True}),
        ("Qwen2", {}),
        ("Qwen3", {"tie_word_embeddings": True}),
        ("Mistral", {}),
        ("Gemma", {}),
        ("Gemma2", {}),
        ("Gemma3", {}),
        ("Phi3", {}),
    ],
)
def test_logits_are_unchanged(decoders, kind, changes):
    model = decoders.decoder(kind, **changes)
    expected = decoders.logits(model)
    (done,) = rewrite(model, ["norm_fusion"])
    assert done == {
        "name": "norm_fusion",
        "norms": 5,
        "centred": False,
        "untied": bool(changes.get("tie_word_embeddings", "Gemma" in kind)),
    }
    assert decoders.difference(model, expected) < EXACT
    for site in decoder_structure(model, plain=False).norms:
        assert (model.get_submodule(site.name).weight == (0 if "Gemma" in kind else 1)).all(), site.name


@pytest.mark.parametrize("kind", ["Gemma2", "Phi3"])
def test_callers_that_know_only_plain_layers_get_no_others(decoders, kind):
    with pytest.raises(DQError, match="give a Structure"):
        decoder_structure(decoders.decoder(kind))


def test_norms_of_heads_stay(decoders):
    """Qwen3's norms of queries and keys read no stream."""
    model = decoders.decoder("Qwen3")
    before = model.model.layers[0].self_attn.q_norm.weight.clone()
    rewrite(model, ["norm_fusion"])
    assert torch.equal(model.model.layers[0].self_attn.q_norm.weight, before)


def test_the_embedding_of_an_rmsnorm_model_is_not_centred(decoders):
    """Known mistake of others: subtracting the mean of each embedding row changes what an RMSNorm gives."""
    model = decoders.decoder()
    model.model.embed_tokens.weight.data += 1.0
    expected, rows = decoders.logits(model), model.model.embed_tokens.weight.clone()
    rewrite(model, ["norm_fusion"])
    assert torch.equal(model.model.embed_tokens.weight, rows)
    assert decoders.difference(model, expected) < EXACT


def test_one_plus_weight(decoders):
    """Gemma's norms multiply by 1 + weight, and say so only by what they give."""
    model = decoders.decoder("Gemma", dtype=torch.float32, exact=False)
    expected = decoders.logits(model)
    assert norm_scale(model.model.norm, "norm")[0] == "rms+1"
    rewrite(model, ["norm_fusion"])
    assert (model.model.norm.weight == 0).all()
    assert decoders.difference(model, expected) < 1e-4


def test_layer_norms_are_centred_and_replaced():
    model, ids = layer_model(), torch.arange(12).reshape(1, 12)
    expected = model(ids)
    (done,) = rewrite(model, ["norm_fusion"], LAYERS)
    assert done["centred"] and isinstance(model.norm, nn.RMSNorm) and isinstance(model.last, nn.RMSNorm)
    assert model.up.bias is not None  # the norm's bias had to go somewhere
    torch.testing.assert_close(model(ids), expected, rtol=EXACT, atol=EXACT)
    rewrite(model, ["r1"], LAYERS)
    torch.testing.assert_close(model(ids), expected, rtol=EXACT, atol=EXACT)


def test_untied_models_reload(decoders, tmp_path):
    """The config says that the output projection is its own now, so a checkpoint holds it."""
    model = decoders.decoder(tie_word_embeddings=True, exact=False, dtype=torch.float32)
    rewrite(model, ["norm_fusion"])
    model.save_pretrained(tmp_path)
    again = type(model).from_pretrained(tmp_path).eval()
    torch.testing.assert_close(decoders.logits(again), decoders.logits(model))
    assert not torch.equal(again.lm_head.weight, again.model.embed_tokens.weight)


def test_twice_is_once(decoders):
    model = decoders.decoder()
    rewrite(model, ["norm_fusion"])
    before = {n: p.clone() for n, p in model.named_parameters()}
    rewrite(model, ["norm_fusion"])
    assert all(torch.equal(p, before[n]) for n, p in model.named_parameters())


def test_unknown_norms_are_refused():
    model = layer_model()
    model.last = nn.GroupNorm(4, 24).double()
    model.last.forward = lambda h: torch.tanh(h) * model.last.weight
    with pytest.raises(DQError, match=r"last .GroupNorm. is neither an RMSNorm nor a LayerNorm"):
        rewrite(model, ["norm_fusion"], LAYERS)


def test_mixed_norms_are_refused():
    model = layer_model()
    model.last = nn.RMSNorm(24).double()
    with pytest.raises(DQError, match="mixes LayerNorms with RMSNorms"):
        rewrite(model, ["norm_fusion"], LAYERS)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda m: setattr(m.model.layers[0], "post_feedforward_layernorm", nn.LayerNorm(48)), "post_feedforward"),
        (lambda m: setattr(m.model.layers[1].mlp, "router", nn.Linear(48, 2)), "mlp.router is unknown"),
        (lambda m: setattr(m.model.layers[1].mlp, "up_proj", nn.Identity()), "mlp.up_proj is no linear"),
        (lambda m: delattr(m.model, "norm"), "has no model.norm"),
        (lambda m: setattr(m.model, "layers", nn.ModuleList()), "no decoder layers"),
        (lambda m: m.to("meta"), "holds no data"),
    ],
)
def test_models_that_would_change_are_refused(decoders, change, words):
    model = decoders.decoder()
    change(model)
    with pytest.raises(DQError, match=words):
        rewrite(model, ["norm_fusion"])


def test_quantized_models_are_refused(decoders):
    import dq

    model = decoders.decoder(dtype=torch.float32, exact=False)
    dq.quantize(model, dq.Recipe.load("int8").with_(min_features=16), progress=False)
    with pytest.raises(DQError, match="holds no 16-bit weight"):
        rewrite(model, ["norm_fusion"])
