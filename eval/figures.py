"""Plots of an evaluation as inline SVG. Text and axes take the page's own colour, so they read in light and dark."""

from __future__ import annotations

import importlib.util
import io
import re
from collections import defaultdict
from typing import Any

from dq.eval.result import CandidateResult, EvalResult

COLORS = ("#2f7ed8", "#e08a1e", "#1b9e77", "#d6455d", "#8b63d6", "#0fa3b1", "#b5651d", "#7a8b1f")
_INK = "#010203"  # stands for the page's text colour until the SVG is written
_STYLE = {
    "svg.fonttype": "none",
    "font.family": "sans-serif",
    "font.size": 10,
    "text.color": _INK,
    "axes.edgecolor": _INK,
    "axes.labelcolor": _INK,
    "xtick.color": _INK,
    "ytick.color": _INK,
    "axes.spines.top": False,
    "axes.spines.right": False,
}


def missing() -> str | None:
    """Return None if plots can be drawn, else one line that says what to install."""
    if importlib.util.find_spec("matplotlib") is None:
        return "plots need matplotlib (pip install dq-quant[eval])"
    return None


def color(index: int) -> str:
    """Return the colour of candidate `index`, the same in all plots."""
    return COLORS[index % len(COLORS)]


def figures(result: EvalResult) -> dict[str, str]:
    """Return title -> SVG of every plot there is data for; empty without matplotlib."""
    if missing():
        return {}
    plots = {
        "model-error": model_errors(result),
        "model-error per step": model_curves(result),
        "latent-error per step": latent_curves(result),
        "Signal to quantization noise per layer": layer_sqnr(result),
    }
    return {title: svg for title, svg in plots.items() if svg}


def model_errors(result: EvalResult) -> str:
    """Dot plot of model-error with its 95 % interval, best on top."""
    scores = [(i, c, c.scores.get("model-error")) for i, c in enumerate(result.candidates)]
    scores = [(i, c, s) for i, c, s in scores if s is not None and s.value is not None]
    if not scores:
        return ""
    scores.sort(key=lambda row: -row[2].value)
    axes, finish = _axes("model-errors")
    for y, (i, _, s) in enumerate(scores):
        low, high = (s.low, s.high) if s.low is not None else (s.value, s.value)
        axes.plot([low, high], [y, y], color=color(i), linewidth=2)
        axes.plot([s.value], [y], "o", color=color(i), markersize=7)
        axes.annotate(s.text(s.value), (high, y), (8, -3.5), textcoords="offset points", fontsize=9)
    axes.set_yticks(range(len(scores)), [c.name for _, c, _ in scores])
    axes.set_ylim(-0.6, len(scores) - 0.4)
    axes.margins(x=0.2)
    _log(axes, "x", [s.value for *_, s in scores])
    axes.set_xlabel("‖y − y_ref‖² / ‖y_ref‖²")
    return finish()


def model_curves(result: EvalResult) -> str:
    """Mean model-error per denoising step, one line per candidate."""
    curves = []
    for candidate in result.candidates:
        steps = defaultdict(list)
        for row in candidate.model_errors:
            steps[row["step"] + 1].append(row["error"])
        curves.append([(step, sum(v) / len(v)) for step, v in sorted(steps.items())])
    return _curves("model-curves", result.candidates, curves)


def latent_curves(result: EvalResult) -> str:
    """Relative latent error after every step, mean over prompts, one line per candidate."""
    curves = [list(enumerate(c.latent_curve, 1)) for c in result.candidates]
    return _curves("latent-curves", result.candidates, curves)


def layer_sqnr(result: EvalResult) -> str:
    """Output SQNR of each quantized layer in model order; the legend names each candidate's lowest."""
    rows = [(i, c.name, _sqnr(c.layers)) for i, c in enumerate(result.candidates)]
    rows = [row for row in rows if row[2]]
    if not rows:
        return ""
    axes, finish = _axes("layer-sqnr", height=4.0, width=11.0)
    for i, name, points in rows:
        x, y = [p[0] for p in points], [p[2] for p in points]
        _, layer, lowest = min(points, key=lambda p: p[2])
        label = f"{name} (lowest: {layer}, {lowest:.1f} dB)"
        axes.plot(x, y, "o-", color=color(i), markersize=3.5, linewidth=0.8, label=label)
    axes.set_xlabel("layer, in model order")
    axes.set_ylabel("output SQNR, dB (higher is better)")
    axes.legend(ncols=2, loc="lower center", bbox_to_anchor=(0.5, 1.0), frameon=False, fontsize=9)
    return finish()


def _sqnr(layers: list[dict[str, Any]]) -> list[tuple[int, str, float]]:
    """Return (position, name, dB) of the layers that have a value; names may be absent from some candidates."""
    return [(i, str(r.get("name", i)), r["sqnr_db"]) for i, r in enumerate(layers) if r.get("sqnr_db") is not None]


def _curves(salt: str, candidates: list[CandidateResult], curves: list[list[tuple[int, float]]]) -> str:
    if not any(curves):
        return ""
    axes, finish = _axes(salt)
    for i, (candidate, points) in enumerate(zip(candidates, curves, strict=True)):
        if points:
            x, y = zip(*points, strict=True)
            axes.plot(x, y, "o-", color=color(i), markersize=3, linewidth=1.5, label=candidate.name)
    _log(axes, "y", [y for points in curves for _, y in points])
    axes.xaxis.get_major_locator().set_params(integer=True)
    axes.set_xlabel("step")
    axes.set_ylabel("relative squared error")
    axes.legend(ncols=2, loc="lower center", bbox_to_anchor=(0.5, 1.0), frameon=False, fontsize=8.5)
    return finish()


def _log(axes: Any, which: str, values: list[float]) -> None:
    """Logarithmic axis with plain numbers, unless a value is 0 (an identical candidate) or all are close together."""
    from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

    if min(values) <= 0 or max(values) < 3 * min(values):
        return
    (axes.set_xscale if which == "x" else axes.set_yscale)("log")
    axis = axes.xaxis if which == "x" else axes.yaxis
    wide = max(values) > 30 * min(values)
    axis.set_major_locator(LogLocator(subs=(1.0,) if wide else (1.0, 2.0, 5.0), numticks=8))
    axis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    axis.set_minor_formatter(NullFormatter())


def _axes(salt: str, height: float = 3.3, width: float = 4.5) -> tuple[Any, Any]:
    """Return axes and a function that turns their figure into SVG. Without pyplot: no global state, no display."""
    import matplotlib
    from matplotlib.figure import Figure

    with matplotlib.rc_context(_STYLE):
        figure = Figure(figsize=(width, height), layout="constrained")
        axes = figure.add_subplot()
        axes.grid(color=_INK, alpha=0.12, linewidth=0.6)

    def finish() -> str:
        buffer = io.StringIO()
        with matplotlib.rc_context({**_STYLE, "svg.hashsalt": salt}):
            figure.savefig(buffer, format="svg", transparent=True, metadata={"Date": None})
        return _inline(buffer.getvalue(), salt)

    return axes, finish


def _inline(svg: str, salt: str) -> str:
    """Make an SVG file fit to stand inside HTML: no XML head, metadata or namespaces, ids of its own, page colours."""
    svg = re.sub(r"<metadata>.*?</metadata>", "", svg[svg.index("<svg") :], flags=re.DOTALL)
    svg = re.sub(r'\s+xmlns(:\w+)?="[^"]*"', "", svg)
    svg = re.sub(r'id="([^"]+)"', rf'id="{salt}-\1"', svg)
    svg = re.sub(r'href="#([^"]+)"', rf'href="#{salt}-\1"', svg)
    svg = re.sub(r"url\(#([^)]+)\)", rf"url(#{salt}-\1)", svg)
    svg = re.sub(r'(<svg[^>]*?) width="[^"]*"', r"\1", svg, count=1)
    svg = re.sub(r'(<svg[^>]*?) height="[^"]*"', r"\1", svg, count=1)
    return svg.replace(_INK, "currentColor")
