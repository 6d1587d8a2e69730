"""Function-preserving rewrites of a group of linears, one file each.

With row vectors, a transform multiplies the input by an invertible A: `x' = x A`, `W' = W A^-T`, so `x' W'^T = x W^T`.
Some also move a part of the weight into a 16-bit side branch on the raw x. The invariant, tested once for all of them
in float64: `pre(x) @ W'.T + side(x) + b' == x @ W.T + b`, `b' = b - W' pre(0)` (0 but where the input is shifted).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor

from dq.columns import with_residual
from dq.qtensor import fake_quantize
from dq.registry import DQError, Registry
from dq.scales import find_rule
from dq.spec import QuantSpec
from dq.stats import Stat


class Planned(NamedTuple):
    """What a transform will leave behind, known before any work: input steps (name, params), rank of its side branch,
    residual channels S, whether they are dual, and what is not as it was asked for."""

    steps: tuple[tuple[str, dict[str, Any]], ...] = ()
    rank: int = 0
    residual: int = 0
    dual: bool = False
    remark: str = ""


@dataclass(frozen=True)
class Transform:
    """A named rewrite.

    Attributes:
        name: registry key; also names the input step that it leaves behind.
        fit: `(state, **params) -> None`, edits a `GroupState` in place.
        apply: `(x, tensors, params) -> x A`, or None if the transform leaves the input alone.
        weight: `(w, tensors, params) -> w A^-T`: raw basis -> transformed basis.
        unweight: the inverse of `weight`.
        buffers: `(K, params) -> {key: shape}` of the float32 tensors that `apply` needs at run time; `(shape, dtype)`
            in place of a shape for another dtype.
        order: place in the fixed order of composition (shift 0, diagonal 1, permutation 2, rotation 3, low rank 4).
        needs_stats: whether `fit` cannot work without calibration: a bool, or `(params) -> bool`.
        needs_gram: `(params) -> bool`: whether `fit` wants E[x x^T] beside maxima and a sample.
        planned: `((N, K), parts of K, params, name) -> Planned`; default: one step of this name without parameters.
        check: `(params) -> complaint`, "" if `fit` can work with values of the right types. Asked when a recipe is
            made, long before any work.
        grids: `(params, weights, activations) -> complaint`, "" if it goes with these grids (None: 16 bits). As early.
    """

    name: str
    fit: Callable[..., None]
    order: int
    apply: Callable[[Tensor, dict, dict], Tensor] | None = None
    weight: Callable[[Tensor, dict, dict], Tensor] | None = None
    unweight: Callable[[Tensor, dict, dict], Tensor] | None = None
    buffers: Callable[[int, dict], dict[str, Any]] | None = None
    needs_stats: bool | Callable[[dict], bool] = False
    needs_gram: Callable[[dict], bool] = lambda params: False
    planned: Callable[[tuple[int, int], tuple[int, ...], dict, str], Planned] | None = None
    check: Callable[[dict], str] = lambda params: ""
    grids: Callable[[dict, QuantSpec, QuantSpec | None], str] = lambda params, weights, activations: ""

    def calibrated(self, params: dict) -> bool:
        """Whether `fit` cannot work without calibration with these parameters."""
        return self.needs_stats(params) if callable(self.needs_stats) else self.needs_stats

    def plan(self, shape: tuple[int, int], parts: tuple[int, ...], params: dict, name: str = "it") -> Planned:
        """What the transform will leave behind on a linear [N, K]; refuses what could not be fitted."""
        return self.planned(shape, parts, params, name) if self.planned else Planned(((self.name, {}),))

    def tensors(self, width: int, params: dict) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
        """`buffers` with dtypes: key -> (shape, dtype)."""
        found = self.buffers(width, params) if self.buffers else {}
        return {k: v if v and isinstance(v[0], tuple) else (v, torch.float32) for k, v in found.items()}


def idle_word(params: dict, beside: dict[str, tuple[str, Any]]) -> str:
    """Complaint about a word that says something only beside another one and stands without it; "" if there is none.

    Args:
        beside: word -> (the other word, the value that it must have; a flag that is not given is False).
    """
    for word, (other, value) in beside.items():
        if word in params and params.get(other, False) != value:
            shown = str(value).lower() if isinstance(value, bool) else repr(value)
            return f"{word} is used only with {other} = {shown}: leave it out, or say {other}"
    return ""


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
        residual: S > 0: the last S channels of the transformed input are carried twice, as codes and as the codes of
            what those left over.
        dual: the weight columns of these channels are, too.
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
    residual: int = 0
    dual: bool = False
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

    def stat(self, name: str) -> Stat | None:
        """Statistics of the raw input that `name` receives, or None without calibration."""
        return self.stats.get(next(i[0] for i in self.inputs if name in i))

    def rows(self, name: str, limit: int | None = None) -> Tensor | None:
        """Sample of the transformed input that `name` receives, [n, K], or None without calibration."""
        stat = self.stat(name)
        return None if stat is None else apply_steps(stat.rows[:limit].to(self.weights[name]), self.steps)

    def hessian(self, name: str) -> Tensor | None:
        """E[x' x'^T] [K, K] of the transformed input that `name` receives; None if it was not collected.

        With `x' = x A + b`: `A^T H A + m'^T b + b^T m' + b^T b`, H = E[x x^T] and m' = E[x] A.
        """
        stat = self.stat(name)
        gram = None if stat is None else stat.gram()
        if gram is None:
            return None
        gram = gram.to(self.weights[name])
        base = apply_steps(gram.new_zeros(1, gram.shape[0]), self.steps)
        moved = apply_steps(apply_steps(gram, self.steps).sub_(base).T, self.steps).sub_(base)
        if base.any():
            mean = apply_steps(stat.center().to(gram)[None], self.steps) - base
            moved = moved + mean.T @ base + base.T @ mean + base.T @ base
        return moved

    def mean(self, name: str) -> Tensor | None:
        """E[x'] [K] of the transformed input that `name` receives; None without calibration."""
        stat = self.stat(name)
        return None if stat is None else apply_steps(stat.center().to(self.weights[name])[None], self.steps)[0]

    def executed(self, x: Tensor) -> Tensor:
        """What the activation grid, residual channels included, makes of the transformed input x' [n, K]."""
        q = fake(x, self.act_spec)
        if not self.residual or self.act_spec is None:
            return q
        return torch.cat([q[:, : -self.residual], with_residual(x, q, self.act_spec, self.residual).to(x)], 1)

    def activation_error(self, name: str, limit: int = 512) -> tuple[Tensor, Tensor] | None:
        """(gain, noise), each [K]: the executed input modelled as `gain * x' + e`, E[e^2] = noise, from the sample.

        Least squares per channel: `gain = E[x q] / E[x^2]`, `noise = E[q^2] - gain^2 E[x^2]`.
        """
        x = self.rows(name, limit)
        if x is None or self.act_spec is None:
            return None
        q = self.executed(x)
        power = x.square().mean(0)
        gain = torch.where(power > 0, (x * q).mean(0) / power.clamp(min=torch.finfo(x.dtype).tiny), 1.0)
        return gain, (q.square().mean(0) - gain.square() * power).clamp(min=0.0)

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
