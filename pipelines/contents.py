"""What the tensors of a checkpoint are, told from their headers and the model's config: what is quantized, and how."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from math import prod
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open

from dq.checkpoint import check_version
from dq.checks import one_line
from dq.linear import LinearConfig
from dq.pipelines.comfy import MATRICES
from dq.pipelines.export.compressed import target_matches
from dq.pipelines.gguf_header import TYPES
from dq.registry import DQError

_SIZES = {"F64": 8, "I64": 8, "U64": 8, "F32": 4, "I32": 4, "U32": 4, "F16": 2, "BF16": 2, "I16": 2, "U16": 2,
          "F8_E4M3": 1, "F8_E5M2": 1, "F8_E8M0": 1, "I8": 1, "U8": 1, "BOOL": 1, "F4": 0.5}  # fmt: skip
_WIDE = ("F64", "F32", "F16", "BF16")
CHECKED = 2**20  # values of a tensor that are read to find NaN, unless all are asked for


@dataclass(frozen=True)
class Header:
    """Shape, dtype (as safetensors or GGUF spells it) and bytes of one tensor."""

    shape: tuple[int, ...]
    dtype: str
    nbytes: int


@dataclass
class Contents:
    """The tensors of one model.

    Attributes:
        config: its config.json, {} without one.
        owners: module -> last part of the name -> header.
        said: module -> what `comfy_quant` or the file's header says of it.
        metadata: of the files.
    """

    config: dict[str, Any] = field(default_factory=dict)
    owners: dict[str, dict[str, Header]] = field(default_factory=dict)
    said: dict[str, dict[str, Any]] = field(default_factory=dict)
    metadata: dict[str, Any] = field(default_factory=dict)

    @property
    def quantization(self) -> dict[str, Any]:
        return self.config.get("quantization_config") or {}

    @property
    def headers(self) -> list[Header]:
        return [h for own in self.owners.values() for h in own.values()]


@dataclass(frozen=True)
class Layer:
    """One quantized matrix.

    Attributes:
        format: the grid and layout of its weights.
        values: N K.
        nbytes: of all its tensors but the bias.
        activations: their grid; "" where nothing says.
        extra: what else the layer does.
    """

    format: str
    values: int
    nbytes: int
    activations: str = ""
    extra: str = ""


def place(name: str) -> tuple[str, str]:
    """Module and last part of a tensor's name; `x.weight.absmax` belongs to `x`."""
    owner, dot, leaf = name.rpartition(".weight.")
    if dot:
        return owner, f"weight.{leaf}"
    owner, _, leaf = name.rpartition(".")
    return owner, leaf


def read_tensors(files: Iterable[Path], config: dict[str, Any], everything: bool = False) -> Contents:
    """The contents of safetensors files.

    Args:
        everything: look for NaN in all tensors, not only in those of at most 2^20 values.

    Raises:
        DQError: a file that cannot be read, or NaN or Inf in a tensor.
    """
    out = Contents(config)
    for path in files:
        with one_line(f"{path.name} cannot be read"), safe_open(path, "pt") as file:
            out.metadata |= file.metadata() or {}
            for name in file.keys():  # noqa: SIM118 - not a dict
                part = file.get_slice(name)
                shape, dtype = tuple(part.get_shape()), str(part.get_dtype())
                owner, leaf = place(name)
                out.owners.setdefault(owner, {})[leaf] = Header(shape, dtype, int(prod(shape) * _SIZES.get(dtype, 1)))
                if leaf == "comfy_quant":
                    out.said[owner] = json.loads(file.get_tensor(name).numpy().tobytes())
                elif dtype in (*_WIDE, "F8_E4M3", "F8_E5M2") and (everything or prod(shape) <= CHECKED):
                    _check_values(name, file.get_tensor(name))
    if "_quantization_metadata" in out.metadata:
        with one_line("_quantization_metadata cannot be read"):
            out.said = json.loads(out.metadata["_quantization_metadata"])["layers"] | out.said
    return out


def _check_values(name: str, tensor: torch.Tensor) -> None:
    tensor = tensor if tensor.element_size() > 1 else tensor.to(torch.float32)
    if not torch.isfinite(tensor).all():
        raise DQError(f"{name} holds NaN or Inf")


def _layer(own: dict[str, Header], form: str, payload: str, bits: float, acts: str = "", extra: str = "") -> Layer:
    head = own[payload]
    nbytes = sum(h.nbytes for leaf, h in own.items() if leaf not in ("bias", "comfy_quant"))
    return Layer(form, int(head.nbytes * 8 / bits), nbytes, acts, extra)


def layers(contents: Contents) -> dict[str, Layer]:
    """Every quantized matrix by name."""
    reader = _BY_METHOD.get(str(contents.quantization.get("quant_method")), _plain)
    out = {}
    for owner, own in contents.owners.items():
        found = reader(contents, owner, own)
        if found is not None:
            out[owner] = found
    return out


def _dq(contents: Contents, owner: str, own: dict[str, Header]) -> Layer | None:
    config = contents.quantization
    entry = (config.get("layers") or {}).get(owner)
    if entry is None or "qweight" not in own:
        return None
    kind = LinearConfig.from_dict(config["kinds"][entry["kind"]])
    parts = [n for n, _ in kind.steps] + ([f"low rank {kind.rank}"] if kind.rank else [])
    parts += [f"{'dual ' if kind.dual else ''}residual columns {kind.residual}"] if kind.residual else []
    acts = "16-bit" if kind.activations is None else str(kind.activations)
    found = _layer(own, str(kind.weights), "qweight", kind.weights.fmt.bits, acts, ", ".join(parts))
    rows = own["qweight"].shape[0]
    return Layer(found.format, found.values - rows * kind.extra, found.nbytes, acts, found.extra)


def _compressed(contents: Contents, owner: str, own: dict[str, Header]) -> Layer | None:
    payload = "weight_packed" if "weight_packed" in own else "weight"
    if "weight_scale" not in own or payload not in own:
        return None
    groups = [g for g in (contents.quantization.get("config_groups") or {}).values()
              if any(target_matches(t, owner) for t in g["targets"])]  # fmt: skip
    if not groups:
        return _plain(contents, owner, own)
    weights, acts = groups[-1]["weights"], groups[-1].get("input_activations")
    layout = groups[-1].get("format") or contents.quantization.get("format")
    return _layer(own, f"{_arguments(weights)} ({layout})", payload, weights["num_bits"],
                  "16-bit" if acts is None else _arguments(acts))  # fmt: skip


def _arguments(args: dict[str, Any]) -> str:
    size = args.get("group_size") or args.get("block_structure")
    return f"{args['type']}{args['num_bits']} per {args['strategy']}{f' {size}' if size else ''}"


def _modelopt(contents: Contents, owner: str, own: dict[str, Header]) -> Layer | None:
    if "weight_scale" not in own or "weight" not in own:
        return None
    config = contents.quantization
    algorithm = (config.get("quantized_layers") or {}).get(owner, config).get("quant_algo", "?")
    bits = 4 if own["weight"].dtype == "U8" else 8
    extra = ["smooth"] if "pre_quant_scale" in own else []
    extra += [f"low rank {own['svdquant_lora_a'].shape[0]}"] if "svdquant_lora_a" in own else []
    acts = "16-bit" if algorithm.startswith(("W4A16", "W8A16")) else "calibrated" if "input_scale" in own else ""
    return _layer(own, f"{algorithm} (modelopt)", "weight", bits, acts, ", ".join(extra))


def _nunchaku(contents: Contents, owner: str, own: dict[str, Header]) -> Layer | None:
    for section in ("svdq_w4a4", "awq_w4a16"):
        said = contents.quantization.get(section) or {}
        if owner in said.get("targets", ()) and "qweight" in own:
            form = f"{said.get('precision')} per group {said.get('group_size')} ({section})"
            if section == "awq_w4a16":
                return _layer(own, form, "qweight", 4, "16-bit")
            return _layer(own, form, "qweight", 4, str(said.get("precision")), f"smooth, low rank {said.get('rank')}")
    return None


def _comfy(own: dict[str, Header], said: dict[str, Any]) -> Layer:
    kind = str(said.get("format"))
    bits = 4 if own["weight"].dtype == "U8" or kind in ("convrot_w4a4", "awq_w4a16", "asym_w4a8_int8") else 8
    known = MATRICES[kind].activations if kind in MATRICES else ()
    acts = "16-bit" if said.get("full_precision_matrix_mult") or not known else known[0].replace("-", "/")
    acts = "int8/token" if said.get("linear_dtype") == "int8" else acts
    extra = [f"rotate {said.get('convrot_groupsize', 256)}"] if said.get("convrot") or "convrot" in kind else []
    extra += ["smooth"] if "pre_quant_scale" in own else []
    return _layer(own, f"{kind} (ComfyUI)", "weight", bits, acts, ", ".join(extra))


def _plain(contents: Contents, owner: str, own: dict[str, Header]) -> Layer | None:
    """Whatever the names and dtypes of a module's tensors say by themselves."""
    if owner in contents.said and "weight" in own:
        return _comfy(own, contents.said[owner])
    if "weight" in own and own["weight"].dtype in _GGML:
        return Layer(own["weight"].dtype, prod(own["weight"].shape), own["weight"].nbytes, "16-bit")
    for form, payload, bits, fits in _PATTERNS:
        if payload in own and fits(own):
            return _layer(own, form(own) if callable(form) else form, payload, bits or _bits(contents, 4))
    return None


def _bits(contents: Contents, default: int) -> float:
    found = contents.quantization.get("bits") or contents.quantization.get("w_bit")
    return found if isinstance(found, int) else default


def _fp8(own: dict[str, Header]) -> str:
    weight, scale = own["weight"], own.get("weight_scale") or own.get("weight_scale_inv") or own.get("scale_weight")
    name = {"F8_E4M3": "FP8 E4M3", "F8_E5M2": "FP8 E5M2"}[weight.dtype]
    if scale is None:
        return f"{name} without scales"
    if prod(scale.shape) == 1:
        return f"{name} per tensor"
    return f"{name} per channel" if prod(scale.shape) == weight.shape[0] else f"{name} per block"


def _is(dtype: str, payload: str, *others: str) -> Callable[[dict[str, Header]], bool]:
    return lambda own: own[payload].dtype == dtype and all(o in own for o in others)


# Label, tensor that holds the codes, bits of a code (0: what the config says), test.
_PATTERNS: tuple[tuple[Any, str, int, Callable[[dict[str, Header]], bool]], ...] = (
    ("NVFP4", "weight", 4, _is("U8", "weight", "weight_scale", "weight_scale_2")),
    ("NF4 or FP4 (bitsandbytes)", "weight", 4, lambda own: own["weight"].dtype == "U8" and "weight.absmax" in own),
    ("INT8 (bitsandbytes)", "weight", 8, _is("I8", "weight", "SCB")),
    ("packed 4-bit", "weight_packed", 4, _is("U8", "weight_packed")),
    ("packed integers", "weight_packed", 0, _is("I32", "weight_packed")),
    ("GPTQ or AWQ", "qweight", 0, _is("I32", "qweight", "qzeros", "scales")),
    ("INT8 (torchao)", "_weight_qdata", 8, _is("I8", "_weight_qdata")),
    ("FP8 E4M3 (torchao)", "_weight_qdata", 8, _is("F8_E4M3", "_weight_qdata")),
    ("4 bits (torchao)", "_weight_qdata", 4, _is("U8", "_weight_qdata")),
    ("quanto", "weight._data", 8, lambda own: own["weight._data"].dtype in ("I8", "F8_E4M3", "F8_E5M2")),
    ("quanto", "weight._data._data", 4, _is("U8", "weight._data._data")),
    (_fp8, "weight", 8, lambda own: own["weight"].dtype in ("F8_E4M3", "F8_E5M2")),
    ("INT8", "weight", 8, lambda own: own["weight"].dtype == "I8"),
    ("bytes of an unknown grid", "weight", 8, lambda own: own["weight"].dtype == "U8"),
)
_GGML = {kind for kind, block, _ in TYPES.values() if block > 1}
_BY_METHOD = {"dq": _dq, "compressed-tensors": _compressed, "modelopt": _modelopt, "nunchaku_lite": _nunchaku}


def check_dq(config: dict[str, Any]) -> None:
    """Raises DQError for a dq checkpoint that is newer than this dq, or whose config describes no layer."""
    check_version(config)
    for key in ("kinds", "layers"):
        if not config.get(key):
            raise DQError(f"quantization_config has no {key!r}: it describes no quantized layer")


def kept(contents: Contents, quantized: Iterable[str]) -> dict[str, Header]:
    """Matrices that stay in 16 or 32 bits, by module."""
    done = set(quantized)
    return {o: own["weight"] for o, own in contents.owners.items() if o not in done and "weight" in own
            and len(own["weight"].shape) == 2 and own["weight"].dtype in _WIDE}  # fmt: skip
