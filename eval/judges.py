"""From images, latents and recorded calls to scores with intervals."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import torch

from dq import checks
from dq.eval.bootstrap import mean_interval, statistic_interval
from dq.eval.denoiser import Call, replay
from dq.eval.generate import accepted, as_float
from dq.eval.latents import Drift, Trajectory
from dq.eval.metrics import METRICS, Metric
from dq.eval.result import CandidateResult, Score
from dq.registry import DQError

CHUNK = 64  # images moved to the metric's device at a time


@dataclass
class Baseline:
    """What the reference left behind.

    reason: why there are no latents and calls. modules: ids of its denoisers, if the caller keeps the pipeline alive.
    """

    images: torch.Tensor
    seconds: float = 0.0
    nbytes: int = 0
    trajectory: Trajectory | None = None
    calls: list[Call] = field(default_factory=list)
    reason: str | None = None
    modules: tuple[int, ...] = ()
    device: torch.device | None = None
    quantized: bool = False
    features: dict[str, torch.Tensor] = field(default_factory=dict)


class Judges:
    """The chosen metrics and how their scores are made."""

    def __init__(self, metrics: Iterable[str | Metric] | None, resamples: int, device: str | torch.device | None):
        if metrics is None:
            metrics = sorted(METRICS.names(), key=lambda n: (METRICS.get(n).kind != "paired", n))
        if not isinstance(metrics, Iterable):
            raise DQError(f"metrics must be a list of names (dq list metrics), got {metrics!r}")
        chosen = [metrics] if isinstance(metrics, str) else list(metrics)
        odd = [m for m in chosen if not isinstance(m, str) and not hasattr(m, "available")]
        if odd:
            raise DQError(f"a metric is a name (dq list metrics) or a Metric, got {odd[0]!r}")
        self.metrics = [METRICS.get(m) if isinstance(m, str) else m for m in chosen]
        reasons = {m.name: m.available() for m in self.metrics}
        self.unavailable = {name: reason for name, reason in reasons.items() if reason}
        self.resamples = checks.whole(resamples, "resamples")
        self.device = checks.device(device)

    def model(self, found: CandidateResult, pipe: Any, base: Baseline) -> Score:
        if not base.calls:
            return Score("model-error", reason=base.reason or "the reference has no transformer or unet to record")
        errors = replay(pipe, base.calls, found.name)
        for call, error in zip(base.calls, errors, strict=True):
            where = {"component": call.component, "prompt": call.prompt, "step": call.step}
            found.model_errors.append({**where, "error": error})
        return self._mean(Score("model-error"), errors)

    def latent(self, found: CandidateResult, pipe: Any, drift: Drift, base: Baseline) -> Score:
        found.latent_curve = drift.curve()
        errors = drift.final()
        if errors:
            return self._mean(Score("latent-error"), errors)
        known = accepted(pipe)
        if base.reason is None and known is not None and "callback_on_step_end" not in known:
            return Score("latent-error", reason=f"{type(pipe).__name__} takes no callback_on_step_end")
        return Score("latent-error", reason=base.reason or "no latents of the same shape were seen in both")

    def images(self, base: Baseline, images: torch.Tensor, name: str) -> dict[str, Score]:
        if images.shape != base.images.shape:
            shapes = f"{tuple(images.shape)}, the reference's {tuple(base.images.shape)}"
            raise DQError(f"{name}: its images have shape {shapes}")
        return {metric.name: self._score(metric, base, images) for metric in self.metrics}

    def _score(self, metric: Metric, base: Baseline, images: torch.Tensor) -> Score:
        score = Score(metric.name, metric.kind, metric.higher_is_better, metric.digits, n=len(images))
        score.reason = self.unavailable.get(metric.name)
        if score.reason:
            return score
        score.note = metric.note(len(images))
        try:
            measure = self._set if metric.kind == "set" else self._paired
            return measure(score, metric, base, images)
        except DQError as error:  # too few or too small images: the other metrics still count
            score.reason = str(error)
            return score

    def _paired(self, score: Score, metric: Metric, base: Baseline, images: torch.Tensor) -> Score:
        parts = zip(base.images.split(CHUNK), images.split(CHUNK), strict=True)
        values = [metric.compute(self._float(a), self._float(b)).double().cpu() for a, b in parts]
        return self._mean(score, torch.cat(values).tolist())

    def _set(self, score: Score, metric: Any, base: Baseline, images: torch.Tensor) -> Score:
        if metric.name not in base.features:
            base.features[metric.name] = self._features(metric, base.images)
        x, y = base.features[metric.name], self._features(metric, images)
        score.value = metric.distance(x, y)
        resamples = max(self.resamples // 10, 1)
        interval = statistic_interval(lambda i: metric.distance(x[i], y[i]), len(x), resamples=resamples)
        score.low, score.high = interval or (None, None)
        return score

    def _features(self, metric: Any, images: torch.Tensor) -> torch.Tensor:
        return torch.cat([metric.features(self._float(part)).cpu() for part in images.split(CHUNK)])

    def _float(self, images: torch.Tensor) -> torch.Tensor:
        return as_float(images).to(self.device)

    def _mean(self, score: Score, values: list[float]) -> Score:
        score.values, score.n = values, len(values)
        score.value = sum(values) / len(values)
        score.low, score.high = mean_interval(values, resamples=self.resamples) or (None, None)
        return score
