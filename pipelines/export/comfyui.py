"""ComfyUI: one safetensors file under the original names of the model, run by comfy-kitchen.

Beside the tensors of a quantized matrix (dq.pipelines.comfy says which) lies `comfy_quant`, a JSON object in uint8 that
names its format, and the header repeats it. `full_precision_matrix_mult` is set where activations stay in 16 bits.
Grids of activations there: FP8 has one stored scale, NVFP4 one that is stored or computed, INT8 and INT4 one per token.
Scales of `awq_w4a16` are rounded to the dtype of the model unless they were chosen in it
(`int4/group64/bf16`). An architecture whose original names dq does not know keeps those of diffusers.
"""

from __future__ import annotations

import json
from pathlib import Path

import torch
from torch import Tensor

from dq.checks import one_line
from dq.pipelines.comfy import MATRICES, decode, encode, format_of
from dq.pipelines.exported import EXPORTERS, NVFP4_TOP, Exporter, Files, Job, Stored, not_plain
from dq.pipelines.importing import PREFIX
from dq.pipelines.rows import unlike_rows, write_matrices

HEADER = "_quantization_metadata"
_LEAVES = ("weight", "weight_scale", "weight_scale_2", "weight_zeros", "input_scale", "pre_quant_scale", "comfy_quant")


def _refuse(job: Job, name: str) -> str:
    one, layer = job.stored(name), job.layers[name]
    kind = format_of(one)
    if not kind:
        return _unknown(one) if len(one.steps) < 2 else not_plain(layer, name, "lowrank")
    matrix = MATRICES[kind]
    why = not_plain(layer, name, *matrix.steps)
    if why:
        return why
    acts = one.activations
    if acts is not None and str(acts) not in matrix.activations:
        known = ", ".join(matrix.activations) or "none"
        return (
            f"{kind} does not go with activations {acts} there (only {known}); weight_only=True leaves them in 16 bits"
        )
    if kind == "float8_e4m3fn" and acts is not None and _static(job, name) is None:
        return (
            "FP8 activations have one stored scale there, not one per token: give calibration=... or weight_only=True "
            "(in the shell --prompts FILE, or --weight-only)"
        )
    if layer.in_features % matrix.multiple:
        return f"its {layer.in_features} inputs are no multiple of {matrix.multiple}"
    turns = [s.params for s in one.steps if s.name == "rotate"]
    if any(t.get("kind", "regular") != "regular" for t in turns):
        return f"only regular Hadamard rotations have a form there, not {turns[0]['kind']}"
    return unlike_rows(job, name)


def _unknown(one: Stored) -> str:
    spec = one.weight.spec
    hints = {
        "fp8_e4m3": "its FP8 has one scale per matrix, fp8_e4m3/tensor",
        "int4": "INT4 per channel has one behind a rotation, INT4 in groups beside 16-bit activations",
    }
    hint = f" ({hints[spec.format]})" if spec.format in hints else ""
    behind = f" behind {one.steps[0].name}" if one.steps else ""
    return f"weights {spec}{behind} have no form there{hint}"


def _static(job: Job, name: str) -> float | None:
    """The one scale of the activations: what the layer has, or what calibration saw of all that are one matrix."""
    one = job.stored(name)
    if one.activations is None or format_of(one) not in ("float8_e4m3fn", "nvfp4"):
        return None
    if one.input_scale is not None:
        return float(one.input_scale.max())
    top = max((job.amax.get(n, 0.0) for n in job.together(name)), default=0.0)
    return top / (448.0 if format_of(one) == "float8_e4m3fn" else NVFP4_TOP) if top else None


def _write(job: Job, folder: Path) -> None:
    described = {}

    def tensors(there: str, name: str, one: Stored) -> dict[str, Tensor]:
        described[there], own = encode(one, job.layers[name].compute_dtype, _static(job, name))
        said = json.dumps(described[there]).encode()
        return own | {"comfy_quant": torch.tensor(list(said), dtype=torch.uint8)}

    def header() -> dict[str, str]:
        return {"format": "pt", HEADER: json.dumps({"format_version": "1.0", "layers": described})}

    write_matrices(job, folder, tensors, header)


def _recognises(files: Files) -> bool:
    return HEADER in files.metadata or any(k.endswith(".comfy_quant") for k in files.tensors)


def _read(files: Files) -> dict[str, Stored]:
    header = json.loads(files.metadata[HEADER])["layers"] if HEADER in files.metadata else {}
    header, out = {n.removeprefix(PREFIX): conf for n, conf in header.items()}, {}
    for name in sorted({*files.owners("comfy_quant"), *header}):
        own = files.take(name, *_LEAVES)
        with one_line(name):
            conf = header.get(name, {})
            if "comfy_quant" in own:
                conf = conf | json.loads(own["comfy_quant"].numpy().tobytes())
            out[name] = decode(conf, own, files.shapes.get(name))
    return out


EXPORTERS.register(
    Exporter(
        "comfyui",
        "ComfyUI: FP8, NVFP4, MXFP8, INT8 (ConvRot), ConvRot W4A4, INT4 weight-only, one file in the original names",
        _refuse,
        _write,
        _read,
        recognises=_recognises,
        libraries=("diffusers",),
    )
)
