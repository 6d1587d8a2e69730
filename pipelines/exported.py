"""What every export format shares: what it is given, what it may not be given, and writing a transformers folder."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from dq.linear import QuantizedLinear
from dq.pipelines.expert_names import file_names, of_experts, to_files, unlisted
from dq.profiles import convention
from dq.qtensor import QTensor
from dq.registry import Registry
from dq.spec import QuantSpec
from dq.transforms import TRANSFORMS

# Linears that runtimes run as one matrix: they must agree in what is stored once for it.
FUSED = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"), ("w1", "w3"))


@dataclass
class Job:
    """One export.

    Attributes:
        model: a transformers model.
        layers: its quantized linears by name.
        weight_only: activations stay in 16 bits, whatever the recipe said.
        amax: name -> largest |input| on the calibration; {} without one.
        shard_size: largest file, as transformers writes it (`5GB`).
    """

    model: nn.Module
    layers: dict[str, QuantizedLinear]
    weight_only: bool = False
    amax: dict[str, float] = field(default_factory=dict)
    shard_size: str = "5GB"

    def activations(self, name: str) -> QuantSpec | None:
        """The activation grid that the export declares."""
        return None if self.weight_only else self.layers[name].config.activations

    @property
    def ignored(self) -> list[str]:
        """Linears that stay in 16 bits, by their names in files."""
        return list(file_names(self.model, self.plain_linears).values())

    @property
    def plain_linears(self) -> list[str]:
        """Linears that stay in 16 bits."""
        found = (n for n, m in self.model.named_modules(remove_duplicate=False) if isinstance(m, nn.Linear))
        return [n for n in found if n not in self.layers]


@dataclass(frozen=True)
class Exporter:
    """One file format.

    Attributes:
        name: registry key.
        description: one line, for lists.
        refuse: `(job, name) -> reason` why that layer has no form in this format, "" if it has one.
        write: `(job, folder)`; only called when no layer was refused.
        read: `(config, tensors, names) -> {name: Stored}`: the quantized linears of a folder whose `quant_method` is
            the exporter's, taken out of `tensors`; None where nothing can be read back.
        available: `() -> reason` why it cannot run here, "" if it can.
        method: `quant_method` in config.json, "" if the format has none.
    """

    name: str
    description: str
    refuse: Callable[[Job, str], str]
    write: Callable[[Job, Path], None]
    read: Callable[[dict[str, Any], dict[str, Tensor], list[str]], dict[str, Stored]] | None = None
    available: Callable[[], str] = lambda: ""
    method: str = ""


EXPORTERS: Registry[Exporter] = Registry("export format", "dq.pipelines.export")


@dataclass
class Stored:
    """A quantized linear as it was read back."""

    weight: QTensor
    activations: QuantSpec | None = None
    input_scale: Tensor | None = None


def not_plain(layer: QuantizedLinear, name: str = "") -> str:
    """What of a layer no other engine's file can say: what it does beside one quantized matrix; "" if nothing."""
    c = layer.config
    if name.endswith("gate_up_proj") and of_experts([name]):
        return "gate and up of an expert are one matrix, in an order of their own that no engine reads one by one"
    if c.steps:
        names = list(dict.fromkeys(n for n, _ in c.steps))
        foldable = all(TRANSFORMS.get(n).order == 1 for n in names)  # diagonal
        hint = "; dq.fold(model) moves that into what makes the input, where it can" if foldable else ""
        return f"its input goes through {', '.join(names)} at run time{hint}"
    if c.rank:
        return f"it has a low-rank branch of rank {c.rank}"
    if c.residual:
        return f"it has {c.residual} residual channels"
    if c.weights.row_segments or c.weights.k_segments:
        return "its weight is quantized in segments"
    return ""


def multiplier(q: QTensor) -> Tensor:
    """The second level as a factor, float32 scalar; 1 without one."""
    if q.global_scale is None:
        return torch.ones((), device=q.scale.device)
    scale = q.global_scale.reshape(())
    return 1.0 / scale if convention(q.spec).levels == "inverse" else scale


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
    q = layer.qtensor
    codes = q.spec.fmt.unpack(q.codes, q.shape[1])
    return q.spec.fmt.decode(codes).to(torch.int8)


def _own(tensor: Tensor) -> Tensor:
    """A contiguous tensor with a storage of its own; one that is part of a larger one cannot be written."""
    tensor = tensor.contiguous()
    return tensor if tensor.untyped_storage().nbytes() == tensor.nbytes else tensor.clone()


def write_folder(job: Job, folder: Path, tensors: dict[str, dict[str, Tensor]], quantization: dict[str, Any]) -> None:
    """config.json, generation_config.json and sharded safetensors, as transformers' `save_pretrained` lays them out.

    Args:
        tensors: layer name -> its stored tensors by their last name; everything else of the model goes along as it is.
        quantization: `quantization_config`; its list `ignore` gets the matrices that only the files name, such as
            experts that are one tensor in memory.
    """
    from huggingface_hub import save_torch_state_dict
    from transformers.core_model_loading import revert_weight_conversion

    state = {}
    for name, tensor in job.model.state_dict().items():
        owner, _, leaf = name.rpartition(".")
        if owner not in job.layers or leaf == "bias":
            state[name] = tensor
    for name, own in tensors.items():
        state |= {f"{name}.{key}": t.detach() for key, t in own.items()}
    for target in getattr(job.model, "all_tied_weights_keys", None) or {}:
        state.pop(target, None)
    state = revert_weight_conversion(job.model, to_files(job.model, state))
    state = {name: _own(t) for name, t in state.items()}
    names = [n for n, _ in job.model.named_modules(remove_duplicate=False)]
    quantized = file_names(job.model, job.layers).values()
    quantization["ignore"] += unlisted(state, {*names, *quantized, *quantization["ignore"]})
    folder.mkdir(parents=True, exist_ok=True)
    save_torch_state_dict(state, folder, max_shard_size=job.shard_size, metadata={"format": "pt"})
    config = copy.deepcopy(job.model.config)
    config.quantization_config = quantization
    config.architectures, config.dtype = [type(job.model).__name__], job.model.dtype
    config.save_pretrained(folder)
    if getattr(job.model, "generation_config", None) is not None:
        job.model.generation_config.save_pretrained(folder)
