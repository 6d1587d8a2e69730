"""GPTQ against vector 16 of the core methods' specification, V2 of the diffusion methods', and a plain float64 loop."""

import warnings

import numpy as np
import pytest
import torch

from dq.qtensor import choose_scale, quantize
from dq.registry import DQError
from dq.rounding import ROUNDINGS, Job
from dq.rounding.gptq import executed_target, inverse_factor
from dq.spec import FORMATS, SPECS, QuantSpec
from dq.transforms.lowrank import svd_factors

GPTQ, RTN = ROUNDINGS.get("gptq").round, ROUNDINGS.get("rtn").round

# Vector 16: X [4, 6] is [K, tokens], W [2, 4], INT3 at scales .32 and .30.
V16_X = [
    [1, -2, 3, -1, 2, 1],
    [1.5, -2, 2.5, -1.5, 2, 0.5],
    [2, 1, -1, 0.5, -0.5, 1],
    [1.5, 1, -1.5, 1, -0.5, 0.5],
]
V16_W = [[0.96, -0.43, 0.55, 0.38], [-0.52, 0.9, -0.34, 0.63]]
V16_U = [
    [0.662685, -0.61304, -0.085689, 0.190766],
    [0, 0.239833, -0.517554, 0.683025],
    [0, 0, 0.633252, -0.599187],
    [0, 0, 0, 0.264744],
]
WEIGHTS = [f"{f}/{s}" for f in FORMATS.names() if not FORMATS.get(f).identity for s in ("channel", "group32")]
WEIGHTS = [s for s in WEIGHTS if "positive" not in s] + [n for n in SPECS.names() if "token" not in n]


def moment(x):
    """E[x x^T] [K, K] of x [n, K]."""
    return x.T @ x / len(x)


def correlated(n, k, seed=0):
    """Inputs [n, K] in a few strong directions plus noise, channels of unlike size; the mixing depends on K alone."""
    shape, g = torch.Generator().manual_seed(k), torch.Generator().manual_seed(seed)
    mix, size = torch.randn(max(2, k // 8), k, generator=shape), 0.2 + 2 * torch.rand(k, generator=shape)
    return (torch.randn(n, len(mix), generator=g) @ mix / 2 + 0.4 * torch.randn(n, k, generator=g)) * size


def weight(n, k, seed=1):
    return torch.randn(n, k, generator=torch.Generator().manual_seed(seed)) / k**0.5


def job(w, x=None, spec="int4/channel", hessian=None, **fields):
    hessian = moment(x) if hessian is None else hessian
    return Job("blocks.3.to_q", w, QuantSpec.parse(spec), x=x, hessian=hessian, **fields)


def loss(w, q, x):
    """Relative squared output error."""
    return float(((q - w) @ x.T).square().sum() / (w @ x.T).square().sum())


def test_vector_16():
    x, w = torch.tensor(V16_X).T, torch.tensor(V16_W)
    # The factor of 2 X X^T; dq's own E[x x^T] is the same up to a factor, which the codes must not see.
    upper = inverse_factor(2 * V16_X_64.T @ V16_X_64, 0.01, "v16")
    assert upper.flatten().tolist() == pytest.approx(np.ravel(V16_U).tolist(), abs=1e-6)
    task = job(w, x, "int3_wide/channel")
    scale = torch.tensor([[0.32], [0.3]])
    torch.testing.assert_close(choose_scale(w, task.spec).scale, scale)
    found = {}
    for name, q in (("gptq", GPTQ(task, order=False)[0]), ("rtn", RTN(task)[0])):
        values = q.dequantize()
        found[name] = (values / scale).round().int().tolist(), float(((values - w) @ x.T).square().sum())
    assert found["gptq"][0] == [[3, -1, 1, 2], [-2, 3, -1, 2]]
    assert found["rtn"][0] == [[3, -1, 2, 1], [-2, 3, -1, 2]]
    assert found["gptq"][1] == pytest.approx(0.2241, abs=5e-5) and found["rtn"][1] == pytest.approx(0.3857, abs=5e-5)
    assert found["rtn"][1] / found["gptq"][1] == pytest.approx(1.721, abs=5e-4)


V16_X_64 = torch.tensor(V16_X, dtype=torch.float64).T


def test_eliminating_one_column_after_the_other_gives_the_rows():
    """Optimal Brain Quantization removes row and column 0 from H^-1 step by step; U holds what it would read."""
    for x, damp in ((V16_X_64, 0.01), (correlated(300, 12).double(), 0.01), (correlated(300, 9).double(), 1.0)):
        h = 2 * x.T @ x
        upper = inverse_factor(h, damp, "v16")
        left = np.linalg.inv(h.numpy() + damp * np.diag(h).mean() * np.eye(len(h)))
        for j in range(len(h)):
            np.testing.assert_allclose(upper[j, j:], left[0] / left[0, 0] ** 0.5, rtol=1e-8, atol=1e-12)
            left = (left - np.outer(left[:, 0], left[0]) / left[0, 0])[1:, 1:]


def test_v2_on_the_residual_of_a_low_rank():
    """V2: output error of INT4 on the residual of rank one: .144904 to nearest, .139353 by GPTQ."""
    w = torch.tensor(
        [[0.3, -0.2, 3.1, 0.1, -0.4, 0.2], [-0.1, 0.4, 2.6, -0.3, 0.2, -0.2],
         [0.2, 0.1, -2.9, 0.4, 0.1, -0.3], [-0.4, 0.3, 3.3, 0.2, -0.1, 0.4]], dtype=torch.float64,
    )  # fmt: skip
    x = np.random.RandomState(0).randn(64, 6)
    x[:, 2] *= 0.3
    x, (up, down) = torch.from_numpy(x), svd_factors(w, 1)
    residual = w - up @ down
    task = job(residual, x)
    for rounding, expected in ((lambda: GPTQ(task, order=False), 0.139353), (lambda: RTN(task), 0.144904)):
        q = rounding()[0].dequantize().double()
        assert float(((q - residual) @ x.T).square().sum()) == pytest.approx(expected, rel=1e-4)


def plain(w, h, step, order, round_, split=None, step2=None):
    """The algorithm column by column in float64, with H^-1 itself in place of its factor: (first, second) stage."""
    w, inverse = w.double().numpy().copy(), np.linalg.inv(h)
    left, first, second = list(order), np.zeros_like(w), np.zeros_like(w)
    while left:
        j = left[0]
        first[:, j] = q = round_(w[:, j] / step[:, j]) * step[:, j]
        if split is not None and j >= split:
            second[:, j] = round_((w[:, j] - q) / step2[:, j - split]) * step2[:, j - split]
        error = (w[:, j] - first[:, j] - second[:, j]) / inverse[j, j]
        w[:, left] -= np.outer(error, inverse[j, left])
        inverse -= np.outer(inverse[:, j], inverse[j]) / inverse[j, j]
        left.pop(0)
    return first, second


def int4(x):
    return np.clip(np.rint(x), -7, 7)


def damped(x, damp=0.01):
    h = moment(x.double()).numpy()
    return h + damp * np.diag(h).mean() * np.eye(len(h))


@pytest.mark.parametrize("order", [True, False])
@pytest.mark.parametrize("k", [5, 37, 128, 130, 300])
def test_blocks_of_columns_change_nothing(k, order):
    """K below, at, and across the block of 128, and no multiple of it: what the plain loop gives."""
    w, x = weight(6, k), correlated(4 * k + 50, k)
    task = job(w, x)
    step = choose_scale(w, task.spec).scale.double().numpy().repeat(k, 1)
    h = damped(x)
    visit = np.argsort(-np.diag(h), kind="stable") if order else range(k)
    expected, _ = plain(w, h, step, visit, int4)
    got = GPTQ(task, order=order)[0].dequantize().numpy()
    # A sum near a tie may fall to the other side in float32, and is then made good by other columns.
    assert (abs(got - expected) < 1e-5).mean() > 0.97
    expected = torch.from_numpy(expected).float()
    assert loss(w, torch.from_numpy(got), x) == pytest.approx(loss(w, expected, x), rel=0.02)


@pytest.mark.parametrize("spec", WEIGHTS)
def test_beats_nearest_on_inputs_it_never_saw(spec):
    """Every grid: held-out output error below that of rounding to nearest at the same scales."""
    w, x, held = weight(24, 64), correlated(2000, 64), correlated(500, 64, seed=9)
    task = job(w, x, spec)
    near, good = (loss(w, r(task)[0].dequantize(), held) for r in (RTN, GPTQ))
    assert 0 < good < 0.9 * near, (good, near)


@pytest.mark.parametrize("spec", [*WEIGHTS, "nvfp4@weighted_sweep", "int4/group64@imatrix", "uint4/group16"])
def test_it_costs_nothing_at_run_time(spec):
    """Act-order leaves no index behind: the same tensors of the same kinds as RTN, at RTN's very scales."""
    w, x = weight(16, 96), correlated(400, 96)
    task = job(w, x, spec)
    (near, no), (good, none) = RTN(task), GPTQ(task)
    assert no is none is None and near.spec == good.spec and near.shape == good.shape
    assert near.codes.shape == good.codes.shape and near.codes.dtype == good.codes.dtype
    for a, b in zip(near.scales, good.scales, strict=True):
        assert (a is None and b is None) or (a.dtype == b.dtype and torch.equal(a.float(), b.float()))
    assert not torch.equal(near.codes.float(), good.codes.float())


def test_order_matters_where_it_should():
    """Strong columns first gives a lower loss on the whole; it is the order that does it."""
    gains = []
    for seed in range(6):
        w, x = weight(16, 64, seed), correlated(800, 64)
        gains.append(
            loss(w, GPTQ(job(w, x))[0].dequantize(), x) / loss(w, GPTQ(job(w, x), order=False)[0].dequantize(), x)
        )
    assert np.mean(gains) < 0.97, gains


@pytest.mark.parametrize("order", [True, False])
def test_dead_columns_keep_their_rounded_weight(order):
    """A channel that calibration never lit: rounded to nearest, and no other column changes for it."""
    w, x = weight(8, 48), correlated(300, 48)
    dead = torch.tensor([0, 7, 20, 47])
    x[:, dead] = 0
    task = job(w, x)
    q, near = GPTQ(task, order=order)[0].dequantize(), RTN(task)[0].dequantize()
    assert torch.equal(q[:, dead], near[:, dead]) and not torch.equal(q, near)
    other = w.clone()
    other[:, dead] = w[:, dead].flip(0) * 0.9
    live = torch.ones(48, dtype=torch.bool).index_fill(0, dead, False)
    # At equal scales (of the largest value, which is in no dead column) the live columns cannot tell.
    spec = QuantSpec.parse("int4/channel")
    assert torch.equal(choose_scale(w, spec).scale, choose_scale(other, spec).scale)
    assert torch.equal(GPTQ(job(other, x), order=order)[0].dequantize()[:, live], q[:, live])


def test_nothing_ever_seen_is_rounded_to_nearest():
    w = weight(8, 32)
    task = job(w, torch.zeros(50, 32))
    assert torch.equal(GPTQ(task)[0].codes, RTN(task)[0].codes)


def indefinite(k, strength):
    """Ones on the diagonal, `strength` between the first two: eigenvalues 1 +- strength."""
    h = torch.eye(k)
    h[0, 1] = h[1, 0] = strength
    return h


def test_damping_escalates_in_silence():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        q = GPTQ(job(weight(8, 16), hessian=indefinite(16, 1.05)))[0]
    assert q.dequantize().isfinite().all()


@pytest.mark.parametrize("residual", [0, 16])
def test_degenerate_hessian_falls_back_loudly(residual):
    task = job(weight(8, 32), hessian=indefinite(32, 1e4), spec="int4/group16", residual=residual)
    with pytest.warns(UserWarning, match=r"blocks\.3\.to_q: the Hessian stays degenerate.*rounded to nearest"):
        q, rest = GPTQ(task)
    near, near_rest = RTN(task)
    assert torch.equal(q.codes, near.codes) and torch.equal(q.scale, near.scale)
    assert (rest is None) == (residual == 0) and (rest is None or torch.equal(rest.codes, near_rest.codes))


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_bad_hessian_is_refused_by_name(bad):
    h = torch.eye(16)
    h[3, 5] = bad
    with pytest.raises(DQError, match=r"blocks\.3\.to_q: the Hessian .* holds NaN or Inf"):
        GPTQ(job(weight(8, 16), hessian=h))
    with pytest.raises(DQError, match=r"blocks\.3\.to_q: gptq needs calibration"):
        GPTQ(Job("blocks.3.to_q", weight(8, 16), QuantSpec.parse("int4/channel")))


@pytest.mark.parametrize("tokens", [1, 3, 63])
def test_fewer_tokens_than_channels(tokens):
    """A singular Hessian: finite, better than nearest on those tokens, and not off the rails elsewhere."""
    w, x, held = weight(16, 64), correlated(tokens, 64), correlated(500, 64, seed=9)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        q = GPTQ(job(w, x))[0].dequantize()
    near = RTN(job(w, x))[0].dequantize()
    assert q.isfinite().all() and loss(w, q, x) < loss(w, near, x)
    assert loss(w, q, held) < 3 * loss(w, near, held)


def test_zero_rows_stay_zero():
    for spec in ("int4/channel", "uint4/group16", "nvfp4", "nf4", "fp8_e4m3/tensor"):
        w, x = weight(8, 32), correlated(200, 32)
        w[3] = 0
        q = GPTQ(job(w, x, spec))[0].dequantize()
        assert not q[3].any() and q.isfinite().all() and q.abs().sum(1)[[0, 7]].all(), spec
        assert not GPTQ(job(w * 0, x, spec))[0].dequantize().any(), spec


@pytest.mark.parametrize("spec", ["int4/group64", "uint4/group64", "nvfp4", "mxfp4", "int3/group32", "fp8-block"])
@pytest.mark.parametrize("k", [33, 72, 130, 200])
def test_widths_that_no_group_divides(k, spec):
    w, x, held = weight(12, k), correlated(1500, k), correlated(500, k, seed=9)
    task = job(w, x, spec)
    q = GPTQ(task)[0]
    assert q.shape == (12, k) and q.codes.shape == RTN(task)[0].codes.shape
    assert loss(w, q.dequantize(), held) < loss(w, RTN(task)[0].dequantize(), held)


def test_shared_second_level():
    """Linears that a runtime fuses: `amax` fixes the second level whatever the weight's own maximum is."""
    w, x = weight(16, 64), correlated(400, 64)
    amax = 3 * w.abs().amax()
    q = GPTQ(job(w, x, "nvfp4", amax=amax))[0]
    assert q.global_scale.item() == pytest.approx(float(amax) / (6 * 448), rel=1e-6)


@pytest.mark.parametrize("order", [True, False])
def test_two_stages_are_the_plain_loop(order):
    """Dual residual channels: q1 + q2 takes the place of q on the last columns; what both leave is fed back."""
    k, s = 48, 16
    w, x = weight(8, k), correlated(400, k)
    spec = QuantSpec.parse("int4/group16").with_(scale_format="fp32")
    task = Job("a", w, spec, x=x, hessian=moment(x), residual=s)
    first, rest = GPTQ(task, order=order)
    assert rest.shape == (8, s) and torch.equal(first.scale, RTN(task)[0].scale)
    assert torch.equal(rest.scale, RTN(task)[1].scale)
    h = damped(x)
    visit = np.argsort(-np.diag(h), kind="stable") if order else range(k)
    steps = [q.scale.double().numpy().repeat(16, 1) for q in (first, rest)]
    one, two = plain(w, h, steps[0], visit, int4, k - s, steps[1])
    assert (abs(first.dequantize().numpy() - one) < 1e-5).mean() > 0.97
    assert (abs(rest.dequantize().numpy() - two[:, k - s :]) < 1e-5).mean() > 0.97


@pytest.mark.parametrize("spec", ["nvfp4", "int4/group16", "mxfp4", "nvfp4@weighted_sweep"])
def test_two_stages_stand_for_the_weight(spec):
    """On the last S columns W' ~ q1 + q2 far below one step; the sum has a lower output error than one stage."""
    s = 32
    w, x, held = weight(24, 96), correlated(1500, 96), correlated(500, 96, seed=9)
    x, held = (v * torch.ones(96).index_fill(0, torch.arange(64, 96), 8.0) for v in (x, held))
    for rounding in (RTN, GPTQ):
        first, rest = rounding(job(w, x, spec, residual=s))
        both = first.dequantize()
        both[:, -s:] += rest.dequantize()
        alone = rounding(job(w, x, spec))[0].dequantize()
        assert loss(w, both, held) < 0.3 * loss(w, alone, held)
    near = RTN(job(w, x, spec, residual=s))
    off = (w[:, -s:] - near[0].dequantize()[:, -s:] - near[1].dequantize()).abs().view(24, -1, 16).amax(-1)
    assert (off <= 0.06 * w[:, -s:].abs().view(24, -1, 16).amax(-1) + 1e-3).all()


def test_executed_target_is_least_squares():
    """`x^ = G x + e`: the weight that fits W x best from x^, by numpy's lstsq on samples whose moments are exact."""
    n, k = 60, 10
    x, w = correlated(n, k).double(), weight(5, k).double()
    gain, noise = 0.5 + torch.rand(k, dtype=torch.float64), 0.05 + torch.rand(k, dtype=torch.float64)
    target, executed = executed_target(w, moment(x), gain, noise)
    # The noise as K further samples: it moves nothing in W x, and has variance D.
    rows = np.concatenate([x * gain, (n * noise).sqrt().diag()])
    wanted = np.concatenate([x @ w.T, np.zeros((k, 5))])
    best = np.linalg.lstsq(rows, wanted, rcond=None)[0].T
    np.testing.assert_allclose(target, best, rtol=5e-3, atol=2e-3 * float(w.abs().max()))
    np.testing.assert_allclose(executed, rows.T @ rows / n, rtol=1e-10, atol=1e-12)
    # What any other weight costs beyond the minimum is (W* - Q) H* (W* - Q)^T.
    q = w + 0.1 * weight(5, k, 3).double()
    cost = ((rows @ q.T.numpy() - wanted) ** 2).sum() / n
    least = ((rows @ best.T - wanted) ** 2).sum() / n
    extra = float((((target - q) @ executed) * (target - q)).sum())
    assert cost - least == pytest.approx(extra, rel=5e-3)


def test_executed_target_on_drawn_noise():
    """The same with e drawn at random, as a quantizer would make it."""
    g = torch.Generator().manual_seed(0)
    x, w = correlated(100000, 6).double(), weight(4, 6).double()
    gain, noise = torch.linspace(0.8, 1.1, 6).double(), torch.linspace(0.1, 1.0, 6).double()
    seen = x * gain + torch.randn(x.shape, generator=g, dtype=torch.float64) * noise.sqrt()
    best = torch.linalg.lstsq(seen, x @ w.T).solution.T
    target, _ = executed_target(w, moment(x), gain, noise)
    assert (target - best).norm() < 0.02 * (w - best).norm()


def test_executed_aims_at_the_output_from_what_is_executed():
    """W4A4 with a coarse activation grid: a lower held-out output error from the rounded inputs."""
    from dq.qtensor import fake_quantize

    w, x, held = weight(32, 64), correlated(3000, 64), correlated(800, 64, seed=9)
    act = QuantSpec.parse("int4/token")
    xq, power = fake_quantize(x, act), x.square().mean(0)
    gain = (x * xq).mean(0) / power
    noise = (xq.square().mean(0) - gain**2 * power).clamp(min=0)
    task = job(w, x, gain=gain, noise=noise)
    errors = []
    for executed in (False, True):
        q = GPTQ(task, executed=executed)[0].dequantize()
        errors.append(float((fake_quantize(held, act) @ q.T - held @ w.T).square().sum()))
    assert errors[1] < 0.95 * errors[0]
    # 16-bit activations have no noise to know of: the same codes.
    plain_task = job(w, x)
    assert torch.equal(GPTQ(plain_task)[0].codes, GPTQ(plain_task, executed=True)[0].codes)


def test_mean_is_left_to_the_bias():
    """With bias correction only deviations from the mean count: GPTQ on x - E[x] and on x with the mean told agree."""
    w, x = weight(16, 32), correlated(500, 32) + 3 * torch.rand(32)
    mean = x.mean(0)
    a = GPTQ(job(w, x, mean=mean))[0]
    b = GPTQ(job(w, x - mean))[0]
    assert (a.codes == b.codes).float().mean() > 0.98
    assert not torch.equal(a.codes, GPTQ(job(w, x))[0].codes)


def test_damp_is_checked():
    from dq.recipe import Target

    for text in ({"name": "gptq", "damp": 0.0}, {"name": "gptq", "damping": 0.1}):
        with pytest.raises(DQError, match="damp"):
            Target.from_dict(dict(weights="int4/channel", rounding=text))


def test_inputs_are_left_as_they_were():
    w, x = weight(8, 32), correlated(100, 32)
    h, raw = moment(x), w.clone()
    again = h.clone()
    GPTQ(job(w, x, hessian=h))
    assert torch.equal(w, raw) and torch.equal(h, again)
    assert torch.equal(quantize(w, QuantSpec.parse("int4/channel")).codes, RTN(job(w, x))[0].codes)
