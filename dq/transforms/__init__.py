"""Function-preserving rewrites of a group of linears, one file each.

With row vectors, a transform multiplies the input by an invertible A: `x' = x A`, `W' = W A^-T`, so `x' W'^T = x W^T`.
Some also move a part of the weight into a 16-bit side branch on the raw x. The invariant, tested once for all of them
in float64: `pre(x) @ W'.T + side(x) + b' == x @ W.T + b`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from dq.qtensor import fake_quantize
from dq.registry import DQError, Registry
from dq.scales import find_rule
from dq.spec import QuantSpec
from dq.stats import Stat


@dataclass(frozen=True)
class Transform:
    """A named rewrite.

    Attributes:
        name: registry key; also names the input step that it leaves behind.
        fit: `(state, **params) -> None`, edits a `GroupState` in place.
        apply: `(x, tensors, params) -> x A`, or None if the transform leaves the input alone.
        weight: `(w, tensors, params) -> w A^-T`: raw basis -> transformed basis.
        unweight: the inverse of `weight`.
        buffers: `(K, params) -> {key: shape}` of the float32 tensors that `apply` needs at run time.
        order: place in the fixed order of composition (shift 0, diagonal 1, permutation 2, rotation 3, low rank 4).
        needs_stats: whether `fit` cannot work without calibration.
        check: `(params) -> complaint`, "" if `fit` can work with values of the right types. Asked when a recipe is
            made, long before any work.
    """

    name: str
    fit: Callable[..., None]
    order: int
    apply: Callable[[Tensor, dict, dict], Tensor] | None = None
    weight: Callable[[Tensor, dict, dict], Tensor] | None = None
    unweight: Callable[[Tensor, dict, dict], Tensor] | None = None
    buffers: Callable[[int, dict], dict[str, tuple[int, ...]]] | None = None
    needs_stats: bool = False
    check: Callable[[dict], str] = lambda params: ""


TRANSFORMS: Registry[Transform] = Registry("transform", "dq.transforms")


@dataclass
class Step:
    """One input step of a quantized linear: which transform, its run-time tensors and its parameters."""

    name: str
    tensors: dict[str, Tensor] = field(default_factory=dict)
    params: dict[str, Any] = field(default_factory=dict)

    def apply(self, x: Tensor) -> Tensor:
        return TRANSFORMS.get(self.name).apply(x, self.tensors, self.params)

    def __str__(self) -> str:
        return self.name + "".join(f" {v}" for v in self.params.values())


def apply_steps(x: Tensor, steps: list[Step]) -> Tensor:
    """`pre(x)`: x through all input steps, in order."""
    for step in steps:
        x = step.apply(x)
    return x


@dataclass
class GroupState:
    """One plan row while it is being transformed.

    Attributes:
        weights: linear -> current W' [N, K] in the working dtype (float32; tests use float64).
        inputs: tuples of linears that receive the same input.
        stats: first linear of each input tuple -> its `Stat`; empty without calibration.
        lowrank: tuples of linears that share a down factor.
        k_parts: widths of the parts of a concatenated input; (K,) if it is one piece.
        weight_spec, act_spec: what the group will be rounded to.
        rank: rank that a later low-rank transform will take, so that a smoothing search can count with it.
        steps: input steps so far.
        side: linear -> (down [r, K], up [N, r]) on the raw x.
        side_dtype: dtype in which the side factors rest.
    """

    weights: dict[str, Tensor]
    inputs: tuple[tuple[str, ...], ...]
    weight_spec: QuantSpec
    act_spec: QuantSpec | None = None
    stats: dict[str, Stat] = field(default_factory=dict)
    lowrank: tuple[tuple[str, ...], ...] = ()
    k_parts: tuple[int, ...] = ()
    rank: int = 0
    steps: list[Step] = field(default_factory=list)
    side: dict[str, tuple[Tensor, Tensor]] = field(default_factory=dict)
    side_dtype: torch.dtype = torch.bfloat16

    @property
    def width(self) -> int:
        return next(iter(self.weights.values())).shape[1]

    def add(self, step: Step) -> None:
        """Appends an input step and moves all weights into its basis."""
        kind = TRANSFORMS.get(step.name)
        self.steps.append(step)
        self.weights = {n: kind.weight(w, step.tensors, step.params) for n, w in self.weights.items()}

    def to_basis(self, w: Tensor) -> Tensor:
        """A raw-basis weight [N, K] in the basis of the transformed input."""
        for step in self.steps:
            w = TRANSFORMS.get(step.name).weight(w, step.tensors, step.params)
        return w

    def from_basis(self, w: Tensor) -> Tensor:
        """The inverse of `to_basis`."""
        for step in reversed(self.steps):
            w = TRANSFORMS.get(step.name).unweight(w, step.tensors, step.params)
        return w

    def rows(self, name: str, limit: int | None = None) -> Tensor | None:
        """Sample of the transformed input that `name` receives, [n, K], or None without calibration."""
        first = next(i[0] for i in self.inputs if name in i)
        if first not in self.stats:
            return None
        raw = self.stats[first].rows[:limit].to(self.weights[name])
        return apply_steps(raw, self.steps)

    def require_stats(self, who: str) -> None:
        if not self.stats:
            raise DQError(
                f"{who} needs calibration: pass calibration=dq.Prompts([...]) (layer {next(iter(self.weights))})"
            )


def fake(x: Tensor, spec: QuantSpec | None) -> Tensor:
    """x rounded to the grid of `spec` and back, in the dtype of x; x itself if spec is None."""
    return x if spec is None else fake_quantize(x, spec).to(x)


def round_weight(w: Tensor, spec: QuantSpec) -> Tensor:
    """RTN there and back, in the dtype of w; `fake_quantize` gives what `quantize(w).dequantize()` gives.

    A weighted scale rule is stood in for by its unweighted one: a search only compares candidates.
    """
    rule = find_rule(spec)
    if rule.needs:
        spec = spec.with_(scale_rule=rule.plain, rule_params=())
    return fake_quantize(w, spec).to(w)
