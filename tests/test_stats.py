"""`Stat`: streaming equals one shot, merging equals union, the sample is uniform, memory is constant."""

import pytest
import torch

from dq.registry import DQError
from dq.spec import QuantSpec
from dq.stats import Stat
from dq.transforms import TRANSFORMS, GroupState, apply_steps


def streamed(x, pieces, **kwargs):
    stat = Stat(x.shape[-1], **kwargs)
    for piece in x.split(pieces):
        stat.update(piece)
    return stat


@pytest.mark.parametrize("pieces", [1, 7, 16, 50, 1000])
def test_streaming_is_one_shot(pieces):
    x = torch.randn(300, 12)
    stat, whole = streamed(x, pieces, capacity=40), streamed(x, 300, capacity=40)
    assert torch.equal(stat.amax(), x.abs().amax(0))
    torch.testing.assert_close(stat.total["0/single"], x.abs().sum(0))
    assert stat.count == {"0/single": 300}
    assert torch.equal(stat.rows, whole.rows)


def test_leading_axes_and_dtypes():
    x = torch.randn(2, 3, 5, 8).bfloat16()
    stat, flat = Stat(8), Stat(8)
    stat.update(x)
    flat.update(x.float().reshape(-1, 8))
    assert torch.equal(stat.amax(), flat.amax()) and torch.equal(stat.rows, flat.rows)
    assert stat.rows.dtype == torch.float32 and stat.count["0/single"] == 30


def test_empty_inputs_leave_no_trace():
    stat = Stat(8)
    stat.update(torch.zeros(0, 8))
    assert stat.count == {} and len(stat.rows) == 0
    with pytest.raises(DQError, match=r"blocks\.0\.to_q: no calibration input reached this layer"):
        Stat(8, name="blocks.0.to_q").amax()


def test_strata_stay_apart():
    a, b = torch.randn(10, 4), 3 * torch.randn(20, 4)
    stat = Stat(4)
    stat.update(a, "0/cond")
    stat.update(b, "3/uncond")
    assert torch.equal(stat.absmax["0/cond"], a.abs().amax(0))
    assert torch.equal(stat.absmax["3/uncond"], b.abs().amax(0))
    assert stat.count == {"0/cond": 10, "3/uncond": 20}
    assert torch.equal(stat.amax(), torch.cat([a, b]).abs().amax(0))


def test_merge_is_union():
    a, b = torch.randn(100, 6), 2 * torch.randn(60, 6)
    one, two, both = Stat(6, seed=1), Stat(6, seed=2), Stat(6)
    one.update(a, "0/cond")
    two.update(b[:30], "0/cond")
    two.update(b[30:], "1/single")
    for x, stratum in ((a, "0/cond"), (b[:30], "0/cond"), (b[30:], "1/single")):
        both.update(x, stratum)
    before = two.absmax["1/single"].clone(), two.total["0/cond"].clone()
    one.merge(two)
    assert torch.equal(one.amax(), both.amax()) and one.count == both.count
    for stratum in both.total:
        torch.testing.assert_close(one.total[stratum], both.total[stratum])
    # Below capacity nothing is dropped: the sample is every row.
    as_set = lambda rows: {tuple(r) for r in rows.tolist()}  # noqa: E731
    assert as_set(one.rows) == as_set(both.rows) and len(one.rows) == 160
    one.update(b, "1/single")
    one.update(b, "0/cond")
    assert torch.equal(two.absmax["1/single"], before[0]) and torch.equal(two.total["0/cond"], before[1])


def test_merge_keeps_the_capacity():
    one, two = Stat(2, capacity=16, seed=1), Stat(2, capacity=16, seed=2)
    one.update(torch.zeros(1000, 2))
    two.update(torch.ones(3000, 2))
    rows = one.merge(two).rows
    assert len(rows) == 16 and 0 < rows[:, 0].sum() < 16  # some of either


def test_sample_is_uniform():
    """Each of 400 rows is kept with probability 20/400: counts over 600 seeds against chi-square with 399 degrees."""
    counts, x = torch.zeros(400), torch.arange(400.0)[:, None]
    for seed in range(600):
        rows = streamed(x, 37, capacity=20, seed=seed).rows
        assert len(rows) == len(rows.unique()) == 20
        counts[rows[:, 0].long()] += 1
    expected = 600 * 20 / 400
    chi2 = float(((counts - expected) ** 2 / (expected * (1 - 20 / 400))).sum())
    assert abs(chi2 - 399) < 4 * (2 * 399) ** 0.5
    halves = counts.view(4, 100).sum(1) / 100
    assert (halves / expected - 1).abs().max() < 0.06  # neither early nor late rows are preferred


def test_sample_keeps_order_and_copies():
    x = torch.arange(100.0)[:, None].repeat(1, 3)
    stat = streamed(x, 9, capacity=10)
    assert (stat.rows[:, 0].diff() > 0).all()
    kept = stat.rows.clone()
    x.zero_()
    assert torch.equal(stat.rows, kept)


def test_memory_is_constant():
    stat = Stat(4, capacity=32)
    for i in range(50):
        stat.update(torch.randn(100, 4), f"{i % 4}/single")
        assert len(stat.rows) == 32 and len(stat._seen.keys) == 32
    assert len(stat.absmax) == len(stat.count) == 4


def test_seeds_repeat():
    x = torch.randn(500, 3)
    assert torch.equal(streamed(x, 50, capacity=8, seed=3).rows, streamed(x, 50, capacity=8, seed=3).rows)
    assert not torch.equal(streamed(x, 50, capacity=8, seed=3).rows, streamed(x, 50, capacity=8, seed=4).rows)


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_nan_is_refused_with_layer_and_stratum(bad):
    stat, x = Stat(4, name="blocks.1.ff"), torch.randn(5, 4)
    x[2, 1] = bad
    with pytest.raises(DQError, match=r"blocks\.1\.ff: a calibration input \(stratum 2/cond\) holds 1 NaN or Inf"):
        stat.update(x, "2/cond")


def test_width_is_checked():
    with pytest.raises(DQError, match=r"blocks\.1\.ff: expected inputs of width 4, got \(5, 6\)"):
        Stat(4, name="blocks.1.ff").update(torch.zeros(5, 6))


def test_gram_counts_by_weight():
    """E[x x^T], E[x] over all tokens, every record by its weight; maxima, sums and counts do not know of it."""
    a, b = torch.randn(30, 5, dtype=torch.float64), 2 * torch.randn(2, 25, 5, dtype=torch.float64) + 1
    stat = Stat(5, want_gram=True)
    stat.update(a, weight=3.0)
    stat.update(b, "1/cond", weight=0.5)
    flat = b.reshape(-1, 5)
    mass = 3.0 * 30 + 0.5 * 50
    torch.testing.assert_close(stat.gram(), ((3 * a.T @ a + 0.5 * flat.T @ flat) / mass).float())
    torch.testing.assert_close(stat.center(), ((3 * a.sum(0) + 0.5 * flat.sum(0)) / mass).float())
    both = torch.cat([a, flat])
    torch.testing.assert_close(stat.mean(), both.abs().mean(0).float())
    torch.testing.assert_close(stat.low, both.amin(0).float())
    assert torch.equal(stat.amax(), both.abs().amax(0).float())
    assert Stat(5).gram() is None


def test_a_weight_is_a_repetition():
    x, y = torch.randn(40, 6), torch.randn(10, 6)
    one, two = Stat(6, want_gram=True), Stat(6, want_gram=True)
    one.update(x)
    one.update(y, weight=3.0)
    for part in (x, y, y, y):
        two.update(part)
    torch.testing.assert_close(one.gram(), two.gram())
    torch.testing.assert_close(one.center(), two.center())


def test_merged_statistics_are_those_of_one_pass():
    """Grams, centres, minima and samples; below capacity the sample is every row, held-out ones apart."""
    parts = [(torch.randn(20, 4), 1.0, False), (torch.randn(15, 4) - 1, 2.5, False), (torch.randn(9, 4), 1.0, True)]
    parts += [(torch.randn(12, 4) + 2, 0.3, False), (torch.randn(7, 4), 4.0, True)]
    whole, pieces = Stat(4, want_gram=True), [Stat(4, want_gram=True, seed=i) for i in range(3)]
    for i, (x, weight, held) in enumerate(parts):
        for stat in (whole, pieces[i % 3]):
            stat.update(x, f"{i % 2}/single", weight=weight, held_out=held)
    merged = Stat(4, want_gram=True, seed=9)
    for piece in pieces:
        assert merged.merge(piece) is merged
    for read in (Stat.gram, Stat.center, Stat.mean, Stat.amax, lambda s: s.low):
        torch.testing.assert_close(read(merged), read(whole))
    for rows in (lambda s: s.rows, lambda s: s.held_rows):
        assert sorted(rows(merged).tolist()) == sorted(rows(whole).tolist())
    assert len(whole.rows) == 47 and len(whole.held_rows) == 16 and merged.count == whole.count


def test_merged_samples_are_drawn_as_from_one_pass():
    """Rows of a large and a small part are kept in the proportion of their sizes (and weights)."""
    kept = torch.zeros(2)
    for seed in range(200):
        one, two = Stat(1, capacity=16, seed=2 * seed), Stat(1, capacity=16, seed=2 * seed + 1)
        one.update(torch.zeros(300, 1), weight=1.0)
        two.update(torch.ones(100, 1), weight=3.0)
        kept += torch.bincount(one.merge(two).rows[:, 0].long(), minlength=2)
    # 16 of 400 without replacement, 300 of weight 1 and 100 of weight 3: half each, but for what was taken already.
    assert kept.sum() == 200 * 16 and abs(float(kept[1] / kept.sum()) - 0.495) < 0.03


def test_held_out_inputs_are_in_a_sample_of_their_own():
    x, held = torch.randn(50, 3), 100 * torch.randn(600, 3)
    stat, plain = Stat(3, capacity=32, want_gram=True), Stat(3, capacity=32, want_gram=True)
    plain.update(x)
    assert torch.equal(plain.held_rows, plain.rows), "where none was held out the ordinary sample stands in"
    stat.update(held[:300], held_out=True)
    stat.update(x)
    stat.update(held[300:], held_out=True)
    for read in (Stat.gram, Stat.center, Stat.mean, Stat.amax, lambda s: s.low, lambda s: s.rows):
        assert torch.equal(read(stat), read(plain))
    assert stat.count == plain.count
    found = {tuple(r) for r in held.tolist()}
    assert len(stat.held_rows) == 32 and all(tuple(r) in found for r in stat.held_rows.tolist())
    with pytest.raises(DQError, match="holds 1 NaN"):
        stat.update(torch.tensor([[1.0, float("nan"), 2.0]]), held_out=True)


def test_rows_are_drawn_by_weight():
    """One of two rows is kept with probability w / (w + 1): Efraimidis and Spirakis, exact for a sample of one."""
    for weight in (0.25, 1.0, 4.0):
        hits = 0
        for seed in range(2000):
            stat = Stat(1, capacity=1, seed=seed)
            stat.update(torch.zeros(1, 1))
            stat.update(torch.ones(1, 1), weight=weight)
            hits += int(stat.rows[0, 0])
        share = weight / (weight + 1)
        assert abs(hits / 2000 - share) < 4 * (share * (1 - share) / 2000) ** 0.5, (weight, hits)


def test_weights_within_a_larger_sample():
    """60 rows of weight 1 and 60 of weight 5, 12 kept: against numpy's draws without replacement by weight."""
    import numpy as np

    weights, rng = np.repeat([1.0, 5.0], 60), np.random.default_rng(0)
    expected = np.mean([(rng.choice(120, 12, False, weights / weights.sum()) >= 60).sum() for _ in range(3000)])
    found = []
    for seed in range(600):
        stat = Stat(1, capacity=12, seed=seed)
        for start in range(0, 60, 13):  # in pieces, as records come
            for value, weight in ((0.0, 1.0), (1.0, 5.0)):
                stat.update(torch.full((min(13, 60 - start), 1), value), weight=weight)
        found.append(float(stat.rows.sum()))
    assert len(stat.rows) == 12 and abs(np.mean(found) - expected) < 0.2, (np.mean(found), expected)


def test_weight_zero_counts_for_nothing():
    stat = Stat(2, capacity=8, want_gram=True)
    stat.update(torch.ones(100, 2), weight=0.0)
    stat.update(2 * torch.ones(8, 2))
    assert (stat.rows == 2).all() and torch.equal(stat.gram(), torch.full((2, 2), 4.0))


QUICK = {"duquant": {"steps": 4}, "awq": {"rows": 16}, "shift": {"value": 0.171875}}


@pytest.mark.parametrize(
    "names",
    [[t] for t in TRANSFORMS.names()]
    + [["shift", "smooth", "permute"], ["outliers", "shift", "smooth"], ["smooth", "arc", "rotate", "lowrank"]],
    ids="+".join,
)
@pytest.mark.parametrize("kind", ["int4/group16", "nvfp4"])
def test_moments_move_with_the_input(names, kind):
    """`GroupState.hessian` and `.mean` from E[x x^T] and E[x] are those of the transformed inputs, token by token."""
    g = torch.Generator().manual_seed(1)
    weights = {m: torch.randn(16, 64, generator=g, dtype=torch.float64) for m in ("q", "k")}
    stat, x = Stat(64, want_gram=True), []
    for weight in (1.0, 2.0, 0.25):
        x.append((torch.randn(60, 64, generator=g) * torch.linspace(0.1, 3, 64) + 0.3, weight))
        stat.update(x[-1][0], weight=weight)
    spec, act = QuantSpec.parse(kind), QuantSpec.parse("nvfp4-token" if kind == "nvfp4" else kind)
    state = GroupState(weights, (("q", "k"),), spec, act, {"q": stat}, k_parts=(64,), rank=8)
    for name in names:
        TRANSFORMS.get(name).fit(state, **QUICK.get(name, {}))
    moved = [(apply_steps(rows.double(), state.steps), weight) for rows, weight in x]
    mass = sum(weight * len(rows) for rows, weight in moved)
    hessian = sum(weight * rows.T @ rows for rows, weight in moved) / mass
    mean = sum(weight * rows.sum(0) for rows, weight in moved) / mass
    assert state.hessian("k") is not None and state.hessian("q").dtype == torch.float64
    torch.testing.assert_close(state.hessian("k"), hessian, rtol=1e-4, atol=1e-5 * float(hessian.abs().max()))
    torch.testing.assert_close(state.mean("k"), mean, rtol=1e-4, atol=1e-5 * float(mean.abs().max()))


def test_no_hessian_without_a_gram():
    stat = Stat(8)
    stat.update(torch.randn(20, 8))
    spec = QuantSpec.parse("int4/channel")
    for stats in ({}, {"a": stat}):
        state = GroupState({"a": torch.randn(4, 8)}, (("a",),), spec, stats=stats)
        assert state.hessian("a") is None
    assert GroupState({"a": torch.randn(4, 8)}, (("a",),), spec).mean("a") is None
