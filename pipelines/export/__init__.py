"""Checkpoints for other engines; every module here registers an `Exporter`."""

from __future__ import annotations

import copy
from collections import Counter
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor, nn

from dq import checks
from dq.checkpoint import FORMAT_VERSION
from dq.linear import LinearConfig, QuantizedLinear, quantized_linears
from dq.pipelines.expert_names import from_files, of_experts
from dq.pipelines.exported import EXPORTERS, Exporter, Job, Stored
from dq.pipelines.loading import folder_of, read_config
from dq.qtensor import check_finite
from dq.records import map_tensors
from dq.registry import DQError, suggest


def export(
    model: nn.Module,
    folder: str | Path,
    format: str = "compressed-tensors",
    *,
    weight_only: bool = False,
    calibration: Any = None,
    max_shard_size: str = "5GB",
) -> Path:
    """Writes a quantized transformers model as another engine reads it. Codes and scales go over as they are.

    Args:
        model: quantized by dq.
        folder: new or without weights.
        format: `compressed-tensors` (transformers, vLLM, SGLang), `modelopt` (TensorRT-LLM, vLLM), `gguf`.
        weight_only: declares 16-bit activations, whatever the recipe said.
        calibration: what `dq.quantize` takes for a model; for formats that store a scale of the activations (NVFP4
            with 4-bit activations), which dq computes per token instead.
        max_shard_size: of one file.

    Returns:
        the folder.

    Raises:
        DQError: an unknown format, nothing quantized, a folder that holds weights; a layer that the format cannot
            describe, with the reason. Nothing has been written then.
    """
    exporter = EXPORTERS.get(format)
    _check_model(model, exporter)
    target = checks.output_folder(folder)
    held = [p.name for pattern in ("*.safetensors", "*.gguf") for p in target.glob(pattern)]
    if held:
        raise DQError(f"{target} holds weights already ({held[0]}): give a new folder")
    job = Job(model, quantized_linears(model), weight_only, shard_size=max_shard_size)
    second = (job.activations(name) for name in job.layers)
    if calibration is not None and any(spec is not None and spec.global_scale for spec in second):
        job.amax = _input_amax(job, calibration)
    _check_layers(exporter, job)
    with checks.one_line(f"cannot export to {target}"):
        exporter.write(job, target)
    return target


def _check_model(model: Any, exporter: Exporter) -> None:
    why = exporter.available()
    if why:
        raise DQError(f"export format {exporter.name} cannot run here: {why}")
    if not isinstance(model, nn.Module) or not hasattr(getattr(model, "config", None), "save_pretrained"):
        raise DQError(f"export takes a transformers model, got {type(model).__name__}")
    if not quantized_linears(model):
        raise DQError(f"nothing in {type(model).__name__} is quantized: dq.quantize it first")


def _check_layers(exporter: Exporter, job: Job) -> None:
    """Raises DQError with the first layer of every reason, and how many others share it."""
    reasons = {name: exporter.refuse(job, name) for name in job.layers}
    refused = {name: why for name, why in reasons.items() if why}
    if not refused:
        return
    counts, lines = Counter(refused.values()), []
    for why, count in counts.items():
        first = next(n for n, w in refused.items() if w == why)
        lines.append(f"{first}{f' (and {count - 1} more)' if count > 1 else ''}: {why}")
    shown = "; ".join(lines[:3]) + (f"; and {len(lines) - 3} other reasons" if len(lines) > 3 else "")
    raise DQError(f"cannot export to {exporter.name}: {shown}")


def _input_amax(job: Job, calibration: Any) -> dict[str, float]:
    """name -> max |x| of every quantized linear's input over the calibration."""
    from dq.pipelines.api import _calibrate

    records, _ = _calibrate(job.model, {"": job.model}, calibration, None)[""]
    found: dict[str, float] = {}

    def watch(name: str):
        def hook(module: nn.Module, args: tuple) -> None:
            if args[0].numel():
                check_finite(args[0], f"the input of {name}")
                found[name] = max(found.get(name, 0.0), float(args[0].abs().amax()))

        return hook

    hooks = [layer.register_forward_pre_hook(watch(name)) for name, layer in job.layers.items()]
    device = next(job.model.parameters()).device
    try:
        with torch.no_grad():
            for record in records:
                args, kwargs = map_tensors((record.args, record.kwargs), lambda t: t.to(device))
                job.model(*args, **kwargs)
    finally:
        for hook in hooks:
            hook.remove()
    return found


def load_exported(folder: str | Path, dtype: torch.dtype | None = None) -> nn.Module:
    """Reads a compressed-tensors or modelopt checkpoint back as a model with dq's own linears, codes as they are.

    Args:
        folder: local; written by `export`, or by another tool in the same layout.
        dtype: of everything that is not quantized; default: what the folder's config says.

    Raises:
        DQError: no such folder, a method or a scheme that dq does not read, a tensor that is missing.
    """
    path = folder_of(str(folder))
    if path is None:
        raise DQError(f"{folder} is no local folder; load_exported downloads nothing")
    config = read_config(path / "config.json")
    quantization = config.get("quantization_config") or {}
    readers = {e.method: e for e in EXPORTERS if e.method and e.read}
    method = quantization.get("quant_method")
    if method not in readers:
        raise DQError(f"{folder} is quantized by {method!r}{suggest(str(method), readers)}")
    tensors: dict[str, Tensor] = {}
    for file in sorted(path.glob("*.safetensors")):
        with checks.one_line(f"{file.name} cannot be read"):
            tensors |= load_file(file)
    names = sorted({k.rpartition(".")[0] for k in tensors if k.endswith((".weight_scale", ".weight_packed"))})
    with checks.one_line(f"{folder} cannot be read"):
        stored = readers[method].read(quantization, tensors, names)
        # Codes without their scales would be loaded as weights of some hundred.
        loose = [k for k, t in tensors.items() if t.element_size() == 1 or k.rpartition(".")[2].startswith("weight_")]
        if loose:
            raise DQError(f"it lacks the tensors that belong to {loose[0]}")
    return _built(path, stored, tensors, dtype)


def _built(path: Path, stored: dict[str, Stored], tensors: dict[str, Tensor], dtype: torch.dtype | None) -> nn.Module:
    """The model of the folder through transformers' own loader, as if dq had saved it."""
    import transformers
    from transformers import AutoConfig

    config = AutoConfig.from_pretrained(path)
    cls = getattr(transformers, next(iter(config.architectures or ()), ""), None)
    if cls is None:
        raise DQError(f"{path}/config.json names no model class of transformers")
    stored, tensors = _own_names(cls, config, stored, tensors)
    kinds: list[dict[str, Any]] = []
    layers = {}
    for name, one in stored.items():
        kind = LinearConfig(one.weight.spec, one.activations).to_dict()
        if kind not in kinds:
            kinds.append(kind)
        layers[name] = {"kind": kinds.index(kind)}
        built = QuantizedLinear.build(one.weight, activations=one.activations, input_scale=one.input_scale)
        tensors |= {f"{name}.{key}": t for key, t in built._buffers.items()}
    config.quantization_config = {
        "quant_method": "dq", "format_version": FORMAT_VERSION, "kinds": kinds, "layers": layers,
        "recipe": {"name": "imported"}, "source": str(path),
    }  # fmt: skip
    return cls.from_pretrained(None, config=config, state_dict=tensors, dtype=dtype or config.dtype)


def _own_names(cls: type, config: Any, stored: dict[str, Stored], tensors: dict[str, Tensor]) -> tuple[dict, dict]:
    """Both by the names that the model has in memory, if its files hold quantized experts."""
    if not of_experts(stored):
        return stored, tensors
    plain = copy.deepcopy(config)
    plain.__dict__.pop("quantization_config", None)
    with torch.device("meta"):
        model = cls(plain)
    known = from_files(model, [*stored, *tensors])
    return {known[n]: s for n, s in stored.items()}, {known[n]: t for n, t in tensors.items()}
