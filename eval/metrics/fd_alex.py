"""Frechet distance on shift-tolerant AlexNet features: what can be had of FID without a download."""

from __future__ import annotations

import torch

from dq.eval import shift_tolerant
from dq.eval.frechet import FrechetMetric
from dq.eval.metrics import METRICS


class FDAlex(FrechetMetric):
    """Frechet distance of the last feature map (256 channels, mean over positions) of the ST-LPIPS AlexNet.

    Native resolution, [0, 1] scaled to [-1, 1] and normalised per channel. Not comparable with FID: another network
    and another scale.
    """

    name = "fd-alex"
    dimension = shift_tolerant.CHANNELS[-1]

    def available(self) -> str | None:
        return shift_tolerant.missing()

    @torch.no_grad()
    def features(self, images: torch.Tensor) -> torch.Tensor:
        net = shift_tolerant.load(images.device)
        maps = [net(images[s])[-1].mean((2, 3)).double() for s in shift_tolerant.chunks(images)]
        return torch.cat(maps) if maps else images.new_zeros(0, self.dimension).double()


METRICS.register(FDAlex())
