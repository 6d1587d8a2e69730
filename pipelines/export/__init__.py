"""Checkpoints for other engines; every module here registers an `Exporter`."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import nn

from dq import checks
from dq.conv import rows
from dq.linear import quantized_linears
from dq.pipelines.adapters import refuse_plain
from dq.pipelines.exported import EXPORTERS, Exporter, Job, library_of
from dq.pipelines.importing import load_exported
from dq.qtensor import check_finite
from dq.records import Record, map_tensors
from dq.registry import DQError, suggest
from dq.transforms import apply_steps

__all__ = ["export", "load_exported"]


def export(
    obj: Any,
    folder: str | Path,
    format: str = "compressed-tensors",
    *,
    components: str | Sequence[str] | None = None,
    weight_only: bool = False,
    calibration: Any = None,
    max_shard_size: str = "5GB",
) -> Path:
    """Writes a quantized model as another engine reads it. Codes and scales go over as they are.

    Everything is written beside the folder and moved there at the end: an export that fails leaves nothing behind.

    Args:
        obj: a transformers or diffusers model that dq quantized, or a pipeline: all its quantized components.
        folder: new or without weights.
        format: a name of `dq list exports`. `compressed-tensors` (transformers, vLLM, SGLang), `modelopt`
            (TensorRT-LLM, vLLM, SGLang, diffusers) and `gguf` for language models; `modelopt`, `comfyui`, `bfl` and
            `nunchaku-lite` for diffusers models.
        components: of a pipeline; default: all that are quantized.
        weight_only: declares 16-bit activations, whatever the recipe said.
        calibration: what `dq.quantize` takes; for formats that store a scale of the activations, which dq computes per
            token instead.
        max_shard_size: of one file, in formats that have several.

    Returns:
        the folder. A pipeline with one quantized component fills it as the model alone would, unless the format is one
        that diffusers reads as a whole pipeline; with several, there is a folder for each.

    Raises:
        DQError: an unknown format, nothing quantized, a folder that holds weights; a layer that the format cannot
            describe, with the reason. Nothing has been written then.
    """
    exporter = EXPORTERS.get(format)
    models = _models(obj, components, exporter)
    target = checks.output_folder(folder)
    held = [p.name for pattern in ("*.safetensors", "*.gguf") for p in target.glob(pattern)]
    if held:
        raise DQError(f"{target} holds weights already ({held[0]}): give a new folder")
    whole = exporter.pipeline and not isinstance(obj, nn.Module)
    apart = whole or len(models) > 1
    jobs = {}
    for name, model in models.items():
        title = f"{target.name}-{name}" if len(models) > 1 else target.name
        jobs[name] = Job(model, quantized_linears(model), weight_only, shard_size=max_shard_size, title=title)
    if calibration is not None:
        _measure(obj, jobs, calibration)
    for job in jobs.values():
        _check_layers(exporter, job)
    with checks.one_line(f"cannot export to {target}"), _staged(target) as stage:
        for name, job in jobs.items():
            exporter.write(job, stage / name if apart else stage)
        if whole:
            _write_rest(obj, jobs, stage)
    return target


def _models(obj: Any, components: Any, exporter: Exporter) -> dict[str, nn.Module]:
    """Component -> quantized model; {"": model} for a model."""
    why = exporter.available()
    if why:
        raise DQError(f"export format {exporter.name} cannot run here: {why}")
    held = getattr(obj, "components", None)
    if isinstance(held, dict) and not isinstance(obj, nn.Module):
        found = {n: m for n, m in held.items() if isinstance(m, nn.Module) and quantized_linears(m)}
        names = [components] if isinstance(components, str) else list(found) if components is None else list(components)
        for name in names:
            if name not in found:
                raise DQError(f"{type(obj).__name__} has no quantized component {name!r}{suggest(str(name), found)}")
        if not names:
            raise DQError(f"nothing in {type(obj).__name__} is quantized: dq.quantize it first")
        models = {n: found[n] for n in names}
    else:
        models = {"": obj}
    for model in models.values():
        _check_model(model, exporter)
    return models


def _check_model(model: Any, exporter: Exporter) -> None:
    library = library_of(model)
    if not library:
        raise DQError(f"export takes a transformers or diffusers model or a pipeline, got {type(model).__name__}")
    if library not in exporter.libraries:
        known = ", ".join(e.name for e in EXPORTERS if library in e.libraries)
        raise DQError(f"{exporter.name} describes no {library} model; for {type(model).__name__} there are {known}")
    refuse_plain(model)
    adapter = next((n for n, _ in model.named_modules() if n.endswith((".lora_A", ".lora_down"))), None)
    if adapter is not None:
        raise DQError(f"{type(model).__name__} has adapters ({adapter}), which no file here holds: unload or fuse them")


def _check_layers(exporter: Exporter, job: Job) -> None:
    """Raises DQError with the first layer of every reason, and how many others share it."""
    reasons = {name: exporter.refuse(job, name) for name in job.layers}
    refused = {name: why for name, why in reasons.items() if why}
    if not refused:
        return
    counts, lines = Counter(refused.values()), []
    for why, count in counts.items():
        first = next(n for n, w in refused.items() if w == why)
        lines.append(f"{first}{f' (and {count - 1} more)' if count > 1 else ''}: {why}")
    shown = "; ".join(lines[:3]) + (f"; and {len(lines) - 3} other reasons" if len(lines) > 3 else "")
    raise DQError(f"cannot export to {exporter.name}: {shown}")


def _measure(obj: Any, jobs: dict[str, Job], calibration: Any) -> None:
    """Fills in `Job.amax`, for jobs that quantize activations at all."""
    from dq.pipelines.api import _calibrate, _silent

    asked = {n: j for n, j in jobs.items() if any(j.activations(x) is not None for x in j.layers)}
    if asked:
        found = _calibrate(obj, {n: j.model for n, j in asked.items()}, calibration, _silent)
        for name, job in asked.items():
            job.amax = _input_amax(job, found[name][0])


def _input_amax(job: Job, records: Sequence[Record]) -> dict[str, float]:
    """name -> max |pre(x)| of every quantized linear's input over the records."""
    found: dict[str, float] = {}

    def watch(name: str):
        def hook(module: nn.Module, args: tuple) -> None:
            if args[0].numel():
                check_finite(args[0], f"the input of {name}")
                x = rows(module, args[0])
                x = apply_steps(x.to(torch.float32), module.steps) if module.steps else x
                found[name] = max(found.get(name, 0.0), float(x.abs().amax()))

        return hook

    hooks = [layer.register_forward_pre_hook(watch(name)) for name, layer in job.layers.items()]
    device = next(job.model.parameters()).device
    try:
        with torch.no_grad():
            for record in records:
                args, kwargs = map_tensors((record.args, record.kwargs), lambda t: t.to(device))
                job.model(*args, **kwargs)
    finally:
        for hook in hooks:
            hook.remove()
    return found


@contextmanager
def _staged(target: Path) -> Iterator[Path]:
    """A new folder beside `target` whose content goes there if the body ends well, and nowhere if it does not."""
    target.parent.mkdir(parents=True, exist_ok=True)
    outer = Path(tempfile.mkdtemp(prefix=f".{target.name}.", dir=target.parent))
    stage = outer / target.name
    stage.mkdir()  # not the outer one, which only its owner may read
    try:
        yield stage
        if not target.exists():
            os.replace(stage, target)
        else:
            for path in sorted(stage.iterdir(), key=lambda p: p.name == "config.json"):
                if path.is_dir() and (target / path.name).is_dir():
                    shutil.rmtree(target / path.name)
                os.replace(path, target / path.name)
    finally:
        shutil.rmtree(outer, ignore_errors=True)


def _write_rest(pipe: Any, jobs: dict[str, Job], folder: Path) -> None:
    """The other components of a pipeline and its model_index.json."""
    for name, component in pipe.components.items():
        if name not in jobs and hasattr(component, "save_pretrained"):
            component.save_pretrained(folder / name)
    pipe.save_config(folder)
