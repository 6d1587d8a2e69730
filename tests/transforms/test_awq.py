"""AWQ: item 11 of the methods specification, the search against brute force, the clipping rule against its words."""

import pytest
import torch

import dq
from dq.qtensor import fake_quantize, quantize
from dq.registry import DQError
from dq.spec import QuantSpec
from dq.stats import Stat
from dq.transforms import TRANSFORMS, GroupState, apply_steps
from dq.transforms.awq import ALPHAS, scaling

AWQ = TRANSFORMS.get("awq")


def state_of(weights: dict, x: dict, act=None, spec="int4/group16", **extra) -> GroupState:
    stats = {}
    for members, rows in x.items():
        stats[members[0]] = Stat(rows.shape[1], name=members[0])
        stats[members[0]].update(rows)
    act = None if act is None else QuantSpec.parse(act)
    return GroupState(dict(weights), tuple(x), QuantSpec.parse(spec), act, stats, **extra)


@pytest.mark.parametrize(
    ("s", "step", "output"),
    [(1, 0.28, -1.932), (1.5, 0.28, -2.678667), (2, 0.28, -3.052), (3, 0.4, -3.12), (4, 0.533333, -2.773333)],
)
def test_item_11(s, step, output):
    """INT3 codes -4..3: twice the weight that the loud channel meets halves its error; four times widens the step."""
    w, x = torch.tensor([[0.84, -0.4, 0.47, -0.61]]), torch.tensor([0.5, 8, 0.4, 0.6])
    assert float(w @ x) == pytest.approx(-2.958)
    factor = torch.tensor([1.0, s, 1.0, 1.0])
    q = quantize(w * factor, QuantSpec("int3_wide", "channel"))
    assert float(q.scale) == pytest.approx(step, rel=1e-5)
    assert float(q.dequantize() @ (x / factor)) == pytest.approx(output, rel=1e-5)


def test_scaling():
    """Normalised so that the largest and the smallest multiply to 1; a channel that is never active stays out of it."""
    mean = torch.tensor([0.01, 1.0, 4.0, 0.0])
    s = scaling(mean, 0.5)
    assert s.tolist() == pytest.approx([0.1 / 0.2**0.5, 1 / 0.2**0.5, 2 / 0.2**0.5, 1.0])
    assert scaling(mean, 0.0).tolist() == [1, 1, 1, 1] and scaling(torch.zeros(3), 0.5).tolist() == [1, 1, 1]
    assert scaling(torch.tensor([1e-9, 1.0]), 0.95)[0] == pytest.approx(1e-2)  # 1e-4 / sqrt(1e-4)


def test_alphas():
    assert len(ALPHAS) == 20 and ALPHAS[:2] == (0, 0.05) and ALPHAS[-1] == 0.95


def loud(rows, width):
    x = torch.randn(rows, width)
    x[:, [3, 17]] *= 25.0
    return x


@pytest.mark.parametrize("act", [None, "int8/token"])
def test_search_takes_the_best_alpha(act):
    """Over all members of the group, and with activations on their grid if they have one."""
    x, weights = loud(100, 32), {n: torch.randn(12, 32) for n in "qk"}
    state = state_of(weights, {("q", "k"): x}, act)
    AWQ.fit(state)
    rows, errors = state.stats["q"].rows, []
    for alpha in ALPHAS:
        s, total = scaling(x.abs().mean(0), alpha), 0.0
        xq = rows / s if act is None else fake_quantize(rows / s, state.act_spec)
        for w in weights.values():
            total += float((xq @ fake_quantize(w * s, state.weight_spec).T - rows @ w.T).square().sum())
        errors.append(total)
    best = ALPHAS[min(range(20), key=errors.__getitem__)]
    assert best > 0 and min(errors) < 0.8 * errors[0]
    assert [s.name for s in state.steps] == ["smooth"]
    torch.testing.assert_close(state.steps[0].tensors["factor"], scaling(x.abs().mean(0), best), rtol=1e-4, atol=1e-5)
    for n, w in weights.items():
        torch.testing.assert_close(apply_steps(x, state.steps) @ state.weights[n].T, x @ w.T, rtol=1e-4, atol=1e-3)


def test_mean_is_over_all_tokens_of_all_inputs():
    """to_out and to_add_out share s: the longer sequence counts for more."""
    x1, x2 = torch.rand(300, 16) + 0.5, 20 * torch.rand(100, 16)
    weights = {n: torch.randn(8, 16) for n in ("a", "b")}
    state = state_of(weights, {("a",): x1, ("b",): x2}, spec="int4/group8")
    AWQ.fit(state)
    mean = torch.cat([x1, x2]).abs().mean(0)
    factor = state.steps[0].tensors["factor"] if state.steps else torch.ones(16)
    assert min((factor - scaling(mean, a)).abs().max() for a in ALPHAS) < 1e-4


def test_clipping_rule_is_awq_in_its_own_words():
    """Per row and group of 16: of amax * (1 - i/20), i < 10, the one whose share of the outputs errs least."""
    g = torch.Generator().manual_seed(3)
    x, w = torch.randn(64, 48, generator=g), torch.randn(5, 48, generator=g) ** 3
    spec = QuantSpec("int4", "group", 16, scale_rule="awq")
    q = quantize(w, spec, hessian=x.T @ x / len(x))
    for row in range(5):
        for start in range(0, 48, 16):
            part, seen, errors, scales = w[row, start : start + 16], x[:, start : start + 16], [], []
            for i in range(10):
                scale = part.abs().max() / 7 * (1 - i / 20)
                rounded = (part / scale).round().clamp(-7, 7) * scale
                errors.append(float((seen @ (rounded - part)).square().mean()))
                scales.append(float(scale))
            assert float(q.scale[row, start // 16]) == pytest.approx(scales[errors.index(min(errors))], rel=1e-5)
    plain = quantize(w, spec.with_(scale_rule="absmax"))
    assert (x @ (q.dequantize() - w).T).norm() < (x @ (plain.dequantize() - w).T).norm()


def min_max(part, n=15):
    """AWQ's own quantizer of one group: asymmetric over the range widened to contain 0."""
    low, high = part.min().clamp(max=0), part.max().clamp(min=0)
    scale = (high - low) / n
    zero = (-low / scale).round().clamp(0, n)
    return ((part / scale).round() + zero).clamp(0, n).sub(zero) * scale, scale


def test_clipping_with_a_zero_point():
    """The same search where the scale is that of min and max: UINT4, the form that AWQ checkpoints have."""
    g = torch.Generator().manual_seed(4)
    x, w = torch.randn(64, 48, generator=g), torch.randn(5, 48, generator=g) ** 3
    q = quantize(w, QuantSpec("uint4", "group", 16, scale_rule="awq"), hessian=x.T @ x / len(x))
    for row in range(5):
        for start in range(0, 48, 16):
            part, seen, errors, scales = w[row, start : start + 16], x[:, start : start + 16], [], []
            for i in range(10):
                top = part.abs().max() * (1 - i / 20)
                rounded, scale = min_max(part.clamp(-top, top))
                errors.append(float((seen @ (rounded - part)).square().mean()))
                scales.append(float(scale))
            assert float(q.scale[row, start // 16]) == pytest.approx(scales[errors.index(min(errors))], rel=1e-5)
    plain = quantize(w, QuantSpec("uint4", "group", 16))
    assert (x @ (q.dequantize() - w).T).norm() < (x @ (plain.dequantize() - w).T).norm()


@pytest.mark.parametrize("weights", ["int4/group16@awq", "uint4/group16@awq"])
def test_recipe_of_the_source(weights):
    """Scaling, then clipping, then rounding, weight-only; better than rounding alone, and than either of the two."""
    torch.manual_seed(0)
    x, errors = loud(512, 64) * torch.rand(64), {}
    source = torch.nn.Linear(64, 48)
    with torch.no_grad():
        source.weight.copy_(torch.randn(48, 64) ** 3)
    for spec, transforms in ((weights[:-4], []), (weights[:-4], ["awq"]), (weights, []), (weights, ["awq"])):
        net = torch.nn.Sequential(torch.nn.Linear(64, 48))
        net[0].load_state_dict(source.state_dict())
        recipe = dict(name="x", linear=dict(weights=spec, transforms=transforms), min_features=16)
        dq.quantize(net, dq.Recipe.from_dict(recipe), calibration=[dict(input=x)], progress=False)
        errors[spec, bool(transforms)] = float((net(x) - source(x)).detach().norm())
    assert min(errors, key=errors.get) == (weights, True)
    assert max(errors, key=errors.get) == (weights[:-4], False)


def test_clipping_rule_needs_groups_and_calibration():
    with pytest.raises(DQError, match="needs hessian from calibration"):
        quantize(torch.randn(2, 32), QuantSpec.parse("int4/group16@awq"))
    with pytest.raises(DQError, match="groups that divide K"):
        quantize(torch.randn(2, 40), QuantSpec.parse("int4/group16@awq"), hessian=torch.eye(40))
