"""Sorting input channels by their calibrated maxima."""

import pytest
import torch

from dq.registry import DQError
from dq.spec import QuantSpec
from dq.stats import Stat
from dq.transforms import TRANSFORMS, GroupState, Step, apply_steps
from dq.transforms.permute import channel_amax

PERMUTE = TRANSFORMS.get("permute")


def state_of(*samples, weight=None, inputs=None) -> GroupState:
    """One group whose input tuples receive the samples [n, K]."""
    inputs = inputs or tuple((f"m{i}",) for i in range(len(samples)))
    width, stats = samples[0].shape[1], {}
    for members, x in zip(inputs, samples, strict=True):
        stats[members[0]] = Stat(width)
        stats[members[0]].update(x)
    weights = {m: torch.randn(8, width) if weight is None else weight for members in inputs for m in members}
    spec = QuantSpec.parse("int4/group16")
    return GroupState(weights, inputs, spec, spec, stats, k_parts=(width,))


def test_by_hand():
    """Maxima 3, 1, 5, 2 of |x|: channels 1, 3, 0, 2 in this order; equal ones keep theirs."""
    x = torch.tensor([[1.0, -1.0, 5.0, 2.0], [-3.0, 0.5, 0.0, -2.0]])
    state = state_of(x, weight=torch.arange(8.0).view(2, 4))
    PERMUTE.fit(state)
    assert state.steps[0].tensors["order"].tolist() == [1, 3, 0, 2]
    assert state.steps[0].tensors["order"].dtype == torch.int32
    assert state.weights["m0"].tolist() == [[1, 3, 0, 2], [5, 7, 4, 6]]
    assert apply_steps(x, state.steps).tolist() == [[-1, 2, 1, 5], [0.5, -2, -3, 0]]
    ties = state_of(torch.tensor([[2.0, 1, 2, 1, 2, 1]]))
    PERMUTE.fit(ties)
    assert ties.steps[0].tensors["order"].tolist() == [1, 3, 5, 0, 2, 4]


def test_all_inputs_of_a_group_count():
    """Two inputs that share the order: a channel is as strong as in the louder of them."""
    a, b = torch.tensor([[1.0, 2.0, 3.0]]), torch.tensor([[9.0, 0.0, 4.0]])
    state = state_of(a, b)
    assert channel_amax(state).tolist() == [9, 2, 4]
    PERMUTE.fit(state)
    assert state.steps[0].tensors["order"].tolist() == [1, 2, 0]
    assert len(state.steps) == 1


def test_all_tokens_count_not_only_the_sample():
    """A single loud token among many that the sample holds no row of."""
    x = torch.ones(5000, 4) * torch.tensor([1.0, 2.0, 3.0, 4.0])
    x[4321, 0] = 100.0
    state = state_of(x)
    state.stats["m0"] = Stat(4, capacity=8)
    state.stats["m0"].update(x)
    assert not (state.stats["m0"].rows == 100).any()
    PERMUTE.fit(state)
    assert state.steps[0].tensors["order"].tolist() == [1, 2, 3, 0]


def test_maxima_are_those_after_smoothing():
    x = torch.tensor([[8.0, 4.0, 2.0]])
    state = state_of(x)
    state.add(Step("smooth", {"factor": torch.tensor([16.0, 2.0, 4.0])}))
    assert channel_amax(state).tolist() == [0.5, 2.0, 0.5]


def test_there_and_back():
    state = state_of(torch.randn(50, 32) * torch.rand(32))
    PERMUTE.fit(state)
    for dtype in (torch.float64, torch.float32, torch.bfloat16):
        w = torch.randn(5, 32).to(dtype)
        assert torch.equal(state.from_basis(state.to_basis(w)), w)
        assert torch.equal(state.to_basis(w).float().sort(1).values, w.float().sort(1).values)


def test_calibration_is_asked_for():
    spec = QuantSpec.parse("int4/group16")
    with pytest.raises(DQError, match=r"permutation .* needs calibration.*layer a"):
        PERMUTE.fit(GroupState({"a": torch.randn(4, 16)}, (("a",),), spec, spec))


def test_order_in_a_recipe():
    from dq.recipe import Target

    Target.from_dict(dict(weights="nvfp4", activations="nvfp4-token", transforms=["smooth", "permute", "lowrank"]))
    with pytest.raises(DQError, match="got the order rotate, permute"):
        Target.from_dict(dict(weights="int4/channel", transforms=["rotate", "permute"]))


def test_blocks_of_like_channels_need_less(tiny):
    """What it is for: loud channels scattered one per block spoil every block; gathered, one or two of them."""
    from dq.recipe import Recipe

    x = torch.randn(300, 128)
    x[:, ::16] *= 30
    errors = []
    for transforms in ([], ["permute"]):
        linear = dict(weights="int4/group16", activations="int4/group16", transforms=transforms)
        weight = torch.randn(48, 128)
        weight[:, ::16] /= 30
        layer, source = tiny.layer(Recipe.from_dict(dict(name="t", linear=linear)), k=128, x=x, weight=weight)
        errors.append(float((layer(x) - source(x)).norm() / source(x).norm()))
    assert errors[1] < 0.6 * errors[0], errors
