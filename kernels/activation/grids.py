"""Which activation grids the kernel has, and how their values reach a tensor core.

    kind         base (times the second level: the row's factor)         value
    fp8          amax / 448                                              x / base
    int8, int4   1; the second level is amax / 127, amax / 7             rne(x / second) / base
    int4-group   largest group scale / 32                                rne(x / scale) * scale / base
    nvfp4        8                                                       e2m1(x / (scale * second)) * scale / base
                 (scales by absmax, or for blocks of 16 the rules `4over6` and `sweep`)
    mxfp4        largest group scale / 64                                e2m1(x / scale) * scale / base
    mxfp8        largest group scale                                     e4m3(x / scale) * scale / base
    fp8-group    none: a scale for each group instead                    x / scale

Low-rank columns raise the base by a power of two until they fit E4M3; of `fp8` they raise amax.
Target `e4m3` rounds the value to E4M3 (exact for a whole number and for E2M1), `int8` takes whole numbers, `packed` the
4-bit codes themselves, two a byte, with their block scales as they rest (what block-scaled tensor cores multiply).
"""

from __future__ import annotations

from dataclasses import dataclass

from dq.spec import QuantSpec

TARGETS = ("e4m3", "int8", "packed")
GROUPS = (16, 32, 64, 128)
MX_RULES = ("floor", "even", "ceil", "rceil")


@dataclass(frozen=True)
class Grid:
    """Compile-time facts of a grid.

    Attributes:
        kind: as in the table above.
        group: elements of a block, 0 if the row has one scale.
        half: whether group scales are FP16.
        rule: exponent mode of MX; of NVFP4 `4over6`, `sweep` or, for absmax, "".
    """

    kind: str
    group: int = 0
    half: bool = False
    rule: str = ""


def grid_of(spec: QuantSpec) -> Grid | str:
    """The grid of a spec, or why the kernel does not have it."""
    plain = not spec.rule_params and spec.profile == "dq" and not spec.k_segments and not spec.row_segments
    adaptive = spec.scale_rule in ("4over6", "sweep") and spec.scale_format == "fp8_e4m3" and spec.columns == 16
    if not plain or not (spec.scale_rule == "absmax" or spec.scale_format == "e8m0" or adaptive):
        return f"no activation kernel for {spec}: only scales by absmax, without parameters, segments or profiles"
    if spec.strategy == "token" and spec.scale_format == "fp32" and spec.global_scale is None:
        kind = {"fp8_e4m3": "fp8", "int8": "int8", "int4": "int4"}.get(spec.format)
        return Grid(kind) if kind else f"no activation kernel for {spec}"
    grid = _grouped(spec)
    if grid is None or grid.group not in GROUPS:
        return f"no activation kernel for {spec}"
    return grid


def _grouped(spec: QuantSpec) -> Grid | None:
    if spec.strategy != "group":
        return None
    if spec.global_scale is not None:
        two = (spec.format, spec.global_scale, spec.scale_format) == ("fp4_e2m1", "token", "fp8_e4m3")
        return Grid("nvfp4", spec.group_size, rule=spec.scale_rule.replace("absmax", "")) if two else None
    if spec.scale_format == "e8m0" and spec.scale_rule in MX_RULES:
        kind = {"fp4_e2m1": "mxfp4", "fp8_e4m3": "mxfp8"}.get(spec.format)
        return Grid(kind, spec.group_size, rule=spec.scale_rule) if kind else None
    if spec.format == "int4" and spec.scale_format in ("fp32", "fp16"):
        return Grid("int4-group", spec.group_size, half=spec.scale_format == "fp16")
    if spec.format == "fp8_e4m3" and spec.scale_format == "fp32":
        return Grid("fp8-group", spec.group_size)
    return None


def target_refused(grid: Grid, target: str) -> str:
    """Why values of this grid do not fit the target, "" if they do."""
    if target not in TARGETS:
        return f"unknown target {target!r}: one of {', '.join(TARGETS)}"
    if target == "packed" and grid.kind not in ("int4", "nvfp4", "mxfp4"):
        return f"{grid.kind} has no codes of 4 bits with scales in 8 bits"
    if target == "int8" and grid.kind not in ("int8", "int4", "int4-group"):
        return f"INT8 tensor cores take whole numbers, not {grid.kind}"
    return f"{grid.kind} codes do not fit E4M3" if target == "e4m3" and grid.kind == "int8" else ""
