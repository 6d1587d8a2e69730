"""One pass of calibration: records run, hooks on linears gather one `Stat` per shared input, sharing is checked."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from dq.conv import rows, size
from dq.planning import PlanRow
from dq.records import Record, running
from dq.stats import Stat
from dq.steps import stratum

BINS = 4
FEW = 32  # distinct tokens below which an error on the calibration sample says nothing about other inputs


class Collector:
    """Gathers statistics of a model's linears, as often as it is asked.

    Args:
        by_step: a stratum per timestep, for scales that depend on it.

    Attributes:
        survey: whether candidates are being compared: every fourth record is then held out for scores.
        split: linear -> the one whose input it was thought to share, and does not.
    """

    def __init__(self, model: nn.Module, records: Sequence[Record], by_step: bool):
        self.model, self.records, self.by_step = model, records, by_step
        self.survey, self.split, self._gram = False, {}, {}

    def run(
        self, inputs: Mapping[tuple[str, ...], bool], forward: Callable[[int], Any], tick: Callable[[int], Any]
    ) -> dict[str, Stat]:
        """First linear of every shared input -> its `Stat`, over all records.

        Args:
            inputs: linears that share an input -> whether E[x x^T] is wanted.
            forward: runs record i.
        """
        stats, handles, current, seen = {}, [], {"stratum": "0/single"}, {}
        for members, gram in inputs.items():
            self._gram |= dict.fromkeys(members, gram)
            stats[members[0]] = self._stat(members[0])
            handles += [self._hook(m, members[0], stats, current, seen) for m in members]
        try:
            for i, record in enumerate(self.records):
                mark = stratum(record) if self.by_step else record.stratum(BINS)
                current |= {"stratum": mark, "held_out": self._held_out(i), "weight": record.weight}
                seen.clear()
                with running(i, self.model):
                    forward(i)
                tick(1)
        finally:
            for h in handles:
                h.remove()
        return stats

    def _stat(self, name: str) -> Stat:
        width = size(self.model.get_submodule(name))[1]
        return Stat(width, name=name, want_gram=self._gram.get(name, False))

    def _held_out(self, index: int) -> bool:
        return self.survey and len(self.records) > 3 and index % 4 == 3

    def _hook(self, name: str, first: str, stats: dict[str, Stat], current: dict, seen: dict):
        def hook(module, args, kwargs):
            x, early = rows(module, args[0] if args else next(iter(kwargs.values()))), ("before", first)
            if name == first or name in self.split:
                stats[name].update(x, **current)
            elif first in seen:
                self._compare(name, x, first, seen[first], stats, current)
            else:  # called before the linear it is compared with
                seen.setdefault(early, {})[name] = x
            if name == first:
                seen[first] = x
                for partner, other in seen.pop(early, {}).items():
                    self._compare(partner, other, first, x, stats, current)

        return self.model.get_submodule(name).register_forward_pre_hook(hook, with_kwargs=True)

    def _compare(self, name: str, x: Tensor, first: str, expected: Tensor, stats: dict[str, Stat], current: dict):
        """Splits the linear from its group if its input is not the one that `first` gets."""
        if x is not expected and not torch.equal(x, expected):
            self.split[name] = first
            stats[name] = stats.get(name) or self._stat(name)
            stats[name].update(x, **current)


def thin(row: PlanRow, stats: Mapping[str, Stat]) -> dict[str, int]:
    """First linear -> number of distinct inputs that a calibrated row was fitted to; {} if they suffice to judge it."""
    if not row.target.needs_calibration:
        return {}
    samples = [stats[i[0]].rows for i in row.inputs if i[0] in stats]
    count = min((len(torch.unique(sample, dim=0)) for sample in samples), default=FEW)
    return {row.members[0]: count} if count < FEW else {}


def in_sample(counts: Mapping[str, int]) -> list[str]:
    """A remark about groups that are judged by the few inputs they were fitted to (as `thin` counts them), [] if there
    are none."""
    if not counts:
        return []
    name = min(counts, key=counts.get)
    what = f"SQNR of {len(counts)} groups, e.g. of {name} ({counts[name]} distinct inputs)"
    return [
        f"{what}, is measured on the few calibration inputs that they were fitted to and says little about others: "
        "calibrate on more records"
    ]
