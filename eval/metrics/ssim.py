"""Structural similarity (torchmetrics)."""

from __future__ import annotations

import importlib.util

import torch

from dq.eval.metrics import METRICS, Metric
from dq.registry import DQError

WINDOW = 11


class SSIM(Metric):
    """SSIM of Wang et al. 2004: 11 x 11 Gaussian window, sigma 1.5, K = (.01, .03), range 1.0, RGB channels averaged.

    Native resolution, through `torchmetrics.functional.image.structural_similarity_index_measure`.
    Raises DQError for images smaller than the window.
    """

    name = "ssim"
    higher_is_better = True
    digits = 4

    def available(self) -> str | None:
        if importlib.util.find_spec("torchmetrics") is None:
            return "torchmetrics is not installed (pip install dq-quant[eval])"
        return None

    def compute(self, reference: torch.Tensor, candidate: torch.Tensor) -> torch.Tensor:
        from torchmetrics.functional.image import structural_similarity_index_measure

        if min(reference.shape[-2:]) < WINDOW:
            raise DQError(f"ssim needs images of at least {WINDOW} px, got {tuple(reference.shape[-2:])}")
        value = structural_similarity_index_measure(candidate, reference, data_range=1.0, reduction="none")
        return value.reshape(reference.shape[0])


METRICS.register(SSIM())
