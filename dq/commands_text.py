"""What the commands do for language models: calibrate on a text, compare on a text, one table of recipes."""

from __future__ import annotations

import argparse
import warnings
from dataclasses import fields
from pathlib import Path
from typing import Any

from dq.commands_call import OPTIONS
from dq.registry import DQError

_PIPELINES = ("metrics", "records", *OPTIONS)


def check_text_options(args: argparse.Namespace) -> None:
    """Raises DQError for options that say nothing without --text, or contradict it."""
    given = [n for n in ("samples", "length", "stride") if getattr(args, n, None) is not None]
    if args.text is None and given:
        raise DQError(f"--{given[0]} goes with --text FILE")
    if args.text is not None and getattr(args, "prompts", None):
        raise DQError("--text is for language models and --prompts for pipelines: give one of them")
    if any(getattr(args, n, None) for n in ("text", "tasks", "speed")):
        foreign = [n for n in _PIPELINES if getattr(args, n, None) not in (None, False)]
        if foreign:
            raise DQError(f"--{foreign[0].replace('_', '-')} goes with --prompts FILE, for pipelines")


def calibration(args: argparse.Namespace, recipe: Any) -> Any:
    """The `dq.Text` that the options describe, None for a data-free recipe; read before a model is loaded."""
    from dq.pipelines.loading import load_tokenizer, quiet_libraries, window
    from dq.pipelines.text import Text, read_text

    check_text_options(args)
    found = read_text(args.text)
    if not recipe.needs_calibration:
        print(f"recipe {recipe.name} needs no calibration: --text is not used")
        return None
    quiet_libraries()
    length = window(args.length, args.source)
    return Text([found], load_tokenizer(args.source), samples=args.samples or 128, length=length, seed=args.seed)


def evaluate(args: argparse.Namespace, load: Any) -> None:
    """`dq eval MODEL ... --reference MODEL --text FILE`: perplexity, KL, agreement; `--tasks`, `--speed` beside or
    instead of it. Candidates are loaded in turn."""
    from dq import checks
    from dq.pipelines.loading import kind_of, load_tokenizer

    check_text_options(args)
    sources = [args.source, *args.more]
    if args.out is not None:
        checks.output_file(args.out, (".json",))
    if args.tasks:
        from dq.eval.tasks import why_not

        if why_not():
            raise DQError(why_not())
    for source in (args.reference, *sources):
        if kind_of(source) == "pipeline":
            raise DQError(f"{source} is a pipeline; it is compared on --prompts FILE")
    measure = [f for f, wanted in ((_on_text, args.text), (_on_tasks, args.tasks), (_speed, args.speed)) if wanted]
    if args.text is not None:
        from dq.pipelines.text import read_text

        args.words = read_text(args.text)
    reference, tokenizer = load(args, args.reference), load_tokenizer(args.reference)
    candidates = {s: (lambda s=s: _beside(reference, load(args, s, exported=True), s)) for s in sources}
    result = None
    for one in measure:
        found = one(args, candidates, reference, tokenizer)
        print(found.table())
        result = found if result is None else result.beside(found)
    if args.out is not None:
        print(f"numbers: {result.save(args.out)}")


def _beside(reference: Any, model: Any, name: str) -> Any:
    """The model, with a warning if what it left in 16 bits says that the reference is another one."""
    from dq.pipelines.reference import GIVE, check_reference

    if hasattr(model, "dq_artifact"):  # a model of nobody, or of another tool, says nothing about its origin
        try:
            check_reference(reference, model)
        except DQError as error:
            what = str(error).partition(f": {GIVE}")[0]
            warnings.warn(f"{name} is measured against another model than it was made from: {what}", stacklevel=2)
    return model


def _on_text(args: argparse.Namespace, candidates: dict[str, Any], reference: Any, tokenizer: Any) -> Any:
    from dq.eval.perplexity import evaluate_text
    from dq.pipelines.loading import window

    length = window(args.length, args.source)
    return evaluate_text(
        candidates, reference, args.words, tokenizer, length=length, stride=args.stride, limit=args.count
    )


def _on_tasks(args: argparse.Namespace, candidates: dict[str, Any], reference: Any, tokenizer: Any) -> Any:
    from dq.eval.tasks import evaluate_tasks

    return evaluate_tasks(
        candidates, args.tasks, tokenizer, reference=reference, shots=args.shots, limit=args.count,
        folder=args.task_folder, seed=args.seed,
    )  # fmt: skip


def _speed(args: argparse.Namespace, candidates: dict[str, Any], reference: Any, tokenizer: Any) -> Any:
    """Times and bytes as scores without a standard error."""
    from dq.eval import environment
    from dq.eval.perplexity import TextResult, TextScore
    from dq.pipelines.generation import measure_generation

    scores = {}
    for name, candidate in {"reference": lambda: reference, **candidates}.items():
        found = measure_generation(candidate(), seed=args.seed)
        scores[name] = {k: TextScore(v, None, found.new * found.batch) for k, v in found.numbers().items()}
    kind = {"prompt": found.prompt, "new": found.new, "batch": found.batch, "kv_cache": found.cache}
    return TextResult(scores, {"generation": kind}, environment.describe(next(reference.parameters()).device))


def bench_llm(args: argparse.Namespace) -> None:
    """`dq bench llm`: one table of recipes, caches and other libraries on one model."""
    from dq.eval.bench import llm, llm_methods
    from dq.showcase_text import Settings
    from dq.showcase_text import bench_llm as run

    if args.list:
        print("\n".join(llm_methods.names()))
        return
    for word, option in (("source", "--model"), ("text", "--text")):
        if getattr(args, word) is None:
            raise DQError(f"dq bench llm needs {option}")
    settings = Settings(**{f.name: getattr(args, f.name) for f in fields(Settings)})

    def say(row: dict[str, Any]) -> None:
        print(llm.text([row]).splitlines()[1], flush=True)

    found = run(
        settings, args.recipes, workers=args.workers, say=say, note=print, out=args.json, resume=args.resume,
        limit=args.row_limit,
    )  # fmt: skip
    print("", found["title"], llm.text(found["rows"]), sep="\n")
    for r in found["ratios"]:
        error = "" if r["se"] is None else f" ±{r['se']:.2g}, paired by windows"
        print(f"{r['score']} of {r['recipe']} / {r['of']}: {r['value']:.3f}{error}")
    if args.markdown:
        table = llm.text(found["rows"], markdown=True)
        Path(args.markdown).write_text(f"{found['title']}\n\n{table}", encoding="utf-8")


def bench_generation(args: argparse.Namespace) -> None:
    """`dq bench generation`: tokens per second of a decoder with random weights."""
    from dq.eval.bench import generation
    from dq.showcase_speed import RECIPES
    from dq.showcase_speed import bench_generation as run

    def say(row: dict[str, Any]) -> None:
        print(row["engine"], row.get("failed") or f"{row['decode']:.1f} tokens/s", flush=True)

    found = run(
        args.shape, args.recipes or RECIPES, prompt=args.prompt, tokens=args.tokens, batch=args.batch,
        device=args.device, say=say, out=args.json,
    )  # fmt: skip
    print(f"{args.shape}, prompt {args.prompt}, batch {args.batch}", generation.text(found["rows"]), sep="\n")
