"""The shift-tolerant AlexNet of ST-LPIPS (Ghildyal and Liu, ECCV 2022), rebuilt from its published weights.

The weights (10 MB) come in the PyPI package `stlpips-pytorch`. Only that file is read: the package's own code needs
further packages just to import. Structure, per slice (blur = reflect-pad 2, binomial 3x3, stride 2):

    1: conv 11x11 stride 1 pad 2 -> blur -> ReLU                 64 channels
    2: max 3x3 stride 1 -> blur -> conv 5x5 pad 2 -> ReLU       192
    3: max 3x3 stride 1 -> blur -> conv 3x3 pad 1 -> ReLU       384
    4: conv 3x3 pad 1 -> ReLU                                   256
    5: conv 3x3 pad 1 -> ReLU                                   256
"""

from __future__ import annotations

import functools
import importlib.util
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import nn

from dq.registry import DQError

PACKAGE = "stlpips_pytorch"
MIN_SIZE = 24  # below, a feature map is smaller than the blur's padding
CHANNELS = (64, 192, 384, 256, 256)
# (state-dict name, padding) of the five convolutions, in order
_CONVS = (("slice1.0", 2), ("slice2.5", 2), ("slice3.9", 1), ("slice4.11", 1), ("slice5.13", 1))


def weights_path() -> Path | None:
    """Return the AlexNet weight file of the installed `stlpips-pytorch`, or None; the package is not imported."""
    spec = importlib.util.find_spec(PACKAGE)
    for folder in (spec.submodule_search_locations or []) if spec else []:
        path = Path(folder) / "weights" / "vST0.0" / "alex_shift_tolerant.pth"
        if path.is_file():
            return path
    return None


def missing() -> str | None:
    """Return None if the weights are at hand, else one line that says what to install."""
    if weights_path() is None:
        return "the AlexNet weights of stlpips-pytorch were not found (pip install dq-quant[eval])"
    return None


class ShiftTolerantAlexNet(nn.Module):
    """Five feature maps of an image batch [N, 3, H, W] in [0, 1], and the ST-LPIPS heads.

    Args:
        state: state dict of `alex_shift_tolerant.pth`. Raises DQError if it is not that architecture.
    """

    def __init__(self, state: dict[str, torch.Tensor]):
        super().__init__()
        try:
            self._load(state)
        except (KeyError, RuntimeError) as error:
            raise DQError(f"not the shift-tolerant AlexNet of stlpips-pytorch: {error}") from error
        self.eval().requires_grad_(False)

    def _load(self, state: dict[str, torch.Tensor]) -> None:
        self.register_buffer("shift", state["scaling_layer.shift"])
        self.register_buffer("scale", state["scaling_layer.scale"])
        self.register_buffer("kernel", state["net.slice1.1.filt"][:1])
        self.paddings = [padding for _, padding in _CONVS]
        for i, (name, _) in enumerate(_CONVS):
            weight = state[f"net.{name}.weight"]
            if weight.shape[0] != CHANNELS[i]:
                raise KeyError(f"net.{name}.weight has shape {tuple(weight.shape)}")
            self.register_buffer(f"weight{i}", weight)
            self.register_buffer(f"bias{i}", state[f"net.{name}.bias"])
            self.register_buffer(f"head{i}", state[f"lin{i}.model.1.weight"].reshape(1, -1, 1, 1))

    def _conv(self, x: torch.Tensor, i: int) -> torch.Tensor:
        return F.conv2d(x, getattr(self, f"weight{i}"), getattr(self, f"bias{i}"), padding=self.paddings[i])

    def _blur(self, x: torch.Tensor) -> torch.Tensor:
        channels = x.shape[1]
        kernel = self.kernel.expand(channels, 1, -1, -1)
        return F.conv2d(F.pad(x, (2, 2, 2, 2), mode="reflect"), kernel, stride=2, groups=channels)

    def forward(self, images: torch.Tensor) -> list[torch.Tensor]:
        """Return the five maps [N, C_i, H_i, W_i]; the images are scaled to [-1, 1] and normalised per channel.

        Raises DQError for images below 24 px.
        """
        if min(images.shape[-2:]) < MIN_SIZE:
            raise DQError(f"the AlexNet metrics need images of at least {MIN_SIZE} px, got {tuple(images.shape[-2:])}")
        x = (2.0 * images - 1.0 - self.shift) / self.scale
        x = F.relu(self._blur(self._conv(x, 0)))
        maps = [x]
        for i in (1, 2):
            x = F.relu(self._conv(self._blur(F.max_pool2d(x, 3, stride=1)), i))
            maps.append(x)
        for i in (3, 4):
            x = F.relu(self._conv(x, i))
            maps.append(x)
        return maps


@functools.lru_cache(maxsize=4)
def _load(path: str, device: str) -> ShiftTolerantAlexNet:
    # the file was saved from a GPU, hence map_location; weights_only because it is third-party data
    state = torch.load(path, map_location="cpu", weights_only=True)
    return ShiftTolerantAlexNet(state).to(device)


def load(device: torch.device | str = "cpu") -> ShiftTolerantAlexNet:
    """Return the network with the installed weights (kept in memory). Raises DQError if they are missing."""
    path = weights_path()
    if path is None:
        raise DQError(str(missing()))
    return _load(str(path), str(device))


def chunks(images: torch.Tensor, megabytes: int = 256) -> list[slice]:
    """Split [N, 3, H, W] so that the first feature map (64 x H x W float32 at stride 1) stays within `megabytes`."""
    size = max(1, megabytes * 2**20 // (CHANNELS[0] * images.shape[-2] * images.shape[-1] * 4))
    return [slice(i, i + size) for i in range(0, images.shape[0], size)]
