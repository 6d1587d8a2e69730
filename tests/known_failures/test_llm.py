"""Failures of quantized language models that users of other tools reported: ties, other tools' weights, the cache."""

import copy
import inspect
import json

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import DynamicCache, LlamaForCausalLM, LlamaModel

import dq
from dq.linear import quantized_linears
from dq.recipe import Recipe

IDS = torch.tensor([[5, 9, 77, 3, 21], [1, 2, 3, 4, 5]])
ARGUMENT = "cache" if "cache" in inspect.signature(LlamaModel.forward).parameters else "past_key_values"
EXPORTS = [
    ("fp8_e4m3/channel", "compressed-tensors"), ("int8/channel", "compressed-tensors"),
    ("int4/group32", "compressed-tensors"), ("nvfp4", "compressed-tensors"), ("mxfp4", "compressed-tensors"),
    ("nvfp4", "modelopt"),
]  # fmt: skip


def plain(weights: str) -> Recipe:
    entry = {"name": "test", "description": "", "linear": {"weights": weights}, "modulation": {"weights": weights}}
    return Recipe.from_dict(entry).with_(min_features=16)


def quantized(tiny, weights: str, dtype=torch.float32, **changes):
    model = tiny.llama(dtype, **changes)
    dq.quantize(model, plain(weights), progress=False)
    return model


def logits(model, ids=IDS):
    with torch.no_grad():
        return model(ids).logits


def stored(folder):
    return {k: v for f in folder.glob("*.safetensors") for k, v in load_file(f).items()}


@pytest.mark.parametrize(("weights", "kind"), EXPORTS)
def test_F55_tied_embeddings_are_exported_once(tiny, tmp_path, weights, kind):
    """The head of a tied model is neither written nor listed as a matrix of its own, and comes back tied."""
    model = quantized(tiny, weights, tied=True)
    dq.export(model, tmp_path / "out", kind)
    tensors = stored(tmp_path / "out")
    assert "model.embed_tokens.weight" in tensors and not any(k.startswith("lm_head") for k in tensors)
    assert json.loads((tmp_path / "out" / "config.json").read_text())["tie_word_embeddings"] is True
    back = dq.load_exported(tmp_path / "out")
    assert back.lm_head.weight is back.model.embed_tokens.weight
    assert torch.allclose(logits(back), logits(model), atol=1e-5)


def test_F55_an_imported_model_is_saved_and_loaded_again(tiny, tmp_path):
    """Export, import, save, load: four forms of one model, the tie in all of them."""
    model = quantized(tiny, "int4/group32", tied=True)
    back = dq.load_exported(dq.export(model, tmp_path / "out"))
    back.save_pretrained(tmp_path / "native")
    again = LlamaForCausalLM.from_pretrained(tmp_path / "native")
    for m in (back, again, copy.deepcopy(again)):
        assert m.lm_head.weight is m.model.embed_tokens.weight
        assert torch.equal(logits(m), logits(model))


@pytest.mark.parametrize("weights", ["int8/channel", "int4/group32", "nvfp4"])
def test_F55_F71_ties_survive_casts_moves_and_dequantizing(tiny, tmp_path, weights):
    model = quantized(tiny, weights, tied=True)
    codes = {n: x.qweight.clone() for n, x in quantized_linears(model).items()}
    model = model.to(torch.bfloat16).to("cpu")
    assert model.lm_head.weight is model.model.embed_tokens.weight and model.lm_head.weight.dtype == torch.bfloat16
    assert all(torch.equal(x.qweight, codes[n]) for n, x in quantized_linears(model).items())
    expected = logits(model)
    dq.dequantize(model)
    assert model.lm_head.weight is model.model.embed_tokens.weight
    model.save_pretrained(tmp_path)
    assert "lm_head.weight" not in stored(tmp_path)
    loaded = LlamaForCausalLM.from_pretrained(tmp_path, dtype=torch.bfloat16)
    assert (logits(loaded) - expected).norm() < 0.05 * expected.norm()


def test_F55_a_resized_vocabulary_stays_tied(tiny, tmp_path):
    """New tokens after quantization: both sides grow, and are saved as one."""
    model = quantized(tiny, "int8/channel", tied=True)
    model.resize_token_embeddings(136, mean_resizing=False)
    assert model.lm_head.weight is model.model.embed_tokens.weight and model.lm_head.weight.shape[0] == 136
    model.save_pretrained(tmp_path)
    loaded = LlamaForCausalLM.from_pretrained(tmp_path)
    assert loaded.lm_head.weight is loaded.model.embed_tokens.weight
    assert torch.equal(logits(loaded), logits(model))


def test_F61_weights_of_another_tool_are_refused(tiny, tmp_path):
    """A checkpoint that is loaded as other codes has no 16-bit weights to round: one line, and nothing is changed."""
    pytest.importorskip("compressed_tensors", reason="needs compressed-tensors, see the extra interop")
    out = dq.export(quantized(tiny, "int4/group32"), tmp_path / "out")
    loaded = LlamaForCausalLM.from_pretrained(out, dtype=torch.float32)
    for _ in range(2):  # packed, and unpacked by the first forward
        with pytest.raises(dq.DQError, match="LlamaForCausalLM is quantized by compressed-tensors already"):
            dq.quantize(loaded, plain("int8/channel"), progress=False)
        logits(loaded)
    from transformers import CompressedTensorsConfig

    wide = CompressedTensorsConfig(dequantize=True)
    free = LlamaForCausalLM.from_pretrained(out, dtype=torch.float32, quantization_config=wide)
    if getattr(free, "quantization_method", None) is None:  # older versions do not let go of the model
        dq.quantize(free, plain("int8/channel"), progress=False)
        assert len(quantized_linears(free)) == 14


@pytest.mark.parametrize(("weights", "kind"), EXPORTS)
def test_F62_a_missing_scale_is_named(tiny, tmp_path, weights, kind):
    """Of an imported checkpoint too: no default stands in for a scale, and codes are not taken for weights."""
    out = dq.export(quantized(tiny, weights), tmp_path / "out", kind)
    name = "model.layers.1.mlp.down_proj"
    tensors = stored(out)
    own = [k for k in tensors if k.startswith(name)]
    assert len(own) >= 2
    for gone in own:
        save_file({k: t for k, t in tensors.items() if k != gone}, out / "model.safetensors", metadata={"format": "pt"})
        with pytest.raises(dq.DQError, match=name):
            dq.load_exported(out)


def test_F72_infinite_activations_stop_an_export(tiny, tmp_path):
    """The stored scale of NVFP4 activations would be 0 or NaN, and every token after it."""
    recipe = Recipe.load("w4a4-nvfp4").with_(min_features=16)
    model = tiny.llama(hidden_size=128, intermediate_size=256)
    dq.quantize(model, recipe, progress=False)
    with torch.no_grad():
        model.model.embed_tokens.weight[7] = float("inf")
    with pytest.raises(dq.DQError, match=r"the input of model\.layers\.0\.self_attn\.q_proj holds \d+ NaN or Inf"):
        dq.export(model, tmp_path / "out", calibration=[dict(input_ids=torch.tensor([[1, 7, 3]]))])
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("name", ["fp8", "int4-kivi", "int4-quarot", "nvfp4"])
def test_F01_F03_cache_of_large_and_zero_values(tiny, name):
    """float16 keys near its limit, and keys that are all zero: no Inf and no NaN comes back."""
    cache = dq.KVCache(name)
    keys = torch.zeros(1, 2, 160, 64, dtype=torch.float16)
    keys[:, 0] = torch.randn(160, 64).to(torch.float16) * 12000
    keys[:, 0, 3] = 60000.0
    cache.update(keys, keys, 0)
    back, values = cache.update(keys[:, :, :1], keys[:, :, :1], 0)
    assert torch.isfinite(back).all() and torch.isfinite(values).all()
    assert (back[:, 1] == 0).all() and (values[:, 1] == 0).all()
    assert (back[:, 0, :160] - keys[:, 0]).float().norm() < 0.2 * keys[:, 0].float().norm()


@pytest.mark.parametrize("name", ["fp8", "int2-kivi", "nvfp4"])
def test_F11_F75_prompts_of_different_length_share_a_cache(tiny, name):
    """A padded prompt beside a longer one: its logits are those that it has alone, up to the rounding of the cache."""
    model = tiny.llama(max_position_embeddings=512)
    g = torch.Generator().manual_seed(0)
    ids = torch.randint(3, 128, (2, 170), generator=g)
    mask = torch.ones_like(ids)
    mask[0, :29], ids[0, :29] = 0, 0

    def run(cache, ids, mask):
        given, place = {ARGUMENT: cache, "use_cache": True}, (mask.cumsum(-1) - 1).clamp(min=0)
        with torch.no_grad():
            model(ids[:, :-1], attention_mask=mask[:, :-1], position_ids=place[:, :-1], **given)
            return model(ids[:, -1:], attention_mask=mask, position_ids=place[:, -1:], **given).logits[:, -1]

    exact = run(DynamicCache(config=model.config), ids[:1, 29:], mask[:1, 29:])[0]
    alone = run(dq.KVCache(name, config=model.config), ids[:1, 29:], mask[:1, 29:])[0]
    together = run(dq.KVCache(name, config=model.config), ids, mask)[0]
    if "kivi" in name:  # groups of tokens begin elsewhere
        assert (together - exact).norm() < 1.5 * (alone - exact).norm()
    else:
        assert torch.allclose(together, alone, atol=1e-3)


def mixture(dtype=torch.float32, **changes):
    """Qwen3-MoE with two layers of four stacked experts."""
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

    torch.manual_seed(0)
    config = Qwen3MoeConfig(
        vocab_size=128, hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, head_dim=16, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=64,
        pad_token_id=0, eos_token_id=2, **changes,
    )  # fmt: skip
    model = Qwen3MoeForCausalLM(config).eval()
    for p in model.parameters():  # buffers such as rotary frequencies keep their dtype, as `from_pretrained` keeps them
        p.data = p.data.to(dtype)
    return model


def test_F18_F55_experts_shrink_on_disk_and_ties_stay(tmp_path):
    """Stacked experts that a tool passes over leave a checkpoint at its 16-bit size."""
    model = mixture(torch.bfloat16, tie_word_embeddings=True)
    model.save_pretrained(tmp_path / "a")
    dq.quantize(model, plain("int4/group32"), progress=False)
    model.save_pretrained(tmp_path / "b")
    a, b = stored(tmp_path / "a"), stored(tmp_path / "b")
    experts = [sum(t.nbytes for k, t in part.items() if ".experts." in k) for part in (a, b)]
    assert 0.27 < experts[1] / experts[0] < 0.30  # 4 bits, and a 16-bit scale per 32 of them
    assert not any(k.startswith("lm_head") for k in b)
    loaded = type(model).from_pretrained(tmp_path / "b", dtype=torch.bfloat16)
    assert loaded.lm_head.weight is loaded.model.embed_tokens.weight
    assert torch.equal(logits(loaded), logits(model))


def test_F61_opened_experts_are_refused_a_second_time():
    model = mixture()
    dq.quantize(model, plain("int8/channel"), progress=False)
    expected = logits(model)
    with pytest.raises(dq.DQError, match="Qwen3MoeForCausalLM is quantized already"):
        dq.quantize(model, plain("int4/group32"), progress=False)
    assert torch.equal(logits(model), expected)


@pytest.mark.parametrize(
    "name",
    [
        "model.embed_tokens.weight", "lm_head.weight", "model.norm.weight", "model.layers.1.self_attn.q_norm.weight",
        "model.layers.1.mlp.gate.weight",
    ],
)  # fmt: skip
@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_F72_what_stays_in_16_bits_is_looked_at_too(name, bad):
    """A model that computes NaN through an embedding, a norm or a router cannot be judged; nothing is changed."""
    model = mixture()
    model.get_parameter(name).data.view(-1)[3] = bad
    with pytest.raises(dq.DQError, match=f"{name} holds 1 NaN or Inf"):
        dq.quantize(model, plain("int8/channel"), progress=False)
    assert not quantized_linears(model) and model.model.layers[0].mlp.experts.gate_up_proj.dim() == 3


@pytest.mark.parametrize("recipe", ["w4a16-gptq", "int8-smooth", "int8-outliers", "w4a4-int4-spinquant"])
def test_F24_no_text_is_named_and_changes_nothing(tiny, recipe):
    """None, an empty list, a generator that is used up, and a text too short for one window."""
    from dq.records import digest

    model = tiny.llama(tied=True)
    before, used = digest(model), iter(())
    tokenizer = tiny.t5_tokenizer()
    for texts in (None, [], used, [""]):
        with pytest.raises(dq.DQError, match="calibration"):
            dq.quantize(model, tiny.recipe(recipe), calibration=texts and dq.Text(texts, tokenizer), progress=False)
    with pytest.raises(dq.DQError, match="one window needs 64: give more text or a smaller length"):
        dq.Text(["ab"], tokenizer, length=64)
    assert digest(model) == before and model.lm_head.weight is model.model.embed_tokens.weight


def test_F38_F39_adapters_on_a_corrected_model(tiny, tmp_path):
    """peft's LoRA beside codes and a learned branch: a tiny delta arrives whole, and comes off without a trace."""
    peft = pytest.importorskip("peft", reason="needs peft, see the extra lora")
    model = quantized(tiny, "int4/group32")
    dq.correct(model, tiny.llama(), [dict(input_ids=row[None]) for row in IDS], rank=2, steps=3, progress=False)
    expected = logits(model)
    tuned = peft.get_peft_model(model, peft.LoraConfig(r=2, target_modules=["q_proj", "down_proj"]))
    assert torch.equal(logits(tuned), expected)  # B = 0
    layer = tuned.base_model.model.model.layers[1].mlp.down_proj
    x, before = torch.randn(3, 96), layer(torch.zeros(3, 96))
    plain_y = layer(x)
    with torch.no_grad():
        layer.lora_B["default"].weight.normal_(0, 1e-4)
    delta = layer.scaling["default"] * layer.lora_B["default"](layer.lora_A["default"](x))
    assert torch.allclose(layer(x) - plain_y, delta, atol=1e-6) and delta.abs().max() > 1e-5
    assert torch.equal(layer(torch.zeros(3, 96)), before)
    moved = logits(tuned)
    tuned.save_pretrained(tmp_path)
    back = tuned.unload()
    assert torch.equal(logits(back), expected)
    again = peft.PeftModel.from_pretrained(back, tmp_path)
    assert torch.equal(logits(again), moved)
