"""Models that were built from one configuration: what is done to one of them is said of that one alone."""

import copy
import gc
import json
import sys
import threading

import pytest
import torch
from transformers import AutoModel, CLIPConfig, CLIPModel, CLIPTextModel, LlamaForCausalLM, PretrainedConfig

import dq
from dq.linear import quantized_linears
from dq.pipelines.own_config import own_config

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


def clip_config():
    sizes = dict(hidden_size=64, intermediate_size=128, num_attention_heads=4, num_hidden_layers=2)
    text = dict(sizes, vocab_size=128, max_position_embeddings=32, bos_token_id=0, eos_token_id=2)
    return CLIPConfig(text_config=text, vision_config=dict(sizes, image_size=32, patch_size=16), projection_dim=64)


CLIP_INPUTS = dict(input_ids=IDS, pixel_values=torch.rand(2, 3, 32, 32, generator=torch.Generator().manual_seed(1)))


def check_clip(model, folder, count):
    """Saved and loaded gives the same, of `count` quantized linears."""
    model.save_pretrained(folder)
    again = CLIPModel.from_pretrained(folder)
    with torch.no_grad():
        assert torch.equal(again(**CLIP_INPUTS).logits_per_text, model.eval()(**CLIP_INPUTS).logits_per_text)
    assert len(quantized_linears(again)) == count


def test_one_part_of_a_model_of_several(tiny, tmp_path):
    """CLIP's text encoder alone: the configuration within is its own, and the whole one has to name its linears."""
    config = clip_config()
    model, other = tiny.seeded(lambda: CLIPModel(config)), CLIPModel(config)

    dq.quantize(model.text_model, tiny.recipe("int8"), progress=False)
    assert model.text_model.config is model.config.text_config
    assert not hasattr(other.config.text_config, "quantization_config")
    check_clip(model, tmp_path / "one", 12)
    for source, save in (("one", False), ("text", True)):
        if save:
            model.text_model.save_pretrained(tmp_path / source)
        part = CLIPTextModel.from_pretrained(tmp_path / source)
        with torch.no_grad():
            assert torch.equal(part(IDS).last_hidden_state, model.text_model(IDS).last_hidden_state)
    dq.quantize(model.vision_model, tiny.recipe("int8"), progress=False)
    check_clip(model, tmp_path / "both", 24)
    dq.dequantize(model.text_model)
    check_clip(model, tmp_path / "vision", 12)
    dq.dequantize(model)
    check_clip(model, tmp_path / "none", 0)
    assert not any(hasattr(c, "quantization_config") for c in configs(model).values())
    assert torch.isfinite(AutoModel.from_pretrained(tmp_path / "none").text_model(IDS).last_hidden_state).all()


@pytest.mark.parametrize("case", ["hidden", "put in later", "of two"])
def test_a_whole_that_is_not_found(tiny, tmp_path, case):
    """A whole is described when it is saved: also one that gc does not know, and one that gets the part later."""
    model, other = tiny.seeded(lambda: CLIPModel(clip_config())), tiny.seeded(lambda: CLIPModel(clip_config()))
    if case == "of two":
        other.text_model = model.text_model
    if case == "hidden":
        gc.freeze()
    try:
        dq.quantize(model.text_model, tiny.recipe("int8"), progress=False)
    finally:
        gc.unfreeze()
    if case == "put in later":
        other.text_model = model.text_model
    for i, one in enumerate((model, other)):
        before = vars(one.config).get("quantization_config")
        check_clip(one, tmp_path / str(i), 12 if one is model or case != "hidden" else 0)
        assert vars(one.config).get("quantization_config") is before  # it is said while it is saved
    table = json.loads((tmp_path / "0" / "config.json").read_text())["quantization_config"]
    assert table["recipe"]["name"] == "int8" and all(name.startswith("text_model.") for name in table["layers"])


def test_a_student_and_its_teacher(pair, tiny, tmp_path):
    """A module of the user holds both and the configuration that they were built from."""
    mine, other = pair()
    holder = torch.nn.Module()
    holder.config, holder.student, holder.teacher = mine.config, mine, other
    dq.quantize(holder.student, tiny.recipe("int8"), progress=False)
    assert not hasattr(other.config, "quantization_config")
    assert loads(other, tmp_path / "other") is None and len(loads(mine, tmp_path / "mine")["layers"]) == 14


def test_built_from_the_configuration_of_a_quantized_model(pair, tiny, tmp_path):
    mine, _ = pair()
    dq.quantize(mine, tiny.recipe("int8"), progress=False)
    late, inner = LlamaForCausalLM(mine.config).eval(), copy.deepcopy(mine.model)
    assert loads(late, tmp_path / "late") is None and len(loads(mine, tmp_path / "mine")["layers"]) == 14
    inner.save_pretrained(tmp_path / "inner")
    with torch.no_grad():
        again = type(inner).from_pretrained(tmp_path / "inner")(IDS).last_hidden_state
        assert torch.equal(again, mine.model(IDS).last_hidden_state)


def test_quantized_through_a_wrapper(pair, tiny, tmp_path):
    """dq sees the wrapper alone, and the model inside is what is saved."""
    mine, other = pair()
    dq.quantize(torch.compile(mine), tiny.recipe("int8"), progress=False)
    assert len(loads(mine, tmp_path / "mine")["layers"]) == 14 and loads(other, tmp_path / "other") is None


def test_a_parent_that_is_dead_changes_nothing(tiny, tmp_path):
    gc.disable()
    try:
        whole = tiny.seeded(lambda: CLIPModel(clip_config()))
        whole.itself, part = [whole], whole.text_model
        del whole
        dq.quantize(part, tiny.recipe("int8"), progress=False)
    finally:
        gc.enable()
    part.save_pretrained(tmp_path)
    table = json.loads((tmp_path / "config.json").read_text())["quantization_config"]
    assert len(table["layers"]) == 12 and all(name.startswith("encoder.") for name in table["layers"])


def test_other_threads_build_models_meanwhile(pair):
    mine, _ = pair()
    stop, interval = threading.Event(), sys.getswitchinterval()

    def build():
        while not stop.is_set():
            module = torch.nn.Module()
            for i in range(300):
                module.add_module(str(i), torch.nn.Identity())

    threads = [threading.Thread(target=build) for _ in range(3)]
    sys.setswitchinterval(1e-5)
    try:
        for thread in threads:
            thread.start()
        for _ in range(4):
            own_config(mine)
    finally:
        sys.setswitchinterval(interval)
        stop.set()
        for thread in threads:
            thread.join()
    assert set(configs(mine)) == {id(mine.config)}
