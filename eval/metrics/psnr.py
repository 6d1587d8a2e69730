"""Peak signal-to-noise ratio."""

from __future__ import annotations

import torch

from dq.eval.metrics import METRICS, Metric

CAP_DB = 100.0


class PSNR(Metric):
    """PSNR = 10 log10(1 / MSE) in dB per image, MSE over all pixels and channels, peak 1.0, native resolution.

    Identical images have no finite PSNR: values are capped at 100 dB (MSE 1e-10, below one 8-bit step in one channel
    of one pixel at 512 px), so that means and intervals stay finite. The mean is over per-image dB values.
    """

    name = "psnr"
    higher_is_better = True
    digits = 2

    def compute(self, reference: torch.Tensor, candidate: torch.Tensor) -> torch.Tensor:
        mse = (reference.double() - candidate.double()).square().flatten(1).mean(1)
        return -10.0 * mse.clamp_min(10.0 ** (-CAP_DB / 10.0)).log10()


METRICS.register(PSNR())
