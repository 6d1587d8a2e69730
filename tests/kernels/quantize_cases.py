"""Triton's NVFP4 against the torch reference; a script, because Triton reads TRITON_INTERPRET when kernels are defined.

TRITON_INTERPRET=1 python quantize_cases.py cpu        python quantize_cases.py cuda [i n: every n-th case from i on]
"""

import itertools
import sys
from collections.abc import Iterator
from itertools import product

import torch

from dq.qtensor import ACCELERATORS, ROW_KERNELS, choose_scale, encode
from dq.rounding import gptq
from dq.spec import FORMATS, SPECS, QuantSpec

SHAPES = ((5, 5), (3, 40), (33, 264))
NVFP4 = SPECS.get("nvfp4").spec
RULES = (
    NVFP4,
    NVFP4.with_(scale_rule="sweep"),
    NVFP4.with_(scale_rule="sweep", rule_params=(("target", "e4m3"),)),
)

_COUNT, _SHARE = itertools.count(), [0, 1]


def mine() -> bool:
    """Whether the next case belongs to this process: the reference's sweeps take most of the time."""
    return next(_COUNT) % _SHARE[1] == _SHARE[0]


def tensors(shapes: tuple[tuple[int, int], ...]) -> Iterator[tuple[str, torch.Tensor, float | None]]:
    """(name, tensor [N, K] float32, maximum that the second level covers or None)."""
    g = torch.Generator().manual_seed(0)
    for shape in shapes:
        x = torch.randn(shape, generator=g) * torch.randn(shape, generator=g).exp()
        x[0] = 0.0  # blocks of zeros
        yield f"wide {shape}", x, None
        yield f"clipped {shape}", x, 0.5
        halves = torch.randint(-24, 25, shape, generator=g) / 4
        halves[:, ::16] = 6.0
        yield f"ties {shape}", halves, 2688.0  # both scales are 1: quarters lie on the bounds between codes
        for steps in (-3, 1, 5):  # and here a few float32 steps beside them
            yield f"near ties {steps} {shape}", halves, 2688.0 * (1 + steps * 2.0**-23)
    x = torch.randn(8, 64, generator=g)
    for size in (1e30, 1e-30, 1e-38, 2.0**-149):
        yield f"times {size}", x * size, None
    yield "far apart", torch.cat([x * 1e30, x, x * 1e-30, x * 0]), None
    yield "zeros", torch.zeros(2, 32), None
    yield "negative zeros", torch.full((2, 32), -0.0), None
    yield "strided", torch.randn(48, 40, generator=g).t(), None


def specs() -> Iterator[QuantSpec]:
    """Every rule, one rule with a window of its own, and one level instead of two."""
    yield from RULES
    yield NVFP4.with_(scale_rule="sweep", rule_params=(("low", -1), ("high", 3)))
    yield from (r.with_(global_scale=None) for r in RULES)


def cases(device: str) -> Iterator[tuple[str, torch.Tensor, float | None, QuantSpec]]:
    """All tensors, dtypes and specs on a GPU; in the interpreter, which needs 0.1 s for a program, fewer of each."""
    on_gpu = device != "cpu"
    for i, (name, x, top) in enumerate(tensors((*SHAPES, (257, 1040), (1024, 3072)) if on_gpu else SHAPES)):
        for j, dtype in enumerate((torch.bfloat16, torch.float16, torch.float32)):
            weight = x.to(dtype)
            # Triton's interpreter misreads subnormal numbers of BF16.
            misread = not on_gpu and dtype == torch.bfloat16 and 0 < weight.float().abs().max() < 1e-37
            if not torch.isfinite(weight).all() or misread:
                continue
            chosen = list(specs())
            for spec in chosen if on_gpu else dict.fromkeys((chosen[0], chosen[(i + j) % len(chosen)])):
                yield f"{name}, {dtype}, {spec} {spec.rule_params} {spec.global_scale}", weight, top, spec


def differences(device: str) -> list[str]:
    """What differs from the reference, computed on the CPU; empty if nothing does."""
    found, kernel = [], ACCELERATORS.get("nvfp4")
    for name, weight, top, spec in cases(device):
        if not mine():
            continue
        moved, amax = weight.to(device), None if top is None else torch.tensor(top)
        assert not kernel.refuse(moved, spec), kernel.refuse(moved, spec)
        got = kernel.run(moved, spec, amax, "weight")
        want = encode(weight.float(), choose_scale(weight.float(), spec, amax), spec)
        for part in ("codes", "scale", "global_scale"):
            a, b = getattr(got, part), getattr(want, part)
            if (a is None) != (b is None) or (a is not None and not torch.equal(_bytes(a), _bytes(b))):
                found.append(f"{name}: {part}")
    return found


def row_differences(device: str) -> list[str]:
    """The same of rounded values under a second level for every row; one with a NaN is NaN."""
    found, kernel = [], ROW_KERNELS.get("nvfp4-token")
    tokens = SPECS.get("nvfp4-token").spec
    for i, (name, x, _) in enumerate(tensors(SHAPES[:2] if device == "cpu" else (*SHAPES, (257, 1040)))):
        if not torch.isfinite(x).all() or not mine():
            continue
        spec = (tokens, tokens.with_(scale_rule="sweep"))[i % 2]
        amax = x.abs().amax(1) * 0.5 if i % 3 == 1 else None
        assert not kernel.refuse(x.to(device), spec), kernel.refuse(x.to(device), spec)
        want = encode(x, choose_scale(x, spec, amax), spec).dequantize()
        if not torch.equal(kernel.run(x.to(device), spec, None if amax is None else amax.to(device)).cpu(), want):
            found.append(f"values of {name}")
    x = torch.ones(3, 32)
    x[1, 5] = torch.nan
    x[2, 7] = torch.inf
    if torch.isfinite(kernel.run(x.to(device), tokens, None).cpu()).any(1).tolist() != [True, False, False]:
        found.append("NaN")
    return found


def column_differences(device: str) -> list[str]:
    """GPTQ's loop over a block of columns, of one stage and of two, with zero points and without."""
    found, kernel, g = [], gptq.BLOCK_KERNELS.get("columns"), torch.Generator().manual_seed(0)
    names = ("fp4_e2m1", "int4", "uint4", "int4_full", "fp8_e4m3", "fp6_e3m2", "fp6_e2m3", "fp8_e5m2", "int8", "uint8")
    for name, (n, width) in product(names, ((3, 24),) if device == "cpu" else ((5, 16), (577, 64), (1536, 128))):
        fmt, few = FORMATS.get(name), -(-n // 2)
        work, u = torch.randn(n, width, generator=g), torch.randn(width, width, generator=g).triu() * 0.3
        u += 3 * torch.eye(width)
        work[0] *= 1e4  # beyond the grid
        zero = torch.randint(0, int(fmt.max) + 1, (n, width), generator=g).float() if fmt.unsigned else None
        steps = [(s * torch.rand(n, width, generator=g) + 0.05) * 6 / fmt.max for s in (0.5, 0.05)]
        steps[0][few:] = 0.5  # ties
        work[few:] = torch.randint(-20, 21, (n - few, width), generator=g) / 4
        grids, kept = [gptq.Grid(step, zero, fmt) for step in steps], [i % 3 == 0 for i in range(width)]
        for some in (grids[:1], grids):
            if not mine():
                continue
            moved = [gptq.Grid(*(None if t is None else t.to(device) for t in grid[:2]), fmt) for grid in some]
            assert not kernel.refuse(work.to(device), moved), kernel.refuse(work.to(device), moved)
            # On the device of the kernel: what is asked for is the bits of the loop there.
            second = moved[1] if len(moved) > 1 else None
            want = gptq._block(work.to(device, copy=True), u.to(device), moved[0], second, kept, None)
            if not all(map(torch.equal, kernel.run(work.to(device), u.to(device), moved, kept), want)):
                found.append(f"columns {name} {n}x{width}, {len(some)} stages")
    return found


def _bytes(x: torch.Tensor) -> torch.Tensor:
    return x.cpu().view(torch.uint8)


if __name__ == "__main__":
    if sys.argv[2:]:
        _SHARE[:] = map(int, sys.argv[2:4])
    problems = differences(sys.argv[1]) + row_differences(sys.argv[1])
    problems += column_differences(sys.argv[1])
    print("\n".join(problems) or "equal")
    sys.exit(bool(problems))
