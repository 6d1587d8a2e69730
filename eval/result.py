"""What an evaluation found: plain dataclasses, JSON-clean."""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from dq.checks import output_file
from dq.registry import DQError


@dataclass
class Score:
    """One metric of one candidate.

    `value` is the mean over `n` images, calls or trajectories (`kind` "paired") or the set value ("set"); `low` and
    `high` its bootstrap interval. `value` is None where the metric could not run, and `reason` says why.
    """

    name: str
    kind: str = "paired"
    higher_is_better: bool = False
    digits: int | None = None  # decimals; None for three significant digits
    value: float | None = None
    low: float | None = None
    high: float | None = None
    n: int = 0
    reason: str | None = None
    note: str | None = None
    values: list[float] = field(default_factory=list)

    @property
    def arrow(self) -> str:
        return "↑" if self.higher_is_better else "↓"

    def text(self, value: float | None) -> str:
        """Format a value of this metric."""
        if value is None:
            return "–"
        if self.digits is None:
            return f"{value:#.3g}" if value else "0"
        return f"{value:.{self.digits}f}"


@dataclass
class CandidateResult:
    """All that was measured on one candidate.

    scores: model-error and latent-error first, then the metrics. latent_curve: error per step (mean over prompts).
    model_errors: [{component, prompt, step, error}] on the reference's own inputs. layers: one dict per quantized
    layer (fields of `dq.linear.layer_info`). nbytes: of all denoiser tensors.
    """

    name: str
    scores: dict[str, Score] = field(default_factory=dict)
    latent_curve: list[float] = field(default_factory=list)
    model_errors: list[dict[str, Any]] = field(default_factory=list)
    layers: list[dict[str, Any]] = field(default_factory=list)
    nbytes: int = 0
    seconds: float = 0.0
    recipe: str = ""
    plan: Any = None
    quantize_seconds: float | None = None
    notes: list[str] = field(default_factory=list)


@dataclass
class EvalResult:
    """An evaluation of candidates against one reference; images stay outside of `to_dict`."""

    prompts: list[str]
    candidates: list[CandidateResult]
    settings: dict[str, Any] = field(default_factory=dict)
    environment: dict[str, Any] = field(default_factory=dict)
    reference_nbytes: int = 0
    reference_seconds: float = 0.0
    unavailable: dict[str, str] = field(default_factory=dict)
    images: dict[str, torch.Tensor] = field(default_factory=dict, repr=False)  # name -> uint8 [N, 3, H, W]

    def __getitem__(self, name: str) -> CandidateResult:
        for candidate in self.candidates:
            if candidate.name == name:
                return candidate
        raise DQError(f"no candidate {name!r}; there are: {', '.join(c.name for c in self.candidates)}")

    def ranking(self) -> list[str]:
        """Return candidate names, best first: by model-error, else by the first score that every candidate has."""
        for name in self.score_names():
            scores = [c.scores[name] for c in self.candidates]
            if all(s.value is not None for s in scores):
                order = sorted(zip(scores, self.candidates, strict=True), key=lambda pair: _key(pair[0]))
                return [candidate.name for _, candidate in order]
        return [c.name for c in self.candidates]

    def score_names(self) -> list[str]:
        """Return the names of the scores, in table order."""
        return list(self.candidates[0].scores) if self.candidates else []

    def to_dict(self) -> dict[str, Any]:
        """Return everything but the images as JSON-clean values (no tensors, no NaN or Inf, str keys)."""
        fields = {f.name: getattr(self, f.name) for f in dataclasses.fields(self) if f.name != "images"}
        return clean({"version": 1, "ranking": self.ranking(), **fields})

    def table(self, width: int = 120) -> str:
        """Return an aligned text table, `value [low, high]` per score, then one line per metric that did not run.

        Columns that do not fit into `width` characters continue in a second block with the names repeated.
        """
        ranking = self.ranking()
        names = ["candidate", "reference", *[c.name for c in self.candidates]]
        columns = [["rank", "", *[str(ranking.index(c.name) + 1) for c in self.candidates]]]
        for name in self.score_names():
            if name not in self.unavailable:
                scores = [c.scores[name] for c in self.candidates]
                columns.append([f"{name} {scores[0].arrow} N={scores[0].n}", "", *[_cell(s) for s in scores]])
        costs = [self._cost(self.reference_nbytes, self.reference_seconds)]
        costs += [self._cost(c.nbytes, c.seconds) for c in self.candidates]
        columns += [["MB", *[mb for mb, _ in costs]], ["s/image", *[seconds for _, seconds in costs]]]
        return "\n".join([*_blocks(names, columns, width), *self.remarks()])

    def remarks(self) -> list[str]:
        """Return one line per metric that did not run and per note."""
        lines = [f"{name}: not run: {reason}" for name, reason in self.unavailable.items()]
        for c in self.candidates:
            noted = {f"{s.name}: {s.note}": None for s in c.scores.values() if s.note}
            lines += [line for line in [*noted, *[f"{c.name}: {note}" for note in c.notes]] if line not in lines]
        return lines

    def save(self, path: str | Path, title: str = "") -> Path:
        """Write the report (.html) or the numbers (.json) and return the path.

        Raises DQError for another suffix and for a place that cannot be written to.
        """
        path = output_file(path, (".html", ".json"))
        if path.suffix.lower() == ".html":
            from dq.eval.report import write_report  # the report imports this module

            return write_report(self, path, **({"title": title} if title else {}))
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(self.to_dict(), indent=1, allow_nan=False) + "\n", encoding="utf-8")
        return path

    def _cost(self, nbytes: int, seconds: float) -> tuple[str, str]:
        per_image = f"{seconds / max(len(self.prompts), 1):.2f}" if seconds else "–"
        return f"{nbytes / 1e6:.1f}" if nbytes else "–", per_image


def _key(score: Score) -> float:
    return -score.value if score.higher_is_better else score.value


def _blocks(names: list[str], columns: list[list[str]], width: int) -> list[str]:
    """Lay columns (heading first) beside `names`, in as many blocks as `width` asks for."""
    lines: list[str] = []
    while columns:
        block = [names, columns.pop(0)]
        while columns and sum(_width(c) + 2 for c in [*block, columns[0]]) <= width + 2:
            block.append(columns.pop(0))
        rows = ["  ".join(c[i].ljust(_width(c)) for c in block).rstrip() for i in range(len(names))]
        rows.insert(1, "  ".join("-" * _width(c) for c in block))
        lines += [*rows, ""]
    return lines


def _width(column: list[str]) -> int:
    return max(len(cell) for cell in column)


def _cell(score: Score) -> str:
    if score.value is None or score.low is None:
        return score.text(score.value)
    return f"{score.text(score.value)} [{score.text(score.low)}, {score.text(score.high)}]"


def clean(value: Any) -> Any:
    """Return `value` as JSON-clean data: dataclasses to dicts, tuples to lists, NaN and Inf to None, others to str."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {f.name: clean(getattr(value, f.name)) for f in dataclasses.fields(value)}
    if isinstance(value, Mapping):
        return {str(k): clean(v) for k, v in value.items()}
    if isinstance(value, (list, tuple, set, frozenset, range)):
        return [clean(v) for v in value]
    if isinstance(value, bool) or value is None or isinstance(value, (str, int)):
        return value
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, torch.Tensor):
        return f"tensor{list(value.shape)}"
    return str(value)
