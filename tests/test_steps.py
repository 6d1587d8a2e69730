"""Groups of denoising steps: the golden partition, edges in time, and how layers learn which step it is."""

import copy
import itertools
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from dq.records import Record
from dq.registry import DQError
from dq.steps import StepContext, StepGroups, partition, rounding_error, stratum, tops_by_step, watch

TOPS = [1.0, 1.1, 1.3, 1.9, 3.0, 5.5, 6.0, 6.1]


def test_golden():
    """methods_diffusion V10: INT8, eight steps."""
    assert partition(TOPS, 3) == (3, 5)
    errors = [rounding_error(TOPS, cuts, 127) for cuts in ((), (3, 5), (3, 6), tuple(range(1, 8)))]
    assert errors == pytest.approx([1.538016e-3, 6.959514e-4, 8.795751e-4, 6.198462e-4], abs=1e-9)
    assert partition(TOPS, 1) == () and partition(TOPS, 20) == tuple(range(1, 8))


@given(st.lists(st.floats(0, 10), min_size=1, max_size=7), st.integers(1, 4))
def test_no_partition_is_better(tops, groups):
    """Against every one of as many groups."""
    found = partition(tops, groups)
    assert len(found) == min(groups, len(tops)) - 1 and list(found) == sorted(set(found))
    every = itertools.combinations(range(1, len(tops)), len(found))
    best = min(rounding_error(tops, cuts, 127) for cuts in every)
    assert rounding_error(tops, found, 127) <= best * (1 + 1e-12)


def test_groups_lie_on_the_time_axis():
    """Timesteps fall while steps rise; edges are midway; branches count together; spare groups repeat the last."""
    times = [1 - i / 8 for i in range(8)]
    tops = dict(zip(times, TOPS, strict=True))
    groups = StepGroups.fit(tops, 3)
    assert groups.edges.tolist() == [0.4375, 0.6875] and [round(v, 4) for v in groups.tops.tolist()] == [6.1, 3.0, 1.3]
    context = StepContext()
    scales = groups.tops[:, None]
    for time, index in ((0.0, 0), (0.4375, 0), (0.45, 1), (0.7, 2), (5.0, 2)):
        context.timestep = torch.tensor([time])
        assert torch.equal(context.pick(scales, groups.edges), scales[index : index + 1])
    context.timestep = None
    assert float(context.pick(scales, groups.edges)) == pytest.approx(6.1)
    few = StepGroups.fit({0.1: 2.0, 0.9: 1.0}, 4)
    assert few.tops.tolist() == [2.0, 1.0, 1.0, 1.0] and few.edges.shape == (3,)
    context.timestep = torch.tensor([1e6])
    assert float(context.pick(few.tops[:, None], few.edges)) == 1.0


def test_strata_by_timestep():
    records = [Record((), {}, timestep=t, branch=b) for t in (0.25, 901.5) for b in ("cond", "uncond")]
    absmax = {stratum(r): float(i) for i, r in enumerate(records)}
    assert tops_by_step(absmax) == {0.25: 1.0, 901.5: 3.0}
    with pytest.raises(DQError, match="need records with timesteps"):
        StepGroups.fit(tops_by_step({stratum(Record((), {})): 1.0}), 2)


class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.config, self.step_context, self.seen = SimpleNamespace(step_groups=2), StepContext(), []

    def forward(self, x):
        self.seen.append(self.step_context.timestep)
        return x


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = nn.Sequential(Layer(), Layer())

    def forward(self, x, text=None, timestep=None):
        if text == "fail":
            raise RuntimeError
        return self.inner(x)


def test_layers_see_the_timestep_of_their_own_model():
    model, x = Model(), torch.zeros(1)
    context = watch(model)
    assert watch(model) is context and len(model._forward_pre_hooks) == 1
    for value in (torch.tensor([0.5, 0.5]), torch.tensor(0.5), 0.5):
        model(x, timestep=value)
        model(x, None, value)
    assert all(t.tolist() == [0.5] for t in model.inner[1].seen) and len(model.inner[1].seen) == 6
    assert context.timestep is None
    with pytest.raises(RuntimeError):
        model(x, "fail", 0.5)
    assert context.timestep is None  # a call that failed leaves nothing behind
    other = copy.deepcopy(model)
    assert other.inner[0].step_context is other.inner[1].step_context is other.dq_steps is not context
    other(x, timestep=0.75)
    assert other.inner[0].seen[-1].tolist() == [0.75] and len(model.inner[0].seen) == 6


def test_watch_refuses_and_leaves_alone():
    with pytest.raises(DQError, match="Sequential is not"):
        watch(nn.Sequential(Layer()))
    plain = nn.Sequential(nn.Linear(2, 2))
    assert watch(plain) is None and not plain._forward_pre_hooks


def test_partition_complaints():
    for tops, groups in (([], 2), ([1.0], 0)):
        with pytest.raises(DQError, match="at least one group"):
            partition(tops, groups)
