"""The resume folder: finished blocks as safetensors, bound to the work they belong to by a fingerprint."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import nn

from dq.linear import LinearConfig, QuantizedLinear
from dq.planning import Plan
from dq.registry import DQError


def fingerprint(model: nn.Module, plan: Plan, calibration: dict[str, Any]) -> str:
    """SHA-256 over recipe, groups, calibration description and a checksum of every weight to be quantized."""
    digest = hashlib.sha256()
    digest.update(json.dumps([plan.recipe.to_dict(), plan.model, calibration], sort_keys=True).encode())
    for row in plan.quantized:
        for name in row.members:
            weight = model.get_submodule(name).weight
            digest.update(f"{name} {tuple(weight.shape)} {float(weight.detach().double().square().sum())!r}".encode())
    return digest.hexdigest()


class ResumeFolder:
    """Keeps finished blocks of one quantization.

    Raises:
        DQError: the folder holds blocks of another model, recipe or calibration.
    """

    def __init__(self, path: str, model: nn.Module, plan: Plan, calibration: dict[str, Any]):
        self.path = Path(path)
        self.path.mkdir(parents=True, exist_ok=True)
        mark, mine = self.path / "fingerprint", fingerprint(model, plan, calibration)
        if mark.is_file() and mark.read_text() != mine:
            raise DQError(f"{path} holds blocks of another model, recipe or calibration; take an empty folder")
        mark.write_text(mine)

    def _file(self, block: str) -> Path:
        return self.path / f"{block or 'outside-blocks'}.safetensors"

    def save(self, block: str, layers: dict[str, QuantizedLinear]) -> None:
        """Writes the block's layers; the file appears whole or not at all."""
        tensors, meta = {}, {}
        for name, layer in layers.items():
            tensors |= {f"{name}:{k}": t.contiguous() for k, t in layer.state_dict().items()}
            meta[name] = {
                "config": layer.config.to_dict(),
                "shape": [layer.out_features, layer.in_features],
                "bias": layer.bias is not None,
                "dtype": str(layer.compute_dtype).removeprefix("torch."),
                "sqnr_db": layer.sqnr_db,
            }
        part = self._file(block).with_suffix(".part")
        save_file(tensors, part, metadata={"layers": json.dumps(meta)})
        part.replace(self._file(block))

    def load(self, block: str) -> dict[str, QuantizedLinear] | None:
        """The block's layers, or None if it is not finished."""
        if not self._file(block).is_file():
            return None
        layers = {}
        with safe_open(self._file(block), "pt") as file:
            for name, m in json.loads(file.metadata()["layers"]).items():
                n, k = m["shape"]
                dtype = getattr(torch, m["dtype"])
                layer = QuantizedLinear(k, n, LinearConfig.from_dict(m["config"]), bias=m["bias"], dtype=dtype)
                layer.load_state_dict({key: file.get_tensor(f"{name}:{key}") for key in layer.state_dict()})
                layer.sqnr_db = m["sqnr_db"]
                layers[name] = layer
        return layers
