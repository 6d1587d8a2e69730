"""nunchaku_lite checkpoints: the loader of diffusers accepts every name, shape and dtype, and an unpacker of our own,
one value at a time from the lanes of an MMA tile, finds the values.

The kernels run on GPUs that this suite does not have, so what they compute is not tested. The unpacker knows the
operand fragments of `mma.m16n8k64` (four bits) and `m16n8k16` (16 bits): lane t of a warp holds row t // 4 of B^T, and
of the columns the runs that begin at (t % 4) times the length of a run.
"""

import importlib
import json
import sys
import types

import pytest
import torch
from safetensors.torch import load_file

import dq
from dq.linear import quantized_linears
from dq.recipe import Recipe

BF16 = torch.bfloat16
E2M1 = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0]


def nibble(stored, index):
    byte = int(stored[index // 2]) & 0xFF
    return byte >> 4 if index % 2 else byte & 0xF


def weight_codes(stored, rows, columns):
    """[N, K]: a warp reads tiles of 128 x 64 with 16 loads of 16 rows; lane t = 4 l + c holds, of rows l and l + 8, the
    columns 8 c.. and 32 + 8 c.., eight codes of 4 bits in each register."""
    flat, out = stored.flatten(), torch.zeros(rows, columns, dtype=torch.int64)
    for n in range(rows):
        for k in range(columns):
            tile = (n // 128) * (columns // 64) + k // 64
            load, row, column = n % 128 // 16, n % 16, k % 64
            lane = 4 * (row % 8) + column % 32 // 8
            register = 2 * (row // 8) + column // 32
            out[n, k] = nibble(flat, (((tile * 8 + load) * 32 + lane) * 4 + register) * 8 + column % 8)
    return out


def scale_at(stored, rows, n, g):
    """A group scale: lane t of 32 holds four rows, 2 (t % 4), + 1, + 8 and + 9 of the 16 that it is in."""
    row = n % 128
    lane = 4 * (row // 16) + row % 8 // 2
    place = 2 * (row % 16 // 8) + row % 2
    groups = stored.numel() // rows
    return stored.flatten()[((n // 128) * groups + g) * 128 + lane * 4 + place]


def micro_scale_at(stored, rows, n, g):
    """A block scale of NVFP4: lane t holds, of rows t // 4 + 8 (t % 4) + 32 i, the four of a tile of 64 columns."""
    row, groups = n % 128, stored.numel() // rows
    lane = 4 * (row % 8) + row % 32 // 8
    place = ((n // 128) * (groups // 4) + g // 4) * 512 + (lane * 4 + row // 32) * 4 + g % 4
    return stored.flatten()[place]


def lowrank(stored, rows, columns, down):
    """[N, R] or [R, K]: tiles of 16 x 16; lane 4 l + c holds the columns 2 c, 2 c + 1 and 8 more of rows l, l + 8."""
    flat, out = stored.flatten(), torch.zeros(rows, columns)
    for n in range(rows):
        for k in range(columns):
            tile = (k // 16) * (rows // 16) + n // 16 if down else (n // 16) * (columns // 16) + k // 16
            row, column = n % 16, k % 16
            lane, register = 4 * (row % 8) + column % 8 // 2, 2 * (row // 8) + column // 8
            out[n, k] = flat[tile * 256 + lane * 8 + register * 2 + column % 2]
    return out


def awq_codes(stored, rows, columns):
    """[N, K]: four rows interleaved in runs of 64 columns; int16 word j of a run of 32 holds columns j, j + 8, j + 16,
    j + 24."""
    flat, out = stored.view(torch.uint8).flatten(), torch.zeros(rows, columns, dtype=torch.int64)
    for n in range(rows):
        for k in range(columns):
            run = ((n // 4) * (columns // 64) + k // 64) * 4 + n % 4
            word = run * 16 + k % 64 // 32 * 8 + k % 8
            out[n, k] = nibble(flat, word * 4 + k % 32 // 8)
    return out


def svdq_weight(tensors, name, precision, layer):
    """[N, K] float32, the weight that a target stands for: codes, scales and low rank, in float32."""
    own = {k.rpartition(".")[2]: t for k, t in tensors.items() if k.rpartition(".")[0] == name}
    n, k = layer.out_features, layer.in_features
    codes, smooth = (
        weight_codes(own["qweight"], n, k),
        torch.stack([scale_at(own["smooth_factor"], k, i, 0) for i in range(k)]),
    )
    if precision == "int4":
        values = torch.where(codes >= 8, codes - 16, codes).float()
        scale = torch.tensor([[scale_at(own["wscales"], n, i, g) for g in range(k // 64)] for i in range(n)])
        values = values * scale.float().repeat_interleave(64, 1)
    else:
        scale = torch.tensor(
            [[float(micro_scale_at(own["wscales"], n, i, g)) for g in range(k // 16)] for i in range(n)]
        )
        values = torch.tensor(E2M1)[codes] * scale.repeat_interleave(16, 1)
        values = values * own["wtscale"].float() * own["wcscales"].float()[0]
    rank = own["proj_up"].shape[1]
    down, up = lowrank(own["proj_down"], rank, k, True), lowrank(own["proj_up"], n, rank, False)
    return values / smooth.float() + up @ down


@pytest.fixture
def made(tiny, tmp_path):
    def make(weights, activations, rank=8):
        target = {"weights": weights, "activations": activations,
                  "transforms": [{"name": "smooth"}, {"name": "lowrank", "rank": rank}]}  # fmt: skip
        entry = {"name": "test", "description": "", "linear": target, "modulation": {"weights": "int4/group64"}}
        changes = dict(num_layers=1, num_single_layers=1, num_attention_heads=4)
        model, records = tiny.flux(BF16, **changes), [tiny.flux_inputs(BF16)]
        dq.quantize(model, Recipe.from_dict(entry).with_(min_features=16), calibration=records, progress=False)
        return model, dq.export(model, tmp_path / "out", "nunchaku-lite")

    return make


GRIDS = {"int4": ("int4/group64", "int4/group64/fp32"), "nvfp4": ("nvfp4", "nvfp4-token")}


@pytest.mark.parametrize("precision", GRIDS)
def test_values(made, precision):
    model, out = made(*GRIDS[precision])
    tensors = load_file(out / "diffusion_pytorch_model.safetensors")
    name = "transformer_blocks.0.attn.add_k_proj"
    layer = quantized_linears(model)[name]
    theirs, ours = svdq_weight(tensors, name, precision, layer), layer.dequantized_weight(torch.float32)
    # Scales and smoothing factors are rounded to BF16, a relative 2^-8 each, the sum of both.
    assert (theirs - ours).norm() < 2.0**-8 * ours.norm()
    bias = torch.stack([scale_at(tensors[f"{name}.bias"], 128, i, 0) for i in range(128)])
    assert torch.equal(bias, layer.bias)
    name = "transformer_blocks.0.norm1.linear"
    layer, n, k = quantized_linears(model)[name], 768, 128
    scale, zero = tensors[f"{name}.wscales"].T.float(), tensors[f"{name}.wzeros"].T.float()
    assert scale.shape == (n, k // 64)
    codes = awq_codes(tensors[f"{name}.qweight"], n, k)
    theirs = codes * scale.repeat_interleave(64, 1) + zero.repeat_interleave(64, 1)
    ours = layer.dequantized_weight(torch.float32)
    assert (theirs - ours).norm() < 2.0**-8 * ours.norm()
    assert torch.equal(codes - 8, layer.qtensor.spec.fmt.unpack_values(layer.qweight, k).long())


@pytest.mark.parametrize("precision", GRIDS)
def test_reading_back(made, precision):
    """Same codes; what the file rounds to BF16 comes back as the file says it."""
    model, out = made(*GRIDS[precision])
    ours, back = quantized_linears(model), quantized_linears(dq.load_exported(out))
    assert list(ours) == list(back)
    for name, layer in ours.items():
        assert torch.equal(layer.qweight, back[name].qweight), name
        assert torch.equal(layer.bias, back[name].bias)
        a, b = layer.dequantized_weight(torch.float32), back[name].dequantized_weight(torch.float32)
        assert (a - b).norm() < 2.0**-7 * a.norm()
        if layer.config.rank:
            assert torch.equal(layer.lowrank_up, back[name].lowrank_up)
    name = "transformer_blocks.0.attn.add_k_proj"
    tensors = load_file(out / "diffusion_pytorch_model.safetensors")
    said = svdq_weight(tensors, name, precision, ours[name])
    assert torch.allclose(back[name].dequantized_weight(torch.float32), said, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("precision", GRIDS)
def test_the_loader_of_diffusers_takes_it(made, precision, monkeypatch):
    """Its own swap and its strict check of names; only the package that fetches kernels is left out."""
    import diffusers
    from accelerate import init_empty_weights

    kernels = types.SimpleNamespace(get_kernel=lambda *args, **kwargs: types.SimpleNamespace(ops=None))
    monkeypatch.setitem(sys.modules, "kernels", kernels)
    monkeypatch.setattr(diffusers.utils, "is_kernels_available", lambda: True)
    monkeypatch.setattr(diffusers.utils, "is_kernels_version", lambda *args: False)
    monkeypatch.setattr(diffusers.utils.constants, "DIFFUSERS_TRUST_REMOTE_KERNELS", True)
    utils = importlib.import_module("diffusers.quantizers.nunchaku.utils")
    sys.modules.pop(utils.__name__)
    model, out = made(*GRIDS[precision], rank=24)
    said = json.loads((out / "config.json").read_text())
    config = diffusers.NunchakuLiteQuantizationConfig(**said["quantization_config"])
    assert config.svdq_w4a4["rank"] == 32 and "transformer_blocks.0.norm1.linear" in config.awq_w4a16["targets"]
    with init_empty_weights():
        empty = type(model).from_config({k: v for k, v in said.items() if k != "quantization_config"})
    utils.replace_with_nunchaku_linear(empty, config.to_dict(), BF16)
    tensors = load_file(out / "diffusion_pytorch_model.safetensors")
    utils.check_strict_state_dict_match(empty, tensors)
    for name, parameter in empty.state_dict().items():
        assert (tensors[name].shape, tensors[name].dtype) == (parameter.shape, parameter.dtype) or (
            parameter.dtype == torch.float32 and tensors[name].shape == parameter.shape
        ), name
