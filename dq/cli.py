"""The command line: dq demo | plan | quantize | generate | eval | inspect | list | doctor."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from dq.registry import DQError, suggest
from dq.version import VERSION


def _demo(args: argparse.Namespace) -> None:
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


def _load(args: argparse.Namespace):
    from dq.pipelines.loading import load, parse_dtype

    return load(args.source, parse_dtype(args.dtype), args.device)


def _plan(args: argparse.Namespace) -> None:
    from dq.pipelines.api import plan

    plans = plan(_load(args), _recipe(args), components=args.components, skip=args.skip)
    for one in plans.values() if isinstance(plans, dict) else [plans]:
        print(one)


def _quantize(args: argparse.Namespace) -> None:
    from dq.pipelines.api import plan, quantize

    recipe, obj = _recipe(args), _load(args)
    plans = plan(obj, recipe, components=args.components, skip=args.skip)
    for one in plans.values() if isinstance(plans, dict) else [plans]:
        print(one)
    calibration = None
    if recipe.needs_calibration:
        if not args.prompts:
            raise DQError(f"recipe {recipe.name} needs calibration: give --prompts FILE (one prompt per line)")
        calibration = _prompts(args)
    report = quantize(
        obj, recipe, calibration=calibration, components=args.components, skip=args.skip, resume=args.resume
    )
    print(report)
    obj.save_pretrained(args.out)
    print(f"saved to {args.out}")


def _prompts(args: argparse.Namespace):
    from dq.pipelines.calibration import Prompts

    return Prompts.from_file(args.prompts, **_call_kwargs(args, "steps"))


def _call_kwargs(args: argparse.Namespace, steps: str = "num_inference_steps") -> dict:
    """Keyword arguments of the pipeline call that were given; the demo's own where its folder is the source."""
    from dq.pipelines.demo import demo_kwargs, demo_path

    kwargs = demo_kwargs() if str(args.source).rstrip("/") == demo_path() or args.demo_kwargs else {}
    given = {
        "num_inference_steps": args.steps,
        "guidance_scale": args.guidance_scale,
        "height": args.height,
        "width": args.width,
        "max_sequence_length": args.max_sequence_length,
        "negative_prompt": args.negative_prompt,
        "true_cfg_scale": args.true_cfg_scale,
    }
    kwargs |= {k: v for k, v in given.items() if v is not None}
    if "num_inference_steps" in kwargs:
        kwargs[steps] = kwargs.pop("num_inference_steps")
    return kwargs


def _generate(args: argparse.Namespace) -> None:
    import torch

    from dq.pipelines.loading import is_pipeline, load_tokenizer

    obj = _load(args)
    if is_pipeline(obj):
        generator = torch.Generator("cpu").manual_seed(args.seed)
        image = obj(args.prompt, generator=generator, **_call_kwargs(args)).images[0]
        image.save(args.out or "image.png")
        print(f"image: {args.out or 'image.png'}")
        return
    tokenizer = load_tokenizer(args.source)
    tokens = tokenizer(args.prompt, return_tensors="pt").to(obj.device)
    print(tokenizer.decode(obj.generate(**tokens, max_new_tokens=args.max_new_tokens)[0], skip_special_tokens=True))


def _eval(args: argparse.Namespace) -> None:
    from dq.eval.compare import evaluate
    from dq.pipelines.calibration import Prompts
    from dq.pipelines.loading import load, parse_dtype

    prompts = Prompts.from_file(args.prompts).prompts[: args.count]
    dtype = parse_dtype(args.dtype)
    reference = load(args.reference, dtype, args.device)
    candidates = {s: (lambda s=s: load(s, dtype, args.device)) for s in [args.source, *args.more]}
    result = evaluate(candidates, reference, prompts, args.metrics, kwargs=_call_kwargs(args), seed=args.seed)
    print(result.table())
    result.save(args.out)
    print(f"report: {args.out}")


def _inspect(args: argparse.Namespace) -> None:
    from dq.pipelines.inspection import inspect_folder

    print(inspect_folder(args.source))


def _list(args: argparse.Namespace) -> None:
    from dq.catalogue import KINDS, catalogue

    if args.what is not None and args.what not in KINDS:
        raise DQError(f"nothing called {args.what!r} to list{suggest(args.what, KINDS)}")
    print(catalogue(args.what))


def _doctor(args: argparse.Namespace) -> None:
    from dq.catalogue import doctor

    print(doctor())


def _add_source(p: argparse.ArgumentParser, what: str) -> None:
    p.add_argument("source", help=what)
    p.add_argument("--dtype", default="bf16", help="bf16, fp16 or fp32 (default bf16)")
    p.add_argument("--device", help="cuda or cpu; default: a GPU if there is one")


def _add_recipe(p: argparse.ArgumentParser) -> None:
    p.add_argument("recipe", help="a preset (dq list recipes) or a TOML file")
    p.add_argument("--components", nargs="+", help="pipeline components; default: the denoisers")
    p.add_argument("--skip", nargs="+", default=[], metavar="PATTERN", help="linears that stay in 16 bits")
    p.add_argument("--min-features", type=int, help="smallest side of a linear that is quantized (default 256)")


def _add_call(p: argparse.ArgumentParser) -> None:
    group = p.add_argument_group("pipeline call")
    group.add_argument("--steps", type=int)
    group.add_argument("--guidance-scale", type=float)
    group.add_argument("--true-cfg-scale", type=float)
    group.add_argument("--negative-prompt")
    group.add_argument("--height", type=int)
    group.add_argument("--width", type=int)
    group.add_argument("--max-sequence-length", type=int)
    group.add_argument("--demo-kwargs", action="store_true", help="start from dq.demo_kwargs() (128 px, 20 steps)")
    group.add_argument("--seed", type=int, default=0)


def build_parser() -> argparse.ArgumentParser:
    """The argument parser with all subcommands."""
    parser = argparse.ArgumentParser(prog="dq", description="Post-training quantization of diffusion models and LLMs.")
    parser.add_argument("--version", action="version", version=f"dq {VERSION}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    _add_demo(commands)
    p = commands.add_parser("plan", help="what a recipe would do: layers, bytes, time, what stays 16-bit and why")
    _add_source(p, "folder or hub id of a pipeline or model")
    _add_recipe(p)
    p.set_defaults(run=_plan)
    p = commands.add_parser("quantize", help="quantize and save")
    _add_source(p, "folder or hub id of a pipeline or model")
    _add_recipe(p)
    p.add_argument("--out", required=True, help="folder to save to")
    p.add_argument("--prompts", help="calibration prompts, one per line")
    p.add_argument("--resume", help="folder for finished blocks: the same command continues after an interruption")
    _add_call(p)
    p.set_defaults(run=_quantize)
    _add_use(commands)
    p = commands.add_parser("inspect", help="what is in a checkpoint folder")
    p.add_argument("source")
    p.set_defaults(run=_inspect)
    p = commands.add_parser("list", help="formats, transforms, roundings, recipes, families, metrics, backends")
    p.add_argument("what", nargs="?")
    p.set_defaults(run=_list)
    commands.add_parser("doctor", help="what this machine can run, and why not the rest").set_defaults(run=_doctor)
    return parser


def _add_demo(commands) -> None:
    p = commands.add_parser("demo", help="quantize the model that ships with dq, compare with BF16, write a report")
    p.add_argument("--out", default="report.html")
    p.add_argument("--recipes", nargs="+")
    p.add_argument("--prompts", type=int, default=24, help="number of prompts (default 24)")
    p.add_argument("--outliers", action="store_true", help="with injected outlier channels, as in large models")
    p.add_argument("--metrics", nargs="+")
    p.add_argument("--device")
    p.set_defaults(run=_demo)


def _add_use(commands) -> None:
    p = commands.add_parser("generate", help="an image or a text from a quantized (or any) folder")
    _add_source(p, "folder or hub id")
    p.add_argument("prompt")
    p.add_argument("--out", help="image file (default image.png)")
    p.add_argument("--max-new-tokens", type=int, default=64)
    _add_call(p)
    p.set_defaults(run=_generate)
    p = commands.add_parser("eval", help="measure pipelines against a 16-bit reference")
    _add_source(p, "folder or hub id of the quantized pipeline")
    p.add_argument("more", nargs="*", help="further pipelines to compare")
    p.add_argument("--reference", required=True, help="the 16-bit pipeline")
    p.add_argument("--prompts", required=True, help="file with one prompt per line")
    p.add_argument("--count", type=int, help="use only the first COUNT prompts")
    p.add_argument("--metrics", nargs="+")
    p.add_argument("--out", default="report.html")
    _add_call(p)
    p.set_defaults(run=_eval)


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one command; a problem the user can act on is one line on stderr and exit status 2."""
    args = build_parser().parse_args(argv)
    try:
        args.run(args)
    except DQError as error:
        print(f"dq: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("dq: interrupted", file=sys.stderr)
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(main())
