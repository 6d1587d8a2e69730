"""Quantizes a model while a library reads its 16-bit weights: a group as soon as its last tensor has arrived."""

from __future__ import annotations

import functools
import warnings
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn

from dq.checkpoint import align, artifact_meta
from dq.group import quantize_row
from dq.linear import layer_info, quantized_linears
from dq.loop import warn_of_losses
from dq.pipelines.casting import allow_casts
from dq.pipelines.experts import stacked_layers
from dq.pipelines.hf_config import DQConfigBase, DQMethod
from dq.pipelines.on_load_words import on_load_recipe
from dq.pipelines.origin import note_origin
from dq.planning import PlanRow, make_plan
from dq.qtensor import check_finite
from dq.registry import DQError
from dq.steps import watch

EXPECTED = (torch.float32, torch.bfloat16, torch.float16)


class OnLoad:
    """One model on the meta device that is being filled. The bits are those of `dq.quantize` on the loaded model.

    Memory: the finished layers, the 16-bit tensors of groups that are not complete yet, and the float32 working copies
    of one group; what the library holds of the files comes on top (a shard at a time in diffusers).

    Args:
        model: on the meta device.
        config: what to do.
        tied: further names of linears that share their weight with another module once all is loaded.
        marks: attributes that the new layers and their `.weight` get while loading.

    Raises:
        DQError: as `dq.plan`.
    """

    def __init__(self, model: nn.Module, config: DQConfigBase, tied: Iterable[str] = (), marks: Iterable[str] = ()):
        self.model, self.config, self.marks = model, config, dict.fromkeys(marks, True)
        experts = next(iter(stacked_layers(model)), None)
        if experts is not None:
            raise DQError(
                f"{type(model).__name__} keeps its experts in stacked tensors ({experts}), which are opened after "
                f"loading only: load the 16-bit model, then dq.quantize(model, {config.name!r})"
            )
        linears = {n for n, m in model.named_modules() if type(m) is nn.Linear}
        kept = [n for n in tied if n in linears]
        try:
            self.plan = make_plan(model, on_load_recipe(config.recipe), [*config.skip, *kept])
        except DQError as error:
            if not str(error).startswith("nothing to quantize"):
                raise
            what = "a PipelineQuantizationConfig with quant_backend quantizes every component, unless it is given"
            raise DQError(f"{error}; {what} components_to_quantize, e.g. ['transformer']") from error
        for remark in (r for r in self.plan.remarks if r.startswith("recipe rule")):
            warnings.warn(remark, stacklevel=2)
        self.rows: dict[str, PlanRow] = {m: row for row in self.plan.quantized for m in row.members}
        self.missing: dict[tuple[str, ...], set[str]] = {
            row.members: {f"{m}.{k}" for m in row.members for k, _ in model.get_submodule(m).named_parameters()}
            for row in self.plan.quantized
        }

    def wants(self, name: str) -> bool:
        """Whether tensor `name` belongs to a linear that is quantized."""
        return name.rpartition(".")[0] in self.rows

    @torch.no_grad()
    def take(self, name: str, value: Tensor) -> None:
        """Takes one tensor of a linear; quantizes the linear's group if it was the last that was missing.

        Raises:
            DQError: NaN/Inf, a dtype that is no weight's, or another shape than the model's.
        """
        parent, _, key = name.rpartition(".")
        layer, row = self.model.get_submodule(parent), self.rows[parent]
        if value.dtype not in EXPECTED:
            raise DQError(f"{name} comes as {value.dtype}, a weight to be quantized is float32, bfloat16 or float16")
        if value.shape != layer._parameters[key].shape:
            was = tuple(layer._parameters[key].shape)
            raise DQError(f"{name} has shape {tuple(value.shape)} in the source, the model expects {was}")
        check_finite(value, name)
        layer._parameters[key] = nn.Parameter(value, requires_grad=False)
        waiting = self.missing[row.members]
        waiting.discard(name)
        if not waiting:
            self._finish(row)

    def _finish(self, row: PlanRow) -> None:
        for name, layer in quantize_row(self.model, row, {}).items():
            layer.activations_mode = self.config.activations or "auto"
            layer.weight_marks = dict(self.marks)
            for mark in self.marks:
                setattr(layer, mark, True)
            self.model.set_submodule(name, layer.train(self.model.get_submodule(name).training))

    def finish(self, path: Any = None) -> None:
        """After the last tensor: the model is complete and says how it was made.

        Args:
            path: a file that it was read from, if the loader knows one.

        Raises:
            DQError: a tensor did not come.
        """
        lacking = sorted(n for names in self.missing.values() for n in names)
        if lacking:
            raise DQError(f"the source lacks {len(lacking)} tensors, e.g. {lacking[0]}: it is incomplete")
        for layer in quantized_linears(self.model).values():
            for mark in self.marks:
                layer.__dict__.pop(mark, None)
            layer.__dict__.pop("weight_marks", None)
        watch(self.model)
        align(self.model)
        self.model.dq_artifact = artifact_meta(self.model, self.plan, {})
        note_origin(self.model, path)
        allow_casts(self.model)
        warn_of_losses(layer_info(self.model))


def own_memory(model: nn.Module) -> None:
    """Copies the CPU tensors that a library took over from the source: each may be a piece of a mapped file, which it
    keeps in memory as a whole (and the storage does not tell)."""
    made = {id(b) for layer in quantized_linears(model).values() for b in (*layer.buffers(), *layer.parameters())}
    for tensor in (*model.parameters(), *model.buffers()):
        if tensor.device.type == "cpu" and id(tensor) not in made:
            tensor.data = tensor.data.clone()


def sizes(loader: OnLoad, dtype: torch.dtype) -> dict[str, Any]:
    """name -> dtype of the parameters that stay as they are: for libraries that spread a model over devices."""
    return {n: dtype for n, _ in loader.model.named_parameters() if not loader.wants(n) or not n.endswith(".weight")}


def element_bytes(loader: OnLoad, name: str) -> float:
    """Bytes per element of a weight once it is quantized, scales included."""
    row = loader.rows[name.rpartition(".")[0]]
    return row.nbytes / row.elements


def refuse_disk(device_map: Any) -> None:
    """Weights that a device map leaves on disk are not read, so they cannot be quantized.

    Raises:
        DQError: there are such.
    """
    if isinstance(device_map, dict) and "disk" in {str(d) for d in device_map.values()}:
        raise DQError(
            "device_map leaves parts of the model on disk, which quantizing while loading cannot reach: give more "
            "memory (max_memory), or quantize first, save, and load the saved model with this device_map"
        )


def refuse_second(auto_class: Any) -> None:
    """Makes `from_pretrained(quantized, quantization_config=DQConfig(...))` an error: the libraries warn and load the
    model as it was quantized before. Wrapped once, on the class; other tools' configs see no difference."""
    merge = vars(auto_class)["merge_quantization_configs"].__func__
    if hasattr(merge, "dq_refuses"):
        return

    @functools.wraps(merge)
    def merged(cls, quantization_config, quantization_config_from_args, *args, **kwargs):
        asked = quantization_config_from_args
        if isinstance(asked, DQConfigBase) or (isinstance(asked, dict) and asked.get("quant_method") == DQMethod.DQ):
            held = quantization_config if isinstance(quantization_config, dict) else quantization_config.to_dict()
            method = held.get("quant_method")
            raise DQError(
                f"the model is quantized already (by {getattr(method, 'value', method)}): load it without "
                "quantization_config, or quantize the 16-bit model"
            )
        return merge(cls, quantization_config, quantization_config_from_args, *args, **kwargs)

    merged.dq_refuses = True
    auto_class.merge_quantization_configs = classmethod(merged)
