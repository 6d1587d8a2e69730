"""`dq correct`: a quantized model learns to predict what the 16-bit one does."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from dq.options import add_machine, add_text
from dq.registry import DQError


def add(sub: Any) -> None:
    """The subcommand and its options."""
    p = sub.add_parser("correct", help="train a quantized language model to predict what the 16-bit one does")
    p.add_argument("source", help="folder of a language model that dq quantized")
    p.add_argument("--reference", required=True, help="the 16-bit model: folder, GGUF file or hub id")
    add_text(p, "to learn from; an eighth only measures", length=512, samples=True, required=True)
    p.add_argument("--out", required=True, help="folder to save to")
    p.add_argument("--rank", type=int, default=8, help="rank of the branch that learns, 0 for none (default 8)")
    p.add_argument("--scales", action="store_true", help="scales learn too, where they are not in 8 bits")
    p.add_argument("--norms", action="store_true", help="gains of norms learn too")
    p.add_argument("--train-steps", type=int, default=200, help="of the optimizer (default 200)")
    p.add_argument("--rate", type=float, default=1e-3, help="learning rate (default 0.001)")
    p.add_argument("--batch", type=int, default=4, help="windows of a step (default 4)")
    p.add_argument("--micro-batch", type=int, default=1, help="windows in one call: faster, more memory (default 1)")
    p.add_argument("--layers", nargs="+", default=[], metavar="PATTERN", help="linears that learn (default: all)")
    p.add_argument("--any-reference", action="store_true", help="learn from another model of the same shape")
    p.add_argument("--seed", type=int, default=0)
    add_machine(p)
    p.set_defaults(run=correct)


def correct(args: argparse.Namespace) -> None:
    """Loads both models, trains, saves; what can be refused is refused before."""
    from dq.pipelines.correction import check_settings
    from dq.pipelines.correction import correct as run
    from dq.pipelines.loading import is_pipeline_folder, load, load_tokenizer, parse_dtype, quiet_libraries, window
    from dq.pipelines.saving import check_place, nbytes_of, save
    from dq.pipelines.text import Text, read_text

    names = ("rank", "rate", "batch", "scales", "norms", "micro_batch", "seed")
    settings = check_settings({n: getattr(args, n) for n in names} | {"steps": args.train_steps})
    _check_places(args)
    dtype, words = parse_dtype(args.dtype), read_text(args.text)
    if is_pipeline_folder(args.source):
        raise DQError(f"{args.source} is a pipeline: use dq.correct(pipe, reference, dq.Prompts([...])) in Python")
    quiet_libraries()
    tokenizer = load_tokenizer(args.reference)
    length = window(args.length, args.source, 512)
    text = Text([words], tokenizer, samples=args.samples or 128, length=length, seed=args.seed)
    model = load(args.source, dtype, args.device)
    check_place(model, args.out, nbytes_of(model))
    reference = load(args.reference, dtype, args.device)
    report = run(model, reference, text, layers=args.layers, any_reference=args.any_reference, **settings)
    print(report)
    if not report.changed:
        raise DQError("nothing was gained, so nothing is saved: take a smaller --rate, more --train-steps or more text")
    copied = save(model, args.out, [args.source, args.reference])
    print(f"saved to {args.out}{' with ' * bool(copied)}{', '.join(copied)}")


def _check_places(args: argparse.Namespace) -> None:
    from dq import checks
    from dq.pipelines.loading import folder_of

    out = checks.output_folder(args.out)
    for name in (args.source, args.reference):
        place = folder_of(name)
        if place is not None and Path(out).resolve() == place.resolve():
            raise DQError(f"--out is {name} itself: give another folder, both models stay as they are")
