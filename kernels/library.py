"""Triton launches as torch operators `dq::...`, so that `torch.compile(fullgraph=True)` and CUDA graphs take them.

Registered through `torch.library.Library`: a call costs a few microseconds of host time, a third of `custom_op`'s.
"""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

_LIBRARY = torch.library.Library("dq", "FRAGMENT")
_COMPILED: dict[tuple, tuple] = {}
_MOST = 8192  # launches remembered
_COUNTERS: dict[tuple[torch.device, int], Tensor] = {}
_STOCK: dict[torch.device, Tensor] = {}


def interpreted() -> bool:
    """Whether Triton runs its kernels in its interpreter, on CPU tensors (TRITON_INTERPRET=1)."""
    return os.environ.get("TRITON_INTERPRET") == "1"


@lru_cache(maxsize=1)
def has_triton() -> bool:
    """Whether Triton is installed; it is not imported."""
    return importlib.util.find_spec("triton") is not None


@torch.compiler.assume_constant_result  # a layer may choose its backend while it is traced
def why_not(device: torch.device, least: tuple[int, int] = (8, 0), runs_on_cpu: bool = False) -> str:
    """Why Triton kernels cannot run on this device, "" if they can.

    Args:
        least: compute capability that the kernels need.
        runs_on_cpu: also accept CPU tensors in Triton's interpreter.
    """
    if device.type != "cuda":
        return "" if runs_on_cpu and interpreted() and device.type == "cpu" else f"the layer is on {device.type}"
    if _pretended is None and not has_triton():
        return "triton is not installed"
    if capability(device) < least:
        return f"needs compute capability {least[0]}.{least[1]}, this is {'.'.join(map(str, capability(device)))}"
    return ""


_pretended: tuple[int, int] | None = None


@contextmanager
def as_on(pretended: tuple[int, int] | None) -> Iterator[None]:
    """Inside, backends are chosen as on a GPU of this compute capability that has Triton; None changes nothing."""
    global _pretended
    before, _pretended = _pretended, pretended
    try:
        yield
    finally:
        _pretended = before


@lru_cache(maxsize=8)
def _capability(index: int) -> tuple[int, int]:
    return torch.cuda.get_device_capability(index)


def capability(device: torch.device) -> tuple[int, int]:
    """(major, minor) of a CUDA device; (0, 0) of any other."""
    if device.type != "cuda":
        return (0, 0)
    if _pretended is not None:
        return _pretended
    return _capability(torch.cuda.current_device() if device.index is None else device.index)


def native_fp8(device: torch.device) -> bool:
    """Whether a cast to E4M3 is one correctly rounded instruction; else kernels do it by integer arithmetic (on Ada
    Triton's cast goes through FP16, truncated)."""
    return capability(device) >= (9, 0)


@lru_cache(maxsize=1)
def reversed_lanes() -> bool:
    """Whether this version of Triton gives lanes the last of equally good dimensions first; before 3.7, the first."""
    import triton

    return tuple(int(part) for part in triton.__version__.split(".")[:2]) >= (3, 7)


@lru_cache(maxsize=8)
def multiprocessors(index: int | None) -> int:
    """Streaming multiprocessors of a CUDA device; a small number for the interpreter, where programs run in turn."""
    return 2 if index is None else torch.cuda.get_device_properties(index).multi_processor_count


def counters(device: torch.device, size: int) -> Tensor:
    """int32 zeros, which every launch leaves at zero; one set per stream, so that launches side by side do not meet.

    A captured launch has a set of its own: graphs may be replayed side by side, in any order, or never.
    """
    on_gpu = device.type == "cuda"
    if on_gpu and torch.cuda.is_current_stream_capturing():
        return _zeros(device, size, True)
    key = (device, torch.cuda.current_stream(device).cuda_stream if on_gpu else 0)
    found = _COUNTERS.get(key)
    if found is None or found.numel() < size:
        found = _COUNTERS[key] = _zeros(device, max(4096, size), False)
    return found


def _zeros(device: torch.device, size: int, capturing: bool) -> Tensor:
    """int32 zeros that nobody else has, 16 bytes aligned, from a stock. Where a capture finds none, it makes zeros that
    the graph fills anew whenever it is replayed; nobody else may have these, so they are not kept."""
    stock = _STOCK.get(device)
    if stock is None or stock.numel() < size:
        stock = torch.zeros(size if capturing else max(1 << 20, size), dtype=torch.int32, device=device)
        if capturing:
            return stock
    _STOCK[device] = stock[size + -size % 4 :]
    return stock[:size]


def launch(kernel: Any, grid: tuple[int, ...], arguments: tuple, constants: dict[str, Any]) -> None:
    """`kernel[grid](*arguments, **constants)` on the device of the first argument.

    Triton looks at every argument of every call, which takes the host longer than a GPU takes for a small layer. Here
    a launch that was seen before, with the same numbers and tensors of the same dtypes and alignment, goes straight to
    the compiled kernel.

    Args:
        arguments: tensors and numbers, those of the kernel that are not compile-time constants.
        constants: the rest, and options of the compiler; one object for the same content, e.g. from an `lru_cache`.
    """
    device = arguments[0].device
    if device.type != "cuda":
        kernel[grid](*arguments, **constants)
        return
    if device.index != torch.cuda.current_device():
        with torch.cuda.device(device):
            launch(kernel, grid, arguments, constants)
        return
    kinds = [(a.dtype, a.data_ptr() & 15) if isinstance(a, Tensor) else a for a in arguments]
    key = (id(constants), device.index, *kinds)
    found = _COMPILED.get(key)
    if found is None:
        compiled = kernel[grid](*arguments, **constants)
        rest = tuple(constants[name] for name in kernel.arg_names[len(arguments) :])
        if len(_COMPILED) >= _MOST:
            _COMPILED.clear()
        _COMPILED[key] = (compiled, rest, constants)  # kept alive: its id is part of the key
        return
    compiled, rest, _ = found
    compiled[(*grid, 1, 1)[:3]](*arguments, *rest)


def define(
    schema: str, run: Callable[..., Any], fake: Callable[..., Any], reference: Callable[..., Any]
) -> Callable[..., Any]:
    """Defines `dq::<schema>` and returns it as a callable.

    Args:
        run: launches the kernel, on CUDA tensors and, in the interpreter, on CPU tensors.
        fake: shapes and dtypes of the result.
        reference: plain torch, on CPU tensors outside the interpreter.
    """
    name = schema.partition("(")[0]
    if not hasattr(torch.ops.dq, name):  # a module that is run again finds its operator defined

        def on_cpu(*args):
            return run(*args) if interpreted() else reference(*args)

        _LIBRARY.define(schema, tags=(torch.Tag.pt2_compliant_tag,))
        _LIBRARY.impl(name, run, "CUDA")
        _LIBRARY.impl(name, on_cpu, "CPU")
        torch.library.register_fake(f"dq::{name}", fake, lib=_LIBRARY)
    return getattr(torch.ops.dq, name).default
