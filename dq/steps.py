"""Things that depend on the denoising step: groups of steps that share a static activation scale.

    partition of steps t = 0..T-1 into contiguous groups g with the least  sum over g of |g| max_{t in g} m_t^2

m_t is the largest |x| at step t; rounding with the step s = max m / qmax makes an error of s^2 / 12 per value. Groups
are kept as edges on the model's own timestep axis, so that they hold for any number of steps and any scheduler.
Sources: time grouping of TQ-DiT (arXiv 2502.04056); the exact partition by dynamic programming is our own.
"""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn

from dq.registry import DQError


def partition(tops: Sequence[float], groups: int) -> tuple[int, ...]:
    """Where the best contiguous groups begin, the first one left out: `(3, 5)` is 0..2, 3..4, 5...

    Args:
        tops: m_t >= 0 in the order of the steps.
        groups: how many at most; with fewer steps every step is a group.

    Raises:
        DQError: no steps, or fewer than one group.
    """
    count = len(tops)
    if count < 1 or groups < 1:
        raise DQError(f"steps are divided into at least one group, and there must be some; got {count} and {groups}")
    best: list[tuple[float, tuple[int, ...]]] = [(_cost(tops, 0, end), ()) for end in range(1, count + 1)]
    for number in range(1, min(groups, count)):
        # best[end - 1]: of the first `end` steps in `number` groups; none where there are fewer steps than groups.
        best = [
            min((best[i - 1][0] + _cost(tops, i, end), (*best[i - 1][1], i)) for i in range(number, end))
            if end > number
            else (float("inf"), ())
            for end in range(1, count + 1)
        ]
    return best[-1][1]


def _cost(tops: Sequence[float], start: int, end: int) -> float:
    return (end - start) * float(max(tops[start:end])) ** 2


def rounding_error(tops: Sequence[float], cuts: Sequence[int], qmax: float) -> float:
    """Sum over steps of s^2 / 12, s = max of the step's group / qmax."""
    edges = [0, *cuts, len(tops)]
    return sum(_cost(tops, a, b) for a, b in pairwise(edges)) / (12.0 * qmax**2)


@dataclass
class StepGroups:
    """Groups of steps along the timestep axis, ascending.

    Attributes:
        edges: [G - 1] float32; group i holds the timesteps in (edges[i - 1], edges[i]].
        tops: [G] float32, the largest |x| in each.
    """

    edges: Tensor
    tops: Tensor

    @classmethod
    def fit(cls, tops: dict[float, float], groups: int, name: str = "input") -> StepGroups:
        """Groups from the largest |x| at every calibrated timestep; edges lie midway between neighbours.

        Fewer calibrated timesteps than groups leave groups empty: they repeat the last one.

        Raises:
            DQError: no timestep is known (a model without one).
        """
        times = sorted(t for t in tops if t == t)  # NaN: a record of a model without timesteps
        if not times:
            raise DQError(f"{name}: step groups need records with timesteps; this model gets none")
        values = [tops[t] for t in times]
        cuts = partition(values, groups)
        found = [0, *cuts, len(times)]
        edges = [(times[c - 1] + times[c]) / 2 for c in cuts]
        highest = [max(values[a:b]) for a, b in pairwise(found)]
        missing = groups - len(highest)
        edges, highest = edges + [float("inf")] * missing, highest + highest[-1:] * missing
        return cls(torch.tensor(edges, dtype=torch.float32), torch.tensor(highest, dtype=torch.float32))


class StepContext:
    """What a model's layers know about the call that runs: its timestep [1], or None outside of a call.

    One object per model, shared by its layers; set by hooks on the model (`watch`).
    """

    timestep: Tensor | None = None

    def pick(self, scales: Tensor, edges: Tensor) -> Tensor:
        """The scale [1, 1] of the current group out of [G, 1], without waiting for the device; outside of a model's
        call the largest one, which clips nothing."""
        if self.timestep is None:
            return scales.amax(0, keepdim=True)
        return scales.index_select(0, torch.bucketize(self.timestep.to(edges), edges))


def stratum(record: Any) -> str:
    """A calibration stratum per timestep: `"<timestep>/<branch>"`."""
    return f"{record.timestep!r}/{record.branch}"


def tops_by_step(absmax: dict[str, float]) -> dict[float, float]:
    """The largest value at every timestep, over branches, from values by `stratum`."""
    found: dict[float, float] = {}
    for name, top in absmax.items():
        time = float(name.partition("/")[0])
        found[time] = max(top, found.get(time, 0.0))
    return found


def watch(model: nn.Module) -> StepContext | None:
    """Tells the model's layers the timestep of every call: every layer with `step_groups` in its config gets the same
    `StepContext`, and hooks on the model fill it. None if there is no such layer. A second call changes nothing.

    Raises:
        DQError: the model's forward takes no `timestep`.
    """
    layers = [m for m in model.modules() if getattr(getattr(m, "config", None), "step_groups", 0)]
    if not layers:
        return None
    if not hasattr(model, "dq_steps"):
        if "timestep" not in inspect.signature(model.forward).parameters:
            raise DQError(f"step groups need a model that is called with a timestep; {type(model).__name__} is not")
        model.dq_steps = StepContext()
        model.register_forward_pre_hook(_enter, with_kwargs=True)
        model.register_forward_hook(_leave, always_call=True)
    for layer in layers:
        layer.step_context = model.dq_steps
    return model.dq_steps


def _enter(model: nn.Module, args: tuple, kwargs: dict) -> None:
    """All samples of a call are at one step: the first timestep stands for all. (A function, so that a copied model
    fills its own context.)"""
    value = kwargs.get("timestep")
    if value is None:
        value = inspect.signature(model.forward).bind_partial(*args, **kwargs).arguments.get("timestep")
    model.dq_steps.timestep = None if value is None else torch.as_tensor(value).reshape(-1)[:1].to(torch.float32)


def _leave(model: nn.Module, args: tuple, output: Any) -> None:
    model.dq_steps.timestep = None
