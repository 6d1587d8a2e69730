"""`Stat`: what one pass over a layer's inputs leaves behind. Streaming, mergeable, constant memory."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import torch
from torch import Tensor

from dq.qtensor import check_finite
from dq.registry import DQError, suggest


def _ranks(x: Tensor) -> Tensor:
    """Ranks from 0, ties averaged, float64."""
    x = x.to(torch.float64)
    _, inverse, counts = torch.unique(x, return_inverse=True, return_counts=True)
    ends = counts.cumsum(0).to(torch.float64)
    return (ends - (counts.to(torch.float64) + 1) / 2)[inverse]


def spearman(a: Tensor, b: Tensor) -> float:
    """Rank correlation of two vectors; 0 if one of them is constant."""
    ra, rb = _ranks(a.cpu()), _ranks(b.cpu())
    ra, rb = ra - ra.mean(), rb - rb.mean()
    norm = float(ra.norm() * rb.norm())
    return float(ra @ rb) / norm if norm > 0 else 0.0


@dataclass
class Stat:
    """Statistics of inputs [tokens, K] of one group of linears, separate per stratum until the end.

    Attributes:
        width: K.
        capacity: rows of the sample that is kept.
        absmax: stratum -> float32 [K], max over tokens of |x_k|.
        total: stratum -> float32 [K], sum over tokens of |x_k|.
        count: stratum -> number of tokens.
        low: float32 [K], min over tokens of x_k; None before the first.
        name: what error messages call this input.
        want_gram: whether E[x x^T] is collected, K x K numbers on the device of the inputs.
    """

    width: int
    capacity: int = 512
    seed: int = 0
    name: str = "input"
    want_gram: bool = False
    absmax: dict[str, Tensor] = field(default_factory=dict)
    total: dict[str, Tensor] = field(default_factory=dict)
    count: dict[str, int] = field(default_factory=dict)
    low: Tensor | None = None

    def __post_init__(self):
        self._seen, self._held = _Reservoir(self.width, self.capacity, self.seed), None
        self._gram: Tensor | None = None
        self._moment, self._mass = torch.zeros(self.width), 0.0

    def update(self, x: Tensor, stratum: str = "0/single", *, weight: float = 1.0, held_out: bool = False) -> None:
        """Adds inputs [..., K].

        Args:
            weight: how much errors on them count: in `gram`, `center`, and in how often they are sampled.
            held_out: they go into a sample of their own and into nothing else.

        Raises:
            DQError: wrong width, or NaN/Inf (names the layer and the stratum).
        """
        if x.shape[-1] != self.width:
            raise DQError(f"{self.name}: expected inputs of width {self.width}, got {tuple(x.shape)}")
        x = x.detach().reshape(-1, self.width).to(torch.float32)
        if not len(x):
            return
        what = f"{self.name}: a calibration input (stratum {stratum})"
        if held_out:
            check_finite(x, what)
            self._held = self._held or _Reservoir(self.width, self.capacity, self.seed + 1)
            return self._held.add(x, weight)
        a = x.abs()
        found = torch.stack([a.amax(0), a.sum(0), x.amin(0), x.sum(0)]).cpu()  # at once: a GPU is waited for
        if not torch.isfinite(found).all():
            check_finite(x, what)
        top, total, low, moment = found.unbind()
        self._merge(stratum, top, total, len(x))
        self.low = low if self.low is None else torch.minimum(self.low, low)
        self._moment += weight * moment
        self._mass += weight * len(x)
        if self.want_gram:
            gram = (x.T @ x).mul_(weight)
            self._gram = gram if self._gram is None else self._gram.add_(gram)
        self._seen.add(x, weight)

    def _merge(self, stratum: str, top: Tensor, total: Tensor, count: int) -> None:
        mine = self.absmax.get(stratum)
        self.absmax[stratum] = top if mine is None else torch.maximum(mine, top)
        self.total[stratum] = self.total.get(stratum, 0) + total
        self.count[stratum] = self.count.get(stratum, 0) + count

    @property
    def rows(self) -> Tensor:
        """float32 [at most capacity, K]: a uniform sample of the inputs."""
        return self._seen.rows

    @property
    def held_rows(self) -> Tensor:
        """As `rows`, of the inputs held out; the ordinary sample if none was."""
        return (self._held or self._seen).rows

    def gram(self) -> Tensor | None:
        """float32 [K, K]: E[x x^T] over all tokens, by weight; None unless it was asked for."""
        return None if self._gram is None else self._gram / self._mass

    def mean(self) -> Tensor:
        """float32 [K]: E|x_k| over all tokens."""
        return torch.stack(list(self.total.values())).sum(0) / sum(self.count.values())

    def center(self) -> Tensor:
        """float32 [K]: E[x_k] over all tokens, by weight."""
        return self._moment / self._mass

    def amax(self, merge: str = "max", *, guidance: float = 1.0, weight: Tensor | None = None) -> Tensor:
        """float32 [K]: the per-stratum maxima a_s merged into one.

        Args:
            merge: `max` over strata; `mean`; `cfg`: mean weighted by how guidance g amplifies a branch's error, g^2 for
                cond, (g - 1)^2 for uncond, 1 for single; `spearman`: PTQ4DiT's mean with weights softmax(-rho_s), rho_s
                the rank correlation of a_s with the weight's column maxima (arXiv 2405.16005, section 4.2).
            guidance: g, for `cfg`.
            weight: w [K] = max over rows of |W|, for `spearman`.

        Raises:
            DQError: no input was seen, an unknown merge, or a missing argument.
        """
        if not self.absmax:
            raise DQError(f"{self.name}: no calibration input reached this layer; give records that run it or skip it")
        tops = torch.stack(list(self.absmax.values()))
        if merge == "max":
            return tops.amax(0)
        shares = torch.tensor(self._shares(merge, tops, guidance, weight), dtype=tops.dtype)
        return (tops * (shares / shares.sum())[:, None]).sum(0)

    def _shares(self, merge: str, tops: Tensor, guidance: float, weight: Tensor | None) -> list[float]:
        """Unnormalised weight of every stratum."""
        if merge == "mean":
            return [1.0] * len(tops)
        if merge == "cfg":
            shares = [amplified(s.rpartition("/")[2], guidance) for s in self.absmax]
            return shares if sum(shares) > 0 else [1.0] * len(tops)
        if merge == "spearman":
            if weight is None:
                raise DQError("the merge spearman needs the weight's column maxima")
            return [math.exp(-spearman(top, weight)) for top in tops]
        raise DQError(f"unknown merge {merge!r}{suggest(merge, ('max', 'mean', 'cfg', 'spearman'))}")

    def merge(self, other: Stat) -> Stat:
        """Adds what `other` saw."""
        for stratum, top in other.absmax.items():
            self._merge(stratum, top, other.total[stratum], other.count[stratum])
        if other.low is not None:
            self.low = other.low if self.low is None else torch.minimum(self.low, other.low)
        self._moment, self._mass = self._moment + other._moment, self._mass + other._mass
        if other._gram is not None:
            self._gram = other._gram if self._gram is None else self._gram + other._gram
        self._seen.merge(other._seen)
        if other._held is not None:
            self._held = self._held or _Reservoir(self.width, self.capacity, self.seed + 1)
            self._held.merge(other._held)
        return self


class _Reservoir:
    """A sample of all rows seen, mergeable by construction: the rows with the largest keys `u^(1 / weight)`, u uniform.

    Source: Efraimidis and Spirakis, "Weighted random sampling with a reservoir" (2006).
    """

    def __init__(self, width: int, capacity: int, seed: int):
        self.capacity, self._rng = capacity, torch.Generator().manual_seed(seed)
        self.keys, self.rows = torch.empty(0), torch.empty(0, width)

    def add(self, x: Tensor, weight: float) -> None:
        u = torch.rand(len(x), generator=self._rng)
        keys = torch.cat([self.keys, u.log() / max(weight, 1e-12)])  # by the logarithm: the same order
        top = keys.topk(min(self.capacity, len(keys))).indices.sort().values
        old = top[top < len(self.keys)]
        new = top[top >= len(self.keys)] - len(self.keys)
        self.rows = torch.cat([self.rows[old], x[new.to(x.device)].cpu()])
        self.keys = keys[top]

    def merge(self, other: _Reservoir) -> None:
        keys, rows = torch.cat([self.keys, other.keys]), torch.cat([self.rows, other.rows])
        top = keys.topk(min(self.capacity, len(keys))).indices
        self.keys, self.rows = keys[top], rows[top]


def amplified(branch: str, guidance: float) -> float:
    """Weight of a branch's squared error under guidance g: `pred = g c - (g - 1) u` (arXiv 2207.12598)."""
    return {"cond": guidance**2, "uncond": (guidance - 1.0) ** 2}.get(branch, 1.0)
