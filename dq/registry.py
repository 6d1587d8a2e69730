"""Errors and the one registry type: things are found by folder, so adding one is adding a file."""

from __future__ import annotations

import difflib
import importlib
import pkgutil
import sys
from collections.abc import Iterable, Iterator
from typing import Generic, TypeVar

T = TypeVar("T")


class DQError(ValueError):
    """A problem the caller can act on; the message says what to do."""


def suggest(word: str, known: Iterable[str]) -> str:
    """`; did you mean 'a' or 'b'?` for names close to `word`, else the list of what there is."""
    known = sorted(known)
    near = difflib.get_close_matches(word, known, n=3, cutoff=0.5)
    if near:
        return "; did you mean " + " or ".join(repr(n) for n in near) + "?"
    return "; known: " + ", ".join(known) + "." if known else "; none are known."


class Registry(Generic[T]):
    """Named values of one kind, filled by importing every module of one package on first use.

    Args:
        kind: the noun used in error messages ("format", "transform" ...).
        package: dotted name of the package whose modules register values when imported.

    Raises:
        DQError: on `get` of an unknown name (with near names) and on registering a name twice.
    """

    def __init__(self, kind: str, package: str):
        self.kind, self.package = kind, package
        self._values: dict[str, T] = {}
        self._owners: dict[str, str] = {}  # name -> module that registered it
        self._discovered = False

    def register(self, value: T, name: str | None = None) -> T:
        """Adds `value` under `name`, or under its own `name` attribute; returns it, so it works as a decorator."""
        key = name or getattr(value, "name", None) or value.__name__
        # A module that runs again (reload, notebooks) re-registers its own thing: that is no clash.
        module = sys._getframe(1).f_globals["__name__"]
        if self._owners.setdefault(key, module) != module:
            raise DQError(f"{self.kind} {key!r} is registered twice: by {self._owners[key]} and by {module}")
        self._values[key] = value
        return value

    def discover(self) -> None:
        """Imports every module of the package once; their import registers what they hold."""
        if self._discovered:
            return
        self._discovered = True
        package = importlib.import_module(self.package)
        for info in pkgutil.iter_modules(package.__path__):
            importlib.import_module(f"{self.package}.{info.name}")

    def get(self, name: str) -> T:
        self.discover()
        if name not in self._values:
            raise DQError(f"unknown {self.kind} {name!r}{suggest(name, self._values)}")
        return self._values[name]

    def names(self) -> list[str]:
        self.discover()
        return sorted(self._values)

    def __iter__(self) -> Iterator[T]:
        self.discover()
        return iter([self._values[n] for n in sorted(self._values)])

    def __contains__(self, name: str) -> bool:
        self.discover()
        return name in self._values
