"""LLM.int8() against item 12 of the methods specification, and its branch beside a low-rank one."""

import pytest
import torch
from torch import nn

import dq
from dq.qtensor import fake_quantize
from dq.spec import QuantSpec
from dq.stats import Stat
from dq.transforms import TRANSFORMS, GroupState, apply_steps
from dq.transforms.outliers import limit

OUTLIERS = TRANSFORMS.get("outliers")
ITEM_12 = torch.tensor([[0.5, -1.1, 8.3, 0.7], [-0.9, 0.4, -7.6, 1.2]])


def state_of(weights: dict, x: torch.Tensor, act="int8/token", spec="int8/channel", **extra) -> GroupState:
    stat = Stat(x.shape[1])
    stat.update(x)
    return GroupState(
        dict(weights), (tuple(weights),), QuantSpec.parse(spec), QuantSpec.parse(act), {next(iter(weights)): stat},
        **{"side_dtype": torch.float64} | extra,
    )  # fmt: skip


def test_item_12():
    """Column 2 leaves; the steps of the others fall from .065 to .0087, the largest error from .0228 to .0031."""
    state = state_of({"a": torch.randn(3, 4)}, ITEM_12)
    before = fake_quantize(ITEM_12, state.act_spec) - ITEM_12
    OUTLIERS.fit(state)
    x = apply_steps(ITEM_12, state.steps)
    assert x.tolist() == [[pytest.approx(v) for v in row] for row in ((0.5, -1.1, 0, 0.7), (-0.9, 0.4, 0, 1.2))]
    after = fake_quantize(x, state.act_spec) - x
    assert float(before.abs().max()) == pytest.approx(0.0228346, rel=1e-4)
    assert float(after.abs().max()) == pytest.approx(0.0031496, rel=1e-4)
    assert not state.weights["a"][:, 2].any()
    assert state.side["a"][0].tolist() == [[0, 0, 1, 0]]


def test_equation_of_the_source():
    """Y = s_x s_w (q_X,~O q_W,~O^T) + X_O W_O^T, written out."""
    x, w = torch.randn(40, 64), torch.randn(16, 64)
    x[:, [7, 30]] *= 20
    state = state_of({"a": w}, x, side_dtype=torch.float32)
    OUTLIERS.fit(state, count=2)
    down, up = state.side["a"]
    y = (
        fake_quantize(apply_steps(x, state.steps), state.act_spec)
        @ fake_quantize(state.weights["a"], state.weight_spec).T
    )
    y = y + x @ down.T @ up.T
    rest = [k for k in range(64) if k not in (7, 30)]
    expected = fake_quantize(x[:, rest], state.act_spec) @ fake_quantize(w[:, rest], state.weight_spec).T
    expected = expected + x[:, [7, 30]] @ w[:, [7, 30]].T
    torch.testing.assert_close(y, expected, rtol=1e-5, atol=1e-4)
    exact = x @ w.T
    plain = fake_quantize(x, state.act_spec) @ fake_quantize(w, state.weight_spec).T
    assert (y - exact).norm() < 0.3 * (plain - exact).norm()


def test_threshold_and_count():
    x = torch.ones(4, 128)
    x[0, [3, 50, 90]] = torch.tensor([6.0, -9.0, 5.9])
    for params, expected in (
        ({}, [3, 50]), ({"count": 1}, [50]), ({"threshold": 5.0, "count": 3}, [3, 50, 90]),
        ({"threshold": 0.0, "count": 1}, [50]), ({"threshold": 100.0}, None),
    ):  # fmt: skip
        state = state_of({"a": torch.randn(8, 128)}, x)
        OUTLIERS.fit(state, **params)
        found = state.steps and (state.steps[0].tensors["mask"] == 0).nonzero().flatten().tolist()
        assert (found or None) == expected, params


@pytest.mark.parametrize(("width", "count", "most"), [(3072, 0, 48), (64, 0, 1), (40, 0, 1), (64, 5, 5), (8, 100, 8)])
def test_limit(width, count, most):
    assert limit(count, width) == most
    assert OUTLIERS.plan((16, width), (), {"count": count}).rank == most


def test_weight_columns_are_exact_in_16_bits():
    w = torch.randn(16, 64).bfloat16().float()
    state = state_of({"a": w}, 9 * torch.randn(20, 64), side_dtype=torch.bfloat16)
    OUTLIERS.fit(state, count=4)
    at = (state.steps[0].tensors["mask"] == 0).nonzero().flatten()
    assert torch.equal(state.side["a"][1].float(), w[:, at]) and len(at) == 4


@pytest.mark.parametrize("rotate", [False, True])
def test_beside_a_low_rank_branch(rotate):
    """Both branches in one pair of factors; the low-rank part keeps out of the channels that have left."""
    x, weights = torch.randn(60, 64), {n: torch.randn(16, 64) for n in "qk"}
    x[:, [5, 9]] *= 30
    state = state_of(weights, x, "int4/token", "int4/channel", lowrank=(("q", "k"),), side_dtype=torch.bfloat16)
    names = ["outliers", "smooth", *(["rotate"] if rotate else []), "lowrank"]
    params = {"outliers": {"count": 2}, "lowrank": {"rank": 4}}
    for name in names:
        TRANSFORMS.get(name).fit(state, **params.get(name, {}))
    factor = next(s for s in state.steps if s.name == "smooth").tensors["factor"]
    assert factor[[5, 9]].tolist() == [1, 1]  # what has left the path does not count in it
    for n in "qk":
        down, up = state.side[n]
        assert down.shape == (6, 64) and up.shape == (16, 6)
        assert not down[2:, [5, 9]].any()
    assert torch.equal(state.side["q"][0], state.side["k"][0])


def test_a_model():
    """Quantized, dequantized, saved as any other layer with a branch."""
    torch.manual_seed(0)
    x = torch.randn(256, 64)
    x[:, [5, 40]] *= 40
    net = nn.Sequential(nn.Linear(64, 48)).bfloat16()
    weight, y = net[0].weight.detach().float().clone(), net(x.bfloat16()).float()
    linear = dict(weights="int8/channel", activations="int8/token", transforms=[{"name": "outliers", "count": 3}])
    recipe = dq.Recipe.from_dict(dict(name="x", linear=linear, min_features=16))
    dq.quantize(net, recipe, calibration=[dict(input=x.bfloat16())], progress=False)
    assert net[0].config.rank == 2 and net[0].outliers_mask.sum() == 62
    assert (net(x.bfloat16()).float() - y).norm() < 0.01 * y.norm()
    back = net[0].dequantized_weight(torch.float32)
    assert torch.equal(back[:, [5, 40]], weight[:, [5, 40]])
    assert (back - weight).norm() < 0.01 * weight.norm()
