"""Bias correction in whole layers: the output keeps its mean over calibration; what has no bias stays without."""

import pytest
import torch
from torch import nn

import dq
from dq.recipe import Recipe, Target

TRANSFORMS = {
    "none": [],
    "smooth": ["smooth"],
    "rotate": ["rotate"],
    "lowrank": ["lowrank"],
    "arc": [{"name": "arc", "channels": 16}],
    "dual": [{"name": "arc", "channels": 16, "dual": True}],
    "shift": [{"name": "shift", "value": 0.171875}],
}


def recipe(transforms=(), corrected=True, rounding="rtn", weights="int4/group16", acts="int4/group16") -> Recipe:
    linear = dict(weights=weights, activations=acts, transforms=list(transforms), rounding=rounding)
    return Recipe.from_dict(dict(name="t", linear=linear | dict(bias_correction=corrected), min_features=1))


def inputs():
    """Tokens that do not have mean 0, so that rounding moves the mean of the output."""
    return torch.randn(200, 64, generator=torch.Generator().manual_seed(3)).relu() * (1 + torch.arange(64) % 5)


@pytest.mark.parametrize("rounding", ["rtn", "gptq", {"name": "gptq", "executed": True}])
@pytest.mark.parametrize("transforms", TRANSFORMS.values(), ids=TRANSFORMS)
def test_the_mean_is_kept(tiny, transforms, rounding):
    x = inputs()
    layer, source = tiny.layer(recipe(transforms, rounding=rounding), x=x)
    without, _ = tiny.layer(recipe(transforms, False, rounding), x=x)
    y, shift = source(x), 1e-5 * source(x).abs().amax()
    assert ((layer(x) - y).mean(0).abs() <= shift).all()
    assert ((without(x) - y).mean(0).abs() > shift).float().mean() > 0.9
    assert (layer(x) - y).norm() < (without(x) - y).norm()
    assert layer.config == without.config


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_it_keeps_the_dtype(tiny, dtype):
    x = inputs()
    layer, source = tiny.layer(recipe(), x=x, dtype=dtype)
    assert layer.bias.dtype == dtype and not layer.bias.requires_grad
    off = (layer(x.to(dtype)).float() - source.float()(x.to(dtype).float())).mean(0)
    assert off.abs().max() < 4 * torch.finfo(dtype).eps * source(x).abs().max()


def test_layers_without_a_bias_stay_so(tiny):
    x = inputs()
    layer, _ = tiny.layer(recipe(), bias=False, x=x)
    assert layer.bias is None
    model = nn.Sequential(nn.Linear(64, 32, bias=False), nn.Linear(32, 32), nn.Linear(32, 32))
    biases = [None if m.bias is None else m.bias.detach().clone() for m in model]
    rules = [dict(match="2", weights="int4/group16")]
    dq.quantize(
        model, Recipe.from_dict(recipe().to_dict() | {"rules": rules}), calibration=[dict(input=x)], progress=False
    )
    assert model[0].bias is None and "0.bias" not in model.state_dict()
    assert not torch.equal(model[1].bias, biases[1])
    assert torch.equal(model[2].bias, biases[2]), "a rule's own target did not ask for it"


@pytest.mark.parametrize("rounding", ["gptq", "rtn"])
def test_without_a_bias_nothing_is_left_to_it(tiny, rounding):
    """GPTQ may ignore what moves the mean only where a bias takes it up; else it is asked for in vain."""
    x = inputs()
    layer, source = tiny.layer(recipe(rounding=rounding), bias=False, x=x)
    without, _ = tiny.layer(recipe(corrected=False, rounding=rounding), bias=False, x=x)
    assert torch.equal(layer.qweight, without.qweight) and torch.equal(layer(x), without(x))
    shifted, source = tiny.layer(recipe(TRANSFORMS["shift"], rounding=rounding), bias=False, x=x)
    assert ((shifted(x) - source(x)).mean(0).abs() < 1e-5 * source(x).abs().amax()).all(), "a shift makes a bias"


@pytest.mark.parametrize("name", ["none", "dual", "shift"])
def test_the_measured_sqnr_counts_it(tiny, name):
    """What GPTQ leaves to the bias is no error of the layer; its own 16-bit bias is no signal."""
    x = inputs()
    layer, source = tiny.layer(recipe(TRANSFORMS[name], rounding="gptq"), x=x)
    y = source(x[:128]) - source.bias
    noise = (layer(x[:128]) - source(x[:128])).square().sum()
    assert layer.sqnr_db == pytest.approx(float(10 * (y.square().sum() / noise).log10()), abs=0.01)


def test_recipes_carry_it():
    target = recipe().linear
    assert target.bias_correction and target.needs_calibration
    assert Target.from_dict(target.to_dict()) == target
    assert not Target.from_dict(dict(weights="int8/channel")).bias_correction
    with pytest.raises(dq.DQError, match="needs calibration"):
        dq.quantize(nn.Sequential(nn.Linear(64, 64)), recipe(), progress=False)
