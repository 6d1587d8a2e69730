"""UNets of Stable Diffusion under their original names: exported for ComfyUI, and LoRAs in kohya's form."""

import pytest
import torch
from safetensors.torch import load_file
from tiny_pipelines import build

import dq
from dq.linear import quantized_linears
from dq.pipelines.naming import entries

SDXL = dict(
    sample_size=8, norm_num_groups=8, cross_attention_dim=32, block_out_channels=(32, 48, 64), attention_head_dim=8,
    use_linear_projection=True, transformer_layers_per_block=(1, 1, 2), addition_embed_type="text_time",
    down_block_types=("DownBlock2D", "CrossAttnDownBlock2D", "CrossAttnDownBlock2D"), addition_time_embed_dim=8,
    up_block_types=("CrossAttnUpBlock2D", "CrossAttnUpBlock2D", "UpBlock2D"), projection_class_embeddings_input_dim=80,
)  # fmt: skip
INPUTS = dict(
    sample=torch.zeros(1, 4, 8, 8), timestep=torch.tensor(500), encoder_hidden_states=torch.ones(1, 5, 32),
    added_cond_kwargs={"text_embeds": torch.ones(1, 32), "time_ids": torch.ones(1, 6)},
)  # fmt: skip


@pytest.fixture
def unet(tiny):
    """SDXL's form, its linears quantized; convolutions have no form in exports."""
    from diffusers import UNet2DConditionModel

    model = tiny.seeded(lambda: UNet2DConditionModel(**SDXL))
    plan = tiny.recipe("int8", conv=None)
    dq.quantize(model, plan, progress=False)
    return model


def test_exported_for_comfyui(unet, tmp_path):
    out = dq.export(unet, tmp_path / "out", "comfyui")
    (file,) = out.glob("*.safetensors")
    held = set(load_file(file))
    assert {"input_blocks.0.0.weight", "output_blocks.2.2.conv.weight", "label_emb.0.0.weight"} <= held
    assert "middle_block.1.transformer_blocks.1.attn1.to_k.comfy_quant" in held
    assert not [n for n in held if n.startswith(("down_blocks", "mid_block", "up_blocks"))]
    back = dq.load_exported(out)
    with torch.no_grad():
        assert torch.equal(back(**INPUTS)[0], unet(**INPUTS)[0])
    with pytest.raises(dq.DQError, match="reads no UNet"):
        dq.export(unet, tmp_path / "bfl", "bfl")


@pytest.mark.parametrize("original", [True, False], ids=["sgm", "diffusers"])
def test_a_lora_in_kohyas_form(unet, original):
    """All of it arrives beside quantized layers, alphas included, under both ways that such files name the blocks."""
    pipe, g = build("sdxl"), torch.Generator().manual_seed(0)
    pipe.register_modules(unet=unet)
    names = {r.members[0]: r.original for r in entries(unet)}
    ends = ("attn1.to_q", "attn2.to_v", "attn1.to_out.0", "ff.net.0.proj", "proj_in", "proj_out")
    chosen = [n for n in quantized_linears(unet) if n.endswith(ends)]
    state, deltas = {}, {}
    for name in chosen:
        layer, key = unet.get_submodule(name), f"lora_unet_{(names[name] if original else name).replace('.', '_')}"
        down, up = (torch.randn(*s, generator=g) for s in ((2, layer.in_features), (layer.out_features, 2)))
        state |= {f"{key}.lora_down.weight": down, f"{key}.lora_up.weight": up, f"{key}.alpha": torch.tensor(1.0)}
        deltas[name] = 0.5 * up @ down
    with torch.no_grad():
        plain = unet(**INPUTS)[0]
        dq.load_lora(pipe, state, adapter_name="style")
        assert {x.layer for x in dq.adapter_info(pipe)} == {f"unet.{n}" for n in chosen} and len(chosen) > 20
        for name, delta in deltas.items():
            torch.testing.assert_close(unet.get_submodule(name).get_delta_weight("style"), delta)
        assert not torch.equal(unet(**INPUTS)[0], plain)
        pipe.unload_lora_weights()
        assert torch.equal(unet(**INPUTS)[0], plain)
