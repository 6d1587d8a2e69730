"""`auto` recipes: which candidate every group takes, from measured errors under a byte budget. Pure functions.

Every candidate of every group is really quantized and scored on calibration inputs that no statistics saw; how much a
group's error counts is measured on the output of the whole model, and a knapsack spends the bytes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from dq.conv import matrix
from dq.family import matches
from dq.group import is_expert, quantize_row, transformed
from dq.linear import QuantizedLinear
from dq.ops import reference_qlinear
from dq.planning import Plan, PlanRow
from dq.recipe import Auto, Candidate
from dq.registry import DQError
from dq.stats import Stat

BINS = 4096  # of the byte budget
FLOOR = 0.25  # of an even share of the model's error: no group is taken to matter less, a small gain may be chance


@dataclass(frozen=True)
class Score:
    """One candidate on one group.

    Attributes:
        candidate: its name.
        error: sum over the group's linears of `|y_q - y|^2 / |y|^2` on held-out inputs (sampled by weight).
        nbytes: stored bytes of the group: codes, scales, residual columns, 16-bit factors, run-time tensors.
        reason: why it cannot be taken, "" if it can.
    """

    candidate: str
    error: float = float("inf")
    nbytes: int = 0
    reason: str = ""


@dataclass(frozen=True)
class Choice:
    """What one group took.

    Attributes:
        members: its linears.
        elements: their weights.
        scores: of all candidates.
        winner: name of the candidate taken.
        sensitivity: error of the model's output per unit of the group's own error.
    """

    members: tuple[str, ...]
    elements: int
    scores: tuple[Score, ...]
    winner: str
    sensitivity: float

    def score(self, name: str | None = None) -> Score:
        return next(s for s in self.scores if s.candidate == (name or self.winner))


class ChoiceTable(list):
    """The choices of all groups; prints what won where, and by how much."""

    def to_list(self) -> list[dict[str, Any]]:
        """JSON-clean."""
        return [asdict(c) for c in self]

    @classmethod
    def from_list(cls, data: Iterable[dict[str, Any]]) -> ChoiceTable:
        """The inverse of `to_list`."""
        out = cls()
        for item in data:
            scores = tuple(Score(**s) for s in item["scores"])
            out.append(Choice(**item | {"members": tuple(item["members"]), "scores": scores}))
        return out

    def __str__(self) -> str:
        rows = [("group", "taken", "bits", "error", "of first", "model share", "runner-up")]
        whole = sum(c.sensitivity * c.score().error for c in self) or 1.0
        for c in self:
            best, first = c.score(), c.scores[0]
            others = sorted((s for s in c.scores if s.candidate != c.winner and not s.reason), key=lambda s: s.error)
            second = _runner_up(others[0], best, c.elements) if others else "-"
            rows.append(
                (
                    c.members[0] + (f" +{len(c.members) - 1}" if len(c.members) > 1 else ""),
                    c.winner,
                    f"{8 * best.nbytes / c.elements:.2f}",
                    f"{best.error:.2e}",
                    f"{best.error / max(first.error, 1e-30):.2f}x" if not first.reason else "-",
                    f"{100 * c.sensitivity * best.error / whole:.1f} %",
                    second,
                )
            )
        wide = [max(map(len, column)) for column in zip(*rows, strict=True)]
        lines = ["  ".join(map(str.ljust, row, wide)).rstrip() for row in rows]
        bits = 8 * sum(c.score().nbytes for c in self) / max(1, sum(c.elements for c in self))
        return "\n".join([*lines, f"{len(self)} groups, {bits:.3f} bits per weight"])


def undecided(plan: Plan) -> list[PlanRow]:
    """The rows up for choice: ordinary linears. A rule fixes what it names, whatever target it gives."""
    fixed, modulation = [r.match for r in plan.recipe.rules], plan.family.is_modulation
    rows = [r for r in plan.quantized if r.target == plan.recipe.linear]
    return [r for r in rows if not any(modulation(m) or any(matches(m, p) for p in fixed) for m in r.members)]


def _runner_up(score: Score, taken: Score, elements: int) -> str:
    """Name, error against the one taken, and bits: what has a smaller error was too large for the budget."""
    return f"{score.candidate} {score.error / max(taken.error, 1e-30):.2f}x at {8 * score.nbytes / elements:.2f} bits"


def layers_error(
    model: nn.Module, row: PlanRow, layers: Mapping[str, QuantizedLinear], stats: Mapping[str, Stat]
) -> float:
    """`Score.error` of finished layers."""
    total = 0.0
    for members in row.inputs:
        stat = stats[members[0]]
        for m in members:
            w = matrix(model.get_submodule(m)).detach().to(layers[m].qweight.device, torch.float32)
            x = stat.held_rows.to(w)
            y, bias = x @ w.T, model.get_submodule(m).bias
            wrong = reference_qlinear(x, layers[m].params) - (y if bias is None else y + bias.to(y))
            total += float(wrong.square().sum() / y.square().sum().clamp(min=1e-30))
    return total


def _require_reached(row: PlanRow, stats: dict[str, Stat]) -> None:
    """Before candidates are compared on it.

    Raises:
        DQError: calibration never reached an input of the row (an expert's may be idle, see `group.reachable`).
    """
    for stat in (stats[i[0]] for i in row.inputs if i[0] in stats):
        if not stat.count and not is_expert(row):
            stat.amax()  # says so


def score_row(
    model: nn.Module, row: PlanRow, stats: Mapping[str, Stat], auto: Auto, device=None
) -> tuple[tuple[Score, ...], dict[str, dict[str, QuantizedLinear]]]:
    """Scores of all candidates on one group, and layers on the CPU: those of the first candidate that can be taken,
    whose effect on the model is measured; of all of them if groups are weighed again.

    Screening: every candidate is first rounded to nearest; those beyond `auto.screen` times the error of the best one
    that is not larger are left out of the full rounding.

    Raises:
        DQError: no candidate can be taken.
    """
    _require_reached(row, stats)
    quick, scores, kept = {}, [], {}
    for c in auto.candidates:
        trial = replace(row, target=c.target)
        try:
            state = transformed(model, trial, stats, device)
            near = replace(trial, target=replace(c.target, rounding="rtn", rounding_params=()))
            layers = quantize_row(model, near, stats, device, state)
            quick[c.name] = (c.target, layers_error(model, row, layers, stats), trial.nbytes, state, layers)
        except DQError as error:
            scores.append(Score(c.name, reason=str(error)))
    for name, (target, error, nbytes, state, layers) in quick.items():
        bound = min(e for _, e, size, *_ in quick.values() if size <= nbytes) * auto.screen
        if error > bound:
            scores.append(Score(name, error, nbytes, "screened out"))
            continue
        if target.rounding != "rtn":
            layers = quantize_row(model, replace(row, target=target), stats, device, state)
            error = layers_error(model, row, layers, stats)
        scores.append(Score(name, error, nbytes))
        if not kept or auto.rounds > 1:
            kept[name] = {n: layer.to("cpu") for n, layer in layers.items()}
    if not kept:
        reasons = dict.fromkeys(s.reason for s in scores)  # said once each
        why = "; ".join(f"{', '.join(s.candidate for s in scores if s.reason == r)}: {r}" for r in reasons)
        raise DQError(f"{row.members[0]}: no candidate fits: {why}")
    order = [c.name for c in auto.candidates]
    return tuple(sorted(scores, key=lambda s: order.index(s.candidate))), kept


def cautious(gains: Tensor) -> float:
    """Mean plus one standard error over records: a group whose weight is uncertain is not gambled with."""
    spread = float(gains.std()) / len(gains) ** 0.5 if len(gains) > 1 else 0.0
    return float(gains.mean()) + spread


def restored_gains(
    layers: list[dict[str, QuantizedLinear]],
    swap: Callable[[dict[str, nn.Module]], dict[str, nn.Module]],
    wrong: Callable[[int], Tensor],
    tick: Callable[[], Any],
) -> list[float]:
    """How much the error of the model's output falls when one group after the other gets its 16-bit linears back and
    all others stay quantized: errors of consecutive layers do not add up, so each is measured beside the rest.

    Args:
        swap: puts layers into the model and returns those that were there.
        wrong: error of the model's output, per record; it is told which group's layers have been put back (-1: none),
            0, 1, .. in turn, and outputs before that group are those of the quantized model.
    """
    originals = [swap(mine) for mine in layers]
    try:
        base, gains = wrong(-1), []
        for i, mine in enumerate(originals):
            quantized = swap(mine)
            gains.append(cautious(base - wrong(i)))
            swap(quantized)
            tick()
    finally:
        for mine in originals:
            swap(mine)
    return [max(gain, FLOOR * float(base.mean()) / len(gains)) for gain in gains]


def reference_score(scores: Iterable[Score]) -> Score:
    """The candidate whose layers `score_row` hands out: the first that can be taken."""
    return next(s for s in scores if not s.reason)


def allocate(options: Sequence[Sequence[tuple[float, int]]], budget: int) -> list[int]:
    """Multiple-choice knapsack: one option per group, least sum of costs with a sum of bytes within the budget.

    Dynamic programming over `BINS` bins of the bytes above the smallest options, each rounded up: never over budget.
    Bytes that the rounding left idle then go where they gain most.

    Args:
        options: per group, (cost, bytes) of every option.

    Raises:
        DQError: even the smallest options are larger than the budget.
    """
    least = [min(size for _, size in group) for group in options]
    spare = budget - sum(least)
    if spare < 0:
        raise DQError(f"the smallest candidates need {sum(least)} bytes, the budget is {budget}: raise bits")
    bins = min(BINS, spare)  # of a byte each where there are fewer bytes than bins
    unit = spare / bins if bins else 1.0
    best = np.zeros(bins + 1)
    taken = []
    for group, low in zip(options, least, strict=True):
        new, pick = np.full(bins + 1, np.inf), np.zeros(bins + 1, dtype=np.int64)
        for i, (cost, size) in enumerate(group):
            need = int(np.ceil((size - low) / unit))
            if need > bins:
                continue
            moved = np.full(bins + 1, np.inf)
            moved[need:] = best[: bins + 1 - need] + cost
            better = moved < new
            new, pick = np.where(better, moved, new), np.where(better, i, pick)
        best = new
        taken.append((pick, [int(np.ceil((size - low) / unit)) for _, size in group]))
    at, out = int(best.argmin()), []
    for pick, needs in reversed(taken):
        out.append(int(pick[at]))
        at -= needs[out[-1]]
    return _spend_rest(options, out[::-1], budget)


def _spend_rest(options: Sequence[Sequence[tuple[float, int]]], taken: list[int], budget: int) -> list[int]:
    """Better options that still fit, one after the other, by cost saved per byte."""
    while True:
        now = [group[i] for group, i in zip(options, taken, strict=True)]
        rest = budget - sum(size for _, size in now)
        moves = [
            ((cost - c) / max(1, s - size), g, i)
            for g, (group, (cost, size)) in enumerate(zip(options, now, strict=True))
            for i, (c, s) in enumerate(group)
            if c < cost and s - size <= rest
        ]
        if not moves:
            return taken
        _, g, i = max(moves)
        taken[g] = i


def choose(
    rows: Sequence[PlanRow], scores: Sequence[tuple[Score, ...]], sensitivity: Sequence[float], auto: Auto
) -> tuple[list[PlanRow], ChoiceTable]:
    """The rows with the targets that win under the budget, and the table of choices.

    Raises:
        DQError: the budget is too small for any choice.
    """
    usable = [[s for s in group if not s.reason] for group in scores]
    options = [[(w * s.error, s.nbytes) for s in group] for group, w in zip(usable, sensitivity, strict=True)]
    first = sum((s[0] if s[0].nbytes else reference_score(s)).nbytes for s in scores)
    weights = sum(r.elements for r in rows)
    budget = int(auto.bits * weights / 8 or first) + int(auto.extra_bits * weights / 8)
    taken = [group[i] for group, i in zip(usable, allocate(options, budget), strict=True)]
    table = ChoiceTable(
        Choice(r.members, r.elements, tuple(all_), s.candidate, w)
        for r, all_, s, w in zip(rows, scores, taken, sensitivity, strict=True)
    )
    return decided(rows, table, auto), table


def decided(rows: Sequence[PlanRow], table: ChoiceTable, auto: Auto) -> list[PlanRow]:
    """The rows with the targets that the table gives them."""
    targets = {c.name: c.target for c in auto.candidates}
    return [replace(r, target=targets[c.winner]) for r, c in zip(rows, table, strict=True)]


__all__ = ["Auto", "Candidate", "Choice", "ChoiceTable", "Score", "allocate", "choose", "layers_error", "score_row"]
