"""The checkpoint: a JSON config beside plain tensors. Every reader checks the format version before anything else."""

from __future__ import annotations

import platform
import sys
from typing import Any

import torch
from torch import Tensor, nn

from dq.conv import like, size
from dq.linear import LinearConfig, QuantizedLinear, quantized_linears
from dq.planning import Plan
from dq.registry import DQError, suggest, typed
from dq.steps import watch
from dq.version import VERSION

FORMAT_VERSION = 1


def artifact_meta(model: nn.Module, plan: Plan, calibration: dict[str, Any]) -> dict[str, Any]:
    """What is recorded with the tensors: recipe, calibration, source model and versions. JSON-clean."""
    config = getattr(model, "config", {})
    source = getattr(config, "_name_or_path", None) or (
        config.get("_name_or_path") if isinstance(config, dict) else None
    )
    return {
        "recipe": plan.recipe.to_dict(),
        "family": plan.family.name,
        "calibration": calibration,
        "source": str(source or ""),
        "revision": str(getattr(config, "_commit_hash", None) or ""),
        "versions": {
            "dq": VERSION,
            "torch": str(torch.__version__),
            "python": platform.python_version(),
            **{n: str(sys.modules[n].__version__) for n in ("diffusers", "transformers") if n in sys.modules},
        },
    }


def layers_config(model: nn.Module) -> dict[str, Any]:
    """The JSON description of every quantized linear: kinds are written once, layers point at them."""
    kinds: list[dict[str, Any]] = []
    layers: dict[str, Any] = {}
    for name, layer in quantized_linears(model).items():
        kind = layer.config.to_dict()
        if kind not in kinds:
            kinds.append(kind)
        layers[name] = {"kind": kinds.index(kind)} | ({} if layer.sqnr_db is None else {"sqnr_db": layer.sqnr_db})
    return {"format_version": FORMAT_VERSION, "kinds": kinds, "layers": layers}


def check_version(config: dict[str, Any]) -> None:
    """Raises DQError if the checkpoint is newer than this reader, or carries no version at all."""
    version = config.get("format_version")
    if not isinstance(version, int) or version < 1:
        raise DQError(f"this is no dq checkpoint: its config has no format_version (got {version!r})")
    if version > FORMAT_VERSION:
        raise DQError(
            f"the checkpoint has format version {version}, this dq reads up to {FORMAT_VERSION}: upgrade with "
            "pip install -U dq-quant"
        )


def prepare_model(model: nn.Module, config: dict[str, Any], dtype: torch.dtype, device="meta") -> None:
    """Swaps the linears named by a checkpoint's config for empty `QuantizedLinear`s, ready for their tensors.

    Raises:
        DQError: newer format, a config that is damaged, or a layer the model does not have (another architecture or
            library version).
    """
    check_version(config)
    damaged = "the checkpoint's config is damaged: "
    try:
        kinds = [LinearConfig.from_dict(k) for k in config["kinds"]]
        layers = {n: dict(e) | {"kind": typed(e["kind"], int, n)} for n, e in config["layers"].items()}
    except (LookupError, TypeError, AttributeError, ValueError) as error:
        raise DQError(f"{damaged}{type(error).__name__}: {error}") from error
    if not layers:
        raise DQError(damaged + "it names no quantized layer")
    linears = {n: m for n, m in model.named_modules() if isinstance(m, nn.Linear | nn.Conv2d)}
    for name, entry in layers.items():
        if name not in linears:
            raise DQError(
                f"the checkpoint quantizes {name!r}, which {type(model).__name__} lacks{suggest(name, linears)}"
            )
        old, kind = linears[name], entry["kind"]
        if not 0 <= kind < len(kinds):
            raise DQError(f"{damaged}{name!r} refers to kind {kind} of {len(kinds)}")
        n, k = size(old)
        new = QuantizedLinear(
            k,
            n,
            kinds[kind],
            bias=old.bias is not None or kinds[kind].shifted,
            dtype=dtype,
            device=device,
        )
        new.sqnr_db = entry.get("sqnr_db")
        model.set_submodule(name, like(new, old).train(old.training))


def align(model: nn.Module) -> None:
    """Copies CPU tensors that a memory-mapped file left unaligned to 64 bytes.

    BLAS kernels take other code paths for unaligned operands and then differ in the last bit; a model must give the
    same bits before saving and after loading.
    """
    for tensor in (*model.parameters(), *model.buffers()):
        if tensor.device.type == "cpu" and tensor.data_ptr() % 64:
            tensor.data = tensor.data.clone()


def finish_model(model: nn.Module) -> None:
    """After the tensors are in: buffers that a loader widened go back to their stored dtype; empty ones are refused.

    Raises:
        DQError: a tensor of a quantized layer was not in the checkpoint, or has another shape.
    """
    for name, layer in quantized_linears(model).items():
        for key, (shape, dtype) in layer.config.tensors(layer.out_features, layer.in_features).items():
            tensor = getattr(layer, key)
            if tensor.is_meta:
                raise DQError(f"the checkpoint lacks {name}.{key}: it is incomplete, load nothing from it")
            if tuple(tensor.shape) != tuple(shape):
                raise DQError(
                    f"{name}.{key} has shape {tuple(tensor.shape)} in the checkpoint, expected {tuple(shape)}"
                )
            if tensor.dtype != dtype:
                setattr(layer, key, tensor.to(dtype))
            _check_values(getattr(layer, key), f"{name}.{key}")
        if layer.bias is not None and not layer.bias.is_meta:
            _check_values(layer.bias, f"{name}.bias")
    watch(model)
    align(model)


def _check_values(tensor: Tensor, name: str) -> None:
    """A damaged file is found when it is loaded, not as a black image: no NaN, and every order a permutation."""
    if tensor.is_floating_point() and not torch.isfinite(tensor.to(torch.float32)).all():
        raise DQError(f"{name} holds NaN or Inf in the checkpoint: the file is damaged")
    if name.endswith("_order"):
        expected = torch.arange(len(tensor), device=tensor.device, dtype=tensor.dtype)
        if not torch.equal(tensor.sort().values, expected):
            raise DQError(f"{name} is no permutation of 0 to {len(tensor) - 1}: the file is damaged")


def stored_dtype(layer: QuantizedLinear, key: str) -> torch.dtype:
    """The dtype in which buffer `key` of the layer is stored."""
    return layer.config.tensors(layer.out_features, layer.in_features)[key][1]
