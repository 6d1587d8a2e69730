"""What is in a checkpoint folder, read from its files alone: no weights are loaded."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

from safetensors import safe_open

from dq.checkpoint import check_version
from dq.checks import one_line
from dq.linear import LinearConfig
from dq.pipelines.loading import folder_of, read_config
from dq.registry import DQError

WEIGHTLESS = ("Tokenizer", "Processor", "Extractor", "Scheduler")  # in the class of a component
OTHER_WEIGHTS = ("*.bin", "*.pt", "*.pth", "*.ckpt", "*.gguf", "*.msgpack", "*.h5")


def inspect_folder(source: str) -> str:
    """A text about every model in a pipeline or model folder: method, recipe, layers by kind, dtypes, bytes, origin.

    Raises:
        DQError: no such folder, or nothing in it that is a model; weights that are missing or damaged, naming the
            folder; a dq checkpoint newer than this dq.
    """
    root = folder_of(source)
    if root is None:
        raise DQError(f"{source} is no local folder; dq inspect reads files and downloads nothing")
    other = _check_components(root)
    configs = [*root.glob("config.json"), *root.glob("*/config.json")]
    found = sorted({p.parent for p in configs if p.parent.name not in other})
    blocks = []
    for folder in found:
        with one_line(f"{folder} is damaged"):
            blocks.append(_model(folder, root))
    if not blocks:
        raise DQError(f"{source} holds no model: no config.json beside weights")
    return "\n".join(blocks)


def _check_components(root: Path) -> set[str]:
    """Every component that model_index.json names has its folder; returns the names of those that hold no weights."""
    other: set[str] = set()
    if not (root / "model_index.json").is_file():
        return other
    with one_line(f"{root} is damaged"):
        for name, entry in read_config(root / "model_index.json").items():
            if isinstance(entry, list) and any(entry) and not (root / name).is_dir():
                raise DQError(f"model_index.json names the component {name!r}, whose folder is missing")
            if isinstance(entry, list) and any(word in str(entry[-1]) for word in WEIGHTLESS):
                other.add(name)
    return other


def _model(folder: Path, root: Path) -> str:
    config, files = read_config(folder / "config.json"), _weights(folder)
    name = "." if folder == root else folder.name
    kind = config.get("_class_name") or ", ".join(config.get("architectures") or ["model"])
    size = sum(f.stat().st_size for f in files)
    tensors = _dtypes(files) if files[0].suffix == ".safetensors" else "not read: no safetensors"
    lines = [f"{name}: {kind}, {size / 1e6:.2f} MB in {len(files)} file(s); tensors {tensors}"]
    quantization = config.get("quantization_config")
    if quantization is None:
        return lines[0] + "; not quantized"
    if quantization.get("quant_method") != "dq":
        return lines[0] + f"; quantized by {quantization.get('quant_method')}"
    return "\n".join(lines + _dq_lines(quantization))


def _weights(folder: Path) -> list[Path]:
    """The weight files; all those that an index names must be there."""
    for index in folder.glob("*.safetensors.index.json"):
        for name in sorted(set((read_config(index).get("weight_map") or {}).values())):
            if not (folder / name).is_file():
                raise DQError(f"{name}, which {index.name} names, is missing")
    files = sorted(folder.glob("*.safetensors")) or sorted(f for p in OTHER_WEIGHTS for f in folder.glob(p))
    if not files:
        raise DQError("it has a config.json and no weights beside it; copy or download them again")
    return files


def _dtypes(files: list[Path]) -> str:
    counts: Counter = Counter()
    for path in files:
        with one_line(f"{path.name} cannot be read"), safe_open(path, "pt") as file:
            counts.update(file.get_slice(k).get_dtype() for k in file.keys())  # noqa: SIM118 - not a dict
    return ", ".join(f"{n} {d}" for d, n in counts.most_common())


def _dq_lines(config: dict[str, Any]) -> list[str]:
    check_version(config)
    recipe, calibration = config.get("recipe") or {}, config.get("calibration") or {}
    versions = ", ".join(f"{k} {v}" for k, v in (config.get("versions") or {}).items())
    lines = [f"  recipe {recipe.get('name')} (dq format {config['format_version']}; {versions})"]
    if config.get("source"):
        lines.append(f"  made from {config['source']} {config.get('revision', '')}".rstrip())
    lines.append(_calibrated(calibration) if calibration else "  data-free")
    for key in ("kinds", "layers"):
        if not config.get(key):
            raise DQError(f"quantization_config has no {key!r}: it describes no quantized layer")
    for i, entry in enumerate(config["kinds"]):
        kind = LinearConfig.from_dict(entry)
        names = [n for n, e in config["layers"].items() if e["kind"] == i]
        steps = ", ".join([n for n, _ in kind.steps] + ([f"low rank {kind.rank}"] if kind.rank else [])) or "plain"
        acts = "16-bit" if kind.activations is None else kind.activations
        example = f"  e.g. {names[0]}" if names else ""
        lines.append(f"  {len(names):>4} layers  W {kind.weights}  X {acts}  {steps}{example}")
    return lines


def _calibrated(calibration: dict[str, Any]) -> str:
    """How many prompts, windows of text or records calibrated it."""
    if "samples" in calibration:
        return f"  calibrated on {calibration['samples']} windows of {calibration.get('length', '?')} tokens"
    if "prompts" not in calibration:
        return f"  calibrated on {calibration.get('records', '?')} records"
    strata = ", ".join(f"{k}: {v}" for k, v in (calibration.get("kept") or {}).items())
    return f"  calibrated on {calibration['prompts']} prompts; records per step bin/branch {strata}"
