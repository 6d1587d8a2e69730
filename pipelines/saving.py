"""Saves what a long command made, elsewhere if the folder that was asked for cannot be written."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from torch import nn

from dq import checks
from dq.pipelines.calibration import DENOISERS
from dq.pipelines.loading import copy_companions, is_pipeline
from dq.registry import DQError


def check_place(obj: Any, out: str | Path, nbytes: int, components: Sequence[str] | None = None) -> None:
    """What can be known of the place before the work begins, once it is known what will be saved there.

    Args:
        nbytes: of the models that are quantized, the `components` of a pipeline (default: its denoisers); those of its
            other models are added.

    Raises:
        DQError: too little room, a sub-folder that cannot be written, or a pipeline where a model is to be saved.
    """
    folder = Path(out)
    if not is_pipeline(obj) and (folder / "model_index.json").is_file():
        raise DQError(f"cannot write {out}: it holds a pipeline, and a model is to be saved: give another folder")
    parts = {n: c for n, c in obj.components.items() if hasattr(c, "save_pretrained")} if is_pipeline(obj) else {}
    for name in parts:
        checks.output_folder(folder / name)
    others = [m for n, m in parts.items() if isinstance(m, nn.Module) and n not in (components or DENOISERS)]
    checks.output_folder(folder, nbytes + sum(map(nbytes_of, others)))


def nbytes_of(model: nn.Module) -> int:
    """Bytes of a model's parameters and buffers, about those of its files."""
    return sum(t.nbytes for t in (*model.parameters(), *model.buffers()))


def save(obj: Any, out: str | Path, sources: Sequence[str]) -> list[str]:
    """Saves a model or pipeline; a model with the tokenizer of the first of the sources that has one.

    Returns:
        the names of the tokenizer's files.

    Raises:
        DQError: `out` cannot be written. It says where the result lies instead: beside `out`, or in the directory for
            temporary files, whichever can be written; a part of it that was written to `out` is taken away if `out` was
            not there before.
    """
    out = Path(out)
    there = out.exists()
    try:
        return _save(obj, out, sources)
    except Exception as error:  # libraries have many of them for a full disk
        said = [f"cannot save to {out}: {checks.line(error)}"]
    if not there:
        shutil.rmtree(out, ignore_errors=True)  # and make its room free
    for parent in (out.resolve().parent, None):
        place = None
        try:
            place = Path(tempfile.mkdtemp(prefix=f"{out.resolve().name}-", dir=parent))
            _save(obj, place, sources)
        except Exception as error:
            said.append(f"nor to {place or parent or 'a temporary folder'}: {checks.line(error)}")
            if place is not None:
                shutil.rmtree(place, ignore_errors=True)
            continue
        raise DQError(f"{said[0]}; the result is in {place}: move it from there")
    raise DQError(f"{'; '.join(said)}; the result is lost (--resume FOLDER keeps finished blocks)")


def _save(obj: Any, out: Path, sources: Sequence[str]) -> list[str]:
    obj.save_pretrained(out)
    if not any((out / name).is_file() for name in ("config.json", "model_index.json")):
        raise DQError("nothing was written")  # transformers only logs that it is given a file
    if is_pipeline(obj):
        return []
    return next((found for source in sources if (found := copy_companions(source, out))), [])
