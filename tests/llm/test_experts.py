"""Mixtures whose experts transformers keeps in one tensor: opened without a change of the function, quantized one by
one, saved, loaded, stacked again; exported under the names of their files."""

import copy
import json
import re

import pytest
import torch
from torch import nn

import dq
from dq.pipelines.experts import OpenedExperts, opened, opened_layers, stacked_layers
from dq.records import digest

EXPERTS = dict(num_experts=4, num_experts_per_tok=2, moe_intermediate_size=48)
KINDS = {
    "Qwen3Moe": EXPERTS,
    "Qwen2Moe": EXPERTS | dict(shared_expert_intermediate_size=32),
    "Mixtral": dict(num_local_experts=4, num_experts_per_tok=2),
    "GptOss": dict(num_local_experts=4, num_experts_per_tok=2, layer_types=["full_attention"] * 2,
                   rope_parameters={"rope_type": "default", "rope_theta": 1e4}),
    "Olmoe": dict(num_experts=4, num_experts_per_tok=2),
}  # fmt: skip
every_kind = pytest.mark.parametrize("kind", KINDS)
IDS = torch.randint(3, 120, (2, 24), generator=torch.Generator().manual_seed(0))


@pytest.fixture
def mixture(llm):
    return lambda kind="Qwen3Moe", **changes: llm.decoder(kind, **KINDS[kind] | changes)


@pytest.fixture
def text(llm):
    return dq.Text(llm.text, llm.tokenizer(), samples=8, length=32)


@torch.no_grad()
def logits(model):
    return model(IDS).logits


@every_kind
@pytest.mark.parametrize("implementation", ["eager", "grouped_mm", "batched_mm"])
def test_opening_changes_nothing(mixture, kind, implementation):
    """Against transformers' own three ways to run experts; and the layers afterwards are the very ones from before."""
    model = mixture(kind)
    model.set_experts_implementation(implementation)
    before, layers, sums = logits(model), stacked_layers(model), digest(model)
    assert len(layers) == 2
    with opened([model]):
        assert not stacked_layers(model) and len(opened_layers(model)) == 2
        assert torch.allclose(logits(model), before, atol=2e-5)
    assert all(a is b for a, b in zip(layers.values(), stacked_layers(model).values(), strict=True))
    assert digest(model) == sums


def test_opened_experts_share_the_memory_of_the_stack(mixture):
    model = mixture()
    layer = next(iter(stacked_layers(model).values()))
    open_ = OpenedExperts(layer)
    first = getattr(open_, "2").gate_proj.weight
    assert first.untyped_storage().data_ptr() == layer.gate_up_proj.untyped_storage().data_ptr()
    assert torch.equal(first, layer.gate_up_proj[2, :48])
    assert torch.equal(getattr(open_, "2").up_proj.weight, layer.gate_up_proj[2, 48:])


@torch.no_grad()
def test_no_tokens_and_no_expert(mixture):
    """An empty batch; and the index beyond the last expert, which stands for an expert on another device."""
    layer = next(iter(stacked_layers(mixture()).values()))
    open_, none = OpenedExperts(layer), torch.zeros(0, 2, dtype=torch.long)
    assert open_(torch.zeros(0, 64), none, torch.zeros(0, 2)).shape == (0, 64)
    x, where = torch.randn(3, 64), torch.tensor([[0, 4], [4, 4], [2, 1]])
    weights = torch.rand(3, 2)
    y = open_(x, where, weights)
    assert (y[1] == 0).all()
    alone = open_(x[:1], torch.tensor([[0]]), weights[:1, :1])
    assert torch.allclose(y[:1], alone, atol=1e-6)


@every_kind
def test_quantized_saved_loaded_and_stacked_again(mixture, tiny, text, kind, tmp_path):
    model = mixture(kind)
    exact = logits(model)
    report = dq.quantize(model, tiny.recipe("w4a16-gptq"), calibration=text, progress=False)
    assert not report.plan.family.assumed or kind == "Olmoe"
    experts = [m for n, m in model.named_modules() if ".experts." in n and isinstance(m, nn.Linear)]
    assert len(experts) == 2 * 4 * (2 if kind == "GptOss" else 3)
    assert all(type(m) is dq.QuantizedLinear for m in experts)
    assert not [n for n, p in model.named_parameters() if p.dim() == 3]  # nothing holds the stack any more
    routers = [n for n, m in model.named_modules() if n.endswith((".mlp.gate", ".router", "shared_expert_gate"))]
    assert routers and not any(isinstance(model.get_submodule(n), dq.QuantizedLinear) for n in routers)
    expected = logits(model)
    assert 0 < float((expected - exact).norm() / exact.norm()) < 0.4
    assert torch.equal(logits(copy.deepcopy(model)), expected)
    model.save_pretrained(tmp_path / "a")
    again = type(model).from_pretrained(tmp_path / "a")
    assert torch.equal(logits(again), expected)
    again.save_pretrained(tmp_path / "b")
    third = type(model).from_pretrained(tmp_path / "b")
    assert torch.equal(logits(third), expected)
    dq.dequantize(third)
    assert len(stacked_layers(third)) == 2 and not opened_layers(third)
    wide = logits(third)
    assert torch.allclose(wide, expected, atol=1e-4)
    third.save_pretrained(tmp_path / "c")
    assert torch.equal(logits(type(model).from_pretrained(tmp_path / "c")), wide)


def test_every_expert_has_its_own_scales_and_statistics(mixture, tiny, text):
    """Two experts with equal weights are rounded differently, because the router sends them other tokens."""
    model = mixture()
    for layer in stacked_layers(model).values():
        with torch.no_grad():
            layer.gate_up_proj[1] = layer.gate_up_proj[0]
            layer.down_proj[3] *= 100
    dq.quantize(model, tiny.recipe("w4a16-gptq"), calibration=text, progress=False)
    layer = model.model.layers[0].mlp.experts
    assert not torch.equal(getattr(layer, "0").gate_proj.qweight, getattr(layer, "1").gate_proj.qweight)
    small, large = (getattr(layer, i).down_proj.weight_scale.float().mean() for i in "23")
    assert large > 30 * small


def test_an_idle_expert_is_rounded_to_nearest_and_named(mixture, tiny, text):
    model = mixture()
    with torch.no_grad():
        block = model.model.layers[0]
        model.model.embed_tokens.weight.abs_()  # with no attention, all that the router sees is above 0
        block.self_attn.o_proj.weight.zero_()
        block.mlp.gate.weight[2] = -1e4
    with pytest.warns(UserWarning, match=r"layers\.0\.mlp\.experts\.2\..* saw 0 tokens.*: rounded to nearest"):
        dq.quantize(model, tiny.recipe("w4a16-gptq"), calibration=text, progress=False)
    assert type(getattr(model.model.layers[0].mlp.experts, "2").gate_proj) is dq.QuantizedLinear


def test_kept_experts_stay_stacked(mixture, tiny, tmp_path):
    """All of them, if none is quantized; opened with weights of their own, if some are."""
    model = mixture()
    dq.quantize(model, tiny.recipe("w4a16"), skip=["experts"], progress=False)
    assert len(stacked_layers(model)) == 2
    model.save_pretrained(tmp_path / "a")
    assert torch.equal(logits(type(model).from_pretrained(tmp_path / "a")), logits(model))
    some = mixture()
    dq.quantize(some, tiny.recipe("w4a16"), skip=["layers.1.mlp.experts", "experts.3.down_proj"], progress=False)
    kept = getattr(some.model.layers[1].mlp.experts, "0").gate_proj
    assert type(kept) is nn.Linear and kept.weight.untyped_storage().nbytes() == kept.weight.nbytes
    some.save_pretrained(tmp_path / "b")
    assert torch.equal(logits(type(some).from_pretrained(tmp_path / "b")), logits(some))


def test_a_failure_leaves_the_stack(mixture, tiny):
    model = mixture()
    before = digest(model)
    with pytest.raises(dq.DQError, match="needs calibration"):
        dq.quantize(model, tiny.recipe("w4a16-gptq"), progress=False)
    assert digest(model) == before and len(stacked_layers(model)) == 2
    model.model.layers[1].mlp.experts.down_proj.data[2, 0, 0] = float("nan")
    with pytest.raises(dq.DQError, match=r"layers\.1\.mlp\.experts\.2\.down_proj\.weight holds 1 NaN"):
        dq.quantize(model, tiny.recipe("int8"), progress=False)
    assert len(stacked_layers(model)) == 2
    dq.plan(model, tiny.recipe("int8"))
    assert len(stacked_layers(model)) == 2


def test_layers_that_cannot_be_opened_are_named(llm, tiny):
    """Llama 4 runs all experts on sorted tokens: another form, which stays in 16 bits, and the plan says so."""
    from transformers import Llama4ForCausalLM, Llama4TextConfig

    torch.manual_seed(0)
    config = Llama4TextConfig(
        vocab_size=128, hidden_size=64, intermediate_size=32, intermediate_size_mlp=64, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=2, head_dim=16, num_local_experts=2, interleave_moe_layer_step=1,
        pad_token_id=0,
    )  # fmt: skip
    text = str(dq.plan(Llama4ForCausalLM(config), tiny.recipe("int8")))
    assert "4 stacked expert weights" in text and "Llama4TextExperts is no layer that dq opens" in text


@pytest.mark.parametrize("place", ["mlp", "mlp.experts", "mlp.gate"])
def test_rotations_refuse_mixtures_with_more_in_them(mixture, tiny, place):
    model = mixture()
    model.model.layers[1].get_submodule(place).add_module("more", nn.Linear(64, 64))
    before = digest(model)
    with pytest.raises(dq.DQError, match=r"layers\.1\.mlp\..* is unknown to the rewrites"):
        dq.quantize(model, tiny.recipe("w4a4-int4-quarot"), progress=False)
    assert digest(model) == before and len(stacked_layers(model)) == 2


def plain(tiny, weights, **more):
    return dq.Recipe.from_dict({"name": "t", "linear": {"weights": weights}, **more}).with_(min_features=16)


@pytest.mark.parametrize("kind", ["Qwen3Moe", "Mixtral"])
def test_exported_by_the_names_of_their_files(mixture, tiny, kind, tmp_path):
    """INT4 experts load in transformers and give our function up to its 16-bit scales; and come back as ours."""
    pytest.importorskip("compressed_tensors", reason="needs compressed-tensors, see the extra interop")
    model = mixture(kind, **({"moe_intermediate_size": 64} if kind == "Qwen3Moe" else {}))
    dq.quantize(model, plain(tiny, "int4/group32"), progress=False)
    out = dq.export(model, tmp_path / "out")
    from safetensors.torch import load_file

    name = {"Qwen3Moe": "mlp.experts.3.gate_proj", "Mixtral": "block_sparse_moe.experts.3.w1"}[kind]
    assert f"model.layers.1.{name}.weight_packed" in load_file(out / "model.safetensors")
    assert torch.equal(logits(dq.load_exported(out)), logits(model))
    theirs = type(model).from_pretrained(out, dtype=torch.float32)
    assert float((logits(theirs) - logits(model)).norm() / logits(model).norm()) < 2e-3


def test_mixed_grids_name_the_experts_by_one_pattern(mixture, tiny, tmp_path):
    """transformers finds the scheme of the experts by it: FP8 attention beside INT4 experts."""
    pytest.importorskip("compressed_tensors", reason="needs compressed-tensors, see the extra interop")
    model = mixture("Mixtral")
    rules = [{"match": "self_attn", "weights": "fp8_e4m3/channel"}]
    dq.quantize(model, plain(tiny, "int4/group32", rules=rules), progress=False)
    out = dq.export(model, tmp_path / "out")
    groups = json.loads((out / "config.json").read_text())["quantization_config"]["config_groups"]
    assert sorted(len(g["targets"]) for g in groups.values()) == [1, 8]
    assert torch.equal(logits(dq.load_exported(out)), logits(model))
    from transformers.integrations import compressed_tensors as reader

    if not hasattr(reader, "get_experts_scheme"):  # older versions take one scheme for the whole file
        return
    theirs = type(model).from_pretrained(out, dtype=torch.float32)
    assert float((logits(theirs) - logits(model)).norm() / logits(model).norm()) < 2e-3


@pytest.mark.parametrize(
    ("weights", "skip", "match"),
    [
        ("int8/channel", [], None),
        ("nvfp4", [], "decodes NVFP4 experts without their second-level scale.*nvfp4-single has none"),
        ("nvfp4-single", [], None),
        ("int4/group32", ["experts"], "takes all experts for quantized"),
        ("int4/group32", ["experts.2"], "takes all experts for quantized"),
        ("fp8_e4m3/channel", ["experts"], None),
    ],
)
def test_what_transformers_does_not_read_is_said(mixture, tiny, weights, skip, match, tmp_path, recwarn):
    model = mixture(moe_intermediate_size=64)
    dq.quantize(model, plain(tiny, weights), skip=skip, progress=False)
    out = dq.export(model, tmp_path / "out")
    said = [str(w.message) for w in recwarn if "transformers (seen" in str(w.message)]
    assert bool(said) == bool(match) and all(re.search(match, s) for s in said)
    assert torch.allclose(logits(dq.load_exported(out)), logits(model), atol=1e-5)


@pytest.mark.parametrize("grid", [("int8/channel", "int8/token"), ("nvfp4-single", "")])
def test_the_ways_that_are_named_are_read(mixture, tiny, grid, tmp_path, recwarn):
    """INT8 experts weight-only, NVFP4 experts of one level: transformers' values are ours."""
    pytest.importorskip("compressed_tensors", reason="needs compressed-tensors, see the extra interop")
    model, (weights, acts) = mixture(moe_intermediate_size=64), grid
    linear = {"weights": weights} | ({"activations": acts} if acts else {})
    dq.quantize(model, dq.Recipe.from_dict({"name": "t", "linear": linear}).with_(min_features=16), progress=False)
    out = dq.export(model, tmp_path / "out", weight_only=True)
    assert not [w for w in recwarn if "transformers (seen" in str(w.message)]
    dtype, bound = (torch.float32, 1e-6) if acts else (torch.bfloat16, 0.05)  # it decodes NVFP4 to bfloat16 only
    theirs, ours = type(model).from_pretrained(out, dtype=dtype), dq.load_exported(out)
    assert float((logits(theirs) - logits(ours)).norm() / logits(ours).norm()) < bound


def test_interleaved_experts_are_not_exported(mixture, tiny, tmp_path):
    model = mixture("GptOss")
    dq.quantize(model, plain(tiny, "int4/group32"), progress=False)
    with pytest.raises(dq.DQError, match=r"gate_up_proj .*: gate and up .* skip=\['experts'\]"):
        dq.export(model, tmp_path / "out")
    rest = mixture("GptOss")
    dq.quantize(rest, plain(tiny, "fp8_e4m3/channel"), skip=["experts"], progress=False)
    assert torch.equal(logits(dq.load_exported(dq.export(rest, tmp_path / "rest"))), logits(rest))
