"""Signal to quantization noise of every format under every scale rule, on synthetic data of known distribution.

    SQNR = 10 log10(sum x^2 / sum (x - x^)^2)   in dB; a relative MSE of 9.0e-3 is 20.5 dB

Data [rows, 4096], float32: Gaussian; Laplace; Student-t with 5 degrees of freedom; Gaussian with 20 of the 4096
columns, evenly spread, times 40, as in the inputs of large models; and that rotated in groups of 256 by the regular
Hadamard matrix.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from dq.eval.environment import describe
from dq.granularity import from_blocks, to_blocks
from dq.qtensor import quantize
from dq.scales import SCALE_RULES, Blocks, ScaleRule
from dq.spec import SPECS, QuantSpec
from dq.transforms.rotate import rotate

WIDTH, OUTLIERS, FACTOR = 4096, 20, 40.0
PLAIN = (
    "int8/channel",
    "int4/channel",
    "int4/group128",
    "int4/group64",
    "int4/group16",
    "int3/group64",
    "int2/group16",
)
PLAIN += (
    "uint4/group64",
    "int4_full/group128",
    "fp8_e4m3/channel",
    "fp8_e5m2/channel",
    "int8/tensor",
    "fp8_e4m3/tensor",
)
COLUMNS = {"gauss": "Gaussian", "laplace": "Laplace", "t5": "Student-t5", "outliers": "outliers", "rotated": "rotated"}


def data(rows: int, seed: int) -> dict[str, Tensor]:
    """Tensors [rows, 4096] by the names of `COLUMNS`; the same on every machine."""
    g = torch.Generator().manual_seed(seed)
    normal = torch.randn(rows, WIDTH, generator=g)
    u = torch.rand(rows, WIDTH, generator=g, dtype=torch.float64) - 0.5
    laplace = -u.sign() * torch.log1p(-2 * u.abs()).clamp(min=-40.0)
    chi = torch.randn(5, rows, WIDTH, generator=g).square_().sum(0)
    t5 = torch.randn(rows, WIDTH, generator=g) / (chi / 5).sqrt()
    outliers = torch.randn(rows, WIDTH, generator=g)
    outliers[:, torch.arange(OUTLIERS) * (WIDTH // OUTLIERS)] *= FACTOR  # spread out: never two in one block
    every = (normal, laplace.to(torch.float32), t5, outliers, rotate(outliers, 256))
    return dict(zip(COLUMNS, every, strict=True))


def sqnr_db(x: Tensor, approximation: Tensor) -> float:
    """SQNR in dB, summed in float64."""
    noise = (approximation.double() - x.double()).square().sum()
    return float(10 * torch.log10(x.double().square().sum() / noise)) if noise else math.inf


def _native(x: Tensor, spec: QuantSpec) -> Tensor:
    return quantize(x, spec).dequantize()


def executed(x: Tensor, spec: QuantSpec) -> Tensor:
    """x as FP8 tensor cores multiply it: every product `element * block scale` rounded to E4M3."""
    scales = quantize(x, spec).scales
    blocks = Blocks(to_blocks(x, spec), spec, scales.global_scale)
    return from_blocks(blocks.round(scales.scale.to(torch.float32), "e4m3"), spec, *x.shape)


def _dual(x: Tensor, spec: QuantSpec) -> Tensor:
    first = _native(x, spec)
    return first + _native(x - first, spec)


def _rotated16(x: Tensor, spec: QuantSpec) -> Tensor:
    return rotate(_native(rotate(x, 16), spec), 16)  # the regular Hadamard matrix is its own inverse


@dataclass(frozen=True)
class Row:
    """One line of the table: how `spec` is applied, and what a reader should know about it."""

    spec: QuantSpec
    apply: Callable[[Tensor, QuantSpec], Tensor] = _native
    note: str = ""
    stages: int = 1

    @property
    def name(self) -> str:
        return _name(self.spec).partition("@")[0]

    @property
    def bits(self) -> float:
        return self.stages * self.spec.bits_per_value(4096, WIDTH)


def _name(spec: QuantSpec) -> str:
    return "nvint4" if spec.format == "int4" and spec.scale_format == "fp8_e4m3" else str(spec)


def rules_of(spec: QuantSpec) -> list[ScaleRule]:
    """Scale rules that go with a grid; `entropy` only where a block has enough values for a histogram."""
    if spec.fmt.identity:
        return []
    if spec.scale_format == "int8_double" and not spec.has_zero_point:
        return [SCALE_RULES.get("absmax")]

    def fits(rule: ScaleRule) -> bool:
        if (spec.has_zero_point and not rule.clip) or (rule.needs == "hessian" and not spec.group_size):
            return False
        if rule.name == "entropy" and not (spec.strategy == "tensor" and spec.fmt.bits == 8):
            return False
        return spec.scale_format in rule.formats if rule.formats else spec.scale_format != "e8m0"

    return [rule for rule in SCALE_RULES if fits(rule)]


def rows() -> Iterator[Row]:
    """Named formats, then plain ones, each under all rules that need no calibration; then NVFP4 in other settings."""
    nvfp4 = SPECS.get("nvfp4").spec
    named = [s.spec for s in SPECS if not s.spec.dynamic]
    nvint4 = nvfp4.with_(format="int4")
    for spec in (*named, nvint4, *map(QuantSpec.parse, PLAIN)):
        for rule in rules_of(spec):
            if rule.needs or (spec == nvint4 and rule.name in ("4over6", "exact")):
                continue  # nothing to calibrate on; about the values of E2M1
            yield Row(spec.with_(scale_rule=rule.name, rule_params=()))
    sweep = nvfp4.with_(scale_rule="sweep")
    yield Row(sweep, executed, "run in E4M3")
    yield Row(sweep.with_(rule_params=(("target", "e4m3"),)), executed, "target e4m3, run in E4M3")
    yield Row(sweep.with_(rule_params=(("target", "e4m3"),)), _native, "target e4m3, run natively")
    yield Row(nvfp4, _rotated16, "rotated by 16")
    yield Row(sweep, _rotated16, "rotated by 16")
    yield Row(nvfp4, _dual, "and its residual in nvfp4", stages=2)


def measure(samples: int = 32, seed: int = 0, device: str | torch.device = "cpu") -> dict[str, Any]:
    """SQNR in dB of every row on every kind of data.

    Args:
        samples: rows of 4096 values of each kind of data.
    """
    where = torch.device(device)
    tensors = {name: x.to(where) for name, x in data(samples, seed).items()}
    table = []
    for row in rows():
        sqnr = {name: round(sqnr_db(x, row.apply(x, row.spec)), 3) for name, x in tensors.items()}
        table.append(
            {
                "format": row.name,
                "rule": row.spec.scale_rule,
                "note": row.note,
                "bits": round(row.bits, 3),
                "sqnr_db": sqnr,
            }
        )
    return {
        "environment": describe(where),
        "seed": seed,
        "values": samples * WIDTH,
        "shape": [samples, WIDTH],
        "rows": table,
    }


def text(result: dict[str, Any], markdown: bool = False) -> str:
    """The table for a terminal, or as Markdown."""
    head = ["format", "rule", "bits", *COLUMNS.values(), ""]
    lines = [
        [r["format"], r["rule"], f"{r['bits']:.2f}", *(f"{r['sqnr_db'][c]:.2f}" for c in COLUMNS), r["note"]]
        for r in result["rows"]
    ]
    if markdown:
        return "\n".join("| " + " | ".join(line) + " |" for line in [head, ["---"] * len(head), *lines])
    widths = [max(len(line[i]) for line in [head, *lines]) for i in range(len(head))]
    out = []
    for line in [head, *lines]:
        cells = [
            c.ljust(w) if i in (0, 1, len(line) - 1) else c.rjust(w)
            for i, (c, w) in enumerate(zip(line, widths, strict=True))
        ]
        out.append("  ".join(cells).rstrip())
    return "\n".join(out)


def title(result: dict[str, Any]) -> str:
    """What the numbers are, in one line."""
    versions = result["environment"]["versions"]
    return (
        f"SQNR in dB; {result['values']} values of each kind ({result['shape'][0]} rows of {WIDTH}), "
        f"seed {result['seed']}; "
        f"dq {versions['dq']}, torch {versions['torch']}, {result['environment']['device']}"
    )


_READING = """`SQNR = 10 log10(sum x^2 / sum (x - x^)^2)`; 3 dB are half of the noise power, 6.02 dB one bit.
Bits are those stored per value, scales counted. A rule chooses the scales of a format (`dq list formats`); rules that
need calibration data (`imatrix`, `weighted_sweep`, `local_hessian`) are left out.

Columns: Gaussian; Laplace; Student-t with 5 degrees of freedom; Gaussian with 20 of 4096 columns times 40; that rotated
in groups of 256 by the regular Hadamard matrix. Another seed moves the two last by up to 0.3 dB, for few values hold
most of their energy; the others by less than 0.1 dB where scales are per block."""


def write_markdown(result: dict[str, Any], path: str) -> None:
    """Writes docs/formats.md: the command, what was measured, the table."""
    rows, seed = result["shape"][0], result["seed"]
    parts = [
        "# What each format loses",
        f"Written by `dq bench formats --rows {rows} --seed {seed} --markdown docs/formats.md`. {title(result)}.",
        _READING,
        text(result, markdown=True),
    ]
    Path(path).write_text("\n\n".join(parts) + "\n", encoding="utf-8")
