"""nunchaku_lite: what diffusers loads on Turing, Ampere, Ada and Blackwell GPUs through nunchaku's kernels.

    svdq_w4a4    qweight int8 [N, K / 2], wscales [K / g, N] (INT4: g = 64, 16 bits; NVFP4: g = 16, E4M3), smooth_factor
                 [K], proj_down [K, r], proj_up [N, r], bias [N]; NVFP4 also wtscale [1] and wcscales [N]
    awq_w4a16    qweight int32 [N / 4, K / 2] of codes 0..15, wscales and wzeros [K / 64, N]: code * scale + zero

    y = Q(x / smooth_factor) W^T + (x proj_down) proj_up^T + bias

in the order of the kernels' tiles (dq.packing.nunchaku), q, k and v apart. All low-rank branches have one rank, a
multiple of 16: shorter ones, and linears without, get zeros. Scales, smoothing factors and NVFP4's second level are
rounded to the 16-bit dtype of the model, which is what the kernels take; the second level as a product of two such
numbers, wtscale * wcscales, to 2^-14. Activations of NVFP4 have block scales only there, no level above them.
Source: diffusers 0.42, quantizers/nunchaku; deepcompressor's converter.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from dq.checks import one_line
from dq.packing import PACKINGS
from dq.packing import nunchaku as layout
from dq.pipelines.comfy import affine
from dq.pipelines.exported import (
    EXPORTERS,
    Exporter,
    Files,
    Job,
    Stored,
    grid_kind,
    multiplier,
    not_plain,
    values_of,
    write_folder,
)
from dq.qtensor import QTensor
from dq.registry import DQError
from dq.spec import QuantSpec
from dq.transforms import Step

METHOD = "nunchaku_lite"
_GROUP = {"int4": 64, "nvfp4": 16}
_SIGNED = ("int4", "int4_wide", "int4_full")


def _weight_only(job: Job, name: str) -> bool:
    return job.activations(name) is None


def _precision(spec: QuantSpec) -> str:
    if spec.format in _SIGNED and spec.strategy == "group" and spec.group_size == 64 and spec.scale_format != "e8m0":
        return "int4"
    return "nvfp4" if grid_kind(spec) == "nvfp4" else ""


def _refuse(job: Job, name: str) -> str:
    layer = job.layers[name]
    n, k = layer.out_features, layer.in_features
    if _weight_only(job, name):
        return not_plain(layer, name) or _refuse_awq(layer.config.weights, n, k)
    spec, acts = layer.config.weights, job.activations(name)
    why = not_plain(layer, name, "smooth", "lowrank")
    precision = _precision(spec)
    if why or not precision:
        return why or f"weights {spec} with activations {acts} have no form there, only INT4 in groups of 64 and NVFP4"
    if _precision(acts) != precision:
        return f"{precision} weights go with activations of the same grid there, not {acts}"
    first = next(x for x in job.layers if not _weight_only(job, x))
    if _precision(job.layers[first].config.weights) != precision:
        return f"it is {precision}, {first} is not, and the file has one precision"
    if n % 128 or k % 128:
        return f"its size {n} x {k} is no multiple of 128 x 128"
    return ""


def _refuse_awq(spec: QuantSpec, n: int, k: int) -> str:
    if spec.format not in (*_SIGNED, "uint4") or spec.strategy != "group" or spec.group_size != 64:
        return f"weights {spec} with 16-bit activations have no form there, only INT4 in groups of 64"
    return f"its size {n} x {k} is no multiple of 4 x 64" if n % 4 or k % 64 else ""


def two_factors(value: float, dtype: torch.dtype) -> tuple[float, float]:
    """Two numbers of a 16-bit dtype whose product is closest to `value`, the first of them 1 to 2."""
    first = torch.linspace(1.0, 2.0, 257)[:-1].to(dtype).to(torch.float64).unique()
    second = (value / first).to(dtype).to(torch.float64)
    best = int((first * second / value - 1).abs().argmin())
    return float(first[best]), float(second[best])


def _svdq(job: Job, name: str, rank: int, dtype: torch.dtype) -> dict[str, Tensor]:
    one = job.stored(name)
    q, precision = one.weight, _precision(one.weight.spec)
    n, k = q.shape
    factor = one.steps[0].tensors["factor"] if one.steps else torch.ones(k, device=q.codes.device)
    down, up = one.side or (torch.zeros(0, k), torch.zeros(n, 0))
    missing = rank - len(down)
    down = torch.nn.functional.pad(down.to(dtype), (0, 0, 0, missing))
    up = torch.nn.functional.pad(up.to(dtype), (0, missing))
    out = {"smooth_factor": layout.pack_vector(factor.to(dtype)), "proj_down": layout.pack_lowrank(down, True),
           "proj_up": layout.pack_lowrank(up, False)}  # fmt: skip
    if precision == "int4":
        scale = layout.pack_scale(q.scale.to(dtype))
        return out | {"qweight": PACKINGS.get("nunchaku-int4").pack(values_of(q)), "wscales": scale}
    channel, tensor = two_factors(float(multiplier(q)), dtype)
    codes = PACKINGS.get("nunchaku-fp4").pack(q.spec.fmt.unpack(q.codes, k))
    levels = {"wtscale": torch.tensor([tensor]).to(dtype), "wcscales": torch.full((n,), channel).to(dtype)}
    return out | levels | {"qweight": codes, "wscales": layout.pack_micro_scale(q.scale)}


def _awq(job: Job, name: str, dtype: torch.dtype) -> dict[str, Tensor]:
    q = job.stored(name).weight
    scale = q.scale.to(torch.float32)
    middle = q.zero_point.to(torch.float32) if q.spec.has_zero_point else 8.0
    codes = values_of(q) + (0 if q.spec.has_zero_point else 8)
    return {"qweight": PACKINGS.get("nunchaku-awq").pack(codes), "wscales": scale.T.to(dtype),
            "wzeros": (-middle * scale).T.to(dtype)}  # fmt: skip


def _write(job: Job, folder: Path) -> None:
    names = {"awq": [n for n in job.layers if _weight_only(job, n)]}
    names["svdq"] = [n for n in job.layers if n not in names["awq"]]
    dtype = next(iter(job.layers.values())).compute_dtype
    dtype = dtype if dtype in (torch.float16, torch.bfloat16) else torch.bfloat16
    rank = max([16, *(-(-job.layers[n].config.rank // 16) * 16 for n in names["svdq"])])
    tensors = {n: _awq(job, n, dtype) for n in names["awq"]} | {n: _svdq(job, n, rank, dtype) for n in names["svdq"]}
    config: dict[str, Any] = {"quant_method": METHOD, "compute_dtype": str(dtype).removeprefix("torch.")}
    if names["svdq"]:
        precision = _precision(job.layers[names["svdq"][0]].config.weights)
        config["svdq_w4a4"] = {"precision": precision, "group_size": _GROUP[precision], "rank": rank,
                               "targets": names["svdq"]}  # fmt: skip
    if names["awq"]:
        config["awq_w4a16"] = {"precision": "int4", "group_size": 64, "targets": names["awq"]}
    for name in names["svdq"]:
        bias = job.layers[name].bias
        if bias is not None:
            tensors[name]["bias"] = layout.pack_vector(bias.detach().to(dtype))
    write_folder(job, folder, tensors, config)


_LEAVES = ("qweight", "wscales", "smooth_factor", "proj_down", "proj_up", "wtscale", "wcscales", "wzeros")


def _read(files: Files) -> dict[str, Stored]:
    out = {}
    for section in ("svdq_w4a4", "awq_w4a16"):
        said = files.quantization.get(section) or {}
        for name in said.get("targets", ()):
            own = files.take(name, *_LEAVES)
            with one_line(name):
                if section == "awq_w4a16":
                    out[name] = _read_awq(own)
                    continue
                out[name] = _read_svdq(own, said["precision"])
                if f"{name}.bias" in files.tensors:
                    files.tensors[f"{name}.bias"] = layout.unpack_vector(files.tensors[f"{name}.bias"])
    return out


_SCALES = {torch.float16: "fp16", torch.bfloat16: "bf16"}


def _read_svdq(own: dict[str, Tensor], precision: str) -> Stored:
    if precision not in _GROUP:
        raise DQError(f"precision {precision!r} is not read, only {', '.join(_GROUP)}")
    n, k = len(own["qweight"]), 2 * own["qweight"].shape[1]
    if precision == "int4":
        spec = QuantSpec("int4", "group", 64, scale_format=_SCALES[own["wscales"].dtype])
        codes = spec.fmt.pack(PACKINGS.get("nunchaku-int4").unpack(own["qweight"], (n, k)))
        weight, acts = QTensor(codes, layout.unpack_scale(own["wscales"]), None, spec, (n, k)), "int4/group64/fp32"
    else:
        rows = own["wcscales"].to(torch.float32)
        rows = layout.unpack_vector(rows) * own["wtscale"].to(torch.float32)
        same = bool((rows == rows[0]).all())
        spec = QuantSpec.parse("nvfp4") if same else QuantSpec.parse("nvfp4").with_(global_scale="token")
        codes = spec.fmt.pack(PACKINGS.get("nunchaku-fp4").unpack(own["qweight"], (n, k)))
        scale = layout.unpack_micro_scale(own["wscales"], (n, k // 16))
        weight, acts = QTensor(codes, scale, rows[:1] if same else rows[:, None], spec, (n, k)), "nvfp4-token"
    factor = layout.unpack_vector(own["smooth_factor"]).to(torch.float32)
    steps = () if (factor == 1).all() else (Step("smooth", {"factor": factor}),)
    down, up = layout.unpack_lowrank(own["proj_down"], True), layout.unpack_lowrank(own["proj_up"], False)
    used = int((down != 0).any(1).nonzero().max()) + 1 if down.any() else 0
    return Stored(weight, QuantSpec.parse(acts), None, steps, (down[:used], up[:, :used]) if used else None)


def _read_awq(own: dict[str, Tensor]) -> Stored:
    scale, zero = own["wscales"].T.contiguous(), own["wzeros"].T
    shape = (4 * len(own["qweight"]), 2 * own["qweight"].shape[1])
    codes = PACKINGS.get("nunchaku-awq").unpack(own["qweight"], shape)
    return Stored(affine(codes, scale, zero, 0, 64))


EXPORTERS.register(
    Exporter(
        "nunchaku-lite",
        "diffusers through nunchaku's kernels: SVDQuant W4A4 (INT4, NVFP4), INT4 weight-only",
        _refuse,
        _write,
        _read,
        method=METHOD,
        libraries=("diffusers",),
        pipeline=True,
    )
)
