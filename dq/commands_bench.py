"""`dq bench methods` and `dq bench calibration`: tables that are saved row by row."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from dq import checks


def add(kinds: Any) -> list[argparse.ArgumentParser]:
    """Adds both commands; returns their parsers."""
    m = kinds.add_parser("methods", help="every method on the demo model: bits, seconds, model error, images")
    m.add_argument("--only", nargs="+", metavar="METHOD", help="names as --list prints them")
    m.add_argument("--list", action="store_true", help="print the names and stop")
    m.add_argument("--against", metavar="METHOD", help="also the paired ratio to its row, of thirds of the steps too")
    m.set_defaults(run=bench_methods)
    c = kinds.add_parser("calibration", help="what calibrating on some steps or one guidance branch costs")
    c.add_argument("--recipes", nargs="+", help="presets or methods that calibrate; default: a few that might care")
    c.set_defaults(run=bench_calibration)
    s = kinds.add_parser("step", help="milliseconds of a denoising step, called, compiled and as a CUDA graph")
    s.add_argument("--shape", default="flux.1-dev", help="flux.1-dev (random weights) or flux-tiny (for a look)")
    s.add_argument("--recipes", nargs="+", help="data-free ones (default fp8 w4a4-int4 w4a4-nvfp4)")
    s.add_argument("--repeat", type=int, default=10, help="timed steps, the median counts (default 10)")
    s.add_argument("--eager", action="store_true", help="without compiling")
    s.set_defaults(run=bench_step)
    for one in (m, c):
        one.add_argument("--outliers", action="store_true", help="with injected outlier channels")
        one.add_argument("--prompts", type=int, default=8, help="images per row (default 8)")
        one.add_argument("--records", type=int, default=128, help="denoiser calls for the model error (default 128)")
        one.add_argument("--markdown", metavar="FILE", help="also write the table as Markdown")
        one.add_argument("--resume", action="store_true", help="take over the rows that the file of --json holds")
    return [m, c, s]


def bench_step(args: argparse.Namespace) -> None:
    """`dq bench step`."""
    from dq.eval.bench import step
    from dq.showcase_speed import bench_step as run

    check_reports(args)
    found = run(args.shape, args.recipes, args.repeat, args.device, compiled=not args.eager, out=args.json)
    print(f"{args.shape}, one step, medians of {args.repeat}", step.text(found["rows"]), sep="\n")
    for row in found["rows"]:
        for time, count, kernel in row.get("kernels", ())[:12]:
            print(f"{row['engine']:<16} {time / 1e3:8.2f} ms {count:5d} x {kernel[:80]}")


def bench_methods(args: argparse.Namespace) -> None:
    """`dq bench methods`."""
    from dq.eval.bench import methods
    from dq.showcase import bench_methods as run

    if args.list:
        print("\n".join(methods.names()))
        return
    title = (
        f"demo model{' with injected outliers' if args.outliers else ''}, {args.records} calls, {args.prompts} images"
    )
    file = _row_file(args, title, "method")
    table = run(
        args.only, outliers=args.outliers, prompts=args.prompts, records=args.records, device=args.device, file=file
    )
    _show_rows(args, title, table, methods.COLUMNS)


def _row_file(args: argparse.Namespace, title: str, key: str) -> Any:
    from dq.eval.bench.table import RowFile
    from dq.eval.environment import describe

    check_reports(args)
    head = {"title": title, "environment": describe(checks.device(args.device))}
    return RowFile(args.json, head, key, args.resume)


def _show_rows(args: argparse.Namespace, title: str, rows: list[dict[str, Any]], columns: dict[str, Any]) -> None:
    """Prints the table, with a column of paired ratios if a yardstick was named."""
    from dq.eval.bench import table

    if getattr(args, "against", None) is not None:
        table.against(rows, next(iter(columns)), args.against)
    print(title, table.text(rows, columns), sep="\n")
    if args.markdown:
        Path(args.markdown).write_text(f"{title}\n\n{table.text(rows, columns, markdown=True)}", encoding="utf-8")


def bench_calibration(args: argparse.Namespace) -> None:
    """`dq bench calibration`."""
    from dq.showcase import bench_calibration as run

    title = (
        f"demo model{' with injected outliers' if args.outliers else ''}, true guidance 2, {args.records} calls, "
        f"{args.prompts} images"
    )
    key = "recipe, calibrated on"
    file = _row_file(args, title, key)
    rows = run(
        args.recipes, outliers=args.outliers, prompts=args.prompts, records=args.records, device=args.device, file=file
    )
    _show_rows(args, title, rows, {key: None, "calibration records": 0})


def check_reports(args: argparse.Namespace) -> None:
    """Refuses files that could not be written, before anything runs."""
    if getattr(args, "markdown", None) is not None:
        checks.output_file(args.markdown, (".md",))
    if args.json is not None:
        checks.output_file(args.json, (".json",))
