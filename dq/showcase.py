"""`dq demo`: quantize the model that ships with dq by several recipes and measure each against the 16-bit pipeline."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from typing import Any

import torch

from dq import checks
from dq.eval.compare import evaluate
from dq.eval.metrics import METRICS
from dq.pipelines.api import quantize
from dq.pipelines.calibration import Prompts
from dq.pipelines.demo import demo_kwargs, demo_path, demo_prompts
from dq.pipelines.loading import load
from dq.recipe import Recipe
from dq.registry import DQError

RECIPES = ("fp8", "w4a4-int4", "w4a4-int4-convrot", "w4a4-nvfp4-svd")
PROMPTS, CALIBRATION_PROMPTS = 256, 16  # captions that ship with the demo; the last ones calibrate


def demo_pipeline(device: str | None = None, outliers: bool = False, dtype: torch.dtype = torch.bfloat16) -> Any:
    """The demo FluxPipeline.

    With `outliers`, about 1 % of the input channels of its linears carry values 20 to 60 times larger, by a rewrite
    that leaves its function unchanged: as hard to quantize as a large model.
    """
    pipe = load(demo_path(), dtype, device)
    if outliers:
        from dq.pipelines.demo.outliers import inject_outliers

        inject_outliers(pipe.transformer)
    return pipe


def demo_calibration(count: int = CALIBRATION_PROMPTS) -> Prompts:
    """The calibration that the demo uses: captions that no evaluation prompt repeats."""
    kwargs = demo_kwargs()
    steps = kwargs.pop("num_inference_steps")
    return Prompts(demo_prompts(PROMPTS)[-count:], steps=steps, batch_size=8, **kwargs)


def run_demo(
    out: str = "report.html",
    *,
    recipes: Sequence[str] = RECIPES,
    prompts: int = 24,
    outliers: bool = False,
    device: str | None = None,
    metrics: Sequence[str] | None = None,
    say: Callable[[str], None] = print,
) -> Any:
    """Evaluates every recipe on the demo pipeline and writes the report; returns the `EvalResult`.

    Raises:
        DQError: before anything runs: an unknown recipe, metric or device, a recipe that is named twice, an `out` that
            cannot be written, or prompts that would overlap the calibration.
    """
    checks.output_file(out, (".html", ".json"))
    checks.device(device)
    for name in recipes:
        Recipe.load(name)
        if list(recipes).count(name) > 1:
            raise DQError(f"recipe {name} is named twice")
    for name in metrics or ():
        METRICS.get(name)
    checks.whole(prompts, "prompts", 1, PROMPTS - CALIBRATION_PROMPTS)
    chosen = demo_prompts(PROMPTS)

    def candidate(name: str):
        def make():
            pipe = demo_pipeline(device, outliers)
            with warnings.catch_warnings():
                # Data-free recipes get it too: per-layer SQNRs are then all of outputs on the same records.
                warnings.filterwarnings("ignore", "recipe .* needs no calibration")
                report = quantize(pipe, name, calibration=demo_calibration())
            say(str(report))
            return pipe, report

        return make

    result = evaluate(
        {name: candidate(name) for name in recipes},
        demo_pipeline(device, outliers),
        chosen[:prompts],
        metrics,
        kwargs=demo_kwargs(),
    )
    say(result.table())
    result.save(out)
    say(f"report: {out}")
    return result
