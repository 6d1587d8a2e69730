"""`dq.export` and `dq.load_exported` without the tools that read the files: layouts, refusals, the way back."""

import importlib.util
import json

import pytest
import torch
from safetensors.torch import load_file

import dq
from dq import cli
from dq.linear import quantized_linears
from dq.recipe import Recipe

IDS = torch.randint(3, 128, (2, 16), generator=torch.Generator().manual_seed(0))
RECORDS = [dict(input_ids=IDS)]
GRIDS = [
    ("fp8_e4m3/channel", "fp8_e4m3/token"), ("fp8_e4m3/channel", None), ("fp8_e4m3/tensor", "fp8_e4m3/token"),
    ("fp8-block", "fp8-block-token"), ("int8/channel", "int8/token"), ("int8/channel", None), ("int4/group32", None),
    ("int4_full/channel", None), ("int3/group32", None), ("int4/group64", "int8/token"), ("nvfp4", None),
    ("nvfp4@sweep", "nvfp4-token"), ("mxfp4", "mxfp4"), ("mxfp4", None), ("mxfp8", "mxfp8"), ("uint4/group32", None),
    ("uint4/channel", None), ("uint8/group32", None),
]  # fmt: skip


def recipe(weights: str, activations: str | None = None, **more) -> Recipe:
    target = {"weights": weights} | ({"activations": activations} if activations else {}) | more
    entry = {"name": "test", "description": "", "linear": target, "modulation": {"weights": weights}}
    return Recipe.from_dict(entry).with_(min_features=16)


@pytest.fixture
def made(tiny):
    def make(weights, activations=None, dtype=torch.float32, recipe_=None, calibration=None, **changes):
        model = tiny.llama(dtype, **{"hidden_size": 128, "intermediate_size": 256} | changes)
        recipe_ = recipe_ or recipe(weights, activations)
        dq.quantize(model, recipe_, calibration=calibration, progress=False)
        return model

    return make


def logits(model):
    with torch.no_grad():
        return model(IDS).logits


def stored(folder):
    return {k: v for f in folder.glob("*.safetensors") for k, v in load_file(f).items()}


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize(("weights", "activations"), GRIDS)
def test_there_and_back(made, tmp_path, weights, activations, tied):
    """The codes come back as they went; so does everything else."""
    model = made(weights, activations, tied=tied)
    out = dq.export(model, tmp_path / "out", calibration=RECORDS)
    back = dq.load_exported(out)
    ours, theirs = quantized_linears(model), quantized_linears(back)
    assert list(ours) == list(theirs)
    for name in ours:
        assert torch.equal(ours[name].qweight, theirs[name].qweight)
        a, b = (x[name].dequantized_weight(torch.float32) for x in (ours, theirs))
        assert torch.allclose(a, b, rtol=1e-6, atol=0)  # NVFP4's second level is stored as its reciprocal
    assert torch.allclose(logits(model), logits(back), atol=1e-5)
    assert (back.lm_head.weight is back.model.embed_tokens.weight) == tied
    assert ("lm_head.weight" in stored(out)) != tied


def test_bytes_shrink_on_disk(made, tmp_path):
    model = made("int4/group32", dtype=torch.bfloat16)
    dq.export(model, tmp_path / "out")
    layers = [k for k in stored(tmp_path / "out") if "proj" in k]
    assert all(stored(tmp_path / "out")[k].dtype != torch.bfloat16 for k in layers)


def test_nvfp4_of_both_conventions(made, tmp_path):
    """compressed-tensors divides by the global scale, modelopt multiplies; fused linears have one."""
    model = made("nvfp4", "nvfp4-token")
    dq.export(model, tmp_path / "ct", calibration=RECORDS)
    dq.export(model, tmp_path / "mo", "modelopt", calibration=RECORDS)
    ct, mo, name = stored(tmp_path / "ct"), stored(tmp_path / "mo"), "model.layers.0.self_attn.q_proj"
    layer = quantized_linears(model)[name]
    assert torch.equal(ct[f"{name}.weight_packed"], mo[f"{name}.weight"])
    assert mo[f"{name}.weight_scale_2"].shape == () and ct[f"{name}.weight_global_scale"].shape == (1,)
    assert torch.equal(mo[f"{name}.weight_scale_2"], layer.weight_global_scale[0])
    assert torch.equal(ct[f"{name}.weight_global_scale"], 1 / layer.weight_global_scale)
    for group in (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj")):
        block = "self_attn" if "q_proj" in group else "mlp"
        for key in ("weight_global_scale", "input_global_scale"):
            values = {ct[f"model.layers.1.{block}.{g}.{key}"].item() for g in group}
            assert len(values) == 1
    top = {}
    hook = layer.register_forward_pre_hook(lambda m, a: top.update(x=a[0].abs().max()))
    logits(model)
    hook.remove()
    assert ct[f"{name}.input_global_scale"].item() == pytest.approx(2688 / top["x"].item())
    assert mo[f"{name}.input_scale"].item() == pytest.approx(top["x"].item() / 2688)
    config = json.loads((tmp_path / "mo" / "hf_quant_config.json").read_text())["quantization"]
    assert config["quant_algo"] == "NVFP4" and config["exclude_modules"] == ["lm_head"]


@pytest.mark.parametrize(("activations", "algorithm"), [(None, "W4A16_NVFP4"), ("nvfp4-token", "NVFP4")])
def test_modelopt_there_and_back(made, tmp_path, activations, algorithm):
    model = made("nvfp4", activations)
    back = dq.load_exported(dq.export(model, tmp_path / "out", "modelopt", calibration=RECORDS))
    assert torch.equal(logits(model), logits(back))
    assert json.loads((tmp_path / "out" / "config.json").read_text())["quantization_config"]["quant_algo"] == algorithm


def test_weight_only(made, tmp_path):
    model = made("nvfp4", "nvfp4-token")
    out = dq.export(model, tmp_path / "out", weight_only=True)
    group = json.loads((out / "config.json").read_text())["quantization_config"]["config_groups"]["group_0"]
    assert group["input_activations"] is None and group["targets"] == ["Linear"]
    back = dq.load_exported(out)
    assert all(x.config.activations is None for x in quantized_linears(back).values())


def test_mixed_schemes_name_their_layers(made, tmp_path):
    from dq.recipe import Rule

    base = recipe("fp8_e4m3/channel", "fp8_e4m3/token")
    mixed = base.with_(rules=(Rule("down_proj", recipe("int4/group32").linear),))
    model = made(None, recipe_=mixed)
    back = dq.load_exported(dq.export(model, tmp_path / "out"))
    config = json.loads((tmp_path / "out" / "config.json").read_text())["quantization_config"]
    assert config["format"] == "mixed-precision" and len(config["config_groups"]) == 2
    assert torch.equal(logits(model), logits(back))


REFUSED = {
    "zero points": (recipe("uint4/group32", "int8/token"), "compressed-tensors", "do not go with activations int8"),
    "nf4": (recipe("nf4"), "compressed-tensors", "weights nf4 have no form there"),
    "grids that do not go together": (recipe("nvfp4", "fp8_e4m3/token"), "compressed-tensors", "only nvfp4"),
    "activations in groups": (recipe("int4/group32", "int4/group32/fp32"), "compressed-tensors", "weight_only=True"),
    "no calibration": (recipe("nvfp4", "nvfp4-token"), "compressed-tensors", "give calibration="),
    "a rotation": (recipe("int4/group32", transforms=["rotate"]), "compressed-tensors", "goes through rotate"),
    "low rank": (recipe("int4/group32", transforms=["lowrank"]), "compressed-tensors", "low-rank branch of rank 8"),
    "modelopt": (recipe("fp8_e4m3/channel"), "modelopt", "only NVFP4 is written"),
}  # fmt: skip


@pytest.mark.parametrize("case", REFUSED)
def test_refusals_name_the_layer_and_write_nothing(made, tmp_path, case):
    plan, kind, words = REFUSED[case]
    model = made(None, recipe_=plan)
    with pytest.raises(
        dq.DQError, match=rf"cannot export to {kind}: model\.layers\.0\.\S+ \(and \d+ more\): .*{words}"
    ):
        dq.export(model, tmp_path / "out", kind)
    assert not (tmp_path / "out").exists()


def test_a_group_that_engines_fuse(made, tmp_path):
    skipped = made("fp8_e4m3/channel")
    dq.dequantize(skipped)
    dq.quantize(skipped, recipe("fp8_e4m3/channel"), skip=["k_proj"], progress=False)
    with pytest.raises(dq.DQError, match=r"q_proj .*k_proj stays in 16 bits, and engines fuse the two"):
        dq.export(skipped, tmp_path / "a")
    model = made("nvfp4")
    model.model.layers[1].mlp.up_proj.weight_global_scale *= 2
    with pytest.raises(dq.DQError, match=r"layers\.1\.mlp\.gate_proj: .*up_proj has another second-level scale"):
        dq.export(model, tmp_path / "b")


def test_what_is_asked_wrongly(made, tiny, tmp_path):
    model = made("int4/group32")
    with pytest.raises(dq.DQError, match="unknown export format 'compressed-tensor'; did you mean"):
        dq.export(model, tmp_path / "out", "compressed-tensor")
    with pytest.raises(dq.DQError, match=r"nothing in LlamaForCausalLM is quantized"):
        dq.export(tiny.llama(), tmp_path / "out")
    with pytest.raises(dq.DQError, match="takes a transformers or diffusers model or a pipeline, got dict"):
        dq.export({}, tmp_path / "out")
    dq.export(model, tmp_path / "out")
    with pytest.raises(dq.DQError, match="holds weights already"):
        dq.export(model, tmp_path / "out")
    with pytest.raises(dq.DQError, match="it is not quantized in a known format"):
        tiny.llama().save_pretrained(tmp_path / "plain")
        dq.load_exported(tmp_path / "plain")
    (tmp_path / "nothing").mkdir()
    with pytest.raises(dq.DQError, match="holds no safetensors file: it is no export"):
        dq.load_exported(tmp_path / "nothing")


@pytest.fixture
def damaged(made, tmp_path):
    """Loads an export after a change to its quantization_config and its tensors."""
    from safetensors.torch import save_file

    out = dq.export(made("int4/group32"), tmp_path / "out")
    said, held = json.loads((out / "config.json").read_text()), load_file(out / "model.safetensors")

    def load(change=lambda config: None, **tensors):
        config = json.loads(json.dumps(said))
        change(config)
        (out / "config.json").write_text(json.dumps(config))
        new = {k: v for k, v in (held | {k.replace("__", "."): v for k, v in tensors.items()}).items() if v is not None}
        save_file(new, out / "model.safetensors", {"format": "pt"})
        return dq.load(out, torch.float32)

    return load


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (dict(transform_config={"config_groups": {}}), "transform_config"),
        (dict(sparsity_config={"format": "sparse-24-bitmask"}), r"sparse weights \(sparse-24-bitmask\)"),
        (dict(config_groups=None), "no config_groups"),
        (dict(config_groups={"group_0": {"targets": ["Linear"], "weights": None}}), "only quantized weights"),
    ],
)
def test_what_others_write_and_dq_does_not_read(damaged, change, reason):
    """Left out without a word, each would make the weights those of another model."""
    with pytest.raises(dq.DQError, match=reason):
        damaged(lambda config: config["quantization_config"].update(change))


def test_asymmetric_activations_are_not_read(damaged):
    inputs = dict(num_bits=8, type="int", strategy="token", dynamic=True, symmetric=False)
    with pytest.raises(dq.DQError, match="asymmetric activations"):
        damaged(
            lambda config: config["quantization_config"]["config_groups"]["group_0"].update(input_activations=inputs)
        )


def test_damaged_exports(damaged):
    """transformers would fill in what is missing, and what has another shape, with random numbers."""
    damaged()
    with pytest.raises(dq.DQError, match=r"it lacks model\.norm\.weight: it is incomplete"):
        damaged(model__norm__weight=None)
    with pytest.raises(dq.DQError, match=r"model\.norm\.weight has the shape \(64,\), the model .* \(128,\)"):
        damaged(model__norm__weight=torch.ones(64))
    with pytest.raises(dq.DQError, match=r"it lacks model\.layers\.2\.input_layernorm\.weight \(and 8 more\)"):
        damaged(lambda config: config.update(num_hidden_layers=3))
    scale = {"model__layers__0__self_attn__q_proj__weight_scale": torch.ones(4, 128)}
    with pytest.raises(dq.DQError, match=r"weight_scale has the shape \(4, 128\), expected \(128, 4\)"):
        damaged(**scale)
    with pytest.raises(dq.DQError, match=r"holds .*weight_packed, but its config\.json has no quantization_config"):
        damaged(lambda config: config.pop("quantization_config"))
    with pytest.warns(UserWarning, match="KV cache of this checkpoint is quantized"):
        damaged(lambda config: config["quantization_config"].update(kv_cache_scheme={"num_bits": 8}))


def test_shards_and_bias(tiny, tmp_path):
    model = tiny.llama(hidden_size=128, intermediate_size=256, attention_bias=True, mlp_bias=True)
    dq.quantize(model, recipe("int4/group32"), progress=False)
    out = dq.export(model, tmp_path / "out", max_shard_size="60KB")
    assert len(list(out.glob("*.safetensors"))) > 2 and (out / "model.safetensors.index.json").is_file()
    assert torch.equal(logits(dq.load_exported(out)), logits(model))


def test_rotations_that_are_in_the_weights(made, tmp_path):
    """QuaRot's R1 and R2 leave nothing to do at run time: such a model is exported, its head no longer tied."""
    from dataclasses import replace

    quarot = Recipe.load("w4a4-int4-quarot").with_(min_features=16)
    fused = replace(recipe("int4/group32"), rewrites=quarot.rewrites)
    model = made(None, recipe_=fused, tied=True)
    out = dq.export(model, tmp_path / "out")
    assert json.loads((out / "config.json").read_text())["tie_word_embeddings"] is False
    assert torch.equal(logits(dq.load_exported(out)), logits(model))
    with pytest.raises(dq.DQError, match=r"layers\.0\.mlp\.down_proj .*: its input goes through rotate at run time$"):
        dq.export(made(None, recipe_=quarot, tied=True), tmp_path / "online", weight_only=True)


def test_folded_smoothing_is_exported(made, tmp_path):
    """Refused with the way out: W8A8 of SmoothQuant, exported after dq.fold; o_proj, which nothing folds for, plain."""
    from dq.recipe import Rule

    plain = Rule("o_proj", recipe("int8/channel", "int8/token").linear)
    smooth = Recipe.load("int8-smooth").with_(min_features=16, rules=(plain,))
    model = made(None, recipe_=smooth, calibration=RECORDS)
    with pytest.raises(dq.DQError, match=r"goes through smooth at run time; dq\.fold\(model\)"):
        dq.export(model, tmp_path / "out")
    dq.fold(model)
    back = dq.load_exported(dq.export(model, tmp_path / "out"))
    assert torch.equal(logits(back), logits(model))


def test_experts_in_one_tensor(tiny, tmp_path):
    """Left in 16 bits, they are written one by one as the files of such models are, and named as not quantized."""
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

    config = Qwen3MoeConfig(
        vocab_size=128, hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=1, head_dim=32, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=32,
        pad_token_id=0, eos_token_id=2,
    )  # fmt: skip
    model = tiny.seeded(lambda: Qwen3MoeForCausalLM(config))
    dq.quantize(model, recipe("int4/group32"), skip=["experts"], progress=False)
    with pytest.warns(UserWarning, match="takes all experts for quantized"):
        out = dq.export(model, tmp_path / "out")
    ignored = json.loads((out / "config.json").read_text())["quantization_config"]["ignore"]
    assert "model.layers.1.mlp.experts.3.up_proj" in ignored and "lm_head" in ignored
    assert torch.equal(logits(dq.load_exported(out)), logits(model))


def test_command(made, tmp_path, capsys):
    model = made("int4/group32", dtype=torch.bfloat16)
    model.save_pretrained(tmp_path / "native")
    (tmp_path / "native" / "tokenizer_config.json").write_text("{}")
    assert cli.main(["export", str(tmp_path / "native"), str(tmp_path / "out"), "--device", "cpu"]) == 0
    assert "compressed-tensors" in capsys.readouterr().out
    assert (tmp_path / "out" / "tokenizer_config.json").is_file()
    assert torch.equal(logits(dq.load_exported(tmp_path / "out")), logits(model))
    assert cli.main(["export", str(tmp_path / "native"), str(tmp_path / "b"), "--format", "ggml"]) == 2
    assert "unknown export format 'ggml'" in capsys.readouterr().err
    assert cli.main(["export", str(tmp_path / "native"), str(tmp_path / "native")]) == 2
    assert "give another folder" in capsys.readouterr().err


@pytest.mark.skipif(importlib.util.find_spec("gguf") is not None, reason="gguf is installed")
def test_gguf_needs_its_package(made, tmp_path):
    with pytest.raises(dq.DQError, match="pip install gguf"):
        dq.export(made("int8/group32"), tmp_path / "out", "gguf")
