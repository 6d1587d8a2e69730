"""Errors and the one registry type: things are found by folder, so adding one is adding a file."""

from __future__ import annotations

import difflib
import importlib
import inspect
import math
import pkgutil
import sys
from collections.abc import Callable, Iterable, Iterator
from functools import cache
from types import UnionType
from typing import Any, Generic, TypeVar, get_args, get_origin, get_type_hints

T = TypeVar("T")


class DQError(ValueError):
    """A problem the caller can act on; the message says what to do."""


def suggest(word: str, known: Iterable[str]) -> str:
    """`; did you mean 'a' or 'b'?` for names close to `word`, else the list of what there is."""
    known = sorted(known)
    near = next((n for w in (word, word.lower()) if (n := difflib.get_close_matches(w, known, 3, 0.5))), [])
    if near:
        return "; did you mean " + " or ".join(repr(n) for n in near) + "?"
    shown = ", ".join(known[:12]) + (" ..." if len(known) > 12 else ".")
    return f"; known: {shown}" if known else "; none are known."


def typed(value: Any, kinds: Any, what: str) -> Any:
    """`value` if it is of one of `kinds` (a type or a tuple of them); True and False are no numbers.

    Raises:
        DQError: `what`, and what was got instead.
    """
    kinds = kinds if isinstance(kinds, tuple) else (kinds,)
    if not isinstance(value, kinds) or (isinstance(value, bool) and bool not in kinds):
        raise DQError(f"{what}; got {value!r}")
    return value


@cache
def _kinds(owner: Any) -> dict[str, tuple[type, ...]]:
    """name -> types that its annotation allows, containers without what they contain; an int is a float."""
    hints = {n: get_args(h) if isinstance(h, UnionType) else (h,) for n, h in get_type_hints(owner).items()}
    found = {n: tuple(get_origin(h) or h for h in hs) for n, hs in hints.items() if Any not in hs}
    return {n: (*kinds, int) if float in kinds else kinds for n, kinds in found.items()}


def check_fields(value: Any) -> None:
    """Raises DQError unless every field of a dataclass instance is of the type that it is annotated with."""
    for name, kinds in _kinds(type(value)).items():
        words = " or ".join("none" if k is type(None) else k.__name__ for k in kinds)
        typed(getattr(value, name), kinds, f"{name} in a {type(value).__name__} must be {words}")


def check_params(who: str, function: Callable[..., Any], params: Iterable[tuple[str, Any]]) -> None:
    """Raises DQError unless `function` takes all (name, value) pairs beside its first argument."""
    known = list(inspect.signature(function).parameters)[1:]
    for word, value in params:
        if word not in known:
            raise DQError(f"{who} takes no parameter {word!r}{suggest(str(word), known)}")
        kinds = _kinds(function).get(word, (object,))
        typed(value, kinds, f"{who} takes {word} as {' or '.join(k.__name__ for k in kinds)}")
        if isinstance(value, float) and not math.isfinite(value):
            raise DQError(f"{who} takes a finite {word}; got {value}")


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
        if not isinstance(name, str) or name not in self._values:
            raise DQError(f"unknown {self.kind} {name!r}{suggest(str(name), self._values)}")
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
