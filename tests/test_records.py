"""Records and the sampler: strata, constant capacity, uniform draws, isolation from later edits."""

from collections import Counter, OrderedDict, namedtuple

import pytest
import torch

from dq.records import BRANCHES, Record, RecordSampler, digest, map_tensors, tensors, to_cpu
from dq.registry import DQError


def record(prompt=0, step=0, steps=8, branch="single", value=0.0):
    return Record((torch.full((2, 3), value),), {"t": torch.tensor(value)}, prompt, step, steps, branch=branch)


def offer_all(sampler, prompts=10, steps=8, branches=("cond", "uncond")):
    for p in range(prompts):
        for s in range(steps):
            for b in branches:
                sampler.offer(record(p, s, steps, b))
    return sampler


@pytest.mark.parametrize(
    ("step", "steps", "bins", "stratum"),
    [(0, 8, 4, 0), (1, 8, 4, 0), (2, 8, 4, 1), (7, 8, 4, 3), (27, 28, 4, 3), (0, 1, 4, 0), (2, 3, 4, 2), (9, 8, 4, 3)],
)
def test_bins(step, steps, bins, stratum):
    """Bin b of B covers the steps with floor(step * B / steps) == b; one step more than announced stays in the last."""
    assert record(step=step, steps=steps, branch="cond").stratum(bins) == f"{stratum}/cond"


def test_strata_are_filled_evenly():
    """32 records over 4 bins x 2 branches: 4 of each, however many calls there were."""
    sampler = offer_all(RecordSampler(capacity=32, bins=4))
    kept = Counter(r.stratum(4) for r in sampler.records())
    assert kept == {f"{b}/{c}": 4 for b in range(4) for c in ("cond", "uncond")}
    summary = sampler.summary()
    assert summary["kept"] == dict(sorted(kept.items()))
    assert summary["seen"] == dict.fromkeys(sorted(kept), 20) and summary["bins"] == 4


def test_rare_branches_keep_their_share():
    """A branch seen seldom (CFG in the last steps only) is not crowded out by a common one."""
    sampler = RecordSampler(capacity=8, bins=1)
    for i in range(500):
        sampler.offer(record(i, branch="single"))
    for i in range(5):
        sampler.offer(record(i, branch="uncond"))
    assert Counter(r.branch for r in sampler.records()) == {"single": 4, "uncond": 4}


@pytest.mark.parametrize("n", [1, 10, 100, 1000])
def test_capacity_holds_whatever_comes(n):
    sampler = RecordSampler(capacity=16, bins=4)
    for i in range(n):
        sampler.offer(record(i, i % 8, branch=BRANCHES[i % 3]))
        assert len(sampler.records()) <= 16
    assert sum(sampler.seen.values()) == n


def test_capacity_holds_with_more_strata_than_records():
    sampler = offer_all(RecordSampler(capacity=3, bins=4), branches=BRANCHES)
    assert len(sampler.records()) == 3


def test_draws_are_uniform():
    counts = torch.zeros(40)
    for seed in range(800):
        sampler = RecordSampler(capacity=4, bins=1, seed=seed)
        for i in range(40):
            sampler.offer(record(i))
        for r in sampler.records():
            counts[r.prompt] += 1
    expected = 800 * 4 / 40
    chi2 = float(((counts - expected) ** 2 / (expected * 0.9)).sum())
    assert abs(chi2 - 39) < 4 * (2 * 39) ** 0.5


def test_order_and_seed():
    one, two = (offer_all(RecordSampler(capacity=16, seed=5)).records() for _ in range(2))
    key = [(r.prompt, r.step, r.branch) for r in one]
    assert key == [(r.prompt, r.step, r.branch) for r in two] and key == sorted(key)
    other = offer_all(RecordSampler(capacity=16, seed=6)).records()
    assert key != [(r.prompt, r.step, r.branch) for r in other]


def test_kept_records_are_copies():
    """Pipelines edit latents in place between steps; a record must show what the model saw."""
    sampler, latents = RecordSampler(capacity=4), torch.zeros(2, 3)
    sampler.offer(Record((latents,), {"more": [latents], "scale": 2}))
    latents += 1
    kept = sampler.records()[0]
    assert not kept.args[0].any() and not kept.kwargs["more"][0].any() and kept.kwargs["scale"] == 2


def test_offer_says_whether_it_kept():
    sampler = RecordSampler(capacity=2, bins=1)
    answers = [sampler.offer(record(i)) for i in range(50)]
    assert answers[:2] == [True, True] and not all(answers)
    assert len(sampler.records()) == 2


@pytest.mark.parametrize("settings", [dict(capacity=0), dict(bins=0), dict(capacity=-1)])
def test_settings_are_checked(settings):
    with pytest.raises(DQError, match="at least 1"):
        RecordSampler(**settings)


def test_nested_structures():
    pair = namedtuple("pair", "a b")
    tree = {"x": (torch.zeros(1), [torch.ones(2), "text"]), "y": pair(torch.ones(3), None), "z": 4}
    doubled = map_tensors(tree, lambda t: t * 2)
    assert doubled["x"][1][0].tolist() == [2, 2] and doubled["x"][1][1] == "text" and doubled["z"] == 4
    assert isinstance(doubled["y"], pair) and doubled["y"].b is None and isinstance(doubled["x"], tuple)
    assert [len(t) for t in tensors(tree)] == [1, 2, 3]
    ordered = map_tensors(OrderedDict(k=torch.ones(1)), lambda t: t + 1)
    assert isinstance(ordered, OrderedDict) and ordered["k"].item() == 2


def test_model_outputs_keep_their_class():
    """Blocks and models may return dataclass-like dictionaries."""
    from diffusers.models.modeling_outputs import Transformer2DModelOutput

    out = map_tensors(Transformer2DModelOutput(sample=torch.ones(2)), lambda t: t + 1)
    assert isinstance(out, Transformer2DModelOutput) and out.sample.tolist() == [2, 2]


def test_to_cpu_detaches():
    x = torch.ones(2, requires_grad=True)
    assert not to_cpu([x])[0].requires_grad


def test_digest_of_an_expanded_scalar():
    """Pipelines pass `t.expand(batch)` as the timestep: one element without a stride."""
    assert digest(torch.tensor(3.0).expand(1)) == digest(torch.tensor([3.0]))
    assert digest(torch.tensor(3.0).expand(2)) == digest(torch.tensor([3.0, 3.0]))
