"""A checkpoint of one class loaded as another: a language model without its head, a base model with a head on top."""

import pytest
import torch
from transformers import AutoModel, AutoModelForCausalLM, AutoModelForSequenceClassification

import dq
from dq.linear import quantized_linears

IDS = torch.randint(3, 120, (2, 12), generator=torch.Generator().manual_seed(0))
MIXTURE = dict(num_experts=4, num_experts_per_tok=2, moe_intermediate_size=48)


def hidden(model):
    with torch.no_grad():
        return model(IDS).last_hidden_state


@pytest.fixture(params=["Llama", "Qwen3Moe"])
def whole(llm, tiny, request, tmp_path):
    """A quantized language model and where it is saved; its head is quantized too."""
    model = llm.decoder(request.param, **(MIXTURE if request.param == "Qwen3Moe" else {}))
    recipe = tiny.recipe("int8")
    rule = {"match": "lm_head", "weights": "int8/channel", "activations": "int8/token"}
    dq.quantize(model, dq.Recipe.from_dict(recipe.to_dict() | {"rules": [rule]}), progress=False)
    assert isinstance(model.lm_head, dq.QuantizedLinear)
    model.save_pretrained(tmp_path / "whole")
    return model, tmp_path


def test_the_base_of_a_language_model(whole):
    model, folder = whole
    base = AutoModel.from_pretrained(folder / "whole")
    assert type(base) is type(model.model) and len(quantized_linears(base)) == len(quantized_linears(model)) - 1
    assert torch.equal(hidden(base), hidden(model.model))
    base.save_pretrained(folder / "base")
    again = AutoModel.from_pretrained(folder / "base")
    assert torch.equal(hidden(again), hidden(base))


def test_a_base_with_a_head_on_top(whole):
    """The head is new, as it is on top of a 16-bit base model; what was quantized is read."""
    model, folder = whole
    AutoModel.from_pretrained(folder / "whole").save_pretrained(folder / "base")
    for auto in (AutoModelForCausalLM, AutoModelForSequenceClassification):
        headed = auto.from_pretrained(folder / "base", num_labels=3)
        assert torch.equal(hidden(headed.model), hidden(model.model))
        head = headed.lm_head if auto is AutoModelForCausalLM else headed.score
        assert type(head) is torch.nn.Linear and head.weight.std() > 0


def test_a_tensor_of_the_base_must_be_there(whole):
    """Only what lies outside the base model may be new or left out."""
    from safetensors.torch import load_file, save_file

    _, folder = whole
    AutoModel.from_pretrained(folder / "whole").save_pretrained(folder / "base")
    file = folder / "base" / "model.safetensors"
    tensors = load_file(file)
    save_file({n: t for n, t in tensors.items() if n != "norm.weight"}, file, {"format": "pt"})
    with pytest.raises(dq.DQError, match=r"lacks 1 tensors, e\.g\. model\.norm\.weight"):
        AutoModelForCausalLM.from_pretrained(folder / "base")
    file = folder / "whole" / "model.safetensors"
    save_file(load_file(file) | {"model.strange.weight": torch.ones(3)}, file, {"format": "pt"})
    with pytest.raises(dq.DQError, match=r"1 unexpected tensors, e\.g\. model\.strange\.weight"):
        AutoModel.from_pretrained(folder / "whole")


def test_F52_linears_that_files_hold_as_one_matrix(tiny, tmp_path):
    """LaraMini's files join four linears, and transformers would join their codes and scales too, which nothing takes
    apart: they are saved one by one, from memory and once loaded, and 16-bit ones are joined again."""
    import transformers

    if not hasattr(transformers, "LaraMiniConfig"):
        pytest.skip("needs a transformers with LaraMini")
    config = transformers.LaraMiniConfig(
        vocab_size=128, hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4, head_dim=16,
        num_key_value_heads=2, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=32, linear_key_head_dim=16,
        linear_value_head_dim=16, linear_num_key_heads=2, linear_num_value_heads=4, pad_token_id=0,
        shared_expert_intermediate_size=32, layer_types=["linear_attention", "full_attention"],
    )  # fmt: skip
    model = tiny.seeded(lambda: transformers.LaraMiniForCausalLM(config))
    model.save_pretrained(tmp_path / "plain")
    for way, source in (("made", model), ("read", AutoModelForCausalLM.from_pretrained(tmp_path / "plain"))):
        dq.quantize(source, tiny.recipe("int8"), skip=["in_proj_z"], progress=False)
        assert [n for n in quantized_linears(source) if "in_proj" in n]
        with torch.no_grad():
            expected = source(IDS).logits
            for name in "ab":
                source.save_pretrained(tmp_path / name)
                source = type(model).from_pretrained(tmp_path / name)
                assert torch.equal(source(IDS).logits, expected)
            exported = dq.export(source, tmp_path / f"{way}-out", weight_only=True)
            back = quantized_linears(dq.load_exported(exported))
            assert all(torch.equal(back[n].qweight, x.qweight) for n, x in quantized_linears(source).items())
        dq.dequantize(source)
        source.save_pretrained(tmp_path / "c")
        with torch.no_grad():
            assert torch.equal(type(model).from_pretrained(tmp_path / "c")(IDS).logits, source(IDS).logits)


def test_quantized_while_loading_a_part(llm, tiny, tmp_path):
    model = llm.decoder()
    model.save_pretrained(tmp_path)
    base = AutoModel.from_pretrained(tmp_path, quantization_config=dq.DQConfig(tiny.recipe("int8")))
    dq.quantize(model, tiny.recipe("int8"), progress=False)
    assert torch.equal(hidden(base), hidden(model.model))


def test_a_text_encoder_within_one_with_a_projection(tiny, tmp_path):
    """SDXL's second encoder holds the same model one level further down."""
    from transformers import CLIPTextModel, CLIPTextModelWithProjection

    plain = tiny.clip()
    plain.save_pretrained(tmp_path / "plain")
    wide = CLIPTextModelWithProjection(plain.config).eval()
    dq.quantize(wide, tiny.recipe("int8"), progress=False)
    wide.save_pretrained(tmp_path / "wide")
    inner = CLIPTextModel.from_pretrained(tmp_path / "wide")
    with torch.no_grad():
        assert torch.equal(inner(IDS).last_hidden_state, wide(IDS).last_hidden_state)
    inner.save_pretrained(tmp_path / "inner")
    loaded = CLIPTextModelWithProjection.from_pretrained(tmp_path / "plain")
    if not torch.equal(loaded(IDS).last_hidden_state, plain(IDS).last_hidden_state):
        # transformers 5.14 gives random weights here; what is quantized is refused instead
        with pytest.raises(dq.DQError, match="which CLIPTextModelWithProjection lacks"):
            CLIPTextModelWithProjection.from_pretrained(tmp_path / "inner")
        return
    again = CLIPTextModelWithProjection.from_pretrained(tmp_path / "inner")
    with torch.no_grad():
        assert torch.equal(again(IDS).last_hidden_state, wide(IDS).last_hidden_state)


def test_a_part_with_a_configuration_of_its_own(tiny, tmp_path):
    """CLIP's text encoder out of a quantized CLIP: the library hands it the inner configuration alone, and without a
    quantization in it random weights would take the place of the quantized ones."""
    from transformers import CLIPConfig, CLIPModel, CLIPTextModel, CLIPVisionModel

    sizes = dict(hidden_size=64, intermediate_size=128, num_attention_heads=4, num_hidden_layers=2)
    text = dict(sizes, vocab_size=128, max_position_embeddings=32, bos_token_id=0, eos_token_id=2)
    config = CLIPConfig(text_config=text, vision_config=dict(sizes, image_size=32, patch_size=16), projection_dim=64)
    model = CLIPModel(config).eval()
    dq.quantize(model, tiny.recipe("int8"), progress=False)
    want = model.text_model(IDS).last_hidden_state
    model.save_pretrained(tmp_path / "whole")
    CLIPModel.from_pretrained(tmp_path / "whole").save_pretrained(tmp_path / "again")
    for folder in ("whole", "again"):
        part = CLIPTextModel.from_pretrained(tmp_path / folder)
        assert torch.equal(part(IDS).last_hidden_state, want)
        assert len(quantized_linears(part)) == 12
    assert len(quantized_linears(CLIPVisionModel.from_pretrained(tmp_path / "again"))) == 12
    part.save_pretrained(tmp_path / "part")
    assert torch.equal(CLIPTextModel.from_pretrained(tmp_path / "part")(IDS).last_hidden_state, want)
