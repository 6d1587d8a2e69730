"""Original names against diffusers' own converters, on full-size architectures: tensors of a row number per row."""

import pytest
import torch
from accelerate import init_empty_weights

import dq  # noqa: F401
from dq.pipelines.naming import NAMINGS, entries, from_original, stems, to_original
from dq.registry import DQError

CONFIGS = {
    "FluxTransformer2DModel": [
        dict(num_layers=3, num_single_layers=2, guidance_embeds=True), dict(num_layers=1, num_single_layers=1),
    ],
    "ChromaTransformer2DModel": [dict(num_layers=2, num_single_layers=3)],
    "Flux2Transformer2DModel": [dict(num_layers=2, num_single_layers=2)],
    "SD3Transformer2DModel": [
        dict(num_layers=3, qk_norm="rms_norm", dual_attention_layers=(0, 1)),
        dict(num_layers=2, caption_projection_dim=1152),  # SD3 medium has no norms of q and k
    ],
    "WanTransformer3DModel": [
        dict(num_layers=2, num_attention_heads=2),
        dict(num_layers=2, num_attention_heads=2, image_dim=64, added_kv_proj_dim=256),
    ],
    "ZImageTransformer2DModel": [dict(n_layers=2, dim=256, n_heads=2, n_kv_heads=2, axes_dims=[32, 48, 48])],
    "QwenImageTransformer2DModel": [dict(num_layers=2)],
    "LTXVideoTransformer3DModel": [dict(num_layers=2)],
    "HunyuanVideoTransformer3DModel": [dict(num_layers=2, num_single_layers=2, guidance_embeds=True)],
}  # fmt: skip
_UNET = dict(norm_num_groups=8, cross_attention_dim=16, attention_head_dim=4)
_ATTEND = ("CrossAttnUpBlock2D",) * 4
CONFIGS["UNet2DConditionModel"] = [
    _UNET | dict(block_out_channels=(16, 24, 32, 40)),  # Stable Diffusion 1.x: the default blocks
    _UNET | dict(block_out_channels=(16, 24, 32, 40), use_linear_projection=True, attention_head_dim=(2, 3, 4, 5)),
    _UNET | dict(
        block_out_channels=(16, 24, 32), use_linear_projection=True, transformer_layers_per_block=(1, 2, 3),
        down_block_types=("DownBlock2D", "CrossAttnDownBlock2D", "CrossAttnDownBlock2D"),
        up_block_types=("CrossAttnUpBlock2D", "CrossAttnUpBlock2D", "UpBlock2D"), addition_embed_type="text_time",
        addition_time_embed_dim=8, projection_class_embeddings_input_dim=64,
    ),
]  # fmt: skip
CASES = [(name, config) for name, configs in CONFIGS.items() for config in configs]


def model_of(name, config):
    import diffusers

    with init_empty_weights():
        return getattr(diffusers, name)(**config)


def numbered(model):
    """Every parameter as [rows, 1, ..]: a number that no other row of the model has."""
    state, start = {}, 0
    for key, tensor in model.state_dict().items():
        rows = tensor.shape[0]
        state[key] = torch.arange(start, start + rows).reshape(-1, *[1] * (tensor.dim() - 1))
        start += rows
    return state


def original(model, state):
    out = {}
    for rule in entries(model):
        leaves = [""] if rule.members[0] in state else [
            k.rpartition(".")[2] for k in state if k.rpartition(".")[0] == rule.members[0]
        ]  # fmt: skip
        for leaf in leaves:
            parts = [state[f"{m}.{leaf}" if leaf else m] for m in rule.members]
            name, tensor = to_original(rule, leaf, parts)
            assert name not in out
            out[name] = tensor
    return out


def converter(name):
    from diffusers.loaders.single_file_model import SINGLE_FILE_LOADABLE_CLASSES

    return SINGLE_FILE_LOADABLE_CLASSES[name]["checkpoint_mapping_fn"]


@pytest.mark.parametrize(("name", "config"), CASES)
def test_diffusers_reads_them(name, config):
    model = model_of(name, config)
    state = numbered(model)
    there = original(model, state)
    if name.startswith("UNet"):  # whose original files hold text encoder and VAE beside it
        there = {f"model.diffusion_model.{k}": v for k, v in there.items()}
    back = converter(name)(checkpoint=there, config=dict(model.config))
    assert set(back) == set(state)
    assert all(torch.equal(back[k].flatten(), state[k].flatten()) for k in state)


@pytest.mark.parametrize(("name", "config"), CASES)
def test_there_and_back(name, config):
    model = model_of(name, config)
    state = numbered(model)
    tensors = original(model, state)
    back = {}
    for rule in entries(model):
        back |= from_original(rule, tensors, state)
    assert not tensors and set(back) == set(state)
    assert all(torch.equal(back[k], state[k]) for k in state)


def test_every_naming_is_tested():
    assert {c for n in NAMINGS for c in n.classes} == set(CONFIGS)


@pytest.mark.parametrize("change", [dict(layers_per_block=1), dict(layers_per_block=3), dict(up_block_types=_ATTEND)])
def test_unets_of_other_forms_have_no_names(change):
    """The original names count blocks: for another count, or with attention elsewhere, ours would be wrong."""
    assert entries(model_of("UNet2DConditionModel", CONFIGS["UNet2DConditionModel"][0] | change)) is None


def test_a_model_without_names(tiny):
    assert entries(torch.nn.Linear(2, 2)) is None
    model = tiny.flux()
    model.extra = torch.nn.Linear(4, 4)
    with pytest.raises(DQError, match=r"extra has no name in the original checkpoints of flux\.1"):
        entries(model)
    del model.extra, model.transformer_blocks[1].attn.to_k
    with pytest.raises(DQError, match=r"transformer_blocks\.1\.attn\.to_k is missing, whose rows belong to double_bl"):
        entries(model)
    assert "transformer_blocks.0.attn.to_q" in stems(model)
