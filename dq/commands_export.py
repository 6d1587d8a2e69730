"""`dq export`: a quantized pipeline or model as another engine reads it."""

from __future__ import annotations

import argparse
from typing import Any

from dq.commands_call import add_call, call_kwargs
from dq.options import add_machine, add_text
from dq.registry import DQError


def add(sub: Any) -> None:
    """The subcommand and its options."""
    p = sub.add_parser("export", help="write a quantized pipeline or model for another engine")
    p.add_argument("source", help="folder of a pipeline or model that dq quantized")
    p.add_argument("out", help="folder to write")
    p.add_argument("--format", default="compressed-tensors", help="see dq list exports (default compressed-tensors)")
    p.add_argument("--weight-only", action="store_true", help="declare 16-bit activations, whatever the recipe said")
    p.add_argument("--fold", action="store_true", help="first move smoothing into what makes the input, where exact")
    add_text(p, "whose activations give the scales that a format stores", samples=True)
    p.add_argument("--prompts", metavar="FILE", help="the same for a pipeline: one prompt per line")
    p.add_argument("--components", nargs="+", help="of a pipeline; default: all that are quantized")
    add_machine(p)
    add_call(p)
    p.set_defaults(run=export)


def export(args: argparse.Namespace) -> None:
    """`dq export`: what can be refused is refused before the model is loaded."""
    from dq import checks
    from dq.pipelines.api import fold
    from dq.pipelines.export import export as run
    from dq.pipelines.exported import EXPORTERS
    from dq.pipelines.loading import copy_companions, folder_of, is_pipeline, load, parse_dtype, quiet_libraries

    exporter, out = EXPORTERS.get(args.format), checks.output_folder(args.out)
    why = exporter.available()
    if why:
        raise DQError(f"export format {exporter.name} cannot run here: {why}")
    source, dtype = folder_of(args.source), parse_dtype(args.dtype)
    if source is not None and out.resolve() == source.resolve():
        raise DQError(f"{args.out} is the source: give another folder")
    if args.text is not None and args.prompts is not None:
        raise DQError("--text calibrates a language model, --prompts a pipeline: give one of them")
    quiet_libraries()
    calibration = _prompts(args) if args.prompts is not None else None if args.text is None else _text(args)
    model = load(args.source, dtype, args.device)
    if args.fold:
        found = fold(model, components=args.components)
        print(*(found.values() if isinstance(found, dict) else [found]), sep="\n")
    options = {"weight_only": args.weight_only, "calibration": calibration, "components": args.components}
    run(model, out, args.format, **options)
    copied = [] if is_pipeline(model) else copy_companions(args.source, args.out)
    print(f"{exporter.name}: {args.out}{' with ' * bool(copied)}{', '.join(copied)}")


def _prompts(args: argparse.Namespace) -> Any:
    from dq.pipelines.calibration import Prompts

    return Prompts.from_file(args.prompts, seed=args.seed, **call_kwargs(args, [args.source], "steps"))


def _text(args: argparse.Namespace) -> Any:
    from dq.pipelines.loading import load_tokenizer, window
    from dq.pipelines.text import Text

    options = {"samples": args.samples or 128, "length": window(args.length, args.source), "seed": args.seed}
    return Text.from_file(args.text, load_tokenizer(args.source), **options)
