"""What `dq bench kernels` measured, for a terminal and as Markdown; rows as of dq.eval.bench.kernels."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any


def head(result: dict[str, Any]) -> str:
    """What the table was measured on."""
    top, where = result["ceilings"], result["environment"]
    versions = ", ".join(f"{k} {where['versions'][k]}" for k in ("dq", "torch", "triton") if k in where["versions"])
    return (
        f"{where['device']}, {versions}; copy {top['bandwidth']:.0f} GB/s, BF16 {top['bf16']:.0f}, "
        f"FP8 {top['fp8']:.0f} TFLOP/s; medians of {result['repeat']}"
    )


def text(rows: Sequence[dict[str, Any]]) -> str:
    """Rows of the table for a terminal."""
    out, before = [], None
    for r in rows:
        if before != (r["model"], r["m"], r["k"], r["n"]):
            before = (r["model"], r["m"], r["k"], r["n"])
            out += ["", f"{r['model']}: M {r['m']}, K {r['k']}, N {r['n']}"]
            out.append(f"  {'':<26} {'us':>8} {'x BF16':>10} {'limit':>6} {'error':>8} {'layer':>8}  kernel, grid")
        if "failed" in r:
            out.append(f"  {r['engine']:<26} {' '.join(r['failed'].split()) or 'failed'}")
            continue
        wrong = [f"{r[key]:.1e}" if r[key] is not None else "" for key in ("error", "layer")]
        out.append(
            f"  {r['engine']:<26} {r['us']:>8.1f} {r['ratio']:>5.2f} ±{r['ratio_spread']:.2f} {r['limit']:>6.0%} "
            f"{wrong[0]:>8} {wrong[1]:>8}  "
            f"{r['backend']}{', ' * bool(r['grid'])}{r['grid']}"
        )
    return "\n".join(out)


def markdown(result: dict[str, Any]) -> str:
    """A table for each model: engines down, shapes across; microseconds (times BF16 +- spread, share of the limit).

    The last column is the largest error over the shapes; of another library, in brackets, that of the layer.
    """
    out = [head(result)]
    for model in dict.fromkeys(r["model"] for r in result["rows"]):
        rows = [r for r in result["rows"] if r["model"] == model]
        shapes = list(dict.fromkeys((r["k"], r["n"]) for r in rows))
        out += ["", f"{model}, M = {rows[0]['m']}", ""]
        out.append("| engine | kernel | " + " | ".join(f"{k} -> {n}" for k, n in shapes) + " | error |")
        out.append("|---" * (3 + len(shapes)) + "|")
        for engine in dict.fromkeys(r["engine"] for r in rows):
            own = {(r["k"], r["n"]): r for r in rows if r["engine"] == engine}
            cells = [_cell(own.get(shape)) for shape in shapes]
            kernel = next((r["backend"] for r in own.values() if r.get("grid")), "")  # of dq, and cuBLAS
            line = [f"`{_plain(engine)}`", kernel, *cells, _errors(list(own.values()))]
            out.append("| " + " | ".join(line) + " |")
    return "\n".join(out) + "\n"


def _cell(row: dict[str, Any] | None) -> str:
    if row is None:
        return ""
    if "failed" in row:
        return _plain(row["failed"])[:40] or "failed"
    time = f"{row['us']:.1f}" if row["us"] < 100 else f"{row['us']:.0f}"
    spread = f" ±{row['ratio_spread']:.2f}" if row["engine"] != "bf16" else ""
    return f"{time} ({row['ratio']:.2f}x{spread}, {row['limit']:.0%})"


def _plain(said: str) -> str:
    """Text for a cell: in one line, without what Markdown and HTML would take for their own."""
    return " ".join(said.translate(str.maketrans("|<>`", "/()'")).split())


def _errors(rows: list[dict[str, Any]]) -> str:
    own = [r["error"] for r in rows if r.get("error") is not None]
    layer = [r["layer"] for r in rows if r.get("layer") is not None]
    return f"{max(own):.1e}" if own else f"({max(layer):.1e})" if layer else ""
