"""Keys or values of one layer as packed codes: [batch, heads, tokens, head_dim] that grows, shrinks and is read back.

Two codecs. `Scaled` is a `QuantSpec` over rows of head_dim: a scale per token and head (FP8, INT8), or blocks of 16
(NVFP4). `Affine` is asymmetric without an integer zero point: a group is coded from its minimum,

    scale = (max - min) / (2^b - 1)      q = clip(rne((x - min) / scale), 0, 2^b - 1)      x ~ q * scale + min

with `scale` and `min` in 16 bits. Keys have channels that stay on one side of zero; a range widened to contain zero, as
an integer zero point asks for, would waste most of two bits there.
Source: KIVI (arXiv 2402.02750, section 3.2): keys per channel in groups of tokens, values per token.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from dq.qtensor import QTensor, choose_scale, encode
from dq.registry import DQError, suggest
from dq.spec import FORMATS, QuantSpec

Parts = dict[str, Tensor]


def _bytes(t: Tensor) -> Tensor:
    """Float8 as bytes: concatenation and indexing of those exist on every device."""
    return t.view(torch.uint8) if t.dtype.is_floating_point and t.dtype.itemsize == 1 else t


@dataclass(frozen=True)
class Scaled:
    """Rows on the grid of a spec; every row (token and head) has its own scales.

    NaN and Inf of a row stay in that row: nothing is checked here, a check would wait for the GPU at every token.
    """

    spec: QuantSpec
    group: int = 1

    def encode(self, x: Tensor) -> Parts:
        """x [rows, width] -> tensors with `rows` rows."""
        q = encode(x, choose_scale(x, self.spec), self.spec)
        found = {"codes": q.codes, "scale": q.scale, "global": q.global_scale, "zero": q.zero_point}
        return {name: _bytes(t) for name, t in found.items() if t is not None}

    def decode(self, parts: Parts, width: int) -> Tensor:
        """The inverse of `encode`, float32 [rows, width]."""
        codes, scale = parts["codes"].view(self.spec.fmt.storage), parts["scale"].view(self.spec.scale_dtype)
        shape = (codes.shape[0], width)
        return QTensor(codes, scale, parts.get("global"), self.spec, shape, parts.get("zero")).dequantize()


@dataclass(frozen=True)
class Affine:
    """Asymmetric integers of `bits` bits in groups of `group` elements (0: a row), coded from the group's minimum."""

    bits: int
    group: int = 0

    def _size(self, width: int) -> int:
        return self.group or width

    def encode(self, x: Tensor) -> Parts:
        """x [rows, width] -> tensors with `rows` rows; a last group that is not full repeats its last element."""
        fmt, size = FORMATS.get(f"uint{self.bits}"), self._size(x.shape[1])
        kind = x.dtype if x.dtype in (torch.float16, torch.bfloat16) else torch.bfloat16
        missing = -x.shape[1] % size
        if missing:
            x = torch.cat([x, x[:, -1:].expand(-1, missing)], 1)
        blocks = x.to(torch.float32).unflatten(1, (-1, size))
        low, high = blocks.aminmax(dim=-1)
        low = low.to(kind)
        # From the stored minimum, so that its rounding does not cut the top of the range off.
        scale = ((high - low.to(torch.float32)) / fmt.max).to(kind)
        step = torch.where(scale > 0, scale, 1).to(torch.float32)
        codes = fmt.encode((blocks - low.to(torch.float32)[..., None]) / step[..., None])
        return {"codes": fmt.pack(codes.flatten(1)), "scale": scale, "low": low}

    def decode(self, parts: Parts, width: int) -> Tensor:
        """The inverse of `encode`, float32 [rows, width]."""
        fmt, size = FORMATS.get(f"uint{self.bits}"), self._size(width)
        codes = fmt.unpack_values(parts["codes"], width + -width % size).unflatten(1, (-1, size))
        scale, low = parts["scale"].to(torch.float32), parts["low"].to(torch.float32)
        return (codes * scale[..., None] + low[..., None]).flatten(1)[:, :width]


class Store:
    """What is held of keys or values: codes and scales, oldest token first.

    Args:
        codec: how rows are coded.
        channels: False, rows are tokens and groups lie along head_dim; True, rows are channels and groups of
            `codec.group` tokens lie along the tokens, so that only whole groups go in.
    """

    def __init__(self, codec: Scaled | Affine, channels: bool = False):
        self.codec, self.channels = codec, channels
        self.parts: Parts = {}
        self.length, self.width = 0, 0

    @property
    def unit(self) -> int:
        """Tokens that can only come and go together."""
        return self.codec.group if self.channels else 1

    def append(self, x: Tensor) -> None:
        """Codes x [batch, heads, tokens, head_dim]; tokens a multiple of `unit`."""
        self.width = x.shape[-1]
        if not x.shape[-2]:
            return
        rows = x.mT if self.channels else x
        new = self.codec.encode(rows.reshape(-1, rows.shape[-1]))
        new = {name: t.unflatten(0, rows.shape[:-1]) for name, t in new.items()}
        axis = -1 if self.channels else -2
        self.parts = {n: torch.cat([self.parts[n], t], axis) if self.parts else t for n, t in new.items()}
        self.length += x.shape[-2]

    def read(self, start: int = 0, end: int | None = None) -> Tensor:
        """Tokens [start, end), multiples of `unit`, as float32 [batch, heads, tokens, head_dim]."""
        end = self.length if end is None else end
        parts = {name: self._cut(t, start, end) for name, t in self.parts.items()}
        lead = parts["codes"].shape[:-1]
        rows = self.codec.decode({n: t.flatten(0, -2) for n, t in parts.items()},
                                 end - start if self.channels else self.width)  # fmt: skip
        rows = rows.unflatten(0, lead)
        return rows.mT if self.channels else rows

    def keep(self, start: int, end: int) -> None:
        """Drops all tokens but [start, end), multiples of `unit`; the memory of the others is given back."""
        if (start, end) == (0, self.length):
            return
        self.parts = {n: self._cut(t, start, end).clone() for n, t in self.parts.items()} if end > start else {}
        self.length = max(end - start, 0)

    def _cut(self, t: Tensor, start: int, end: int) -> Tensor:
        if not self.channels:
            return t[..., start:end, :]
        per = t.shape[-1] * self.unit // self.length  # elements of this tensor per group of tokens
        return t[..., start // self.unit * per : end // self.unit * per]

    def map(self, fn: Callable[[Tensor], Tensor]) -> None:
        """Applies `fn` to every tensor held; the batch is axis 0 of each."""
        self.parts = {name: fn(t) for name, t in self.parts.items()}

    def tensors(self) -> list[Tensor]:
        return list(self.parts.values())


WINDOW, GROUP = 128, 32  # tokens; KIVI's


@dataclass(frozen=True)
class KVFormat:
    """How keys and values rest.

    Attributes:
        name: what users call it.
        keys, values: codecs; None keeps 16 bits.
        channels: keys are coded per channel in groups of tokens, not per token.
        window: newest tokens that stay in 16 bits.
        rotated: both go through a Hadamard matrix over head_dim first.
        description: for lists.
    """

    name: str
    keys: Scaled | Affine | None
    values: Scaled | Affine | None
    channels: bool = False
    window: int = 0
    rotated: bool = False
    description: str = ""


_FP8 = Scaled(QuantSpec("fp8_e4m3", "token", scale_format="bf16", dynamic=True))
_INT8 = Scaled(QuantSpec("int8", "token", dynamic=True))
_INT4, _INT2, _ROW = Affine(4, GROUP), Affine(2, GROUP), Affine(4)
_NVFP4 = Scaled(QuantSpec.parse("nvfp4-token"))
_FORMATS = (
    KVFormat("16-bit", None, None, description="nothing is rounded; the same bits as transformers' own cache"),
    KVFormat("fp8", _FP8, _FP8, description="E4M3, a scale per token and head"),
    KVFormat("int8", _INT8, _INT8, description="INT8, a scale per token and head"),
    KVFormat("int4", _INT4, _INT4, description="asymmetric INT4, per token in groups of 32"),
    KVFormat("int4-kivi", _INT4, _INT4, True, WINDOW, description="KIVI: INT4 keys per channel, values per token"),
    KVFormat("int2-kivi", _INT2, _INT2, True, WINDOW, description="KIVI: 2-bit keys per channel, values per token"),
    KVFormat("int4-quarot", _ROW, _ROW, rotated=True, description="QuaRot: rotated, INT4 per token and head"),
    KVFormat("nvfp4", _NVFP4, _NVFP4, description="NVFP4, blocks of 16 along head_dim"),
    KVFormat("nvfp4-rotated", _NVFP4, _NVFP4, rotated=True, description="rotated, then NVFP4"),
)
KV_FORMATS = {f.name: f for f in _FORMATS}


def kv_format(name: str | KVFormat) -> KVFormat:
    """The format of a name; raises DQError with near names for an unknown one."""
    if isinstance(name, KVFormat):
        return name
    if name not in KV_FORMATS:
        raise DQError(f"unknown KV cache format {name!r}{suggest(str(name), KV_FORMATS)}")
    return KV_FORMATS[name]
