"""The public verbs on what a user holds: a diffusers pipeline, or a model."""

from __future__ import annotations

import importlib
import time
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

from torch import Tensor, nn
from tqdm import tqdm

from dq import checks
from dq.folding import Folded, fold_model
from dq.group import check_weights
from dq.linear import quantized_linears
from dq.loop import QuantizeReport, dequantize_model, quantize_model
from dq.ops import MODES
from dq.pipelines.adapters import base_model, refuse_adapters, without_adapters
from dq.pipelines.calibration import DENOISERS, Prompts
from dq.pipelines.casting import refuse_fused
from dq.pipelines.experts import close_experts, open_experts, opened, settle
from dq.pipelines.given_records import checked_record
from dq.pipelines.rewriting import REWRITTEN, apply_rewrites, check_rewrites
from dq.pipelines.text import Text
from dq.planning import Plan, make_plan
from dq.recipe import Recipe
from dq.records import Record, digest
from dq.registry import DQError, suggest, typed


def _models(obj: Any, components: str | Sequence[str] | None) -> dict[str, nn.Module]:
    """component name -> model: the denoisers of a pipeline, the components asked for, or {"": model}."""
    if isinstance(obj, nn.Module):
        if components:
            raise DQError(f"components={components!r} goes with a pipeline; this is the model {type(obj).__name__}")
        return {"": obj}
    held = getattr(obj, "components", None)
    if not isinstance(held, dict):
        hint = ": open it by dq.load first" if isinstance(obj, str | Path) else ""
        raise DQError(f"expected a diffusers pipeline or a model, got {type(obj).__name__}{hint}")
    models = {n: m for n, m in held.items() if isinstance(m, nn.Module)}
    names = [components] if isinstance(components, str) else components or [n for n in DENOISERS if n in models]
    for name in typed(names, (list, tuple, set), "components is a name or a list of names"):
        if name not in models:
            raise DQError(f"{type(obj).__name__} has no component {name!r}{suggest(str(name), models)}")
    if not names:
        raise DQError(f"{type(obj).__name__} has no denoiser; name components=[...] out of {', '.join(models)}")
    return {n: models[n] for n in names}


def _chosen(obj: Any, recipe: Any, components: Any) -> tuple[dict[str, nn.Module], dict[str, Recipe]]:
    """component -> model, and -> recipe."""
    if not isinstance(recipe, dict) or isinstance(obj, nn.Module) or "linear" in recipe or not recipe:
        models = _models(obj, components)
        return models, dict.fromkeys(models, Recipe.load(recipe))
    if components is not None:
        raise DQError("recipes by component say which components: leave components out")
    models = _models(obj, list(recipe))
    return models, {n: Recipe.load(recipe[n]) for n in models}


def _plans(models: dict[str, nn.Module], recipes: dict[str, Recipe], skip: Sequence[str]) -> dict[str, Plan]:
    """One plan per component; a skip pattern must match in at least one of them."""
    skip = () if skip is None else skip
    for model in models.values():
        refuse_fused(model)
    if len(models) == 1 or not isinstance(skip, list | tuple | set):  # which make_plan refuses
        return {n: make_plan(m, recipes[n], skip) for n, m in models.items()}
    used: set[str] = set()
    plans = {}
    for name, model in models.items():
        mine = [p for p in skip if _matches_any(model, p)]
        used.update(mine)
        plans[name] = make_plan(model, recipes[name], mine)
    for pattern in skip:
        if pattern not in used:
            make_plan(next(iter(models.values())), next(iter(recipes.values())), [pattern])  # raises with near names
    return plans


def _matches_any(model: nn.Module, pattern: str) -> bool:
    from dq.family import matches

    typed(pattern, str, "a skip pattern is text")
    return any(matches(n, pattern) for n, m in model.named_modules() if isinstance(m, nn.Linear))


@without_adapters
def plan(obj: Any, recipe: Any, *, components: Any = None, skip: Sequence[str] = ()) -> Plan | dict[str, Plan]:
    """What `quantize` would do: rows, bytes, estimated seconds and memory. Nothing is changed.

    Returns:
        a `Plan` (printable), or a dict of them if several components would be quantized.

    Raises:
        DQError: as `quantize`.
    """
    models, recipes = _chosen(obj, recipe, components)
    with opened(models.values()):
        plans = _plans(models, recipes, skip)
        for name, model in models.items():
            check_rewrites(model, plans[name], values=False)
    return next(iter(plans.values())) if len(plans) == 1 else plans


@without_adapters
def quantize(
    obj: Any,
    recipe: Any,
    *,
    calibration: Any = None,
    components: Any = None,
    skip: Sequence[str] = (),
    device: Any = None,
    resume: str | None = None,
    activations: str | None = None,
    sequential: bool | str = False,
    progress: bool | Callable[..., Any] = True,
) -> QuantizeReport:
    """Quantizes a pipeline's denoisers, or a model, in place.

    Args:
        obj: a diffusers pipeline or a model.
        recipe: name of a preset, path of a TOML file, or a `Recipe`; of a pipeline also a dict component -> recipe.
        calibration: `dq.Prompts` for a pipeline, `dq.Text` for a model that reads tokens, or records (`dq.Record`s, or
            dicts of keyword arguments) for any model.
        components: pipeline components to quantize; default: the denoisers.
        skip: patterns of linears that stay in 16 bits.
        device: where transforms and rounding are computed; default: where the weights are.
        resume: folder for finished blocks; calling again with it continues after an interruption, with the same bits.
        activations: `faithful` or `native` activation grid at run time; default: native on a GPU, faithful on a CPU.
        sequential: True to calibrate every block on what the quantized blocks before it give, not the 16-bit ones;
            `linears` to do so linear by linear within a block too (GPTQ's true-sequential; runs each block once more
            for every group of linears).
        progress: False for no bars, or a callable with tqdm's signature.

    Raises:
        DQError: unknown recipe, component or skip pattern; nothing to quantize; quantized already; NaN/Inf in a
            weight or a calibration input; calibration that is missing or empty.
    """
    start, (models, recipes) = time.perf_counter(), _chosen(obj, recipe, components)
    if activations is not None and activations not in MODES:
        raise DQError(f"unknown activations mode {activations!r}{suggest(str(activations), MODES)}")
    typed(resume, (str, Path, type(None)), "resume is the path of a folder")
    prefix, device = _prefix(sequential), None if device is None else checks.device(device)
    originals = {name: open_experts(model) for name, model in models.items()}
    try:
        plans = _checked_plans(models, recipes, skip, calibration)
        bar = progress if callable(progress) else (tqdm if progress else _silent)
        records = _calibrate(obj, models, calibration, bar)
        reports = {}
        for name, model in models.items():
            found, described = records.get(name, ([], {}))
            folder = f"{resume}/{name}" if resume and name else resume
            described = described | ({"sequential": sequential} if sequential and found else {})
            with _closes_if_rewritten(model, plans[name]):
                if plans[name].recipe.rewrites:
                    plans[name] = _rewritten(model, plans[name], found, skip, bar)
                reports[name] = quantize_model(
                    model, plans[name], found, device=device, resume=folder, prefix=prefix, calibration=described,
                    progress=bar,
                )  # fmt: skip
            for layer in quantized_linears(model).values():
                layer.activations_mode = activations or "auto"
            attach(model)
    finally:
        for name, model in models.items():
            settle(model, originals[name])
    return replace(_merge(reports), seconds=time.perf_counter() - start)


def _prefix(sequential: bool | str) -> str:
    """What calibrates a linear, as `quantize_model` calls it."""
    if sequential not in (True, False, "linears"):
        raise DQError(f"sequential is True, False or 'linears', got {sequential!r}")
    return {True: "quantized", False: "fp"}.get(sequential, "linears")


def _checked_plans(
    models: dict[str, nn.Module], recipes: dict[str, Recipe], skip: Sequence[str], calibration: Any
) -> dict[str, Plan]:
    """Plans; what would fail half way is refused, what is odd is said, before calibration, which would only report the
    NaN that a bad weight causes."""
    plans = _plans(models, recipes, skip)
    for name, model in models.items():
        check_weights(model, plans[name])
        check_rewrites(model, plans[name])
    for remark in {r for p in plans.values() for r in p.remarks if r.startswith("recipe rule")}:
        warnings.warn(remark, stacklevel=3)
    needed = any(p.recipe.needs_calibration for p in plans.values())
    if isinstance(calibration, Prompts | Text) and not needed:
        what = f"recipe {next(iter(plans.values())).recipe.name!r} needs no calibration: it only verifies groups"
        warnings.warn(what + " and measures layers; leave it out to save the time", stacklevel=3)
    return plans


def _rewritten(model: nn.Module, planned: Plan, records: Sequence[Record], skip: Sequence[str], bar: Any) -> Plan:
    """Applies the recipe's rewrites to the 16-bit model and plans anew: a rewrite may untie weights or add biases."""
    if hasattr(plugin := _plugin(model), "own"):
        plugin.own(model)  # untying is written there
    apply_rewrites(model, planned, records, bar)
    return make_plan(model, planned.recipe, [p for p in skip or () if _matches_any(model, p)])


@contextmanager
def _closes_if_rewritten(model: nn.Module, planned: Plan) -> Iterator[None]:
    """A failure while or after the model is rewritten leaves weights that are no fresh start: a second rewrite would
    rotate them twice. A copy to go back to would need the model's memory again, so the model is marked, and
    `check_rewrites` refuses it from then on."""
    try:
        yield
    except BaseException:
        if getattr(model, "dq_rewritten", ""):
            warnings.warn(f"{model.dq_rewritten}: {REWRITTEN}", stacklevel=4)
        raise
    model.__dict__.pop("dq_rewritten", None)


def _silent(*args: Any, **kwargs: Any):
    return tqdm(*args, **(kwargs | {"disable": True}))


def _calibrate(obj: Any, models: dict[str, nn.Module], calibration: Any, bar: Any) -> dict[str, tuple[list, dict]]:
    if calibration is None:
        return {}
    if isinstance(calibration, Prompts):
        if isinstance(obj, nn.Module):
            what = "pass the pipeline, not one of its models (a language model takes dq.Text)"
            raise DQError(f"dq.Prompts runs a pipeline: {what}")
        found = calibration.collect(obj, models, bar)
        return {
            c: (records, described | {"records_sha256": digest(records)}) for c, (records, described) in found.items()
        }
    if len(models) != 1:
        kind = "dq.Text" if isinstance(calibration, Text) else "records"
        raise DQError(f"{kind} can calibrate one model at a time; name one component, components=[...]")
    model = next(iter(models.values()))
    if isinstance(calibration, Text):
        found = calibration.collect(model)
        return {next(iter(models)): (found, calibration.describe() | {"records_sha256": digest(found)})}
    found = [checked_record(r, i, model) for i, r in enumerate(_iterate(calibration))]
    if not found:
        raise DQError(
            "calibration is empty: it gave no record; pass dq.Prompts([...]), dq.Text([...]), records, or None"
        )
    described = {"records": len(found), "sha256": digest(found)}
    return {next(iter(models)): (found, described)}


def _iterate(calibration: Any) -> Iterable[Any]:
    if isinstance(calibration, (Mapping, Record, Tensor)):
        raise DQError(f"calibration takes a list of records; wrap the {type(calibration).__name__} in a list")
    if isinstance(calibration, (str, bytes)) or not hasattr(calibration, "__iter__"):
        hint = " (of a file: dq.Text.from_file, dq.Prompts.from_file)" if isinstance(calibration, str) else ""
        raise DQError(f"calibration must be dq.Prompts, dq.Text or records, got {type(calibration).__name__}{hint}")
    return calibration


def fold(obj: Any, *, components: Any = None) -> Folded | dict[str, Folded]:
    """Moves the divisions of smoothing into the layers before, where that is exact; see dq.folding. In place.

    A LoRA made for the 16-bit model no longer fits a folded one: fold only what is used without.

    Returns:
        which linears no longer divide, and why others still do; a dict of these if there are several components.

    Raises:
        DQError: nothing is quantized, or adapters are attached.
    """
    done, obj = {}, base_model(obj)
    refuse_adapters(obj, "folded")
    for name, model in _models(obj, components).items():
        done[name] = fold_model(model)
        if done[name].layers and hasattr(model, "dq_artifact"):
            model.dq_artifact["folded"] = True
        attach(model)
    return next(iter(done.values())) if len(done) == 1 else done


def attach(model: nn.Module) -> None:
    """Lets `save_pretrained` / `from_pretrained` of diffusers and transformers carry the model; leaves others alone."""
    plugin = _plugin(model)
    if plugin is not None:
        plugin.attach(model)


def _plugin(model: nn.Module):
    """The plug-in module for the library that the model's class comes from, or None."""
    bases = {c.__module__.partition(".")[0] for c in type(model).__mro__}
    if "diffusers" in bases and hasattr(model, "register_to_config"):
        return importlib.import_module("dq.pipelines.hf_diffusers")
    if "transformers" in bases and hasattr(model, "config"):
        return importlib.import_module("dq.pipelines.hf_transformers")
    return None


@without_adapters
def dequantize(obj: Any, *, components: Any = None) -> Any:
    """Puts 16-bit linears back, in place; returns `obj`. The result keeps the quantization error of the weights.

    Args:
        components: of a pipeline; default: all that are quantized.

    Raises:
        DQError: nothing is quantized.
    """
    if components is None and isinstance(getattr(obj, "components", None), dict) and not isinstance(obj, nn.Module):
        held = {n: m for n, m in obj.components.items() if isinstance(m, nn.Module)}
        components = [n for n, m in held.items() if quantized_linears(m)]
        if not components:
            raise DQError(f"nothing in {type(obj).__name__} is quantized")
    models = _models(obj, components)
    found = {n: m for n, m in models.items() if quantized_linears(m)}
    if not found:
        raise DQError(f"nothing in {type(obj).__name__} is quantized")
    for model in found.values():
        dequantize_model(model)
        close_experts(model)
        plugin = _plugin(model)
        if plugin is not None:
            plugin.detach(model)
    return obj


def _merge(reports: dict[str, QuantizeReport]) -> QuantizeReport:
    """One report over all components; layer names get the component in front if there are several."""
    first = next(iter(reports.values()))
    if len(reports) == 1:
        return first
    layers = [replace(x, name=f"{c}.{x.name}") for c, r in reports.items() for x in r.layers]
    rows = tuple(row for r in reports.values() for row in r.plan.rows)
    return QuantizeReport(
        " + ".join(dict.fromkeys(r.recipe for r in reports.values())),
        sum(r.seconds for r in reports.values()),
        layers,
        sum(r.bytes_before for r in reports.values()),
        sum(r.bytes_after for r in reports.values()),
        replace(first.plan, model=" + ".join(r.plan.model for r in reports.values()), rows=rows),
        {c: r.calibration for c, r in reports.items()},
    )
