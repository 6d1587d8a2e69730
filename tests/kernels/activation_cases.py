"""The activation kernel against its definition; a script: Triton reads TRITON_INTERPRET when kernels are defined.

TRITON_INTERPRET=1 python activation_cases.py cpu        python activation_cases.py cuda 3 8 (every eighth case)
"""

import sys
from collections.abc import Iterator
from typing import Any

import torch

from dq.kernels.activation import api
from dq.kernels.activation.front import Front
from dq.spec import QuantSpec
from dq.transforms import Step

GRIDS = ("fp8_e4m3/token", "int8/token", "int4/token", "int4/group64/fp32", "nvfp4-token", "mxfp4", "mxfp8@even")
GRIDS += ("fp8-block-token", "int4/group32/fp16", "mxfp4@rceil", "nvfp4-token@4over6", "nvfp4-token@sweep")
Case = tuple[str, torch.Tensor, list[Step], str, str, dict[str, Any]]
G = torch.Generator().manual_seed(0)


def values(rows: int, width: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    """Rows of different size with outliers, one of zeros among them."""
    x = torch.randn(rows, width, generator=G) * torch.randn(rows, 1, generator=G).exp()
    x[:, :: max(1, width // 5)] *= 20
    if rows > 2:
        x[1] = 0
    return x.to(dtype)


def smooth(width: int) -> Step:
    return Step("smooth", {"factor": torch.rand(width, generator=G) + 0.5})


def turned(size: int) -> Step:
    return Step("rotate", params={"size": size})


def targets(grid: str) -> tuple[str, ...]:
    more = {"int8/token": ("int8",), "int4/token": ("e4m3", "int8", "packed")}
    more |= dict.fromkeys(("int4/group64/fp32", "int4/group32/fp16"), ("e4m3", "int8"))
    more |= dict.fromkeys(("nvfp4-token", "mxfp4", "mxfp4@rceil", *GRIDS[-2:]), ("e4m3", "packed"))
    return more.get(grid, ("e4m3",))


def plain(rows: tuple[int, ...], widths: tuple[int, ...]) -> Iterator[Case]:
    """Every grid, unrotated and rotated; dtypes take turns."""
    dtypes = (torch.bfloat16, torch.float16, torch.float32)
    for i, grid in enumerate(GRIDS):
        for j, width in enumerate(widths if i in (0, 4) else widths[i % 3 :: 2]):
            x = values(rows[(i + j) % len(rows)], width, dtypes[(i + j) % 3])
            for target in targets(grid):
                yield f"{grid} {tuple(x.shape)} {target}", x, [], grid, target, {}
                size = next((s for s in (256, 64, 16) if width % s == 0), 0)
                if size:
                    yield (
                        f"{grid} {tuple(x.shape)} {target} H{size}",
                        x,
                        [smooth(width), turned(size)],
                        grid,
                        target,
                        {},
                    )


def columns(rows: int, width: int) -> Iterator[Case]:
    """Columns behind K: residuals, low rank, padding."""
    x, t = values(rows, width), torch.randn(rows, 5, generator=G).bfloat16()
    for grid in ("fp8_e4m3/token", "int4/token", "nvfp4-token", "mxfp4"):
        for size in (1e-2, 1e3):
            yield f"{grid} low rank {size}", x, [], grid, "e4m3", dict(extra=t * size, width=width + 32)
    for dual in (False, True):
        arguments = dict(residual=32, dual=dual, extra=t, width=width + 128)
        yield f"residual {dual}", x, [], "nvfp4-token", "e4m3", arguments
        arguments = dict(residual=24, dual=dual, extra=t)
        yield f"residual {dual} FP8", x, [], "fp8_e4m3/token", "e4m3", arguments
        arguments = dict(residual=32, dual=dual, extra=t, width=width + 128)
        yield f"residual {dual} H16", x, [smooth(width), turned(16)], "nvfp4-token", "e4m3", arguments
        arguments = dict(residual=32, dual=dual, width=width)
        yield f"residual {dual} packed", x, [], "nvfp4-token", "packed", arguments
        for grid in GRIDS[-2:]:
            yield f"residual {dual} packed {grid}", x, [], grid, "packed", arguments


def fronts(rows: int, width: int) -> Iterator[Case]:
    """Norms, adaLN, activations with and without a gate."""
    x, gate = values(rows, width), torch.randn(rows, width, generator=G).bfloat16()
    v = [torch.randn(width, generator=G) for _ in range(2)]
    b = [torch.randn(2, width, generator=G).bfloat16() for _ in range(2)]
    for name, front in (
        ("rmsnorm", Front("rmsnorm", weight=v[0])),
        ("layernorm", Front("layernorm", weight=v[0], bias=v[1], eps=1e-5)),
        ("adaln", Front("layernorm", scale=b[0], shift=b[1])),
        ("gelu", Front("gelu")),
        ("swiglu", Front("silu", gate=gate)),
    ):
        for steps in ([], [smooth(width), turned(16)]):
            yield f"{name} {len(steps)}", x, steps, "fp8_e4m3/token", "e4m3", dict(front=front)


def broken(rows: int, width: int) -> Iterator[Case]:
    """A NaN and infinities, each in a row of its own, in x or in the low-rank columns; rows beside them stay exact."""
    places = [(1, torch.nan), (rows - 2, torch.inf), (rows - 1, -torch.inf)]
    x, t = values(rows, width), torch.randn(rows, 5, generator=G)
    for row, bad in places:
        x[row, 3 * row] = bad
        t[row, row % 5] = bad
    for grid in GRIDS:
        for target in targets(grid):
            yield f"broken {grid} {target}", x, [], grid, target, {}
            yield f"broken {grid} {target} H16", x, [smooth(width), turned(16)], grid, target, {}
    for grid in ("fp8_e4m3/token", "int4/token", "nvfp4-token", "mxfp4"):
        yield f"broken low rank {grid}", values(rows, width), [], grid, "e4m3", dict(extra=t)
    yield "broken residual", x, [], "nvfp4-token", "packed", dict(residual=32)
    yield "broken front", x, [], "int8/token", "int8", dict(front=Front("rmsnorm"))


def cases(device: str) -> Iterator[Case]:
    """All; fewer and smaller ones in the interpreter, which needs 10 ms for a row."""
    on_gpu = device != "cpu"
    sizes = ((1, 7, 17, 127, 300), (3072, 264, 320, 12288, 48, 5000)) if on_gpu else ((1, 7, 3), (264, 512, 48))
    yield from plain(*sizes)
    yield from columns(*((33, 3072) if on_gpu else (4, 320)))
    yield from fronts(*((34, 3072) if on_gpu else (4, 272)))
    yield from broken(*((34, 3072) if on_gpu else (5, 96)))
    x = values(6, 96)
    order = Step("permute", {"order": torch.randperm(96, generator=G)})
    shift = Step("shift", {"shift": torch.randn(96, generator=G)})
    yield "shift, permute", x, [shift, smooth(96), order, turned(16)], "int8/token", "int8", {}
    yield "strided", values(96, 10).t(), [], "int8/token", "int8", {}
    yield "three axes", values(6, 96).reshape(2, 3, 96).transpose(0, 1), [], "nvfp4-token", "e4m3", {}
    yield "every second row", values(12, 96)[::2], [], "nvfp4-token", "e4m3", {}
    yield "no rows", values(0, 96), [turned(16)], "fp8_e4m3/token", "e4m3", {}


def moved(value: Any, device: str) -> Any:
    """Tensors inside steps, fronts and lists on a device."""
    if isinstance(value, torch.Tensor):
        return value.to(device)
    if isinstance(value, Step):
        return Step(value.name, moved(value.tensors, device), value.params)
    if isinstance(value, Front):
        return Front(**moved(value.__dict__, device))
    if isinstance(value, dict):
        return {k: moved(v, device) for k, v in value.items()}
    return [moved(v, device) for v in value] if isinstance(value, list) else value


def difference(case: Case, device: str) -> str:
    """What is wrong with a case, "" if nothing. Bytes are equal where all arithmetic before the rounding is that of the
    definition; rotation, division by a factor and fronts leave an ulp, which turns a rounding here and there."""
    _, x, steps, grid, target, arguments = case
    got = [t.cpu() for t in call(moved(x, device), moved(steps, device), grid, target, moved(arguments, device))]
    kernel = api._activate
    try:
        api._activate = api._reference
        want = call(x, steps, grid, target, arguments)
    finally:
        api._activate = kernel
    for a, b in zip(got, want, strict=True):
        if a.shape != b.shape or a.dtype != b.dtype:
            return f"{a.dtype} {tuple(a.shape)}, not {b.dtype} {tuple(b.shape)}"
    told = (~torch.isfinite(x.reshape(-1, x.shape[-1]))).any(1)
    if "extra" in arguments:
        told |= (~torch.isfinite(arguments["extra"])).any(1)
    for parts, who in ((got, "kernel"), (want, "definition")):
        if not torch.equal(_tells(parts), told):
            return f"rows that are not finite: {_tells(parts).nonzero().flatten().tolist()} by the {who}"
    got, want = ([t[~told] for t in parts] for parts in (got, want))
    exact = not steps and "front" not in arguments
    off = _off(got[1], want[1], exact, QuantSpec.parse(grid).scale_format == "fp16")
    apart = max(_apart(got[0], want[0]), *map(_apart, got[2:], want[2:]), 0.0)
    if not (apart <= (0.0 if exact else 2e-3) and off <= (0.0 if exact else 2e-6)):
        return f"{apart:.1e} of the codes differ, factors by {off:.1e}"
    if target == "packed" or got[1].shape[1] != 1 or not got[0].numel():
        return ""
    a, b = got[0].double() * got[1], want[0].double() * want[1]
    error = float((a - b).norm() / b.norm())
    return "" if error < 3e-2 else f"values apart by {error:.1e}"


def _tells(parts: list[torch.Tensor]) -> torch.Tensor:
    """Rows [M] whose product is not finite, whatever it is with: by a factor, or by the NaN of a shared exponent."""
    codes, factors, *blocks = parts
    told = ~torch.isfinite(factors).all(1)
    return told | (blocks[0] == 255).any(1) if blocks else told


def _off(a: torch.Tensor, b: torch.Tensor, exact: bool, half: bool) -> float:
    """Largest relative difference of factors; where an ulp turns the rounding of a few to FP16, that of the others."""
    off = ((a - b).abs() / b).flatten()
    turned = (off > 2e-6) & (off <= 2.0**-10)
    if half and not exact and float(turned.float().mean()) <= 2e-3:
        off = off[~turned]
    return float(off.max()) if off.numel() else 0.0


def _apart(a: torch.Tensor, b: torch.Tensor) -> float:
    """Share of codes that differ; -0 is 0."""
    return float((a.float() != b.float()).float().mean()) if a.numel() else 0.0


def call(x, steps, grid: str, target: str, arguments: dict[str, Any]) -> tuple[torch.Tensor, ...]:
    """`pack` or `activate`."""
    spec = QuantSpec.parse(grid)
    if target == "packed":
        return api.pack(x, steps, spec, **arguments)
    return api.activate(x, steps, spec, target, **arguments)


if __name__ == "__main__":
    where, first, shares = sys.argv[1], *map(int, sys.argv[2:] or (0, 1))
    problems = [f"{c[0]}: {d}" for c in list(cases(where))[first::shares] if (d := difference(c, where))]
    print("\n".join(problems) or "equal")
    sys.exit(bool(problems))
