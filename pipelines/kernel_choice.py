"""Which kernel would run every layer of a dq checkpoint, told from its config and the shapes of its tensors."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import lru_cache

import torch

from dq.kernels.library import as_on
from dq.linear import LinearConfig, QuantizedLinear
from dq.pipelines.contents import Contents, Header
from dq.registry import DQError


@dataclass(frozen=True)
class Machine:
    """Where layers would run.

    Attributes:
        device: `cpu` or `cuda`.
        capability: compute capability of a GPU that need not be here; None is the machine's own.
        dtype: of the inputs.
    """

    device: torch.device
    capability: tuple[int, int] | None = None
    dtype: torch.dtype = torch.bfloat16

    def __str__(self) -> str:
        where = self.device.type
        if self.capability is not None:
            where = f"a GPU of compute capability {self.capability[0]}.{self.capability[1]}"
        return f"{where}, inputs {str(self.dtype).removeprefix('torch.')}"


@dataclass(frozen=True)
class Kernel:
    """What would run a layer.

    Attributes:
        name: of the backend.
        grid: of the activations that it really applies.
        in_torch: why plain torch, not a kernel, prepares the input; "" if that is not so.
        refused: backend that would come first -> why not.
    """

    name: str
    grid: str
    in_torch: str = ""
    refused: dict[str, str] = field(default_factory=dict, hash=False)

    def __str__(self) -> str:
        return f"{self.name}, activations {self.grid}" + f"; input by torch: {self.in_torch}" * bool(self.in_torch)


def capability(text: str) -> tuple[int, int]:
    """(major, minor) of `9.0`; DQError for anything else."""
    major, dot, minor = str(text).partition(".")
    if not (dot and major.isdigit() and minor.isdigit()):
        raise DQError(f"a compute capability is written as 9.0, got {text!r} (8.0 A100, 8.9 Ada, 9.0 H100)")
    return int(major), int(minor)


def kernels(contents: Contents, machine: Machine) -> dict[str, Kernel]:
    """name -> kernel of every layer of a dq checkpoint; no weight is read."""
    config = contents.quantization
    kinds = [LinearConfig.from_dict(k) for k in config["kinds"]]
    found, seen = {}, lru_cache(maxsize=None)(lambda i, n, k, bias: _kernel(kinds[i], n, k, bias, machine))
    with as_on(machine.capability):
        for name, entry in config["layers"].items():
            own = contents.owners[name]
            n, k = own["qweight"].shape[0], width(kinds[entry["kind"]], own)
            found[name] = seen(entry["kind"], n, k, "bias" in own)
    return found


def width(config: LinearConfig, own: dict[str, Header]) -> int:
    """K of a layer, the largest that its tensors allow: rows are padded to whole groups and bytes.

    Raises:
        DQError: none fits.
    """
    rows, packed = own["qweight"].shape
    fmt = config.weights.fmt
    most = (packed * 8 // fmt.bits if fmt.bits < 8 else packed) - config.extra
    for k in range(most, max(0, most - (config.weights.columns or 1) - fmt.cell), -1):
        shapes = config.tensors(rows, k)
        if all(name in own and own[name].shape == tuple(shape) for name, (shape, _) in shapes.items()):
            return k
    raise DQError("the shapes of its tensors do not fit its config")


def _kernel(config: LinearConfig, n: int, k: int, bias: bool, machine: Machine) -> Kernel:
    layer = QuantizedLinear(k, n, config, bias=bias, dtype=machine.dtype, device="meta")
    choice, params = layer.choose(machine.device, machine.dtype), layer.params
    return Kernel(choice.backend.name, choice.backend.grid(params), choice.backend.in_torch(params), choice.refused)
