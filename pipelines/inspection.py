"""What is in a checkpoint folder, read from its files alone: no weights are loaded."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

from safetensors import safe_open

from dq.checkpoint import check_version
from dq.linear import LinearConfig
from dq.registry import DQError


def inspect_folder(source: str) -> str:
    """A text about every model in a pipeline or model folder: method, recipe, layers by kind, dtypes, bytes, origin.

    Raises:
        DQError: no such folder, or nothing in it that is a model; a dq checkpoint newer than this dq.
    """
    root = Path(source)
    if not root.is_dir():
        raise DQError(f"{source} is no folder")
    found = sorted(p.parent for p in [*root.glob("config.json"), *root.glob("*/config.json")])
    blocks = [text for folder in found if (text := _model(folder, root))]
    if not blocks:
        raise DQError(f"{source} holds no model: no config.json beside weights")
    return "\n".join(blocks)


def _model(folder: Path, root: Path) -> str:
    config = json.loads((folder / "config.json").read_text())
    files = sorted(folder.glob("*.safetensors"))
    if not files:
        return ""
    name = "." if folder == root else folder.name
    kind = config.get("_class_name") or ", ".join(config.get("architectures") or ["model"])
    size = sum(f.stat().st_size for f in files)
    lines = [f"{name}: {kind}, {size / 1e6:.2f} MB in {len(files)} file(s); tensors {_dtypes(files)}"]
    quantization = config.get("quantization_config")
    if quantization is None:
        return lines[0] + "; not quantized"
    if quantization.get("quant_method") != "dq":
        return lines[0] + f"; quantized by {quantization.get('quant_method')}"
    return "\n".join(lines + _dq_lines(quantization))


def _dtypes(files: list[Path]) -> str:
    counts: Counter = Counter()
    for path in files:
        with safe_open(path, "pt") as file:
            counts.update(file.get_slice(k).get_dtype() for k in file.keys())  # noqa: SIM118 - not a dict
    return ", ".join(f"{n} {d}" for d, n in counts.most_common())


def _dq_lines(config: dict[str, Any]) -> list[str]:
    check_version(config)
    recipe, calibration = config.get("recipe") or {}, config.get("calibration") or {}
    versions = ", ".join(f"{k} {v}" for k, v in (config.get("versions") or {}).items())
    lines = [f"  recipe {recipe.get('name')} (dq format {config['format_version']}; {versions})"]
    if config.get("source"):
        lines.append(f"  made from {config['source']} {config.get('revision', '')}".rstrip())
    if calibration:
        strata = ", ".join(f"{k}: {v}" for k, v in (calibration.get("kept") or {}).items())
        lines.append(f"  calibrated on {calibration.get('prompts', '?')} prompts; records per step bin/branch {strata}")
    else:
        lines.append("  data-free")
    layers = config["layers"]
    for i, entry in enumerate(config["kinds"]):
        kind = LinearConfig.from_dict(entry)
        names = [n for n, e in layers.items() if e["kind"] == i]
        steps = ", ".join([n for n, _ in kind.steps] + ([f"low rank {kind.rank}"] if kind.rank else [])) or "plain"
        acts = "16-bit" if kind.activations is None else kind.activations
        lines.append(f"  {len(names):>4} layers  W {kind.weights}  X {acts}  {steps}  e.g. {names[0]}")
    return lines
