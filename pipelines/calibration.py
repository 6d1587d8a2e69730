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
from dq.pipelines.recorder import CallRecorder, Recorder, Text
from dq.records import Record
from dq.registry import DQError, suggest

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

    def __repr__(self) -> str:
        return f"Prompts({len(self.prompts)} prompts, {self.records} records)"

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
        text = Text(pipe)
        recorders = {
            c: (Recorder if c in DENOISERS else CallRecorder)(getattr(pipe, c), c, self, pipe, text) for c in components
        }
        steps = call.get("num_inference_steps") or _default_steps(pipe)
        total = -(-len(self.prompts) // self.batch_size) * (steps or 0)
        quiet = getattr(pipe, "_progress_bar_config", {})
        if hasattr(pipe, "set_progress_bar_config"):
            pipe.set_progress_bar_config(disable=True)
        try:
            with torch.no_grad(), progress(total=total or None, desc="calibrating", unit="step") as bar:
                text.attach()
                for r in recorders.values():
                    r.attach(steps, bar)
                for start in range(0, len(self.prompts), self.batch_size):
                    self._run(pipe, start, call, recorders)
        finally:
            text.detach()
            for r in recorders.values():
                r.detach()
            if hasattr(pipe, "set_progress_bar_config"):
                pipe.set_progress_bar_config(**quiet)
        idle = [c for c, r in recorders.items() if not r.sampler.seen]
        if idle:
            what = "take more steps, or name the components=[...] to quantize"
            raise DQError(f"{type(pipe).__name__} never called {', '.join(idle)} during calibration: {what}")
        return {c: (r.sampler.records(), self.describe() | r.sampler.summary()) for c, r in recorders.items()}

    def _run(self, pipe: Any, start: int, call: dict[str, Any], recorders: dict[str, Recorder]) -> None:
        batch = self.prompts[start : start + self.batch_size]
        generators = [torch.Generator("cpu").manual_seed(self.seed + start + i) for i in range(len(batch))]
        for r in recorders.values():
            r.begin(start, len(batch))
        extra = {"negative_prompt": [call["negative_prompt"]] * len(batch)} if _is_text(call, "negative_prompt") else {}
        pipe(**_words(pipe, batch), generator=generators, **(call | extra))
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
        flat = value.detach().cpu().reshape(-1).clone(memory_format=torch.contiguous_format)
        raw = flat.view(torch.uint8).numpy().tobytes()
        return f"{value.dtype}{list(value.shape)} sha256 {hashlib.sha256(raw).hexdigest()}"
    if isinstance(value, (list, tuple)):
        return [_described(v) for v in value]
    if isinstance(value, dict):
        return {str(k): _described(v) for k, v in value.items()}
    return value if isinstance(value, (int, float, str, bool, type(None))) else type(value).__name__


def _is_text(call: dict[str, Any], key: str) -> bool:
    return isinstance(call.get(key), str)


def _words(pipe: Any, prompts: list[str]) -> dict[str, Any]:
    """The argument that takes the prompts: numbers or names of classes where a pipeline is class-conditional (DiT)."""
    known = inspect.signature(pipe.__call__).parameters
    if "prompt" in known or "class_labels" not in known:
        return {"prompt": prompts}
    return {"class_labels": [int(p) if p.isdigit() else pipe.get_label_ids(p)[0] for p in prompts]}


def _default_steps(pipe: Any) -> int | None:
    parameter = inspect.signature(pipe.__call__).parameters.get("num_inference_steps")
    return parameter.default if parameter is not None and isinstance(parameter.default, int) else None
