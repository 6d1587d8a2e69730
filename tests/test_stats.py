"""`Stat`: streaming equals one shot, merging equals union, the sample is uniform, memory is constant."""

import pytest
import torch

from dq.registry import DQError
from dq.stats import Stat


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
