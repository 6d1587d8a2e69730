"""Frechet distance between two sets of features, in closed form and cheap for few samples."""

from __future__ import annotations

import torch

from dq.eval.metrics import Metric
from dq.registry import DQError


def frechet_distance(x: torch.Tensor, y: torch.Tensor) -> float:
    """Return the squared Frechet distance of the Gaussians fitted to x [N, D] and y [M, D].

    ||mu_x - mu_y||^2 + tr(S_x + S_y - 2 (S_x S_y)^(1/2)), S with N - 1 in the denominator (Heusel et al. 2017, eq. 6).
    With S_x = A'A and S_y = B'B the last trace is the nuclear norm of A B', so no D x D square root is needed and the
    value is exact also for N < D. float64. Raises DQError for fewer than 2 samples.
    """
    if min(len(x), len(y)) < 2:
        raise DQError(f"a Frechet distance needs at least 2 images per set, got {len(x)} and {len(y)}")
    a, b = _factor(x), _factor(y)
    mean = (x.double().mean(0) - y.double().mean(0)).square().sum()
    cross = torch.linalg.svdvals(a @ b.T).sum()
    spread = a.square().sum() + b.square().sum()
    value = float(mean + spread - 2.0 * cross)
    return value if value > 1e-12 * float(spread) else 0.0  # identical sets leave only rounding


def _factor(x: torch.Tensor) -> torch.Tensor:
    """Return A [min(N, D), D] with A'A = covariance of x [N, D]."""
    a = (x.double() - x.double().mean(0)) / (len(x) - 1) ** 0.5
    return torch.linalg.qr(a, mode="r").R if a.shape[0] > a.shape[1] else a


class FrechetMetric(Metric):
    """Base of the set metrics: subclasses give `features` [N, D] and `dimension` D.

    Below N = D the covariances are singular and the value is biased upwards, so it is flagged; below N = 2 refused.
    """

    kind = "set"
    dimension = 0

    def features(self, images: torch.Tensor) -> torch.Tensor:
        """Return features [N, D] of images [N, 3, H, W] in [0, 1]."""
        raise NotImplementedError

    def distance(self, x: torch.Tensor, y: torch.Tensor) -> float:
        """Return the distance of two feature sets [N, D]."""
        return frechet_distance(x, y)

    def compute(self, reference: torch.Tensor, candidate: torch.Tensor) -> torch.Tensor:
        if min(len(reference), len(candidate)) < 2:
            raise DQError(f"{self.name} compares two sets of images and needs at least 2 in each")
        return torch.tensor(self.distance(self.features(reference), self.features(candidate)))

    def note(self, n: int) -> str | None:
        if n < self.dimension:
            return f"N = {n} is below the feature dimension {self.dimension}: biased, compare only at the same N"
        return None
