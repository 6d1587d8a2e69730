"""LoRA on quantized language models through peft: attach, train on the frozen codes, fuse, save."""

import copy

import pytest
import torch

import dq
from dq.linear import QuantizedLinear, quantized_linears

peft = pytest.importorskip("peft")

PRESETS = ["w4a16", "int8", "w4a4-int4-convrot", "w4a4-nvfp4"]
TARGETS = ["q_proj", "v_proj", "down_proj"]


def make(tiny, preset, dtype=torch.float32):
    model = tiny.llama(dtype)
    dq.quantize(model, tiny.recipe(preset), progress=False)
    return model


def config(**changes):
    return peft.LoraConfig(r=4, lora_alpha=8, target_modules=TARGETS, task_type="CAUSAL_LM", **changes)


def bits(model):
    return {k: v.detach().clone().view(torch.uint8) for k, v in model.state_dict().items()}


def base_bits(model):
    clean = lambda k: k.replace("base_model.model.", "").replace(".base_layer", "")  # noqa: E731
    return {clean(k): v for k, v in bits(model).items() if "lora_" not in k}


def same(a, b):
    return a.keys() == b.keys() and all(torch.equal(a[k], b[k]) for k in a)


@pytest.fixture
def ids():
    return torch.randint(3, 128, (4, 12), generator=torch.Generator().manual_seed(0))


def train(model, ids, steps=12):
    """The loss of every step."""
    trained = [p for p in model.parameters() if p.requires_grad]
    optimizer, losses = torch.optim.AdamW(trained, lr=0.02), []
    for _ in range(steps):
        loss = model(input_ids=ids, labels=ids).loss
        losses.append(float(loss))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return losses


@pytest.mark.parametrize("preset", PRESETS)
@pytest.mark.parametrize("checkpointing", [False, True])
def test_training_beside_the_frozen_codes(tiny, ids, preset, checkpointing):
    """The loss falls, adapters of the first block get gradients through all later ones, the base keeps its bits."""
    base = make(tiny, preset)
    before = base_bits(base)
    base = peft.prepare_model_for_kbit_training(base, use_gradient_checkpointing=checkpointing)
    model = peft.get_peft_model(base, config()).train()
    names = [n for n, p in model.named_parameters() if p.requires_grad]
    assert names and all("lora_" in n for n in names)
    losses = train(model, ids)
    assert losses[-1] < 0.5 * losses[0]
    first = model.base_model.model.model.layers[0].self_attn.q_proj
    assert isinstance(first.base_layer, QuantizedLinear) and first.lora_A["default"].weight.grad.norm() > 0
    assert same(base_bits(model), before)


def test_gradients_are_those_of_the_dequantized_model(tiny, ids):
    """Weight-only layers are linear, so the gradients of all adapters agree with plain linears of the same weights."""
    quantized = make(tiny, "w4a16")
    plain = copy.deepcopy(quantized)
    dq.dequantize(plain)
    grads = []
    for base in (quantized, plain):
        torch.manual_seed(0)
        model = peft.get_peft_model(base, config(init_lora_weights="gaussian"))
        with torch.no_grad():
            for name, p in model.named_parameters():
                if "lora_B" in name:
                    p.normal_(0, 0.05)
        model(input_ids=ids, labels=ids).loss.backward()
        grads.append({n: p.grad for n, p in model.named_parameters() if p.grad is not None})
    assert grads[0].keys() == grads[1].keys() and len(grads[0]) == 12
    for name, grad in grads[0].items():
        torch.testing.assert_close(grad, grads[1][name], rtol=1e-3, atol=1e-6)


@pytest.mark.parametrize("preset", PRESETS)
def test_saved_loaded_and_merged(tiny, ids, preset, tmp_path):
    from transformers import LlamaForCausalLM

    base = make(tiny, preset)
    base.save_pretrained(tmp_path / "base")
    model = peft.get_peft_model(base, config(init_lora_weights=False)).eval()
    with torch.no_grad():
        on = model(input_ids=ids).logits
        with model.disable_adapter():
            off = model(input_ids=ids).logits
    model.save_pretrained(tmp_path / "adapter")
    again = LlamaForCausalLM.from_pretrained(tmp_path / "base")
    assert quantized_linears(again)
    with torch.no_grad():
        assert torch.equal(again(input_ids=ids).logits, off)
        again = peft.PeftModel.from_pretrained(again, tmp_path / "adapter")
        assert torch.equal(again(input_ids=ids).logits, on)
    before = base_bits(again)
    again.merge_adapter()
    again.unmerge_adapter()
    assert same(base_bits(again), before)
    merged = again.merge_and_unload()
    assert type(merged) is LlamaForCausalLM and not dq.adapter_info(merged)
    with torch.no_grad():
        fused = merged(input_ids=ids).logits
        assert float((fused - on).norm() / (on - off).norm()) < (0.3 if "a4" in preset else 1e-2)
        merged.save_pretrained(tmp_path / "merged")
        assert torch.equal(LlamaForCausalLM.from_pretrained(tmp_path / "merged")(input_ids=ids).logits, fused)


@pytest.mark.parametrize("preset", ["w4a16", "w4a4-nvfp4"])
def test_quantized_under_its_adapters(tiny, ids, preset):
    """`dq.quantize(peft_model)` is the same as attaching to the quantized model; parameters keep their identity."""
    torch.manual_seed(0)
    before = peft.get_peft_model(tiny.llama(), config(init_lora_weights=False)).eval()
    weights = {n: p for n, p in before.named_parameters() if "lora_" in n}
    dq.quantize(before, tiny.recipe(preset), progress=False)
    assert all(dict(before.named_parameters())[n] is p for n, p in weights.items())
    after = peft.get_peft_model(make(tiny, preset), config()).eval()
    peft.set_peft_model_state_dict(after, peft.get_peft_model_state_dict(before))
    with torch.no_grad():
        assert torch.equal(before(input_ids=ids).logits, after(input_ids=ids).logits)
    assert {x.quantized for x in dq.adapter_info(before)} == {True}
    before.merge_adapter()
    assert {x.state for x in dq.adapter_info(before)} == {"fused"}


def test_trained_copies_of_whole_layers_are_refused(tiny):
    model = peft.get_peft_model(tiny.llama(), config(modules_to_save=["lm_head"]))
    with pytest.raises(dq.DQError, match=r"replaces the whole of lm_head .* load it afterwards"):
        dq.quantize(model, tiny.recipe("int8"), progress=False)


def test_rewritten_models_warn(tiny):
    model = tiny.llama()
    records = [dict(input_ids=torch.ones(1, 8, dtype=torch.long))]
    dq.quantize(model, tiny.recipe("w4a4-int4-quarot"), calibration=records, progress=False)
    with pytest.warns(UserWarning, match=r"changed the inputs of this model's layers"):
        peft.get_peft_model(model, config())


def test_a_bias_is_fused_and_taken_out_again(tiny):
    net = torch.nn.Sequential(tiny.layer("int8")[0], torch.nn.Sequential(tiny.layer("int8", bias=False)[0]))
    lora = peft.LoraConfig(target_modules=["0"], lora_bias=True, init_lora_weights=False, bias="none")
    peft.inject_adapter_in_model(lora, net)
    layer, x = net[0], torch.randn(5, 64)
    with torch.no_grad():
        layer.lora_B["default"].bias.normal_()
        before, beside = bits(layer.base_layer), layer(x)
        layer.merge()
        torch.testing.assert_close(layer(x), beside, rtol=1e-3, atol=1e-4)
        layer.unmerge()
    assert same(bits(layer.base_layer), before)
    with pytest.raises(dq.DQError, match="adds to the bias of a layer that has none"):
        net[1][0].merge()


def test_a_model_under_adapters_is_not_saved_as_a_whole(tiny, tmp_path):
    model = make(tiny, "w4a16")
    wrapped = peft.get_peft_model(model, config())
    with pytest.raises(dq.DQError, match="adapters are attached"):
        model.save_pretrained(tmp_path / "whole")
    wrapped.save_pretrained(tmp_path / "alone")
    assert (tmp_path / "alone" / "adapter_model.safetensors").is_file()
