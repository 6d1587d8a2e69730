"""`dq list` and `dq doctor`: everything that was discovered, and what this machine can run."""

from __future__ import annotations

import platform
from collections.abc import Callable
from importlib import metadata

import torch

from dq.eval.metrics import METRICS
from dq.family import FAMILIES
from dq.ops import BACKENDS
from dq.recipe import Recipe, presets
from dq.rounding import ROUNDINGS
from dq.spec import FORMATS, SPECS
from dq.transforms import TRANSFORMS
from dq.version import VERSION


def _formats() -> list[str]:
    rows = [f"{f.name:<22} {f.bits} bits, range {f.min:g} to {f.max:g}, rests as {f.storage}" for f in FORMATS]
    for named in SPECS:
        s = named.spec
        rows.append(
            f"{named.name:<22} {s.format}, groups of {s.group_size}, scale {s.scale_format}, 2nd {s.global_scale}"
        )
    return rows


def _first_line(text: str | None) -> str:
    return (text or "").strip().splitlines()[0] if text else ""


def _transforms() -> list[str]:
    return [
        f"{t.name:<22} {_first_line(t.fit.__doc__)}{' Needs calibration.' if t.needs_stats else ''}" for t in TRANSFORMS
    ]


def _roundings() -> list[str]:
    return [f"{r.name:<22} {_first_line(r.round.__doc__)}" for r in ROUNDINGS]


def _recipes() -> list[str]:
    out = []
    for name in presets():
        recipe = Recipe.load(name)
        out.append(f"{name:<22} {recipe.description}{' [calibrated]' if recipe.needs_calibration else ''}")
    return out


def _families() -> list[str]:
    return [f"{f.name:<22} {', '.join(f.classes)}" for f in FAMILIES] + [
        f"{'(any other)':<22} blocks and groups detected from the structure; the plan says what was assumed"
    ]


def _metrics() -> list[str]:
    rows = []
    for metric in METRICS:
        why = metric.available()
        rows.append(f"{metric.name:<22} {'not here: ' + why if why else 'ready'}")
    return rows


def _backends() -> list[str]:
    rows = []
    for b in sorted(BACKENDS, key=lambda b: -b.priority):
        why = b.available()
        rows.append(f"{b.name:<22} {'not here: ' + why if why else 'ready'}")
    return rows


KINDS: dict[str, Callable[[], list[str]]] = {
    "formats": _formats,
    "transforms": _transforms,
    "roundings": _roundings,
    "recipes": _recipes,
    "families": _families,
    "metrics": _metrics,
    "backends": _backends,
}


def catalogue(what: str | None = None) -> str:
    """One line per thing of the kind asked for, or of all kinds."""
    parts = []
    for kind, rows in KINDS.items():
        if what in (None, kind):
            parts.append("\n".join([kind, *("  " + r for r in rows())]))
    return "\n".join(parts)


def doctor() -> str:
    """Versions, devices, and every backend and metric with the reason why it cannot run here."""
    lines = [f"dq {VERSION}, Python {platform.python_version()}, {platform.system()} {platform.machine()}"]
    for name in ("torch", "triton", "diffusers", "transformers", "accelerate", "safetensors", "torchmetrics", "lpips"):
        try:
            lines.append(f"  {name:<13} {metadata.version(name)}")
        except metadata.PackageNotFoundError:
            lines.append(f"  {name:<13} not installed")
    if torch.cuda.is_available():
        for i in range(torch.cuda.device_count()):
            p = torch.cuda.get_device_properties(i)
            lines.append(f"  GPU {i}: {p.name}, compute capability {p.major}.{p.minor}, {p.total_memory / 1e9:.0f} GB")
    else:
        lines.append("  no CUDA device: everything runs on the plain-torch reference")
    return "\n".join([*lines, catalogue("backends"), catalogue("metrics")])
