"""Convolutions as linears over patches: against torch's own convolution, through the loop, files and copies."""

import copy

import pytest
import torch
from torch import nn

import dq
from dq.checkpoint import layers_config, prepare_model
from dq.conv import QuantizedConv2d, like, matrix, rows, size
from dq.linear import QuantizedLinear
from dq.loop import dequantize_model, quantize_model
from dq.planning import make_plan
from dq.qtensor import quantize
from dq.recipe import Recipe
from dq.records import Record
from dq.spec import QuantSpec

GEOMETRIES = {
    "3x3": dict(kernel_size=3, padding=1),
    "1x1": dict(kernel_size=1),
    "1x1 strided": dict(kernel_size=1, stride=2),
    "strided": dict(kernel_size=3, stride=2, padding=1),
    "oblong": dict(kernel_size=(1, 5), padding=(0, 2), stride=(2, 1)),
    "dilated": dict(kernel_size=3, dilation=2, padding=2),
    "same": dict(kernel_size=(3, 5), padding="same"),
    "valid": dict(kernel_size=2, padding="valid"),
    "reflect": dict(kernel_size=3, padding=1, padding_mode="reflect"),
    "circular": dict(kernel_size=3, padding=(1, 2), padding_mode="circular"),
    "no bias": dict(kernel_size=3, padding=1, bias=False),
}


def _conv(case: str, dtype=torch.float32, channels=6, out=10) -> nn.Conv2d:
    torch.manual_seed(0)
    return nn.Conv2d(channels, out, **GEOMETRIES[case], dtype=dtype)


def _quantized(conv: nn.Conv2d, weights="int8/channel", activations=None) -> QuantizedConv2d:
    w = quantize(matrix(conv).detach().float(), QuantSpec.parse(weights))
    acts = None if activations is None else QuantSpec.parse(activations)
    bias = None if conv.bias is None else conv.bias
    return like(QuantizedLinear.build(w, activations=acts, bias=bias, dtype=conv.weight.dtype), conv)


@pytest.mark.parametrize("shape", [(2, 6, 9, 7), (6, 8, 8), (1, 6, 5, 11)])
@pytest.mark.parametrize("case", GEOMETRIES)
def test_weight_only_equals_torchs_convolution(case, shape):
    conv = _conv(case)
    layer, x = _quantized(conv), torch.randn(shape, generator=torch.Generator().manual_seed(1))
    rounded = copy.deepcopy(conv)
    rounded.weight.data = layer.dequantized_weight().reshape(conv.weight.shape)
    expected = rounded(x)
    assert layer(x).shape == expected.shape
    torch.testing.assert_close(layer(x), expected, rtol=1e-5, atol=1e-5)
    assert (expected - conv(x)).abs().max() > 1e-4  # rounding does something


@pytest.mark.parametrize("case", GEOMETRIES)
def test_patches_times_matrix_is_the_convolution(case):
    conv, x = _conv(case, torch.float64), torch.randn(2, 6, 9, 8, dtype=torch.float64)
    y = rows(conv, x) @ matrix(conv).T
    expected = conv(x) if conv.bias is None else conv(x) - conv.bias[:, None, None]
    assert size(conv) == tuple(matrix(conv).shape)
    torch.testing.assert_close(y.transpose(1, 2).reshape(expected.shape), expected, rtol=1e-12, atol=1e-12)


def test_each_output_position_has_its_own_activation_scale():
    conv, x = _conv("3x3"), torch.randn(1, 6, 5, 5)
    layer = _quantized(conv, activations="int8/token")
    w = layer.dequantized_weight().reshape(conv.weight.shape)
    padded, expected = nn.functional.pad(x, (1, 1, 1, 1)), torch.empty(1, 10, 5, 5)
    for i in range(5):
        for j in range(5):  # spelled out: one patch, one scale amax / 127
            patch = padded[0, :, i : i + 3, j : j + 3]
            scale = patch.abs().max() / 127
            q = (patch / scale).round().clamp(-127, 127) * scale
            expected[0, :, i, j] = (w * q).sum((1, 2, 3)) + conv.bias
    torch.testing.assert_close(layer(x), expected, rtol=1e-5, atol=1e-5)


def test_weight_reports_the_shape_of_a_convolution():
    layer = _quantized(_conv("3x3", torch.bfloat16))
    assert layer.weight.shape == (10, 6, 3, 3)
    assert layer.weight.dtype == torch.bfloat16
    assert isinstance(layer, nn.Conv2d)
    assert "kernel_size=(3, 3)" in repr(layer) and "int8" in repr(layer)


class _Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv_in = nn.Conv2d(4, 16, 3, padding=1)
        self.deep = nn.Conv2d(16, 16, 3, padding=1)
        self.shortcut = nn.Conv2d(32, 16, 1)
        self.depthwise = nn.Conv2d(16, 16, 3, padding=1, groups=16)
        self.out = nn.Linear(16, 16)

    def forward(self, x):
        skip = self.conv_in(x)
        deep = 0.02 * self.deep(skip).tanh()
        return self.out(self.depthwise(self.shortcut(torch.cat([deep, 8 * skip], 1))).flatten(2).transpose(1, 2))


_TOML = {
    "name": "convs",
    "linear": {"weights": "int8/channel", "activations": "int8/token"},
    "conv": {"weights": "int8/channel", "activations": "int8/token"},
    "min_features": 8,
}


def _net_and_records() -> tuple[_Net, list[Record]]:
    torch.manual_seed(3)
    return _Net().eval(), [Record((torch.randn(2, 4, 8, 8),), {}) for _ in range(4)]


def test_plan_names_every_convolution():
    net, _ = _net_and_records()
    plan = make_plan(net, Recipe.from_dict(_TOML))
    kept = {m: r.reason for r in plan.rows if r.target is None for m in r.members}
    assert kept["depthwise"] == "a convolution of 16 groups"
    assert "conv_in" in kept
    assert {m for r in plan.quantized for m in r.members} == {"deep", "shortcut", "out"}
    assert next(r.shapes for r in plan.rows if r.members == ("deep",)) == ((16, 144),)
    without = make_plan(net, Recipe.from_dict({k: v for k, v in _TOML.items() if k != "conv"}))
    assert any("4 convolutions stay in 16 bits" in r and "no [conv] section" in r for r in without.remarks)


@pytest.mark.parametrize("rounding", ["rtn", "gptq"])
def test_loop_quantizes_and_a_file_brings_back_the_same_bits(rounding):
    net, records = _net_and_records()
    x = records[0].args[0]
    exact = net(x)
    recipe = Recipe.from_dict(_TOML | {"conv": _TOML["conv"] | {"rounding": rounding}})
    report = quantize_model(net, make_plan(net, recipe), records)
    assert isinstance(net.deep, QuantizedConv2d) and isinstance(net.shortcut, QuantizedConv2d)
    assert all(r.sqnr_db > 30 for r in report.layers)
    y = net(x)
    assert 1e-7 < ((y - exact).square().sum() / exact.square().sum()).item() < 1e-3
    assert torch.equal(copy.deepcopy(net)(x), y)
    fresh = _Net().eval()
    prepare_model(fresh, layers_config(net), torch.float32, "cpu")
    fresh.load_state_dict(net.state_dict())
    assert torch.equal(fresh(x), y)
    back = dequantize_model(copy.deepcopy(net))
    assert type(back.deep) is nn.Conv2d and back.deep.weight.shape == (16, 16, 3, 3)
    assert torch.allclose(back(x), exact, atol=0.05 * exact.abs().max().item())


def test_resume_brings_back_convolutions(tmp_path):
    net, records = _net_and_records()
    plan = make_plan(net, Recipe.from_dict(_TOML))
    first, second = copy.deepcopy(net), copy.deepcopy(net)
    quantize_model(first, plan, records, resume=str(tmp_path))
    quantize_model(second, plan, records, resume=str(tmp_path))
    x = records[1].args[0]
    assert isinstance(second.deep, QuantizedConv2d)
    assert torch.equal(first(x), second(x))


def test_shortcut_split_keeps_the_quiet_half(monkeypatch):
    """Q-Diffusion's split: without it the deep half (40 times quieter) shares the skip's scale."""
    from dq.family import FAMILIES, Family

    family = Family(name="net", classes=("_Net",), k_parts=(("shortcut", ("deep", "...")),))
    monkeypatch.setitem(FAMILIES._values, "net", family)
    net, records = _net_and_records()
    split = Recipe.from_dict(_TOML | {"conv": _TOML["conv"] | {"transforms": ["ksplit"]}})
    plan = make_plan(net, split)
    assert next(r.k_parts for r in plan.rows if r.members == ("shortcut",)) == (16, 16)
    joint = copy.deepcopy(net)
    quantize_model(net, plan, records)
    quantize_model(joint, make_plan(joint, Recipe.from_dict(_TOML)), records)
    deep = torch.cat([0.02 * torch.randn(1, 16, 4, 4), 8 * torch.randn(1, 16, 4, 4)], 1)
    only = copy.deepcopy(deep)
    only[:, :16] = 0

    def wrong(layer):  # what the quiet half contributes, against the exact product
        with torch.no_grad():
            got = layer(deep) - layer(only)
        w = layer.dequantized_weight(torch.float32)[:, :16]
        return (got - torch.einsum("nk,bkhw->bnhw", w, deep[:, :16])).square().mean()

    assert wrong(net.shortcut) < 0.05 * wrong(joint.shortcut)


def _unet():
    diffusers = pytest.importorskip("diffusers")
    torch.manual_seed(0)
    return diffusers.UNet2DConditionModel(
        sample_size=8, block_out_channels=(32, 64, 96), layers_per_block=2, cross_attention_dim=16, norm_num_groups=8,
        down_block_types=("CrossAttnDownBlock2D", "CrossAttnDownBlock2D", "DownBlock2D"), attention_head_dim=8,
        up_block_types=("UpBlock2D", "CrossAttnUpBlock2D", "CrossAttnUpBlock2D"),
    ).eval()  # fmt: skip


_CALL = dict(sample=torch.ones(1, 4, 8, 8), timestep=3, encoder_hidden_states=torch.ones(1, 5, 16))


def test_parts_of_a_unets_shortcuts_are_those_it_concatenates(monkeypatch):
    from diffusers.models.unets import unet_2d_blocks

    unet, joined, real = _unet(), [], torch.cat

    class Torch:
        def __getattr__(self, name):
            return getattr(torch, name)

        @staticmethod
        def cat(parts, dim=0):
            joined.append(tuple(p.shape[dim] for p in parts))
            return real(parts, dim)

    monkeypatch.setattr(unet_2d_blocks, "torch", Torch())
    with torch.no_grad():
        unet(**_CALL)
    rows = make_plan(unet, Recipe.load("int8").with_(min_features=16)).rows
    parts = [r.k_parts for r in rows if r.members[0].endswith("conv_shortcut") and r.members[0].startswith("up_")]
    assert len(joined) == 9
    assert parts == joined


def test_unet_saves_and_loads(tmp_path):
    unet, kind = _unet(), type(_unet())
    report = dq.quantize(unet, Recipe.load("int8").with_(min_features=16))
    convs = [n for n, m in unet.named_modules() if isinstance(m, QuantizedConv2d)]
    assert any("conv_shortcut" in n for n in convs) and any("resnets.0.conv1" in n for n in convs)
    assert not any(n in ("conv_in", "conv_out") for n in convs)
    assert {r.name for r in report.layers} >= set(convs)
    assert unet.up_blocks[1].resnets[0].conv_shortcut.config.weights.k_segments == (96, 64)
    with torch.no_grad():
        y = unet(**_CALL).sample
        unet.save_pretrained(tmp_path)
        loaded = kind.from_pretrained(tmp_path).eval()
        assert torch.equal(loaded(**_CALL).sample, y)
