"""Black Forest Labs' FP8 and NVFP4 files of FLUX.2, which diffusers reads by `from_single_file`; other models alike.

    fp8r    weight E4M3 [N, K], weight_scale float32 [N]; activations run in FP8 per token where a GPU can
    nvfp4   weight uint8 [N, K / 2] (low nibble first), weight_scale E4M3 [N, K / 16], weight_scale_2 float32 scalar
            (a factor), input_scale float32 scalar: amax / 2688 of the activations

    Flux2Transformer2DModel.from_single_file("out/out.safetensors", config="out",
                                             quantization_config=BFLQuantizationConfig(torch.bfloat16))

One safetensors file under the original names of the model, or diffusers' where there are none. It cannot say that
activations stay in 16 bits: beside FP8 weights that do not ask for it they run in FP8 on a GPU, NVFP4 ones are refused.
Source: diffusers 0.42, quantizers/bfl.
"""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor

from dq.checks import one_line
from dq.pipelines.exported import EXPORTERS, Exporter, Files, Job, Stored, grid_kind, not_plain, nvfp4_of, nvfp4_tensors
from dq.pipelines.rows import unlike_rows, write_matrices
from dq.qtensor import QTensor
from dq.registry import DQError
from dq.spec import QuantSpec


def _kind(spec: QuantSpec) -> str:
    if spec.format == "fp8_e4m3" and spec.strategy == "channel" and spec.scale_format == "fp32":
        return "fp8r"
    return "nvfp4" if grid_kind(spec) == "nvfp4" else ""


def _refuse(job: Job, name: str) -> str:
    layer = job.layers[name]
    spec, acts = layer.config.weights, job.activations(name)
    kind = _kind(spec)
    if type(job.model).__name__.startswith("UNet"):
        return "diffusers reads no UNet in this form"
    if not_plain(layer, name):
        return not_plain(layer, name)
    if not kind:
        return f"weights {spec} have no form there, only fp8_e4m3/channel and nvfp4"
    wanted = {"fp8r": "fp8_e4m3/token", "nvfp4": "nvfp4-token"}[kind]
    if acts is not None and str(acts) != wanted:
        return f"{kind} does not go with activations {acts} there, only {wanted}"
    if kind == "nvfp4" and layer.in_features % 16:
        return f"its {layer.in_features} inputs are no multiple of 16"
    if kind == "nvfp4" and acts is None:
        return "NVFP4 always quantizes activations there, and those of this linear stay in 16 bits"
    if kind == "nvfp4" and not job.amax.get(name):
        return "NVFP4 activations have one stored scale there: give calibration=... (in the shell --prompts FILE)"
    return unlike_rows(job, name)


def _encode(job: Job, name: str, one: Stored) -> dict[str, Tensor]:
    q = one.weight
    if _kind(q.spec) == "fp8r":
        return {"weight": q.codes[:, : q.shape[1]], "weight_scale": q.scale.reshape(-1)}
    return nvfp4_tensors(q, max(job.amax[n] for n in job.together(name)))


def _write(job: Job, folder: Path) -> None:
    write_matrices(job, folder, lambda there, name, one: _encode(job, name, one), lambda: {"format": "pt"})


def _recognises(files: Files) -> bool:
    ends = {k.rpartition(".")[2] for k in files.tensors}
    return not files.quantization and "weight_scale" in ends and "comfy_quant" not in ends


def _decode(own: dict[str, Tensor]) -> Stored:
    if "weight_scale_2" in own:
        return Stored(nvfp4_of(own), QuantSpec.parse("nvfp4-token"))
    codes, scale = own["weight"], own["weight_scale"]
    if codes.dtype != torch.float8_e4m3fn or scale.numel() != len(codes):
        raise DQError(f"weight {codes.dtype} with scales {list(scale.shape)} is neither fp8r nor nvfp4")
    spec = QuantSpec.parse("fp8_e4m3/channel")
    weight = QTensor(codes, scale.reshape(-1, 1).to(torch.float32), None, spec, tuple(codes.shape))
    return Stored(weight, QuantSpec.parse("fp8_e4m3/token"))


def _read(files: Files) -> dict[str, Stored]:
    out = {}
    for name in files.owners("weight_scale"):
        own = files.take(name, "weight", "weight_scale", "weight_scale_2", "input_scale")
        with one_line(name):
            out[name] = _decode(own)
    return out


EXPORTERS.register(
    Exporter(
        "bfl",
        "diffusers' from_single_file with BFLQuantizationConfig: FP8 per row, NVFP4, as FLUX.2's own files",
        _refuse,
        _write,
        _read,
        recognises=_recognises,
        libraries=("diffusers",),
    )
)
