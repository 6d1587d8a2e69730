"""Cached reference images: a folder of PNG files and an index."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from os import PathLike
from pathlib import Path
from typing import Any

import numpy as np
import torch

from dq.eval.generate import as_float
from dq.registry import DQError

INDEX = "index.json"


def save_image(image: torch.Tensor, path: str | PathLike) -> Path:
    """Write one image uint8 [3, H, W] in the format of the suffix; return the path."""
    from PIL import Image

    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.fromarray(image.movedim(0, -1).numpy()).save(path)
    return path


def save_images(images: torch.Tensor, prompts: Sequence[str], folder: str | PathLike) -> Path:
    """Write images uint8 [N, 3, H, W] as 00000.png ... with an index of their prompts; return the folder."""
    from PIL import Image

    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    names = [f"{i:05d}.png" for i in range(len(images))]
    for name, image in zip(names, images, strict=True):
        Image.fromarray(image.movedim(0, -1).numpy()).save(folder / name)
    index = [{"prompt": prompt, "file": name} for prompt, name in zip(prompts, names, strict=True)]
    (folder / INDEX).write_text(json.dumps(index, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
    return folder


def load_images(source: str | PathLike | Mapping[str, Any], prompts: Sequence[str]) -> torch.Tensor:
    """Return uint8 [N, 3, H, W], one image per prompt, from a dict prompt -> image or a folder by `save_images`.

    Raises DQError if the folder has no index or a prompt has no image.
    """
    table = source if isinstance(source, Mapping) else _read(Path(source))
    missing = [p for p in prompts if p not in table]
    if missing:
        raise DQError(f"no cached reference image for {len(missing)} prompts, the first is {missing[0]!r}")
    return torch.cat([_load(table[p]) for p in prompts])


def _read(folder: Path) -> dict[str, Path]:
    if (folder / "model_index.json").is_file():
        raise DQError(f"{folder} is a pipeline: load it with from_pretrained and pass the pipeline as reference")
    if not (folder / INDEX).is_file():
        raise DQError(f"{folder} is no folder of cached images: {INDEX} is missing (write it with save_images)")
    rows = json.loads((folder / INDEX).read_text(encoding="utf-8"))
    return {row["prompt"]: folder / row["file"] for row in rows}


def _load(image: Any) -> torch.Tensor:
    if isinstance(image, Path):
        from PIL import Image

        with Image.open(image) as opened:
            image = torch.as_tensor(np.array(opened.convert("RGB"))).movedim(-1, 0)
    return (as_float([image]).clamp(0, 1) * 255).round().to(torch.uint8)
