"""LPIPS (package `lpips`), only with trunk weights that are already on disk."""

from __future__ import annotations

import importlib.util
import os
import warnings

import torch

from dq.eval import hub_files, shift_tolerant
from dq.eval.metrics import METRICS, Metric
from dq.registry import DQError

VARIABLE = "DQ_LPIPS_TRUNK"
PATTERN = "alexnet-owt-*.pth"


class LPIPS(Metric):
    """LPIPS (Zhang et al. 2018) v0.1, AlexNet, per image; native resolution, [0, 1] scaled to [-1, 1].

    The heads ship with the package; it would download the AlexNet trunk (torchvision's ImageNet weights) itself, which
    dq never lets it do.

    Args:
        trunk_weights: path of torchvision's AlexNet state dict. Default: $DQ_LPIPS_TRUNK, then the torch hub cache.
    """

    name = "lpips"

    def __init__(self, trunk_weights: str | os.PathLike | None = None):
        self.trunk_weights = trunk_weights
        self._nets: dict[tuple[str, str], torch.nn.Module] = {}

    def available(self) -> str | None:
        for package in ("lpips", "torchvision"):
            if importlib.util.find_spec(package) is None:
                return f"{package} is not installed (pip install dq-quant[eval])"
        return hub_files.find(self.trunk_weights, VARIABLE, PATTERN)[1] or None

    @torch.no_grad()
    def compute(self, reference: torch.Tensor, candidate: torch.Tensor) -> torch.Tensor:
        net = self._net(reference.device)
        slices = shift_tolerant.chunks(reference)
        return torch.cat([net(reference[s], candidate[s], normalize=True).reshape(-1) for s in slices])

    def _net(self, device: torch.device) -> torch.nn.Module:
        path, reason = hub_files.find(self.trunk_weights, VARIABLE, PATTERN)
        if path is None:
            raise DQError(f"lpips cannot run: {reason}")
        key = (str(path), str(device))
        if key not in self._nets:
            self._nets[key] = _build(str(path)).to(device)
        return self._nets[key]


def _build(path: str) -> torch.nn.Module:
    import lpips

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # lpips calls torchvision with a deprecated argument
        net = lpips.LPIPS(net="alex", pnet_rand=True, verbose=False)
    state = torch.load(path, map_location="cpu", weights_only=True)
    trunk = {k.removeprefix("features."): v for k, v in state.items() if k.startswith("features.")}
    try:
        with torch.no_grad():
            for name, value in net.net.named_parameters():
                value.copy_(trunk[name.split(".", 1)[1]])  # "slice2.3.weight" is torchvision's "features.3.weight"
    except (KeyError, RuntimeError) as error:
        raise DQError(f"{path} is not torchvision's AlexNet state dict: {error}") from error
    return net.eval().requires_grad_(False)


METRICS.register(LPIPS())
