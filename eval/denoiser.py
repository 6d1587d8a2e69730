"""The denoiser on the reference's own inputs: an error without trajectory drift.

`Recorder` keeps calls of the reference's denoiser while it generates; `replay` runs another model on them.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from dq.eval.generate import Observer
from dq.eval.inspection import device_of
from dq.records import map_tensors
from dq.registry import DQError

COMPONENTS = ("transformer", "transformer_2", "unet")


def denoisers(pipe: Any) -> dict[str, nn.Module]:
    """Return the pipeline's denoisers by component name."""
    found = {name: getattr(pipe, name, None) for name in COMPONENTS}
    return {name: module for name, module in found.items() if isinstance(module, nn.Module)}


@dataclass(frozen=True)
class Call:
    """One denoiser call: inputs on the CPU, the reference's output, where it came from.

    `exact` says that one sample was cut out of the batch; else the whole batch is kept.
    """

    component: str
    prompt: int
    step: int
    args: tuple
    kwargs: dict[str, Any]
    output: torch.Tensor
    exact: bool


def tensor_of(output: Any) -> torch.Tensor:
    """Return the prediction of a denoiser's output: the tensor, `.sample`, or the first of a tuple."""
    if isinstance(output, torch.Tensor):
        return output
    return output.sample if hasattr(output, "sample") else output[0]


def _cut(value: Any, row: int, size: int, name: str = "") -> Any:
    """Cut sample `row` out of every batched tensor in nested tuples, lists and dicts.

    Batched means that the first dimension is `size`; position ids are [sequence, axes], without a batch dimension.
    """
    if isinstance(value, torch.Tensor):
        batched = value.ndim > 0 and value.shape[0] == size and not (name.endswith("_ids") and value.ndim == 2)
        return value[row : row + 1].clone() if batched else value
    if isinstance(value, dict):
        return {key: _cut(item, row, size, str(key)) for key, item in value.items()}
    if type(value) in (tuple, list):
        return type(value)(_cut(item, row, size, name) for item in value)
    return value


def relative_error(value: torch.Tensor, reference: torch.Tensor) -> float:
    """Return ||value - reference||^2 / ||reference||^2 over all elements, float64."""
    value, reference = value.detach().cpu().double(), reference.detach().cpu().double()
    return float((value - reference).square().sum() / reference.square().sum().clamp_min(1e-30))


class Recorder(Observer):
    """Keeps about `limit` calls, spread evenly over steps and prompts, one sample each.

    A selected sample is cut out of the batch and run through the reference once more, so that both models later see
    the very same shapes and an identical copy gives error 0. If the cut does not reproduce the batch's own output (an
    input without batch dimension was cut), the whole batch is kept instead.
    """

    def __init__(self, pipe: Any, prompts: int, steps: int | None, limit: int):
        self.pipe, self.prompts, self.given_steps, self.limit = pipe, prompts, steps, limit
        self.calls: list[Call] = []
        self.seconds = 0.0
        self._rows, self._step, self._busy = range(0), 0, False
        self._wanted: dict[int, list[int]] | None = None
        self._pending: tuple | None = None
        self._handles: list[Any] = []

    def __enter__(self) -> Recorder:
        for name, module in denoisers(self.pipe).items():
            before = module.register_forward_pre_hook(lambda m, a, k: self._before(a, k), with_kwargs=True)
            after = module.register_forward_hook(lambda m, a, o, c=name: self._after(c, m, o))
            self._handles += [before, after]
        return self

    def __exit__(self, *error: Any) -> None:
        for handle in self._handles:
            handle.remove()

    def batch(self, rows: range) -> None:
        self._rows, self._step = rows, 0

    def step(self, rows: range, step: int, latents: torch.Tensor | None) -> None:
        self._step = step + 1

    def selected(self) -> list[Call]:
        """Return at most `limit` calls, thinned evenly (a CFG step with two calls gives two)."""
        calls = sorted(self.calls, key=lambda call: (call.step, call.prompt))  # not in the order of the batches
        keep = min(self.limit, len(calls))
        return [calls[i * len(calls) // keep] for i in range(keep)]

    def _plan(self) -> dict[int, list[int]]:
        """Choose (step, prompt) pairs: evenly over the flat index, prompts rotated by step against aliasing."""
        steps = self.given_steps or getattr(self.pipe, "num_timesteps", None) or 50
        total, wanted = int(steps) * self.prompts, {}
        n = min(self.limit, total)
        for k in range(n):
            step, prompt = divmod((2 * k + 1) * total // (2 * n), self.prompts)
            wanted.setdefault(step, []).append((prompt + step) % self.prompts)
        return wanted

    def _before(self, args: tuple, kwargs: dict[str, Any]) -> None:
        if self._busy:
            return
        self._wanted = self._plan() if self._wanted is None else self._wanted
        rows = [p for p in self._wanted.get(self._step, ()) if p in self._rows]
        # copied before the call, because a model may change its inputs in place
        self._pending = (rows, *map_tensors((args, kwargs), lambda t: t.detach().clone())) if rows else None

    def _after(self, component: str, module: nn.Module, output: Any) -> None:
        if self._busy or self._pending is None:
            return
        start, self._busy = time.perf_counter(), True
        (rows, args, kwargs), self._pending = self._pending, None
        try:
            for prompt in rows:
                self.calls.append(self._keep(component, module, prompt, args, kwargs, tensor_of(output)))
        finally:
            self._busy = False
            self.seconds += time.perf_counter() - start

    def _keep(
        self, component: str, module: nn.Module, prompt: int, args: tuple, kwargs: dict[str, Any], output: torch.Tensor
    ) -> Call:
        size = output.shape[0]
        # with CFG as a doubled batch the two halves take turns
        half = len(self._rows) * (len(self.calls) % 2) if size == 2 * len(self._rows) else 0
        row = half + prompt - self._rows.start
        inputs, exact = (args, kwargs), size == 1
        if size > 1:
            cut = _cut(inputs, row, size)
            alone = _try(module, *cut)
            same = alone is not None and alone.shape == output[row : row + 1].shape
            if same and relative_error(alone, output[row : row + 1]) < 1e-2:
                inputs, output, exact = cut, alone, True
        args, kwargs = map_tensors(inputs, lambda t: t.cpu())
        return Call(component, prompt, self._step, args, kwargs, output.detach().cpu().clone(), exact)


def _try(module: nn.Module, args: tuple, kwargs: dict[str, Any]) -> torch.Tensor | None:
    try:
        return tensor_of(module(*args, **kwargs))
    except Exception:  # whatever a model raises on a wrongly cut input, the whole batch is kept then
        return None


@torch.no_grad()
def replay(pipe: Any, calls: list[Call], label: str) -> list[float]:
    """Run the pipeline's denoisers on recorded calls; return ||y - y_ref||^2 / ||y_ref||^2 of each.

    Raises DQError if a component is missing, a shape differs or an output is not finite.
    """
    modules, errors = denoisers(pipe), []
    for call in calls:
        module = modules.get(call.component)
        if module is None:
            raise DQError(f"{label} has no component {call.component!r}, which the reference has")
        device = device_of(module)
        args, kwargs = map_tensors((call.args, call.kwargs), lambda t, d=device: t.to(d, copy=True))
        output = tensor_of(module(*args, **kwargs))
        if output.shape != call.output.shape:
            raise DQError(f"{label}: {call.component} gives {tuple(output.shape)}, not {tuple(call.output.shape)}")
        if not torch.isfinite(output).all():
            where = f"step {call.step + 1} of prompt {call.prompt}"
            raise DQError(f"{label}: {call.component} gives NaN or Inf on the reference's own input ({where})")
        errors.append(relative_error(output, call.output))
    return errors
