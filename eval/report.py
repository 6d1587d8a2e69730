"""The report: one HTML file that needs nothing else, offline, in light and dark."""

from __future__ import annotations

from collections import Counter
from html import escape
from pathlib import Path
from string import Template
from typing import Any

from dq.eval import figures
from dq.eval.gallery import gallery
from dq.eval.result import CandidateResult, EvalResult, Score

TEMPLATE = Path(__file__).with_name("report_template.html")
_LAYER_COLUMNS = {  # key of a layer dict -> heading
    "name": "layer",
    "shape": "shape",
    "weights": "weights",
    "activations": "activations",
    "transforms": "transforms",
    "nbytes": "bytes",
    "backend": "kernel that ran",
    "grid": "activation grid that ran",
    "calls": "calls",
    "sqnr_db": "SQNR dB",
}
_NUMBERS = {"nbytes", "calls", "sqnr_db"}


def write_report(result: EvalResult, path: str | Path, title: str = "dq evaluation", limit: int = 24) -> Path:
    """Write `result` as a self-contained HTML page (images of the first `limit` prompts) and return its path."""
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    page = Template(TEMPLATE.read_text(encoding="utf-8")).substitute(
        title=escape(title),
        subtitle=escape(_subtitle(result)),
        columns=1 + len(result.candidates),
        cards="".join(_card(result, i, c) for i, c in enumerate(result.candidates)),
        scores=_scores(result),
        cost=_cost(result),
        plots=_plots(result),
        images=gallery(result, limit),
        plans=_details(result, _plan, "No plan was given."),
        layers=_details(result, _layers, "No quantized layers were found."),
        setup=_setup(result),
    )
    path.write_text(page, encoding="utf-8")
    return path


def _subtitle(result: EvalResult) -> str:
    n, m, env = len(result.prompts), len(result.candidates), result.environment
    counts = f"{n} prompt{'s' * (n != 1)}, {m} candidate{'s' * (m != 1)} against the reference"
    return " · ".join(str(part) for part in (counts, env.get("date"), env.get("device")) if part)


def _name(result: EvalResult, index: int) -> str:
    dot = f'<span class="dot" style="--dot:{figures.color(index)}"></span>'
    return f'<span class="name">{dot}{escape(result.candidates[index].name)}</span>'


def _card(result: EvalResult, index: int, candidate: CandidateResult) -> str:
    rank = result.ranking().index(candidate.name) + 1
    key = next((n for n in result.score_names() if n not in result.unavailable), None)
    score = candidate.scores.get(key) if key else None
    value = f"{score.text(score.value)}" if score else "–"
    size = f"{candidate.nbytes / 1e6:.1f} MB{_share(candidate.nbytes, result.reference_nbytes)}"
    return (
        f'<div class="card"><h3>{_name(result, index)}</h3><div class="value">{value}</div>'
        f"<small>{escape(key or '')}, rank {rank} of {len(result.candidates)}<br>{size}</small></div>"
    )


def _share(nbytes: int, reference: int) -> str:
    return f", {100 * nbytes / reference:.0f} % of the reference" if nbytes and reference else ""


def table(head: list[str], rows: list[list[str]], numbers: set[int] = frozenset()) -> str:
    """Return an HTML table; cells are HTML already, or whole `<td` cells; columns in `numbers` are right-aligned."""
    mark = [' class="n"' if i in numbers else "" for i in range(len(head))]
    top = "".join(f"<th{m}>{h}</th>" for h, m in zip(head, mark, strict=True))
    body = "".join(
        "<tr>"
        + "".join(c if c.startswith("<td") else f"<td{m}>{c}</td>" for c, m in zip(row, mark, strict=True))
        + "</tr>"
        for row in rows
    )
    return f'<div class="scroll"><table><thead><tr>{top}</tr></thead><tbody>{body}</tbody></table></div>'


def _scores(result: EvalResult) -> str:
    names = [n for n in result.score_names() if n not in result.unavailable]
    first = result.candidates[0].scores if result.candidates else {}
    head = ["candidate", "rank", *[f"{escape(n)} {first[n].arrow}<br><small>N = {first[n].n}</small>" for n in names]]
    best = {n: _best(result, n) for n in names}
    ranking = result.ranking()
    rows = [
        [_name(result, i), str(ranking.index(c.name) + 1), *[_score(c.scores[n], best[n]) for n in names]]
        for i, c in enumerate(result.candidates)
    ]
    remarks = "".join(f"<li>{escape(line)}</li>" for line in result.remarks())
    key = "Mean and 95 % bootstrap interval. Rank by model-error; ↑ higher is better, ↓ lower is better, best in bold."
    notes = f"<ul>{remarks}</ul>" if remarks else ""
    return f'<div class="card">{table(head, rows, set(range(1, len(head))))}<small>{key}</small>{notes}</div>'


def _best(result: EvalResult, name: str) -> float | None:
    scores = [c.scores[name] for c in result.candidates if c.scores[name].value is not None]
    if not scores:
        return None
    return (max if scores[0].higher_is_better else min)(s.value for s in scores)


def _score(score: Score, best: float | None) -> str:
    if score.value is None:
        return f'<td class="n" title="{escape(score.reason or "", quote=True)}">–</td>'
    interval = f"<small>[{score.text(score.low)}, {score.text(score.high)}]</small>" if score.low is not None else ""
    return f'<td class="n{" best" * (score.value == best)}">{score.text(score.value)}{interval}</td>'


def _cost(result: EvalResult) -> str:
    head = ["pipeline", "recipe", "denoiser MB", "of reference", "quantize s", "s per image", "kernels: layers"]
    n = max(len(result.prompts), 1)
    whole = result.reference_nbytes
    size = f"{whole / 1e6:.1f}" if whole else "–"
    rows = [["reference", "–", size, "100 %" if whole else "–", "–", _seconds(result.reference_seconds / n), "–"]]
    for i, c in enumerate(result.candidates):
        share = f"{100 * c.nbytes / whole:.0f} %" if whole else "–"
        cells = [f"{c.nbytes / 1e6:.1f}", share, _seconds(c.quantize_seconds), _seconds(c.seconds / n), _kernels(c)]
        rows.append([_name(result, i), escape(c.recipe) or "–", *cells])
    note = (
        "Bytes of the denoiser's parameters and buffers, 32-bit parameters counted as 16 bits; time of whole pipeline "
        "calls on this machine."
    )
    return f'<div class="card">{table(head, rows, {2, 3, 4, 5})}<small>{note}</small></div>'


def _seconds(value: float | None) -> str:
    return f"{value:.2f}" if value else "–"


def _kernels(candidate: CandidateResult) -> str:
    ran = Counter((r.get("backend") or "not run", r.get("grid") or "") for r in candidate.layers)
    parts = [f"{escape(k)}{' on ' * bool(g)}{escape(g)}: {count}" for (k, g), count in ran.most_common()]
    return "<br>".join(parts) or "–"


def _plots(result: EvalResult) -> str:
    plots = figures.figures(result)
    if not plots:
        return f'<p class="soft">{escape(figures.missing() or "There is nothing to plot.")}</p>'
    parts = [
        f'<div class="card{" wide" * title.endswith("layer")}"><h3>{escape(title)}</h3>{svg}</div>'
        for title, svg in plots.items()
    ]
    return f'<div class="plots">{"".join(parts)}</div>'


def _details(result: EvalResult, content: Any, nothing: str) -> str:
    parts = [
        f"<details><summary>{_name(result, i)} {note}</summary>{body}</details>"
        for i, c in enumerate(result.candidates)
        for note, body in [content(c)]
        if body
    ]
    return "".join(parts) or f'<p class="soft">{nothing}</p>'


def _plan(candidate: CandidateResult) -> tuple[str, str]:
    note = f"<small>{escape(candidate.recipe)}</small>"
    if isinstance(candidate.plan, list) and candidate.plan:
        keys = list(dict.fromkeys(k for row in candidate.plan for k in row))
        return note, table([escape(k) for k in keys], [[_text(row.get(k)) for k in keys] for row in candidate.plan])
    return note, f"<pre>{escape(str(candidate.plan))}</pre>" if candidate.plan else ""


def _layers(candidate: CandidateResult) -> tuple[str, str]:
    rows = candidate.layers
    if not rows:
        return "", ""
    several = len({r.get("component") for r in rows}) > 1
    keys = [k for k in _LAYER_COLUMNS if any(k in r for r in rows)]
    numbers = {i for i, k in enumerate(keys) if k in _NUMBERS}
    cells = [[_layer_cell(row, k, several) for k in keys] for row in rows]
    total = sum(r.get("nbytes") or 0 for r in rows)
    note = f"<small>{len(rows)} quantized layers, {total / 1e6:.2f} MB</small>"
    return note, table([_LAYER_COLUMNS[k] for k in keys], cells, numbers)


def _layer_cell(row: dict[str, Any], key: str, several: bool) -> str:
    value = row.get(key)
    if key == "name":
        prefix = f"{row.get('component')}." if several else ""
        return f"<code>{escape(f'{prefix}{value}')}</code>"
    if key == "shape" and value is not None:
        return " × ".join(str(v) for v in value)
    if key == "nbytes" and value is not None:
        return f"{value:,}"
    return _text(value)


def _text(value: Any) -> str:
    if value is None or value == "":
        return "–"
    if isinstance(value, float):
        return f"{value:.1f}" if abs(value) >= 1 else f"{value:.3g}"
    if isinstance(value, list):
        return escape(", ".join(str(v) for v in value))
    return escape(str(value))


def _setup(result: EvalResult) -> str:
    env = {k: v for k, v in result.environment.items() if k != "versions"}
    rows = {**env, **result.environment.get("versions", {})}
    left = "".join(f"<dt>{escape(str(k))}</dt><dd>{escape(str(v))}</dd>" for k, v in rows.items())
    right = "".join(f"<dt>{escape(str(k))}</dt><dd>{escape(str(v))}</dd>" for k, v in result.settings.items())
    how = (
        "Prompt i starts from the same noise in every pipeline: a CPU generator seeded with seed + i. Images are "
        "rounded to 8 bits before any metric. model-error: ‖y − y_ref‖² / ‖y_ref‖² of the denoiser on inputs recorded "
        "from the reference, so errors do not add up along the trajectory. latent-error: the same ratio for the "
        "latents after the last step of each pipeline's own trajectory."
    )
    return (
        f'<div class="plots"><div class="card"><dl>{left}</dl></div><div class="card"><dl>{right}</dl></div></div>'
        f'<p class="soft"><small>{how}</small></p>'
    )
