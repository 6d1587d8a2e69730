"""What each command of the command line does. Whatever can be refused is refused before a model is loaded."""

from __future__ import annotations

import argparse
import json
import warnings
from pathlib import Path
from typing import Any

from dq.commands_bench import check_reports
from dq.commands_call import OPTIONS, call_kwargs
from dq.registry import DQError, suggest

REPORT = (".html", ".json")
IMAGE = (".png", ".jpg", ".jpeg", ".webp", ".bmp", ".tif", ".tiff")
COUNTS = (
    *("steps", "height", "width", "num_frames", "max_sequence_length", "max_new_tokens"),
    *("count", "batch_size", "records", "min_features", "rows", "repeat", "divide"),
    *("samples", "length", "stride", "windows", "train_steps", "batch", "micro_batch"),
)


def check_numbers(args: argparse.Namespace) -> None:
    """Ranges of the options that several commands share.

    Raises:
        DQError: naming the option.
    """
    from dq import checks

    given = {name: value for name, value in vars(args).items() if value is not None}
    for name in COUNTS:
        if name in given:
            checks.whole(given[name], _option(name))
    for name in ("guidance_scale", "true_cfg_scale"):
        if name in given:
            checks.finite(given[name], _option(name))
    if "seed" in given:
        checks.seed(given["seed"], "--seed")


def _option(name: str) -> str:
    return "--" + name.replace("_", "-")


def demo(args: argparse.Namespace) -> None:
    """`dq demo`."""
    from dq.showcase import RECIPES, run_demo

    run_demo(
        args.out,
        recipes=args.recipes or RECIPES,
        prompts=args.prompts,
        outliers=args.outliers,
        device=args.device,
        metrics=args.metrics,
    )


def _recipe(args: argparse.Namespace):
    from dq.recipe import Recipe

    recipe = Recipe.load(args.recipe)
    return recipe.with_(min_features=args.min_features) if args.min_features is not None else recipe


def _load(args: argparse.Namespace, source: str | None = None, exported: bool = False) -> Any:
    """What is named, in 16 bits or with dq's codes; `exported`: files of other engines with their codes too."""
    from dq.pipelines import importing, loading

    dtype = loading.parse_dtype(args.dtype)
    loading.quiet_libraries()
    load = importing.load if exported else loading.load
    return load(args.source if source is None else source, dtype, args.device)


def _print_plan(obj: Any, recipe: Any, args: argparse.Namespace) -> int:
    """Prints the plan of every component; returns the bytes that will be saved of these."""
    from dq.pipelines.api import plan

    plans = plan(obj, recipe, components=args.components, skip=args.skip)
    plans = list(plans.values()) if isinstance(plans, dict) else [plans]
    print(*plans, sep="\n")
    return sum(one.bytes_after for one in plans)


def plan(args: argparse.Namespace) -> None:
    """`dq plan`."""
    recipe = _recipe(args)
    _print_plan(_load(args), recipe, args)


def quantize(args: argparse.Namespace) -> None:
    """`dq quantize`: plan, calibrate, quantize, save; a model takes its tokenizer along."""
    from dq import commands_text
    from dq.pipelines.api import quantize as run
    from dq.pipelines.loading import is_model_folder, is_pipeline
    from dq.pipelines.saving import check_place, save

    recipe = _recipe(args)
    _check_targets(args)
    commands_text.check_text_options(args)
    if args.text is not None:
        calibration = commands_text.calibration(args, recipe)
    else:
        calibration = _calibration(args, recipe, pipeline=not is_model_folder(args.source))
    obj = _load(args)
    if calibration is not None and args.text is None and not is_pipeline(obj):
        raise DQError(_no_records(recipe, type(obj).__name__))
    check_place(obj, args.out, _print_plan(obj, recipe, args), args.components)
    more = {"components": args.components, "skip": args.skip, "resume": args.resume, "sequential": args.sequential}
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "SQNR of ")  # a note of the report below
        report = run(obj, recipe, calibration=calibration, **more)
    print(report)
    copied = save(obj, args.out, [args.source])
    print(f"saved to {args.out}{' with ' * bool(copied)}{', '.join(copied)}")


def _check_targets(args: argparse.Namespace) -> None:
    from dq import checks
    from dq.pipelines.loading import folder_of

    source, out = folder_of(args.source), checks.output_folder(args.out)
    if source is not None and out.resolve() == source.resolve():
        raise DQError(f"--out is the source, {args.source}: give another folder, the 16-bit model stays as it is")
    if args.resume is not None:
        checks.output_folder(args.resume)


def _calibration(args: argparse.Namespace, recipe: Any, pipeline: bool) -> Any:
    """The calibration that the options describe, None for a data-free recipe."""
    from dq.pipelines.calibration import Prompts

    if recipe.needs_calibration and not pipeline:
        raise DQError(_no_records(recipe, f"{args.source} (a model, no pipeline)"))
    if not args.prompts:
        if recipe.needs_calibration:
            raise DQError(f"recipe {recipe.name} needs calibration: give --prompts FILE (one prompt per line)")
        return None
    options = {"seed": args.seed, "batch_size": args.batch_size, "records": args.records}
    given = {k: v for k, v in options.items() if v is not None}
    found = Prompts.from_file(args.prompts, **given, **call_kwargs(args, [args.source], "steps"))
    if recipe.needs_calibration:
        return found
    print(f"recipe {recipe.name} needs no calibration: --prompts is not used")
    return None


def _no_records(recipe: Any, what: str) -> str:
    return (
        f"recipe {recipe.name} needs calibration, and --prompts can only calibrate pipelines, not {what}; give a "
        f'language model --text FILE, in Python dq.quantize(model, "{recipe.name}", calibration=[dict(input_ids=ids), '
        "...]), or take a data-free recipe (dq list recipes)"
    )


def generate(args: argparse.Namespace) -> None:
    """`dq generate`: an image, or a text."""
    from dq import checks
    from dq.pipelines.loading import is_model_folder, is_pipeline

    if is_model_folder(args.source):
        foreign = [n for n in ("out", *OPTIONS) if getattr(args, n) not in (None, False)]
        if foreign:
            what = "its text is printed" if foreign == ["out"] else "it continues a text"
            raise DQError(f"{_option(foreign[0])} is for images; {args.source} is a model: {what}")
    out = checks.output_file(args.out or "image.png", IMAGE)
    if args.kv_cache is not None:
        from dq.pipelines.kv_store import kv_format

        kv_format(args.kv_cache)
    obj = _load(args, exported=True)
    if args.kv_cache is not None and is_pipeline(obj):
        raise DQError("--kv-cache is for language models; a pipeline keeps no keys and values")
    if is_pipeline(obj):
        _generate_image(obj, args, out)
    else:
        _generate_text(obj, args)


def _generate_image(pipe: Any, args: argparse.Namespace, out: Path) -> None:
    from dq.eval.generate import Settings
    from dq.eval.generate import generate as run
    from dq.eval.images import save_image

    settings = Settings((args.prompt,), call_kwargs(args, [args.source]), args.seed, step_bar=True)
    save_image(run(pipe, args.source, settings).images[0], out)
    print(f"image: {out}")


def _generate_text(model: Any, args: argparse.Namespace) -> None:
    import torch

    from dq.pipelines.chat import no_nan
    from dq.pipelines.loading import load_tokenizer

    if not (hasattr(model, "can_generate") and model.can_generate()):
        raise DQError(
            f"{args.source} is a lone {type(model).__name__}, which generates nothing by itself: "
            "give the folder of the whole pipeline, or of a language model"
        )
    tokenizer = load_tokenizer(args.source)
    tokens = tokenizer(args.prompt, return_tensors="pt", return_token_type_ids=False).to(model.device)
    torch.manual_seed(args.seed)
    if args.kv_cache is not None:
        from dq.pipelines.kv_cache import KVCache, cache_argument

        tokens[cache_argument(model)] = KVCache(args.kv_cache, config=model.config)
    ids = model.generate(**tokens, max_new_tokens=args.max_new_tokens, logits_processor=[no_nan])[0]
    print(tokenizer.decode(ids, skip_special_tokens=True))


def evaluate(args: argparse.Namespace) -> None:
    """`dq eval`. Pipelines and models are loaded when their turn comes."""
    from dq import checks, commands_text
    from dq.eval.compare import evaluate as run
    from dq.pipelines.calibration import Prompts
    from dq.pipelines.loading import kind_of

    sources = [args.source, *args.more]
    twice = [s for s in sources if sources.count(s) > 1]
    if twice:
        raise DQError(f"{twice[0]} is named twice")
    commands_text.check_text_options(args)
    if args.text is not None or args.tasks or args.speed:
        return commands_text.evaluate(args, _load)
    if args.prompts is None:
        what = "language models on --text FILE, --tasks or --speed"
        raise DQError(f"dq eval compares pipelines on --prompts FILE (one per line), {what}")
    args.out = args.out or "report.html"
    checks.output_file(args.out, REPORT)
    prompts = Prompts.from_file(args.prompts).prompts[: args.count]
    for source in [args.reference, *sources]:
        if kind_of(source) == "model":
            raise DQError(
                f"{source} is a model; it is compared on --text FILE, images need pipelines (model_index.json)"
            )
    kwargs = call_kwargs(args, [args.reference, *sources])
    candidates = {s: (lambda s=s: _load(args, s, exported=True)) for s in sources}
    batch = {} if args.batch_size is None else {"batch_size": args.batch_size}
    records = {} if args.records is None else {"records": args.records}
    result = run(
        candidates, lambda: _load(args, args.reference), prompts, args.metrics,
        kwargs=kwargs, seed=args.seed, **batch, **records,
    )  # fmt: skip
    print(result.table())
    result.save(args.out)
    print(f"report: {args.out}")


def inspect(args: argparse.Namespace) -> None:
    """`dq inspect`."""
    from dq import checks
    from dq.pipelines.inspection import inspect_checkpoint

    if args.json not in (None, "-"):
        checks.output_file(args.json, (".json",))
    found = inspect_checkpoint(args.source, args.values, device=args.device, capability=args.capability)
    text = json.dumps(found.to_dict(), indent=2)
    if args.json not in (None, "-"):
        Path(args.json).write_text(text + "\n", encoding="utf-8")
    print(text if args.json == "-" else found.text(args.verbose))


def catalogue(args: argparse.Namespace) -> None:
    """`dq list`."""
    from dq.catalogue import KINDS
    from dq.catalogue import catalogue as text

    if args.what is not None and args.what not in KINDS:
        raise DQError(f"nothing called {args.what!r} to list{suggest(args.what, KINDS)}")
    print(text(args.what))


def doctor(args: argparse.Namespace) -> None:
    """`dq doctor`."""
    from dq.catalogue import doctor as text

    print(text())


def bench_formats(args: argparse.Namespace) -> None:
    """`dq bench formats`."""
    from dq import checks
    from dq.eval.bench import formats

    check_reports(args)
    result = formats.measure(args.rows, args.seed, checks.device(args.device))
    print(formats.title(result))
    print(formats.text(result))
    if args.markdown:
        formats.write_markdown(result, args.markdown)
    _write_json(result, args.json)


def bench_quantize(args: argparse.Namespace) -> None:
    """`dq bench quantize`."""
    from dq import checks
    from dq.eval.bench import speed
    from dq.pipelines.loading import parse_dtype

    check_reports(args)
    shape = tuple(checks.whole(n, "--shape") for n in args.shape)
    result = speed.measure(
        shape, tuple(args.specs or speed.SPECS), checks.device(args.device), parse_dtype(args.dtype), args.repeat,
        args.reference,
    )  # fmt: skip
    print(speed.text(result))
    _write_json(result, args.json)


def bench_llm(args: argparse.Namespace) -> None:
    """`dq bench llm`."""
    from dq.commands_text import bench_llm as run

    check_reports(args)
    run(args)


def bench_generation(args: argparse.Namespace) -> None:
    """`dq bench generation`."""
    from dq.commands_text import bench_generation as run

    check_reports(args)
    run(args)


def bench_kernels(args: argparse.Namespace) -> None:
    """`dq bench kernels`."""
    from dq import checks
    from dq.eval.bench import kernel_table, kernels

    check_reports(args)
    models = tuple(args.models or ("flux", "llama-decode"))
    shown = 0

    def say(result: dict[str, Any]) -> None:
        """Every shape as soon as it is measured; a run that is stopped keeps them."""
        nonlocal shown
        if not shown:
            print(kernel_table.head(result))
        print(kernel_table.text(result["rows"][shown:]), flush=True)
        shown = len(result["rows"])
        _write_json(result, args.json)
        if args.markdown:
            Path(args.markdown).write_text(kernel_table.markdown(result), encoding="utf-8")

    peers = kernels.PEERS if args.peers is None else args.peers
    kernels.measure(models, args.engines, checks.device(args.device), args.repeat, args.divide, say, tuple(peers))


def _write_json(result: dict[str, Any], path: str | None) -> None:
    if path is not None:
        Path(path).write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
