"""Quantization-aware training, light: a quantized model learns to give the 16-bit model's predictions.

Beside its linears learn low-rank factors; on demand also scales and gains of norms, which cost no bits. The loss is, on
a text and for a denoiser,

    KL(16-bit model || quantized model) per token          |y_q - y|^2 / |y|^2 of the predictions for a record

`pipelines/corrected.py` says how a layer learns. Part of the calibration is held out; the model only changes if its
loss there falls.
Sources: distillation to the logits alone as in QAD (arXiv 2601.20088), a low-rank correction beside a frozen 4-bit
model as in QLoRA (arXiv 2305.14314).
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from typing import Any

import torch
from torch import Tensor, nn
from tqdm import tqdm

from dq import checks
from dq.family import matches
from dq.linear import quantized_linears
from dq.pipelines.adapters import refuse_adapters, refuse_plain
from dq.pipelines.api import _calibrate, _models, _silent, attach
from dq.pipelines.corrected import Learned, Student
from dq.pipelines.reference import check_reference
from dq.records import Record, map_tensors, tensors
from dq.registry import DQError, suggest, typed
from dq.replay import call, device_of
from dq.rewrites.spinquant import frozen

ENTRY = "correction"  # in the artifact of a quantized model
HELD = 32  # records that measure, at most


@dataclass
class CorrectionReport:
    """What `correct` did.

    Attributes:
        before, after: loss on the records held out; `after` is never larger.
        history: training loss of every step.
        layers: linears that changed.
        rank: by how much their branches grew.
        seconds: wall time.
        changed: False where nothing that was learned lowered the loss, and the model is as it was.
        measure: what the loss is.
    """

    before: float
    after: float
    history: list[float] = field(repr=False)
    layers: list[str] = field(repr=False)
    rank: int
    seconds: float
    changed: bool = True
    measure: str = "KL on held-out tokens"

    def __str__(self) -> str:
        what = "" if self.changed else "; nothing was gained, the model is as it was"
        return (
            f"rank {self.rank} beside {len(self.layers)} linears, {len(self.history)} steps in {self.seconds:.0f} s: "
            f"{self.measure} {self.before:.4g} -> {self.after:.4g}{what}"
        )


def correct(
    model: Any,
    reference: Any,
    calibration: Any,
    *,
    rank: int = 8,
    steps: int = 200,
    rate: float = 1e-3,
    batch: int = 4,
    scales: bool = False,
    norms: bool = False,
    layers: Sequence[str] = (),
    micro_batch: int = 1,
    any_reference: bool = False,
    seed: int = 0,
    progress: bool | Callable[..., Any] = True,
) -> CorrectionReport:
    """Trains a quantized model to predict what the 16-bit one does, in place.

    Args:
        model: quantized by dq: a language model, or a denoiser, or a pipeline with one.
        reference: the 16-bit model (or pipeline) that it was.
        calibration: as `dq.quantize` takes it; every eighth record (at least one, at most 32) only measures.
        rank: r of the correction, added to the branch that a layer has: 16 r (K + N) / (K N) bits per weight. 0: none.
        steps, rate, batch: of Adam with a cosine to zero; records per step. `RATES` in `pipelines/corrected.py` says
            how much faster or slower than factors the others learn.
        scales: weight scales (of channels or groups, in float32 or 16 bits; of NVFP4 the second level) and static
            activation scales learn too.
        norms: weights and biases of norms learn too, in the model's own dtype.
        layers: patterns of the linears that learn; default: all that are quantized.
        micro_batch: records of one length that run in one call: faster, more memory.
        any_reference: learn from another model of the same shape, e.g. a later fine-tune. Otherwise what the recipe
            left in 16 bits must be the same in both.
        seed: of the start and of the order of the records.
        progress: as in `dq.quantize`.

    Raises:
        DQError: nothing is quantized, nothing is to learn, no reference or calibration, fewer than two records, a
            pattern that matches nothing, adapters, a reference that is another model, or a loss that is not finite. The
            model is as it was then, as after an interruption.
    """
    start = time.perf_counter()
    settings = {"rank": rank, "steps": steps, "rate": rate, "batch": batch, "scales": scales}
    settings = check_settings(settings | {"norms": norms, "micro_batch": micro_batch, "seed": seed})
    what = Learned(rank, scales)
    source, model, reference = _pair(model, reference, typed(any_reference, bool, "any_reference is True or False"))
    names = _names(model, reference, layers)
    bar = progress if callable(progress) else (tqdm if progress else _silent)
    records = _records(source, model, calibration, bar)
    held = records[::8][:HELD]
    train = [r for i, r in enumerate(records) if i % 8 or i // 8 >= HELD]
    generator, teacher = torch.Generator().manual_seed(seed), _Teacher(model, reference, micro_batch)
    with frozen(model), frozen(reference), Student(model, names, what, norms, generator) as student:
        before, history = teacher.measure(held), []
        with bar(total=steps, desc="correct", unit="step") as ticks:
            _train(student, teacher, train, history, ticks, (settings, generator))
        after = teacher.measure(held)
        done = student.finish() if after < before else {}
    for name, layer in done.items():
        model.set_submodule(name, layer)
    if student.kept:
        old = getattr(model, "dq_artifact", {})
        entry = {"before": before, "after": after, "layers": len(done), "records": len(records), **settings}
        model.dq_artifact = {**old, ENTRY: entry | ({"earlier": old[ENTRY]} if ENTRY in old else {})}
        attach(model)
    return CorrectionReport(
        before, min(after, before), history, list(done), rank, time.perf_counter() - start, student.kept,
        teacher.kind,
    )  # fmt: skip


def check_settings(settings: dict[str, Any]) -> dict[str, Any]:
    """The settings; raises DQError for one of the wrong type or range."""
    for name, low in (("rank", 0), ("steps", 1), ("batch", 1), ("micro_batch", 1)):
        settings[name] = checks.whole(settings[name], name, low)
    kinds = {n: typed(settings[n], bool, f"{n} is True or False") for n in ("scales", "norms")}
    if not any(kinds.values()) and not settings["rank"]:
        raise DQError("rank=0 without scales or norms: nothing is to learn")
    rate = settings["rate"]
    if isinstance(rate, bool) or not isinstance(rate, int | float) or not 0 < rate < math.inf:
        raise DQError(f"rate is a number above 0, got {rate!r}")
    return settings | {"rate": float(rate), "seed": checks.seed(settings["seed"])}


def _pair(model: Any, reference: Any, any_reference: bool) -> tuple[Any, nn.Module, nn.Module]:
    """What calibration runs on, the model, and its reference; of pipelines their one quantized denoiser."""
    for what, value in (("model", model), ("reference", reference)):
        if not isinstance(value, nn.Module) and not isinstance(getattr(value, "components", None), dict):
            raise DQError(f"correct takes models or pipelines; its {what} is a {type(value).__name__}")
    refuse_adapters(model, "corrected")
    refuse_adapters(reference, "a reference")
    if isinstance(model, nn.Module) and isinstance(reference, nn.Module):
        refuse_plain(model)
        return model, model, check_reference(reference, model, any_reference)
    if isinstance(model, nn.Module) or isinstance(reference, nn.Module):
        raise DQError("one of model and reference is a pipeline, the other one a model: give two of a kind")
    found = {n: m for n, m in _models(model, None).items() if quantized_linears(m)}
    if not found:
        raise DQError(f"nothing in {type(model).__name__} is quantized: dq.quantize it first")
    if len(found) != 1:
        what = f"has {len(found)} quantized denoisers ({', '.join(found)})"
        raise DQError(f"{type(model).__name__} {what}: give one denoiser, its reference and its records")
    name, denoiser = next(iter(found.items()))
    return reference, denoiser, check_reference(_models(reference, [name])[name], denoiser, any_reference)


def _names(model: Any, reference: Any, patterns: Sequence[str]) -> list[str]:
    """The linears that get a correction."""
    found = quantized_linears(model)
    if quantized_linears(reference) or reference is model:
        raise DQError("the reference of a correction is the 16-bit model, loaded anew")
    for pattern in typed(patterns, (list, tuple, set), "layers takes a list of patterns"):
        if not any(matches(n, typed(pattern, str, "a pattern is text")) for n in found):
            near = suggest(pattern, {part for n in found for part in (n, *n.split("."))})
            raise DQError(f"pattern {pattern!r} matches no quantized linear{near}")
    return [n for n in found if not patterns or any(matches(n, p) for p in patterns)]


def _records(source: Any, model: nn.Module, calibration: Any, bar: Any) -> list[Record]:
    if calibration is None:
        raise DQError("a correction learns from text: pass calibration=dq.Text([...], tokenizer), or records")
    chosen = {"": model} if isinstance(source, nn.Module) else _models(source, None)
    found = _calibrate(source, chosen, calibration, bar)
    records = next(iter(found.values()))[0]
    for i, record in enumerate(records):
        if any(t.is_floating_point() and not torch.isfinite(t).all() for t in tensors((record.args, record.kwargs))):
            raise DQError(f"calibration record {i} holds NaN or Inf values")
    if len(records) < 2:
        raise DQError("a correction needs at least two calibration records: one of them only measures")
    return records


def _train(student: Student, teacher: _Teacher, records: list[Record], history: list, ticks: Any, settings) -> None:
    settings, generator = settings
    steps, batch = settings["steps"], settings["batch"]
    optimizer = student.optimizer(settings["rate"])
    decay = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda i: 0.5 * (1 + math.cos(math.pi * i / steps)))
    order: list[int] = []
    for step in range(steps):
        total, picked = 0.0, []
        while len(picked) < batch:
            order = order or torch.randperm(len(records), generator=generator).tolist()
            picked.append(records[order.pop()])
        for share, part in teacher.together(picked):
            with torch.enable_grad():
                loss = teacher.loss(part) * (share / batch)
                student.backward(loss)
            total += float(loss.detach())
        if not math.isfinite(total):
            raise DQError(f"correct: the loss is {total} at step {step}: take a smaller rate")
        history.append(total)
        optimizer.step()
        optimizer.zero_grad()
        decay.step()
        student.moved()
        ticks.update(1)


class _Teacher:
    """The loss of a model beside its reference, record by record or some of one shape in one call."""

    def __init__(self, model: nn.Module, reference: nn.Module, together: int):
        self.model, self.reference, self.most, self.device = model, reference, together, device_of(model)
        denoiser = any(c.__module__.partition(".")[0] == "diffusers" for c in type(model).__mro__)
        self.predictions = _first if denoiser else _logits
        self.distance = _relative if denoiser else _divergence
        self.kind = "relative error on held-out records" if denoiser else "KL on held-out tokens"

    def together(self, records: Sequence[Record]) -> Iterator[tuple[int, Record]]:
        """(number of records, one record for all of them): token ids of one length side by side, others alone."""
        for _, group in groupby(sorted(records, key=_shape), key=_shape):
            found = list(group)
            size = self.most if _shape(found[0]) else 1
            for i in range(0, len(found), size):
                part = found[i : i + size]
                yield len(part), part[0] if len(part) == 1 else _joined(part)

    def loss(self, record: Record) -> Tensor:
        """Of one record, the mean over its tokens."""
        with torch.no_grad():
            output = call(self.reference, record.args, record.kwargs, device_of(self.reference))
            teacher = self.predictions(output)
        args, kwargs = map_tensors((record.args, record.kwargs), lambda t: t.to(self.device, copy=True))
        student = self.predictions(self.model(*args, **kwargs))
        if student.shape != teacher.shape:
            what = f"the reference predicts {tuple(teacher.shape)}, the model {tuple(student.shape)}"
            raise DQError(f"{what}: another model?")
        return self.distance(student, teacher.to(student.device))

    @torch.no_grad()
    def measure(self, records: Sequence[Record]) -> float:
        """Mean over records."""
        total = sum(share * float(self.loss(part)) for share, part in self.together(records)) / len(records)
        if not math.isfinite(total):
            raise DQError(
                "correct: predictions of the model or of its reference hold NaN or Inf on the held-out records"
            )
        return total


def _shape(record: Record) -> tuple[int, ...]:
    """What records have in common that run side by side: nothing but token ids [1, n]; () for any other."""
    ids = record.kwargs.get("input_ids")
    plain = not record.args and all(k == "input_ids" or not tensors(v) for k, v in record.kwargs.items())
    return tuple(ids.shape) if plain and isinstance(ids, Tensor) and ids.dim() == 2 else ()


def _joined(records: Iterable[Record]) -> Record:
    first, *rest = records
    ids = torch.cat([r.kwargs["input_ids"] for r in (first, *rest)])
    return Record((), first.kwargs | {"input_ids": ids})


def _divergence(student: Tensor, teacher: Tensor) -> Tensor:
    """KL(teacher || student) per token."""
    p, q = (t.to(torch.float32).flatten(0, -2).log_softmax(-1) for t in (teacher, student))
    return nn.functional.kl_div(q, p, log_target=True, reduction="batchmean")


def _relative(student: Tensor, teacher: Tensor) -> Tensor:
    teacher = teacher.to(torch.float32)
    return (student.to(torch.float32) - teacher).square().sum() / teacher.square().sum().clamp(min=1e-30)


def _first(output: Any) -> Tensor:
    """What a denoiser predicts: the first tensor of its output."""
    return tensors(output.to_tuple() if hasattr(output, "to_tuple") else output)[0]


def _logits(output: Any) -> Tensor:
    found = getattr(output, "logits", output)
    if not isinstance(found, Tensor):
        raise DQError(f"correct needs a model that predicts logits; this one returns {type(output).__name__}")
    return found
