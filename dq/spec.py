"""`Format`: one grid of numbers. `QuantSpec`: a format laid over a tensor. Both are values, not class trees."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from dq.registry import DQError, Registry, suggest

STRATEGIES = ("tensor", "channel", "token", "group")
SCALE_DTYPES = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16, "fp8_e4m3": torch.float8_e4m3fn}


@dataclass(frozen=True)
class Format:
    """A grid of representable numbers.

    Attributes:
        name: registry key, e.g. `fp4_e2m1`.
        bits: bits of one code.
        max, min: largest and smallest value that `encode` produces.
        dtype: torch dtype of one unpacked code.
        encode: float32 tensor, already divided by its scale -> codes of `dtype`. Saturates, rounds half to even; 4-bit
            grids with two zeros give the code of +0, so that packed bytes are deterministic.
        decode: codes -> float32.
        round: `decode(encode(x))` without the detour over codes; what fake quantization of activations runs.
        table: for formats of 4 bits, the value of each of the 16 codes (fast decoding of packed bytes), else None.
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

    @property
    def storage(self) -> torch.dtype:
        """dtype of the stored tensor: two 4-bit codes share one uint8, other codes rest as they are."""
        return torch.uint8 if self.bits == 4 else self.dtype

    def packed_width(self, width: int) -> int:
        """Stored elements per row of `width` codes."""
        return (width + 1) // 2 if self.bits == 4 else width

    def pack(self, codes: Tensor) -> Tensor:
        """Codes [..., K] -> storage [..., K/2] for 4 bits: element 2i in the low nibble, odd rows padded with 0."""
        if self.bits != 4:
            return codes
        if codes.shape[-1] % 2:
            codes = torch.nn.functional.pad(codes, (0, 1))
        low, high = codes[..., 0::2].to(torch.uint8), codes[..., 1::2].to(torch.uint8)
        return (low & 0xF) | ((high & 0xF) << 4)

    def unpack_values(self, stored: Tensor, width: int) -> Tensor:
        """Storage [..., packed] -> float32 values [..., width]; the inverse of `decode` after `pack`."""
        if self.bits != 4:
            return self.decode(stored)[..., :width]
        pairs = _pair_table(self, stored.device)[stored.to(torch.int32)]
        return pairs.flatten(-2)[..., :width]

    def unpack(self, stored: Tensor, width: int) -> Tensor:
        """Storage -> unsigned nibble codes (4 bits) or the codes themselves, [..., width]."""
        if self.bits != 4:
            return stored[..., :width]
        return torch.stack([stored & 0xF, stored >> 4], dim=-1).flatten(-2)[..., :width]


_PAIRS: dict[tuple[str, torch.device], Tensor] = {}


def _pair_table(fmt: Format, device: torch.device) -> Tensor:
    """[256, 2] float32: the two values held by each byte. One gather decodes two codes."""
    key = (fmt.name, device)
    if key not in _PAIRS:
        values = torch.tensor(fmt.table, dtype=torch.float32)
        byte = torch.arange(256)
        _PAIRS[key] = torch.stack([values[byte & 0xF], values[byte >> 4]], dim=-1).to(device)
    return _PAIRS[key]


FORMATS: Registry[Format] = Registry("format", "dq.formats")


@dataclass(frozen=True)
class QuantSpec:
    """How a tensor [rows, K] is quantized: `x ~ code * scale * global_scale`.

    Attributes:
        format: name of a registered `Format`.
        strategy: what shares one scale. `tensor`; `channel` (a row of a weight, static); `token` (a row of an
            activation, computed on the fly); `group` (`group_size` consecutive elements of a row).
        group_size: elements per group along K, for `group` only.
        scale_format: how a scale is stored; `fp8_e4m3` rounds it to E4M3, clamped to [2^-9, 448].
        global_scale: second level above the group scales: `tensor` (one fp32, amax/(format.max*448)), `token`
            (one fp32 per row: independent of what else is in the batch, and constant along K so that a GEMM takes it in
            its epilogue) or None.
        symmetric: only the symmetric grid is implemented here; zero_point is None.
        scale_rule: `absmax`.

    Raises:
        DQError: for an unknown word or an inconsistent combination.
    """

    format: str
    strategy: str = "tensor"
    group_size: int | None = None
    scale_format: str = "fp32"
    global_scale: str | None = None
    scale_rule: str = "absmax"
    symmetric: bool = True
    dynamic: bool = False

    def __post_init__(self):
        if self.strategy not in STRATEGIES:
            raise DQError(f"unknown strategy {self.strategy!r}{suggest(self.strategy, STRATEGIES)}")
        if (self.strategy == "group") != (self.group_size is not None):
            raise DQError(f"strategy {self.strategy!r} and group_size={self.group_size} do not go together")
        if self.group_size is not None and self.group_size < 1:
            raise DQError(f"group_size must be at least 1, got {self.group_size}")
        if self.scale_format not in SCALE_DTYPES:
            raise DQError(f"unknown scale format {self.scale_format!r}{suggest(self.scale_format, SCALE_DTYPES)}")
        if self.global_scale not in (None, "tensor", "token"):
            raise DQError(f"global_scale must be tensor, token or None, got {self.global_scale!r}")
        if not self.symmetric:
            raise DQError("asymmetric grids are not implemented yet; use symmetric=True")
        if self.scale_rule != "absmax":
            raise DQError(f"unknown scale rule {self.scale_rule!r}; known: absmax")

    @property
    def fmt(self) -> Format:
        return FORMATS.get(self.format)

    @property
    def scale_dtype(self) -> torch.dtype:
        return SCALE_DTYPES[self.scale_format]

    def groups(self, width: int) -> int:
        """Scales per row of `width` elements; a last, shorter group counts."""
        return -(-width // self.group_size) if self.group_size else 1

    def padded_width(self, width: int) -> int:
        """Elements stored per row: whole groups, and whole bytes."""
        width = self.groups(width) * self.group_size if self.group_size else width
        return width + width % 2 if self.fmt.bits == 4 else width

    def scale_shape(self, rows: int, width: int) -> tuple[int, int]:
        return (1, 1) if self.strategy == "tensor" else (rows, self.groups(width))

    def nbytes(self, rows: int, width: int) -> int:
        """Bytes of codes and scales of a [rows, width] tensor."""
        scales = self.scale_shape(rows, width)
        total = rows * self.fmt.packed_width(self.padded_width(width)) * self.fmt.storage.itemsize
        total += scales[0] * scales[1] * self.scale_dtype.itemsize
        return total + {None: 0, "tensor": 4, "token": 4 * rows}[self.global_scale]

    def to_dict(self) -> dict[str, Any]:
        return {k: v for k, v in self.__dict__.items() if v != type(self).__dataclass_fields__[k].default}

    @classmethod
    def from_dict(cls, data: dict[str, Any]) -> QuantSpec:
        unknown = set(data) - set(cls.__dataclass_fields__)
        if unknown:
            raise DQError(f"unknown QuantSpec field {sorted(unknown)}{suggest(min(unknown), cls.__dataclass_fields__)}")
        FORMATS.get(str(data.get("format", "")))  # refuses an unknown one now, not when the first weight is rounded
        return cls(**data)

    @classmethod
    def parse(cls, text: str) -> QuantSpec:
        """`"nvfp4"` (a named spec) or `"format/strategy"`: `"int8/token"`, `"int4/group64"`, `"fp8_e4m3/channel"`."""
        if text in SPECS:
            return SPECS.get(text).spec
        name, _, strategy = text.partition("/")
        if name not in FORMATS:
            raise DQError(f"unknown spec {text!r}{suggest(name, FORMATS.names() + SPECS.names())}")
        if strategy.startswith("group"):
            size = strategy.removeprefix("group")
            if not size.isdigit():
                raise DQError(f"spec {text!r}: write the group size as group64")
            # 16-bit scales: at one scale per 32..128 elements the scale's own rounding (2^-11) is far below the step.
            return cls(name, "group", int(size), scale_format="fp16")
        return cls(name, strategy or "tensor", dynamic=strategy == "token")

    def __str__(self) -> str:
        for named in SPECS:
            if named.spec == self:
                return named.name
        return f"{self.format}/{self.strategy}{self.group_size or ''}"

    def with_(self, **changes: Any) -> QuantSpec:
        return replace(self, **changes)


@dataclass(frozen=True)
class NamedSpec:
    """A `QuantSpec` users know by one word."""

    name: str
    spec: QuantSpec


SPECS: Registry[NamedSpec] = Registry("spec", "dq.formats")
