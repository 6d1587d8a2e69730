"""Weight files that other packages would download: found on disk, or not at all."""

from __future__ import annotations

import os
from pathlib import Path

import torch


def find(given: str | os.PathLike | None, variable: str, pattern: str) -> tuple[Path | None, str]:
    """Look for a weight file and never download it.

    Order: the path `given`, the environment variable, then `pattern` in the torch hub cache (TORCH_HOME is honoured).
    Returns (path, "") or (None, one line that says what to do).
    """
    for source, path in (("the given path", given), (f"${variable}", os.environ.get(variable))):
        if path:
            found = Path(path).expanduser()
            return (found, "") if found.is_file() else (None, f"{source} points to no file: {found}")
    folder = Path(torch.hub.get_dir()) / "checkpoints"
    hits = sorted(folder.glob(pattern))
    if hits:
        return hits[0], ""
    return None, f"weight file {pattern} not found: give its path, set {variable}, or put it into the torch hub cache"
