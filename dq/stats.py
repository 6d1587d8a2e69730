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
        name: what error messages call this input.
    """

    width: int
    capacity: int = 512
    seed: int = 0
    name: str = "input"
    absmax: dict[str, Tensor] = field(default_factory=dict)
    total: dict[str, Tensor] = field(default_factory=dict)
    count: dict[str, int] = field(default_factory=dict)

    def __post_init__(self):
        self._rng = torch.Generator().manual_seed(self.seed)
        self._keys, self._rows = torch.empty(0), torch.empty(0, self.width)

    def update(self, x: Tensor, stratum: str = "0/single") -> None:
        """Adds inputs [..., K].

        Raises:
            DQError: wrong width, or NaN/Inf (names the layer and the stratum).
        """
        if x.shape[-1] != self.width:
            raise DQError(f"{self.name}: expected inputs of width {self.width}, got {tuple(x.shape)}")
        x = x.detach().reshape(-1, self.width).to(torch.float32)
        if not len(x):
            return
        check_finite(x, f"{self.name}: a calibration input (stratum {stratum})")
        a = x.abs()
        top, total = a.amax(0).cpu(), a.sum(0).cpu()
        if stratum in self.absmax:
            self.absmax[stratum] = torch.maximum(self.absmax[stratum], top)
            self.total[stratum] += total
            self.count[stratum] += len(x)
        else:
            self.absmax[stratum], self.total[stratum], self.count[stratum] = top, total, len(x)
        self._sample(x)

    def _sample(self, x: Tensor) -> None:
        """Keeps the rows with the largest random keys: a uniform sample of all rows seen, mergeable by construction."""
        keys = torch.cat([self._keys, torch.rand(len(x), generator=self._rng)])
        top = keys.topk(min(self.capacity, len(keys))).indices.sort().values
        old = top[top < len(self._keys)]
        new = top[top >= len(self._keys)] - len(self._keys)
        self._rows = torch.cat([self._rows[old], x[new.to(x.device)].cpu()])
        self._keys = keys[top]

    @property
    def rows(self) -> Tensor:
        """float32 [at most capacity, K]: a uniform sample of the inputs."""
        return self._rows

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
            branch = {"cond": guidance**2, "uncond": (guidance - 1.0) ** 2, "single": 1.0}
            shares = [branch[s.rpartition("/")[2]] for s in self.absmax]
            return shares if sum(shares) > 0 else [1.0] * len(tops)
        if merge == "spearman":
            if weight is None:
                raise DQError("the merge spearman needs the weight's column maxima")
            return [math.exp(-spearman(top, weight)) for top in tops]
        raise DQError(f"unknown merge {merge!r}{suggest(merge, ('max', 'mean', 'cfg', 'spearman'))}")

    def merge(self, other: Stat) -> Stat:
        """Adds what `other` saw."""
        for stratum, top in other.absmax.items():
            mine = self.absmax.get(stratum)
            self.absmax[stratum] = top if mine is None else torch.maximum(mine, top)
            self.total[stratum] = self.total.get(stratum, 0) + other.total[stratum]
            self.count[stratum] = self.count.get(stratum, 0) + other.count[stratum]
        keys, rows = torch.cat([self._keys, other._keys]), torch.cat([self._rows, other._rows])
        top = keys.topk(min(self.capacity, len(keys))).indices
        self._keys, self._rows = keys[top], rows[top]
        return self
