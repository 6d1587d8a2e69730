"""Percentile bootstrap intervals (Efron 1979), seeded."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from dq.registry import DQError

Interval = tuple[float, float]


def mean_interval(
    values: Sequence[float] | np.ndarray, *, confidence: float = 0.95, resamples: int = 1000, seed: int = 0
) -> Interval | None:
    """Return (low, high), the percentile interval of the mean of `values` [N]; None for N < 2.

    Resamples N of N with replacement. Raises DQError if a value is not finite.
    """
    values = np.asarray(values, dtype=np.float64)
    if not np.isfinite(values).all():
        raise DQError("a bootstrap interval needs finite values")
    if values.size < 2:
        return None
    rng = np.random.default_rng(seed)
    rows = max(1, 2**20 // values.size)  # resample in slabs: 5,000 images x 1,000 resamples stay small
    means = [
        values[rng.integers(values.size, size=(min(rows, resamples - i), values.size))].mean(1)
        for i in range(0, resamples, rows)
    ]
    return _percentiles(np.concatenate(means), confidence)


def statistic_interval(
    statistic: Callable[[np.ndarray], float], n: int, *, confidence: float = 0.95, resamples: int = 100, seed: int = 0
) -> Interval | None:
    """Return the percentile interval of `statistic(indices)` over resampled indices [n]; None for n < 3.

    For set metrics: the same indices are drawn in both sets, since image i of both comes from one prompt and seed.
    """
    if n < 3:
        return None
    rng = np.random.default_rng(seed)
    return _percentiles(np.array([statistic(rng.integers(n, size=n)) for _ in range(resamples)]), confidence)


def ratio_interval(a: Sequence[float], b: Sequence[float], *, resamples: int = 1000, seed: int = 0) -> Interval | None:
    """Return the percentile interval of mean(a) / mean(b) over pairs drawn together; None for fewer than 3 pairs."""
    a, b = np.asarray(a, dtype=np.float64), np.asarray(b, dtype=np.float64)
    return statistic_interval(
        lambda i: float(a[i].mean() / max(b[i].mean(), 1e-30)), len(a), resamples=resamples, seed=seed
    )


def _percentiles(draws: np.ndarray, confidence: float) -> Interval:
    if not 0.0 < confidence < 1.0:
        raise DQError(f"confidence must lie between 0 and 1, got {confidence}")
    tail = 50.0 * (1.0 - confidence)
    low, high = np.percentile(draws, [tail, 100.0 - tail])
    return float(low), float(high)
