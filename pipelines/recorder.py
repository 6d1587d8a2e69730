"""Records the calls of a pipeline's denoisers: which step each belongs to, and which branch of guidance.

A step is over when the timestep or the latents change. Inside a step pipelines run classifier-free guidance as

    one call       a batch of twice the samples, the unconditional half first or the conditional one
    several calls  named by `cache_context` ("cond", "uncond", or as a guider names its predictions), or without names

and a call that stands alone and is not doubled is `single`. Names tell the branch; else the text does, since
`encode_prompt` gives the prompt's embeddings first; else the order that pipelines of this name use.
"""

from __future__ import annotations

import inspect
from typing import Any

import torch
from torch import Tensor

from dq.records import Record, RecordSampler, map_tensors, tensors
from dq.registry import DQError
from dq.stats import amplified

# Pipelines, by the beginning of their names, whose doubled batch has the conditional half first.
COND_FIRST = ("ZImage", "LuminaPipeline", "LuminaText2Img", "StableCascade", "Wuerstchen", "DiT")
PLUS_ONE = ("ZImage",)  # that guide by c + g (c - u), which is u + (g + 1) (c - u)
SAMPLES = ("hidden_states", "sample", "x")
TIMES = ("timestep", "timesteps", "t", "timestep_ratio")
COPIES = ("num_images_per_prompt", "num_videos_per_prompt", "num_waveforms_per_prompt")


def guidance_of(kwargs: dict[str, Any], pipe: Any, denoiser: str = "") -> float:
    """The scale g of `u + g (c - u)` in this run. A pipeline with `true_cfg_scale` guides by that one: its
    `guidance_scale` is an input of a distilled model. A second denoiser may have a scale of its own, and a guider has
    its own."""
    known = inspect.signature(pipe.__call__).parameters
    name = "true_cfg_scale" if "true_cfg_scale" in known else "guidance_scale"
    if denoiser.endswith("_2") and kwargs.get("guidance_scale_2") is not None:
        name = "guidance_scale_2"
    default = known[name].default if name in known else getattr(getattr(pipe, "guider", None), "guidance_scale", 1.0)
    value = kwargs.get(name, default)
    scale = float(value) if isinstance(value, int | float) else 1.0
    return scale + type(pipe).__name__.startswith(PLUS_ONE)


def branch_weight(branch: str, guidance: float) -> float:
    """How much an independent squared error of a branch counts in the guided output, mean over both branches 1."""
    both = amplified("cond", guidance) + amplified("uncond", guidance)
    return 1.0 if branch == "single" else 2.0 * amplified(branch, guidance) / both


class Text:
    """What `encode_prompt` of a pipeline makes of the prompt: the first thing that its first call gives."""

    def __init__(self, pipe: Any):
        self.pipe, self.first = pipe, None
        self._original = getattr(pipe, "encode_prompt", None)
        self._own = vars(pipe).get("encode_prompt")

    def attach(self) -> None:
        if callable(self._original):
            self.pipe.encode_prompt = self._encode

    def detach(self) -> None:
        vars(self.pipe).pop("encode_prompt", None)
        if self._own is not None:
            self.pipe.encode_prompt = self._own

    def _encode(self, *args: Any, **kwargs: Any) -> Any:
        result = self._original(*args, **kwargs)
        if self.first is None:
            found = tensors(result[0] if isinstance(result, tuple) else result)
            self.first = found[0] if found and found[0].dim() > 1 else None
            self.first = self.first[0] if self.first is not None and self.first.dim() > 2 else self.first
        return result

    def inside(self, tree: Any) -> bool:
        """Whether the first sample of a tensor in a call's arguments is the prompt's embedding."""
        if self.first is None:
            return False
        samples = (t if t.dim() == self.first.dim() else t[0] for t in tensors(tree) if t.dim() and len(t))
        same = (t for t in samples if t.shape == self.first.shape)
        return any(torch.equal(t, self.first.to(t)) for t in same)


class Recorder:
    """Hooks one denoiser. Calls of one step wait until the step is over: only then it is known how it was guided.

    Args:
        prompts: `dq.Prompts`, for its numbers and keyword arguments.
    """

    def __init__(self, model: Any, name: str, prompts: Any, pipe: Any, text: Text):
        self.model, self.name, self.pipe, self.text = model, name, pipe, text
        self.sampler = RecordSampler(prompts.records, prompts.bins, prompts.seed)
        self.guidance = guidance_of(prompts.kwargs, pipe, name)
        self._copies = next((int(prompts.kwargs[n]) for n in COPIES if prompts.kwargs.get(n)), 1)
        self._context: str | None = None
        self._pending: list[Record] = []
        self._prompt = self._samples = self._step = 0

    def attach(self, steps: int | None, bar: Any) -> None:
        self._steps, self._bar = steps or 1, bar
        self._hooks = [
            self.model.register_forward_pre_hook(self._before, with_kwargs=True),
            self.model.register_forward_hook(self._after),
        ]
        self._original = getattr(self.model, "cache_context", None)
        if self._original is not None:
            self.model.cache_context = self._named_context

    def detach(self) -> None:
        for hook in getattr(self, "_hooks", ()):
            hook.remove()
        self.model.__dict__.pop("cache_context", None)

    def _named_context(self, name: str, *args: Any, **kwargs: Any):
        self._context = name
        return self._original(name, *args, **kwargs)

    def begin(self, prompt: int, batch: int) -> None:
        """A run of the pipeline starts; `prompt` is the first of `batch`."""
        self._prompt, self._samples, self._step = prompt, batch * self._copies, 0
        self._context, self._pending, self.text.first = None, [], None

    def _before(self, module: Any, args: tuple, kwargs: dict) -> None:
        record = Record(args, dict(kwargs), self._prompt, self._step, self._own_steps(), timestep(args, kwargs),
                        self._context or "", self.name)  # fmt: skip
        if self._pending and not _one_step(self._pending[-1], record):
            self.flush()
            record.step = self._step
        self._pending.append(record)

    def _own_steps(self) -> int:
        """Of two denoisers that follow one another (Wan 2.2) the steps of this one."""
        ratio = getattr(getattr(self.pipe, "config", None), "boundary_ratio", None)
        times = getattr(getattr(self.pipe, "scheduler", None), "timesteps", None)
        if ratio is None or not isinstance(times, Tensor) or self.name not in ("transformer", "transformer_2"):
            return self._steps
        early = int((times >= ratio * self.pipe.scheduler.config.num_train_timesteps).sum())
        return max(1, early if self.name == "transformer" else len(times) - early)

    def _after(self, module: Any, args: tuple, output: Any) -> None:
        for t in tensors(output if not hasattr(output, "to_tuple") else output.to_tuple()):
            if t.is_floating_point() and not torch.isfinite(t).all():
                raise DQError(
                    f"{self.name} gave NaN or Inf at step {self._step} of prompt {self._prompt} during calibration; "
                    "check the 16-bit pipeline (a float16 overflow? try bfloat16)"
                )

    def flush(self) -> None:
        """The step is over: names its branches and offers its records."""
        pending, self._pending = self._pending, []
        if not pending:
            return
        for part in self._split(pending[0]) if len(pending) == 1 else self._named(pending):
            part.weight = branch_weight(part.branch, self.guidance)
            self.sampler.offer(part)
        self._step += 1
        self._bar.update(1)

    def _named(self, pending: list[Record]) -> list[Record]:
        """Branches of several calls in a step: by their names, by their text, or the first one is the conditional."""
        known = [self.text.inside((r.args, r.kwargs)) for r in pending]
        cond = known.index(True) if known.count(True) == 1 else 0
        for i, record in enumerate(pending):
            name = record.branch if record.branch != "cond_uncond" else ""
            branch = ("uncond" if "uncond" in name or "neg" in name else "cond") if name else ""
            record.branch = branch or ("cond" if i == cond else "uncond")
        return pending

    def _split(self, record: Record) -> list[Record]:
        """A doubled batch becomes one record per branch; any other call stays whole."""
        record.branch, latents = "single", _latents(record)
        guided = getattr(self.pipe, "do_classifier_free_guidance", True)
        if not guided or latents is None or len(latents) != 2 * self._samples:
            return [record]
        lists = isinstance(latents, list)
        halves = [tuple(_half(tree, i, len(latents), lists) for tree in (record.args, record.kwargs)) for i in (0, 1)]
        first, second = (self.text.inside(half) for half in halves)
        cond = first if first != second else type(self.pipe).__name__.startswith(COND_FIRST)
        fields = (record.prompt, record.step, record.steps, record.timestep)
        branches = ("cond", "uncond") if cond else ("uncond", "cond")
        return [Record(*half, *fields, branch, self.name) for half, branch in zip(halves, branches, strict=True)]


class CallRecorder(Recorder):
    """For what is no denoiser, such as a text encoder: every call is a record; there are no steps and no branches."""

    def _before(self, module: Any, args: tuple, kwargs: dict) -> None:
        self.sampler.offer(Record(args, dict(kwargs), self._prompt, denoiser=self.name))


def _half(tree: Any, index: int, double: int, lists: bool) -> Any:
    """Half of every tensor, and with `lists` of every list of tensors, that has `double` samples."""
    if lists and isinstance(tree, list | tuple) and len(tree) == double and all(isinstance(t, Tensor) for t in tree):
        return tree[: double // 2] if index == 0 else tree[double // 2 :]
    if isinstance(tree, dict):
        return {k: _half(v, index, double, lists) for k, v in tree.items()}
    if type(tree) in (list, tuple):
        return type(tree)(_half(v, index, double, lists) for v in tree)
    return map_tensors(tree, lambda t: t.chunk(2)[index] if t.dim() and len(t) == double else t)


def _latents(record: Record) -> Any:
    """What the denoiser denoises: a tensor, or a list of one per sample; None if there is nothing of the kind."""
    value = next((record.kwargs[n] for n in SAMPLES if n in record.kwargs), record.args[0] if record.args else None)
    return value if isinstance(value, Tensor | list) else None


def _one_step(a: Record, b: Record) -> bool:
    """Whether two calls in a row belong to one step: same timestep, same latents (of their first sample)."""
    times = a.timestep == b.timestep or (a.timestep != a.timestep and b.timestep != b.timestep)  # both NaN
    first, second = (latents if latents is None else latents[0] for latents in map(_latents, (a, b)))
    if first is None or second is None:
        return times and a.branch != b.branch
    return times and first.shape == second.shape and torch.equal(first, second)


def timestep(args: tuple, kwargs: dict) -> float:
    """The timestep of a denoiser's call, in its own unit; NaN if it has none."""
    value = next((kwargs[n] for n in TIMES if n in kwargs), args[1] if len(args) > 1 else None)
    if isinstance(value, Tensor):
        return float(value.reshape(-1)[0]) if value.numel() else float("nan")
    return float(value) if isinstance(value, (int, float)) else float("nan")
