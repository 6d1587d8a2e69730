"""What every export format shares: what it is given, what it may not be given, and writing a folder of its library."""

from __future__ import annotations

import copy
import json
import re
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from dq.linear import QuantizedLinear
from dq.pipelines.expert_names import file_names, of_experts, to_files, unlisted
from dq.pipelines.loading import read_config
from dq.pipelines.naming import Rule, entries, to_original
from dq.profiles import convention
from dq.qtensor import QTensor
from dq.registry import DQError, Registry
from dq.spec import QuantSpec
from dq.transforms import TRANSFORMS, Step

NVFP4_TOP = 2688.0  # 6 * 448, the largest value of E2M1 times that of E4M3
# Linears that runtimes run as one matrix: they must agree in what is stored once for it.
FUSED = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"), ("w1", "w3"))
_INT = re.compile(r"int([2348])(_wide|_full)?")


@dataclass
class Stored:
    """A quantized linear as a file holds it: rows of one matrix, without its bias."""

    weight: QTensor
    activations: QuantSpec | None = None
    input_scale: Tensor | None = None
    steps: tuple[Step, ...] = ()
    side: tuple[Tensor, Tensor] | None = None  # down [r, K], up [N, r], on the raw input


@dataclass
class Job:
    """One export.

    Attributes:
        model: of transformers or diffusers.
        layers: its quantized linears by name.
        weight_only: activations stay in 16 bits, whatever the recipe said.
        amax: name -> largest |x| of the input, after the layer's own steps, on the calibration; {} without one.
        shard_size: largest file, as transformers writes it (`5GB`).
        title: what the file is called where a format has one.
    """

    model: nn.Module
    layers: dict[str, QuantizedLinear]
    weight_only: bool = False
    amax: dict[str, float] = field(default_factory=dict)
    shard_size: str = "5GB"
    title: str = "model"

    def activations(self, name: str) -> QuantSpec | None:
        """The activation grid that the export declares."""
        return None if self.weight_only else self.layers[name].config.activations

    def stored(self, name: str) -> Stored:
        """One quantized linear."""
        layer = self.layers[name]
        side = (layer.lowrank_down, layer.lowrank_up) if layer.config.rank else None
        scale = getattr(layer, "input_scale", None)
        return Stored(layer.qtensor, self.activations(name), scale, tuple(layer.steps), side)

    @property
    def library(self) -> str:
        return library_of(self.model)

    @property
    def ignored(self) -> list[str]:
        """Linears that stay in 16 bits, by their names in files."""
        return list(file_names(self.model, self.plain_linears).values())

    @property
    def plain_linears(self) -> list[str]:
        """Linears that stay in 16 bits."""
        found = (n for n, m in self.model.named_modules(remove_duplicate=False) if isinstance(m, nn.Linear))
        return [n for n in found if n not in self.layers]

    @cached_property
    def rules(self) -> dict[str, Rule]:
        """Name of a module or bare parameter -> its rule of the original names; {} for a model without them."""
        try:
            found = entries(self.model)
        except DQError:
            found = None
        return {member: rule for rule in found or () for member in rule.members}

    def together(self, name: str) -> tuple[str, ...]:
        """The modules that are one matrix with this one in the original names, itself included."""
        return self.rules[name].members if name in self.rules else (name,)


def library_of(model: Any) -> str:
    """`transformers`, `diffusers`, or "" for a model of neither."""
    if isinstance(model, nn.Module) and hasattr(model, "register_to_config") and hasattr(model, "to_json_string"):
        return "diffusers"
    saves = hasattr(getattr(model, "config", None), "save_pretrained")
    return "transformers" if isinstance(model, nn.Module) and saves else ""


@dataclass
class Files:
    """An exported checkpoint that is read back.

    Attributes:
        path: the folder, or the one file.
        config: config.json of the model.
        tensors: everything that the files hold; a reader takes out what it reads.
        metadata: of the file's header.
        shapes: name of a linear, in the model or in the original names, -> (N, K); known for diffusers models.
    """

    path: Path
    config: dict[str, Any]
    tensors: dict[str, Tensor]
    metadata: dict[str, str] = field(default_factory=dict)
    shapes: dict[str, tuple[int, int]] = field(default_factory=dict)

    @property
    def quantization(self) -> dict[str, Any]:
        return self.config.get("quantization_config") or {}

    def owners(self, *leaves: str) -> list[str]:
        """Names of the modules that have one of these tensors."""
        return sorted({k.rpartition(".")[0] for k in self.tensors if k.rpartition(".")[2] in leaves})

    def take(self, name: str, *leaves: str) -> dict[str, Tensor]:
        """Takes those of a module's tensors that are there."""
        return {k: self.tensors.pop(f"{name}.{k}") for k in leaves if f"{name}.{k}" in self.tensors}


@dataclass(frozen=True)
class Exporter:
    """One file format.

    Attributes:
        name: registry key.
        description: one line, for lists.
        refuse: `(job, name) -> reason` why that layer has no form in this format, "" if it has one.
        write: `(job, folder)`; only called when no layer was refused.
        read: `(files) -> {name: Stored}`: the quantized linears, taken out of `files.tensors`; None where nothing can
            be read back.
        available: `() -> reason` why it cannot run here, "" if it can.
        method: `quant_method` in config.json, "" if the format has none.
        recognises: `(files) -> bool`, for formats without a method.
        libraries: whose models it describes.
        pipeline: of a pipeline, its other components are written beside, so that diffusers finds them.
    """

    name: str
    description: str
    refuse: Callable[[Job, str], str]
    write: Callable[[Job, Path], None]
    read: Callable[[Files], dict[str, Stored]] | None = None
    available: Callable[[], str] = lambda: ""
    method: str = ""
    recognises: Callable[[Files], bool] = lambda files: False
    libraries: tuple[str, ...] = ("transformers",)
    pipeline: bool = False


EXPORTERS: Registry[Exporter] = Registry("export format", "dq.pipelines.export")


def not_plain(layer: QuantizedLinear, name: str = "", *allowed: str) -> str:
    """What of a layer the file cannot say: what it does beside one quantized matrix; "" if nothing.

    Args:
        name: of the layer.
        allowed: names of steps, and `lowrank`, that the file can say.
    """
    c = layer.config
    if isinstance(layer, nn.Conv2d):
        return "it is a convolution, and quantized ones have no form there"
    if name.endswith("gate_up_proj") and of_experts([name]):
        what = "gate and up of an expert are one matrix, in an order of their own that no engine reads one by one"
        return f"{what}: quantize with skip=['experts'] to export the rest"
    steps = [n for n in dict.fromkeys(n for n, _ in c.steps) if n not in allowed]
    if steps:
        foldable = all(TRANSFORMS.get(n).order == 1 for n in steps)  # diagonal
        hint = "; dq.fold(model) (--fold) moves that into what makes the input, where it can" if foldable else ""
        return f"its input goes through {', '.join(steps)} at run time{hint}"
    if c.rank and "lowrank" not in allowed:
        return f"it has a low-rank branch of rank {c.rank}"
    if c.residual:
        return f"it has {c.residual} residual channels"
    if c.weights.row_segments or c.weights.k_segments:
        return "its weight is quantized in segments"
    return ""


def grid_kind(spec: QuantSpec) -> str:
    """`nvfp4`, `mxfp4`, `mxfp8`, `fp8`, `fp8-block`, `int<b>`, or "" for a grid that no exporter names."""
    found = _INT.fullmatch(spec.format)
    if spec.format == "fp4_e2m1" and spec.scale_format == "fp8_e4m3" and spec.group_size == 16:
        return "nvfp4"
    if spec.scale_format == "e8m0" and spec.group_size == 32:
        return {"fp4_e2m1": "mxfp4", "fp8_e4m3": "mxfp8"}.get(spec.format, "")
    if spec.scale_format not in ("fp32", "fp16", "bf16") or spec.global_scale:
        return ""
    if spec.format == "fp8_e4m3":
        return {"block": "fp8-block", "group": "fp8-group"}.get(spec.strategy, "fp8")
    return f"int{found[1]}" if found and spec.strategy != "block" else ""


def multiplier(q: QTensor) -> Tensor:
    """The second level as a factor, float32 scalar; 1 without one."""
    if q.global_scale is None:
        return torch.ones((), device=q.scale.device)
    scale = q.global_scale.reshape(())
    return 1.0 / scale if convention(q.spec).levels == "inverse" else scale


def nvfp4_tensors(q: QTensor, amax: float | None = None) -> dict[str, Tensor]:
    """NVFP4 as modelopt names it: low nibble first, scales in order. `amax`: of the activations, if they are NVFP4."""
    out = {"weight": q.codes[:, : q.shape[1] // 2], "weight_scale": q.scale, "weight_scale_2": multiplier(q).clone()}
    return out if amax is None else out | {"input_scale": torch.tensor(amax / NVFP4_TOP)}


def nvfp4_of(own: dict[str, Tensor]) -> QTensor:
    """The inverse of `nvfp4_tensors`."""
    codes, second = own["weight"], own["weight_scale_2"].reshape(1).to(torch.float32)
    return QTensor(codes, own["weight_scale"], second, QuantSpec.parse("nvfp4"), (len(codes), 2 * codes.shape[1]))


def siblings(job: Job, name: str) -> list[str]:
    """The linears that runtimes fuse with this one, itself included, in the order of `FUSED`."""
    parent, _, leaf = name.rpartition(".")
    for group in FUSED:
        if leaf in group:
            names = [f"{parent}.{g}" if parent else g for g in group]
            return [n for n in names if n in job.layers or n in job.plain_linears]
    return [name]


def unlike_siblings(job: Job, name: str, levels: bool) -> str:
    """Why a runtime could not fuse this linear with its siblings; "" if it can.

    Args:
        levels: whether the format has a second level, which the fused matrix stores once.
    """
    mine = job.layers[name]
    for other in siblings(job, name):
        if other not in job.layers:
            return f"{other} stays in 16 bits, and engines fuse the two"
        theirs = job.layers[other]
        if (theirs.config.weights, job.activations(other)) != (mine.config.weights, job.activations(name)):
            return f"{other} has another grid, and engines fuse the two"
        if levels and not torch.equal(multiplier(theirs.qtensor), multiplier(mine.qtensor)):
            return f"{other} has another second-level scale, and engines fuse the two: quantize them as one group"
    return ""


def plain_values(layer: QuantizedLinear) -> Tensor:
    """Integer codes of a signed grid, int8 [N, K]."""
    return values_of(layer.qtensor)


def values_of(q: QTensor) -> Tensor:
    """Integer codes [N, K] as int8; of an unsigned grid 0..15 they stay that."""
    codes = q.spec.fmt.unpack(q.codes, q.shape[1])
    return q.spec.fmt.decode(codes).to(torch.int8)


def _own(tensor: Tensor) -> Tensor:
    """A contiguous tensor with a storage of its own; one that is part of a larger one cannot be written."""
    tensor = tensor.detach().contiguous()
    return tensor if tensor.untyped_storage().nbytes() == tensor.nbytes else tensor.clone()


def readers() -> dict[str, Exporter]:
    """`quant_method` -> the format that is read back by it."""
    return {e.method: e for e in EXPORTERS if e.method and e.read}


def method(folder: Path) -> str:
    """`quant_method` of the config.json in a folder, "" without one."""
    file = folder / "config.json"
    said = read_config(file).get("quantization_config") if file.is_file() else None
    return str(said.get("quant_method", "")) if isinstance(said, dict) else ""


def in_diffusers(folder: Path) -> list[Path]:
    """The folders of the diffusers models in a model's or pipeline's folder that another engine's codes are in."""
    inside = sorted(folder.iterdir()) if (folder / "model_index.json").is_file() else [folder]
    held = [f for f in inside if method(f) in readers()]
    return [f for f in held if "_class_name" in read_config(f / "config.json")]


def plain_state(job: Job) -> dict[str, Tensor]:
    """All of the model's state but the payload of its quantized linears; tied tensors once."""
    state = {}
    for name, tensor in job.model.state_dict().items():
        owner, _, leaf = name.rpartition(".")
        if owner not in job.layers or leaf == "bias":
            state[name] = tensor
    for target in getattr(job.model, "all_tied_weights_keys", None) or {}:
        state.pop(target, None)
    return state


def write_folder(job: Job, folder: Path, tensors: dict[str, dict[str, Tensor]], quantization: dict[str, Any]) -> None:
    """config.json (of a language model generation_config.json too) and sharded safetensors, as `save_pretrained` of the
    model's library lays them out.

    Args:
        tensors: layer name -> its stored tensors by their last name; everything else of the model goes along as it is.
        quantization: `quantization_config`; the list `ignore` of a language model's gets the matrices that only the
            files name, such as experts that are one tensor in memory.
    """
    from huggingface_hub import save_torch_state_dict

    state = plain_state(job) | {f"{name}.{key}": t for name, own in tensors.items() for key, t in own.items()}
    folder.mkdir(parents=True, exist_ok=True)
    if job.library == "diffusers":
        pattern = "diffusion_pytorch_model{suffix}.safetensors"
        state = {name: _own(t) for name, t in state.items()}
        save_torch_state_dict(
            state, folder, filename_pattern=pattern, max_shard_size=job.shard_size, metadata={"format": "pt"}
        )
        write_config(job.model, folder, quantization)
        return
    from transformers.core_model_loading import revert_weight_conversion

    state = revert_weight_conversion(job.model, to_files(job.model, state))
    state = {name: _own(t) for name, t in state.items()}
    names = [n for n, _ in job.model.named_modules(remove_duplicate=False)]
    quantized = file_names(job.model, job.layers).values()
    quantization["ignore"] += unlisted(state, {*names, *quantized, *quantization["ignore"]})
    save_torch_state_dict(state, folder, max_shard_size=job.shard_size, metadata={"format": "pt"})
    config = copy.deepcopy(job.model.config)
    config.quantization_config = quantization
    config.architectures, config.dtype = [type(job.model).__name__], job.model.dtype
    config.save_pretrained(folder)
    if getattr(job.model, "generation_config", None) is not None:
        job.model.generation_config.save_pretrained(folder)


def write_config(model: nn.Module, folder: Path, quantization: dict[str, Any] | None) -> None:
    """config.json of a diffusers model."""
    config = json.loads(model.to_json_string())
    config.pop("quantization_config", None)
    config |= {} if quantization is None else {"quantization_config": quantization}
    (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")


def write_file(job: Job, folder: Path, tensors: dict[str, dict[str, Tensor]], metadata: dict[str, str]) -> None:
    """`<title>.safetensors` under the original names where the architecture has them, and config.json beside it.

    Args:
        tensors: name of a quantized matrix there -> its tensors by their last name.
    """
    from safetensors.torch import save_file

    state, plain = {f"{name}.{key}": _own(t) for name, own in tensors.items() for key, t in own.items()}, {}
    for name, tensor in plain_state(job).items():
        owner, _, leaf = name.rpartition(".")
        stem, leaf = (owner, leaf) if owner in job.rules else (name, "")
        plain.setdefault((job.rules.get(stem, Rule(stem, (stem,))), leaf), {})[stem] = tensor
    for (rule, leaf), parts in plain.items():
        name, tensor = to_original(rule, leaf, [parts[m] for m in rule.members])
        state[name] = _own(tensor)
    folder.mkdir(parents=True, exist_ok=True)
    save_file(state, folder / f"{job.title}.safetensors", metadata)
    write_config(job.model, folder, None)
