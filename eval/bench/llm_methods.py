"""The methods of the field on a language model: recipes and caches, one row each of `dq bench llm`.

Weights are quantized in all linears of the decoder's blocks; embeddings and the output projection stay as they are.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from dq.eval.bench import llm_peers
from dq.recipe import PRESETS, Recipe
from dq.registry import DQError, suggest

_INT = {"weights": "int4/channel@mse", "activations": "int4/token"}
_NV = {"weights": "nvfp4", "activations": "nvfp4-token"}
_FIT = {"weights": "nvfp4@weighted_sweep", "activations": "nvfp4-token"}
_SMOOTH, _DUAL = {"name": "smooth", "search": True}, {"name": "arc", "channels": 32, "dual": True}
_SPIN = {"name": "spinquant", "weights": "int4/channel", "activations": "int4/token", "online": True}
_R4 = {"transforms": [{"name": "rotate", "kind": "sylvester", "size": -1}]}  # of an MLP's last linear, at run time

# Row -> the name of a preset, or the tables of a recipe.
METHODS: dict[str, str | dict[str, Any]] = {
    "W8A8 INT8": "int8",
    "W8A8 INT8, smoothed": "int8-smooth",
    "W8A8 FP8": "fp8",
    "W4A16 RTN": "w4a16",
    "W4A16 GPTQ": "w4a16-gptq",
    "W4A16 AWQ": {"linear": {"weights": "uint4/group64@awq", "transforms": ["awq"]}},
    "W4A4 INT4 RTN": "w4a4-int4",
    "W4A4 INT4 QuaRot": "w4a4-int4-quarot",
    "W4A4 INT4 QuaRot + GPTQ": "w4a4-int4-quarot-gptq",
    "W4A4 INT4 SpinQuant": {"linear": _INT, "rewrites": [_SPIN], "rules": [{"match": "mlp.down_proj"} | _INT | _R4]},
    "W4A4 INT4 SpinQuant + GPTQ": "w4a4-int4-spinquant",
    "W4A4 NVFP4 RTN": "w4a4-nvfp4",
    "W4A4 NVFP4 4over6": {"linear": {"weights": "nvfp4@4over6", "activations": "nvfp4-token@4over6"}},
    "W4A4 NVFP4 sweep": {"linear": {"weights": "nvfp4@sweep", "activations": "nvfp4-token"}},
    "W4A4 NVFP4 GPTQ": {"linear": _FIT | {"rounding": "gptq"}},
    "W4A4 NVFP4 SVDQuant + GPTQ": {
        "linear": _FIT | {"transforms": [_SMOOTH, {"name": "lowrank", "rank": 32}], "rounding": "gptq"}
    },
    "W4A4 NVFP4 ARC as published": {"linear": _NV | {"transforms": [{"name": "arc", "channels": 64}]}},
    "W4A4 NVFP4 dual ARC": {"linear": _FIT | {"transforms": [_DUAL], "rounding": "gptq"}},
    "W4A4 NVFP4 dual ARC + SVD": {
        "linear": _FIT | {"transforms": ["smooth", _DUAL, {"name": "lowrank", "rank": 32}], "rounding": "gptq"}
    },
    "W4A4 NVFP4 w4a4-nvfp4-arc": "w4a4-nvfp4-arc",
    "W4A4 NVFP4 w4a4-nvfp4-arc-llm": "w4a4-nvfp4-arc-llm",
    "W4A4 w4a4-auto": "w4a4-auto",
    "W4A8 NVFP4, FP8": "w4a8",
}
CACHES = {
    "KV8 FP8": "fp8",
    "KV8 INT8": "int8",
    "KV4 INT4 KIVI": "int4-kivi",
    "KV4 INT4 QuaRot": "int4-quarot",
    "KV4 NVFP4": "nvfp4",
    "KV2 INT2 KIVI": "int2-kivi",
}
# Measured before the others: those that take longest, so that none of them ends last, and what the claims need.
FIRST = (
    "W4A4 w4a4-auto",
    "modelopt W4A4 NVFP4-SVDQuant",
    "W4A4 NVFP4 w4a4-nvfp4-arc-llm",
    "modelopt W4A4 NVFP4 AWQ-lite",
    "W4A4 NVFP4 ARC as published",
    "W4A4 INT4 SpinQuant",
    "W4A4 INT4 SpinQuant + GPTQ",
    "modelopt W4A8 NVFP4, FP8",
    "W4A4 NVFP4 SVDQuant + GPTQ",
    "W4A4 NVFP4 dual ARC + SVD",
    "modelopt W4A16 INT4 AWQ",
    "modelopt W8A8 INT8 SmoothQuant",
    "W4A16 AWQ",
    "W8A8 INT8, smoothed",
    "modelopt W4A4 NVFP4",
    "modelopt W8A8 FP8",
)
# What the table's claims compare.
PAIRS = (
    ("W4A4 NVFP4 w4a4-nvfp4-arc-llm", "modelopt W4A4 NVFP4-SVDQuant"),
    ("W4A4 NVFP4 w4a4-nvfp4-arc-llm", "W4A4 NVFP4 ARC as published"),
)


def names() -> list[str]:
    """All rows, in the order of the table; "16-bit" first."""
    return [*METHODS, *CACHES, *llm_peers.PEERS]


def recipe(name: str) -> Recipe | None:
    """The recipe of a row; None for a cache or another library.

    Args:
        name: of a row, a preset, or a TOML file.

    Raises:
        DQError: unknown (near names are suggested).
    """
    found = METHODS.get(name)
    if isinstance(found, dict):
        return Recipe.from_dict({"name": name} | found)
    if name in CACHES or name in llm_peers.PEERS:
        return None
    if found is None and Path(name).suffix != ".toml" and not (PRESETS / f"{name}.toml").is_file():
        near = suggest(name, [*names(), *(p.stem for p in PRESETS.glob("*.toml"))])
        raise DQError(f"unknown recipe {name!r}{near}; dq bench llm --list shows all rows")
    return Recipe.load(found or name)


def check_names(wanted: Sequence[str]) -> None:
    """Raises DQError if one stands twice: rows are found by their names."""
    for name in wanted:
        if list(wanted).count(name) > 1:
            raise DQError(f"recipe {name} is named twice")
