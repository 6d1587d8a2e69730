"""`dq bench generation` and `dq bench step`: how fast a decoder answers, a denoiser steps, in 16 bits and by recipe."""

from __future__ import annotations

import gc
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn

from dq import checks
from dq.eval.bench import step
from dq.eval.bench.generation import measure
from dq.eval.environment import describe
from dq.linear import layer_info
from dq.pipelines.api import quantize
from dq.pipelines.decoding import StaticDecoder, random_decoder
from dq.pipelines.decoding import shape as decoder_shape
from dq.pipelines.denoising import random_denoiser
from dq.pipelines.loading import quiet_libraries
from dq.planning import model_bytes
from dq.recipe import Recipe
from dq.registry import DQError

BASE = "bf16"
RECIPES = (BASE, "fp8", "w4a16", "w4a4-nvfp4", "w4a4-int4")
STEP_RECIPES = ("fp8", "w4a4-int4", "w4a4-nvfp4")


def bench_generation(
    source: str = "llama-3.1-8b",
    recipes: Sequence[str] = RECIPES,
    *,
    prompt: int = 2048,
    tokens: int = 64,
    batch: int = 1,
    device: str | None = None,
    compiled: bool | None = None,
    say: Callable[[dict[str, Any]], None] = lambda row: None,
    out: str | None = None,
) -> dict[str, Any]:
    """One JSON-clean row per recipe, the 16-bit model first, all of the same random weights.

    Args:
        source: a known shape, or a folder with a config.json.
        recipes: data-free ones; weights are random, so there is nothing to calibrate on.
        prompt, tokens, batch: length of the prompt, timed steps behind it, sequences.
        compiled: None for CUDA alone.
        say: is given every row as soon as it is there.
        out: a file that holds all rows so far.

    Raises:
        DQError: an unknown shape, recipe or device, or a recipe that calibrates, before anything runs.
    """
    config, target, named = decoder_shape(source), checks.device(device), [r for r in recipes if r != BASE]
    for name in named:
        if Recipe.load(name).needs_calibration:
            raise DQError(f"recipe {name} needs calibration: on random weights take a data-free one")
    for word, value in (("prompt", prompt), ("tokens", tokens), ("batch", batch)):
        checks.whole(value, word, 1)
    quiet_libraries()
    shared = {"prompt": prompt, "tokens": tokens, "batch": batch}
    found = {"shape": source, **shared, "rows": [], "environment": describe(target)}
    on = target.type == "cuda" if compiled is None else compiled
    for name in (BASE, *named):
        row = _measured(name, config, target, on, shared)
        found["rows"].append(row)
        say(row)
        if out is not None:
            Path(out).write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
    return found


def _measured(name: str, config: dict[str, Any], device: torch.device, on: bool, shared: dict[str, int]) -> Any:
    """The row; of a recipe that cannot run, the reason: the others go on. Without the 16-bit row there is no table."""
    try:
        return _row(name, random_decoder(config, device), on, **shared)
    except Exception as error:  # a compiler may raise anything
        if name == BASE:
            raise
        return {"engine": name, "failed": f"{type(error).__name__}: {checks.line(error, 200)}"}


def _row(name: str, model: nn.Module, compiled: bool, prompt: int, tokens: int, batch: int) -> dict[str, Any]:
    seconds, device = None, next(model.parameters()).device
    if name != BASE:
        seconds = quantize(model, name, progress=False).seconds
    if compiled:
        torch._dynamo.reset()
    decoder = StaticDecoder(model, prompt + tokens + 8, batch, compiled)
    times = measure(decoder, model.config.vocab_size, prompt, tokens)
    plain = "cuBLAS" if device.type == "cuda" else "torch"
    kernels = ", ".join(sorted({x.backend for x in layer_info(model) if x.backend})) or plain
    row = {"engine": name, "gb": model_bytes(model) / 1e9, "seconds": seconds, **times, "kernels": kernels}
    if device.type == "cuda":
        row["peak_gb"] = torch.cuda.max_memory_allocated(device) / 1e9
        del decoder, model
        gc.collect()
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(device)
    return row


def bench_step(
    shape: str = "flux.1-dev",
    recipes: Sequence[str] | None = None,
    repeat: int = 10,
    device: str | None = None,
    *,
    compiled: bool = True,
    out: str | None = None,
) -> dict[str, Any]:
    """One JSON-clean row per recipe (`dq.eval.bench.step`), the 16-bit model first, all of the same random weights;
    `cosine` is that of the outputs, `ran` the kernels of quantized layers, `kernels` what took the longest on CUDA.

    Args:
        recipes: data-free ones.
        compiled: also with compiled blocks.
        out: a file that holds all rows so far.

    Raises:
        DQError: an unknown shape, recipe or device, or a recipe that calibrates, before anything runs.
    """
    target, named = checks.device(device), [r for r in recipes or STEP_RECIPES if r != BASE]
    for name in named:
        if Recipe.load(name).needs_calibration:
            raise DQError(f"recipe {name} needs calibration: on random weights take a data-free one")
    checks.whole(repeat, "repeat", 1)
    quiet_libraries()
    found: dict[str, Any] = {"shape": shape, "repeat": repeat, "rows": [], "environment": describe(target)}
    reference = None
    for name in (BASE, *named):
        row, y = _step_row(name, shape, target, repeat, compiled)
        reference = y if reference is None else reference
        found["rows"].append(row | {"cosine": step.cosine(y, reference)})
        if out is not None:
            Path(out).write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
    return found


def _step_row(name: str, shape: str, device: torch.device, repeat: int, compiled: bool) -> tuple[dict[str, Any], Any]:
    model, inputs = random_denoiser(shape, device)
    row: dict[str, Any] = {"engine": name}
    if name != BASE:
        row["quantize_s"] = quantize(model, name, progress=False).seconds
    torch.compiler.reset()
    times, y = step.measure(model, inputs, repeat, compiled)
    ran = sorted({f"{x.backend}, {x.grid}" for x in layer_info(model) if x.backend})
    row |= {"gb": model_bytes(model) / 1e9, **times, "ran": "; ".join(ran)}
    if device.type == "cuda":
        row["kernels"] = step.breakdown(model, inputs)
        del model
        gc.collect()
        torch.cuda.empty_cache()
    return row, y.cpu()
