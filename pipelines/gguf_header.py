"""The header of a GGUF file: metadata and tensors, without any package. Source: the GGUF specification, version 3."""

from __future__ import annotations

import struct
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any, BinaryIO

from dq.registry import DQError

# ggml type -> name, values in a block, bytes of a block.
TYPES = {
    0: ("F32", 1, 4), 1: ("F16", 1, 2), 2: ("Q4_0", 32, 18), 3: ("Q4_1", 32, 20), 6: ("Q5_0", 32, 22),
    7: ("Q5_1", 32, 24), 8: ("Q8_0", 32, 34), 9: ("Q8_1", 32, 36), 10: ("Q2_K", 256, 84), 11: ("Q3_K", 256, 110),
    12: ("Q4_K", 256, 144), 13: ("Q5_K", 256, 176), 14: ("Q6_K", 256, 210), 15: ("Q8_K", 256, 292),
    16: ("IQ2_XXS", 256, 66), 17: ("IQ2_XS", 256, 74), 18: ("IQ3_XXS", 256, 98), 19: ("IQ1_S", 256, 50),
    20: ("IQ4_NL", 32, 18), 21: ("IQ3_S", 256, 110), 22: ("IQ2_S", 256, 82), 23: ("IQ4_XS", 256, 136),
    24: ("I8", 1, 1), 25: ("I16", 1, 2), 26: ("I32", 1, 4), 27: ("I64", 1, 8), 28: ("F64", 1, 8),
    29: ("IQ1_M", 256, 56), 30: ("BF16", 1, 2), 34: ("TQ1_0", 256, 54), 35: ("TQ2_0", 256, 66), 39: ("MXFP4", 32, 17),
}  # fmt: skip
_NUMBERS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_STRING, _ARRAY = 8, 9
_MOST = 1 << 26


@dataclass(frozen=True)
class Entry:
    """One tensor: shape with the fastest axis last, ggml type, bytes."""

    shape: tuple[int, ...]
    kind: str
    nbytes: int


def read(path: Path) -> tuple[dict[str, Any], dict[str, Entry]]:
    """(metadata, tensors) of a file. Long lists of the metadata are left out.

    Raises:
        DQError: no GGUF file, another version, an unknown type, a damaged header, or fewer bytes than it says.
    """
    with open(path, "rb") as file:
        if file.read(4) != b"GGUF":
            raise DQError(f"{path.name} is no GGUF file")
        try:
            return _header(file, path)
        except DQError:
            raise
        except (struct.error, LookupError, ArithmeticError, ValueError, TypeError, RecursionError) as error:
            raise DQError(f"{path.name} is damaged or truncated: its header cannot be read ({error})") from error


def _header(file: BinaryIO, path: Path) -> tuple[dict[str, Any], dict[str, Entry]]:
    version, count, pairs = _take(file, "<I"), _take(file, "<Q"), _take(file, "<Q")
    if version not in (2, 3):
        raise DQError(f"{path.name} has GGUF version {version}, only 2 and 3 are read")
    metadata = {_text(file): _value(file, _take(file, "<I")) for _ in _counted(pairs)}
    tensors, end = {}, 0
    for _ in _counted(count):
        name = _text(file)
        shape = tuple(reversed([_take(file, "<Q") for _ in _counted(_take(file, "<I"))]))
        number, offset = _take(file, "<I"), _take(file, "<Q")
        if number not in TYPES:
            raise DQError(f"{path.name}: {name} has the unknown ggml type {number}")
        kind, block, size = TYPES[number]
        tensors[name] = Entry(shape, kind, prod(shape) // block * size)
        end = max(end, offset + tensors[name].nbytes)
    start = file.tell() + -file.tell() % int(metadata.get("general.alignment", 32))
    if path.stat().st_size < start + end:
        raise DQError(f"{path.name} is truncated: its header describes {start + end} bytes")
    return metadata, tensors


def _take(file: BinaryIO, form: str) -> Any:
    data = file.read(struct.calcsize(form))
    return struct.unpack(form, data)[0]


def _counted(n: int) -> range:
    """As many turns as a header says; no file of this kind has more than 2^26 of anything.

    Raises:
        ValueError: more.
    """
    if n > _MOST:
        raise ValueError(f"it counts {n} entries")
    return range(n)


def _text(file: BinaryIO) -> str:
    return file.read(len(_counted(_take(file, "<Q")))).decode("utf-8", "replace")


def _value(file: BinaryIO, kind: int) -> Any:
    if kind == _STRING:
        return _text(file)
    if kind != _ARRAY:
        return _take(file, f"<{_NUMBERS[kind]}")
    kind, count = _take(file, "<I"), _take(file, "<Q")
    values = [_value(file, kind) for _ in _counted(count)]
    return values if count <= 16 else f"{count} values"
