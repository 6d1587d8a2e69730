"""NVIDIA Model Optimizer's NVFP4 layout, which TensorRT-LLM, vLLM and SGLang read.

    weight uint8 [N, K / 2] (low nibble first)    weight_scale E4M3 [N, K / 16]
    weight_scale_2 float32 scalar, a factor: amax / 2688, the reciprocal of compressed-tensors' global scale
    input_scale float32 scalar, amax / 2688 of the activations

with hf_quant_config.json beside config.json. Source: modelopt's export_hf_checkpoint.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from dq.checks import one_line
from dq.pipelines.export.compressed import _blocks, missing_amax
from dq.pipelines.exported import (
    EXPORTERS,
    Exporter,
    Job,
    Stored,
    multiplier,
    not_plain,
    unlike_siblings,
    write_folder,
)  # fmt: skip
from dq.qtensor import QTensor
from dq.registry import DQError
from dq.spec import QuantSpec
from dq.version import VERSION

_TOP = 2688.0


def _refuse(job: Job, name: str) -> str:
    layer = job.layers[name]
    spec, acts = layer.config.weights, job.activations(name)
    if not_plain(layer, name):
        return not_plain(layer, name)
    if _blocks(spec) != "nvfp4" or (acts is not None and _blocks(acts) != "nvfp4"):
        return f"weights {spec} with activations {acts or 'in 16 bits'}: only NVFP4 is written there"
    if layer.in_features % 16:
        return f"its {layer.in_features} inputs are no multiple of 16"
    first = next(iter(job.layers))
    if (job.activations(first) is None) != (acts is None):
        return f"its activations are quantized unlike those of {first}, and the file has one algorithm"
    return unlike_siblings(job, name, levels=True) or missing_amax(job, name)


def _tensors(job: Job, name: str) -> dict[str, Tensor]:
    q, k = job.layers[name].qtensor, job.layers[name].in_features
    out = {"weight": q.codes[:, : k // 2], "weight_scale": q.scale, "weight_scale_2": multiplier(q).clone()}
    if job.activations(name) is not None:
        out["input_scale"] = torch.tensor(job.amax[name] / _TOP)
    return out


def _write(job: Job, folder: Path) -> None:
    weight_only = job.activations(next(iter(job.layers))) is None
    algorithm = "W4A16_NVFP4" if weight_only else "NVFP4"
    grid = {"dynamic": False, "num_bits": 4, "type": "float", "group_size": 16}
    ignored, producer = job.ignored, {"name": "modelopt", "version": f"layout written by dq {VERSION}"}
    config = {
        "quant_method": "modelopt", "quant_algo": algorithm, "producer": producer, "ignore": ignored,
        "config_groups": {"group_0": {"weights": grid, "input_activations": None if weight_only else dict(grid),
                                      "targets": ["Linear"]}},
    }  # fmt: skip
    write_folder(job, folder, {n: _tensors(job, n) for n in job.layers}, config)
    beside = {"quant_algo": algorithm, "kv_cache_quant_algo": None, "group_size": 16, "exclude_modules": ignored}
    text = json.dumps({"producer": producer, "quantization": beside}, indent=2)
    (folder / "hf_quant_config.json").write_text(text + "\n", encoding="utf-8")


def _read(config: dict[str, Any], tensors: dict[str, Tensor], names: list[str]) -> dict[str, Stored]:
    if config.get("quant_algo") not in ("NVFP4", "W4A16_NVFP4"):
        raise DQError(f"modelopt's {config.get('quant_algo')} is not read, only NVFP4 and W4A16_NVFP4")
    acts, out = QuantSpec.parse("nvfp4-token") if config["quant_algo"] == "NVFP4" else None, {}
    for name in names:
        with one_line(name):
            codes, scale = tensors.pop(f"{name}.weight"), tensors.pop(f"{name}.weight_scale")
            second = tensors.pop(f"{name}.weight_scale_2").reshape(1).to(torch.float32)
        tensors.pop(f"{name}.input_scale", None)
        shape = (len(codes), 2 * codes.shape[1])
        out[name] = Stored(QTensor(codes, scale, second, QuantSpec.parse("nvfp4"), shape), acts)
    return out


EXPORTERS.register(Exporter("modelopt", "TensorRT-LLM, vLLM, SGLang: NVFP4", _refuse, _write, _read, method="modelopt"))
