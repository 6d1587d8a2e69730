"""Rows of `dq bench llm` beyond one run: what each was measured under, which file holds them, how long one may take."""

from __future__ import annotations

import hashlib
import importlib.metadata
import json
import os
import signal
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from dq.registry import DQError

EDGE = 2**20  # bytes at either end of a file that stand for it: a model may hold many GB


class OverTime(BaseException):
    """A row reached its limit. No `Exception`: what a library catches of its own must not swallow it."""


@contextmanager
def limited(seconds: float | None) -> Iterator[None]:
    """Raises `OverTime` inside the body once it has run that long; None: never.

    Raises:
        DQError: there are no interval timers here (Windows), or this is not the main thread.
    """
    if seconds is None:
        yield
        return
    if not hasattr(signal, "setitimer") or threading.current_thread() is not threading.main_thread():
        raise DQError("--row-limit needs interval timers of the main thread, which are not there: leave it out")

    def stop(*_: Any) -> None:
        raise OverTime

    before = signal.signal(signal.SIGALRM, stop)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def fingerprint(path: str | Path | None) -> Any:
    """What tells a file from another one wherever it lies: its size and the hash of its first and last MiB; of a folder
    that of every file, by name; of what is neither, the name."""
    if path is None or not Path(path).exists():
        return path if path is None else str(path)
    path = Path(path)
    if path.is_dir():
        return {p.relative_to(path).as_posix(): fingerprint(p) for p in sorted(path.rglob("*")) if p.is_file()}
    size = path.stat().st_size
    with path.open("rb") as file:
        edges = file.read(EDGE)
        file.seek(max(len(edges), size - EDGE))
        edges += file.read()
    return [size, hashlib.sha256(edges).hexdigest()]


def key(shared: Mapping[str, Any], recipe: Any, package: str | None = None) -> str:
    """Two short hashes of all that a row's scores depend on: of what the table's rows share, and of the row's own.

    Args:
        shared: JSON-clean: protocol, fingerprints, versions, device.
        recipe: what the row does, JSON-clean.
        package: module of another library that does it; its version counts.
    """
    return f"{_hash(shared)}-{_hash([recipe, {} if package is None else _versions(package)])}"


def _hash(value: Any) -> str:
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()[:16]


def _versions(module: str) -> dict[str, str]:
    """Of the distributions that bring a module; none if it is not installed."""
    names = importlib.metadata.packages_distributions().get(module.partition(".")[0], [])
    return {name: importlib.metadata.version(name) for name in sorted(set(names))}


def kept(path: str | Path, keys: Mapping[str, str]) -> tuple[list[dict[str, Any]], list[str]]:
    """Of a table's file: rows that need not be measured again, and names of those that do since their key changed.
    What failed is tried again, a row of the same table that is not asked for stays; no file holds nothing.

    Args:
        keys: name -> key of every row that is wanted.

    Raises:
        DQError: the file holds no such table.
    """
    if not Path(path).is_file():
        return [], []
    shared = {k.partition("-")[0] for k in keys.values()}
    same, changed = [], []
    try:
        for row in json.loads(Path(path).read_text(encoding="utf-8"))["rows"]:
            name, its = row["recipe"], row.get("key") or "-"
            if its == keys.get(name) or (name not in keys and its.partition("-")[0] in shared):
                same += [] if row.get("failed") else [row]
            elif name in keys:
                changed.append(name)
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise DQError(f"{path} holds no table to resume ({error}); take another file, or leave out --resume") from error
    return same, changed


def write(path: str | Path, table: Mapping[str, Any]) -> None:
    """Writes a table, whole or not at all: a stop at any time leaves a file that can be read."""
    part = Path(f"{path}.part")
    part.write_text(json.dumps(table, indent=1) + "\n", encoding="utf-8")
    os.replace(part, path)


def first(names: Sequence[str], wanted: Sequence[str]) -> list[str]:
    """All names, those of `wanted` in its order before the others: what a stopped run should have."""
    return [*(n for n in wanted if n in names), *(n for n in names if n not in wanted)]
