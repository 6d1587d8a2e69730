"""What the commands do for language models: calibrate on a text, compare on a text, one table of recipes."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from dq.registry import DQError


def check_text_options(args: argparse.Namespace) -> None:
    """Raises DQError for options that say nothing without --text, or contradict it."""
    given = [n for n in ("samples", "length", "stride") if getattr(args, n, None) is not None]
    if args.text is None and given:
        raise DQError(f"--{given[0]} goes with --text FILE")
    if args.text is not None and getattr(args, "prompts", None):
        raise DQError("--text is for language models and --prompts for pipelines: give one of them")


def calibration(args: argparse.Namespace, recipe: Any) -> Any:
    """The `dq.Text` that the options describe, None for a data-free recipe; read before a model is loaded."""
    from dq.pipelines.loading import load_tokenizer, quiet_libraries
    from dq.pipelines.text import Text, read_text

    check_text_options(args)
    found = read_text(args.text)
    if not recipe.needs_calibration:
        print(f"recipe {recipe.name} needs no calibration: --text is not used")
        return None
    quiet_libraries()
    return Text([found], load_tokenizer(args.source), samples=args.samples or 128, length=args.length or 2048,
                seed=args.seed)  # fmt: skip


def evaluate(args: argparse.Namespace, load: Any) -> None:
    """`dq eval MODEL ... --reference MODEL --text FILE`: perplexity, KL, agreement. Candidates are loaded in turn."""
    from dq import checks
    from dq.eval.perplexity import evaluate_text
    from dq.pipelines.loading import folder_of, load_tokenizer
    from dq.pipelines.text import read_text

    check_text_options(args)
    sources = [args.source, *args.more]
    for source in (args.reference, *sources):
        folder_of(source)
    if args.out is not None:
        checks.output_file(args.out, (".json",))
    text = read_text(args.text)
    reference = load(args, args.reference)
    tokenizer = load_tokenizer(args.reference)
    result = evaluate_text(
        {s: (lambda s=s: load(args, s)) for s in sources}, reference, text, tokenizer,
        length=args.length or 2048, stride=args.stride, limit=args.count,
    )  # fmt: skip
    print(result.table())
    if args.out is not None:
        print(f"numbers: {result.save(args.out)}")


def bench_llm(args: argparse.Namespace) -> tuple[str, list[dict[str, Any]], dict[str, Any]]:
    """`dq bench llm`: title, rows and everything else of one table of recipes on one model."""
    from dq import checks
    from dq.eval.bench import llm
    from dq.eval.perplexity import bits, evaluate_text
    from dq.pipelines.api import quantize
    from dq.pipelines.loading import load, load_tokenizer, parse_dtype, quiet_libraries
    from dq.pipelines.text import Text, read_text
    from dq.recipe import Recipe

    names = args.recipes or llm.RECIPES
    llm.check_names(names)
    recipes = {name: Recipe.load(name).with_(min_features=args.min_features or 64) for name in names}
    words, dtype, costs = read_text(args.text), parse_dtype(args.dtype), {}
    calibrated = any(r.needs_calibration for r in recipes.values())
    if calibrated and args.calibration is None:
        raise DQError("recipes that calibrate need --calibration FILE, another text than the one that scores")
    if calibrated and Path(args.calibration).resolve() == Path(args.text).resolve():
        raise DQError("--calibration is the text that scores: give another one, or the numbers flatter the recipes")
    checks.device(args.device)
    quiet_libraries()
    tokenizer = load_tokenizer(args.source)
    sample = None
    if calibrated:
        sample = Text.from_file(args.calibration, tokenizer, samples=args.samples, length=args.length, seed=args.seed)

    def fresh() -> Any:
        model = load(args.source, dtype, args.device)
        return llm.scramble(model, args.seed) if args.off_lattice else model

    def candidate(name: str) -> Any:
        def make() -> Any:
            model = fresh()
            report = quantize(
                model,
                recipes[name],
                calibration=sample if recipes[name].needs_calibration else None,
                sequential=args.sequential,
                progress=False,
            )
            costs[name] = (bits(model), report.seconds)
            return model

        return make

    result = evaluate_text({n: candidate(n) for n in recipes}, fresh(), words, tokenizer, length=args.length,
                           stride=args.stride, limit=args.windows)  # fmt: skip
    table = llm.rows(result, costs)
    title = f"{Path(args.source).name}{', off the lattice' * args.off_lattice}, {args.dtype}, {Path(args.text).name}"
    return f"{title}: {result.settings['scored_tokens']} tokens", table, result.to_dict()
