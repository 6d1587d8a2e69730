"""Per-step correction of a quantized denoiser's prediction: quantization shrinks or stretches it by a known factor.

    e: prediction in 16 bits, q: of the quantized model, sums over calibration calls at one timestep
    ptqd:           q / (1 + k),  k = <e, q> / <e, e> - 1     takes out the part of the error that is correlated with e
    least_squares:  K q,          K = <e, q> / <q, q>         minimises |e - K q|^2

one factor per timestep, or per timestep and latent channel. Factors belong to one scheduler with its settings and one
number of steps; any other run is refused. (The samplers of PTQD that add noise also shrink its variance by what is left
uncorrected; that is not done here.)

Measure before use. `least_squares` lowers the error of single calls by shrinking predictions where they are unreliable,
mostly late steps; over a whole run that leaves noise behind. On the demo model the calls it was fitted on come out 7 %
(w4a4-nvfp4) to 26 % (w4a4-int4) closer to 16 bits, those of new prompts 30 % (w4a4-int4, the only one measured), and
the final latents up to a third further away. Nothing here is on by default.
Sources: PTQD (arXiv 2305.10657, section 4.2); the noise estimate of TAC-Diffusion (arXiv 2407.03917).
"""

from __future__ import annotations

import copy
import json
import weakref
from collections.abc import Iterable
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from dq.checks import line
from dq.pipelines.api import attach as refresh
from dq.pipelines.calibration import DENOISERS, Prompts
from dq.pipelines.recorder import timestep as call_timestep
from dq.records import Record, map_tensors, outputs
from dq.registry import DQError, suggest, typed
from dq.replay import call, device_of

KINDS = ("least_squares", "ptqd")
NEAR = 2.0**-8  # relative distance of timesteps that count as one: what bfloat16 may change
ENTRY = "noise_correction"  # in the artifact of a quantized model


@dataclass(frozen=True)
class NoiseCorrection:
    """Factors by which a denoiser's output is multiplied; JSON-clean through `to_dict`.

    Attributes:
        scheduler: class name of the scheduler.
        settings: its configuration.
        steps: number of steps of a run.
        timesteps: the values that the denoiser is called with, one per step.
        factors: one list per timestep: a single factor, or one per latent channel.
        denoiser: name of the pipeline component.
        before, after: |e - q|^2 / |e|^2 over all calibration calls, as it was and corrected.
    """

    scheduler: str
    settings: dict[str, Any]
    steps: int
    timesteps: list[float]
    factors: list[list[float]]
    denoiser: str = "transformer"
    before: float = 0.0
    after: float = 0.0
    kind: str = field(default="least_squares")

    def __str__(self) -> str:
        return (
            f"noise correction for {self.scheduler}, {self.steps} steps: relative error of {self.denoiser} "
            f"{self.before:.4g} -> {self.after:.4g} on the calibration"
        )

    def to_dict(self) -> dict[str, Any]:
        return {f.name: copy.deepcopy(getattr(self, f.name)) for f in fields(self)}

    @classmethod
    def from_dict(cls, data: Any) -> NoiseCorrection:
        """Raises DQError for what `to_dict` did not make."""
        known = {f.name for f in fields(cls)}
        unknown = set(typed(data, dict, "a noise correction is a table")) - known
        if unknown:
            raise DQError(f"unknown word {min(unknown)!r} in a noise correction{suggest(min(unknown), known)}")
        try:
            made = cls(**data)
        except TypeError as error:
            raise DQError(f"the noise correction is incomplete: {line(error)}") from error
        if not len(made.timesteps) == len(made.factors) == made.steps or not all(made.factors):
            raise DQError(f"the noise correction is damaged: it needs factors for each of its {made.steps} steps")
        return made

    def save(self, path: str | Path) -> None:
        """Writes a JSON file."""
        Path(path).write_text(json.dumps(self.to_dict(), indent=1) + "\n", encoding="utf-8")

    @classmethod
    def load(cls, path: str | Path) -> NoiseCorrection:
        """Reads what `save` wrote.

        Raises:
            DQError: no such file, or not one of these.
        """
        try:
            return cls.from_dict(json.loads(Path(path).read_text(encoding="utf-8")))
        except (OSError, ValueError) as error:
            if isinstance(error, DQError):
                raise
            raise DQError(f"cannot read the noise correction {path}: {line(error)}") from error

    def check(self, scheduler: Any) -> None:
        """Raises DQError, naming both, unless the scheduler is the one that the factors belong to, at its number of
        steps (if it has been given one)."""
        name, settings = type(scheduler).__name__, _settings(scheduler)
        advice = "; fit the correction again, or detach it"
        if name != self.scheduler:
            raise DQError(f"the noise correction belongs to {self.scheduler}, and the pipeline runs {name}{advice}")
        for key in sorted(self.settings.keys() | settings.keys()):
            there, here = self.settings.get(key), settings.get(key)
            if there != here:
                raise DQError(
                    f"the noise correction belongs to {name} with {key}={there!r}, and here it is {here!r}{advice}"
                )
        steps = getattr(scheduler, "num_inference_steps", None)
        if steps is not None and steps != self.steps:
            raise DQError(
                f"the noise correction belongs to {name} with {self.steps} steps, and this run has {steps}{advice}"
            )

    def at(self, timestep: float) -> list[float]:
        """The factors for one call of the denoiser.

        Raises:
            DQError: a timestep that was not fitted: another resolution, shift, strength or list of sigmas.
        """
        index = min(range(self.steps), key=lambda i: abs(self.timesteps[i] - timestep))
        nearest = self.timesteps[index]
        if not abs(nearest - timestep) <= NEAR * max(abs(nearest), abs(timestep)):
            raise DQError(
                f"the noise correction knows no timestep {timestep:.6g} of {self.scheduler} (the nearest of its "
                f"{self.steps} is {nearest:.6g}): run with the size, sigmas and strength that it was fitted with, or "
                "detach it"
            )
        return self.factors[index]


def factor(ee: Tensor, eq: Tensor, qq: Tensor, kind: str) -> Tensor:
    """The factor for q from the sums <e, e>, <e, q>, <q, q>; 1 where one of them vanishes."""
    above, below = (ee, eq) if kind == "ptqd" else (eq, qq)
    return torch.where((above != 0) & (below != 0), above / below, 1.0)


def _settings(scheduler: Any) -> dict[str, Any]:
    """The scheduler's configuration in the form that JSON gives back."""
    plain = {str(k): v for k, v in dict(scheduler.config).items() if not str(k).startswith("_")}
    return json.loads(json.dumps(plain, default=str))


def _channels(x: Tensor) -> Tensor:
    """[samples, channels] of a prediction: packed latents [batch, tokens, C], or [batch, C, ...]."""
    return x.reshape(-1, x.shape[-1]) if x.dim() <= 3 else x.movedim(1, -1).reshape(-1, x.shape[1])


def _denoiser(pipe: Any) -> str:
    name = next((n for n in DENOISERS if isinstance(getattr(pipe, n, None), nn.Module)), None)
    if name is None or not hasattr(pipe, "scheduler"):
        raise DQError(
            f"a noise correction belongs to a pipeline with denoiser and scheduler, not {type(pipe).__name__}"
        )
    return name


def fit(
    reference: Any,
    quantized: Any,
    calibration: Prompts | Iterable[Record],
    *,
    kind: str = "least_squares",
    per_channel: bool = False,
) -> NoiseCorrection:
    """Finds the factors by running both denoisers on the same calls.

    Args:
        reference: the 16-bit pipeline.
        quantized: the quantized pipeline, or its denoiser.
        calibration: `dq.Prompts` (run here, on `reference`), or records of it; every step must be among them.
        kind: `least_squares` or `ptqd`.
        per_channel: one factor per latent channel.

    Raises:
        DQError: an unknown kind, no records, steps without a record, records of different runs, or a prediction that
            does not resemble the 16-bit one at all.
    """
    if kind not in KINDS:
        raise DQError(f"unknown noise correction {kind!r}{suggest(str(kind), KINDS)}")
    name = _denoiser(reference)
    clean = getattr(reference, name)
    model = quantized if isinstance(quantized, nn.Module) else getattr(quantized, _denoiser(quantized))
    records = _records(reference, name, calibration)
    sums: dict[int, Tensor] = {}
    for record in records:
        e, q = (outputs(call(m, record.args, record.kwargs, device_of(m)))[0] for m in (clean, model))
        e, q = _channels(e.double()), _channels(q.double())
        found = record.weight * torch.stack([(e * e).sum(0), (e * q).sum(0), (q * q).sum(0)])
        sums[record.step] = sums.get(record.step, 0) + found
    table = torch.stack([sums[s] for s in sorted(sums)])  # [steps, 3, channels]
    if (table[:, 1].sum(1) <= 0).any():
        raise DQError(f"the quantized {name} predicts nothing like the 16-bit one: no factor corrects it")
    chosen = table if per_channel else table.sum(2, keepdim=True)
    factors = factor(*chosen.unbind(1), kind)
    ee, eq, qq = table.unbind(1)
    before, after = ((ee - 2 * f * eq + f * f * qq).sum() / ee.sum() for f in (torch.ones_like(factors), factors))
    times = {r.step: r.timestep for r in records}
    return NoiseCorrection(
        type(reference.scheduler).__name__,
        _settings(reference.scheduler),
        len(sums),
        [times[s] for s in sorted(times)],
        factors.tolist(),
        name,
        float(before),
        float(after),
        kind,
    )


def _records(pipe: Any, name: str, calibration: Any) -> list[Record]:
    """Records of every step of one kind of run."""
    if isinstance(calibration, Prompts):
        calibration = copy.copy(calibration)
        calibration.bins = calibration.steps or 1_000_000  # one bin per step, so that every step is sampled
        calibration = calibration.collect(pipe, [name])[name][0]
    records = [typed(r, Record, "a noise correction is fitted on dq.Prompts or dq.Record values") for r in calibration]
    if not records:
        raise DQError("a noise correction needs calibration: pass dq.Prompts([...]) or records")
    steps = {r.steps for r in records}
    if len(steps) > 1:
        raise DQError(f"the records come from runs of {min(steps)} and of {max(steps)} steps; take one of them")
    missing = sorted(set(range(records[0].steps)) - {r.step for r in records})
    if missing:
        what = f"{len(missing)} of {records[0].steps} steps, e.g. step {missing[0]}"
        raise DQError(f"the records lack {what}: collect at least one per step (dq.Prompts(..., records=, bins=))")
    for record in records:
        first = next(r for r in records if r.step == record.step)
        if not abs(first.timestep - record.timestep) <= NEAR * abs(first.timestep):
            raise DQError(
                f"step {record.step} of the records has the timesteps {first.timestep:.6g} and {record.timestep:.6g}: "
                "take records of one size and one schedule"
            )
    return records


def attach(pipe: Any, correction: NoiseCorrection | None = None) -> NoiseCorrection:
    """Lets the pipeline's denoiser correct its output from now on; what scheduler and number of steps a run has is
    checked at every call. A quantized denoiser carries the correction when it is saved.

    Args:
        correction: default: the one that the loaded denoiser carries.

    Raises:
        DQError: no correction, one is attached already, or one that belongs to another scheduler.
    """
    name = _denoiser(pipe)
    model = getattr(pipe, name)
    artifact = getattr(model, "dq_artifact", None)
    if correction is None:
        if not artifact or ENTRY not in artifact:
            raise DQError(f"the {name} carries no noise correction: fit one")
        correction = NoiseCorrection.from_dict(artifact[ENTRY])
    if hasattr(model, "dq_noise_correction"):
        raise DQError(f"a noise correction is attached to the {name} already; detach it first")
    if correction.denoiser != name:
        raise DQError(f"the noise correction belongs to a {correction.denoiser}, and this pipeline has a {name}")
    correction.check(_without_steps(pipe.scheduler))
    model.dq_noise_correction = model.register_forward_hook(_hook(weakref.ref(pipe), correction), with_kwargs=True)
    if artifact is not None:
        artifact[ENTRY] = correction.to_dict()
        refresh(model)
    return correction


def detach(pipe: Any) -> None:
    """Undoes `attach`; nothing happens if no correction is attached."""
    model = getattr(pipe, _denoiser(pipe))
    handle = model.__dict__.pop("dq_noise_correction", None)
    if handle is None:
        return
    handle.remove()
    if getattr(model, "dq_artifact", {}).pop(ENTRY, None) is not None:
        refresh(model)


def _without_steps(scheduler: Any) -> Any:
    """The scheduler before a run: its last number of steps says nothing about the next one."""
    scheduler = copy.copy(scheduler)
    scheduler.num_inference_steps = None
    return scheduler


def _hook(pipe: weakref.ref, correction: NoiseCorrection):
    """A function and no object: copying the model must not copy the pipeline."""

    def corrected(module: nn.Module, args: tuple, kwargs: dict, output: Any) -> Any:
        owner = pipe()
        if owner is not None:
            correction.check(owner.scheduler)
        factors, done = correction.at(call_timestep(args, kwargs)), []

        def scaled(t: Tensor) -> Tensor:
            if done or not t.is_floating_point():
                return t
            done.append(t)
            f = torch.tensor(factors, dtype=torch.float32, device=t.device)
            return (t.float() * (f if t.dim() <= 3 else f.view(-1, *[1] * (t.dim() - 2)))).to(t.dtype)

        return map_tensors(output, scaled)

    return corrected
