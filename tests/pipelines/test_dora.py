"""DoRA beside quantized linears, against peft's own over 16-bit linears with the same weights."""

import copy

import pytest
import torch

import dq

peft = pytest.importorskip("peft")

IDS = torch.randint(3, 120, (2, 12), generator=torch.Generator().manual_seed(0))
CONFIG = dict(r=4, lora_alpha=6, target_modules=["q_proj", "down_proj", "lm_head"], use_dora=True)


def logits(model):
    with torch.no_grad():
        return model(input_ids=IDS).logits


def relative(a, b):
    return float((a - b).norm() / b.norm())


@torch.no_grad()
def fill(model, seed=1):
    """Random A, B, and magnitudes away from the norms."""
    g = torch.Generator().manual_seed(seed)
    for name, p in sorted(model.named_parameters()):
        if "lora_A" in name or "lora_B" in name:
            p.copy_(torch.randn(p.shape, generator=g) / p.shape[-1] ** 0.5)
        if "lora_magnitude_vector" in name:
            p.mul_(0.5 + torch.rand(p.shape, generator=g))
    return model


@pytest.fixture(params=["w4a16", "w4a16-gptq", "w4a16-awq"])
def pair(tiny, request):
    """A quantized model, and its dequantized twin in 16-bit linears."""
    recipe = tiny.recipe(request.param)
    if request.param == "w4a16":  # a shifted input and a low-rank branch: both belong to the weight or the bias
        transforms = [{"name": "shift"}, {"name": "lowrank", "rank": 4}]
        linear = recipe.to_dict()["linear"] | {"transforms": transforms}
        recipe = dq.Recipe.from_dict(recipe.to_dict() | {"linear": linear})
    model = tiny.llama()
    records = [dict(input_ids=IDS)] if recipe.needs_calibration else None
    dq.quantize(model, recipe, calibration=records, progress=False)
    wide = copy.deepcopy(model)
    dq.dequantize(wide)
    return model, wide


def test_the_output_is_that_of_peft(pair):
    model, wide = pair
    assert relative(logits(model), logits(wide)) < 1e-4
    plain = logits(model)
    ours, theirs = (peft.get_peft_model(m, peft.LoraConfig(**CONFIG)).eval() for m in (model, wide))
    assert relative(logits(ours), plain) < 1e-5  # m starts as the norm, B as zero
    fill(ours)
    theirs.load_state_dict({k: v for k, v in ours.state_dict().items() if "lora_" in k}, strict=False)
    expected = logits(theirs)
    assert relative(expected, plain) > 0.2
    assert relative(logits(ours), expected) < 1e-3
    fill(ours, seed=2)  # the norms follow
    theirs.load_state_dict({k: v for k, v in ours.state_dict().items() if "lora_" in k}, strict=False)
    assert relative(logits(ours), logits(theirs)) < 1e-3


def test_trained_saved_and_loaded(tiny, tmp_path):
    model = tiny.llama()
    dq.quantize(model, tiny.recipe("w4a16"), progress=False)
    other = copy.deepcopy(model)
    tuned = peft.get_peft_model(model, peft.LoraConfig(**CONFIG))
    optimizer = torch.optim.Adam([p for p in tuned.parameters() if p.requires_grad], lr=0.02)
    losses = []
    for _ in range(8):
        loss = tuned(input_ids=IDS, labels=IDS).loss
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
    assert losses[-1] < 0.9 * losses[0]
    moved = [n for n, p in tuned.named_parameters() if "lora_magnitude_vector" in n and p.grad is not None]
    assert len(moved) == 5
    tuned.eval().save_pretrained(tmp_path)
    again = peft.PeftModel.from_pretrained(other, tmp_path).eval()
    assert torch.equal(logits(again), logits(tuned))
    with pytest.raises(dq.DQError, match="cannot fuse default: DoRA scales the rows of the quantized weight"):
        tuned.merge_adapter()
    with tuned.disable_adapter():
        assert relative(logits(tuned), logits(again)) > 0.01


def test_attached_before_quantizing(tiny):
    """Its norms are then those of the quantized weight, as if it came afterwards."""
    early = fill(peft.get_peft_model(tiny.llama(), peft.LoraConfig(**CONFIG)).eval())
    late = tiny.llama()
    dq.quantize(early, tiny.recipe("w4a16"), progress=False)
    dq.quantize(late, tiny.recipe("w4a16"), progress=False)
    late = peft.get_peft_model(late, peft.LoraConfig(**CONFIG)).eval()
    late.load_state_dict({k: v for k, v in early.state_dict().items() if "lora_" in k}, strict=False)
    assert torch.equal(logits(early), logits(late))
    dq.dequantize(early)  # peft's layers over plain linears again
    assert relative(logits(early), logits(late)) < 1e-3


def test_a_diffusers_pipeline_takes_one(tiny):
    pipe = tiny.flux_pipeline()
    dq.quantize(pipe, tiny.recipe("w4a4-nvfp4"), progress=False)
    plain = tiny.denoise(pipe)
    config = peft.LoraConfig(r=2, target_modules=["to_q", "proj_mlp"], use_dora=True)
    pipe.transformer.add_adapter(config, "fine")
    assert relative(tiny.denoise(pipe), plain) < 1e-4
    fill(pipe.transformer)
    assert relative(tiny.denoise(pipe), plain) > 1e-3
    assert {(x.adapter, x.state) for x in dq.adapter_info(pipe)} == {("fine", "active")}


def test_load_lora_takes_a_file_with_magnitudes(tiny, tmp_path):
    """As diffusers saves it; a magnitude without its layer is still a key that matches nothing."""
    from safetensors.torch import load_file, save_file

    pipe = tiny.flux_pipeline()
    pipe.transformer.add_adapter(peft.LoraConfig(r=2, target_modules=["to_q"], use_dora=True), "fine")
    fill(pipe.transformer)
    layers = peft.get_peft_model_state_dict(pipe.transformer, adapter_name="fine")
    type(pipe).save_lora_weights(tmp_path, transformer_lora_layers=layers)
    fresh = tiny.flux_pipeline()
    dq.quantize(fresh, tiny.recipe("w4a16"), progress=False)
    dq.load_lora(fresh, tmp_path, adapter_name="mine")
    assert {(x.adapter, x.state) for x in dq.adapter_info(fresh)} == {("mine", "active")}
    for weight in (float("nan"), "1"):
        with pytest.raises(dq.DQError, match="weight must be a finite number"):
            dq.load_lora(fresh, tmp_path, adapter_name="other", weight=weight)
    file = tmp_path / "pytorch_lora_weights.safetensors"
    kept = {k: v for k, v in load_file(file).items() if "to_q.lora_magnitude_vector" not in k}
    assert len(kept) < len(load_file(file))
    save_file(kept | {"transformer.nowhere.lora_A.weight": torch.ones(2, 4),
                      "transformer.nowhere.lora_B.weight": torch.ones(4, 2)}, file)  # fmt: skip
    with pytest.raises(dq.DQError, match="nowhere"):
        dq.load_lora(fresh, tmp_path, adapter_name="other")
