"""DuQuant: the greedy rotation, the zigzag permutation, and what they are for."""

import pytest
import torch

from dq.qtensor import fake_quantize
from dq.registry import DQError
from dq.spec import QuantSpec
from dq.stats import Stat
from dq.transforms import TRANSFORMS, GroupState, apply_steps
from dq.transforms.duquant import block_multiply, block_size, greedy_rotations, uniform_orthogonal, zigzag

DUQUANT = TRANSFORMS.get("duquant")
INT4 = QuantSpec.parse("int4/token")


def state_of(x: torch.Tensor, n: int = 24) -> GroupState:
    stat = Stat(x.shape[1], name="a")
    stat.update(x)
    return GroupState({"a": torch.randn(n, x.shape[1])}, (("a",),), QuantSpec.parse("int4/channel"), INT4, {"a": stat})


def test_base_matrix():
    """Orthogonal, first row uniform: coordinate 0 of a row vector is spread evenly."""
    u = uniform_orthogonal(16, torch.Generator().manual_seed(1))
    torch.testing.assert_close(u @ u.T, torch.eye(16, dtype=torch.float64))
    torch.testing.assert_close(u[0], torch.full((16,), 0.25, dtype=torch.float64))


def test_one_step_spreads_the_loudest_channel():
    """A row with one entry v in channel c becomes v / sqrt(B) everywhere: no spread between max and min is left."""
    x = torch.zeros(1, 2, 16)
    x[0, 0, 5], x[0, 1, 0] = 8.0, -4.0
    turn = greedy_rotations(x, steps=1)
    y = torch.einsum("nbi,bij->nbj", x.double(), turn)
    torch.testing.assert_close(y[0, 0], torch.full((16,), 2.0, dtype=torch.float64))
    torch.testing.assert_close(y[0, 1], torch.full((16,), -1.0, dtype=torch.float64))


def test_rotations_are_orthogonal_and_never_worse():
    x = torch.randn(32, 3, 16)
    x[:, 1, 7] *= 40
    turn = greedy_rotations(x, steps=40)
    torch.testing.assert_close(turn @ turn.mT, torch.eye(16, dtype=torch.float64).expand(3, 16, 16))
    y = torch.einsum("nbi,bij->nbj", x.double(), turn)
    before, after = x.amax((0, 2)) - x.amin((0, 2)), y.amax((0, 2)) - y.amin((0, 2))
    assert (after <= before + 1e-9).all() and after[1] < before[1] / 2


def test_zigzag():
    """Six channels, strongest first, dealt to three blocks: 1, 2, 3, 3, 2, 1."""
    order = zigzag(torch.tensor([6.0, 5, 4, 3, 2, 1]), 2)
    assert order.tolist() == [0, 5, 1, 4, 2, 3]
    strength = torch.rand(128).sort().values.exp() ** 3
    blocks = strength[zigzag(strength, 16)].reshape(8, 16).mean(1)
    assert blocks.std() < strength.reshape(8, 16).mean(1).std() / 20


@pytest.mark.parametrize(("width", "block"), [(3072, 128), (80, 16), (96, 32), (192, 64), (37, 0), (24, 0)])
def test_block_sizes(width, block):
    assert block_size(width) == block


def test_asked_for_block_must_divide():
    with pytest.raises(DQError, match="duquant block 64 does not divide the input width 96 of a"):
        DUQUANT.fit(state_of(torch.randn(9, 96)), block=64)


def test_odd_width_is_left_alone():
    state = state_of(torch.randn(9, 37))
    DUQUANT.fit(state)
    assert state.steps == []


def test_block_multiply():
    x, blocks = torch.randn(2, 3, 8), torch.randn(2, 4, 4)
    torch.testing.assert_close(block_multiply(x, blocks), x @ torch.block_diag(*blocks))


def test_same_seed_same_rotation():
    x = torch.randn(40, 64)
    first, second = state_of(x), state_of(x)
    for state in (first, second):
        DUQUANT.fit(state, steps=8)
    assert all(torch.equal(first.steps[0].tensors[k], second.steps[0].tensors[k]) for k in ("first", "order", "second"))


def test_outliers_in_one_block_are_shared_out():
    """What the permutation is for: rotation within blocks alone leaves the loud block loud."""
    x = torch.randn(200, 128)
    x[:, :8] *= 30
    state = state_of(x)
    DUQUANT.fit(state, block=16, steps=64)
    y = apply_steps(x, state.steps)

    def error(t):
        return float((fake_quantize(t, INT4) - t).square().sum() / t.square().sum())

    rotated = state_of(x)
    TRANSFORMS.get("rotate").fit(rotated, size=16)
    assert error(y) < min(error(x), error(apply_steps(x, rotated.steps))) * 0.7


def test_plan_and_tensors_agree():
    state = state_of(torch.randn(50, 96))
    DUQUANT.fit(state, steps=2)
    (name, params), *_ = DUQUANT.plan((24, 96), (96,), {}).steps
    assert (name, params) == ("duquant", state.steps[0].params)
    found = {k: (tuple(t.shape), t.dtype) for k, t in state.steps[0].tensors.items()}
    assert found == DUQUANT.tensors(96, params)
