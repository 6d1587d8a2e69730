"""Quantization-aware training, light: a quantized model stays frozen, and low-rank factors beside its layers learn to
give the 16-bit model's predictions.

    y = Q_X(pre(x)) Q(W')^T + (x [L | A]^T) [U | B]^T + b      A [r, K] random, B [N, r] = 0 at the start
    loss = sum over tokens of KL(16-bit model || quantized model) / tokens

L, U is the branch that the layer has already; [L | A], [U | B] is stored in its place, so that checkpoints and kernels
run the result as they run SVDQuant. Gradients pass through the rounding of activations (straight through). On demand
scales learn too: those of a weight at fixed codes, `s f` with f = 1 at the start, whose gradient is exact; and static
activation scales by LSQ,

    d xq / d s = Q(v) - v inside the grid, Q(v) where v = x / s is clipped;   times 1 / sqrt(numel * max)

Part of the calibration is held out; the model only changes if its divergence there falls.
Sources: distillation to the logits alone as in QAD (arXiv 2601.20088), a low-rank correction beside a frozen 4-bit
model as in QLoRA (arXiv 2305.14314), LSQ (arXiv 1902.08153, section 2).
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn
from tqdm import tqdm

from dq import checks
from dq.family import matches
from dq.linear import QuantizedLinear, quantized_linears
from dq.ops import pre_quantized
from dq.pipelines.api import _calibrate, _silent, attach
from dq.records import Record, map_tensors
from dq.registry import DQError, suggest, typed
from dq.replay import call, device_of
from dq.rewrites.spinquant import frozen
from dq.transforms import apply_steps

ENTRY = "correction"  # in the artifact of a quantized model


@dataclass
class CorrectionReport:
    """What `correct` did.

    Attributes:
        before, after: divergence per token on the records held out; `after` is never larger.
        history: training loss of every step.
        layers: linears whose branch grew.
        rank: by how much.
        seconds: wall time.
        changed: False where nothing that was learned lowered the divergence, and the model is as it was.
    """

    before: float
    after: float
    history: list[float] = field(repr=False)
    layers: list[str] = field(repr=False)
    rank: int
    seconds: float
    changed: bool = True

    def __str__(self) -> str:
        what = "" if self.changed else "; nothing was gained, the model is as it was"
        return (
            f"rank {self.rank} beside {len(self.layers)} linears, {len(self.history)} steps in {self.seconds:.0f} s: "
            f"KL on held-out tokens {self.before:.4g} -> {self.after:.4g}{what}"
        )


class LSQ(torch.autograd.Function):
    """`Q(x / s) s` on a static grid, with the gradients of the module's docstring."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, scale: Tensor, fmt: Any) -> Tensor:
        v = x / scale
        q = fmt.round(v)
        ctx.save_for_backward(v, q)
        ctx.top, ctx.low = fmt.max, fmt.min
        return q * scale

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, None]:
        v, q = ctx.saved_tensors
        inside = (v >= ctx.low) & (v <= ctx.top)
        scale = (grad * torch.where(inside, q - v, q)).sum() / math.sqrt(v.numel() * ctx.top)
        return grad * inside, scale.reshape(1, 1), None


class Corrected(nn.Module):
    """Stands in for a quantized linear while its correction is learned. Weights in the layer's compute dtype."""

    def __init__(self, layer: QuantizedLinear, rank: int, scales: bool, generator: torch.Generator):
        super().__init__()
        self.layer, self.in_features, self.out_features = layer, layer.in_features, layer.out_features
        device = layer.qweight.device
        self.register_buffer("fixed", layer.qtensor.dequantize().to(layer.compute_dtype), persistent=False)
        start = torch.randn(rank, layer.in_features, generator=generator) / math.sqrt(layer.in_features)
        self.down = nn.Parameter(start.to(device))
        self.up = nn.Parameter(torch.zeros(layer.out_features, rank, device=device))
        spec, config = layer.config.weights, layer.config
        free = spec.strategy in ("channel", "group") and spec.scale_format in ("fp32", "fp16", "bf16")
        free = free and not spec.global_scale and not config.extra and not spec.row_segments and not spec.k_segments
        shape = layer.weight_scale.shape
        self.factor = nn.Parameter(torch.ones(shape, device=device)) if scales and free else None
        static = config.static and not config.step_groups
        self.input_scale = nn.Parameter(layer.input_scale.clone()) if scales and static else None

    @property
    def weight(self) -> Tensor:
        """What code that looks at shape and dtype sees."""
        return self.layer.weight

    def _weight(self) -> Tensor:
        if self.factor is None:
            return self.fixed
        each = self.layer.config.weights.columns or self.fixed.shape[1]
        return self.fixed * self.factor.repeat_interleave(each, 1)[:, : self.fixed.shape[1]].to(self.fixed)

    def _input(self, x: Tensor) -> Tensor:
        """`Q_X(pre(x))`, residual columns appended, float32; its gradient is that of `pre(x)`."""
        params = self.layer.params
        pre = apply_steps(x.to(torch.float32), params.steps)
        if params.activations is None:
            return pre
        if params.input_scale is not None:
            scale = params.input_scale if self.input_scale is None else self.input_scale
            return LSQ.apply(pre, scale, params.activations.fmt)
        with torch.no_grad():
            value = pre_quantized(x, params)
        if params.residual:  # of what is added beside Q(x'), only the copy of Q(x') itself follows x'
            last = pre[:, -params.residual :]
            pre = torch.cat([pre, torch.zeros_like(last)] + [last] * params.dual, 1)
        return value + pre - pre.detach()

    def forward(self, x: Tensor) -> Tensor:
        """x [..., K] -> [..., N] in the dtype of x."""
        rows, weight = x.reshape(-1, self.in_features), self._weight()
        y = (self._input(rows).to(weight.dtype) @ weight.T).to(torch.float32)
        wide, params = rows.to(torch.float32), self.layer.params
        if params.down is not None:
            y = y + (wide @ params.down.to(wide).T) @ params.up.to(wide).T
        y = y + (wide @ self.down.T) @ self.up.T
        if params.bias is not None:
            y = y + params.bias.to(y)
        return y.to(x.dtype).reshape(*x.shape[:-1], self.out_features)

    @torch.no_grad()
    def finished(self) -> QuantizedLinear:
        """The layer with what was learned."""
        old, params = self.layer, self.layer.params
        kind = old.compute_dtype if old.compute_dtype in (torch.float16, torch.bfloat16) else torch.bfloat16
        kind = kind if params.down is None else params.down.dtype
        # Both factors equally large, as those of an SVD: a 16-bit copy of either then loses as little.
        root = (self.up.norm(dim=0).clamp(min=1e-12) / self.down.norm(dim=1).clamp(min=1e-12)).sqrt()
        down, up = (self.down * root[:, None]).to(kind), (self.up / root).to(kind)
        if params.down is not None:
            down, up = torch.cat([params.down, down]), torch.cat([params.up, up], 1)
        weight = params.weight
        if self.factor is not None:
            weight = replace(weight, scale=(weight.scale.to(torch.float32) * self.factor).to(weight.scale.dtype))
        scale = params.input_scale if self.input_scale is None else self.input_scale.abs()
        if old.config.step_groups:
            scale = old.input_scale
        new = QuantizedLinear.build(
            weight, activations=params.activations, steps=params.steps, side=(down, up), bias=params.bias,
            dtype=old.compute_dtype, input_scale=scale, input_edges=getattr(old, "input_edges", None),
            residual=params.residual, dual=params.dual,
        )  # fmt: skip
        new.activations_mode, new.step_context = old.activations_mode, old.step_context
        return new.train(old.training)


def correct(
    model: nn.Module,
    reference: nn.Module,
    calibration: Any,
    *,
    rank: int = 8,
    steps: int = 200,
    rate: float = 1e-3,
    batch: int = 4,
    scales: bool = False,
    layers: Sequence[str] = (),
    seed: int = 0,
    progress: bool | Callable[..., Any] = True,
) -> CorrectionReport:
    """Trains a low-rank correction of a quantized language model, in place.

    Args:
        model: quantized by dq.
        reference: the 16-bit model that it was.
        calibration: as `dq.quantize` takes it; every eighth record (at least one) only measures.
        rank: r of the correction, added to the branch that a layer has.
        steps, rate, batch: of Adam with a cosine to zero; records per step. Scales learn at a tenth of the rate.
        scales: weight scales (of channels or groups, in float32 or 16 bits) and static activation scales learn too.
        layers: patterns of the linears that get a correction; default: all that are quantized.
        seed: of the start and of the order of the records.
        progress: as in `dq.quantize`.

    Raises:
        DQError: nothing is quantized, no reference or calibration, fewer than two records, a pattern that matches
            nothing, models whose predictions have different shapes, or a loss that is not finite. The model is as it
            was then.
    """
    start = time.perf_counter()
    rank, steps, batch = checks.whole(rank, "rank"), checks.whole(steps, "steps"), checks.whole(batch, "batch")
    names = _names(model, reference, layers)
    if not (isinstance(rate, int | float) and 0 < rate < math.inf):
        raise DQError(f"rate is a number above 0, got {rate!r}")
    bar = progress if callable(progress) else (tqdm if progress else _silent)
    records = _records(model, calibration, bar)
    held, train = records[::8], [r for i, r in enumerate(records) if i % 8]
    generator = torch.Generator().manual_seed(checks.seed(seed))
    device = device_of(model)
    with frozen(model), frozen(reference), _swapped(model, names, rank, scales, generator) as learned:
        before, history = _divergence(model, reference, held, device), []
        with bar(total=steps, desc="correct", unit="step") as ticks:
            _train(model, reference, learned, train, history, ticks, (steps, float(rate), batch, generator), device)
        after = _divergence(model, reference, held, device)
        done = {n: m.finished() for n, m in learned.items() if m.up.any()} if after < before else {}
    for name, layer in done.items():
        model.set_submodule(name, layer)
    settings = {"rank": rank, "steps": steps, "rate": rate, "batch": batch, "scales": scales, "seed": seed}
    report = CorrectionReport(
        before, min(after, before), history, list(done), rank, time.perf_counter() - start, bool(done)
    )
    if done:
        what = {"before": before, "after": after, "layers": len(done), "records": len(records), **settings}
        model.dq_artifact = {**getattr(model, "dq_artifact", {}), ENTRY: what}
        attach(model)
    return report


def _names(model: Any, reference: Any, patterns: Sequence[str]) -> list[str]:
    """The linears that get a correction."""
    for what, value in (("model", model), ("reference", reference)):
        if not isinstance(value, nn.Module):
            raise DQError(f"correct takes models; its {what} is a {type(value).__name__}")
    found = quantized_linears(model)
    if not found:
        raise DQError(f"nothing in {type(model).__name__} is quantized: dq.quantize it first")
    if quantized_linears(reference) or reference is model:
        raise DQError("the reference of a correction is the 16-bit model, loaded anew")
    for pattern in typed(patterns, (list, tuple, set), "layers takes a list of patterns"):
        if not any(matches(n, typed(pattern, str, "a pattern is text")) for n in found):
            near = suggest(pattern, {part for n in found for part in (n, *n.split("."))})
            raise DQError(f"pattern {pattern!r} matches no quantized linear{near}")
    return [n for n in found if not patterns or any(matches(n, p) for p in patterns)]


def _records(model: nn.Module, calibration: Any, bar: Any) -> list[Record]:
    if calibration is None:
        raise DQError("a correction learns from text: pass calibration=dq.Text([...], tokenizer)")
    records = _calibrate(model, {"": model}, calibration, bar)[""][0]
    if len(records) < 2:
        raise DQError("a correction needs at least two calibration records: one of them only measures")
    return records


@contextmanager
def _swapped(
    model: nn.Module, names: list[str], rank: int, scales: bool, generator: torch.Generator
) -> Iterator[dict[str, Corrected]]:
    """Inside, the linears learn; afterwards the ones from before are back."""
    originals = {n: model.get_submodule(n) for n in names}
    try:
        learned = {n: Corrected(layer, rank, scales, generator) for n, layer in originals.items()}
        for name, module in learned.items():
            model.set_submodule(name, module)
        yield learned
    finally:
        for name, layer in originals.items():
            model.set_submodule(name, layer)


def _train(model, reference, learned: dict[str, Corrected], records, history, ticks, settings, device) -> None:
    steps, rate, batch, generator = settings
    factors = [p for m in learned.values() for p in (m.down, m.up)]
    free = [p for m in learned.values() for p in (m.factor, m.input_scale) if p is not None]
    groups = [{"params": factors, "lr": rate}] + ([{"params": free, "lr": 0.1 * rate}] if free else [])
    optimizer = torch.optim.Adam(groups)
    decay = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda i: 0.5 * (1 + math.cos(math.pi * i / steps)))
    order: list[int] = []
    with torch.enable_grad():
        for step in range(steps):
            total = 0.0
            for _ in range(batch):  # one after the other: records may differ in length
                order = order or torch.randperm(len(records), generator=generator).tolist()
                loss = _loss(model, reference, records[order.pop()], device) / batch
                loss.backward()
                total += float(loss.detach())
            if not math.isfinite(total):
                raise DQError(f"correct: the loss is {total} at step {step}: take a smaller rate")
            history.append(total)
            optimizer.step()
            optimizer.zero_grad()
            decay.step()
            ticks.update(1)


def _loss(model: nn.Module, reference: nn.Module, record: Record, device: torch.device) -> Tensor:
    """KL per token of one record."""
    with torch.no_grad():
        teacher = _logits(call(reference, record.args, record.kwargs, device_of(reference)))
    args, kwargs = map_tensors((record.args, record.kwargs), lambda t: t.to(device))
    student = _logits(model(*args, **kwargs))
    if student.shape != teacher.shape:
        what = f"the reference predicts {tuple(teacher.shape)}, the model {tuple(student.shape)}"
        raise DQError(f"{what}: another model?")
    p, q = (t.to(student.device, torch.float32).flatten(0, -2).log_softmax(-1) for t in (teacher, student))
    return nn.functional.kl_div(q, p, log_target=True, reduction="batchmean")


def _logits(output: Any) -> Tensor:
    found = getattr(output, "logits", output)
    if not isinstance(found, Tensor):
        raise DQError(f"correct needs a model that predicts logits; this one returns {type(output).__name__}")
    return found


@torch.no_grad()
def _divergence(model: nn.Module, reference: nn.Module, records: Sequence[Record], device: torch.device) -> float:
    return sum(float(_loss(model, reference, r, device)) for r in records) / len(records)
