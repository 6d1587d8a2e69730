"""`Target`: what becomes of one linear: grids, transforms in their order, rounding."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from dq.registry import DQError, check_fields, check_params, suggest, typed
from dq.rounding import ROUNDINGS
from dq.scales import find_rule
from dq.spec import QuantSpec
from dq.transforms import TRANSFORMS


@dataclass(frozen=True)
class Target:
    """What becomes of a linear: grids, transforms in their fixed order, rounding.

    Raises:
        DQError: for unknown transforms or roundings, a transform listed out of order, or parameters it does not take.
    """

    weights: QuantSpec
    activations: QuantSpec | None = None
    transforms: tuple[tuple[str, tuple[tuple[str, Any], ...]], ...] = ()
    rounding: str = "rtn"
    rounding_params: tuple[tuple[str, Any], ...] = ()
    bias_correction: bool = False
    step_groups: int = 0

    def __post_init__(self):
        check_fields(self)
        static = self._static and self.activations.scale_rule == "absmax"
        if self.step_groups and not (2 <= self.step_groups <= 64 and static):
            wants = "step_groups, from 2 to 64, go with static absmax activations such as int8/tensor"
            raise DQError(f"{wants}; got {self.step_groups} with {self.activations}")
        _check_rounding(self.rounding, self.rounding_params)
        _check_transforms(self)
        for spec in filter(None, (self.weights, self.activations)):
            check_params(f"scale rule {spec.scale_rule!r}", find_rule(spec).choose, spec.rule_params)
        if self.weights.strategy == "token" or self.weights.global_scale == "token":
            raise DQError(f"weights cannot take the per-token grid {self.weights}; use its channel or group form")
        if self.activations is not None and self.activations.strategy in ("channel", "block"):
            raise DQError(f"activations take token or group grids, or a static tensor grid; got {self.activations}")
        if self.activations is not None and self.activations.global_scale == "tensor":
            raise DQError(
                f"activations need a second level per token, so that a result never depends on the rest of its batch: "
                f"nvfp4-token, not {self.activations}"
            )

    @property
    def _static(self) -> bool:
        return self.activations is not None and self.activations.strategy == "tensor"

    @property
    def needs_calibration(self) -> bool:
        kinds = [(TRANSFORMS.get(n), dict(p)) for n, p in self.transforms]
        weighted = bool(find_rule(self.weights).needs) or ROUNDINGS.get(self.rounding).needs_stats
        fitted = any(kind.calibrated(params) or kind.needs_gram(params) for kind, params in kinds)
        return self.bias_correction or self._static or weighted or fitted

    @classmethod
    def from_dict(cls, data: dict[str, Any]) -> Target:
        data = dict(typed(data, dict, "a recipe section is a table, e.g. [linear] above weights = 'int8/channel'"))
        listed = data.pop("transforms", [])
        transforms = named(listed, "transform", "transforms is a list of names or tables, { name = 'smooth', ... }")
        weights = _spec(data.pop("weights", None))
        if weights is None:
            raise DQError("a recipe section needs weights, e.g. weights = 'int8/channel'")
        activations, rounding = _spec(data.pop("activations", None)), _rounding(data.pop("rounding", "rtn"))
        bias, groups = data.pop("bias_correction", False), data.pop("step_groups", 0)
        if data:
            known = ("weights", "activations", "transforms", "rounding", "bias_correction", "step_groups")
            raise DQError(f"unknown recipe word {min(data)!r}{suggest(min(data), known)}")
        return cls(weights, activations, transforms, *rounding, bias, groups)

    def to_dict(self) -> dict[str, Any]:
        out: dict[str, Any] = {"weights": self.weights.to_dict()}
        if self.activations is not None:
            out["activations"] = self.activations.to_dict()
        if self.transforms:
            out["transforms"] = [{"name": n, **dict(p)} for n, p in self.transforms]
        if self.bias_correction:
            out["bias_correction"] = True
        if self.step_groups:
            out["step_groups"] = self.step_groups
        if self.rounding_params:
            return out | {"rounding": {"name": self.rounding, **dict(self.rounding_params)}}
        return out | ({"rounding": self.rounding} if self.rounding != "rtn" else {})

    @property
    def needs_gram(self) -> bool:
        """Whether calibration must collect E[x x^T]."""
        kinds = [(TRANSFORMS.get(n), dict(p)) for n, p in self.transforms]
        hessian = find_rule(self.weights).needs == "hessian" or ROUNDINGS.get(self.rounding).needs_gram
        return hessian or any(kind.needs_gram(params) for kind, params in kinds)


def named(items: Any, kind: str, what: str) -> tuple[tuple[str, tuple[tuple[str, Any], ...]], ...]:
    """(name, params) of a list of names or tables."""
    out = []
    for item in typed(items, (list, tuple), what):
        item = {"name": item} if isinstance(item, str) else dict(typed(item, dict, what))
        if "name" not in item:
            raise DQError(f"a {kind} needs a name, e.g. {{ name = 'smooth', alpha = 0.5 }}; got {item}")
        out.append((item.pop("name"), tuple(sorted(item.items()))))
    return tuple(out)


def _rounding(value: Any) -> tuple[str, tuple[tuple[str, Any], ...]]:
    """Name and parameters from text or a table."""
    if isinstance(value, str):
        return value, ()
    data = dict(typed(value, dict, "rounding is a name or a table, e.g. { name = 'gptq', damp = 0.01 }"))
    if "name" not in data:
        raise DQError(f"a rounding needs a name, e.g. {{ name = 'gptq' }}; got {data}")
    return data.pop("name"), tuple(sorted(data.items()))


def _check_rounding(name: str, params: tuple[tuple[str, Any], ...]) -> None:
    check_params(f"rounding {name!r}", ROUNDINGS.get(name).round, params)
    complaint = ROUNDINGS.get(name).check(dict(params))
    if complaint:
        raise DQError(f"rounding {name!r} got {dict(params)}: {complaint}")


def _check_transforms(target: Target) -> None:
    """Known, in their fixed order, each once, with parameters that they take and grids that they go with."""
    names = [name for name, _ in target.transforms]
    order = [TRANSFORMS.get(name).order for name in names]
    if order != sorted(order):
        raise DQError(
            f"transforms compose as shift, diagonal, permute, rotate, low rank; got the order {', '.join(names)}"
        )
    if len(set(names)) < len(names):
        raise DQError(f"a transform may stand once in a recipe section; got {', '.join(names)}")
    signed = [name for name in names if name in ("arc", "duquant", "rotate")]
    if "shift" in names and signed:
        raise DQError(f"shift moves the input above 0, and {signed[0]} makes both signs of it again: take one of them")
    mixing = [name for name in names if name not in ("smooth", "awq", "lowrank")]
    if target.step_groups and mixing:
        apart = "maxima per step are kept per channel of the raw input, which only smooth, awq and lowrank leave apart"
        raise DQError(f"step_groups do not go with {mixing[0]}: {apart}")
    for name, params in target.transforms:
        check_params(f"transform {name!r}", TRANSFORMS.get(name).fit, params)
        kind = TRANSFORMS.get(name)
        complaint = kind.check(dict(params)) or kind.grids(dict(params), target.weights, target.activations)
        if complaint:
            raise DQError(f"transform {name!r} got {dict(params)}: {complaint}")


def _spec(value: Any) -> QuantSpec | None:
    if value is None or isinstance(value, QuantSpec):
        return value
    typed(value, (str, dict), "weights and activations are text such as 'int8/channel', or a table")
    return QuantSpec.from_dict(value) if isinstance(value, dict) else QuantSpec.parse(value)
