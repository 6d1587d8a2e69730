"""`dq list` and `dq doctor`: everything that was discovered, and what this machine can run."""

from __future__ import annotations

import inspect
import os
import platform
from collections.abc import Callable
from importlib import metadata
from typing import Any

import torch

from dq.eval.bench.formats import rules_of
from dq.eval.metrics import METRICS
from dq.family import FAMILIES
from dq.ops import BACKENDS, LinearParams
from dq.pipelines.exported import EXPORTERS
from dq.pipelines.kv_store import KV_FORMATS
from dq.qtensor import quantize
from dq.recipe import Recipe, presets
from dq.rewrites import REWRITES
from dq.rounding import ROUNDINGS
from dq.spec import FORMATS, SPECS, QuantSpec
from dq.transforms import TRANSFORMS
from dq.version import VERSION

_ACTIVATIONS = (None, "fp8_e4m3/token", "int8/token", "int4/token", "nvfp4-token", "mxfp4", "mxfp8")
_ELEMENT = "channel"  # how an element format without blocks of its own is used for weights


def runs(spec: QuantSpec) -> list[str]:
    """Backends that run weights of a grid on this machine, under the activation grid that suits them; best first."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    weight = quantize(torch.zeros(256, 256), spec)
    grids = [None if a is None else QuantSpec.parse(a).with_(dynamic=True) for a in _ACTIVATIONS]
    choices = [LinearParams(weight, activations=grid) for grid in grids]
    found = []
    for b in sorted(BACKENDS, key=lambda b: -b.priority):
        if not b.available() and any(not b.refuse(p, device, torch.bfloat16) for p in choices):
            found.append(b.name)
    return found


def _layout(spec: QuantSpec) -> str:
    """What shares a scale, and how scales are stored."""
    if spec.fmt.identity:
        return "no scales"
    size = "x".join(map(str, spec.block_size)) if spec.block_size else spec.group_size
    block = f"blocks of {size}" if size else f"a scale per {spec.strategy}"
    return f"{block}, {spec.scale_format}" + (f" + fp32 per {spec.global_scale}" if spec.global_scale else "")


def _format_row(name: str, spec: QuantSpec, bits: str) -> str:
    fmt = spec.fmt
    rules, calibrated = ([r.name for r in rules_of(spec) if bool(r.needs) == needs] for needs in (False, True))
    span = f"+-{fmt.max:g}" if fmt.min == -fmt.max else f"{fmt.min:g} to {fmt.max:g}"
    text = f"{name:<16} {bits} bits  {span:<12} {_layout(spec):<37} rules: {', '.join(rules) or 'none'}"
    text += f"; with calibration: {', '.join(calibrated)}" if calibrated else ""
    return f"{text}; runs here: {', '.join(runs(spec))}"


def _formats() -> list[str]:
    """Named formats with bits per value (scales counted), then elements with their own bits, used per channel."""
    rows = [_format_row(n.name, n.spec, f"{n.spec.bits_per_value():5.2f}") for n in SPECS]
    return rows + [_format_row(f.name, QuantSpec(f.name, _ELEMENT), f"{f.bits:5d}") for f in FORMATS]


def _first_line(text: str | None) -> str:
    return (text or "").strip().splitlines()[0] if text else ""


def _transforms() -> list[str]:
    asks = {True: " Needs calibration.", False: ""}
    rows = [(t.name, _first_line(t.fit.__doc__) + asks[t.calibrated({})], _parameters(t.fit)) for t in TRANSFORMS]
    return [f"{name:<22} {text}" + (f"\n  {'':<22} {params}" if params else "") for name, text, params in rows]


def _parameters(function: Callable[..., Any]) -> str:
    """`name=default, ...` of what a recipe may set, behind the first argument."""
    known = list(inspect.signature(function).parameters.values())[1:]
    return ", ".join(f"{p.name}={p.default}" for p in known if p.default is not p.empty)


def _rewrites() -> list[str]:
    return [f"{r.name:<22} {_first_line(r.apply.__doc__)}" for r in REWRITES]


def _roundings() -> list[str]:
    rows = [(r.name, _first_line(r.round.__doc__), _parameters(r.round)) for r in ROUNDINGS]
    return [f"{name:<22} {text}" + (f"\n  {'':<22} {params}" if params else "") for name, text, params in rows]


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
    rows, own = [], sorted(BACKENDS, key=lambda b: -b.priority)
    kernels = torch.cuda.is_available() or os.environ.get("TRITON_INTERPRET") == "1"
    for b in own:
        why = b.available() or ("" if kernels or b is own[-1] else "needs a CUDA device")
        rows.append(f"{b.name:<22} {'not here: ' + why if why else 'ready'}")
    return rows


def _exports() -> list[str]:
    rows = []
    for exporter in EXPORTERS:
        why = exporter.available()
        rows.append(f"{exporter.name:<22} {exporter.description}{f'; not here: {why}' if why else ''}")
    return rows


def _caches() -> list[str]:
    return [f"{f.name:<22} {f.description}" for f in KV_FORMATS.values()]


KINDS: dict[str, Callable[[], list[str]]] = {
    "formats": _formats,
    "transforms": _transforms,
    "roundings": _roundings,
    "rewrites": _rewrites,
    "recipes": _recipes,
    "families": _families,
    "metrics": _metrics,
    "backends": _backends,
    "exports": _exports,
    "caches": _caches,
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
