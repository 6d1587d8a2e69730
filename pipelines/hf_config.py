"""What the two quantizer plug-ins share: the config object that travels in `config.json`, and the key checks."""

from __future__ import annotations

import copy
import json
import re
import weakref
from collections import OrderedDict
from collections.abc import Iterable, Sequence
from enum import Enum
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn

from dq.checkpoint import check_version, layers_config, prepare_model
from dq.family import matches
from dq.linear import QuantizedLinear, quantized_linears
from dq.pipelines.adapters import refuse_adapters
from dq.pipelines.casting import allow_casts
from dq.pipelines.experts import open_named
from dq.pipelines.on_load_words import FP8_SOURCES, WORDS, check_words, on_load_recipe
from dq.registry import DQError, suggest


class DQMethod(str, Enum):  # noqa: UP042 - diffusers reads `.value`, and both compare with plain strings
    """The name of the quantization method; an enum because diffusers asks for `.value`."""

    DQ = "dq"


TABLE = ("format_version", "kinds", "layers")  # without these a config asks for a quantization
RESTORE = "restore config.json as it was saved (or load from where it came from): codes mean nothing without the table"


class DQConfigBase:
    """The `quantization_config` of diffusers and transformers, in one of two roles.

    * What a user passes to `from_pretrained` of a 16-bit model, which is then quantized while it is read.
    * What a checkpoint says about itself: format version, kinds, layers, recipe and where it came from.

    Args:
        recipe: a preset, the path of a TOML file, a `Recipe` (or its dict) that needs no calibration.
        skip: patterns of linears that stay in 16 bits.
        activations: `faithful` or `native` activation grid at run time; see `dq.quantize`.
        fp8_source: what to do with weights that are FP8 already: `refuse`, or `dequantize` them first.
        fields: of a checkpoint, the entries of `dq.checkpoint.layers_config` and `artifact_meta`.

    Attributes:
        read: whether it was read from a checkpoint, or given as a dict.

    Raises:
        DQError: an unknown word, or a recipe that loading cannot follow (it needs calibration, or rewrites the model).
    """

    def __init__(
        self,
        recipe: Any = None,
        skip: Sequence[str] = (),
        activations: str | None = None,
        fp8_source: str = FP8_SOURCES[0],
        quant_method: Any = DQMethod.DQ,
        **fields: Any,
    ):
        self.quant_method = DQMethod(quant_method)
        self.recipe = recipe
        self._fields, self._model, self.read = fields, None, False
        self.skip, self.activations, self.fp8_source = skip, activations, fp8_source
        if self.on_load:
            self.recipe = on_load_recipe(recipe, fields).to_dict()
            check_words(skip, activations, fp8_source)

    @property
    def on_load(self) -> bool:
        """Whether it asks for a quantization, and is not the description of one."""
        return not set(TABLE) & set(self._fields)

    @property
    def fields(self) -> dict[str, Any]:
        """The entries, of the model as it is now where one is followed: fusing a LoRA or folding changes its layers."""
        model = None if self._model is None else self._model()
        if model is not None and quantized_linears(model):
            self._fields = {k: v for k, v in config_fields(model).items() if k != "recipe"}
        return self._fields

    def follow(self, model: nn.Module):
        """Describes this model from now on; returns itself. A copy of the model is followed by its own copy."""
        self._model = weakref.ref(model)
        return self

    @property
    def followed(self) -> nn.Module | None:
        """The model that is described, None if none is (any more)."""
        return None if self._model is None else self._model()

    def refuse_adapters(self) -> None:
        """Raises DQError if adapters are attached to the model that is followed: it cannot be saved as a whole then."""
        if self._model is not None and self._model() is not None:
            refuse_adapters(self._model(), "saved")

    def __deepcopy__(self, memo: dict[int, Any]):
        model = None if self._model is None else self._model()
        words = dict(skip=self.skip, activations=self.activations, fp8_source=self.fp8_source)
        copied = type(self)(copy.deepcopy(self.recipe, memo), **words, **copy.deepcopy(self.fields, memo))
        copied.read = self.read
        return copied if memo.get(id(model)) is None else copied.follow(memo[id(model)])

    def __getstate__(self):
        return self.__dict__ | {"_fields": self.fields, "_model": None}

    @classmethod
    def from_dict(cls, config_dict: dict[str, Any], return_unused_kwargs: bool = False, **kwargs: Any):
        lost = not set(TABLE) & set(config_dict) and (set(config_dict) - {"quant_method", *WORDS})
        if lost or not set(config_dict) - {"quant_method"}:
            held = ", ".join(sorted(set(config_dict) - {"quant_method"})) or "nothing"
            raise DQError(
                f"the quantization_config of this checkpoint holds {held}, but not the table of its quantized layers "
                f"({', '.join(TABLE)}): {RESTORE}"
            )
        config = cls(**config_dict)
        config.read = True
        return (config, kwargs) if return_unused_kwargs else config

    def to_dict(self) -> dict[str, Any]:
        plain = {"quant_method": self.quant_method.value, "recipe": copy.deepcopy(self.recipe)}
        if self.on_load:
            plain |= {"skip": list(self.skip), "activations": self.activations, "fp8_source": self.fp8_source}
        return plain | copy.deepcopy(self.fields)

    def to_diff_dict(self) -> dict[str, Any]:
        return self.to_dict()

    def to_json_string(self, use_diff: bool = True) -> str:
        return json.dumps(self.to_dict(), indent=2, sort_keys=True) + "\n"

    def __iter__(self):
        yield from self.to_dict().items()

    def __repr__(self) -> str:
        what = "on load" if self.on_load else f"layers={len(self.fields.get('layers', ()))}"
        return f"DQConfig(recipe={self.name!r}, {what})"

    @property
    def name(self) -> str:
        """Name of the recipe."""
        return self.recipe.get("name", "") if isinstance(self.recipe, dict) else str(self.recipe or "")


def artifact_of(model: nn.Module) -> dict[str, Any]:
    """Recipe and origin of a quantized model, those of a part of it if it was that which was quantized."""
    return next((m.dq_artifact for m in model.modules() if "dq_artifact" in vars(m)), {})


def config_fields(model: nn.Module) -> dict[str, Any]:
    """Everything a checkpoint of this quantized model must say."""
    fields = {**layers_config(model), **artifact_of(model)}
    fields["layers"] = {name.replace(".base_layer", ""): entry for name, entry in fields["layers"].items()}  # peft's
    return fields


def prepare(model: nn.Module, config: DQConfigBase, dtype: torch.dtype, in_fp32: Iterable[str] = ()) -> None:
    """Swaps empty quantized linears into a model on the meta device, as a checkpoint describes them.

    Args:
        in_fp32: name patterns of modules that the library keeps in float32 whatever `dtype` says.

    Raises:
        DQError: the checkpoint is newer than this dq, or damaged.
    """
    if TABLE[0] in config.fields:
        check_version(config.fields)
    lost = [word for word in TABLE if word not in config.fields]
    if lost:
        raise DQError(f"the checkpoint's config is damaged, its quantization_config lost {', '.join(lost)}: {RESTORE}")
    open_named(model, config.fields.get("layers") or ())
    prepare_model(model, config.fields, dtype)
    allow_casts(model)
    for name, layer in quantized_linears(model).items():
        if any(matches(name, p) for p in in_fp32):
            layer.compute_dtype = torch.float32
    model.dq_artifact = {k: v for k, v in config.fields.items() if k not in TABLE}
    model.dq_artifact["recipe"] = config.recipe


class StateDict(OrderedDict):
    """A state dict that answers `[<quantized linear>.weight]` with the layer's zero-storage weight, without listing it.

    diffusers looks the shapes of a LoRA's targets up there before it loads it. Copied and pickled it is an OrderedDict.
    """

    model: nn.Module

    def __missing__(self, key: str) -> Tensor:
        name, _, last = key.rpartition(".")
        if last == "weight" and isinstance(layer := _submodule(self.model, name), nn.Module):
            base = getattr(layer, "base_layer", layer)
            if isinstance(base, QuantizedLinear):
                return base.weight
        raise KeyError(key)

    def __reduce__(self):
        state = {"_metadata": self._metadata} if hasattr(self, "_metadata") else None
        return OrderedDict, (), state, None, iter(self.items())


def _submodule(model: nn.Module, name: str) -> nn.Module | None:
    try:
        return model.get_submodule(name)
    except AttributeError:
        return None


def answer_weights(model: nn.Module) -> None:
    """Makes `model.state_dict()` a `StateDict`; a second call changes nothing."""
    if _with_weights not in model._state_dict_hooks.values():
        model._register_state_dict_hook(_with_weights)


def _with_weights(model: nn.Module, state: dict[str, Tensor], prefix: str, metadata: Any) -> StateDict | None:
    if prefix:  # of a larger model, whose own dict is filled
        return None
    out = StateDict(state)
    out.model = model
    if hasattr(state, "_metadata"):
        out._metadata = state._metadata
    return out


Header = tuple[tuple[int, ...], str]  # shape and dtype of a tensor, as a safetensors file says them
_DTYPES = {
    torch.uint8: "U8", torch.int8: "I8", torch.int32: "I32", torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2", torch.float16: "F16", torch.bfloat16: "BF16", torch.float32: "F32",
}  # fmt: skip


def read_headers(files: Iterable[Any]) -> dict[str, Header]:
    """name -> header of every tensor in the safetensors files; {} if there are none (or files of another kind).

    Raises:
        DQError: one cannot be read.
    """
    found = {}
    for path in (f for f in files or () if str(f).endswith(".safetensors")):
        try:
            with safe_open(path, "pt") as file:
                for name in file.keys():  # noqa: SIM118 - not a dict
                    part = file.get_slice(name)
                    found[name] = (tuple(part.get_shape()), part.get_dtype())
        except FileNotFoundError as error:
            raise DQError(f"{path} is missing: the checkpoint is incomplete") from error
        except (OSError, SafetensorError) as error:
            raise DQError(f"{path} cannot be read ({error}): truncated, or not a safetensors file") from error
    return found


def check_tensors(model: nn.Module, headers: dict[str, Header], new: Iterable[str] = ()) -> None:
    """Refuses a checkpoint that lacks a tensor of the model, holds one that nobody reads, or one of a quantized layer
    in another shape or dtype (codes mean nothing after a cast, and a scale that lost bits moves every weight).

    Tied tensors are stored once: it is enough that one of their names is there.

    Args:
        new: names of 16-bit tensors that need not be there.

    Raises:
        DQError: naming the first such tensor.
    """
    check_names(model, {*headers, *new})
    for name, layer in quantized_linears(model).items():
        for key, (shape, dtype) in layer.config.tensors(layer.out_features, layer.in_features).items():
            if headers[f"{name}.{key}"] != (tuple(shape), _DTYPES[dtype]):
                was = "{1} {0}".format(*headers[f"{name}.{key}"])
                raise DQError(f"the checkpoint holds {name}.{key} as {was}, expected {_DTYPES[dtype]} {tuple(shape)}")


def check_names(model: nn.Module, loaded: set[str]) -> None:
    """The part of `check_tensors` about names."""
    state, tied = set(model.state_dict()), _tied_names(model)
    missing = sorted(k for k in state - loaded if not tied.get(k, set()) & loaded)
    missing = _not_ignored(missing, getattr(model, "_keys_to_ignore_on_load_missing", None))
    if missing:
        raise DQError(f"the checkpoint lacks {len(missing)} tensors, e.g. {missing[0]}: it is incomplete")
    unexpected = _not_ignored(sorted(loaded - state), getattr(model, "_keys_to_ignore_on_load_unexpected", None))
    if unexpected:
        near = suggest(unexpected[0], state)
        raise DQError(f"the checkpoint holds {len(unexpected)} unexpected tensors, e.g. {unexpected[0]}{near}")


def _not_ignored(keys: list[str], patterns: Iterable[str] | None) -> list[str]:
    """Without the keys that the model's class declares to be no loss."""
    return [k for k in keys if not any(re.search(p, k) for p in patterns or ())]


def _tied_names(model: nn.Module) -> dict[str, set[str]]:
    """key -> the keys of the same tensor: the same object, or declared by transformers and tied after loading."""
    groups: dict[Any, set[str]] = {}
    for key, tensor in model.state_dict(keep_vars=True).items():
        groups.setdefault(id(tensor), set()).add(key)
    tied = {key: group for group in groups.values() for key in group}
    for target, source in (getattr(model, "all_tied_weights_keys", None) or {}).items():
        union = tied.get(target, {target}) | tied.get(source, {source})
        tied |= dict.fromkeys(union, union)
    return tied


def float_buffers(model: nn.Module) -> list[str]:
    """Names (last path component) of the floating buffers of quantized linears: their dtype is part of the format."""
    names = set()
    for layer in quantized_linears(model).values():
        names |= {k for k, t in layer._buffers.items() if t.is_floating_point()}
    return sorted(names)
