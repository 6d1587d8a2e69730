"""Decoder families: groups that really share inputs, what stays in 16 bits, ties, save and load, folding."""

from contextlib import nullcontext

import pytest
import torch
from torch import nn

import dq
from dq.family import find_family
from dq.planning import make_plan

# kind -> (family, linears of a block by shared input, beside o_proj and down_proj)
SPLIT = [{"self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"}, {"mlp.gate_proj", "mlp.up_proj"}]
FUSED = [{"self_attn.qkv_proj"}, {"mlp.gate_up_proj"}]
KINDS = {
    "Llama": ("llama", SPLIT),
    "Mistral": ("mistral", SPLIT),
    "Qwen2": ("qwen2", SPLIT),
    "Qwen3": ("qwen3", SPLIT),
    "Gemma": ("gemma", SPLIT),
    "Gemma2": ("gemma", SPLIT),
    "Gemma3": ("gemma", SPLIT),
    "Phi3": ("phi-3", FUSED),
}
every_kind = pytest.mark.parametrize("kind", KINDS)


@every_kind
def test_groups_and_blocks(llm, tiny, kind):
    model = llm.decoder(kind)
    family, groups = KINDS[kind]
    plan = make_plan(model, tiny.recipe("w4a16-gptq"))
    assert plan.family.name == family and not plan.family.assumed
    assert plan.blocks() == ["model.layers.0", "model.layers.1"]
    found = [{m.removeprefix("model.layers.1.") for m in r.members} for r in plan.quantized if r.block[-1:] == "1"]
    assert sorted(map(sorted, found)) == sorted(map(sorted, [*groups, {"self_attn.o_proj"}, {"mlp.down_proj"}]))
    kept = {m: r.reason for r in plan.rows if r.target is None for m in r.members}
    tied = model.config.tie_word_embeddings
    assert kept == {"lm_head": "tied to model.embed_tokens" if tied else "output projection"}


@pytest.mark.parametrize("tied", [False, True])
def test_a_rule_for_the_head(llm, tiny, tied):
    """The head is quantized where a rule says so; a tied one is the embedding, stays, and that is said."""
    model = llm.decoder(tie_word_embeddings=tied)
    rule = {"match": "lm_head", "weights": "int8/channel"}
    recipe = dq.Recipe.from_dict(tiny.recipe("int8").to_dict() | {"rules": [rule]})
    said = r"recipe rule 'lm_head': lm_head stays in 16 bits, for it is tied to model\.embed_tokens"
    with pytest.warns(UserWarning, match=said) if tied else nullcontext():
        dq.quantize(model, recipe, progress=False)
    assert isinstance(model.lm_head, dq.QuantizedLinear) != tied
    assert (model.lm_head.weight is model.model.embed_tokens.weight) == tied


@every_kind
def test_the_base_model_is_known_too(llm, tiny, kind):
    """Without the head, as an encoder of a pipeline holds it, module names lack their first part."""
    model = llm.decoder(kind).model
    plan = make_plan(model, tiny.recipe("w4a16"))
    assert plan.family.name == KINDS[kind][0] and plan.blocks() == ["layers.0", "layers.1"]
    assert sorted(len(r.members) for r in plan.quantized) == sorted(2 * [len(g) for g in (*KINDS[kind][1], "o", "d")])


@every_kind
@pytest.mark.filterwarnings("error:.*do not receive the same input")
def test_calibrated_saved_and_loaded(llm, tiny, kind, tmp_path):
    model = llm.decoder(kind)
    tied = model.config.tie_word_embeddings
    text = dq.Text(llm.text, llm.tokenizer(), samples=4, length=32)
    dq.quantize(model, tiny.recipe("w4a16-gptq"), calibration=text, progress=False)
    expected = model(text.ids).logits
    model.save_pretrained(tmp_path)
    again = type(model).from_pretrained(tmp_path)
    assert torch.equal(again(text.ids).logits, expected)
    assert (again.lm_head.weight is again.model.embed_tokens.weight) == tied
    assert (model.lm_head.weight is model.model.embed_tokens.weight) == tied
    assert type(again.lm_head) is nn.Linear


@pytest.mark.parametrize("kind", ["Llama", "Qwen3", "Gemma2", "Phi3"])
@torch.no_grad()
def test_smoothing_folds_where_the_family_says(llm, tiny, kind):
    """Norms take the factor of what reads them (not those of 1 + weight); nothing is folded through queries."""
    model = llm.decoder(kind)
    text = dq.Text(llm.text, llm.tokenizer(), samples=4, length=32)
    dq.quantize(model, tiny.recipe("int8-smooth"), calibration=text, progress=False)
    before = model(text.ids).logits
    folded = dq.fold(model)
    first = KINDS[kind][1][0]
    done = {n.removeprefix("model.layers.0.") for n in folded.layers if "layers.0" in n}
    assert done >= {"mlp.down_proj"} and (first <= done) == (kind != "Gemma2")
    assert "self_attn.o_proj" not in done
    assert float((model(text.ids).logits - before).norm() / before.norm()) < 0.05


def test_unknown_decoders_are_detected(llm, tiny):
    """OLMo: names of the field, no family of its own."""
    model = llm.decoder("Olmo2")
    family = find_family(model)
    assert family.name == "detected" and family.blocks == ("model.layers.*",)
    assert len(family.inputs) == 2
    report = dq.quantize(model, tiny.recipe("w4a16"), progress=False)
    assert len(report.layers) == 14


class Experts(nn.Module):
    """A router that sends every token to expert 0, and a few to expert 1; expert 2 is idle."""

    def __init__(self, few: int):
        super().__init__()
        self.few, self.shared = few, nn.Linear(64, 64)
        self.experts = nn.ModuleList(nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 64)) for _ in range(3))

    def forward(self, x):
        y = self.experts[0](self.shared(x))
        return torch.cat([y[: self.few] + self.experts[1](x[: self.few]), y[self.few :]])


@pytest.mark.parametrize("preset", ["w4a16-gptq", "w4a4-nvfp4-arc", "int8-smooth", "w4a16-awq", "w4a4-auto"])
@pytest.mark.filterwarnings("ignore:.*this expert saw")
@torch.no_grad()
def test_experts_without_tokens_fall_back_loudly(tiny, preset):
    model, x = Experts(few=3), torch.randn(256, 64)
    with pytest.warns(UserWarning, match=r"experts\.2\.0.* saw 0 tokens.*: rounded to nearest"):
        report = dq.quantize(model, tiny.recipe(preset), calibration=[dict(x=x)], progress=False)
    assert all(isinstance(m, dq.QuantizedLinear) for m in model.experts.modules() if isinstance(m, nn.Linear))
    assert len(report.layers) == 6 and model(x).isfinite().all()
    assert all(expert(x).isfinite().all() for expert in model.experts)
    assert not any(name == "smooth" for name, _ in model.experts[1][0].config.steps)


def test_other_layers_without_tokens_are_still_refused(tiny):
    net = nn.ModuleDict(dict(used=nn.Linear(64, 48), idle=nn.Linear(64, 48)))
    net.forward = lambda x: net["used"](x)
    with pytest.raises(dq.DQError, match=r"^idle: no calibration input reached this layer"):
        dq.quantize(net, tiny.recipe("w4a16-gptq"), calibration=[dict(x=torch.randn(64, 64))], progress=False)


def test_sequential_calibration(llm, tiny):
    """Blocks see what quantized blocks give: other weights after the first block; `linears`: after the first linear,
    and nearer to the 16-bit model; and the artifact says so."""
    text = dq.Text(llm.text, llm.tokenizer(), samples=4, length=32)
    made = {}
    for way in (False, True, "linears"):
        made[way] = llm.decoder()
        dq.quantize(made[way], tiny.recipe("w4a16-gptq"), calibration=text, sequential=way, progress=False)
        assert made[way].dq_artifact["calibration"].get("sequential", False) == way

    def same(a, b, leaf):
        pairs = zip(made[a].model.layers, made[b].model.layers, strict=True)
        return [torch.equal(x.get_submodule(leaf).qweight, y.get_submodule(leaf).qweight) for x, y in pairs]

    assert same(False, True, "mlp.down_proj") == [True, False] == same(True, "linears", "self_attn.q_proj")
    assert same(True, "linears", "mlp.down_proj") == [False, False]
    with pytest.raises(dq.DQError, match="sequential is True, False or 'linears', got 'linear'"):
        dq.quantize(llm.decoder(), "int8", sequential="linear")
