"""The invariant of all transforms, alone and composed, on every kind of group: `pre(x) @ W'.T + side(x) == x @ W.T`."""

from itertools import chain, combinations

import pytest
import torch

from dq.registry import DQError
from dq.spec import QuantSpec
from dq.stats import Stat
from dq.transforms import TRANSFORMS, GroupState, apply_steps

IN_ORDER = sorted(TRANSFORMS, key=lambda t: t.order)
COMPOSITIONS = [[t.name for t in c] for c in chain.from_iterable(combinations(IN_ORDER, r) for r in (1, 2, 3, 4))]
QKV = ("q", "k", "v")

# name -> (inputs, low-rank sets, widths of the parts of K)
GROUPS = {
    "one": ((("q",),), (), (64,)),
    "odd K": ((("q",),), (), (37,)),
    "qkv": ((QKV,), (QKV,), (80,)),
    "qkv and mlp": (((*QKV, "mlp"),), (QKV, ("mlp",)), (64,)),
    "two inputs": ((("out",), ("add_out",)), (("out",), ("add_out",)), (96,)),
    "two inputs of several": (((*QKV,), ("k2", "v2")), (QKV, ("k2", "v2")), (48,)),
    "two parts": ((("proj",),), (), (64, 192)),
    "parts of unlike size": ((("proj",),), (), (32, 33)),
}


def build(group: str, *, calibrated=True, side_dtype=torch.float64, act="int8/token") -> tuple[GroupState, dict]:
    """A state in float64, and the raw inputs [tokens, K] of each input tuple, with a few strong channels."""
    inputs, lowrank, parts = GROUPS[group]
    g = torch.Generator().manual_seed(len(group))
    width = sum(parts)
    weights, x, stats = {}, {}, {}
    for members in inputs:
        loud = torch.where(torch.rand(width, generator=g) < 0.1, 20.0, 1.0)
        x[members[0]] = torch.randn(50, width, generator=g, dtype=torch.float64) * loud
        stats[members[0]] = Stat(width, name=members[0])
        stats[members[0]].update(x[members[0]])
        for i, m in enumerate(members):
            weights[m] = torch.randn(24 + 8 * i, width, generator=g, dtype=torch.float64)
    spec, activations = QuantSpec.parse("int4/channel"), QuantSpec.parse(act)
    state = GroupState(weights, inputs, spec, activations, stats if calibrated else {}, lowrank, parts, rank=8)
    state.side_dtype = side_dtype
    return state, x


def assert_preserved(state: GroupState, raw: dict, x: dict) -> None:
    for members in state.inputs:
        for m in members:
            value = x[members[0]]
            y = apply_steps(value, state.steps) @ state.weights[m].T
            if m in state.side:
                down, up = (t.double() for t in state.side[m])
                y = y + value @ down.T @ up.T
            expected = value @ raw[m].T
            assert (y - expected).norm() <= 1e-10 * expected.norm(), m


@pytest.mark.parametrize("group", GROUPS)
@pytest.mark.parametrize("names", COMPOSITIONS, ids="+".join)
def test_function_is_preserved(names, group):
    state, x = build(group)
    raw = {m: w.clone() for m, w in state.weights.items()}
    for name in names:
        TRANSFORMS.get(name).fit(state)
    assert_preserved(state, raw, x)


@pytest.mark.parametrize("names", COMPOSITIONS, ids="+".join)
def test_side_branch_costs_nothing_by_its_16_bit_storage(names):
    """What is subtracted from W is the branch as stored, so its rounding is no error at all."""
    state, x = build("qkv and mlp", side_dtype=torch.bfloat16)
    raw = {m: w.clone() for m, w in state.weights.items()}
    for name in names:
        TRANSFORMS.get(name).fit(state)
    assert all(t.dtype == torch.bfloat16 for pair in state.side.values() for t in pair)
    assert_preserved(state, raw, x)


@pytest.mark.parametrize("group", GROUPS)
@pytest.mark.parametrize("names", COMPOSITIONS, ids="+".join)
def test_bases_are_inverses(names, group):
    """`from_basis` undoes `to_basis`: that is how a layer is dequantized and a LoRA stays exact."""
    state, _ = build(group)
    for name in names:
        TRANSFORMS.get(name).fit(state)
    w = torch.randn(7, state.width, dtype=torch.float64)
    assert torch.allclose(state.from_basis(state.to_basis(w)), w, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("name", [t.name for t in IN_ORDER if t.apply])
def test_steps_hold_the_declared_tensors(name):
    """A checkpoint makes its buffers from `Transform.buffers` before it sees a tensor."""
    state, _ = build("qkv")
    kind = TRANSFORMS.get(name)
    kind.fit(state)
    assert [s.name for s in state.steps] == [name]
    step = state.steps[0]
    declared = kind.buffers(state.width, step.params) if kind.buffers else {}
    assert {k: tuple(t.shape) for k, t in step.tensors.items()} == declared


@pytest.mark.parametrize("name", [t.name for t in IN_ORDER])
def test_calibration_is_asked_for_where_needed(name):
    state, x = build("qkv", calibrated=False)
    raw = {m: w.clone() for m, w in state.weights.items()}
    if TRANSFORMS.get(name).needs_stats:
        with pytest.raises(DQError, match=r"needs calibration.*layer q"):
            TRANSFORMS.get(name).fit(state)
    else:
        TRANSFORMS.get(name).fit(state)
        assert_preserved(state, raw, x)


@pytest.mark.parametrize("name", [t.name for t in IN_ORDER if t.apply])
def test_apply_works_on_any_leading_shape(name):
    state, x = build("qkv")
    TRANSFORMS.get(name).fit(state)
    flat = apply_steps(x["q"], state.steps)
    assert torch.equal(apply_steps(x["q"].view(5, 2, 5, -1), state.steps).view(50, -1), flat)
    assert apply_steps(x["q"][:0], state.steps).shape == (0, state.width)
