"""Checks of what a caller hands in: each gives the value back, or raises one line that says what to do."""

from __future__ import annotations

import math
import operator
import shutil
import tempfile
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from dq.registry import DQError

SEED_LIMIT = 2**63  # torch takes 64 bits; prompt i adds i


def whole(value: Any, name: str, low: int = 1, high: int | None = None) -> int:
    """`value` as an int between `low` and `high` (inclusive).

    Raises:
        DQError: text, a fraction, a bool, or a number outside.
    """
    try:
        number = None if isinstance(value, bool) else operator.index(value)
    except TypeError:
        number = None
    if number is None:
        raise DQError(f"{name} must be a whole number, got {_shown(value)}")
    if number < low or (high is not None and number > high):
        raise DQError(f"{name} must be at least {low}{'' if high is None else f' and at most {high}'}, got {number}")
    return number


def seed(value: Any, name: str = "seed") -> int:
    """A seed that still fits into 64 bits after the index of a prompt was added."""
    return whole(value, name, 0, SEED_LIMIT - 1)


def finite(value: Any, name: str) -> float:
    """`value` as a float that is neither NaN nor Inf."""
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not math.isfinite(value):
        raise DQError(f"{name} must be a finite number, got {_shown(value)}")
    return float(value)


def texts(value: Any, what: str, empty: str) -> list[str]:
    """One text, or an iterable of texts, as a list.

    Args:
        what: noun of the messages ("calibration prompts").
        empty: message if there are none.
    """
    if isinstance(value, str):
        return [value]
    if not isinstance(value, Iterable) or isinstance(value, (bytes, dict)):
        raise DQError(f"{what} must be a list of texts, got {_shown(value)}")
    found = list(value)
    if not found:
        raise DQError(empty)
    bad = [i for i, text in enumerate(found) if not isinstance(text, str)]
    if bad:
        raise DQError(f"{what} must be texts; number {bad[0]} of the list is {_shown(found[bad[0]])}")
    return found


def device(value: Any) -> torch.device:
    """A torch device that this machine has; None is CUDA if there is one, else the CPU."""
    if value is None:
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        found = torch.device(value)
        torch.empty(0, device=found)
    except (RuntimeError, AssertionError, TypeError, ValueError, NotImplementedError) as error:
        known = "cpu or cuda" if torch.cuda.is_available() else "cpu"
        raise DQError(f"device {_shown(value)} cannot be used here ({line(error, 80)}); use {known}") from error
    return found


def output_file(path: Any, suffixes: Sequence[str]) -> Path:
    """The path of a file that is written later. Checked before the work starts: the suffix, and that it can be made.

    Raises:
        DQError: another suffix, a folder, or a place that cannot be written to.
    """
    found = _path(path)
    if found.suffix.lower() not in suffixes:
        raise DQError(f"cannot save as {found.suffix or str(found)!r}: use {' or '.join(suffixes)}")
    if found.is_dir():
        raise DQError(f"cannot write {found}: it is a folder")
    _writable(found.parent, found)
    return found


def output_folder(path: Any, nbytes: int = 0) -> Path:
    """The path of a folder that is filled later, checked as `output_file` does, and for room for `nbytes`."""
    found = _path(path)
    if found.is_file():
        raise DQError(f"cannot write {found}: it is a file, and a folder is to be written")
    place = _writable(found, found)
    free = shutil.disk_usage(place).free
    if free < nbytes:
        raise DQError(f"cannot write {found}: it takes {nbytes / 1e6:.0f} MB, and {free / 1e6:.0f} MB are free there")
    return found


def _path(path: Any) -> Path:
    try:
        found = Path(path)
    except TypeError:
        raise DQError(f"a path is a text, got {_shown(path)}") from None
    if not str(path).strip():
        raise DQError("the path to write to is empty")
    return found


def _writable(folder: Path, target: Path) -> Path:
    """Tries it, in the nearest folder that exists, and returns that: permission bits say nothing about the superuser or
    odd mounts."""
    while not folder.exists() and folder != folder.parent:
        folder = folder.parent
    try:
        with tempfile.TemporaryFile(dir=folder):
            pass
    except (OSError, ValueError) as error:
        # Without the name of the temporary file, which nobody asked for.
        what = getattr(error, "strerror", None) or line(error, 120)
        raise DQError(f"cannot write {target}: {what} (in {folder})") from error
    return folder


@contextmanager
def one_line(doing: str) -> Iterator[None]:
    """Turns whatever a library raises inside into one DQError, `<doing>: <first line>`; for code that reads files of
    unknown content, where any exception means that the files are not what they should be.

    A DQError passes; it gets `doing` in front.
    """
    try:
        yield
    except DQError as error:
        raise DQError(f"{doing}: {error}") from error
    except Exception as error:
        raise DQError(f"{doing}: {line(error)}") from error


def line(error: BaseException, limit: int = 240) -> str:
    """The first line of an exception's message, short; with the type where the message alone says little."""
    lines = [part.strip() for part in str(error).splitlines() if part.strip()]
    text = lines[0] if lines else ""
    if not text or isinstance(error, (KeyError, AttributeError, TypeError, IndexError)):
        text = f"{type(error).__name__}{': ' * bool(text)}{text}"
    return text if len(text) <= limit else text[: limit - 3] + "..."


def _shown(value: Any) -> str:
    if isinstance(value, (str, int, float)) or value is None:
        return repr(value) if len(repr(value)) < 80 else repr(value)[:77] + "..."
    return type(value).__name__
