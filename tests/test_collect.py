"""Calibration passes: what is remarked about groups that were fitted to hardly any input."""

import warnings

import pytest
import torch
from torch import nn

import dq
from dq.recipe import Recipe


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
