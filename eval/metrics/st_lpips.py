"""Shift-tolerant LPIPS."""

from __future__ import annotations

import torch

from dq.eval import shift_tolerant
from dq.eval.metrics import METRICS, Metric


def _unit(x: torch.Tensor) -> torch.Tensor:
    """Scale every position's channel vector to length 1; x [N, C, H, W]."""
    return x / (x.square().sum(1, keepdim=True).sqrt() + 1e-10)


class STLPIPS(Metric):
    """ST-LPIPS (Ghildyal and Liu, ECCV 2022), AlexNet variant, per image.

    d(x, y) = sum_l mean_hw sum_c w_lc (f_lc(x) - f_lc(y))^2 with channel-normalised features f_l of the shift-tolerant
    AlexNet and its learned heads w. Native resolution, [0, 1] scaled to [-1, 1] and normalised per channel.
    Not comparable with LPIPS numbers: other weights, other filters.
    """

    name = "st-lpips"

    def available(self) -> str | None:
        return shift_tolerant.missing()

    @torch.no_grad()
    def compute(self, reference: torch.Tensor, candidate: torch.Tensor) -> torch.Tensor:
        net = shift_tolerant.load(reference.device)
        values = [self._distance(net, reference[s], candidate[s]) for s in shift_tolerant.chunks(reference)]
        return torch.cat(values) if values else reference.new_zeros(0)

    @staticmethod
    def _distance(net: torch.nn.Module, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        total = x.new_zeros(x.shape[0])
        for i, (a, b) in enumerate(zip(net(x), net(y), strict=True)):
            weighted = (_unit(a) - _unit(b)).square() * getattr(net, f"head{i}")
            total = total + weighted.sum(1).mean((1, 2))
        return total


METRICS.register(STLPIPS())
