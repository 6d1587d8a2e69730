"""How a plan prints: one line per kind of group, sizes in suitable units; and what it remarks on rules."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Mapping
from itertools import pairwise
from typing import TYPE_CHECKING

from dq.family import matches
from dq.recipe import Recipe, Target
from dq.rewrites import REWRITES

if TYPE_CHECKING:
    from dq.planning import Plan


def plan_lines(plan: Plan) -> list[str]:
    """The lines of `print(plan)`: kinds of groups, totals, remarks."""
    kinds: dict[tuple, Counter] = {}
    for row in plan.rows:
        t = row.target
        names = " + ".join(_short([re.sub(r"(?<=\.)\d+(?=\.)", "*", m) for m in row.members]))
        how = "16-bit: " + row.reason if t is None else _describe(t)
        shape = f"{sum(n for n, _ in row.shapes)}x{row.shapes[0][1]}"
        kinds.setdefault((names, shape, how), Counter()).update(n=1, elements=row.elements, nbytes=row.nbytes)
    wide = max((len(k[0]) for k in kinds), default=0)
    first = "".join(f", {name}" for name, _ in plan.recipe.rewrites)
    rewritten = f"; rewritten first by {first[2:]}: a tied output projection gets a weight of its own" if first else ""
    out = [f"{plan.model}: recipe {plan.recipe.name}, family {plan.family.name}{rewritten}"]
    for (names, shape, how), c in kinds.items():
        out.append(f"  {names:<{wide}}  {c['n']:>3} x {shape:<12} {size_text(c['nbytes']):>9}  {how}")
    before, after, peak = (size_text(n) for n in (plan.bytes_before, plan.bytes_after, plan.peak_bytes))
    runs = " and the runs that calibrate" * plan.recipe.needs_calibration
    runs += " and what its rewrites learn" * any(REWRITES.get(n).needs_batches for n, _ in plan.recipe.rewrites)
    cost = f"{time_text(plan.seconds)} on two CPU cores (far less on a GPU){runs}; peak memory about {peak}"
    out.append(f"  weights {before} -> {after}; {cost}")
    return out + [f"  note: {r}" for r in (*plan.remarks, plan.family.assumed) if r]


def _describe(target: Target) -> str:
    acts = "16-bit" if target.activations is None else str(target.activations)
    steps = (*target.transforms, (target.rounding, target.rounding_params))
    return f"W {target.weights}  X {acts}  " + ", ".join(n + "".join(f" {k}={v}" for k, v in p) for n, p in steps)


def _short(names: list[str]) -> list[str]:
    """a.b.q, a.b.k -> a.b.q, k."""
    out = [names[0]]
    for previous, name in pairwise(names):
        parent = previous.rpartition(".")[0] + "."
        out.append(name.removeprefix(parent) if parent != "." else name)
    return out


def time_text(seconds: float) -> str:
    """A rough duration in the unit that suits it."""
    if seconds < 1:
        return "under a second"
    for unit, size, most in (("s", 1, 120), ("min", 60, 7200)):
        if seconds < most:
            return f"about {seconds / size:.0f} {unit}"
    return f"about {seconds / 3600:.1f} h"


def size_text(n: float) -> str:
    """Bytes with three digits, in B, KB, MB or GB of powers of 1000."""
    for unit in ("B", "KB", "MB"):
        if n < 1000:
            return f"{n:.3g} {unit}"
        n /= 1000
    return f"{n:.3g} GB"


def idle_rules(recipe: Recipe, linears: Iterable[str], tied: Mapping[str, str]) -> list[str]:
    """What rules of the recipe do not do here."""
    found = []
    for rule in recipe.rules:
        mine = [n for n in linears if matches(n, rule.match)]
        if not mine:
            found.append(f"recipe rule {rule.match!r} matches no linear here")
        elif rule.target is not None and all(f"{n}.weight" in tied for n in mine):
            other = tied[f"{mine[0]}.weight"].removesuffix(".weight")
            found.append(f"recipe rule {rule.match!r}: {mine[0]} stays in 16 bits, for it is tied to {other}")
    return found
