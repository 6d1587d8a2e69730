"""NVIDIA Model Optimizer's NVFP4 layouts, which TensorRT-LLM, vLLM and SGLang read; diffusers models too.

    weight uint8 [N, K / 2] (low nibble first)    weight_scale E4M3 [N, K / 16]
    weight_scale_2 float32 scalar, a factor: amax / 2688, the reciprocal of compressed-tensors' global scale
    input_scale float32 scalar, amax / 2688 of the activations

and for NVFP4_SVD, beside a smoothing factor lambda and a low-rank branch,

    pre_quant_scale [K] = 1 / lambda    svdquant_lora_a [r, K], on x / lambda    svdquant_lora_b [N, r]

    y = NVFP4(x * pre_quant_scale) W^T + (x * pre_quant_scale) A^T B^T

dq's branch reads the raw x: A is its down factor times lambda, rounded once more to the 16 bits of the factors (at most
2^-8 of the branch). A language model has hf_quant_config.json beside config.json. Layers of several kinds are listed
one by one (MIXED_PRECISION). Source: modelopt 0.47, export_hf_checkpoint and SVDQuantLinear.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from dq.checks import one_line
from dq.pipelines.export.compressed import missing_amax
from dq.pipelines.exported import (
    EXPORTERS,
    Exporter,
    Files,
    Job,
    Stored,
    grid_kind,
    not_plain,
    nvfp4_of,
    nvfp4_tensors,
    unlike_siblings,
    write_folder,
)  # fmt: skip
from dq.registry import DQError
from dq.spec import QuantSpec
from dq.transforms import Step
from dq.version import VERSION

_FLOAT = {"dynamic": False, "num_bits": 4, "type": "float", "group_size": 16}
_READ = ("NVFP4", "W4A16_NVFP4", "NVFP4_SVD")


def _algorithm(job: Job, name: str) -> str:
    config = job.layers[name].config
    if config.rank or config.steps:
        return "NVFP4_SVD"
    return "W4A16_NVFP4" if job.activations(name) is None else "NVFP4"


def _refuse(job: Job, name: str) -> str:
    layer = job.layers[name]
    spec, acts = layer.config.weights, job.activations(name)
    why = not_plain(layer, name, *(("smooth", "lowrank") if job.library == "diffusers" else ()))
    if why:
        return why
    if grid_kind(spec) != "nvfp4" or (acts is not None and grid_kind(acts) != "nvfp4"):
        return f"weights {spec} with activations {acts or 'in 16 bits'}: only NVFP4 is written there"
    if layer.in_features % 16:
        return f"its {layer.in_features} inputs are no multiple of 16"
    if acts is None and _algorithm(job, name) == "NVFP4_SVD":
        return "its smoothing or low-rank branch has a form there only beside NVFP4 activations"
    first = next(iter(job.layers))
    if job.library == "transformers" and _algorithm(job, first) != _algorithm(job, name):
        return f"its activations are quantized unlike those of {first}, and the file has one algorithm"
    return unlike_siblings(job, name, levels=True) or missing_amax(job, name)


def _tensors(job: Job, name: str) -> dict[str, Tensor]:
    one = job.stored(name)
    out = nvfp4_tensors(one.weight, None if one.activations is None else job.amax[name])
    factor = one.steps[0].tensors["factor"].to(torch.float32) if one.steps else None
    if factor is not None:
        out["pre_quant_scale"] = 1.0 / factor
    if one.side is not None:
        down, up = one.side
        out |= {"svdquant_lora_a": down if factor is None else (down.to(torch.float32) * factor).to(down.dtype),
                "svdquant_lora_b": up}  # fmt: skip
    return out


def _group(algorithm: str, targets: list[str]) -> dict[str, Any]:
    acts = {} if algorithm == "W4A16_NVFP4" else {"input_activations": dict(_FLOAT)}
    more = {"has_zero_point": False, "pre_quant_scale": True} if algorithm == "NVFP4_SVD" else {}
    return {**acts, "weights": dict(_FLOAT), **more, "targets": targets}


def _write(job: Job, folder: Path) -> None:
    kinds: dict[str, list[str]] = {}
    for name in job.layers:
        kinds.setdefault(_algorithm(job, name), []).append(name)
    one = len(kinds) == 1
    algorithm = next(iter(kinds)) if one else "MIXED_PRECISION"
    groups = {f"group_{i}": _group(k, ["Linear"] if one else names) for i, (k, names) in enumerate(kinds.items())}
    ranks = {layer.config.rank for layer in job.layers.values()} - {0}
    if one and algorithm == "NVFP4_SVD" and len(ranks) == 1:
        groups["group_0"]["lora_rank"] = next(iter(ranks))
    ignored, producer = job.ignored, {"name": "modelopt", "version": f"layout written by dq {VERSION}"}
    config = {"quant_method": "modelopt", "quant_algo": algorithm, "producer": producer, "ignore": ignored,
              "config_groups": groups}  # fmt: skip
    if not one:
        config["quantized_layers"] = {n: {"quant_algo": k, "group_size": 16} for k, ns in kinds.items() for n in ns}
    write_folder(job, folder, {n: _tensors(job, n) for n in job.layers}, config)
    if job.library == "transformers":
        beside = {"quant_algo": algorithm, "kv_cache_quant_algo": None, "group_size": 16, "exclude_modules": ignored}
        text = json.dumps({"producer": producer, "quantization": beside}, indent=2)
        (folder / "hf_quant_config.json").write_text(text + "\n", encoding="utf-8")


def _read(files: Files) -> dict[str, Stored]:
    config, out = files.quantization, {}
    for name in files.owners("weight_scale"):
        algorithm = (config.get("quantized_layers") or {}).get(name, config).get("quant_algo")
        if algorithm not in _READ:
            raise DQError(f"modelopt's {algorithm} is not read, only {', '.join(_READ)}")
        own = files.take(name, "weight", "weight_scale", "weight_scale_2", "input_scale", "pre_quant_scale",
                         "svdquant_lora_a", "svdquant_lora_b")  # fmt: skip
        with one_line(name):
            acts = None if algorithm == "W4A16_NVFP4" else QuantSpec.parse("nvfp4-token")
            out[name] = Stored(nvfp4_of(own), acts, None, *_branches(own))
    return out


def _branches(own: dict[str, Tensor]) -> tuple[tuple[Step, ...], tuple[Tensor, Tensor] | None]:
    """Smoothing step and low-rank factors on the raw input."""
    scale = own.get("pre_quant_scale")
    factor = None if scale is None else 1.0 / scale.reshape(-1).to(torch.float32)
    steps = () if factor is None else (Step("smooth", {"factor": factor}),)
    if "svdquant_lora_a" not in own:
        return steps, None
    down, up = own["svdquant_lora_a"], own["svdquant_lora_b"]
    if factor is not None:  # which has no 16-bit form on the raw x
        down, up = down.to(torch.float32) / factor, up.to(torch.float32)
    return steps, (down, up)


EXPORTERS.register(
    Exporter(
        "modelopt",
        "TensorRT-LLM, vLLM, SGLang, diffusers models: NVFP4, NVFP4 with smoothing and low rank (NVFP4_SVD)",
        _refuse,
        _write,
        _read,
        method="modelopt",
        libraries=("transformers", "diffusers"),
        pipeline=True,
    )
)
