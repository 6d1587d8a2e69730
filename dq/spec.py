"""`Format`: one grid of numbers. `QuantSpec`: a format laid over a tensor. Both are values, not class trees."""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from dq.constants import constant, look_up
from dq.registry import DQError, Registry, check_fields, suggest, typed

STRATEGIES = ("tensor", "channel", "token", "group", "block")
SCALE_DTYPES = {
    "fp32": torch.float32,
    "fp16": torch.float16,
    "bf16": torch.bfloat16,
    "fp8_e4m3": torch.float8_e4m3fn,
    "e8m0": torch.uint8,  # biased exponent: 2^(code - 127)
    "int8_double": torch.int8,  # NF4's double quantization: a scale is itself quantized to 8 bits
}
DOUBLE_BLOCK = 256  # scales per second-level scale of `int8_double`


@dataclass(frozen=True)
class Format:
    """A grid of representable numbers.

    Attributes:
        name: registry key, e.g. `fp4_e2m1`.
        bits: bits of one code.
        max, min: largest and smallest value that `encode` produces.
        dtype: torch dtype of one unpacked code.
        encode: float32 tensor, already divided by its scale -> codes of `dtype`. Saturates, rounds half to even; the
            4-bit grids canonicalise -0 to 0, so that packed bytes are deterministic.
        decode: codes (as `encode` makes them, or unsigned as `unpack` gives them) -> float32.
        round: `decode(encode(x))` without the detour over codes; what fake quantization of activations runs.
        table: for formats of 4 bits, the value of each of the 16 codes (fast decoding of packed bytes), else None.
        divisor: what absmax is divided by to get the scale; `max` unless a convention says otherwise (7.5 for INT4 over
            its full range -8..7).
        exponent: floor(log2(max)) of a float grid (OCP's e_max), what a shared exponent is relative to; else None.
        identity: a 16-bit dtype: nothing is scaled.
        positive: for tensors that are nowhere below 0 (or are shifted there): no zero point, negatives become 0.
    """

    name: str
    bits: int
    max: float
    min: float
    dtype: torch.dtype
    encode: Callable[[Tensor], Tensor]
    decode: Callable[[Tensor], Tensor]
    round: Callable[[Tensor], Tensor]
    table: tuple[float, ...] | None = None
    divisor: float = 0.0
    exponent: int | None = None
    identity: bool = False
    positive: bool = False

    def __post_init__(self):
        object.__setattr__(self, "divisor", self.divisor or self.max)

    @property
    def unsigned(self) -> bool:
        """Whether the grid starts at 0 and a zero point moves it, so that it takes tensors of both signs."""
        return self.min == 0.0 and not self.positive

    @property
    def storage(self) -> torch.dtype:
        """dtype of the stored tensor: codes of under 8 bits lie densely in bytes, other codes rest as they are."""
        return torch.uint8 if self.bits < 8 else self.dtype

    @property
    def cell(self) -> int:
        """Codes that fill whole bytes together: 2 for 4 bits, 4 for 2 and 6 bits, 8 for 3 bits, 1 from 8 bits on."""
        return 8 // math.gcd(8, self.bits) if self.bits < 8 else 1

    def packed_width(self, width: int) -> int:
        """Stored elements per row of `width` codes."""
        return -(-width // self.cell) * self.cell * self.bits // 8 if self.bits < 8 else width

    def pack(self, codes: Tensor) -> Tensor:
        """Codes [..., K] -> storage [..., packed]: least significant bit first along K, padded with 0 to whole cells.

        Element 2i lies in the low nibble for 4 bits; four 6-bit codes lie in three bytes.
        """
        if self.bits >= 8:
            return codes
        missing = -codes.shape[-1] % self.cell
        codes = torch.nn.functional.pad(codes, (0, missing)) if missing else codes
        if self.bits == 4:
            codes = codes.to(torch.uint8)
            return (codes[..., 0::2] & 0xF).bitwise_or_(codes[..., 1::2] << 4)
        cells = (codes.to(torch.int32) & (2**self.bits - 1)).unflatten(-1, (-1, self.cell))
        shift = torch.arange(0, self.cell * self.bits, self.bits, dtype=torch.int32, device=codes.device)
        word = (cells << shift).sum(-1, dtype=torch.int32)
        byte = torch.arange(0, self.cell * self.bits, 8, dtype=torch.int32, device=codes.device)
        return ((word[..., None] >> byte) & 0xFF).to(torch.uint8).flatten(-2)

    def unpack(self, stored: Tensor, width: int) -> Tensor:
        """Storage -> unsigned codes of `bits` bits (below 8), or the codes themselves, [..., width]."""
        if self.bits >= 8:
            return stored[..., :width]
        size = self.cell * self.bits // 8
        byte = torch.arange(0, 8 * size, 8, dtype=torch.int32, device=stored.device)
        word = (stored.to(torch.int32).unflatten(-1, (-1, size)) << byte).sum(-1, dtype=torch.int32)
        shift = torch.arange(0, self.cell * self.bits, self.bits, dtype=torch.int32, device=stored.device)
        return ((word[..., None] >> shift) & (2**self.bits - 1)).to(torch.uint8).flatten(-2)[..., :width]

    def unpack_values(self, stored: Tensor, width: int) -> Tensor:
        """Storage [..., packed] -> float32 values [..., width]; the inverse of `decode` after `pack`."""
        if self.table is None:
            return self.decode(self.unpack(stored, width))
        pairs = look_up(constant(lambda: _pair_table(self, stored.device), stored), stored)
        return pairs.view(torch.float32)[..., :width]


_PAIRS: dict[tuple[str, torch.device], Tensor] = {}


def _pair_table(fmt: Format, device: torch.device) -> Tensor:
    """[256]: the two float32 that each byte holds, as one int64. One gather decodes two codes."""
    key = (fmt.name, device)
    if key not in _PAIRS:
        values = torch.tensor(fmt.table, dtype=torch.float32)
        byte = torch.arange(256)
        _PAIRS[key] = torch.stack([values[byte & 0xF], values[byte >> 4]], -1).view(torch.int64)[:, 0].to(device)
    return _PAIRS[key]


FORMATS: Registry[Format] = Registry("format", "dq.formats")
SCALE_RULES: Registry[Any] = Registry("scale rule", "dq.scales")  # of dq.scales.ScaleRule; here to refuse unknown names


@dataclass(frozen=True)
class QuantSpec:
    """How a tensor [rows, K] is quantized: `x ~ (code - zero_point) * scale * global_scale`.

    Attributes:
        format: name of a registered `Format`.
        strategy: what shares one scale. `tensor`; `channel` (a row of a weight, static); `token` (a row of an
            activation, computed on the fly); `group` (`group_size` consecutive elements of a row); `block`
            (`block_size` rows x columns).
        group_size: elements per group along K, for `group` only.
        block_size: (rows, columns) of a tile, for `block` only.
        scale_format: how a scale is stored; `fp8_e4m3` rounds it to E4M3, clamped to [2^-9, 448]; `e8m0` is a power of
            two (MX); `int8_double` quantizes the scales once more (NF4 double quantization).
        global_scale: second level above the group scales: `tensor` (one fp32, amax/(format.max*448)), `token`
            (one fp32 per row: independent of what else is in the batch, and constant along K so that a GEMM takes it in
            its epilogue) or None.
        scale_rule: how a scale is chosen: a registered rule, e.g. `absmax`, `mse`, `4over6`, `sweep`.
        rule_params: parameters of the rule as (name, value) pairs.
        row_segments: row counts of fused linears (q, k, v in one weight): each has its own scale where one scale would
            span them all (strategy `tensor`, global scale `tensor`).
        k_segments: widths of the parts of a concatenated input: each part of a row has its own scale (strategies
            `tensor`, `channel`, `token`).
        dynamic: an activation grid, computed on the fly.
        profile: which tool's bytes to reproduce where tools differ; `dq` is this library's own (see dq.profiles).

    Raises:
        DQError: for an unknown word or an inconsistent combination.
    """

    format: str
    strategy: str = "tensor"
    group_size: int | None = None
    block_size: tuple[int, int] | None = None
    scale_format: str = "fp32"
    global_scale: str | None = None
    scale_rule: str = "absmax"
    rule_params: tuple[tuple[str, Any], ...] = ()
    row_segments: tuple[int, ...] | None = None
    k_segments: tuple[int, ...] | None = None
    dynamic: bool = False
    profile: str = "dq"

    def __post_init__(self):
        for name in ("block_size", "row_segments", "k_segments", "rule_params"):
            value = getattr(self, name)  # JSON and TOML know lists only
            object.__setattr__(self, name, tuple(value) if isinstance(value, list) else value)
        check_fields(self)
        pairs = [tuple(p) if isinstance(p, list | tuple) and len(p) == 2 else (p, None) for p in self.rule_params]
        object.__setattr__(self, "rule_params", tuple((str(k), v) for k, v in pairs))
        _listed(self.strategy, STRATEGIES, "strategy")
        _listed(self.scale_format, SCALE_DTYPES, "scale format")
        if (self.strategy == "group") != (self.group_size is not None):
            raise DQError(f"strategy {self.strategy!r} and group_size={self.group_size} do not go together")
        if (self.strategy == "block") != (self.block_size is not None):
            raise DQError(f"strategy {self.strategy!r} and block_size={self.block_size} do not go together")
        sizes = [*(self.block_size or ()), *([self.group_size] if self.group_size is not None else [])]
        if any(typed(n, int, "group and block sizes are whole numbers") < 1 for n in sizes) or (
            self.block_size and len(self.block_size) != 2
        ):
            raise DQError(f"group and block sizes must be at least 1, got {sizes}")
        if self.global_scale not in (None, "tensor", "token"):
            raise DQError(f"global_scale must be tensor, token or None, got {self.global_scale!r}")
        if self.k_segments and self.strategy in ("group", "block"):
            raise DQError("k_segments go with the strategies tensor, channel and token; groups have their own scales")

    @property
    def fmt(self) -> Format:
        return FORMATS.get(self.format)

    @property
    def scale_dtype(self) -> torch.dtype:
        return SCALE_DTYPES[self.scale_format]

    @property
    def columns(self) -> int | None:
        """Columns that share a scale, None where all of a row (or segment) do."""
        return self.block_size[1] if self.block_size else self.group_size

    @property
    def has_zero_point(self) -> bool:
        return self.fmt.unsigned

    def groups(self, width: int) -> int:
        """Scales per row of `width` elements; a last, shorter group counts."""
        if self.k_segments:
            return len(self.k_segments)
        return -(-width // self.columns) if self.columns else 1

    def padded_width(self, width: int) -> int:
        """Elements stored per row: whole groups, and whole bytes."""
        width = self.groups(width) * self.columns if self.columns else width
        return width + -width % self.fmt.cell

    def scale_shape(self, rows: int, width: int) -> tuple[int, int]:
        if self.fmt.identity:
            return (0, 0)
        if self.strategy == "tensor":
            rows = len(self.row_segments) if self.row_segments else 1
        elif self.block_size:
            rows = -(-rows // self.block_size[0])
        return (rows, self.groups(width))

    def global_shape(self, rows: int, width: int) -> tuple[int, ...] | None:
        """Shape of the second-level scales, or None without them."""
        if self.scale_format == "int8_double":
            n, groups = self.scale_shape(rows, width)
            return (-(-n * groups // DOUBLE_BLOCK) + 1,)  # one scale per 256 scales, and the mean
        if self.global_scale is None:
            return None
        if self.global_scale == "token":
            return (rows, 1)
        return (len(self.row_segments), 1) if self.row_segments else (1,)

    def nbytes(self, rows: int, width: int) -> int:
        """Bytes of codes, scales and zero points of a [rows, width] tensor."""
        scales, second = math.prod(self.scale_shape(rows, width)), self.global_shape(rows, width)
        total = rows * self.fmt.packed_width(self.padded_width(width)) * self.fmt.storage.itemsize
        total += scales * self.scale_dtype.itemsize + (scales if self.has_zero_point else 0)
        return total + (4 * math.prod(second) if second else 0)

    def bits_per_value(self, rows: int = 4096, width: int = 4096) -> float:
        """Stored bits per element of a large tensor, scales and zero points counted."""
        return 8 * self.nbytes(rows, width) / (rows * width)

    def to_dict(self) -> dict[str, Any]:
        return {k: v for k, v in self.__dict__.items() if v != type(self).__dataclass_fields__[k].default}

    @classmethod
    def from_dict(cls, data: dict[str, Any]) -> QuantSpec:
        unknown = set(typed(data, dict, "a spec is a table")) - set(cls.__dataclass_fields__)
        if unknown:
            raise DQError(f"unknown QuantSpec field {sorted(unknown)}{suggest(min(unknown), cls.__dataclass_fields__)}")
        FORMATS.get(str(data.get("format", "")))  # refuses an unknown one now, not when the first weight is rounded
        SCALE_RULES.get(str(data.get("scale_rule", "absmax")))
        return cls(**data)

    @classmethod
    def parse(cls, text: str) -> QuantSpec:
        """A named spec (`"nvfp4"`) or `"format/strategy"`, with another scale rule behind an @.

        `"int8/token"`, `"int4/group64"`, `"fp8_e4m3/block128x128"`, `"nvfp4@sweep"`, `"int4/channel@mse"`. A third part
        names the scale format; `"int4/group64/fp32"` is the form for activations, whose scales are not stored.
        """
        base, _, rule = text.partition("@")
        spec = SPECS.get(base).spec if base in SPECS else cls._parse_plain(base)
        return spec.with_(scale_rule=SCALE_RULES.get(rule).name, rule_params=()) if rule else spec

    @classmethod
    def _parse_plain(cls, text: str) -> QuantSpec:
        text, *scale = text.rsplit("/", 1) if text.count("/") == 2 else (text,)
        spec = cls._parse_grid(text)
        return spec.with_(scale_format=scale[0], dynamic=spec.strategy == "group") if scale else spec

    @classmethod
    def _parse_grid(cls, text: str) -> QuantSpec:
        name, _, strategy = text.partition("/")
        if name not in FORMATS:
            raise DQError(f"unknown spec {text!r}{suggest(name, FORMATS.names() + SPECS.names())}")
        found = re.fullmatch(r"(group|block)(\d+)(?:x(\d+))?", strategy)
        if found and found[1] == "block" and found[3]:
            return cls(name, "block", block_size=(int(found[2]), int(found[3])))
        if found and found[1] == "group" and not found[3]:
            # 16-bit scales: at one scale per 32..128 elements the scale's own rounding (2^-11) is far below the step.
            return cls(name, "group", int(found[2]), scale_format="fp16")
        if strategy.startswith(("group", "block")):
            raise DQError(f"spec {text!r}: write the group size as group64, a block as block128x128")
        return cls(name, strategy or "tensor", dynamic=strategy == "token")

    def __str__(self) -> str:
        for named in SPECS:
            if named.spec == self:
                return named.name
            if named.spec == self.with_(scale_rule=named.spec.scale_rule, rule_params=named.spec.rule_params):
                return f"{named.name}@{self.scale_rule}"
        rule = "" if self.scale_rule == "absmax" else f"@{self.scale_rule}"
        size = "x".join(map(str, self.block_size)) if self.block_size else self.group_size or ""
        plain = self.scale_format == ("fp16" if self.strategy == "group" else "fp32")
        scale = "" if plain and not (self.dynamic and self.strategy == "group") else f"/{self.scale_format}"
        return f"{self.format}/{self.strategy}{size}{scale}{rule}"

    def with_(self, **changes: Any) -> QuantSpec:
        return replace(self, **changes)


def _listed(word: str, known, kind: str) -> None:
    if word not in known:
        raise DQError(f"unknown {kind} {word!r}{suggest(str(word), known)}")


@dataclass(frozen=True)
class NamedSpec:
    """A `QuantSpec` users know by one word."""

    name: str
    spec: QuantSpec


SPECS: Registry[NamedSpec] = Registry("spec", "dq.formats")
