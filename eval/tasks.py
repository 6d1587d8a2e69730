"""Likelihood tasks of lm-evaluation-harness on quantized models, beside the 16-bit one, sample by sample.

    acc[task]        the harness' own number and standard error (`acc_norm[task]` and the like too, whatever it gives)
    acc-diff[task]   mean of candidate - reference over the same samples; se = std(differences) / sqrt(samples)

A task of a hundred samples has a standard error of some five points; the paired difference has a far smaller one, and
is what says whether quantization cost anything. The harness is optional: `pip install lm_eval`.
"""

from __future__ import annotations

import importlib.util
import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from torch import nn

from dq import checks
from dq.eval import environment
from dq.eval.perplexity import TextResult, TextScore, _open
from dq.registry import DQError, suggest, typed


def why_not() -> str:
    """Why tasks cannot run here; "" if they can."""
    missing = importlib.util.find_spec("lm_eval") is None
    return "tasks run in lm-evaluation-harness, which is not installed: pip install lm_eval" if missing else ""


def evaluate_tasks(
    candidates: Any,
    tasks: str | Sequence[str],
    tokenizer: Any,
    *,
    reference: nn.Module | None = None,
    shots: int | None = None,
    limit: int | None = None,
    batch: int = 8,
    folder: str | Path | None = None,
    seed: int = 0,
) -> TextResult:
    """Runs tasks on candidates, and on the reference first.

    Args:
        candidates: a model, or a dict name -> model or function without arguments, called when its turn comes.
        tasks: names, as `lm_eval ls tasks` prints them.
        reference: the 16-bit model; None gives no differences.
        shots: examples in front of every question; default: what the task says.
        limit: use only the first samples of each task.
        batch: samples at a time.
        folder: with task files (YAML) of your own.
        seed: of the choice of examples.

    Returns:
        scores like those of `evaluate_text`; `tokens` counts samples.

    Raises:
        DQError: the harness is not installed, an unknown task, a candidate that is no model, or whatever the harness
            refuses (its data sets come from a hub unless they are on disk).
    """
    if why_not():
        raise DQError(why_not())
    names = [tasks] if isinstance(tasks, str) else list(typed(tasks, (list, tuple), "tasks is a list of names"))
    named = candidates if isinstance(candidates, Mapping) else {"candidate": candidates}
    if not named or "reference" in named or not names:
        raise DQError("evaluate_tasks takes tasks, and a model or a dict name -> model, none of them 'reference'")
    checks.whole(batch, "batch")
    settings = {"tasks": names, "shots": shots, "limit": limit, "seed": checks.seed(seed)}
    run = _runner(names, tokenizer, batch, folder, settings)
    scores: dict[str, dict[str, TextScore]] = {}
    base = None
    if reference is not None:
        scores["reference"], base = run(reference)
    for name, candidate in named.items():
        model = candidate if isinstance(candidate, nn.Module) else _open(candidate, str(name))
        if model is reference:
            raise DQError(f"{name} is the reference itself; quantize works in place: load the reference anew")
        mine, samples = run(model)
        scores[str(name)] = mine | (_differences(samples, base) if base is not None else {})
        del model
    return TextResult(scores, settings, environment.describe(None))


Samples = dict[str, dict[str, dict[Any, float]]]  # task -> metric -> sample -> value


def _runner(names: list[str], tokenizer: Any, batch: int, folder: Any, settings: dict[str, Any]) -> Callable[..., Any]:
    """`(model) -> (scores, samples)`; unknown tasks are refused now."""
    import lm_eval
    from lm_eval.models.huggingface import HFLM
    from lm_eval.tasks import TaskManager

    with checks.one_line("lm_eval finds no tasks"):
        manager = TaskManager(include_path=None if folder is None else str(folder))
    for name in names:
        if name not in manager.all_tasks:
            raise DQError(f"lm_eval knows no task {name!r}{suggest(str(name), manager.all_tasks)}")

    def run(model: nn.Module) -> tuple[dict[str, TextScore], Samples]:
        with checks.one_line("lm_eval cannot run the tasks"):
            wrapped = HFLM(pretrained=model, tokenizer=tokenizer, batch_size=batch)
            found = lm_eval.simple_evaluate(
                wrapped, tasks=names, num_fewshot=settings["shots"], limit=settings["limit"], task_manager=manager,
                random_seed=settings["seed"], numpy_random_seed=settings["seed"], torch_random_seed=settings["seed"],
                fewshot_random_seed=settings["seed"], log_samples=True, bootstrap_iters=1000,
            )  # fmt: skip
        return _scores(found), _samples(found)

    return run


def _scores(found: dict[str, Any]) -> dict[str, TextScore]:
    """`metric,filter` of every task as `metric[task]`."""
    out = {}
    for task, values in found["results"].items():
        count = int(found.get("n-samples", {}).get(task, {}).get("effective", 0))
        for key, value in values.items():
            metric, _, rest = key.partition(",")
            if not rest or metric.endswith("_stderr") or not isinstance(value, int | float):
                continue
            error = values.get(f"{metric}_stderr,{rest}")
            known = isinstance(error, int | float) and math.isfinite(error)
            out[f"{metric}[{task}]"] = TextScore(float(value), float(error) if known else None, count)
    return out


def _samples(found: dict[str, Any]) -> Samples:
    """The numbers of every sample, by its place in the task."""
    out: Samples = {}
    for task, entries in (found.get("samples") or {}).items():
        for entry in entries:
            for metric in entry.get("metrics") or ():
                value = entry.get(metric)
                if isinstance(value, int | float):
                    out.setdefault(task, {}).setdefault(metric, {})[entry["doc_id"]] = float(value)
    return out


def _differences(mine: Samples, base: Samples) -> dict[str, TextScore]:
    """`metric-diff[task]` over the samples that both have."""
    out = {}
    for task, metrics in mine.items():
        for metric, values in metrics.items():
            other = base.get(task, {}).get(metric, {})
            gaps = [v - other[i] for i, v in values.items() if i in other]
            if gaps:
                mean, n = sum(gaps) / len(gaps), len(gaps)
                spread = math.sqrt(sum((g - mean) ** 2 for g in gaps) / (n - 1) / n) if n > 1 else None
                out[f"{metric}-diff[{task}]"] = TextScore(mean, spread, n)
    return out
