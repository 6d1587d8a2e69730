"""Tables of measured candidates: rows that are saved one after the other, intervals, paired comparisons."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from dq.eval.bootstrap import ratio_interval
from dq.eval.result import clean
from dq.registry import DQError, suggest

PARTS = ("early", "middle", "late")  # thirds of the denoising steps


def row(candidate: Any, **first: Any) -> dict[str, Any]:
    """One JSON-clean row: what it is named after, every score with its interval, and the error of every call."""
    out = dict(first)
    for name, score in candidate.scores.items():
        if score.value is not None:
            out[name] = {"value": score.value, "low": score.low, "high": score.high, "n": score.n}
    return clean(out | {"calls": [[c["prompt"], c["step"], c["error"]] for c in candidate.model_errors]})


def text(table: Iterable[dict[str, Any]], columns: Mapping[str, int | None], markdown: bool = False) -> str:
    """The rows as a table; scores as value (95 % interval).

    Args:
        columns: those in front of the scores: name -> decimals, None for text.
    """
    table = list(table)
    scores = list(dict.fromkeys(k for r in table for k, v in r.items() if isinstance(v, dict) and "value" in v))
    lines = [[*columns, *scores]]
    for r in table:
        plain = [str(r[c]) if digits is None else f"{r[c]:.{digits}f}" for c, digits in columns.items()]
        lines.append([*plain, *(_score(r.get(name)) for name in scores)])
    if markdown:
        head, *body = ["| " + " | ".join(line) + " |" for line in lines]
        return "\n".join([head, "|" + "---|" * len(lines[0]), *body]) + "\n"
    wide = [max(map(len, column)) for column in zip(*lines, strict=True)]
    return "\n".join("  ".join(map(str.ljust, line, wide)).rstrip() for line in lines)


def _score(score: dict[str, Any] | None) -> str:
    if score is None:
        return "-"
    value = f"{score['value']:.4g}"
    if score["low"] is None or not math.isfinite(score["low"]):
        return value
    return f"{value} ({score['low']:.3g} to {score['high']:.3g})"


def against(table: Sequence[dict[str, Any]], key: str, yardstick: str, column: str = "of yardstick") -> None:
    """Adds to every row its model error over that of the row named `yardstick`: of all calls, and of each third of the
    steps. Numerator and denominator are resampled together, so what makes a call hard for both cancels.

    Raises:
        DQError: no such row, or rows that were measured on different calls.
    """
    names = [r[key] for r in table]
    if yardstick not in names:
        raise DQError(f"no row {yardstick!r}{suggest(yardstick, names)} to compare with")
    base = table[names.index(yardstick)]["calls"]
    last = max(step for _, step, _ in base)
    for r in table:
        if [c[:2] for c in r["calls"]] != [c[:2] for c in base]:
            raise DQError(f"{r[key]} and {yardstick} were measured on different calls")
        errors = [(step, error, other) for (_, step, error), (_, _, other) in zip(r["calls"], base, strict=True)]
        r[column] = _ratio([e[1:] for e in errors])
        for i, part in enumerate(PARTS):
            r[part] = _ratio([e[1:] for e in errors if min(3 * e[0] // (last + 1), 2) == i])


def _ratio(pairs: list[tuple[float, float]]) -> dict[str, Any] | None:
    if not pairs:
        return None
    a, b = zip(*pairs, strict=True)
    low, high = ratio_interval(a, b) or (None, None)
    return {"value": sum(a) / max(sum(b), 1e-30), "low": low, "high": high, "n": len(pairs)}


class RowFile:
    """A JSON file that always holds the rows measured so far: a stop loses nothing, and a later run goes on.

    Args:
        path: None keeps nothing.
        head: what all rows share (settings, versions); stands in front of them.
        key: the column that names a row.
        resume: take over rows that the file holds.

    Raises:
        DQError: resuming without a file, or from one that was made under other settings.
    """

    def __init__(self, path: str | None, head: dict[str, Any], key: str, resume: bool = False):
        self.path, self.head, self.key = path and Path(path), head, key
        self.rows: dict[str, dict[str, Any]] = {}
        if resume:
            self.rows = self._read()

    def _read(self) -> dict[str, dict[str, Any]]:
        if self.path is None:
            raise DQError("--resume continues the file of --json FILE: name it")
        if not self.path.is_file():
            return {}
        try:
            found = json.loads(self.path.read_text(encoding="utf-8"))
            rows, title = {r[self.key]: r for r in found["rows"]}, found["title"]
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise DQError(f"{self.path} holds no table to resume: {error}") from error
        if title != self.head["title"]:
            raise DQError(f"{self.path} holds another table ({title}); take another file, or leave out --resume")
        return rows

    def known(self, name: str, recipe: dict[str, Any]) -> dict[str, Any] | None:
        """The row of that name if it was measured with this very recipe."""
        found = self.rows.get(name)
        return found if found is not None and found.get("recipe") == clean(recipe) else None

    def add(self, row: dict[str, Any]) -> None:
        """Keeps the row and writes the file, whole or not at all."""
        self.rows[row[self.key]] = row
        if self.path is not None:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            part = self.path.with_suffix(".part")
            part.write_text(json.dumps(self.head | {"rows": list(self.rows.values())}) + "\n", encoding="utf-8")
            part.replace(self.path)
