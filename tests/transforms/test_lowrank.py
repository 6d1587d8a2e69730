"""The low-rank branch against vector V2 of the methods specification and torch's own SVD."""

import numpy as np
import pytest
import torch

from dq.qtensor import fake_quantize
from dq.registry import DQError
from dq.spec import QuantSpec
from dq.stats import Stat
from dq.transforms import TRANSFORMS, GroupState, Step
from dq.transforms.lowrank import auto_rank, decompose, svd_factors

V2_W = torch.tensor(
    [
        [0.3, -0.2, 3.1, 0.1, -0.4, 0.2],
        [-0.1, 0.4, 2.6, -0.3, 0.2, -0.2],
        [0.2, 0.1, -2.9, 0.4, 0.1, -0.3],
        [-0.4, 0.3, 3.3, 0.2, -0.1, 0.4],
    ],
    dtype=torch.float64,
)
INT4 = QuantSpec("int4", "channel")


def frobenius(low, residual):
    return float((V2_W - low - residual).norm())


def error_after(iterations, error=frobenius):
    up, down = decompose(V2_W, 1, INT4, error, iterations)
    low = up @ down
    return error(low, fake_quantize(V2_W - low, INT4).double())


def test_v2_rank_one():
    assert torch.linalg.svdvals(V2_W).tolist() == pytest.approx([5.997708, 0.777795, 0.583291, 0.449781], abs=1e-6)
    up, down = svd_factors(V2_W, 1)
    residual = V2_W - up @ down
    assert residual.abs().amax(1).tolist() == pytest.approx([0.407481, 0.366602, 0.320973, 0.290048], abs=1e-6)
    direct = float((fake_quantize(V2_W, INT4) - V2_W).norm())
    branch = float((fake_quantize(residual, INT4) - residual).norm())
    assert direct == pytest.approx(0.591435, rel=1e-5) and branch == pytest.approx(0.060400, rel=1e-4)
    assert direct / branch == pytest.approx(9.79, rel=1e-3)


def test_v2_alternation():
    """Weight error by iteration: .060400, .042542, .042503, .042530 ...; the first non-improvement ends it."""
    sequence = [error_after(i) for i in (1, 2, 3, 4, 10)]
    assert sequence == pytest.approx([0.060400, 0.042542, 0.042503, 0.042503, 0.042503], rel=1e-4)


def test_v2_alternation_by_output_error():
    """Output error by iteration: .144904, .104779, .104877: stops at the third and keeps the second."""
    x = np.random.RandomState(0).randn(64, 6)
    x[:, 2] *= 0.3
    x = torch.from_numpy(x)

    def error(low, residual):
        return float((x @ (low + residual - V2_W).T).square().sum())

    sequence = [error_after(i, error) for i in (1, 2, 3, 10)]
    assert sequence == pytest.approx([0.144904, 0.104779, 0.104779, 0.104779], rel=1e-4)


@pytest.mark.parametrize("shape", [(40, 24), (24, 40), (32, 32), (3, 50), (50, 1)])
@pytest.mark.parametrize("rank", [1, 3, 8, 100])
def test_factors_are_the_best_approximation(shape, rank):
    w = torch.randn(shape, dtype=torch.float64)
    up, down = svd_factors(w, rank)
    r = min(rank, *shape)
    assert up.shape == (shape[0], r) and down.shape == (r, shape[1])
    u, s, v = torch.linalg.svd(w, full_matrices=False)
    torch.testing.assert_close(up @ down, (u[:, :r] * s[:r]) @ v[:r], rtol=1e-9, atol=1e-9)
    # sqrt(sigma) on either side: a 16-bit copy of both is then equally accurate.
    torch.testing.assert_close(up.norm(dim=0), s[:r].sqrt(), rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(down.norm(dim=1), s[:r].sqrt(), rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_rank_deficient_weights(dtype):
    for w in (torch.zeros(6, 9, dtype=dtype), torch.ones(6, 9, dtype=dtype), torch.zeros(9, 6, dtype=dtype)):
        up, down = svd_factors(w, 4)
        assert torch.isfinite(up).all() and torch.isfinite(down).all() and up.dtype == dtype
        torch.testing.assert_close(up @ down, w, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(("width", "rank"), [(3072, 32), (12288, 128), (15360, 160), (64, 8), (768, 8), (1536, 16)])
def test_auto_rank(width, rank):
    """K/96 rounded to a multiple of 8, at least 8."""
    assert auto_rank(width) == rank


def state_of(members, lowrank=(), width=48, **extra):
    weights = {m: torch.randn(16, width) for m in members}
    return GroupState(weights, (tuple(members),), QuantSpec("int4", "group", 16), lowrank=lowrank, **extra)


def test_stacked_linears_share_the_down_factor():
    """q, k and v are decomposed as one matrix; proj_mlp of the same input keeps its own factors."""
    state = state_of(["q", "k", "v", "mlp"], (("q", "k", "v"), ("mlp",)))
    raw = dict(state.weights)
    TRANSFORMS.get("lowrank").fit(state, rank=8, iterations=1)
    assert torch.equal(state.side["q"][0], state.side["k"][0]) and torch.equal(state.side["q"][0], state.side["v"][0])
    assert not torch.equal(state.side["q"][0], state.side["mlp"][0])
    stacked = torch.cat([raw[n] for n in "qkv"])
    u, s, v = torch.linalg.svd(stacked, full_matrices=False)
    got = torch.cat([state.side[n][1].float() @ state.side[n][0].float() for n in "qkv"])
    torch.testing.assert_close(got, (u[:, :8] * s[:8]) @ v[:8], rtol=0.05, atol=0.05)  # bfloat16 factors
    for name in raw:
        up, down = state.side[name][1].float(), state.side[name][0].float()
        torch.testing.assert_close(state.weights[name] + up @ down, raw[name], rtol=1e-5, atol=1e-5)


def test_branch_is_the_best_one_in_the_basis_of_the_residual():
    """Stored for the raw x, it must still be the best approximation of the smoothed, rotated weight."""
    state = state_of(["q"], side_dtype=torch.float64)
    state.weights["q"] = state.weights["q"].double()
    state.add(Step("smooth", {"factor": 10 ** (2 * torch.rand(48) - 1)}))
    TRANSFORMS.get("rotate").fit(state)
    before = state.weights["q"]
    TRANSFORMS.get("lowrank").fit(state, rank=8, iterations=1)
    u, s, v = torch.linalg.svd(before, full_matrices=False)
    torch.testing.assert_close(state.weights["q"], before - (u[:, :8] * s[:8]) @ v[:8], rtol=1e-6, atol=1e-6)
    down, up = state.side["q"]
    torch.testing.assert_close(up @ state.to_basis(down), (u[:, :8] * s[:8]) @ v[:8], rtol=1e-6, atol=1e-6)


def test_factors_own_their_memory():
    """Layers of one group must not alias: safetensors refuses shared storage."""
    state = state_of(["q", "k"], (("q", "k"),))
    TRANSFORMS.get("lowrank").fit(state)
    storages = {t.untyped_storage().data_ptr() for pair in state.side.values() for t in pair}
    assert len(storages) == 4


def test_default_rank():
    state = state_of(["q"])
    TRANSFORMS.get("lowrank").fit(state)
    assert state.side["q"][0].shape == (8, 48) and state.side["q"][1].shape == (16, 8)


def test_branch_takes_the_outlier():
    """What the branch is for: the residual of a weight with a loud direction quantizes far better than the weight."""
    w = torch.randn(64, 64) + 30 * torch.randn(64, 1) @ torch.randn(1, 64)
    state = GroupState({"a": w}, (("a",),), INT4)
    TRANSFORMS.get("lowrank").fit(state, rank=8)
    direct = (fake_quantize(w, INT4) - w).norm()
    branch = (fake_quantize(state.weights["a"], INT4) - state.weights["a"]).norm()
    assert branch < direct / 10


def test_randomized_factors_are_nearly_the_best():
    w = torch.randn(96, 128, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    w += 6 * torch.randn(96, 4, dtype=torch.float64) @ torch.randn(4, 128, dtype=torch.float64) / 4
    errors = {}
    for randomized in (False, True):
        state = GroupState({"l": w.clone()}, (("l",),), QuantSpec.parse("int4/channel"), side_dtype=torch.float64)
        TRANSFORMS.get("lowrank").fit(state, rank=8, iterations=1, randomized=randomized)
        errors[randomized] = float(state.weights["l"].norm())
    assert errors[False] <= errors[True] <= 1.02 * errors[False]


@pytest.mark.parametrize("weighting", ["hessian", "noise"])
@pytest.mark.parametrize("width", [8, 64])
def test_inputs_too_large_to_square_are_said(weighting, width):
    """An overflow in E[x x^T]: one line, not what a decomposition makes of Inf."""
    stat = Stat(width, name="a", want_gram=True)
    stat.update(1e30 * torch.randn(40, width))
    state = GroupState({"a": torch.randn(16, width)}, (("a",),), INT4, QuantSpec.parse("int4/token"), {"a": stat})
    with pytest.raises(DQError, match="a: the Hessian of the calibration inputs holds NaN or Inf; inputs too large"):
        TRANSFORMS.get("lowrank").fit(state, weighting=weighting)
