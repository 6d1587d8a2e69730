"""Images and prompts of the demo: reads the npz, enlarges to 128 px, makes several prompts per picture."""

from __future__ import annotations

import random
from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F

VARIANTS = 8  # prompts per picture
SKIN_WEIGHT = 0.35  # half of the pictures are skin tone variants of the others: draw them less often


@dataclass
class Data:
    """images uint8 [N, H, W, 3]; texts: N lists of VARIANTS prompts; weights float [N], the chance of each picture."""

    images: np.ndarray
    texts: list[list[str]]
    weights: np.ndarray
    captions: list[str]
    categories: list[str]


def prompt_variants(caption: str, tags: str, category: str, rng: random.Random) -> list[str]:
    """Eight prompts for one picture: the plain caption four times (once capitalised), with some tags, as "a ... emoji",
    and with its category, so that neither text encoder can rely on one phrasing."""
    words = [w.strip() for w in tags.split(",") if w.strip()]
    some = [", ".join([caption] + rng.sample(words, min(len(words), rng.randint(1, 3)))) for _ in range(2)]
    return [caption] * 3 + [
        caption[:1].upper() + caption[1:],
        *some,
        f"a {caption} emoji",
        f"{caption}, {category.lower()}",
    ]


def load_data(path: str, seed: int = 0) -> Data:
    """Reads the npz (keys images, caption, tags, category, skin_variant)."""
    z = np.load(path)
    rng = random.Random(seed)
    rows = zip(z["caption"].tolist(), z["tags"].tolist(), z["category"].tolist(), strict=True)
    texts = [prompt_variants(c, t, k, rng) for c, t, k in rows]
    weights = np.where(z["skin_variant"] > 0, SKIN_WEIGHT, 1.0)
    return Data(z["images"], texts, weights / weights.sum(), z["caption"].tolist(), z["category"].tolist())


def images_to_tensor(images: np.ndarray, size: int, device="cpu") -> torch.Tensor:
    """uint8 [N, h, w, 3] -> float [N, 3, size, size] in [-1, 1], bicubic."""
    out = []
    for chunk in torch.from_numpy(images).split(512):
        x = chunk.to(device).permute(0, 3, 1, 2).float() / 127.5 - 1
        out.append(F.interpolate(x, size=(size, size), mode="bicubic", antialias=True).clamp(-1, 1))
    return torch.cat(out)
