"""Calibration within a block in the order in which it calls its linears: each sees what the quantized ones before it
give (q, k, v, then o, then gate and up, then down). Source: GPTQ (arXiv 2210.17323), `true_sequential` of its code.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import Any

from torch import nn

from dq.planning import PlanRow
from dq.replay import called

_EXPERT = re.compile(r"(\w*expert\w*)\.\d+")


def _kind(row: PlanRow) -> str:
    """The name of its first linear, the same for all experts of a layer: their stages would be hundreds."""
    return _EXPERT.sub(r"\1.*", row.members[0])


def count(rows: Sequence[PlanRow]) -> int:
    """The stages that these rows of one block make, at least one."""
    return max(1, len({_kind(r) for r in rows}))


def stages(model: nn.Module, rows: Sequence[PlanRow], run: Callable[[], Any]) -> list[list[PlanRow]]:
    """The rows of one block, those that can be calibrated together in one list.

    Args:
        run: calls the block once. Linears that it does not reach come last.
    """
    order = {name: -i for i, name in enumerate(reversed(called(model, [m for r in rows for m in r.members], run)))}
    found: dict[str, list[PlanRow]] = {}
    for row in rows:
        found.setdefault(_kind(row), []).append(row)
    return sorted(found.values(), key=lambda alike: min(order.get(m, 1) for r in alike for m in r.members))
