"""Calibration passes: what is said about groups that were fitted to hardly any input, or that none reached."""

import warnings

import pytest
import torch
from torch import nn

import dq
from dq.auto import score_row
from dq.planning import make_plan
from dq.recipe import Recipe
from dq.registry import DQError
from dq.stats import Stat


def calibrated(rows: list[torch.Tensor], weights="int4/group16", rounding="gptq", **target):
    """The report of a 2-layer model, and what was warned about."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(32, 32), nn.Linear(32, 48))
    recipe = Recipe.from_dict(dict(name="r", linear=dict(weights=weights, rounding=rounding, **target), min_features=1))
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        report = dq.quantize(net, recipe, calibration=[dict(input=r) for r in rows], progress=False)
    return report, [str(w.message) for w in said if "SQNR of" in str(w.message)]


@pytest.mark.parametrize("rows", [[torch.ones(1, 32)], [torch.ones(100, 32)] * 3, [torch.randn(5, 32)]])
def test_few_distinct_inputs_are_remarked(rows):
    """One row, many equal rows, a few: SQNRs on them look excellent, and the report says what they are worth."""
    report, said = calibrated(rows)
    count = len(torch.unique(torch.cat(rows), dim=0))
    text = f"SQNR of 2 groups, e.g. of 0 ({count} distinct inputs), is measured on the few calibration inputs that"
    assert len(said) == 1 and said[0].startswith(text)
    assert said[0] in report.plan.remarks and f"note: {text}" in str(report)


def test_enough_inputs_and_data_free_recipes_are_not():
    assert calibrated([torch.randn(8, 32) for _ in range(4)])[1] == []
    report, said = calibrated([torch.ones(1, 32)], rounding="rtn")  # fitted to nothing
    assert said == [] and report.plan.remarks == ()


W4, W8 = (dict(weights=f"int{b}/channel", activations=f"int{b}/token") for b in (4, 8))


def auto(*candidates) -> Recipe:
    candidates = candidates or (("w4", W4), ("w8", W8))
    table = dict(candidates=[dict(name=n, **t) for n, t in candidates])
    return Recipe.from_dict(dict(name="auto", auto=table, min_features=16))


def test_a_layer_that_nothing_reached_is_named_once():
    """Not once per candidate."""
    net = nn.ModuleDict(dict(used=nn.Linear(64, 48), idle=nn.Linear(64, 48)))
    net.forward = lambda x: net["used"](x)
    with pytest.raises(DQError, match=r"^idle: no calibration input reached this layer; give records that run it or"):
        dq.quantize(net, auto(), calibration=[dict(x=torch.randn(8, 64)) for _ in range(4)], progress=False)


def test_one_reason_of_many_candidates_is_said_once():
    wide = dict(weights="nvfp4", activations="nvfp4-token")
    odd = [(n, wide | dict(transforms=[dict(name="rotate", size=s)])) for n, s in (("a", 64), ("b", 64), ("c", 16))]
    row = make_plan(nn.Sequential(nn.Linear(40, 48)), auto()).quantized[0]
    stat = Stat(40)
    stat.update(torch.randn(64, 40))
    with pytest.raises(DQError, match=r"no candidate fits: a, b: rotation size 64 .*; c: rotation size 16 does not"):
        score_row(nn.Sequential(nn.Linear(40, 48)), row, {"0": stat}, auto(*odd).auto)
