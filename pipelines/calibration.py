"""`Prompts`: runs a pipeline and records the calls of its denoisers, stratified over steps x CFG branches."""

from __future__ import annotations

import hashlib
import inspect
import json
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from tqdm import tqdm

from dq.checks import finite, line, texts, whole
from dq.checks import seed as checked_seed
from dq.records import Record, RecordSampler, map_tensors, tensors
from dq.registry import DQError, suggest
from dq.stats import amplified

_NO_PROMPTS = "calibration got no prompts: pass a list of texts, or None for a data-free recipe"
DENOISERS = ("transformer", "transformer_2", "unet")


class Prompts:
    """Calibration by running the pipeline.

    Args:
        prompts: texts; a list, a generator, or one string.
        steps: denoising steps (`num_inference_steps`).
        records: how many denoiser calls are kept per component, whatever the number of prompts and steps.
        bins: step bins of the stratification.
        batch_size: prompts per pipeline call.
        seed: of the initial latents (prompt i uses seed + i) and of the sampling of records.
        kwargs: anything else the pipeline's `__call__` takes (height, guidance_scale, negative_prompt ...).

    Raises:
        DQError: no prompts, one that is no text, a number of the wrong type or range, or (when run) an argument the
            pipeline does not take.
    """

    def __init__(
        self,
        prompts: str | Iterable[str],
        *,
        steps: int | None = None,
        records: int = 64,
        bins: int = 4,
        batch_size: int = 1,
        seed: int = 0,
        **kwargs: Any,
    ):
        self.prompts = texts(prompts, "calibration prompts", _NO_PROMPTS)
        steps = None if steps is None else whole(steps, "steps")
        batch_size, records, bins = whole(batch_size, "batch_size"), whole(records, "records"), whole(bins, "bins")
        seed = checked_seed(seed)
        for name in ("guidance_scale", "true_cfg_scale"):
            if kwargs.get(name) is not None:
                finite(kwargs[name], name)
        self.steps, self.records, self.bins, self.batch_size, self.seed = steps, records, bins, batch_size, seed
        self.kwargs = kwargs

    @classmethod
    def from_file(cls, path: str | Path, **kwargs: Any) -> Prompts:
        """One prompt per line (empty lines are skipped); a .tsv file gives its first column, header skipped.

        Raises:
            DQError: the file cannot be read or holds no prompt.
        """
        try:
            lines = Path(path).read_text(encoding="utf-8-sig").splitlines()  # with or without a byte order mark
        except UnicodeDecodeError as error:
            raise DQError(f"cannot read prompts from {path}: it is no UTF-8 text; save it as UTF-8") from error
        except (OSError, TypeError, ValueError) as error:
            raise DQError(f"cannot read prompts from {path}: {line(error)}") from error
        if str(path).endswith(".tsv"):
            lines = [row.split("\t")[0] for row in lines[1:]]
        found = [row.strip() for row in lines if row.strip()]
        if not found or any("\0" in row for row in found):
            what = "holds no prompts: write one per line" if not found else "holds binary data, no prompts"
            raise DQError(f"{path} {what}")
        return cls(found, **kwargs)

    def describe(self) -> dict[str, Any]:
        """JSON-clean account of the settings; prompts as a count and a hash."""
        digest = hashlib.sha256(json.dumps(self.prompts).encode()).hexdigest()
        shown = {k: _described(v) for k, v in self.kwargs.items()}
        sizes = {"prompts": len(self.prompts), "sha256": digest, "steps": self.steps, "seed": self.seed}
        return sizes | {"batch_size": self.batch_size, "kwargs": shown}

    def collect(
        self, pipe: Any, components: Iterable[str], progress: Callable[..., Any] = tqdm
    ) -> dict[str, tuple[list[Record], dict[str, Any]]]:
        """Runs the pipeline over all prompts; component -> (records, JSON-clean description).

        An exception of the pipeline surfaces as it is: a failed call is never counted as a sample.

        Raises:
            DQError: an argument the pipeline does not take; a denoiser output with NaN/Inf (names component and step).
        """
        call = self._call_kwargs(pipe)
        recorders = {
            c: (_Recorder if c in DENOISERS else _CallRecorder)(getattr(pipe, c), c, self, pipe) for c in components
        }
        steps = call.get("num_inference_steps") or _default_steps(pipe)
        total = -(-len(self.prompts) // self.batch_size) * (steps or 0)
        quiet = getattr(pipe, "_progress_bar_config", {})
        if hasattr(pipe, "set_progress_bar_config"):
            pipe.set_progress_bar_config(disable=True)
        try:
            with torch.no_grad(), progress(total=total or None, desc="calibrating", unit="step") as bar:
                for r in recorders.values():
                    r.attach(steps, bar)
                for start in range(0, len(self.prompts), self.batch_size):
                    self._run(pipe, start, call, recorders)
        finally:
            for r in recorders.values():
                r.detach()
            if hasattr(pipe, "set_progress_bar_config"):
                pipe.set_progress_bar_config(**quiet)
        return {c: (r.sampler.records(), self.describe() | r.sampler.summary()) for c, r in recorders.items()}

    def _run(self, pipe: Any, start: int, call: dict[str, Any], recorders: dict[str, _Recorder]) -> None:
        batch = self.prompts[start : start + self.batch_size]
        generators = [torch.Generator("cpu").manual_seed(self.seed + start + i) for i in range(len(batch))]
        for r in recorders.values():
            r.begin(start, len(batch))
        extra = {"negative_prompt": [call["negative_prompt"]] * len(batch)} if _is_text(call, "negative_prompt") else {}
        pipe(prompt=batch, generator=generators, **(call | extra))
        for r in recorders.values():
            r.flush()

    def _call_kwargs(self, pipe: Any) -> dict[str, Any]:
        known = inspect.signature(pipe.__call__).parameters
        call = dict(self.kwargs) | ({"num_inference_steps": self.steps} if self.steps else {})
        if "output_type" in known:
            call.setdefault("output_type", "latent")  # decoding would cost time and tell nothing
        unknown = [k for k in call if k not in known]
        if unknown and not any(p.kind is p.VAR_KEYWORD for p in known.values()):
            raise DQError(f"{type(pipe).__name__} takes no argument {unknown[0]!r}{suggest(unknown[0], known)}")
        return call


def _described(value: Any) -> Any:
    """JSON-clean, and different for different values: a tensor by shape and hash, an odd object by its type."""
    if isinstance(value, Tensor):
        raw = value.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
        return f"{value.dtype}{list(value.shape)} sha256 {hashlib.sha256(raw).hexdigest()}"
    if isinstance(value, (list, tuple)):
        return [_described(v) for v in value]
    if isinstance(value, dict):
        return {str(k): _described(v) for k, v in value.items()}
    return value if isinstance(value, (int, float, str, bool, type(None))) else type(value).__name__


def _is_text(call: dict[str, Any], key: str) -> bool:
    return isinstance(call.get(key), str)


def _default_steps(pipe: Any) -> int | None:
    parameter = inspect.signature(pipe.__call__).parameters.get("num_inference_steps")
    return parameter.default if parameter is not None and isinstance(parameter.default, int) else None


def _guidance(kwargs: dict[str, Any], pipe: Any) -> float:
    """The scale g of `u + g (c - u)` in this run. A pipeline with `true_cfg_scale` guides by that one: its
    `guidance_scale` is an input of a distilled model."""
    known = inspect.signature(pipe.__call__).parameters
    name = "true_cfg_scale" if "true_cfg_scale" in known else "guidance_scale"
    default = known[name].default if name in known else 1.0
    value = kwargs.get(name, default)
    return float(value) if isinstance(value, int | float) else 1.0


def branch_weight(branch: str, guidance: float) -> float:
    """How much an independent squared error of a branch counts in the guided output, mean over both branches 1."""
    both = amplified("cond", guidance) + amplified("uncond", guidance)
    return 1.0 if branch == "single" else 2.0 * amplified(branch, guidance) / both


class _Recorder:
    """Hooks one denoiser. Calls of one step wait until the step is over, because only then is it known whether the
    branch called "cond" had an "uncond" beside it (CFG) or stood alone (`single`)."""

    def __init__(self, model: Any, name: str, prompts: Prompts, pipe: Any):
        self.model, self.name, self.pipe = model, name, pipe
        self.sampler = RecordSampler(prompts.records, prompts.bins, prompts.seed)
        self.guidance = _guidance(prompts.kwargs, pipe)
        self._context: str | None = None
        self._pending: list[Record] = []
        self._prompt = self._batch = self._step = 0

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
        self._prompt, self._batch, self._step, self._context, self._pending = prompt, batch, 0, None, []

    def _before(self, module: Any, args: tuple, kwargs: dict) -> None:
        branch = self._context or "single"
        if any(r.branch == branch for r in self._pending):
            self.flush()
        self._pending.append(Record(args, dict(kwargs), self._prompt, self._step, self._steps, _timestep(args, kwargs),
                                    branch, self.name))  # fmt: skip

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
        alone = len(pending) == 1
        for record in pending:
            if not alone:
                record.branch = "uncond" if "uncond" in record.branch or "neg" in record.branch else "cond"
            for part in self._split(record) if alone else [record]:
                part.weight = branch_weight(part.branch, self.guidance)
                self.sampler.offer(part)
        self._step += 1
        self._bar.update(1)

    def _split(self, record: Record) -> list[Record]:
        """A doubled batch (classifier-free guidance in one call, uncond first) becomes one record per branch."""
        record.branch = "single"
        sizes = {len(t) for t in tensors((record.args, record.kwargs)) if t.dim() > 1}
        double = 2 * self._batch
        if not getattr(self.pipe, "do_classifier_free_guidance", False) or double not in sizes:
            return [record]

        def half(tree: Any, index: int) -> Any:
            def cut(t: Tensor) -> Tensor:
                return t.chunk(2)[index] if t.dim() and len(t) == double else t

            return map_tensors(tree, cut)

        fields = (record.prompt, record.step, record.steps, record.timestep)
        return [
            Record(half(record.args, i), half(record.kwargs, i), *fields, branch, self.name)
            for i, branch in enumerate(("uncond", "cond"))
        ]


class _CallRecorder(_Recorder):
    """For what is no denoiser, such as a text encoder: every call is a record; there are no steps and no branches."""

    def _before(self, module: Any, args: tuple, kwargs: dict) -> None:
        self.sampler.offer(Record(args, dict(kwargs), self._prompt, denoiser=self.name))


def _timestep(args: tuple, kwargs: dict) -> float:
    value = kwargs.get("timestep", args[1] if len(args) > 1 else None)
    if isinstance(value, Tensor):
        return float(value.reshape(-1)[0]) if value.numel() else float("nan")
    return float(value) if isinstance(value, (int, float)) else float("nan")
