"""Frechet Inception distance, only with Inception weights that are already on disk."""

from __future__ import annotations

import importlib.util
import os

import torch

from dq.eval import hub_files
from dq.eval.frechet import FrechetMetric
from dq.eval.metrics import METRICS
from dq.registry import DQError

VARIABLE = "DQ_FID_WEIGHTS"
PATTERN = "weights-inception-2015-12-05-*.pth"
CHUNK = 32


class FID(FrechetMetric):
    """FID (Heusel et al. 2017) on the 2048 pooled features of TensorFlow's Inception v3.

    Network and preprocessing are those of `torchmetrics.image.fid.FrechetInceptionDistance`: 8-bit images, antialiased
    bilinear resize to 299 x 299. The distance is dq's closed form (torchmetrics takes eigenvalues of a 2048 x 2048
    product, minutes on a CPU; the two agree).

    Args:
        weights: path of torch-fidelity's Inception weights. Default: $DQ_FID_WEIGHTS, then the torch hub cache.
    """

    name = "fid"
    dimension = 2048

    def __init__(self, weights: str | os.PathLike | None = None):
        self.weights = weights
        self._nets: dict[tuple[str, str], torch.nn.Module] = {}

    def available(self) -> str | None:
        for package in ("torchmetrics", "torch_fidelity"):
            if importlib.util.find_spec(package) is None:
                return f"{package} is not installed (pip install dq-quant[eval])"
        return hub_files.find(self.weights, VARIABLE, PATTERN)[1] or None

    @torch.no_grad()
    def features(self, images: torch.Tensor) -> torch.Tensor:
        net = self._net(images.device)
        images = (images * 255.0).round().to(torch.uint8)
        return torch.cat([net(images[i : i + CHUNK]).double() for i in range(0, len(images), CHUNK)])

    def _net(self, device: torch.device) -> torch.nn.Module:
        path, reason = hub_files.find(self.weights, VARIABLE, PATTERN)
        if path is None:
            raise DQError(f"fid cannot run: {reason}")
        key = (str(path), str(device))
        if key not in self._nets:
            self._nets[key] = _build(str(path)).to(device)
        return self._nets[key]


def _build(path: str) -> torch.nn.Module:
    from torchmetrics.image.fid import FrechetInceptionDistance

    try:
        torch.load(path, map_location="cpu", weights_only=True)  # torch-fidelity unpickles the file without this check
        metric = FrechetInceptionDistance(feature=2048, feature_extractor_weights_path=path)
    except Exception as error:
        raise DQError(f"{path} does not hold torch-fidelity's Inception weights: {error}") from error
    return metric.inception.requires_grad_(False)


METRICS.register(FID())
