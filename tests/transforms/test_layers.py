"""Rotations and DuQuant in whole quantized linears: what they gain there, and that a description brings them back."""

import json

import pytest
import torch

from dq.linear import LinearConfig, QuantizedLinear
from dq.recipe import Recipe

CASES = [
    [{"name": "rotate"}],
    [{"name": "rotate", "kind": "sylvester", "size": "full"}],
    [{"name": "rotate", "kind": "random", "size": -1, "seed": 4}],
    [{"name": "duquant", "steps": 16}],
    [{"name": "smooth", "alpha": 0.6}, {"name": "duquant", "steps": 16}],
]


def built(tiny, transforms):
    """A W4A4 linear 192 -> 96 on inputs with three loud channels; its original; the inputs."""
    linear = {"weights": "int4/channel", "activations": "int4/token", "transforms": transforms}
    torch.manual_seed(0)
    x = torch.randn(400, 192)
    x[:, [3, 77, 150]] *= 25
    layer, source = tiny.layer(Recipe.from_dict({"name": "test", "linear": linear}), n=96, k=192, x=x)
    return layer, source, x


def error(layer, source, x):
    return float((layer(x) - source(x)).norm() / source(x).norm())


@pytest.mark.parametrize("transforms", CASES, ids=lambda ts: "+".join("-".join(map(str, t.values())) for t in ts))
def test_layers(tiny, transforms):
    plain = error(*built(tiny, []))
    layer, source, x = built(tiny, transforms)
    assert error(layer, source, x) < 0.6 * plain
    assert float((layer.dequantized_weight() - source.weight).norm() / source.weight.norm()) < 0.2
    config = LinearConfig.from_dict(json.loads(json.dumps(layer.config.to_dict())))
    again = QuantizedLinear(192, 96, config, dtype=torch.float32)
    again.load_state_dict(layer.state_dict())
    assert torch.equal(again(x), layer(x))
    assert all(t.dtype == layer.state_dict()[n].dtype for n, t in again.half().state_dict().items() if n != "bias")
