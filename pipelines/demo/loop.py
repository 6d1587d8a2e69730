"""What both training stages share: one step as a CUDA graph, weight averaging, the learning rate, the clock."""

from __future__ import annotations

import copy
import math
import time

import torch


class Clock:
    """Seconds left of the piece of work; `progress` runs from 0 to 1 over `seconds` starting now."""

    def __init__(self, seconds: float):
        self.start, self.seconds = time.monotonic(), max(seconds, 1e-3)

    @property
    def progress(self) -> float:
        """Part of the time that has passed; more than 1 when it is over."""
        return (time.monotonic() - self.start) / self.seconds


def learning_rate(step: int, progress: float, peak: float, warmup: int, decay_from: float) -> float:
    """Linear warm-up over `warmup` steps, constant, then a half cosine to 2 % of the peak over the part of the time
    after `decay_from` (1.0: never decays)."""
    rate = peak * min(1.0, (step + 1) / warmup)
    if progress > decay_from:
        part = min(1.0, (progress - decay_from) / max(1e-6, 1 - decay_from))
        rate *= 0.02 + 0.98 * 0.5 * (1 + math.cos(math.pi * part))
    return rate


class Average:
    """Exponential moving average of the parameters of `modules` in float32, with a short ramp of the decay."""

    def __init__(self, modules: dict[str, torch.nn.Module], decay: float):
        self.models = {k: copy.deepcopy(m).requires_grad_(False).eval() for k, m in modules.items()}
        self.decay, self.steps = decay, 0
        self._source = [p.data for m in modules.values() for p in m.parameters()]
        self._target = [p.data for m in self.models.values() for p in m.parameters()]

    def update(self):
        """One step of the average, after one of the optimizer."""
        self.steps += 1
        decay = min(self.decay, (1 + self.steps) / (10 + self.steps))
        torch._foreach_lerp_(self._target, self._source, 1 - decay)


class Trainer:
    """Runs `loss_fn() -> scalar` with AdamW and gradient clipping. On CUDA the whole step, random numbers included, is
    captured in one CUDA graph after three eager steps: the model is so small that launches would dominate."""

    def __init__(self, params: list[torch.nn.Parameter], loss_fn, weight_decay: float = 0.01, graph: bool = True):
        self.params, self.loss_fn = params, loss_fn
        self.cuda = params[0].is_cuda
        device = params[0].device
        self.lr = torch.zeros((), device=device)
        self.optimizer = torch.optim.AdamW(
            params, lr=self.lr, betas=(0.9, 0.99), weight_decay=weight_decay, fused=True, capturable=self.cuda
        )
        self.loss_sum = torch.zeros((), device=device)
        self.graph, self.use_graph, self.done = None, graph and self.cuda, 0

    def _step(self):
        self.optimizer.zero_grad(set_to_none=True)
        loss = self.loss_fn()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self.params, 1.0, foreach=True)
        self.optimizer.step()
        self.loss_sum += loss.detach()

    def _capture(self):
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        try:
            with torch.cuda.graph(graph):
                self._step()
            self.graph = graph
        except Exception as error:  # e.g. an operation that waits for the GPU: train on without the graph
            torch.cuda.synchronize()
            print(f"no CUDA graph ({type(error).__name__}: {str(error)[:300]}); eager steps instead", flush=True)
            self.use_graph = False

    def step(self, rate: float):
        """One training step at the learning rate `rate`; returns before the device has finished."""
        self.lr.fill_(rate)
        if self.use_graph and self.graph is None and self.done == 3:
            self._capture()
        if self.graph is not None:
            self.graph.replay()
        elif self.use_graph:
            self._side_step()
        else:
            self._step()
        self.done += 1

    def _side_step(self):
        """A warm-up step on a side stream, as graph capture wants it."""
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            self._step()
        torch.cuda.current_stream().wait_stream(stream)

    def mean_loss(self, steps: int) -> float:
        """The mean loss since the last call; waits for the device."""
        value = self.loss_sum.item() / max(1, steps)
        self.loss_sum.zero_()
        return value


def run(
    trainer: Trainer, average: Average, clock: Clock, *, peak, warmup, decay_from, max_steps, log_every, on_log=None
):
    """Steps until the clock or `max_steps` runs out; prints the loss every `log_every` steps. Returns (steps, loss)."""
    step, last, loss, mark = 0, 0, float("nan"), time.monotonic()
    while clock.progress < 1 and step < max_steps:
        trainer.step(learning_rate(step, clock.progress, peak, warmup, decay_from))
        average.update()
        step += 1
        if step % 10 == 0 and trainer.cuda:
            torch.cuda.current_stream().synchronize()  # keeps the host's clock honest
        if step % log_every == 0 or step == max_steps:
            loss, now = trainer.mean_loss(step - last), time.monotonic()
            print(f"  step {step} loss {loss:.5f} {(step - last) / (now - mark):.2f} steps/s", flush=True)
            if not math.isfinite(loss):
                raise RuntimeError("the loss is not finite; lower the learning rate (--lr)")
            last, mark = step, now
            if on_log:
                on_log(step, loss)
    return step, loss
