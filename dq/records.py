"""Calibration records and the sampler that keeps a constant number of them, stratified over step bins x CFG branch."""

from __future__ import annotations

import hashlib
import heapq
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from dq.checks import line
from dq.registry import DQError

BRANCHES = ("single", "cond", "uncond")


@dataclass
class Record:
    """One call of a denoiser (or of a language model) during calibration.

    Attributes:
        args, kwargs: what the model was called with; tensors rest on the CPU.
        prompt: index of the prompt (of the first one for a batch).
        step, steps: index of the denoising step and how many there are.
        timestep: the value the model saw for that step (its own unit), NaN if it has none.
        branch: `single` (no CFG), `cond` or `uncond`; a doubled batch is split into one record per branch.
        denoiser: name of the pipeline component that was called.
        weight: how much errors on this call count, relative to the other records.
    """

    args: tuple
    kwargs: dict[str, Any]
    prompt: int = 0
    step: int = 0
    steps: int = 1
    timestep: float = float("nan")
    branch: str = "single"
    denoiser: str = "model"
    weight: float = 1.0

    def stratum(self, bins: int) -> str:
        """`"<step bin>/<branch>"`; bin b of B covers the steps with floor(step * B / steps) == b."""
        return f"{min(self.step * bins // max(self.steps, 1), bins - 1)}/{self.branch}"


def map_tensors(tree: Any, fn: Callable[[Tensor], Any]) -> Any:
    """`fn` over every tensor in nested tuples, lists and dicts; other leaves are kept."""
    if isinstance(tree, Tensor):
        return fn(tree)
    if isinstance(tree, tuple) and hasattr(tree, "_fields"):
        return type(tree)(*(map_tensors(t, fn) for t in tree))
    if isinstance(tree, (tuple, list)):
        return type(tree)(map_tensors(t, fn) for t in tree)
    if isinstance(tree, dict):
        mapped = {k: map_tensors(v, fn) for k, v in tree.items()}
        return mapped if type(tree) is dict else type(tree)(**mapped)
    return tree


def tensors(tree: Any) -> list[Tensor]:
    """Every tensor in a nested structure, in order."""
    found: list[Tensor] = []
    map_tensors(tree, lambda t: (found.append(t), t)[1])
    return found


def outputs(tree: Any, device: torch.device | str = "cpu") -> list[Tensor]:
    """The floating-point tensors that a model returned, in float32."""
    tree = tree.to_tuple() if hasattr(tree, "to_tuple") else tree
    return [t.detach().to(device, torch.float32) for t in tensors(tree) if t.is_floating_point()]


def relative_error(value: Tensor, reference: Tensor) -> float:
    """`sum |v - r|^2 / sum |r|^2` in float64, on the device of `value` and in pieces: logits may take 100 MB."""
    piece, lost, power = 1 << (16 if value.device.type == "cpu" else 26), [], []
    for v, r in zip(value.flatten().split(piece), reference.flatten().split(piece), strict=True):
        r = r.to(v.device).double()
        lost.append((v.double() - r).square().sum())
        power.append(r.square().sum())
    return float(torch.stack(lost).sum() / torch.stack(power).sum().clamp(min=1e-30))


def to_cpu(tree: Any) -> Any:
    """Detached copies on the CPU (copies, so that later in-place edits by a pipeline do not reach the record)."""
    return map_tensors(tree, lambda t: t.detach().to("cpu", copy=True))


@contextmanager
def running(index: int, model: nn.Module) -> Iterator[None]:
    """Inside, record `index` runs through the model: what its code raises comes out as a DQError with that number.

    Raises:
        DQError: as said; those raised inside, and running out of memory, pass as they are.
    """
    try:
        yield
    except (DQError, torch.OutOfMemoryError):
        raise
    except (RuntimeError, TypeError, ValueError, LookupError, AttributeError) as error:
        what = f"calibration record {index} does not run through {type(model).__name__}"
        raise DQError(f"{what}, check shapes and dtypes: {line(error)}") from error


def digest(tree: Any) -> str:
    """SHA-256 over a nested structure with records, or over a model: every tensor's shape, dtype and bytes, and the
    names and plain values around them. Tells whether a resumed or repeated run sees the same."""
    total = hashlib.sha256()

    def add(item: Any) -> None:
        total.update(f"{type(item).__name__} ".encode())
        if isinstance(item, Tensor):
            total.update(f"{tuple(item.shape)} {item.dtype} ".encode())
            flat = item.detach().cpu().reshape(-1).clone(memory_format=torch.contiguous_format)  # one that was expanded
            total.update(flat.view(torch.uint8).numpy())
        elif isinstance(item, nn.Module):
            add(dict(item.named_parameters()) | dict(item.named_buffers()))
        elif isinstance(item, Record):
            add((item.args, item.kwargs, item.prompt, item.step, item.steps, item.branch, item.weight))
        elif isinstance(item, dict | list | tuple):
            for part in item.items() if isinstance(item, dict) else item:
                add(part)
        elif isinstance(item, str | int | float | None):
            total.update(f"{item!r} ".encode())

    add(tree)
    return total.hexdigest()


@dataclass
class RecordSampler:
    """A reservoir of at most `capacity` records, shared evenly by the strata seen so far.

    Every offered record draws a random key; each stratum keeps its `capacity // strata` smallest keys. That is uniform
    sampling without replacement inside a stratum, needs no knowledge of how many records will come, and holds memory
    constant in the number of prompts. Tensors are copied only for records that are kept.
    """

    capacity: int = 64
    bins: int = 4
    seed: int = 0
    seen: Counter = field(default_factory=Counter)
    _kept: dict[str, list] = field(default_factory=dict)

    def __post_init__(self):
        if self.capacity < 1 or self.bins < 1:
            raise DQError(f"a sampler needs capacity and bins of at least 1, got {self.capacity} and {self.bins}")
        self._rng = torch.Generator().manual_seed(self.seed)

    def offer(self, record: Record) -> bool:
        """Keeps a copy of the record if the draw says so; returns whether it was kept."""
        stratum, key = record.stratum(self.bins), float(torch.rand((), generator=self._rng))
        self.seen[stratum] += 1
        if stratum not in self._kept:
            self._kept[stratum] = []
            for heap in self._kept.values():
                while len(heap) > self.quota:
                    heapq.heappop(heap)
        heap = self._kept[stratum]
        if len(heap) >= self.quota and -key <= heap[0][0]:
            return False
        record.args, record.kwargs = to_cpu(record.args), to_cpu(record.kwargs)
        item = (-key, sum(self.seen.values()), record)
        heapq.heappush(heap, item)
        if len(heap) > self.quota:
            heapq.heappop(heap)
        if sum(map(len, self._kept.values())) > self.capacity:  # more strata than records: the smallest keys of all
            heapq.heappop(min((h for h in self._kept.values() if h), key=lambda h: h[0][0]))
        return any(kept is item for kept in heap)

    @property
    def quota(self) -> int:
        """Records each stratum may hold now."""
        return max(1, self.capacity // max(1, len(self._kept)))

    def records(self) -> list[Record]:
        """The kept records in the order they were offered."""
        return [item[2] for item in sorted((i for heap in self._kept.values() for i in heap), key=lambda i: i[1])]

    def summary(self) -> dict[str, Any]:
        """JSON-clean account for the artifact: seen and kept per stratum."""
        kept = {s: len(h) for s, h in sorted(self._kept.items())}
        return {"bins": self.bins, "seen": dict(sorted(self.seen.items())), "kept": kept, "seed": self.seed}
