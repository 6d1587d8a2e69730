"""compressed-tensors: what llm-compressor writes, and transformers, vLLM and SGLang read.

    float-quantized       weight E4M3 [N, K], weight_scale [N, 1], [1] or per 128 x 128 tile
    int-quantized         weight int8 [N, K], weight_scale [N, 1]
    pack-quantized        weight_packed int32 [N, ceil(K b / 32)] of code + 2^(b-1), weight_scale, weight_shape;
                          asymmetric weight_zero_point int32 [ceil(N b / 32), G], dense along N
    nvfp4-pack-quantized  weight_packed uint8 [N, K / 2], weight_scale E4M3, weight_global_scale: a divisor
    mxfp4-pack-quantized  weight_packed uint8 [N, K / 2], weight_scale uint8 (E8M0); mxfp8-quantized: weight E4M3

Scales are written as dq holds them (float32, or float16 for groups); a reader that works in bfloat16 rounds them,
unless they were chosen in it (`int4/group128/bf16`). Experts are written one by one under the names that the files of
such models have. transformers 5.24 reads them with FP8, INT4, MXFP4, weight-only INT8 and, in bfloat16, single-level
NVFP4 weights; where it does not, though vLLM and `load_exported` do, a warning says why.
Source: compressed-tensors 0.20, preset schemes and compressors.
"""

from __future__ import annotations

import re
import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from dq.checks import one_line
from dq.linear import QuantizedLinear
from dq.packing import PACKINGS
from dq.pipelines.expert_names import file_names, of_experts
from dq.pipelines.experts import stacked_layers
from dq.pipelines.exported import (
    EXPORTERS,
    NVFP4_TOP,
    Exporter,
    Files,
    Job,
    Stored,
    grid_kind,
    multiplier,
    not_plain,
    unlike_siblings,
    write_folder,
)  # fmt: skip
from dq.qtensor import QTensor
from dq.registry import DQError
from dq.spec import QuantSpec

METHOD = "compressed-tensors"


@dataclass(frozen=True)
class Scheme:
    """One config group: layout of the tensors, and the arguments of weights and activations."""

    layout: str
    weights: tuple[tuple[str, Any], ...]
    activations: tuple[tuple[str, Any], ...] | None

    def group(self, targets: list[str]) -> dict[str, Any]:
        acts = None if self.activations is None else dict(self.activations)
        return {"targets": targets, "weights": dict(self.weights), "input_activations": acts,
                "output_activations": None, "format": self.layout}  # fmt: skip


def _args(kind: str, bits: int, strategy: str, **more: Any) -> tuple[tuple[str, Any], ...]:
    args = {"num_bits": bits, "type": kind, "symmetric": True, "strategy": strategy, "dynamic": False} | more
    return tuple(args.items())


# kind of the weights -> kinds of activations that a runtime has beside them.
_PAIRS = {
    "fp8": ("fp8",), "fp8-block": ("fp8-group",), "nvfp4": ("nvfp4",), "mxfp4": ("mxfp4",), "mxfp8": ("mxfp8",),
    "int8": ("int8",), "int4": ("int8", "fp8"), "int3": (), "int2": (), "uint8": (), "uint4": (), "uint3": (),
    "uint2": (),
}  # fmt: skip


def _activation_args(spec: QuantSpec, kind: str) -> tuple[tuple[str, Any], ...]:
    if kind == "nvfp4":
        return _args("float", 4, "tensor_group", group_size=16, dynamic="local", scale_dtype="torch.float8_e4m3fn")
    if kind.startswith("mx"):
        bits = 4 if kind == "mxfp4" else 8
        return _args("float", bits, "group", group_size=32, dynamic=True, scale_dtype="torch.uint8")
    number = "int" if kind.startswith("int") else "float"
    if kind == "fp8-group":
        return _args(number, 8, "group", group_size=spec.group_size, dynamic=True)
    if spec.strategy == "tensor":
        return _args(number, 8, "tensor")
    return _args(number, 8, "token", dynamic=True)


def _weight_args(spec: QuantSpec, kind: str) -> tuple[tuple[str, Any], ...]:
    if kind == "nvfp4":
        return _args("float", 4, "tensor_group", group_size=16, scale_dtype="torch.float8_e4m3fn")
    if kind.startswith("mx"):
        return _args("float", 4 if kind == "mxfp4" else 8, "group", group_size=32, scale_dtype="torch.uint8")
    if kind == "fp8-block":
        return _args("float", 8, "block", block_structure=spec.block_size)
    more = {"group_size": spec.group_size} if spec.strategy == "group" else {}
    more |= {"symmetric": False} if spec.has_zero_point else {}
    return _args("int" if "int" in kind else "float", spec.fmt.bits, spec.strategy, **more)


def _kind(spec: QuantSpec) -> str:
    """`grid_kind`, and `uint<b>` for one with zero points."""
    affine = spec.has_zero_point and spec.strategy in ("channel", "group") and spec.scale_format in _SCALES.values()
    return grid_kind(spec) or (f"uint{spec.fmt.bits}" if affine and not spec.k_segments else "")


def scheme_of(weights: QuantSpec, activations: QuantSpec | None) -> Scheme:
    """The config group of two grids.

    Raises:
        DQError: the reason why there is none.
    """
    kind = _kind(weights)
    if kind not in _PAIRS:
        raise DQError(f"weights {weights} have no form there")
    acts = None if activations is None else grid_kind(activations)
    if acts is not None and (acts not in _PAIRS[kind] or activations.strategy not in ("token", "tensor", "group")):
        known = ", ".join(_PAIRS[kind]) or "none"
        raise DQError(f"{kind} weights do not go with activations {activations} there (only {known}); "
                      "weight_only=True leaves activations in 16 bits")  # fmt: skip
    if acts in ("fp8", "int8") and activations.strategy == "group":
        raise DQError(f"activations {activations} have no form there; weight_only=True leaves them in 16 bits")
    layout = {"nvfp4": "nvfp4-pack-quantized", "mxfp4": "mxfp4-pack-quantized", "mxfp8": "mxfp8-quantized"}.get(kind)
    if layout is None and kind.startswith("fp8"):
        layout = "naive-quantized" if acts is None else "float-quantized"
    if layout is None:
        layout = "int-quantized" if kind == "int8" and acts else "pack-quantized"
    return Scheme(layout, _weight_args(weights, kind), None if acts is None else _activation_args(activations, acts))


def _refuse(job: Job, name: str) -> str:
    layer = job.layers[name]
    spec, acts = layer.config.weights, job.activations(name)
    why = not_plain(layer, name)
    if why:
        return why
    try:
        scheme_of(spec, acts)
    except DQError as error:
        return str(error)
    if spec.columns and layer.in_features % spec.columns:
        return f"its {layer.in_features} inputs are no multiple of {spec.columns}"
    return unlike_siblings(job, name, grid_kind(spec) == "nvfp4") or missing_amax(job, name)


def missing_amax(job: Job, name: str) -> str:
    """Why the second level of NVFP4 activations is not known; "" if it is, or is not needed."""
    acts = job.activations(name)
    if acts is None or grid_kind(acts) != "nvfp4" or job.amax.get(name):
        return ""
    if job.amax:
        return "its input was all zeros in the calibration" if name in job.amax else "the calibration never reached it"
    return (
        "NVFP4 activations need a stored scale there, not one per token: give calibration=... or weight_only=True "
        "(in the shell --text or --prompts FILE, or --weight-only)"
    )


def tensors_of(layer: QuantizedLinear, scheme: Scheme, amax: float | None = None) -> dict[str, Tensor]:
    """The stored tensors of one linear, bias not included."""
    q, k = layer.qtensor, layer.in_features
    out = {"weight_scale": q.scale.reshape(1) if q.spec.strategy == "tensor" else q.scale}
    if scheme.layout in ("float-quantized", "naive-quantized", "int-quantized", "mxfp8-quantized"):
        out["weight"] = q.codes[:, :k]
    elif scheme.layout == "pack-quantized":
        bits, affine = q.spec.fmt.bits, q.spec.has_zero_point
        middle = 2 ** (bits - 1) if affine else 0  # of an unsigned grid, whose codes and zero points move down by it
        codes = q.spec.fmt.decode(q.spec.fmt.unpack(q.codes, k)).to(torch.int16) - middle
        out["weight_packed"] = PACKINGS.get(f"ct-int{bits}").pack(codes.to(torch.int8))
        out["weight_shape"] = torch.tensor([layer.out_features, k])
        if affine:
            zeros = (q.zero_point.to(torch.int16) - middle).to(torch.int8)
            out["weight_zero_point"] = PACKINGS.get(f"ct-int{bits}-zeros").pack(zeros)
    else:
        out["weight_packed"] = q.codes[:, : k // 2]
    if scheme.layout.startswith("nvfp4"):
        out["weight_global_scale"] = (1.0 / multiplier(q)).reshape(1)
        if scheme.activations is not None:
            out["input_global_scale"] = torch.tensor([NVFP4_TOP / amax])
    if scheme.activations is not None and layer.config.static:
        out["input_scale"] = layer.input_scale.reshape(1)
    return out


def _write(job: Job, folder: Path) -> None:
    schemes = {n: scheme_of(layer.config.weights, job.activations(n)) for n, layer in job.layers.items()}
    groups: dict[Scheme, list[str]] = {}
    for name, scheme in schemes.items():
        groups.setdefault(scheme, []).append(name)
    tensors = {n: tensors_of(layer, schemes[n], job.amax.get(n)) for n, layer in job.layers.items()}
    one = len(groups) == 1
    _warn_about_experts(job, schemes)
    if any(layer.config.weights.has_zero_point for layer in job.layers.values()):
        warnings.warn(f"transformers {_ZEROS}", stacklevel=3)
    config = {
        "quant_method": METHOD,
        "format": next(iter(groups)).layout if one else "mixed-precision",
        "quantization_status": "compressed",
        "config_groups": {
            f"group_{i}": s.group(["Linear"] if one else _targets(job, names))
            for i, (s, names) in enumerate(groups.items())
        },
        "ignore": job.ignored,
        "kv_cache_scheme": None,
    }
    write_folder(job, folder, tensors, config)


_ZEROS = (
    "(seen with 5.24 and compressed-tensors 0.20) refuses its own files with zero points; vLLM, SGLang and "
    "dq.load_exported read them. A symmetric grid, e.g. int4_full/group128, is read by all"
)


def _targets(job: Job, names: list[str]) -> list[str]:
    """The names in files; all experts of the model as one pattern where they are in one group, by which transformers
    finds their scheme."""
    experts = of_experts(names)
    if experts and len(experts) == len(of_experts(job.layers)):
        names = [n for n in names if n not in set(experts)]
    else:
        experts = []
    return [*(["re:.*\\.experts\\.\\d+\\..*"] if experts else []), *file_names(job.model, names).values()]


def _warn_about_experts(job: Job, schemes: dict[str, Scheme]) -> None:
    """What transformers does not read of mixtures, though other engines do."""
    experts = of_experts(job.layers)
    layouts = {schemes[n].layout for n in experts}
    two_levels = any(job.layers[n].config.weights.global_scale for n in experts)
    others = {schemes[n].layout for n in job.layers} - {"float-quantized", "naive-quantized"}
    why = ""
    if len(experts) < len(of_experts([*job.layers, *job.plain_linears])) or (stacked_layers(job.model) and others):
        why = "takes all experts for quantized once a grid other than FP8 is in the file: it cannot read 16-bit ones"
    elif layouts & {"int-quantized"}:
        why = "reads no INT8 experts with INT8 activations (with weight_only=True it does)"
    elif layouts & {"nvfp4-pack-quantized"} and two_levels:
        why = "decodes NVFP4 experts without their second-level scale: the values are wrong (nvfp4-single has none)"
    if why:
        warnings.warn(f"transformers (seen with 5.24) {why}; vLLM and dq.load_exported read the file", stacklevel=4)


def target_matches(target: str, name: str) -> bool:
    """Whether an entry of `targets` (a name, the end of one, `Linear`, or `re:` and a pattern) means this linear."""
    if target.startswith("re:"):
        return re.match(target[3:], name) is not None
    return target in ("Linear", name) or name.endswith(f".{target}")


def _read(files: Files) -> dict[str, Stored]:
    config, out = files.quantization, {}
    _refuse_unread(config)
    for name in files.owners("weight_scale", "weight_packed"):
        groups = [g for g in config["config_groups"].values() if any(target_matches(t, name) for t in g["targets"])]
        if not groups:
            raise DQError(f"no config group describes {name}")
        group = groups[-1]
        own = files.take(name, *_KEYS)
        with one_line(name):
            acts = _activations(group.get("input_activations"))
            static = acts is not None and acts.strategy == "tensor"
            scale = own["input_scale"].reshape(1, 1).to(torch.float32) if static else None
            weight = _weight(group.get("format") or config["format"], group["weights"], own, name)
        out[name] = Stored(weight, acts, scale)
    return out


def _refuse_unread(config: dict[str, Any]) -> None:
    """What changes the values of a model and has no counterpart here; a quantized KV cache is left out, with a word."""
    if not isinstance(config.get("config_groups"), dict):
        raise DQError("its quantization_config has no config_groups")
    if config.get("transform_config"):
        raise DQError("its transforms (transform_config) are not read: without them the weights are others")
    if (config.get("sparsity_config") or {}).get("format", "dense") != "dense":
        raise DQError(f"sparse weights ({config['sparsity_config']['format']}) are not read")
    for name, group in config["config_groups"].items():
        if group.get("output_activations") or not group.get("weights"):
            raise DQError(f"{name}: only quantized weights, with or without quantized inputs, are read")
    if config.get("kv_cache_scheme"):
        warnings.warn("the KV cache of this checkpoint is quantized; here it stays in 16 bits", stacklevel=4)


_KEYS = ("weight", "weight_packed", "weight_scale", "weight_shape", "weight_zero_point", "weight_global_scale",
         "input_scale", "input_global_scale", "weight_g_idx")  # fmt: skip
_SCALES = {torch.float32: "fp32", torch.float16: "fp16", torch.bfloat16: "bf16"}


def _weight(layout: str, args: dict[str, Any], own: dict[str, Tensor], name: str) -> QTensor:
    if "weight_g_idx" in own:
        raise DQError(f"{name} has an activation order, which is not read")
    scale, bits = own["weight_scale"], args["num_bits"]
    if layout.startswith("nvfp4"):
        spec = QuantSpec.parse("nvfp4").with_(profile=METHOD)
        codes = own["weight_packed"]
        return QTensor(codes, scale, own["weight_global_scale"].reshape(1), spec, (len(codes), 2 * codes.shape[1]))
    if layout.startswith("mx"):
        codes = own["weight_packed"] if bits == 4 else own["weight"]
        width = codes.shape[1] * (2 if bits == 4 else 1)
        return QTensor(codes, scale, None, QuantSpec.parse(f"mxfp{bits}"), (len(codes), width))
    grid = {"strategy": args["strategy"], "scale_format": _SCALES[scale.dtype]}
    grid |= {"group_size": args["group_size"]} if args["strategy"] == "group" else {}
    grid |= {"block_size": tuple(args["block_structure"])} if args["strategy"] == "block" else {}
    if args["type"] == "float":
        spec, codes = QuantSpec("fp8_e4m3", **grid), own["weight"]
    else:
        spec = QuantSpec(f"int{bits}_full" if args.get("symmetric", True) else f"uint{bits}", **grid)
        if "weight" in own:
            codes = own["weight"]
        else:
            codes = PACKINGS.get(f"ct-int{bits}").unpack(own["weight_packed"], own["weight_shape"].tolist())
    shape, zeros = tuple(codes.shape), None
    if spec.has_zero_point:
        codes, zeros = _unsigned(codes, bits), _unsigned(_zeros(own, bits, spec.scale_shape(*shape)), bits)
    missing = spec.padded_width(shape[1]) - shape[1]
    codes = torch.nn.functional.pad(codes.view(torch.uint8), (0, missing)).view(codes.dtype)
    return QTensor(spec.fmt.pack(codes), _as_grid(scale, spec.scale_shape(*shape)), None, spec, shape, zeros)


def _as_grid(scale: Tensor, shape: tuple[int, int]) -> Tensor:
    """Scales [R, G]; one a row may come as a vector, one alone without axes."""
    if tuple(scale.shape) != shape and (scale.dim() > 1 or shape[1] != 1 or scale.numel() != shape[0]):
        raise DQError(f"weight_scale has the shape {tuple(scale.shape)}, expected {shape}")
    return scale.reshape(shape)


def _zeros(own: dict[str, Tensor], bits: int, shape: tuple[int, int]) -> Tensor:
    """Signed zero points [N, G]; beside unpacked codes they are not packed either."""
    stored = own["weight_zero_point"]
    packed = "weight_packed" in own
    return PACKINGS.get(f"ct-int{bits}-zeros").unpack(stored, shape) if packed else stored.reshape(shape)


def _unsigned(codes: Tensor, bits: int) -> Tensor:
    return (codes.to(torch.int16) + 2 ** (bits - 1)).to(torch.uint8)


def _activations(args: dict[str, Any] | None) -> QuantSpec | None:
    if args is None:
        return None
    strategy, bits, kind = args["strategy"], args["num_bits"], args["type"]
    if strategy == "tensor_group":
        return QuantSpec.parse("nvfp4-token")
    if strategy == "group" and bits == 8 and args["group_size"] == 128:
        return QuantSpec.parse("fp8-block-token")
    if strategy == "group" and args["group_size"] == 32:
        return QuantSpec.parse(f"mxfp{bits}")
    if args.get("symmetric") is False:
        raise DQError("asymmetric activations are not read")
    if strategy not in ("token", "tensor") or bits != 8:
        raise DQError(f"activations of {bits} bits per {strategy} are not read")
    return QuantSpec.parse(f"{'int8' if kind == 'int' else 'fp8_e4m3'}/{strategy}")


EXPORTERS.register(
    Exporter(
        METHOD,
        "transformers, vLLM, SGLang: FP8, FP8 block, INT8, INT4 groups, NVFP4, MXFP4, MXFP8",
        _refuse,
        _write,
        _read,
        method=METHOD,
    )
)
