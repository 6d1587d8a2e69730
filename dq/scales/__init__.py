"""Scale rules: how the scale of a block is chosen, one file per kind, discovered here.

A rule is a function `(blocks, **params) -> scales [R, G]`: float32 values that the scale's storage format holds
exactly. It composes with every format and granularity, because all of them come as `Blocks`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from dq.profiles import convention
from dq.registry import DQError
from dq.spec import FORMATS, SCALE_RULES, QuantSpec

SHORT = 64  # elements of a block that is summed pair by pair
_TINY = torch.finfo(torch.float32).tiny
RANGE = {
    "fp32": (_TINY, torch.finfo(torch.float32).max),
    "fp16": (2.0**-24, 65504.0),
    "bf16": (_TINY, torch.finfo(torch.bfloat16).max),
    "fp8_e4m3": (2.0**-9, 448.0),
    "e8m0": (2.0**-127, 2.0**127),
    "int8_double": (_TINY, torch.finfo(torch.float32).max),
}


def amax(x: Tensor) -> Tensor:
    """max |x| over the last axis; 0 for an empty axis."""
    if not x.shape[-1]:
        return x.new_zeros(x.shape[:-1])
    return torch.maximum(x.amax(-1), -x.amin(-1))  # no copy of |x|


def divide(x: Tensor, number: float) -> Tensor:
    """x / number, correctly rounded on every device.

    By a Python number torch divides on CUDA through its reciprocal: codes at ties would differ between devices.
    """
    return x / torch.full_like(x, number)


def tree_sum(x: Tensor) -> Tensor:
    """Sum over the last axis; short blocks by neighbouring pairs: the same bits on every device and in every kernel."""
    size = x.shape[-1]
    if not size or size > SHORT or size & (size - 1):
        return x.sum(-1)
    while x.shape[-1] > 1:
        x = x[..., 0::2] + x[..., 1::2]
    return x[..., 0]


def rounded(x: Tensor, dtype: torch.dtype) -> Tensor:
    """float32 values rounded to what a 16-bit dtype holds: the result of arithmetic in that dtype."""
    return x if dtype.itemsize > 2 else x.to(dtype).to(torch.float32)


def step_of(scale: Tensor, unit: Tensor | None, spec: QuantSpec) -> Tensor:
    """What one code step is worth, from a block scale and the second level as it is stored."""
    if unit is None:
        return scale
    return scale / unit if convention(spec).levels == "inverse" else scale * unit


def ceil_log2(a: Tensor) -> Tensor:
    """ceil(log2 a) for float32 a > 0, exactly; int32."""
    mantissa, exponent = torch.frexp(a)
    return torch.where(mantissa == 0.5, exponent - 1, exponent)


def power(k: Tensor) -> Tensor:
    """2^k as float32, k clamped to [-127, 127]."""
    return torch.ldexp(torch.ones_like(k, dtype=torch.float32), k.clamp(-127, 127))


def storable(scale: Tensor, spec: QuantSpec) -> Tensor:
    """The nearest scale that the storage format holds, as float32; clamped into its range, never infinite.

    Of E8M0 it is the next one above, so that nothing is clipped (DeepSeek's UE8M0). Never 0 either, unless the spec's
    profile says so; `choose_scale` replaces such a scale.
    """
    smallest, high = RANGE[spec.scale_format]
    low = convention(spec).low
    scale = scale.clamp(smallest if low is None else low, high)
    if spec.scale_format in ("fp16", "bf16", "fp8_e4m3"):
        return scale.to(spec.scale_dtype).to(torch.float32)
    return power(ceil_log2(scale)) if spec.scale_format == "e8m0" else scale


@dataclass(frozen=True)
class Blocks:
    """What a rule sees.

    Attributes:
        x: float32 [R, G, E]; one scale per [R, G].
        spec: the grid.
        unit: second-level scale as it is stored, broadcastable to [R, G]; ones without a second level.
        importance: E[x_k^2] of the input that each element meets, broadcastable to [R, G, E], or None.
        hessian: E[x x^T] within each group, [G, E, E], or None.
        dtype: dtype in which scales are computed: float32, or the tensor's own where the profile says so.
    """

    x: Tensor
    spec: QuantSpec
    unit: Tensor
    importance: Tensor | None = None
    hessian: Tensor | None = None
    dtype: torch.dtype = torch.float32

    def absmax(self) -> Tensor:
        """[R, G]: the scale at which the largest value of a block lands on the largest code, see `reaching`."""
        return self.reaching(amax(self.x), self.spec.fmt.divisor)

    def reaching(self, top: Tensor, divisor: float) -> Tensor:
        """[R, G]: `top / divisor / unit` in the profile's order of operations, not yet rounded to its storage."""
        levels = convention(self.spec).levels
        if levels == "joint":
            return top / (self.unit * divisor)
        scale = rounded(divide(top, divisor), self.dtype)
        return self.unit * scale if levels == "inverse" else scale / self.unit

    def round(self, scale: Tensor, target: str = "native") -> Tensor:
        """x as it comes out at these scales. `e4m3`: as a GEMM on FP8 tensor cores multiplies it, every product
        `element * scale` rounded to E4M3 (a power of two in front keeps the largest, 6 * 448, inside its range)."""
        step = step_of(scale, self.unit, self.spec)[..., None]
        values = self.spec.fmt.round(self.x / step)
        if target == "native":
            return values.mul_(step)
        executed = FORMATS.get("fp8_e4m3").round(values.mul_((scale / 8)[..., None]))
        return executed.mul_(step_of(torch.full_like(scale[:1, :1], 8.0), self.unit, self.spec)[..., None])

    def error(self, scale: Tensor, norm: float = 2.0, target: str = "native", weight: str = "none") -> Tensor:
        """[R, G]: sum over the block of `w_k |x_k - x^_k|^norm`; `hessian` takes `d^T H d` instead.

        Args:
            weight: `none`, `importance` or `hessian`.

        Raises:
            DQError: the rule needs importances or Hessians and there are none.
        """
        delta = self.round(scale, target).sub_(self.x)
        if weight == "hessian":
            return self.through_hessian(delta)
        power = delta.square_() if norm == 2.0 else delta.abs_().pow_(norm)
        if weight == "importance":
            power = power.mul_(self._need("importance"))
        return tree_sum(power)

    def through_hessian(self, delta: Tensor) -> Tensor:
        """[R, G]: `d^T H d` of differences d [R, G, E].

        Raises:
            DQError: there is no Hessian.
        """
        return torch.einsum("rge,gef,rgf->rg", delta, self._need("hessian"), delta)

    def _need(self, what: str) -> Tensor:
        value = getattr(self, what)
        if value is None:
            raise DQError(f"scale rule {self.spec.scale_rule!r} needs {what} from calibration; pass it or take 'sweep'")
        return value

    def split(self) -> Iterator[Blocks]:
        """Runs of rows: what fits a CPU's cache, for searches pass over a block many times; else what bounds memory."""
        elements = 1 << (18 if self.x.device.type == "cpu" else 26)
        rows = max(1, elements // max(1, self.x.shape[1] * self.x.shape[2]))
        for start in range(0, len(self.x), rows):
            part = slice(start, start + rows)
            x = self.x[part]
            if x.shape[2] <= SHORT:  # same view, another order in memory: scales then broadcast along long inner loops
                x = x.permute(2, 0, 1).contiguous().permute(1, 2, 0)
            unit = self.unit[part] if self.unit.dim() and len(self.unit) == len(self.x) > 1 else self.unit
            importance = self.importance
            if importance is not None and len(importance) == len(self.x) > 1:
                importance = importance[part]
            yield replace(self, x=x, unit=unit, importance=importance)


@dataclass(frozen=True)
class ScaleRule:
    """A named rule.

    Attributes:
        choose: `(blocks, **params) -> [R, G]`.
        ceiling: largest block scale that the second level is normalised to; None takes the format's largest (448).
        formats: scale formats it works with; empty for all.
        needs: `importance` or `hessian` if it cannot work without.
        plain: the rule that stands in for it inside transforms, whose searches only compare candidates: a cheap one.
        clip: for grids with a zero point, whose scale is that of min and max: `(blocks, fake, **params) -> x`, the
            blocks [R, G, E] cut to the range to be covered; `fake` rounds blocks to their own range and back. None if
            the rule does not go with such grids.
    """

    name: str
    choose: Callable[..., Tensor]
    ceiling: float | None = None
    formats: tuple[str, ...] = ()
    needs: str = ""
    plain: str = ""
    clip: Callable[..., Tensor] | None = None


def find_rule(spec: QuantSpec) -> ScaleRule:
    """The rule of a spec.

    Raises:
        DQError: unknown, or one that does not go with the spec's scale format.
    """
    rule = SCALE_RULES.get(spec.scale_rule)
    if rule.formats and spec.scale_format not in rule.formats:
        raise DQError(f"scale rule {rule.name!r} goes with {', '.join(rule.formats)} scales, not {spec.scale_format}")
    return rule


def asymmetric(blocks: Blocks, rule: ScaleRule) -> tuple[Tensor, Tensor]:
    """Scales and zero points [R, G] for min and max of the blocks, or of what the rule clips them to.

    Raises:
        DQError: a rule that is not for asymmetric grids, or a second level.
    """
    if rule.clip is None or blocks.spec.global_scale:
        known = ", ".join(r.name for r in SCALE_RULES if r.clip)
        raise DQError(f"asymmetric {blocks.spec.format} takes one level of scales and the rules {known}")

    def fake(x: Tensor) -> Tensor:
        scale, zero = (t[..., None] for t in _min_max(replace(blocks, x=x)))
        return ((torch.round(x / scale) + zero).clamp(0.0, blocks.spec.fmt.max) - zero) * scale

    return _min_max(replace(blocks, x=rule.clip(blocks, fake, **dict(blocks.spec.rule_params))))


def _min_max(blocks: Blocks) -> tuple[Tensor, Tensor]:
    """`s = (max - min) / n`, `z = clip(rne(-min / s), 0, n)`, the range widened to contain 0."""
    spec, rules, x = blocks.spec, convention(blocks.spec), blocks.x
    low = x.amin(-1) if x.shape[-1] else x.new_zeros(x.shape[:-1])
    high = x.amax(-1) if x.shape[-1] else low
    if rules.include_zero:
        low, high = low.clamp(max=0.0), high.clamp(min=0.0)
    span = rounded(high - low, blocks.dtype)
    scale = storable(rounded(divide(span, spec.fmt.max), blocks.dtype), spec)
    scale = torch.where((span > 0) & (scale > 0), scale, rules.zero)
    zero = torch.round(rounded(-low / scale, blocks.dtype)).clamp(0.0, spec.fmt.max)
    return scale, torch.where(span > 0, zero, (spec.fmt.max + 1) / 2) if rules.middle else zero


def best_of(blocks: Blocks, candidates: Callable[[Blocks], Iterator[Tensor]], **error) -> Tensor:
    """Per block, the candidate scale of least error; the first of equals. Works chunk by chunk.

    Errors are float32: where the squares of a block's values leave its range (below 1e-19, above 1e19), the first
    candidate stays.
    """
    out = []
    for part in blocks.split():
        best = least = None
        for scale in candidates(part):
            now = part.error(scale, **error)
            if best is None:
                best, least = scale, now
            else:
                better = now < least
                best, least = torch.where(better, scale, best), torch.where(better, now, least)
        out.append(best)
    return torch.cat(out) if out else blocks.x.new_zeros(blocks.x.shape[:2])
