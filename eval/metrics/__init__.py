"""Image metrics: one file each, found by folder.

A metric is a small object with a `name`, a `kind` and a `compute`. To add one, write a file here that ends in
`METRICS.register(MyMetric())`; nothing else changes.
"""

from __future__ import annotations

import torch

from dq.registry import Registry


class Metric:
    """One number per image pair (`kind = "paired"`) or per pair of image sets (`kind = "set"`).

    Images are float tensors [N, 3, H, W] in [0, 1]. Preprocessing is part of what a metric is, so every subclass
    states its own in its docstring: numbers are comparable only where it is the same.
    """

    name = ""
    kind = "paired"
    higher_is_better = False
    digits: int | None = None  # decimals shown; None for three significant digits

    def available(self) -> str | None:
        """Return None if the metric can run here, else one line that says why not. Never downloads anything."""
        return None

    def compute(self, reference: torch.Tensor, candidate: torch.Tensor) -> torch.Tensor:
        """Return one value per image, shape [N] ("paired"), or one scalar ("set")."""
        raise NotImplementedError

    def note(self, n: int) -> str | None:
        """Return one line about the value's limits at `n` images, or None."""
        return None


METRICS = Registry("metric", "dq.eval.metrics")
