"""Run one pipeline over the prompts: same seed and same initial noise per prompt, whatever the batch size."""

from __future__ import annotations

import inspect
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from tqdm import tqdm

from dq.registry import DQError


@dataclass(frozen=True)
class Settings:
    """What every pipeline is called with.

    kwargs go to the pipeline's `__call__`; a tensor in them whose name ends in `_embeds` or `_mask` and whose first
    dimension is the number of prompts is split into batches with the prompts.
    """

    prompts: tuple[str, ...]
    kwargs: Mapping[str, Any] = field(default_factory=dict)
    seed: int = 0
    batch_size: int = 8
    progress: bool = True
    step_bar: bool = False  # the pipeline's own bar over steps, in place of one over images

    def batches(self) -> list[range]:
        n = len(self.prompts)
        return [range(i, min(i + self.batch_size, n)) for i in range(0, n, self.batch_size)]


class Observer:
    """What watches a run: called before each batch, after each denoising step and at the end."""

    seconds = 0.0  # spent watching, taken off the run's time

    def batch(self, rows: range) -> None:
        """Prompts `rows` start."""

    def step(self, rows: range, step: int, latents: torch.Tensor | None) -> None:
        """Denoising step `step` of prompts `rows` ended with `latents` [len(rows), ...]."""


@dataclass
class Run:
    """Images uint8 [N, 3, H, W] on the CPU (8 bits: what a PNG holds) and seconds of generation."""

    images: torch.Tensor
    seconds: float


def generate(pipe: Any, label: str, settings: Settings, observers: tuple[Observer, ...] = ()) -> Run:
    """Generate one image per prompt.

    Prompt i gets its own CPU generator seeded `seed + i`, so its noise depends on neither the batch nor the device.
    Raises DQError, naming `label` and the prompt, if an image holds NaN or Inf.
    """
    images, seconds = [], 0.0
    bar = tqdm(
        total=len(settings.prompts),
        desc=f"evaluate {label}",
        unit="image",
        disable=settings.step_bar or not settings.progress,
    )
    with bar, nullcontext() if settings.step_bar else _quiet(pipe), torch.no_grad():
        for rows in settings.batches():
            watch = _Watch(rows, observers)
            for observer in observers:
                observer.batch(rows)
            watched = sum(o.seconds for o in observers)
            start = _now()
            output = pipe(**_arguments(pipe, settings, rows, watch))
            seconds += _now() - start - (sum(o.seconds for o in observers) - watched)
            images.append(_to_uint8(output, label, settings, rows, watch))
            bar.update(len(rows))
    return Run(torch.cat(images), seconds)


def _now() -> float:
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return time.perf_counter()


@contextmanager
def _quiet(pipe: Any) -> Iterator[None]:
    """Switch the pipeline's own progress bar off and put its setting back."""
    old = dict(getattr(pipe, "_progress_bar_config", None) or {})
    if hasattr(pipe, "set_progress_bar_config"):
        pipe.set_progress_bar_config(**{**old, "disable": True})
    try:
        yield
    finally:
        if hasattr(pipe, "set_progress_bar_config"):
            pipe.set_progress_bar_config(**old)


def accepted(pipe: Any) -> set[str] | None:
    """Return the argument names that the pipeline's `__call__` takes; None if it takes any (**kwargs)."""
    parameters = inspect.signature(pipe.__call__).parameters
    if any(p.kind is p.VAR_KEYWORD for p in parameters.values()):
        return None
    return set(parameters)


def _arguments(pipe: Any, settings: Settings, rows: range, watch: _Watch) -> dict[str, Any]:
    known = accepted(pipe)
    unknown = sorted(set(settings.kwargs) - known) if known is not None else []
    if unknown:
        raise DQError(f"{type(pipe).__name__} takes no argument {', '.join(unknown)}: leave it out")
    if known and "num_frames" in known and settings.kwargs.get("num_frames") != 1:
        raise DQError(
            f"{type(pipe).__name__} makes videos, and this takes images: --num-frames 1, in Python num_frames=1 among "
            "kwargs, makes one, and pipe(...) a video"
        )
    call = {name: _rows_of(name, value, settings, rows) for name, value in settings.kwargs.items()}
    ours = {
        "generator": [torch.Generator("cpu").manual_seed(settings.seed + i) for i in rows],
        "output_type": "pt",
        "callback_on_step_end": watch,
    }
    if "prompt_embeds" not in call:
        ours["prompt"] = [settings.prompts[i] for i in rows]
    call.update({name: value for name, value in ours.items() if known is None or name in known})
    return call


def _rows_of(name: str, value: Any, settings: Settings, rows: range) -> Any:
    if name.startswith("negative_prompt") and isinstance(value, str):
        return [value] * len(rows)  # several pipelines do not broadcast one negative prompt over a batch
    per_prompt = name.endswith(("_embeds", "_mask")) and isinstance(value, torch.Tensor)
    if per_prompt and value.shape[0] == len(settings.prompts):
        return value[rows.start : rows.stop]
    return value


class _Watch:
    """The step callback of one batch: passes latents on and remembers where the first non-finite one appeared."""

    def __init__(self, rows: range, observers: tuple[Observer, ...]):
        self.rows, self.observers = rows, observers
        self.bad: dict[int, int] = {}  # row within the batch -> first bad step

    def __call__(self, pipe: Any, step: int, timestep: Any, kwargs: dict[str, Any]) -> dict[str, Any]:
        latents = kwargs.get("latents")
        if latents is not None and latents.shape[0] == len(self.rows):
            finite = torch.isfinite(latents).flatten(1).all(1).tolist()
            for row, fine in enumerate(finite):
                if not fine:
                    self.bad.setdefault(row, int(step))
        for observer in self.observers:
            observer.step(self.rows, int(step), latents)
        return kwargs


def _to_uint8(output: Any, label: str, settings: Settings, rows: range, watch: _Watch) -> torch.Tensor:
    images = getattr(output, "images", None)
    frames = getattr(output, "frames", None)
    if isinstance(frames, torch.Tensor) and frames.ndim == 5 and frames.shape[1] == 1:  # a video of one image
        images = frames[:, 0]
    if images is None:
        images = output[0] if isinstance(output, (tuple, list)) else output
    images = as_float(images, label)
    if len(images) != len(rows):
        raise DQError(f"{label}: {len(images)} images for {len(rows)} prompts; num_images_per_prompt must be 1")
    for row, image in enumerate(images):
        if not torch.isfinite(image).all():
            where = f", its latents from step {watch.bad[row] + 1} on" if row in watch.bad else ""
            prompt = settings.prompts[rows[row]]
            raise DQError(f"{label}: the image of prompt {rows[row]} ({prompt!r}) holds NaN or Inf{where}")
    return (images.clamp(0, 1) * 255).round().to(torch.uint8)


def as_float(images: Any, label: str = "images") -> torch.Tensor:
    """Return float [N, 3, H, W] in [0, 1] on the CPU from a tensor of that kind, uint8, numpy NHWC or PIL images.

    Raises DQError for anything else (video, latents).
    """
    if isinstance(images, (list, tuple)):
        images = torch.stack([_one(image) for image in images])
    elif not isinstance(images, torch.Tensor):
        images = torch.as_tensor(np.asarray(images)).movedim(-1, 1)
    if images.ndim != 4 or images.shape[1] != 3:
        raise DQError(f"{label}: expected RGB images [N, 3, H, W], got shape {tuple(images.shape)}")
    images = images.detach().cpu()
    return images.float() / 255 if images.dtype == torch.uint8 else images.float()


def _one(image: Any) -> torch.Tensor:
    if isinstance(image, torch.Tensor):
        return image
    if hasattr(image, "convert"):
        image = image.convert("RGB")
    return torch.as_tensor(np.array(image)).movedim(-1, 0)
