"""The methods of the field beside each other: one table of recipes on one pipeline, same records, same prompts.

Every method is an ordinary recipe. All share the treatment of the modulation linears, so that rows differ in nothing
but what they are named after; `bits` counts all that the chosen linears store (scales, residual columns, 16-bit
factors, run-time tensors) per weight.
"""

from __future__ import annotations

from typing import Any

from dq.recipe import Recipe, presets
from dq.registry import DQError, suggest

MODULATION = {"weights": "int4/group64@imatrix", "rounding": "gptq"}
_INT = {"weights": "int4/channel", "activations": "int4/token"}
_INT64 = {"weights": "int4/group64", "activations": "int4/group64"}
_NV = {"weights": "nvfp4", "activations": "nvfp4-token"}
_FIT = {"weights": "nvfp4@weighted_sweep", "activations": "nvfp4-token"}
_SMOOTH = {"name": "smooth", "search": True}
_GPTQ = {"name": "gptq", "damp": 1.0}


def _with(base: dict[str, Any], *transforms: Any, **more: Any) -> dict[str, Any]:
    return base | ({"transforms": list(transforms)} if transforms else {}) | more


METHODS: dict[str, dict[str, Any]] = {
    "int8": {"weights": "int8/channel", "activations": "int8/token"},
    "int4 naive": _INT,
    "int4 rotated (regular)": _with(_INT, "rotate"),
    "int4 rotated (Sylvester)": _with(_INT, {"name": "rotate", "kind": "sylvester"}),
    "int4 rotated + gptq": _with(_INT, "rotate", rounding="gptq"),
    "int4 duquant": _with(_INT, "smooth", "duquant"),
    "int4 g64 naive": _INT64,
    "int4 g64 smooth": _with(_INT64, _SMOOTH),
    "int4 g64 svdquant": _with(_INT64, _SMOOTH, "lowrank"),
    "int4 g64 svdquant + gptq": _with(_INT64, _SMOOTH, "lowrank", rounding="gptq"),
    "int4 g64 svdquant + gptq, damp 1": _with(_INT64, _SMOOTH, "lowrank", rounding=_GPTQ),
    "nvfp4 naive": _NV,
    "nvfp4 4over6 activations": _NV | {"activations": "nvfp4-token@4over6"},
    "nvfp4 weighted sweep": _FIT,
    "nvfp4 bias correction": _with(_FIT, bias_correction=True),
    "nvfp4 rotated": _with(_NV, "rotate"),
    "nvfp4 smooth": _with(_NV, _SMOOTH),
    "nvfp4 awq": _with(_NV, "awq"),
    "nvfp4 sorted channels": _with(_FIT, "permute"),
    "nvfp4 gptq": _with(_FIT, rounding="gptq"),
    "nvfp4 gptq, damp 1": _with(_FIT, rounding=_GPTQ),
    "nvfp4 gptq, executed target": _with(_FIT, rounding={"name": "gptq", "executed": True}),
    "nvfp4 svdquant": _with(_NV, _SMOOTH, "lowrank"),
    "nvfp4 svdquant + gptq": _with(_NV, _SMOOTH, "lowrank", rounding="gptq"),
    "nvfp4 svdquant + gptq, damp 1": _with(_NV, _SMOOTH, "lowrank", rounding=_GPTQ),
    "nvfp4 low rank by output": _with(_FIT, {"name": "lowrank", "weighting": "hessian"}, rounding=_GPTQ),
    "nvfp4 low rank by loss": _with(_FIT, {"name": "lowrank", "weighting": "noise"}, rounding=_GPTQ),
    "nvfp4 arc": _with(_NV, "arc"),
    "nvfp4 arc + gptq": _with(_FIT, "arc", rounding=_GPTQ),
    "nvfp4 dual arc + gptq": _with(_FIT, {"name": "arc", "dual": True}, rounding=_GPTQ),
    "nvfp4 dual arc + svd + gptq": _with(_FIT, {"name": "arc", "dual": True}, "lowrank", rounding=_GPTQ),
}
PRESETS = ("w4a4-auto", "w4a4-auto-best")
_STATIC = {"weights": "int8/channel", "activations": "int8/tensor"}
# Recipes whose calibrated statistics enter in different ways, for `dq bench calibration`.
CALIBRATED: dict[str, dict[str, Any]] = {
    "int8 static": _STATIC,
    "int8 static, 4 step groups": _STATIC | {"step_groups": 4},
    "int8 static smooth": _with(_STATIC, "smooth"),
    "int8 static smooth, 4 step groups": _with(_STATIC, "smooth", step_groups=4),
    "int8 static smooth, merged by guidance": _with(_STATIC, {"name": "smooth", "merge": "cfg", "guidance": 2.0}),
    "int8 static smooth, mean of strata": _with(_STATIC, {"name": "smooth", "merge": "mean"}),
    "fp8 static": {"weights": "fp8_e4m3/channel", "activations": "fp8_e4m3/tensor"},
    "nvfp4 smooth .5": _with(_NV, "smooth"),
    "nvfp4 arc": _with(_NV, "arc"),
    "nvfp4 gptq": _with(_FIT, rounding="gptq"),
    "w4a4-nvfp4-svd": {},
}


def names() -> list[str]:
    """All methods, in the order of the table."""
    return [*METHODS, *PRESETS]


def recipe(name: str) -> Recipe:
    """The recipe of a method.

    Raises:
        DQError: unknown (near names are suggested).
    """
    for known in (METHODS, CALIBRATED):
        if known.get(name):
            return Recipe.from_dict({"name": name, "linear": known[name], "modulation": MODULATION})
    if name in presets():
        return Recipe.load(name)
    raise DQError(f"unknown method {name!r}{suggest(name, names())} (dq bench methods --list shows all)")


def bits(report: Any) -> float:
    """Stored bits per weight over the linears with 4-bit or 8-bit activations (modulation is weight-only)."""
    layers = [x for x in report.layers if x.activations is not None]
    return 8.0 * sum(x.nbytes for x in layers) / max(1, sum(x.shape[0] * x.shape[1] for x in layers))


COLUMNS = {"method": None, "bits": 2, "seconds": 0}  # of the table, with their decimals
