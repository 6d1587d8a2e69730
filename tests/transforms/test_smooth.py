"""Smoothing against vector V1 and item 17 of the methods specification, and the rules for groups and dead channels."""

import pytest
import torch

import dq
from dq.qtensor import fake_quantize
from dq.recipe import Target
from dq.registry import DQError
from dq.spec import QuantSpec
from dq.stats import Stat
from dq.transforms import TRANSFORMS, GroupState, apply_steps
from dq.transforms.rotate import regular_hadamard
from dq.transforms.smooth import GRID, GRIDS, smoothing_factor

SMOOTH = TRANSFORMS.get("smooth")
V1_X = [[0.6, -45, 1.1, -0.8], [-1.2, 62, 0.4, 0.9], [0.8, -51, -0.7, 1.0]]
V1_W = [[0.50, 0.08, -0.40, 0.30], [-0.20, 0.05, 0.60, -0.25]]


def state_of(weights: dict, x: dict, act="int8/token", spec="int8/channel", **extra) -> GroupState:
    """Every weight of one input per entry of x; the keys of x are tuples of member names."""
    stats = {}
    for members, rows in x.items():
        stats[members[0]] = Stat(rows.shape[1], name=members[0])
        stats[members[0]].update(rows)
    act = None if act is None else QuantSpec.parse(act)
    return GroupState(dict(weights), tuple(x), QuantSpec.parse(spec), act, stats, **extra)


def relative_error(x, w, x_spec, w_spec):
    y = x @ w.T
    xq, wq = fake_quantize(x, QuantSpec.parse(x_spec)), fake_quantize(w, QuantSpec.parse(w_spec))
    return float((xq @ wq.T - y).norm() / y.norm())


def test_v1():
    x, w = torch.tensor(V1_X), torch.tensor(V1_W)
    state = state_of({"a": w}, {("a",): x})
    SMOOTH.fit(state, alpha=0.5)
    factor = state.steps[0].tensors["factor"]
    assert factor.tolist() == pytest.approx([1.549193, 27.838822, 1.354006, 1.825742], rel=1e-6)
    xs, ws = apply_steps(x, state.steps), state.weights["a"]
    assert xs[0].tolist() == pytest.approx([0.387298, -1.616448, 0.812404, -0.438178], abs=1e-6)
    assert ws[0].tolist() == pytest.approx([0.774597, 2.227106, -0.541603, 0.547723], abs=1e-6)
    assert ws[1].tolist() == pytest.approx([-0.309839, 1.391941, 0.812404, -0.456435], abs=1e-6)
    assert relative_error(x, w, "int8/tensor", "int8/tensor") == pytest.approx(0.02369, abs=5e-6)
    assert relative_error(xs, ws, "int8/tensor", "int8/tensor") == pytest.approx(0.00443, abs=5e-6)
    assert relative_error(x, w, "int8/token", "int8/channel") == pytest.approx(0.03248, abs=5e-6)
    assert relative_error(xs, ws, "int8/token", "int8/channel") == pytest.approx(0.000702, abs=5e-7)


def test_both_sides_have_equal_maxima():
    """Item 17: at alpha 1/2, max |x_k| and max |W_k| meet at sqrt(a_k w_k)."""
    x = torch.tensor([[0.6, -45, 1.1, -0.8], [-1.2, 62, 0.7, 1], [0.9, -38, -1.4, 0.5]])
    w = torch.tensor([[0.3, -0.2, 0.4], [0.05, -0.08, 0.06], [-0.5, 0.25, 0.1], [0.2, 0.35, -0.45]]).T.contiguous()
    state = state_of({"a": w}, {("a",): x})
    SMOOTH.fit(state, alpha=0.5)
    factor = state.steps[0].tensors["factor"]
    assert factor.tolist() == pytest.approx([1.732051, 27.838822, 1.67332, 1.490712], rel=1e-6)
    maxima = [0.69282, 2.227106, 0.83666, 0.67082]
    assert apply_steps(x, state.steps).abs().amax(0).tolist() == pytest.approx(maxima, abs=1e-6)
    assert state.weights["a"].abs().amax(0).tolist() == pytest.approx(maxima, abs=1e-6)


def test_a_group_has_one_factor():
    """a_k is the maximum over all inputs of the group, w_k over all its weights: q/k/v, and to_out with to_add_out."""
    x1, x2 = torch.randn(40, 16), 5 * torch.randn(30, 16)
    weights = {n: torch.randn(8, 16) for n in ("q", "k", "out")}
    state = state_of(weights, {("q", "k"): x1, ("out",): x2})
    SMOOTH.fit(state, alpha=0.3)
    a = torch.cat([x1, x2]).abs().amax(0)
    w = torch.cat(list(weights.values())).abs().amax(0)
    assert len(state.steps) == 1
    torch.testing.assert_close(state.steps[0].tensors["factor"], a**0.3 / w**0.7)
    for name, raw in weights.items():
        torch.testing.assert_close(state.weights[name], raw * state.steps[0].tensors["factor"])


def test_factor_is_one_where_it_would_mean_nothing():
    """Section 2: lambda := 1 where a channel is never active; a column of zero weights needs none either."""
    a, w = torch.tensor([0.0, 2.0, 1e30, 4.0]), torch.tensor([1.0, 0.0, 1e-30, 1.0])
    factor = smoothing_factor(a, w, 1.0, 0.0)
    assert factor[:2].tolist() == [1, 1] and torch.isfinite(factor).all() and (factor > 0).all()
    assert factor[3] == 4


def test_no_step_where_nothing_changes():
    state = state_of({"a": torch.ones(4, 8)}, {("a",): torch.ones(5, 8)})
    SMOOTH.fit(state, alpha=0.5)
    assert state.steps == []


def output_error(state: GroupState, raw: dict, x: dict) -> float:
    total = 0.0
    for members, rows in x.items():
        xq = fake_quantize(apply_steps(rows, state.steps), state.act_spec)
        for m in members:
            wq = fake_quantize(state.weights[m], state.weight_spec)
            total += float((xq @ wq.T - rows @ raw[m].T).square().sum())
    return total


def loud(rows, width, channels, gain):
    x = torch.randn(rows, width)
    x[:, channels] *= gain
    return x


@pytest.mark.parametrize(("act", "spec"), [("int8/token", "int8/channel"), ("int4/group16", "int4/group16")])
def test_search_is_no_worse_than_any_candidate(act, spec):
    """The grid holds "no smoothing" and alpha = beta = 1/2, so the search can lose to neither."""
    x, w = loud(64, 32, [3, 17], 30.0), torch.randn(24, 32)
    errors = {}
    for label, params in {"search": {"search": True}, "half": {"alpha": 0.5}, "none": None}.items():
        state = state_of({"a": w}, {("a",): x}, act, spec)
        if params is not None:
            SMOOTH.fit(state, **params)
        errors[label] = output_error(state, {"a": w}, {("a",): x})
    assert errors["search"] <= min(errors["half"], errors["none"]) * (1 + 1e-5)
    assert errors["search"] < 0.7 * errors["none"]


def test_grid_starts_with_no_smoothing():
    assert GRID[0] == (0.0, 0.0) and (0.5, 0.5) in GRID
    assert smoothing_factor(torch.rand(5) + 1, torch.rand(5) + 1, 0.0, 0.0).tolist() == [1.0] * 5


def test_parts_are_searched_apart():
    """A concatenated input [attention | mlp]: here only the second part has loud channels, and only it is smoothed."""
    x = torch.cat([torch.sign(torch.randn(64, 16)), loud(64, 48, [5, 20], 40.0)], 1)
    w = torch.cat([torch.sign(torch.randn(24, 16)), torch.randn(24, 48)], 1)
    state = state_of({"a": w}, {("a",): x}, "int4/group16", "int4/group16", k_parts=(16, 48))
    SMOOTH.fit(state, search=True)
    factor = state.steps[0].tensors["factor"]
    assert factor[:16].unique().numel() == 1 and factor[16:].unique().numel() > 1


def test_search_counts_with_the_low_rank_branch():
    """With a branch that swallows the whole weight, only the activation error is left to choose by."""
    x, w = loud(64, 16, [3], 50.0), torch.randn(8, 16)
    state = state_of({"a": w}, {("a",): x}, "int4/token", "int4/channel", rank=8)
    SMOOTH.fit(state, search=True)
    full_rank = state_of({"a": w}, {("a",): x}, None, "int4/channel", rank=8)
    SMOOTH.fit(full_rank, search=True)
    assert full_rank.steps == [] or output_error_16bit(full_rank, w, x) < 1e-6


def output_error_16bit(state, w, x):
    return float((apply_steps(x, state.steps) @ state.weights["a"].T - x @ w.T).norm() / (x @ w.T).norm())


def test_v5():
    """PTQ4DiT: the maxima of three steps merged by rank correlation; both sides then meet at sqrt(s_rho s_w)."""
    tops = torch.tensor([[0.5, 6, 0.9, 1.5], [0.8, 4, 2.5, 1], [3, 1.2, 0.7, 2]])
    w = torch.tensor([[0.9, 0.1, 0.4, 0.6], [0.0, 0.1, -0.2, 0.3]])
    state = state_of({"a": w}, {("a",): tops[:0]})
    for i, top in enumerate(tops):
        state.stats["a"].update(top[None], f"{i}/single")
    SMOOTH.fit(state, merge="spearman")
    factor = state.steps[0].tensors["factor"]
    assert factor.tolist() == pytest.approx([0.977238, 6.776459, 2.055345, 1.466086], rel=1e-6)
    balanced = [0.879514, 0.677646, 0.822138, 0.879652]
    assert state.weights["a"].abs().amax(0).tolist() == pytest.approx(balanced, abs=1e-6)
    assert (torch.tensor([0.859494, 4.592040, 1.689777, 1.289645]) / factor).tolist() == pytest.approx(
        balanced, abs=1e-6
    )


@pytest.mark.parametrize(
    ("alpha_v", "mask"),
    [
        (0.5, [0.223607, 0.894427, 0.316228, 1.788854]),
        (0.5665, [0.220313, 0.803644, 0.271331, 1.607287]),
        (0.11, [0.243938, 1.675496, 0.776247, 3.350991]),
    ],
)
def test_v6_mask_of_vidit_q(alpha_v, mask):
    """ViDiT-Q's mask is 1/lambda, its alpha 1 - alpha; its form of 2024 is ours."""
    a, w = torch.tensor([4.0, 0.5, 1.0, 0.25]), torch.tensor([0.2, 0.4, 0.1, 0.8])
    assert (1 / smoothing_factor(a, w, 1 - alpha_v, alpha_v)).tolist() == pytest.approx(mask, abs=1e-6)
    if alpha_v == 0.11:
        old = [4.878765, 2.094370, 7.762471, 1.047185]
        assert smoothing_factor(a, w, alpha_v, 1 - alpha_v).tolist() == pytest.approx(old, abs=1e-6)


def test_v6_branches_do_not_share_a_scale():
    """One scale for both halves of a guided batch (ViDiT-Q's default): error .0098 instead of .00235."""
    cond, uncond = torch.tensor([[0.9, -1.4, 0.3]]), torch.tensor([[0.2, 0.1, -7.0]])
    joint = fake_quantize(torch.cat([cond, uncond], 1), QuantSpec("uint8", "token"))[:, :3]
    assert float((joint - cond).abs().max()) == pytest.approx(0.009803922, rel=1e-5)
    ours = fake_quantize(torch.cat([cond, uncond]), QuantSpec("uint8", "token"))[:1]
    assert float((ours - cond).abs().max()) == pytest.approx(0.002352941, rel=1e-4)


def test_static_dynamic_recipe():
    """ViDiT-Q: a mask for what stays over the steps, a rotation for what moves; weights rounded once, after both."""
    target = dict(weights="int4/channel", activations="int8/token")
    target["transforms"] = [{"name": "smooth", "alpha": 1 - 0.5665}, "rotate"]
    recipe = dq.Recipe.from_dict(dict(name="static-dynamic", linear=target, min_features=16))
    torch.manual_seed(0)
    x, net = loud(256, 64, [3, 17, 40], 30.0), torch.nn.Sequential(torch.nn.Linear(64, 48))
    weight = net[0].weight.detach().clone()
    dq.quantize(net, recipe, calibration=[dict(input=x)], progress=False)
    assert [n for n, _ in net[0].config.steps] == ["smooth", "rotate"]
    a, w = x.abs().amax(0), weight.abs().amax(0)
    torch.testing.assert_close(1 / net[0].smooth_factor, w**0.5665 / a**0.4335)
    turned = (weight * net[0].smooth_factor) @ regular_hadamard(64)
    step = net[0].weight_scale
    assert ((net[0].qtensor.dequantize() - turned).abs() <= 0.5001 * step).all()


def test_grid_of_svdquant():
    """alpha = .5, beta = -2, 20 steps: (0, 0), (i/20, 0) and (i/20, 1 - i/20) for i = 1..19."""
    grid = GRIDS["svdquant"]
    assert len(grid) == len(set(grid)) == 39 and grid[0] == (0, 0)
    assert {a for a, b in grid if b} == {a for a, b in grid[1:] if not b} == {i / 20 for i in range(1, 20)}
    assert all(b == 0 or b == 1 - a for a, b in grid)
    assert len(GRID) == 11 and set(GRID) <= set(grid)


def test_the_long_grid_is_no_worse():
    x, w = loud(64, 32, [3, 17], 30.0), torch.randn(24, 32)
    errors = {}
    for grid in GRIDS:
        state = state_of({"a": w}, {("a",): x}, "int4/group16", "int4/group16")
        SMOOTH.fit(state, search=True, grid=grid)
        errors[grid] = output_error(state, {"a": w}, {("a",): x})
    assert errors["svdquant"] <= errors["short"] * (1 + 1e-5)


def test_quantile_guards_against_massive_activations():
    """One token a thousand times above the rest no longer sets lambda; ordinary loud channels still do."""
    x = loud(400, 16, [3], 30.0)
    x[7, 5] = 4000.0
    factors = {}
    for q in (1.0, 0.99):
        state = state_of({"a": torch.randn(8, 16)}, {("a",): x})
        SMOOTH.fit(state, quantile=q)
        factors[q] = state.steps[0].tensors["factor"]
    assert factors[0.99][5] < factors[1.0][5] / 10
    assert factors[0.99][3] > factors[1.0][3] / 2


def test_two_diagonals_are_one_step():
    """AWQ and smoothing leave the same step: a layer holds one factor, and its buffers do not collide."""
    x, w = loud(64, 32, [3, 17], 30.0), torch.randn(24, 32)
    state = state_of({"a": w}, {("a",): x}, None, "int4/group16")
    TRANSFORMS.get("awq").fit(state)
    assert len(state.steps) == 1
    SMOOTH.fit(state, alpha=0.3)
    assert [s.name for s in state.steps] == ["smooth"]
    torch.testing.assert_close(apply_steps(x, state.steps) @ state.weights["a"].T, x @ w.T, rtol=1e-4, atol=1e-3)


def test_shifted_inputs_count_as_shifted():
    """a_k is the maximum of x + c; a channel that was taken out of the input has none."""
    x = torch.rand(50, 8) * torch.arange(1, 9)
    state = state_of({"a": torch.randn(4, 8)}, {("a",): x}, "int4/token")
    TRANSFORMS.get("shift").fit(state, value=1.0)
    w = state.weights["a"].abs().amax(0)
    SMOOTH.fit(state)
    torch.testing.assert_close(state.steps[1].tensors["factor"], (x.amax(0) + 1).sqrt() / w.sqrt())


@pytest.mark.parametrize("params", [{"grid": "long"}, {"quantile": 0.0}, {"quantile": 1.5}, {"alpha": 2.0}])
def test_wrong_parameters_are_refused(params):
    target = dict(weights="int8/channel", transforms=[{"name": "smooth"} | params])
    with pytest.raises(
        dq.DQError, match=r"quantile above 0 and at most 1, merge one of .*, grid one of short, svdquant"
    ):
        dq.Recipe.from_dict(dict(name="x", linear=target))


@pytest.mark.parametrize(
    ("name", "params", "words"),
    [
        ("smooth", dict(search=True, alpha=0.5), "alpha is used only with search = false"),
        ("smooth", dict(rows=16), "rows is used only with search = true"),
        ("smooth", dict(alpha=0.5, grid="short"), "grid is used only with search = true"),
        ("smooth", dict(guidance=2.0), "guidance is used only with merge = 'cfg'"),
        ("arc", dict(channels=32, threshold=True), "threshold finds the number of channels: give one of the two"),
        ("rotate", dict(seed=1), "seed is used only with kind = 'random'"),
        ("rotate", dict(kind="sylvester", rows=16), "rows is used only with kind = 'auto'"),
    ],
)
def test_words_that_contradict_each_other_are_refused(name, params, words):
    """When the recipe is made: one of the two would be ignored without a word."""
    with pytest.raises(DQError, match=words):
        Target(QuantSpec.parse("int4/group16"), transforms=((name, tuple(params.items())),))
