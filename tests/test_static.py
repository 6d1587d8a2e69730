"""Static activation scales, and the merging of statistics over step bins and CFG branches."""

import pytest
import torch

from dq.linear import quantized_linears
from dq.loop import quantize_model
from dq.ops import reference_qlinear
from dq.planning import make_plan
from dq.recipe import Recipe, Target
from dq.records import Record
from dq.registry import DQError
from dq.spec import SCALE_RULES, QuantSpec
from dq.stats import Stat, spearman

TOPS = {"0/single": [0.5, 6, 0.9, 1.5], "1/single": [0.8, 4, 2.5, 1], "2/single": [3, 1.2, 0.7, 2]}
WEIGHT = torch.tensor([0.9, 0.1, 0.4, 0.6])


def stat(tops=TOPS):
    s = Stat(4)
    s.absmax = {k: torch.tensor(v, dtype=torch.float32) for k, v in tops.items()}
    return s


def test_spearman_merge_of_ptq4dit():
    """methods_diffusion V5: rho, and the aggregated salience."""
    assert [round(spearman(torch.tensor(a), WEIGHT), 6) for a in TOPS.values()] == [-0.8, -1.0, 0.8]
    expected = torch.tensor([0.859494, 4.592040, 1.689777, 1.289645])
    torch.testing.assert_close(stat().amax("spearman", weight=WEIGHT), expected, atol=1e-6, rtol=0)


def test_spearman_averages_ties():
    assert spearman(torch.tensor([1.0, 1.0, 2.0]), torch.tensor([1.0, 2.0, 3.0])) == pytest.approx(0.8660254)
    assert spearman(torch.ones(3), torch.arange(3.0)) == 0.0


def test_max_mean_and_cfg_merges():
    s = stat({"0/cond": [1.0, 0, 0, 0], "0/uncond": [0, 1.0, 0, 0]})
    assert s.amax().tolist() == [1, 1, 0, 0]
    assert s.amax("mean").tolist() == [0.5, 0.5, 0, 0]
    cfg = s.amax("cfg", guidance=3.5)  # g^2 : (g - 1)^2 = 12.25 : 6.25
    torch.testing.assert_close(cfg[:2], torch.tensor([12.25, 6.25]) / 18.5)


def test_merge_errors():
    with pytest.raises(DQError, match="did you mean 'mean'"):
        stat().amax("meen")
    with pytest.raises(DQError, match="column maxima"):
        stat().amax("spearman")


def _model():
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(32, 32), torch.nn.GELU(), torch.nn.Linear(32, 32))


def _records():
    return [Record((torch.randn(7, 32, generator=torch.Generator().manual_seed(i)),), {}) for i in range(4)]


@pytest.mark.parametrize("rule", ["absmax", "percentile", "mse"])
def test_static_scale_is_calibrated_and_used(rule):
    spec = QuantSpec.parse(f"int8/tensor@{rule}")
    recipe = Recipe("static", Target(QuantSpec.parse("int8/channel"), spec), min_features=8)
    assert recipe.needs_calibration
    model, records = _model(), _records()
    quantize_model(model, make_plan(model, recipe), records)
    layer = quantized_linears(model)["0"]
    top = max(float(r.args[0].abs().max()) for r in records) / 127
    scale = float(layer.input_scale)
    assert scale == pytest.approx(top) if rule == "absmax" else 0 < scale <= top * 1.0001
    x = torch.randn(3, 32)
    q = torch.round(x / layer.input_scale).clamp(-127, 127) * layer.input_scale
    expected = q @ layer.qtensor.dequantize().T + layer.bias
    torch.testing.assert_close(reference_qlinear(x, layer.params), expected)
    again = type(layer)(32, 32, layer.config, dtype=layer.compute_dtype)
    again.load_state_dict(layer.state_dict())
    assert torch.equal(again(x), layer(x))


@pytest.mark.parametrize("rule", [r.name for r in SCALE_RULES if r.needs])
def test_weighted_rules_beside_transforms(rule):
    """Searches inside transforms have no importances; the rounding at the end has them."""
    transforms = (("smooth", (("search", True),)), ("lowrank", ()))
    target = Target(QuantSpec.parse(f"nvfp4@{rule}"), QuantSpec.parse("nvfp4-token"), transforms)
    model = _model()
    quantize_model(model, make_plan(model, Recipe("weighted", target, min_features=8)), _records())
    assert all(layer.sqnr_db > 10 for layer in quantized_linears(model).values())


def test_weighted_rules_need_calibration_and_use_it():
    recipe = Recipe("weighted", Target(QuantSpec.parse("nvfp4@weighted_sweep")), min_features=8)
    assert recipe.needs_calibration
    model = _model()
    with pytest.raises(DQError, match="needs calibration"):
        quantize_model(model, make_plan(model, recipe))
    quantize_model(model, make_plan(model, recipe), _records())
    assert len(quantized_linears(model)) == 2
