"""`dq inspect`: what is in a checkpoint, ours or another tool's, read from its files alone. No model is built."""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch

from dq import checks
from dq.checks import one_line
from dq.pipelines import gguf_header
from dq.pipelines.contents import Contents, Header, Layer, check_dq, kept, layers, place, read_tensors
from dq.pipelines.kernel_choice import Machine, kernels
from dq.pipelines.kernel_choice import capability as parsed
from dq.pipelines.loading import check_components, folder_of, read_config
from dq.registry import DQError

WEIGHTLESS = ("Tokenizer", "Processor", "Extractor", "Scheduler")  # in the class of a component
OTHER_WEIGHTS = ("*.bin", "*.pt", "*.pth", "*.ckpt", "*.msgpack", "*.h5")
SHOWN = 4  # names of matrices in 16 bits


def sized(nbytes: float) -> str:
    """Bytes in the unit in which they are 1 to 1000."""
    for unit in ("B", "kB", "MB", "GB"):
        if nbytes < 1000 or unit == "GB":
            return f"{nbytes:.0f} {unit}" if unit == "B" else f"{nbytes:.2f} {unit}"
        nbytes /= 1000
    raise AssertionError


@dataclass(frozen=True)
class Look:
    """How a checkpoint is looked at: whether all values are read, and whose kernels are named."""

    values: bool
    machine: Machine


@dataclass
class Group:
    """Quantized matrices of one kind."""

    format: str
    activations: str
    extra: str
    layers: int
    values: int
    nbytes: int
    example: str
    kernel: str = ""
    refused: dict[str, str] = field(default_factory=dict)

    @property
    def bits(self) -> float:
        """Per weight, with scales, factors and all else that belongs to it."""
        return 8 * self.nbytes / self.values if self.values else 0.0

    def __str__(self) -> str:
        acts = f"  X {self.activations}" if self.activations else ""
        size = f"{self.bits:.2f} bits per weight, {sized(self.nbytes)}"
        return f"  {self.layers:>4} layers  W {self.format}{acts}  {self.extra or 'plain'}  {size}  e.g. {self.example}"


@dataclass
class Model:
    """What one model of a checkpoint is.

    Attributes:
        name: of its folder or file, "." for the one that was named.
        kind: class, or what the file says.
        method: quantization method, "" for none.
        files, nbytes: how many and how large.
        tensors: dtype -> count.
        notes: recipe, origin and the like, one per line.
        groups: quantized matrices by kind.
        layers: name of a quantized matrix -> its format.
        kernels: name -> what would run it, of a dq checkpoint.
        machine: where.
        kept: names of matrices in 16 or 32 bits -> bytes.
    """

    name: str
    kind: str
    method: str
    files: int
    nbytes: int
    tensors: dict[str, int]
    notes: list[str] = field(default_factory=list)
    groups: list[Group] = field(default_factory=list)
    layers: dict[str, str] = field(default_factory=dict)
    kernels: dict[str, str] = field(default_factory=dict)
    machine: str = ""
    kept: dict[str, int] = field(default_factory=dict)

    def __str__(self) -> str:
        return self.text()

    def text(self, verbose: bool = False) -> str:
        """As `dq inspect` prints it; `verbose` adds every layer, and why no kernel of higher priority runs it."""
        held = ", ".join(f"{n} {d}" for d, n in self.tensors.items()) or "not read: no safetensors"
        name = "" if self.name == "." else f"{self.name}: "
        first = f"{name}{self.kind}, {sized(self.nbytes)} in {self.files} file(s); tensors {held}"
        if not self.groups:
            return first + (f"; quantized by {self.method}" if self.method else "; not quantized")
        rest = [f"  {note}" for note in self.notes]
        if self.machine:
            rest.append(f"  kernels on {self.machine}")
        for group in self.groups:
            rest.append(str(group))
            rest += [f"       kernel {group.kernel}"] if group.kernel else []
            rest += [f"         not {name}: {why}" for name, why in group.refused.items() if verbose]
        if self.kept:
            names = list(self.kept)
            more = f" and {len(names) - SHOWN} more" if len(names) > SHOWN else ""
            size = sized(sum(self.kept.values()))
            rest.append(f"  {len(names):>4} matrices in 16 or 32 bits, {size}: {', '.join(names[:SHOWN])}{more}")
        if verbose:
            wide = max(map(len, self.layers))
            rest += [f"  {n:<{wide}}  {w}  {self.kernels.get(n, '')}".rstrip() for n, w in self.layers.items()]
        return "\n".join([first, *rest])

    def to_dict(self) -> dict[str, Any]:
        groups = [asdict(g) | {"bits_per_weight": round(g.bits, 4)} for g in self.groups]
        return asdict(self) | {"groups": groups}


@dataclass
class Checkpoint:
    """Every model of a checkpoint; prints as `dq inspect` does."""

    source: str
    models: list[Model]

    def __str__(self) -> str:
        return self.text()

    def text(self, verbose: bool = False) -> str:
        """Every model's `text`."""
        return "\n".join(m.text(verbose) for m in self.models)

    def to_dict(self) -> dict[str, Any]:
        return {"source": self.source, "models": [m.to_dict() for m in self.models]}


def inspect_folder(source: str) -> str:
    """`inspect_checkpoint` as text."""
    return str(inspect_checkpoint(source))


def inspect_checkpoint(
    source: str, values: bool = False, *, device: Any = None, capability: str | None = None
) -> Checkpoint:
    """Every model in a pipeline folder, a model folder or a file: method, recipe, layers by kind, bits, bytes, origin.

    Args:
        source: a folder, or one safetensors or GGUF file.
        values: look for NaN in all tensors; else only in those of at most 2^20 values.
        device: whose kernels are named for layers that dq quantized; default: a GPU if there is one, else the CPU.
        capability: those of a GPU of this compute capability (`"9.0"`) instead, whether or not one is here.

    Raises:
        DQError: no such folder or file, or nothing in it that is a model; weights that are missing or damaged, naming
            the folder; NaN or Inf; a dq checkpoint newer than this dq; a device that is not here.
    """
    look = Look(values, _machine(device, capability))
    path = Path(source).expanduser() if str(source).strip() else None
    if path is not None and path.is_file():
        with one_line(f"cannot inspect {source}"):
            return Checkpoint(source, [_file(path, look)])
    root = folder_of(source)
    if root is None:
        raise DQError(f"{source} is no local folder or file; dq inspect reads files and downloads nothing")
    other = _check_components(root)
    configs = [*root.glob("config.json"), *root.glob("*/config.json")]
    found, models = sorted({p.parent for p in configs if p.parent.name not in other}), []
    for folder in found:
        with one_line(f"cannot inspect {folder}"):
            models.append(_folder(folder, root, look))
    if not found:
        models = _loose(root, look)
    if not models:
        raise DQError(f"{source} holds no model: no config.json, and no safetensors or GGUF file")
    return Checkpoint(source, models)


def _machine(device: Any, capability: str | None) -> Machine:
    if capability is None:
        return Machine(checks.device(device))
    if device is not None:
        raise DQError("give a device or a compute capability, not both")
    return Machine(torch.device("cuda"), parsed(capability))


def _check_components(root: Path) -> set[str]:
    """Every component that model_index.json names has its folder; returns the names of those that hold no weights."""
    other: set[str] = set()
    if not (root / "model_index.json").is_file():
        return other
    with one_line(f"cannot inspect {root}"):
        check_components(root)
        for name, entry in read_config(root / "model_index.json").items():
            if isinstance(entry, list) and any(word in str(entry[-1]) for word in WEIGHTLESS):
                other.add(name)
    return other


def _folder(folder: Path, root: Path, look: Look) -> Model:
    config, files = read_config(folder / "config.json"), _weights(folder)
    kind = config.get("_class_name") or ", ".join(config.get("architectures") or ["model"])
    return _model("." if folder == root else folder.name, kind, files, config, look)


def _loose(root: Path, look: Look) -> list[Model]:
    """Files without a config: shards of one model together, every other file by itself."""
    files = sorted([*root.glob("*.safetensors"), *root.glob("*.gguf")])
    sets: dict[str, list[Path]] = {}
    for path in files:
        sets.setdefault(re.sub(r"-\d{5}-of-\d{5}(?=\.)", "", path.name), []).append(path)
    models = []
    for name, parts in sets.items():
        with one_line(f"cannot inspect {root / name}"):
            _complete(parts)
            models.append(_file(parts[0], look) if len(parts) == 1 else _model(name, "model", parts, {}, look))
    return models


def _complete(parts: list[Path]) -> None:
    """Raises DQError if shards `-00001-of-00003` are missing."""
    found = re.search(r"-of-(\d{5})\.", parts[0].name)
    if found and len(parts) != int(found[1]):
        raise DQError(f"{len(parts)} of {int(found[1])} shards are there")


def _file(path: Path, look: Look) -> Model:
    if path.suffix == ".gguf":
        return _gguf(path)
    if path.suffix != ".safetensors":
        raise DQError("it is neither a safetensors nor a GGUF file; others are not opened")
    config, beside = {}, path.parent / "config.json"
    if beside.is_file() and len(list(path.parent.glob("*.safetensors"))) == 1:
        config = read_config(beside)
    kind = config.get("_class_name") or ", ".join(config.get("architectures") or ["model"])
    return _model(path.name, kind, [path], config, look)


def _weights(folder: Path) -> list[Path]:
    """The weight files; all those that an index names must be there."""
    for index in folder.glob("*.safetensors.index.json"):
        for name in sorted(set((read_config(index).get("weight_map") or {}).values())):
            if not (folder / name).is_file():
                raise DQError(f"{name}, which {index.name} names, is missing")
    files = sorted(folder.glob("*.safetensors")) or sorted(folder.glob("*.gguf"))
    files = files or sorted(f for p in OTHER_WEIGHTS for f in folder.glob(p))
    if not files:
        raise DQError("it has a config.json and no weights beside it; copy or download them again")
    return files


def _model(name: str, kind: str, files: list[Path], config: dict[str, Any], look: Look) -> Model:
    if files[0].suffix == ".gguf":
        return _gguf(files[0])
    nbytes = sum(f.stat().st_size for f in files)
    method = str((config.get("quantization_config") or {}).get("quant_method") or "")
    if files[0].suffix != ".safetensors":
        return Model(name, kind, method, len(files), nbytes, {})
    contents = read_tensors(files, config, look.values)
    notes = []
    if method == "dq":
        check_dq(contents.quantization)
        notes = _dq_notes(contents.quantization)
    model = Model(name, kind, method, len(files), nbytes, _dtypes(contents), notes)
    return _described(model, contents, look.machine if method == "dq" else None)


def _described(model: Model, contents: Contents, machine: Machine | None = None) -> Model:
    """Fills in what is quantized and what is not, and which kernels of a machine would run it."""
    found = layers(contents)
    if model.method == "dq":
        lost = next((n for n in contents.quantization["layers"] if n not in found), None)
        if lost is not None:
            raise DQError(f"it lacks the tensors of {lost}, which its config describes")
    if not found:
        return model
    runs = {} if machine is None else kernels(contents, machine)
    model.machine, model.kernels = str(machine or ""), {n: str(k) for n, k in runs.items()}
    groups: dict[tuple[str, str, str, str], list[tuple[str, Layer]]] = {}
    for name, layer in found.items():
        key = (layer.format, layer.activations, layer.extra, model.kernels.get(name, ""))
        groups.setdefault(key, []).append((name, layer))
    for (*key, kernel), own in groups.items():
        first, refused = own[0][0], runs[own[0][0]].refused if kernel else {}
        sums = sum(x.values for _, x in own), sum(x.nbytes for _, x in own)
        model.groups.append(Group(*key, len(own), *sums, first, kernel, refused))
    if not model.notes:
        total = Group("", "", "", 0, sum(g.values for g in model.groups), sum(g.nbytes for g in model.groups), "")
        by = f"quantized by {model.method}, " if model.method else ""
        model.notes = [f"{by}{len(found)} matrices of {total.bits:.2f} bits per weight"]
    model.layers = {n: x.format for n, x in found.items()}
    model.kept = {n: h.nbytes for n, h in kept(contents, found).items()}
    return model


def _dtypes(contents: Contents) -> dict[str, int]:
    return dict(Counter(h.dtype for h in contents.headers).most_common())


def _gguf(path: Path) -> Model:
    metadata, tensors = gguf_header.read(path)
    contents = Contents()
    for name, entry in tensors.items():
        owner, leaf = place(name)
        contents.owners.setdefault(owner, {})[leaf] = Header(entry.shape, entry.kind, entry.nbytes)
    kind = f"GGUF of {metadata.get('general.architecture', 'an unnamed architecture')}"
    model = Model(path.name, kind, "", 1, path.stat().st_size, _dtypes(contents))
    return _described(model, contents)


def _dq_notes(config: dict[str, Any]) -> list[str]:
    recipe, calibration = config.get("recipe") or {}, config.get("calibration") or {}
    versions = ", ".join(f"{k} {v}" for k, v in (config.get("versions") or {}).items())
    notes = [f"recipe {recipe.get('name')} (dq format {config['format_version']}; {versions})"]
    if config.get("source"):
        notes.append(f"made from {config['source']} {config.get('revision', '')}".rstrip())
    return [*notes, _calibrated(calibration) if calibration else "data-free"]


def _calibrated(calibration: dict[str, Any]) -> str:
    """How many prompts, windows of text or records calibrated it."""
    if "samples" in calibration:
        return f"calibrated on {calibration['samples']} windows of {calibration.get('length', '?')} tokens"
    if "prompts" not in calibration:
        return f"calibrated on {calibration.get('records', '?')} records"
    strata = ", ".join(f"{k}: {v}" for k, v in (calibration.get("kept") or {}).items())
    return f"calibrated on {calibration['prompts']} prompts; records per step bin/branch {strata}"
