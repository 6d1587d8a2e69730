"""The invariant of all transforms, alone and composed: `pre(x) @ W'.T + side(x) + b' == x @ W.T + b`.

Nothing here names a transform that must be tested: all that are discovered are.
"""

from itertools import combinations, groupby, product

import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st

from dq.registry import DQError
from dq.spec import QuantSpec
from dq.stats import Stat
from dq.transforms import TRANSFORMS, GroupState, apply_steps

IN_ORDER = sorted(TRANSFORMS, key=lambda t: t.order)
# Each alone, each pair, and each chain with one transform of every order.
CHAINS = product(*(tuple(group) for _, group in groupby(IN_ORDER, key=lambda t: t.order)))
COMPOSITIONS = [[t.name for t in c] for r in (1, 2) for c in combinations(IN_ORDER, r)]
COMPOSITIONS += [c for c in ([t.name for t in chain] for chain in CHAINS) if c not in COMPOSITIONS]
# Parameters that make a fit quick, and further ways in which a transform can be asked for.
QUICK = {"duquant": {"steps": 4}, "awq": {"rows": 16}, "shift": {"value": 0.171875}}
REFUSED = "no whole groups"
VARIANTS = {
    "rotate": (
        {"kind": "sylvester"},
        {"kind": "sylvester", "size": -1},
        {"kind": "random", "size": -1, "seed": 3},
        {"kind": "auto"},
    ),
    "duquant": ({"steps": 2, "block": 8},),
    "smooth": ({"search": True, "rows": 16}, {"search": True, "grid": "svdquant", "rows": 8}, {"quantile": 0.9}),
    "outliers": ({"threshold": 0.0, "count": 5}, {"threshold": 1e9}),
}
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


def build(group: str, *, calibrated=True, side_dtype=torch.float64, act="int4/group16") -> tuple[GroupState, dict]:
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
    spec, activations = QuantSpec.parse("int4/group16"), QuantSpec.parse(act)
    state = GroupState(weights, inputs, spec, activations, stats if calibrated else {}, lowrank, parts, rank=8)
    state.side_dtype = side_dtype
    return state, x


def fit(state: GroupState, names: list[str]) -> None:
    """Fits in order. A grid that a transform refuses for this K is no case of the invariant."""
    for name in names:
        try:
            TRANSFORMS.get(name).fit(state, **QUICK.get(name, {}))
        except DQError as error:
            if REFUSED in str(error):
                pytest.skip(str(error))
            raise


def gained(state: GroupState, name: str) -> torch.Tensor:
    """b' - b = -W' pre(0) [N]: takes the constant off that a shift of the input adds to the output."""
    w = state.weights[name].double()
    return -(w @ apply_steps(w.new_zeros(1, state.width), state.steps)[0])


def assert_preserved(state: GroupState, raw: dict, x: dict) -> None:
    for members in state.inputs:
        for m in members:
            value = x[members[0]]
            y = apply_steps(value, state.steps) @ state.weights[m].T + gained(state, m)
            if m in state.side:
                down, up = (t.double() for t in state.side[m])
                y = y + value @ down.T @ up.T
            expected = value @ raw[m].T
            assert (y - expected).norm() <= 1e-10 * expected.norm(), m


def assert_inverse(state: GroupState) -> None:
    """There and back, a weight is itself, but for columns that meet channels which the input steps leave out."""
    w, unit = torch.randn(7, state.width, dtype=torch.float64), torch.eye(state.width, dtype=torch.float64)
    used = (apply_steps(unit, state.steps) - apply_steps(unit[:1] * 0, state.steps)).abs().amax(1) > 1e-12
    assert torch.allclose(state.from_basis(state.to_basis(w)), w * used, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("group", GROUPS)
@pytest.mark.parametrize("names", COMPOSITIONS, ids="+".join)
def test_function_is_preserved(names, group):
    state, x = build(group)
    raw = {m: w.clone() for m, w in state.weights.items()}
    fit(state, names)
    assert_preserved(state, raw, x)


@pytest.mark.parametrize("names", COMPOSITIONS, ids="+".join)
def test_side_branch_costs_nothing_by_its_16_bit_storage(names):
    """What is subtracted from W is the branch as stored, so its rounding is no error at all. (Columns of W itself are
    there in the 16 bits that they have in a model.)"""
    state, x = build("qkv and mlp", side_dtype=torch.bfloat16)
    state.weights = {m: w.bfloat16().double() for m, w in state.weights.items()}
    raw = {m: w.clone() for m, w in state.weights.items()}
    fit(state, names)
    assert all(t.dtype == torch.bfloat16 for pair in state.side.values() for t in pair)
    assert_preserved(state, raw, x)


@pytest.mark.parametrize("group", GROUPS)
@pytest.mark.parametrize("names", COMPOSITIONS, ids="+".join)
def test_bases_are_inverses(names, group):
    """`from_basis` undoes `to_basis`: that is how a layer is dequantized and a LoRA stays exact."""
    state, _ = build(group)
    fit(state, names)
    assert_inverse(state)


@pytest.mark.parametrize("name", [t.name for t in IN_ORDER if t.apply])
def test_steps_hold_the_declared_tensors(name):
    """A checkpoint makes its buffers from `Transform.buffers` before it sees a tensor."""
    state, _ = build("qkv")
    fit(state, [name])
    assert [s.name for s in state.steps] == [name]
    step = state.steps[0]
    declared = TRANSFORMS.get(name).tensors(state.width, step.params)
    assert {k: (tuple(t.shape), t.dtype) for k, t in step.tensors.items()} == declared


@pytest.mark.parametrize("name", [t.name for t in IN_ORDER])
def test_calibration_is_asked_for_where_needed(name):
    state, x = build("qkv", calibrated=False)
    raw = {m: w.clone() for m, w in state.weights.items()}
    if TRANSFORMS.get(name).calibrated({}):
        with pytest.raises(DQError, match=r"needs calibration.*layer q"):
            TRANSFORMS.get(name).fit(state)
    else:
        fit(state, [name])
        assert_preserved(state, raw, x)


@pytest.mark.parametrize("name", [t.name for t in IN_ORDER if t.apply])
def test_apply_works_on_any_leading_shape(name):
    state, x = build("qkv")
    fit(state, [name])
    flat = apply_steps(x["q"], state.steps)
    assert torch.equal(apply_steps(x["q"].view(5, 2, 5, -1), state.steps).view(50, -1), flat)
    assert apply_steps(x["q"][:0], state.steps).shape == (0, state.width)


@pytest.mark.parametrize(("name", "params"), [(n, p) for n, variants in VARIANTS.items() for p in variants])
@pytest.mark.parametrize("group", GROUPS)
def test_variants(name, params, group):
    """Other parameters than the default: the function is preserved, and both ways between the bases agree."""
    state, x = build(group)
    raw = {m: w.clone() for m, w in state.weights.items()}
    if params.get("block") and state.width % params["block"]:
        pytest.skip("refused: the block does not divide K")
    TRANSFORMS.get(name).fit(state, **params)
    assert_preserved(state, raw, x)
    assert_inverse(state)


@given(
    width=st.integers(1, 12).flatmap(lambda n: st.sampled_from((n, 4 * n, 16 * n, 12 * n))),
    rows=st.lists(st.integers(1, 20), min_size=1, max_size=3),
    names=st.lists(st.sampled_from(IN_ORDER), min_size=1, max_size=3, unique_by=lambda t: t.name),
    seed=st.integers(0, 99),
)
def test_random_shapes(width, rows, names, seed):
    """Any K, any number of linears of any N, any composition in the fixed order."""
    g = torch.Generator().manual_seed(seed)
    members = tuple(f"m{i}" for i in range(len(rows)))
    raw = {m: torch.randn(n, width, generator=g, dtype=torch.float64) for m, n in zip(members, rows, strict=True)}
    x = {members[0]: torch.randn(9, width, generator=g, dtype=torch.float64)}
    stats = {members[0]: Stat(width, name=members[0])}
    stats[members[0]].update(x[members[0]])
    assume(width % 16 == 0 or "arc" not in {t.name for t in names})  # residual channels go in whole groups
    spec, act = QuantSpec.parse("int4/group16"), QuantSpec.parse("int4/group16")
    state = GroupState(dict(raw), (members,), spec, act, stats, side_dtype=torch.float64)
    fit(state, [t.name for t in sorted(names, key=lambda t: t.order)])
    assert_preserved(state, raw, x)
