"""The command line: dq demo | plan | quantize | correct | generate | eval | bench | export | chat | inspect | ..."""

from __future__ import annotations

import argparse
import difflib
import logging
import os
import sys
import warnings
from collections.abc import Sequence
from typing import Any, NoReturn

from dq import commands, commands_bench, commands_chat, commands_correct, commands_export
from dq._layout import is_ours
from dq.commands_call import add_call
from dq.options import add_machine, add_sequential, add_text
from dq.registry import DQError
from dq.version import VERSION


class Parser(argparse.ArgumentParser):
    """Says what is wrong in one line, where argparse prints all options first."""

    def error(self, message: str) -> NoReturn:
        raise DQError(f"{message} (see {self.prog} --help)")

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> tuple[argparse.Namespace, list[str]]:
        """As its base, but what nothing takes is refused here: by the command that it was given, with a near option."""
        found, rest = super().parse_known_args(args, namespace)
        if rest:
            near = difflib.get_close_matches(rest[0].split("=")[0], self._option_string_actions, n=1, cutoff=0.65)
            hint = f"; did you mean {near[0]}?" if near else ""
            self.error(f"{self.prog} takes no {' '.join(rest)}{hint}")
        return found, rest


def _add_source(p: argparse.ArgumentParser, what: str) -> None:
    p.add_argument("source", help=what)
    add_machine(p)


def _add_recipe(p: argparse.ArgumentParser) -> None:
    p.add_argument("recipe", help="a preset (dq list recipes) or a TOML file")
    p.add_argument("--components", nargs="+", help="pipeline components; default: the denoisers")
    p.add_argument("--skip", nargs="+", default=[], metavar="PATTERN", help="linears that stay in 16 bits")
    p.add_argument("--min-features", type=int, help="smallest side of a linear that is quantized (default 256, in "
                   "language models 64)")  # fmt: skip


def _add_records(p: argparse.ArgumentParser) -> None:
    p.add_argument("--batch-size", type=int, help="prompts per pipeline call; changes speed, not the noise")
    p.add_argument("--records", type=int, help="denoiser calls that are kept, spread over steps (default 64)")


def build_parser() -> argparse.ArgumentParser:
    """The argument parser with all subcommands."""
    parser = Parser(prog="dq", description="Post-training quantization of diffusion models and LLMs.")
    parser.add_argument("--version", action="version", version=f"dq {VERSION}")
    sub = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    _add_demo(sub)
    p = sub.add_parser("plan", help="what a recipe would do: layers, bytes, time, what stays 16-bit and why")
    _add_source(p, "folder or hub id of a pipeline or model, or a GGUF file")
    _add_recipe(p)
    p.set_defaults(run=commands.plan)
    p = sub.add_parser("quantize", help="quantize and save")
    _add_source(p, "folder or hub id of a pipeline or model, or a GGUF file")
    _add_recipe(p)
    p.add_argument("--out", required=True, help="folder to save to")
    p.add_argument("--prompts", help="calibration prompts, one per line")
    _add_records(p)
    add_text(p, "that calibrates a language model", samples=True)
    add_sequential(p)
    p.add_argument("--resume", help="folder for finished blocks: the same command continues after an interruption")
    add_call(p)
    p.set_defaults(run=commands.quantize)
    _add_use(sub)
    _add_bench(sub)
    commands_correct.add(sub)
    commands_export.add(sub)
    commands_chat.add(sub)
    p = sub.add_parser("inspect", help="what is in a checkpoint, ours or another tool's")
    p.add_argument("source", help="folder of a pipeline or model, or a safetensors or GGUF file")
    p.add_argument("--values", action="store_true", help="look for NaN in all tensors, also in the large ones")
    p.add_argument("-v", "--verbose", action="store_true", help="every layer, and why no faster kernel runs it")
    p.add_argument("--device", help="whose kernels are named, cuda or cpu; default: a GPU if there is one")
    p.add_argument("--capability", metavar="X.Y", help="those of a GPU that need not be here, e.g. 9.0 for an H100")
    p.add_argument("--json", metavar="FILE", help="also write it as JSON; - prints nothing else")
    p.set_defaults(run=commands.inspect)
    p = sub.add_parser("list", help="formats, transforms, roundings, recipes, metrics, backends, exports and more")
    p.add_argument("what", nargs="?")
    p.set_defaults(run=commands.catalogue)
    sub.add_parser("doctor", help="what this machine can run, and why not the rest").set_defaults(run=commands.doctor)
    return parser


def _add_demo(sub) -> None:
    p = sub.add_parser("demo", help="quantize the model that ships with dq, compare with BF16, write a report")
    p.add_argument("--out", default="report.html")
    p.add_argument("--recipes", nargs="+")
    p.add_argument("--prompts", type=int, default=24, help="number of prompts (default 24)")
    p.add_argument("--outliers", action="store_true", help="with injected outlier channels, as in large models")
    p.add_argument("--metrics", nargs="+")
    p.add_argument("--device")
    p.set_defaults(run=commands.demo)


def _add_use(sub) -> None:
    p = sub.add_parser("generate", help="an image or a text from a quantized (or any) folder")
    _add_source(p, "folder, GGUF file or hub id")
    p.add_argument("prompt")
    p.add_argument("--out", help="image file (default image.png)")
    p.add_argument("--max-new-tokens", type=int, default=64)
    p.add_argument("--kv-cache", metavar="NAME", help="keys and values of a text in few bits (dq list caches)")
    add_call(p)
    p.set_defaults(run=commands.generate)
    p = sub.add_parser("eval", help="measure pipelines or language models against a 16-bit reference")
    _add_source(p, "folder or hub id of the quantized pipeline or model")
    p.add_argument("more", nargs="*", help="further ones to compare")
    p.add_argument("--reference", required=True, help="the 16-bit pipeline or model: folder, GGUF file or hub id")
    p.add_argument("--prompts", help="file with one prompt per line, for pipelines")
    add_text(p, "for language models: perplexity, KL divergence, agreement")
    p.add_argument("--stride", type=int, help="tokens between windows; fewer than --length: they overlap")
    p.add_argument("--count", type=int, help="use only the first COUNT prompts, or windows of the text")
    p.add_argument("--tasks", nargs="+", metavar="TASK", help="of lm-evaluation-harness, for language models")
    p.add_argument("--task-folder", metavar="DIR", help="with task files of your own")
    p.add_argument("--shots", type=int, help="examples before each question; default: what the task says")
    p.add_argument("--speed", action="store_true", help="of language models: TTFT, TPOT, tokens/s, memory")
    p.add_argument("--metrics", nargs="+", help="names (dq list metrics); default: all that run here")
    p.add_argument("--out", help="report.html or numbers.json (default report.html; of a text: numbers.json, or none)")
    _add_records(p)
    add_call(p)
    p.set_defaults(run=commands.evaluate)


def _add_bench(sub) -> None:
    kinds = sub.add_parser("bench", help="what formats lose, what quantizing costs").add_subparsers(
        dest="kind", required=True, metavar="KIND"
    )
    p = kinds.add_parser("formats", help="SQNR of every format under every scale rule on synthetic data")
    p.add_argument("--rows", type=int, default=32, help="rows of 4096 values of each kind of data (default 32)")
    p.add_argument("--seed", type=int, default=0)
    p.add_argument("--markdown", metavar="FILE", help="also write the table as Markdown")
    p.set_defaults(run=commands.bench_formats)
    q = kinds.add_parser("quantize", help="time to quantize a weight, against copying as many bytes")
    q.add_argument("--shape", type=int, nargs=2, default=(3072, 3072), metavar=("N", "K"))
    q.add_argument("--specs", nargs="+", help="e.g. nvfp4 nvfp4@sweep nvfp4@sweep:e4m3")
    q.add_argument("--dtype", default="bf16", help="bf16, fp16 or fp32 (default bf16)")
    q.add_argument("--repeat", type=int, default=5, help="timed calls, the median counts (default 5)")
    q.add_argument("--reference", action="store_true", help="time the torch reference on the same device too")
    q.set_defaults(run=commands.bench_quantize)
    r = kinds.add_parser(
        "kernels", help="time and error of quantized linears against 16-bit ones, beside other engines"
    )
    r.add_argument(
        "--models", nargs="+", help="flux qwen-image wan llama-prefill llama-decode (default flux llama-decode)"
    )
    r.add_argument("--engines", nargs="+", help='e.g. fp8 w4a4-nvfp4 "w4a16 g64"; default: all')
    r.add_argument("--divide", type=int, default=1, help="every size by this, for a quick look or a CPU (default 1)")
    r.add_argument("--repeat", type=int, default=20, help="timed replays, the median counts (default 20)")
    r.add_argument(
        "--peers", nargs="*", metavar="NAME", help="of torchao and gemlite, which tune for every shape (default: both "
        "where installed; without a name: none)",
    )  # fmt: skip
    r.add_argument("--markdown", metavar="FILE", help="also write the table as Markdown")
    r.set_defaults(run=commands.bench_kernels)
    t, g = _add_bench_llm(kinds), _add_bench_generation(kinds)
    for one in (p, q, r, t, g, *commands_bench.add(kinds)):
        one.add_argument("--device", help="cuda or cpu")
        one.add_argument("--json", metavar="FILE", help="also write the numbers and all versions as JSON")


def _add_bench_llm(kinds) -> argparse.ArgumentParser:
    t = kinds.add_parser("llm", help="recipes, caches and other libraries on one language model: bits, seconds, KL")
    t.add_argument("--model", dest="source", help="folder, GGUF file or hub id")
    t.add_argument("--text", metavar="FILE", help="UTF-8 text that scores")
    t.add_argument("--calibration", metavar="FILE", help="another text, for recipes that calibrate")
    t.add_argument("--recipes", nargs="+", help="rows as --list prints them, presets or TOML files; default: all rows")
    t.add_argument("--list", action="store_true", help="print the rows and stop")
    t.add_argument("--off-lattice", action="store_true", help="on a copy with the same function whose channels are in "
                   "random order: for models that were unpacked from a low-bit file")  # fmt: skip
    t.add_argument("--windows", type=int, default=33, help="windows of --text that score (default 33)")
    t.add_argument("--length", type=int, default=512, help="tokens of a window (default 512)")
    t.add_argument("--stride", type=int, help="tokens between windows; fewer than --length: they overlap")
    t.add_argument("--samples", type=int, default=32, help="windows that calibrate (default 32)")
    add_sequential(t)
    t.add_argument("--seed", type=int, default=0)
    t.add_argument(
        "--kernels", action="store_true", help="run recipes in BF16 by this machine's kernels, on their grids"
    )
    t.add_argument("--dtype", default="fp32", help="bf16, fp16 or fp32 (default fp32)")
    t.add_argument("--min-features", type=int, help="smallest side of a quantized linear (default: the family's)")
    t.add_argument("--workers", type=int, default=1, help="processes that share the rows (default 1)")
    t.add_argument("--row-limit", type=float, metavar="SECONDS", help="give up rows that take longer, and say so")
    t.add_argument("--resume", action="store_true", help="take over the rows that the file of --json holds")
    t.add_argument("--markdown", metavar="FILE", help="also write the table as Markdown")
    t.set_defaults(run=commands.bench_llm)
    return t


def _add_bench_generation(kinds) -> argparse.ArgumentParser:
    g = kinds.add_parser("generation", help="time to the first token and per token of a decoder with random weights")
    g.add_argument("--shape", default="llama-3.1-8b", help="llama-3.1-8b, llama-3.2-1b, qwen3-8b or a folder with a "
                   "config.json (default llama-3.1-8b)")  # fmt: skip
    g.add_argument("--recipes", nargs="+", help="data-free ones (default bf16 fp8 w4a16 w4a4-nvfp4 w4a4-int4)")
    g.add_argument("--prompt", type=int, default=2048, help="tokens of the prompt (default 2048)")
    g.add_argument("--tokens", type=int, default=64, help="timed steps behind it (default 64)")
    g.add_argument("--batch", type=int, default=1, help="sequences (default 1)")
    g.set_defaults(run=commands.bench_generation)
    return g


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one command; a problem the user can act on is one line on stderr and exit status 2."""
    _quiet()
    before, warnings.formatwarning = warnings.formatwarning, _short
    args = None
    try:
        args = build_parser().parse_args(argv)
        commands.check_numbers(args)
        args.run(args)
    except DQError as error:
        print(f"dq: {' '.join(str(error).split())}", file=sys.stderr)
        return 2
    except (ValueError, TypeError, RuntimeError) as error:
        said = _out_of_memory(error) or _in_a_pipeline(error)
        if not said:
            raise
        from dq.checks import line

        print(f"dq: {said}: {line(error)}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        resume = getattr(args, "resume", None)
        print("dq: interrupted" + (f"; the same command continues from {resume}" if resume else ""), file=sys.stderr)
        return 130
    except BrokenPipeError:  # `dq list | head`: the reader has what it wanted
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 141
    finally:
        warnings.formatwarning = before
    return 0


def _out_of_memory(error: BaseException) -> str:
    """What was asked for in vain, "" for other errors; torch has no class for a CPU's."""
    said = str(error).lower()
    if isinstance(error, RuntimeError) and ("out of memory" in said or "can't allocate memory" in said):
        return "out of memory, for this model or this size of a call"
    return ""


def _in_a_pipeline(error: BaseException) -> str:
    """That a diffusers pipeline raised an error itself, as they do about their arguments, or that one comes from below
    its call and not from dq, of sizes that do not fit, say; "" for all others, which keep their trace."""
    frames, trace = [], error.__traceback__
    while trace is not None:
        frames.append(trace.tb_frame)
        trace = trace.tb_next
    names = [f.f_globals.get("__name__", "") for f in frames]
    held = [i for i, name in enumerate(names) if name.startswith("diffusers.pipelines.")]
    if not held or any(name.startswith("dq.") for name in names[held[-1] :]):
        return ""
    if held[-1] == len(frames) - 1:
        return f"{type(frames[-1].f_locals.get('self')).__name__} refuses this call"
    if not isinstance(error, RuntimeError):
        return ""
    return f"{type(frames[held[0]].f_locals.get('self')).__name__} fails in this call"


def _short(message: Warning | str, category: type[Warning], filename: str, lineno: int, line: str | None = None) -> str:
    """What dq itself warns of in one line, without the line of source that called for it."""
    if category is UserWarning and is_ours(filename):
        return f"dq: warning: {' '.join(str(message).split())}\n"
    return f"{filename}:{lineno}: {category.__name__}: {message}\n"


# Loggers of other packages, and beginnings of what they say about features that no command uses, or just before they
# raise an error that is printed anyway. Everything else that they say is shown.
NOISE = {
    "torch.utils._pytree": "",
    "diffusers.quantizers.torchao.torchao_quantizer": "Unable to import `torchao`",
    "diffusers.models.modeling_utils": ("An error occurred while trying to fetch", "Defaulting to unsafe"),
}


def _worth_saying(record: logging.LogRecord) -> bool:
    return not (record.name in NOISE and record.getMessage().startswith(NOISE[record.name]))


def _quiet() -> None:
    for name in NOISE:
        logging.getLogger(name).addFilter(_worth_saying)  # once, however often it is called


if __name__ == "__main__":
    sys.exit(main())
