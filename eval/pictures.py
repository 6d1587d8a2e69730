"""Images for the report: data URIs that stay within a byte budget, and amplified difference maps."""

from __future__ import annotations

import base64
import io

import numpy as np
import torch

BUDGET = 6 * 2**20  # bytes of all images before base64 adds a third
SIDE = 384  # larger images are shown at this size


def difference_gain(differences: list[torch.Tensor]) -> int:
    """Return the power of two in 1..64 by which the largest differences (99.5 % quantile) still fit into [0, 1].

    One gain for all candidates: their maps can be compared with each other.
    """
    peak = max((float(np.percentile(d.numpy(), 99.5)) for d in differences), default=0.0)
    gain = 64
    while gain > 1 and gain * peak > 1.0:
        gain //= 2
    return gain


def difference(image: torch.Tensor, reference: torch.Tensor) -> torch.Tensor:
    """Return |image - reference| of uint8 [3, H, W], mean over the channels, float [H, W] in [0, 1]."""
    return (image.float() - reference.float()).abs().mean(0) / 255.0


class Encoder:
    """Turns images into data URIs: PNG first, JPEG once the lossless ones would leave the budget."""

    def __init__(self, count: int):
        self.share = BUDGET / max(count, 1)
        self.lossy = 0

    def image(self, image: torch.Tensor) -> str:
        """Return the data URI of an image uint8 [3, H, W]."""
        from PIL import Image

        picture = self._fit(Image.fromarray(np.ascontiguousarray(image.movedim(0, -1).numpy())))
        data = _bytes(picture, format="PNG", optimize=True)
        if len(data) <= self.share:
            return _uri("png", data)
        self.lossy += 1
        return _uri("jpeg", _bytes(picture, format="JPEG", quality=90, subsampling=0))

    def heat(self, values: torch.Tensor, gain: int) -> str:
        """Return the data URI of a map float [H, W], times `gain`, on 32 colours from black over red to white."""
        from PIL import Image

        levels = (values * gain).clamp(0, 1).mul(31).round().to(torch.uint8).numpy()
        picture = Image.fromarray(levels)
        picture = self._fit(picture, nearest=True).convert("P")
        picture.putpalette(_palette())
        return _uri("png", _bytes(picture, format="PNG", bits=8, optimize=True))

    @staticmethod
    def _fit(picture, nearest: bool = False):
        from PIL import Image

        scale = SIDE / max(picture.size)
        if scale >= 1:
            return picture
        size = (max(1, round(picture.width * scale)), max(1, round(picture.height * scale)))
        return picture.resize(size, Image.Resampling.BOX if nearest else Image.Resampling.LANCZOS)


def _palette() -> list[int]:
    t = np.linspace(0.0, 1.0, 32)
    channels = [np.interp(t, x, y) for x, y in (((0, 0.45, 1), (0, 1, 1)), ((0.3, 0.8, 1), (0, 0.85, 1)), _BLUE)]
    return (np.stack(channels, axis=1) * 255).round().astype(int).flatten().tolist()


_BLUE = ((0, 0.25, 0.5, 0.75, 1), (0, 0.45, 0.1, 0.2, 1))


def _bytes(picture, **options) -> bytes:
    buffer = io.BytesIO()
    picture.save(buffer, **options)
    return buffer.getvalue()


def _uri(kind: str, data: bytes) -> str:
    return f"data:image/{kind};base64,{base64.b64encode(data).decode('ascii')}"
