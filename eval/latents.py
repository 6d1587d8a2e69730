"""Latents along the trajectory: kept for the reference, compared on the fly for a candidate."""

from __future__ import annotations

import time

import torch

from dq.eval.generate import Observer


class Trajectory(Observer):
    """Keeps the reference's latents after every step, for the first `limit` prompts, on the CPU in their own dtype."""

    def __init__(self, limit: int):
        self.limit, self.seconds = limit, 0.0
        self.latents: dict[tuple[int, int], torch.Tensor] = {}  # (prompt, step) -> [...]

    def step(self, rows: range, step: int, latents: torch.Tensor | None) -> None:
        start = time.perf_counter()
        if latents is not None and latents.shape[0] == len(rows):
            for row, prompt in enumerate(rows):
                if prompt < self.limit:
                    self.latents[prompt, step] = latents[row].detach().to("cpu", copy=True)
        self.seconds += time.perf_counter() - start


class Drift(Observer):
    """Relative latent error ||z - z_ref||^2 / ||z_ref||^2 of a candidate, per prompt and step."""

    def __init__(self, reference: Trajectory):
        self.reference, self.seconds = reference.latents, 0.0
        self.errors: dict[tuple[int, int], float] = {}

    def step(self, rows: range, step: int, latents: torch.Tensor | None) -> None:
        start = time.perf_counter()
        for row, prompt in enumerate(rows if latents is not None else ()):
            expected = self.reference.get((prompt, step))
            if expected is not None and latents.shape[0] == len(rows) and latents[row].shape == expected.shape:
                expected, actual = expected.double(), latents[row].detach().cpu().double()
                error = (actual - expected).square().sum() / expected.square().sum().clamp_min(1e-30)
                self.errors[prompt, step] = float(error)
        self.seconds += time.perf_counter() - start

    def curve(self) -> list[float]:
        """Return the mean over prompts per step."""
        steps = sorted({step for _, step in self.errors})
        return [_mean([e for (_, s), e in self.errors.items() if s == step]) for step in steps]

    def warning(self) -> str | None:
        """Return a line if the latents are far apart after the first of several steps: then the noise itself differs.

        Different noise gives an error near 2; quantization cannot do that in one short step.
        """
        curve = self.curve()
        if len(curve) < 4 or curve[0] < 0.2:
            return None
        return f"latent error {curve[0]:.2f} after the first step: do both use the same dtype and scheduler?"

    def final(self) -> list[float]:
        """Return the error after the last step, per prompt."""
        last = max((step for _, step in self.errors), default=-1)
        return [error for (_, step), error in sorted(self.errors.items()) if step == last]


def _mean(values: list[float]) -> float:
    return sum(values) / len(values)
