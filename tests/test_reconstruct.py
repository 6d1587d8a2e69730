"""Block reconstruction: the stand-in computes what the layer does, gains on the block's output, and is repeatable."""

import copy

import pytest
import torch
from torch import nn

from dq.linear import quantized_linears
from dq.loop import quantize_model
from dq.planning import make_plan
from dq.qtensor import encode
from dq.recipe import Recipe, Target
from dq.reconstruct import _inside, _Learned, _Loss, reconstruct
from dq.records import Record
from dq.registry import DQError

KINDS = {
    "weight-only": {"weights": "int4/group32"},
    "asymmetric": {"weights": "uint4/group32", "activations": "int8/token"},
    "smooth, low rank": {"weights": "int4/group32", "activations": "int8/token", "transforms": ["smooth", "lowrank"]},
    "rotated": {"weights": "nvfp4", "activations": "nvfp4-token", "transforms": ["rotate"]},
    "residual": {"weights": "nvfp4", "activations": "nvfp4-token", "transforms": [{"name": "arc", "channels": 16}]},
    "dual": {
        "weights": "nvfp4",
        "activations": "nvfp4-token",
        "transforms": [{"name": "arc", "channels": 16, "dual": True}],
    },
    "shifted": {"weights": "int4/group64", "activations": "int4/group64/fp32", "transforms": ["shift"]},
    "static": {"weights": "int8/channel", "activations": "int8/tensor"},
}


class Toy(nn.Module):
    def __init__(self, k=64):
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(k), nn.Linear(k, 2 * k), nn.Linear(2 * k, k)

    def forward(self, x):
        return x + self.down(nn.functional.gelu(self.up(self.norm(x))))


def calls(count, seed):
    mix = torch.randn(12, 64, generator=torch.Generator().manual_seed(5))
    g = torch.Generator().manual_seed(seed)
    noise = (torch.randn(48, 12, generator=g) @ mix + 0.3 * torch.randn(48, 64, generator=g) for _ in range(count))
    return [((x,), {}) for x in noise]


def layers(block, target, inputs):
    model = copy.deepcopy(block)
    recipe = Recipe("test", Target.from_dict(dict(target)), min_features=8)
    quantize_model(model, make_plan(model, recipe), [Record(*i) for i in inputs])
    return quantized_linears(model)


def error(block, found, inputs):
    loss = _Loss(block, inputs, None)
    with _inside(block, found):
        return loss.mean()


@pytest.mark.parametrize("kind", KINDS)
def test_the_stand_in_is_the_layer(kind):
    """Before anything is learned, the hardened layer is the same one, and the stand-in with hard choices runs it."""
    block, inputs = Toy(), calls(4, 0)
    found = layers(block, KINDS[kind], inputs)
    assert found["down"].config.shifted == (kind == "shifted") and found["down"].config.dual == (kind == "dual")
    for name, layer in found.items():
        learned = _Learned(layer, block.get_submodule(name).weight)
        assert torch.equal(learned.hardened().qweight, layer.qweight)
        learned.soft.v.data = 50.0 * learned.soft.v.data.sign()
        x = torch.randn(7, layer.in_features)
        torch.testing.assert_close(learned(x), layer(x), atol=1e-5, rtol=1e-4)
        learned.soft.v.data = -learned.soft.v.data  # all choices the other way: still on the grid, and run alike
        other = learned.hardened()
        values = other.qtensor.dequantize()
        assert torch.equal(encode(values, other.qtensor.scales, other.config.weights).codes, other.qweight)
        torch.testing.assert_close(learned(x), other(x), atol=1e-4, rtol=1e-3)


@pytest.mark.parametrize("kind", ["weight-only", "rotated", "dual"])
def test_gains_on_the_block_and_on_held_out_calls(kind):
    torch.manual_seed(0)
    block, inputs = Toy(), calls(6, 0)
    start = layers(block, KINDS[kind], inputs)
    first, again = (reconstruct(block, start, inputs, iters=120) for _ in range(2))
    assert first.after < 0.8 * first.before
    assert first.before == pytest.approx(error(block, start, inputs))
    assert first.after == pytest.approx(error(block, first.layers, inputs))
    assert error(block, first.layers, calls(3, 1)) < 0.9 * error(block, start, calls(3, 1))
    for name, layer in first.layers.items():
        assert torch.equal(layer.qweight, again.layers[name].qweight)
        assert torch.equal(layer.weight_scale.view(torch.uint8), start[name].weight_scale.view(torch.uint8))
        assert not torch.equal(layer.qweight, start[name].qweight)
    assert type(block.up) is nn.Linear and not block.up.weight.grad_fn and block.up.weight.grad is None


def test_goes_on_from_adaround_and_never_falls_behind():
    torch.manual_seed(0)
    block, inputs = Toy(), calls(6, 0)
    target = {"weights": "nvfp4", "activations": "nvfp4-token"}
    plain = layers(block, target | {"rounding": {"name": "adaround", "iters": 200, "sweeps": 0}}, inputs)
    found = reconstruct(block, plain, inputs, iters=150)
    assert found.after < found.before < error(block, layers(block, target, inputs), inputs)
    short = reconstruct(block, layers(block, target | {"rounding": "gptq"}, inputs), inputs, iters=3)
    assert short.after <= short.before


def test_the_regulariser_counts_every_choice_of_every_layer(monkeypatch):
    """The public code of the method forgets the second half of split layers."""
    block, inputs = Toy(), calls(2, 0)
    counted = []
    monkeypatch.setattr("dq.reconstruct.regulariser", lambda h, b: (counted.append(h.numel()), h.sum())[1])
    reconstruct(block, layers(block, KINDS["weight-only"], inputs), inputs, iters=1, warmup=0.0)
    assert sum(counted) == 2 * 64 * 128


def test_a_flux_block(tiny):
    """Two streams in, two streams out, several attention projections; records from the replayed model."""
    from dq.replay import Replay, call_order

    model = tiny.flux()
    records = [Record((), tiny.flux_inputs(seed=i)) for i in range(3)]
    name = "transformer_blocks.0"
    replay = Replay(model, call_order(model, [name], records[0]), records, False)
    inputs = [replay.inputs(name, i) for i in range(3)]
    block = model.get_submodule(name)
    quantized = tiny.flux()
    recipe = tiny.recipe("w4a4-int4")
    quantize_model(quantized, make_plan(quantized, recipe), records)
    start = quantized_linears(quantized.get_submodule(name))
    assert len(start) >= 8
    found = reconstruct(block, start, inputs, iters=40)
    assert found.after < 0.98 * found.before
    assert set(found.layers) == set(start)


def test_complaints():
    block, inputs = Toy(), calls(1, 0)
    found = layers(block, KINDS["weight-only"], inputs)
    with pytest.raises(DQError, match="calls of the block"):
        reconstruct(block, found, [])
    with pytest.raises(DQError, match="no 16-bit linear 'middle' in Toy"):
        reconstruct(block, {"middle": found["up"]}, inputs)
    with pytest.raises(DQError, match="iters 0"):
        reconstruct(block, found, inputs, iters=0)
