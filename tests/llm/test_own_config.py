"""Models that were built from one configuration: what is done to one of them is said of that one alone."""

import json

import pytest
import torch
from transformers import AutoModel, CLIPConfig, CLIPModel, CLIPTextModel, LlamaForCausalLM, PretrainedConfig

import dq
from dq.linear import quantized_linears

IDS = torch.randint(3, 120, (2, 12), generator=torch.Generator().manual_seed(0))


@pytest.fixture
def pair(llm):
    """Two models with the same configuration object."""

    def make(**changes):
        first = llm.decoder(**changes)
        second = LlamaForCausalLM(first.config).eval()
        assert first.config is second.config
        return first, second

    return make


def configs(model):
    """The different configurations that modules of a model hold."""
    return {id(v): v for m in model.modules() for v in vars(m).values() if isinstance(v, PretrainedConfig)}


def logits(model):
    with torch.no_grad():
        return model(IDS).logits


def loads(model, folder):
    """The model saved and loaded gives the same; what its config says of a quantization."""
    model.save_pretrained(folder)
    assert torch.equal(logits(type(model).from_pretrained(folder)), logits(model))
    return json.loads((folder / "config.json").read_text()).get("quantization_config")


@pytest.mark.parametrize("which", ["the whole", "its inner model", "in a list"])
def test_another_model_of_the_same_config(pair, tiny, tmp_path, which):
    mine, other = pair()
    holder = torch.nn.ModuleList([mine, other] if which == "in a list" else [])  # a student and its teacher
    dq.quantize(mine.model if "inner" in which else mine, tiny.recipe("int8"), progress=False)
    assert not hasattr(other.config, "quantization_config") and len(configs(other)) == 1
    assert set(configs(mine)) == {id(mine.config)} != set(configs(other)), holder  # one object for all of its modules
    assert len(loads(mine, tmp_path / "mine")["layers"]) == 14 and loads(other, tmp_path / "other") is None
    late = LlamaForCausalLM(other.config)
    dq.quantize(other, tiny.recipe("w4a16"), progress=False)
    assert loads(late, tmp_path / "late") is None and loads(mine, tmp_path / "mine")["recipe"]["name"] == "int8"
    generated = mine.generate(IDS, max_new_tokens=3, past_key_values=dq.KVCache("int8", config=mine.config))
    assert generated.shape == (2, 15)


def test_an_untied_head_is_untied_in_one_model(pair, llm, tiny, tmp_path):
    """A rotation of the residual stream unties the head, and says so in the configuration."""
    mine, other = pair(tie_word_embeddings=True)
    dq.quantize(mine, tiny.recipe("w4a4-int4-quarot"), progress=False)
    assert mine.config.tie_word_embeddings is False and other.config.tie_word_embeddings is True
    assert loads(mine, tmp_path / "mine") and loads(other, tmp_path / "other") is None


def test_adapters_and_dequantizing(pair, tiny, tmp_path):
    """peft's wrapper holds the configuration too and follows; what is dequantized is an ordinary model again."""
    peft = pytest.importorskip("peft")
    mine, other = pair()
    wrapped = peft.get_peft_model(mine, peft.LoraConfig(target_modules=["q_proj"]))
    dq.quantize(wrapped, tiny.recipe("int8"), progress=False)
    assert wrapped.config is mine.config and hasattr(mine.config, "quantization_config")
    assert wrapped.base_model.config is mine.config and not hasattr(other.config, "quantization_config")
    mine, other = pair()
    dq.quantize(mine, tiny.recipe("int8"), progress=False)
    dq.dequantize(mine)
    assert loads(mine, tmp_path / "mine") is None


def test_the_inner_model_and_the_head_beside_it(pair, tiny, tmp_path):
    """Dequantizing the inner model leaves a quantized head, which the configuration goes on naming."""
    mine, _ = pair()
    rule = {"match": "lm_head", "weights": "int8/channel"}
    dq.quantize(mine, dq.Recipe.from_dict(tiny.recipe("int8").to_dict() | {"rules": [rule]}), progress=False)
    dq.dequantize(mine.model)
    assert list(loads(mine, tmp_path / "mine")["layers"]) == ["lm_head"]


def test_quantized_while_loading_with_a_config_of_the_caller(pair, tiny, tmp_path):
    mine, _ = pair()
    mine.save_pretrained(tmp_path / "plain")
    config = dq.DQConfig(tiny.recipe("int8"))
    loaded = [
        LlamaForCausalLM.from_pretrained(tmp_path / "plain", config=mine.config, quantization_config=config)
        for _ in range(2)
    ]
    assert not hasattr(mine.config, "quantization_config") and config.on_load
    dq.dequantize(loaded[0])
    assert loads(loaded[0], tmp_path / "a") is None and len(loads(loaded[1], tmp_path / "b")["layers"]) == 14


def test_one_part_of_a_model_of_several(tiny, tmp_path):
    """CLIP's text encoder alone: the configuration within is its own, and the whole one has to name its linears."""
    sizes = dict(hidden_size=64, intermediate_size=128, num_attention_heads=4, num_hidden_layers=2)
    text = dict(sizes, vocab_size=128, max_position_embeddings=32, bos_token_id=0, eos_token_id=2)
    config = CLIPConfig(text_config=text, vision_config=dict(sizes, image_size=32, patch_size=16), projection_dim=64)
    model, other = tiny.seeded(lambda: CLIPModel(config)), CLIPModel(config)
    inputs = dict(input_ids=IDS, pixel_values=torch.rand(2, 3, 32, 32, generator=torch.Generator().manual_seed(1)))

    def check(folder, count):
        model.save_pretrained(folder)
        again = CLIPModel.from_pretrained(folder)
        with torch.no_grad():
            assert torch.equal(again(**inputs).logits_per_text, model(**inputs).logits_per_text)
        assert len(quantized_linears(again)) == count

    dq.quantize(model.text_model, tiny.recipe("int8"), progress=False)
    assert model.text_model.config is model.config.text_config
    assert not hasattr(other.config.text_config, "quantization_config")
    check(tmp_path / "one", 12)
    for source, save in (("one", False), ("text", True)):
        if save:
            model.text_model.save_pretrained(tmp_path / source)
        part = CLIPTextModel.from_pretrained(tmp_path / source)
        with torch.no_grad():
            assert torch.equal(part(IDS).last_hidden_state, model.text_model(IDS).last_hidden_state)
    dq.quantize(model.vision_model, tiny.recipe("int8"), progress=False)
    check(tmp_path / "both", 24)
    dq.dequantize(model.text_model)
    check(tmp_path / "vision", 12)
    dq.dequantize(model)
    check(tmp_path / "none", 0)
    assert not any(hasattr(c, "quantization_config") for c in configs(model).values())
    assert torch.isfinite(AutoModel.from_pretrained(tmp_path / "none").text_model(IDS).last_hidden_state).all()
