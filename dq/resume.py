"""The resume folder: finished blocks as safetensors, bound to the work they belong to by a fingerprint."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import nn

from dq.checks import one_line
from dq.linear import LinearConfig, QuantizedLinear
from dq.planning import Plan
from dq.records import digest
from dq.registry import DQError


def fingerprint(model: nn.Module, plan: Plan, calibration: dict[str, Any]) -> dict[str, str]:
    """SHA-256 of all that decides about the bits: recipe, linears to be quantized, description of the calibration, and
    every byte of the model."""
    parts = {"recipe": json.dumps(plan.recipe.to_dict(), sort_keys=True)}
    parts |= {"choice of linears": [plan.model, [row.members for row in plan.quantized]]}
    parts |= {"calibration": json.dumps(calibration, sort_keys=True), "model": model}
    return {name: digest(part) for name, part in parts.items()}


class ResumeFolder:
    """Keeps finished blocks of one quantization.

    Raises:
        DQError: the folder holds blocks of another model, recipe or calibration, or cannot be written.
    """

    def __init__(self, path: str, model: nn.Module, plan: Plan, calibration: dict[str, Any]):
        self.path, mark = Path(path), Path(path) / "fingerprint"
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            mark.touch()
            found, mine = mark.read_bytes(), fingerprint(model, plan, calibration)
            mark.write_bytes(found or json.dumps(mine).encode())
        except OSError as error:
            raise DQError(f"resume needs a folder that can be written to: {error}") from error
        if found and (other := _differing(found, mine)):
            way = "continue with the same, on the same device and number of threads, or take an empty folder"
            raise DQError(f"{path} holds blocks of another {other}; {way}")

    def _file(self, block: str) -> Path:
        return self.path / f"{block or 'outside-blocks'}.safetensors"

    def save_choices(self, choices: list[dict[str, Any]], split: dict[str, str]) -> None:
        """Keeps what an `auto` recipe decided, and which linears it found not to share an input; the file appears whole
        or not at all."""
        part = self.path / "choices.part"
        part.write_text(json.dumps({"choices": choices, "split": split}), encoding="utf-8")
        part.replace(self.path / "choices.json")

    def load_choices(self) -> tuple[list[dict[str, Any]], dict[str, str]] | None:
        """The inverse; None if nothing was decided yet."""
        try:
            found = json.loads((self.path / "choices.json").read_text(encoding="utf-8"))
            return found["choices"], found["split"]
        except (OSError, ValueError, LookupError, TypeError):
            return None

    def save(self, block: str, layers: dict[str, QuantizedLinear], notes: dict[str, Any]) -> None:
        """Writes the block's layers, and what a report says about them besides; the file appears whole or not at
        all."""
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
        with one_line(f"cannot keep block {block} in {self.path}, which holds those before it"):
            save_file(tensors, part, metadata={"layers": json.dumps(meta), "notes": json.dumps(notes)})
            part.replace(self._file(block))

    def load(self, block: str) -> tuple[dict[str, QuantizedLinear], dict[str, Any]] | None:
        """The block's layers and notes, or None if it is not finished; a file that cannot be read does not count."""
        if not self._file(block).is_file():
            return None
        try:
            with safe_open(self._file(block), "pt") as file:
                meta = {key: json.loads(text) for key, text in file.metadata().items()}
                return {n: _layer(file, n, m) for n, m in meta["layers"].items()}, meta["notes"]
        except (OSError, SafetensorError, ValueError, TypeError, LookupError):
            return None


def _differing(found: bytes, mine: dict[str, str]) -> str:
    """What of the work is not that of the folder, in words; "" if all is."""
    try:
        theirs = dict(json.loads(found))
    except (ValueError, TypeError):
        return "model, recipe or calibration"
    return " and ".join(name for name in mine if theirs.get(name) != mine[name])


def _layer(file: Any, name: str, m: dict[str, Any]) -> QuantizedLinear:
    n, k = m["shape"]
    config, dtype = LinearConfig.from_dict(m["config"]), getattr(torch, m["dtype"])
    layer = QuantizedLinear(k, n, config, bias=m["bias"], dtype=dtype)
    layer.load_state_dict({key: file.get_tensor(f"{name}:{key}") for key in layer.state_dict()})
    layer.sqnr_db = m["sqnr_db"]
    return layer
