"""Saves what a long command made, elsewhere if the folder that was asked for cannot be written."""

from __future__ import annotations

import re
import shutil
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from torch import nn

from dq import checks
from dq.pipelines.calibration import DENOISERS
from dq.pipelines.loading import copy_companions, is_pipeline
from dq.registry import DQError

_WEIGHTS = re.compile(r"(.+?)(?:-\d{5}-of-\d{5})?\.safetensors(?:\.index\.json)?")


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

    What `out` held is replaced once all is written, or stays as it was. An interruption leaves no part behind.

    Returns:
        the names of the tokenizer's files.

    Raises:
        DQError: `out` cannot be written. It says where the result lies instead: beside `out`, or in the directory for
            temporary files, whichever can be written. Or the tokenizer alone could not be copied.
    """
    out = Path(out)
    try:
        _save_whole(obj, out)
    except Exception as error:  # libraries have many of them for a full disk
        said = [f"cannot save to {out}: {checks.line(error)}"]
    else:
        return _companions(obj, out, sources)
    for parent in (out.resolve().parent, None):
        place = None
        try:
            place = Path(tempfile.mkdtemp(prefix=f"{out.resolve().name}-", dir=parent))
            with _or_nothing(place):
                _save(obj, place)
        except Exception as error:
            said.append(f"nor to {place or parent or 'a temporary folder'}: {checks.line(error)}")
            continue
        where = f"{said[0]}; the result is in {place}: move it from there"
        try:
            _companions(obj, place, sources)
        except DQError as error:
            where += f" ({error})"
        raise DQError(where)
    raise DQError(f"{'; '.join(said)}; the result is lost (--resume FOLDER keeps finished blocks)")


def _save_whole(obj: Any, out: Path) -> None:
    """Into a folder that is new, or under another name first: writing over a checkpoint would leave parts of both."""
    if not out.exists():
        with _or_nothing(out):
            _save(obj, out)
    else:
        place = Path(tempfile.mkdtemp(prefix=".saving-", dir=out))  # within: the folder may be a disk of its own
        with _or_nothing(place):
            _save(obj, place)
            new = sorted(f.relative_to(place) for f in place.rglob("*") if f.is_file())
            for name in new:
                if (out / name).is_dir():
                    raise DQError(f"{out / name} is a folder, and a file is to be written")
                (out / name).parent.mkdir(parents=True, exist_ok=True)
        _move(place, out, new)


@contextmanager
def _or_nothing(folder: Path) -> Iterator[None]:
    """Takes the folder away, and makes its room free, if what fills it fails or is interrupted."""
    try:
        yield
    except BaseException:
        shutil.rmtree(folder, ignore_errors=True)
        raise


def _move(place: Path, out: Path, names: Sequence[Path]) -> None:
    """Moves files from `place`, a folder in `out`, to their places; takes away other weights of the same models."""
    for name in names:
        (place / name).replace(out / name)
    shutil.rmtree(place, ignore_errors=True)
    weights = {(n.parent, found[1]) for n in names if (found := _WEIGHTS.fullmatch(n.name))}
    for folder in {parent for parent, _ in weights}:
        for file in (out / folder).iterdir():
            found = _WEIGHTS.fullmatch(file.name)
            if found and (folder, found[1]) in weights and folder / file.name not in names:
                file.unlink()  # a part of the model that was here


def _save(obj: Any, out: Path) -> None:
    obj.save_pretrained(out)
    if not any((out / name).is_file() for name in ("config.json", "model_index.json")):
        raise DQError("nothing was written")  # transformers only logs that it is given a file


def _companions(obj: Any, out: Path, sources: Sequence[str]) -> list[str]:
    """Copies a tokenizer to a model; without it the model is whole all the same."""
    if is_pipeline(obj):
        return []
    try:
        return next((found for source in sources if (found := copy_companions(source, out))), [])
    except Exception as error:
        raise DQError(f"the model is saved in {out}, but its tokenizer is not: {checks.line(error)}") from error
