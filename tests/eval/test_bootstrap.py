"""Bootstrap intervals: seeded, of the right width, honest about few values."""

import numpy as np
import pytest

from dq.eval.bootstrap import mean_interval, statistic_interval
from dq.registry import DQError


def test_seeded_and_around_the_mean():
    values = np.random.default_rng(0).normal(size=200)
    low, high = mean_interval(values, seed=3)
    assert (low, high) == mean_interval(values, seed=3) != mean_interval(values, seed=4)
    assert low < values.mean() < high
    assert high - low == pytest.approx(2 * 1.96 * values.std() / 200**0.5, rel=0.1)


def test_coverage():
    rng = np.random.default_rng(1)
    hits = 0
    for _ in range(300):
        low, high = mean_interval(rng.exponential(size=40), resamples=400)
        hits += low <= 1.0 <= high
    assert 0.88 <= hits / 300 <= 0.98


def test_slabs_do_not_change_the_count_or_the_seeded_draws():
    values = np.random.default_rng(2).normal(size=5000)  # needs several slabs
    low, high = mean_interval(values, resamples=1000)
    assert high - low == pytest.approx(2 * 1.96 * values.std() / 5000**0.5, rel=0.15)


def test_edges():
    assert mean_interval([1.0]) is None
    assert mean_interval([2.0, 2.0, 2.0]) == (2.0, 2.0)
    with pytest.raises(DQError, match="finite"):
        mean_interval([1.0, float("nan")])
    with pytest.raises(DQError, match="confidence"):
        mean_interval([1.0, 2.0], confidence=1.5)


def test_statistic_interval_draws_indices():
    values = np.arange(100.0)
    low, high = statistic_interval(lambda i: float(values[i].mean()), 100, resamples=200)
    assert low < 49.5 < high
    assert statistic_interval(lambda i: 0.0, 2) is None
