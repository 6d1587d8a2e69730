"""AdaRound: the golden vector, neighbours on every grid, and what it gains over nearest rounding."""

import copy
import warnings

import pytest
import torch

from dq.columns import code_steps
from dq.loop import quantize_model
from dq.planning import make_plan
from dq.qtensor import choose_scale, encode
from dq.recipe import Recipe, Target
from dq.records import Record
from dq.registry import DQError
from dq.rounding import ROUNDINGS, Job
from dq.rounding.adaround import Soft, beta, choice, grid_points, neighbours, regulariser, row_errors, start
from dq.rounding.descent import descend
from dq.spec import FORMATS, QuantSpec

ADAROUND, RTN, GPTQ = (ROUNDINGS.get(n).round for n in ("adaround", "rtn", "gptq"))
SPECS = ("nvfp4", "int4/group32", "int4/channel", "uint4/group32", "nf4", "mxfp6", "fp8_e4m3/channel", "int8/channel")


def job(spec="nvfp4", n=24, k=64, **fields):
    g = torch.Generator().manual_seed(3)
    x = torch.randn(512, 8, generator=g) @ torch.randn(8, k, generator=g) + 0.5 * torch.randn(512, k, generator=g)
    weight = torch.randn(n, k, generator=g) / k**0.5
    return Job("layer", weight, QuantSpec.parse(spec), x=x, hessian=x.T @ x / len(x), **fields)


def error(task, result):
    """tr(E H E^T), the weight residual counted."""
    lost = result[0].dequantize() - task.weight
    if result[1] is not None:
        lost[:, -task.residual :] += result[1].dequantize()
    return float(row_errors(lost, task.hessian).sum())


def test_golden():
    """methods_diffusion V4b."""
    rest = torch.tensor([0.48, 0.76, 0.48, 0.2])
    v = start(rest)
    torch.testing.assert_close(v, torch.tensor([-0.066691, 0.927987, -0.066691, -1.098612]), atol=1e-6, rtol=0)
    torch.testing.assert_close(choice(v), rest)
    assert (v >= 0).int().tolist() == [0, 1, 0, 0]
    sums = [0.01 * float(regulariser(rest.double(), b)) for b in (20, 8, 2)]
    assert sums == pytest.approx([0.0399996135, 0.0397785787, 0.033664], abs=1e-7)
    assert [beta(i, 20000) for i in (4000, 8000, 12000, 20000)] == [20.0, 15.5, 11.0, 2.0]
    assert beta(0, 20000) is None


def test_golden_weights():
    """The same weights against the scale 0.25: fractions of w / s between neighbouring integers."""
    weight, spec = torch.tensor([[0.37, -0.81, 0.12, 0.55]]), QuantSpec.parse("int4/channel")
    scales = choose_scale(weight, spec)._replace(scale=torch.tensor([[0.25]]))
    lower, upper = neighbours(weight, scales, spec)
    torch.testing.assert_close(lower, torch.tensor([[0.25, -1.0, 0.0, 0.5]]))
    torch.testing.assert_close(upper, torch.tensor([[0.5, -0.75, 0.25, 0.75]]))
    soft = Soft.of(weight, scales, spec)
    torch.testing.assert_close(choice(soft.v), torch.tensor([[0.48, 0.76, 0.48, 0.2]]))
    torch.testing.assert_close(soft.values(), weight)
    assert soft.hard().tolist() == [[0.25, -0.75, 0.0, 0.5]]


def test_neighbours_of_fp4_are_uneven():
    """E2M1 has 2, 3, 4, 6; a weight beyond the border has the border twice."""
    spec = QuantSpec.parse("nvfp4")
    weight = torch.tensor([[2.5, 3.1, -4.4, -0.2] + [0.0] * 11 + [6.0]])
    scales = choose_scale(weight, spec)
    lower, upper = neighbours(weight, scales, spec)
    torch.testing.assert_close(lower[0, :4], torch.tensor([2.0, 3.0, -6.0, -0.5]))
    torch.testing.assert_close(upper[0, :4], torch.tensor([3.0, 4.0, -4.0, 0.0]))
    assert lower[0, -1] == upper[0, -1] == 6.0
    lower, upper = neighbours(4 * weight, scales, spec)
    assert lower[0, 2] == upper[0, 2] == -6.0


@pytest.mark.parametrize("name", [f.name for f in FORMATS if not f.identity])
def test_grid_points_are_what_the_format_rounds_to(name):
    fmt = FORMATS.get(name)
    points = grid_points(fmt)
    assert float(points[0]) == fmt.min and float(points[-1]) == fmt.max
    assert (points.diff() > 0).all() and len(points) <= 2**fmt.bits
    assert torch.equal(fmt.round(points.clone()), points)


@pytest.mark.parametrize("spec", SPECS)
def test_neighbours_enclose_and_hold_the_nearest(spec):
    task = job(spec)
    scales = choose_scale(task.weight, task.spec)
    lower, upper = neighbours(task.weight, scales, task.spec)
    nearest = encode(task.weight, scales, task.spec).dequantize()
    near = torch.minimum((nearest - lower).abs(), (nearest - upper).abs())
    assert float(near.max()) < 1e-6 and (lower <= upper).all()
    inside = lower < upper
    assert (lower[inside] <= task.weight[inside] + 1e-6).all() and (task.weight[inside] <= upper[inside] + 1e-6).all()
    for values in (lower, upper):  # both are values that codes stand for
        torch.testing.assert_close(encode(values, scales, task.spec).dequantize(), values, atol=1e-6, rtol=0)


@pytest.mark.parametrize("spec", SPECS)
def test_gains_over_nearest_and_is_deterministic(spec):
    task = job(spec)
    first, again = (ADAROUND(task, iters=200) for _ in range(2))
    assert first[1] is None and torch.equal(first[0].codes, again[0].codes)
    assert torch.equal(first[0].scale.view(torch.uint8), RTN(task)[0].scale.view(torch.uint8))
    assert error(task, first) < 0.3 * error(task, RTN(task))


def test_learning_alone_gains():
    """Without sweeps: the relaxation itself, on both kinds of grid."""
    for spec in ("nvfp4", "int4/group32", "uint4/group32"):
        task = job(spec)
        assert error(task, ADAROUND(task, sweeps=0)) < 0.75 * error(task, RTN(task))


def test_every_row_is_never_worse():
    """Even when hardly anything is learned; and it says so."""
    task = job("int4/channel")
    with pytest.warns(UserWarning, match="gained nothing on"):
        main, _ = ADAROUND(task, iters=1, lr=1e-9, sweeps=0)
    assert torch.equal(main.codes, RTN(task)[0].codes)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        main, _ = ADAROUND(task, iters=30, lr=0.3, strength=1e4, sweeps=0)
    rows = [row_errors(q.dequantize() - task.weight, task.hessian) for q in (main, RTN(task)[0])]
    assert (rows[0] <= rows[1]).all()


def test_uncorrelated_inputs_leave_nearest_rounding():
    """With H diagonal nearest rounding is the optimum; dead columns keep it too."""
    task = job("nvfp4")
    task.hessian = torch.diag(torch.linspace(0, 2, 64))
    with pytest.warns(UserWarning, match="gained nothing"):
        main, _ = ADAROUND(task, iters=50)
    assert torch.equal(main.codes, RTN(task)[0].codes)


@pytest.mark.parametrize("spec", ["nvfp4", "int4/group32"])
def test_dual_residual(spec):
    """The last S columns keep nearest rounding and their residual; the others make good what is still lost."""
    task = job(spec, residual=32)
    main, rest = ADAROUND(task, iters=200)
    plain = RTN(task)
    assert torch.equal(main.dequantize()[:, -32:], plain[0].dequantize()[:, -32:])
    assert torch.equal(rest.codes, plain[1].codes)
    assert error(task, (main, rest)) < 0.5 * error(task, plain)


def test_the_mean_that_a_bias_takes_up_does_not_count():
    task = job("int4/channel")
    task.x += 5.0
    task.hessian, task.mean = task.x.T @ task.x / len(task.x), task.x.mean(0)
    around = task.hessian - torch.outer(task.mean, task.mean)
    lost = [
        float(row_errors(ADAROUND(t, iters=200)[0].dequantize() - task.weight, around).sum())
        for t in (task, job("int4/channel", mean=None))
    ]
    assert lost[0] == pytest.approx(lost[1], rel=0.05)  # as if the inputs had no mean


def test_row_chunks_change_nothing(monkeypatch):
    task = job("int4/group32")
    whole, _ = ADAROUND(task, iters=50, sweeps=1)
    monkeypatch.setattr("dq.rounding.adaround.CHUNK", 64 * 5)
    parts, _ = ADAROUND(task, iters=50, sweeps=1)
    assert error(task, (parts, None)) == pytest.approx(error(task, (whole, None)), rel=0.05)


def test_descent_only_gains_and_lowers_gptq():
    task = job("nvfp4")
    start_at = GPTQ(task)[0]
    steps = code_steps(start_at.scales, task.spec, tuple(task.weight.shape))
    errors = [error(task, (start_at, None))]
    for sweeps in (1, 2, 4):
        values = descend(start_at.dequantize(), task.weight, task.hessian, steps, task.spec.fmt, sweeps=sweeps)
        errors.append(float(row_errors(values - task.weight, task.hessian).sum()))
        again = encode(values, start_at.scales, task.spec).dequantize()
        torch.testing.assert_close(again, values, atol=1e-6, rtol=0)
    assert errors == sorted(errors, reverse=True) and errors[1] < errors[0]


@pytest.mark.parametrize("weights", ["nvfp4", "int4/group32"])
def test_as_a_recipe(weights):
    """Through the loop, with a transform before it: above nearest rounding, and refused without calibration."""
    torch.manual_seed(0)
    net = torch.nn.Sequential(torch.nn.Linear(64, 32))
    x = torch.randn(256, 8) @ torch.randn(8, 64) + 0.3 * torch.randn(256, 64)
    found = {}
    for rounding in ({"name": "rtn"}, {"name": "adaround", "iters": 100}):
        target = Target.from_dict({"weights": weights, "transforms": ["smooth"], "rounding": rounding})
        recipe, model = Recipe("test", target, min_features=8), copy.deepcopy(net)
        quantize_model(model, make_plan(model, recipe), [Record((x,), {})])
        found[rounding["name"]] = model[0].sqnr_db
    assert found["adaround"] > found["rtn"] + 3
    with pytest.raises(DQError, match="needs calibration"):
        quantize_model(net, make_plan(net, recipe))
    with pytest.raises(DQError, match="iters is 1 to"):
        Target.from_dict({"weights": weights, "rounding": {"name": "adaround", "iters": 0}})


def test_zero_weights_and_identity():
    task = job("int4/channel")
    task.weight.zero_()
    assert not ADAROUND(task, iters=5)[0].dequantize().any()
    task = job("bf16")
    assert torch.equal(ADAROUND(task, iters=5)[0].codes, RTN(task)[0].codes)


def test_complaints():
    task = job()
    task.hessian = None
    with pytest.raises(DQError, match=r"layer: adaround needs calibration"):
        ADAROUND(task)
    task.hessian = torch.full((64, 64), float("nan"))
    with pytest.raises(DQError, match="NaN or Inf"):
        ADAROUND(task)
    check = ROUNDINGS.get("adaround").check
    assert not check({}) and not check({"iters": 10, "warmup": 0.0})
    steps = ({"iters": 0}, {"iters": 10**6}, {"lr": 0.0}, {"sweeps": -1})
    for bad in (*steps, {"strength": -1.0}, {"warmup": 1.0}, {"damp": -0.1}):
        assert check(bad), bad
