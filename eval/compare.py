"""Compare candidate pipelines with a reference: one call, all metrics, each with N and an interval."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterable, Mapping
from os import PathLike
from typing import Any

import torch

from dq import checks
from dq.eval import environment
from dq.eval.denoiser import Recorder, denoisers
from dq.eval.generate import Settings, generate
from dq.eval.images import load_images
from dq.eval.inspection import denoiser_bytes, describe_artifacts, describe_layers, open_candidate, recipe_names
from dq.eval.judges import Baseline, Judges
from dq.eval.latents import Drift, Trajectory
from dq.eval.metrics import Metric
from dq.eval.result import CandidateResult, EvalResult, clean
from dq.registry import DQError, suggest


def evaluate(
    candidates: Any,
    reference: Any,
    prompts: Iterable[str],
    metrics: Iterable[str | Metric] | None = None,
    *,
    kwargs: Mapping[str, Any] | None = None,
    steps: int | None = None,
    seed: int = 0,
    batch_size: int = 8,
    records: int = 64,
    trajectories: int = 64,
    resamples: int = 1000,
    reports: Mapping[str, Any] | None = None,
    device: str | torch.device | None = None,
    progress: bool = True,
    done: Callable[[CandidateResult], Any] | None = None,
) -> EvalResult:
    """Measure how close candidates stay to a reference: same seeds, same initial latents, prompt by prompt.

    Always measured, besides `metrics`:
    model-error: ||y - y_ref||^2 / ||y_ref||^2 of the denoiser on the reference's own inputs, mean over up to `records`
        calls spread over steps and prompts. No trajectory drift, so candidates are ranked by it.
    latent-error: ||z - z_ref||^2 / ||z_ref||^2 of the latents after the last step, mean over the first `trajectories`
        prompts; the curve over steps is in `latent_curve`.

    Args:
        candidates: a pipeline, or a dict name -> pipeline. A function without arguments is called when its turn comes
            and its result dropped afterwards (one pipeline in memory at a time); it may return (pipeline, report).
        reference: the 16-bit pipeline (or a function that returns it), or cached images: a dict prompt -> image, or
            the folder that `save_images` wrote. Cached images give image metrics only.
        prompts: one image is generated per prompt, with seed `seed + index`.
        metrics: names or `Metric` objects; None for all that are registered. One that cannot run says why.
        kwargs: for the pipelines' `__call__` (height, width, guidance_scale, negative_prompt ...).
        steps: short for kwargs["num_inference_steps"].
        batch_size: prompts per call; changes speed, not the noise.
        resamples: of the 95 % bootstrap intervals (a tenth of it for set metrics).
        reports: name -> what `dq.quantize` returned (recipe, plan and seconds for the report). Without it, the recipe,
            calibration and source that a quantized model carries are shown.
        device: where the metrics run; CUDA if there is one.
        done: called with each candidate's result as soon as it is there.

    Raises:
        DQError: no prompts, unknown metric, an argument of the wrong type or range, a candidate that is the reference
            itself, an image or output with NaN/Inf (naming candidate, prompt and step).
    """
    named = _named(candidates, reports)
    settings = _settings(prompts, kwargs, steps, seed, batch_size, progress)
    judges = Judges(metrics, resamples, device)
    base = _baseline(reference, settings, checks.whole(records, "records"), checks.whole(trajectories, "trajectories"))
    result = EvalResult(
        prompts=list(settings.prompts),
        candidates=[],
        settings=clean({"seed": seed, "batch_size": batch_size, "records": len(base.calls), **settings.kwargs}),
        environment=environment.describe(base.device),
        reference_nbytes=base.nbytes,
        reference_seconds=base.seconds,
        unavailable=dict(judges.unavailable),
        images={"reference": base.images},
    )
    for name, candidate in named.items():
        found, images = _candidate(str(name), candidate, (reports or {}).get(name), base, settings, judges)
        result.candidates.append(found)
        result.images[str(name)] = images
        if done is not None:
            done(found)
        _free()
    _move_unavailable(result)
    return result


def _settings(
    prompts: Iterable[str], kwargs: Mapping[str, Any] | None, steps: int | None, seed: int, batch: int, progress: bool
) -> Settings:
    found = checks.texts(
        getattr(prompts, "prompts", prompts), "prompts", "evaluate needs at least one prompt, the list is empty"
    )
    if kwargs is not None and not isinstance(kwargs, Mapping):
        raise DQError(f"kwargs must be a dict of arguments of the pipeline, got {type(kwargs).__name__}")
    call = dict(kwargs or {})
    if steps is not None:
        call["num_inference_steps"] = steps
    if call.get("num_inference_steps") is not None:
        checks.whole(call["num_inference_steps"], "steps (num_inference_steps)")
    for name in ("guidance_scale", "true_cfg_scale"):
        if call.get(name) is not None:
            checks.finite(call[name], name)
    return Settings(tuple(found), call, checks.seed(seed), checks.whole(batch, "batch_size"), progress)


def _named(candidates: Any, reports: Any) -> Mapping[str, Any]:
    """name -> candidate; every report belongs to one of them."""
    named = candidates if isinstance(candidates, Mapping) else {"candidate": candidates}
    if not named:
        raise DQError("evaluate got no candidates: pass a pipeline, or a dict name -> pipeline")
    if reports is not None and not isinstance(reports, Mapping):
        raise DQError(f"reports must be a dict name -> what dq.quantize returned, got {type(reports).__name__}")
    for name in reports or {}:
        if name not in named:
            raise DQError(f"reports names {name!r}, which is no candidate{suggest(str(name), map(str, named))}")
    if "reference" in named:
        raise DQError("a candidate cannot be named 'reference'")
    return named


def _baseline(reference: Any, settings: Settings, records: int, trajectories: int) -> Baseline:
    if isinstance(reference, (str, PathLike, Mapping)):
        images = load_images(reference, settings.prompts)
        return Baseline(images, reason="the reference is a set of cached images, not a pipeline")
    pipe, _ = open_candidate(reference, "reference")
    trajectory = Trajectory(trajectories)
    steps = settings.kwargs.get("num_inference_steps")
    with Recorder(pipe, len(settings.prompts), steps, records) as recorder:
        run = generate(pipe, "reference", settings, (trajectory, recorder))
    modules = denoisers(pipe)
    return Baseline(
        images=run.images,
        seconds=run.seconds,
        nbytes=denoiser_bytes(modules.values()),
        trajectory=trajectory,
        calls=recorder.selected(),
        modules=tuple(id(m) for m in modules.values()) if pipe is reference else (),
        device=getattr(pipe, "device", None),
        quantized=bool(describe_layers(modules)),
    )


def _candidate(
    name: str, candidate: Any, report: Any, base: Baseline, settings: Settings, judges: Judges
) -> tuple[CandidateResult, torch.Tensor]:
    pipe, given = open_candidate(candidate, name)
    report = report if report is not None else given
    modules = denoisers(pipe)
    if any(id(m) in base.modules for m in modules.values()):
        raise DQError(
            f"{name} shares its denoiser with the reference; quantize works in place: load the reference anew"
        )
    found = CandidateResult(name, nbytes=denoiser_bytes(modules.values()))
    drift = Drift(base.trajectory or Trajectory(0))
    run = generate(pipe, name, settings, (drift,))
    found.seconds = run.seconds
    found.scores["model-error"] = judges.model(found, pipe, base)
    found.scores["latent-error"] = judges.latent(found, pipe, drift, base)
    found.scores.update(judges.images(base, run.images, name))
    found.layers = describe_layers(modules)  # after the run: kernels and grids are those that really ran
    found.recipe = str(getattr(report, "recipe", "") or ", ".join(recipe_names(modules.values())))
    found.plan = _plan(getattr(report, "plan", None)) or describe_artifacts(modules)
    found.quantize_seconds = getattr(report, "seconds", None)
    doubts = (drift.warning(), "the reference itself holds quantized layers" if base.quantized else None)
    found.notes = [doubt for doubt in doubts if doubt]
    return found, run.images


def _plan(plan: Any) -> Any:
    """Keep a list of dicts as it is (a table in the report), print anything else."""
    rows = plan if isinstance(plan, list) else getattr(plan, "rows", None)
    if isinstance(rows, (list, tuple)) and rows and all(isinstance(r, Mapping) for r in rows):
        return clean(list(rows))
    return None if plan is None else str(plan)


def _free() -> None:
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def _move_unavailable(result: EvalResult) -> None:
    """A score that no candidate has belongs to what did not run."""
    for name in result.score_names():
        scores = [c.scores[name] for c in result.candidates]
        if name not in result.unavailable and all(s.value is None for s in scores):
            result.unavailable[name] = scores[0].reason or "no value"
