"""Every kernel of dq.kernels.gemm against its reference, and every backend against the definition in float64.

A script, because Triton reads TRITON_INTERPRET when kernels are defined:
TRITON_INTERPRET=1 python gemm_cases.py cpu        python gemm_cases.py cuda 0 8   (the first of 8 shares of the work)
"""

import itertools
import sys
from collections.abc import Iterator
from dataclasses import replace

import torch

from dq.kernels.gemm import block_scaled, expand, gemm, gemv, layout
from dq.linear import QuantizedLinear
from dq.ops import BACKENDS, LinearParams, pre_quantized
from dq.qtensor import fake_quantize, quantize
from dq.spec import SPECS, QuantSpec
from dq.transforms import Step, apply_steps

E4M3 = torch.float8_e4m3fn
FOUR = ("nvfp4", "int4/group64", "int4/group128", "int4/channel", "int4/tensor", "mxfp4", "nvfp4-token")
WEIGHT_ONLY = (
    *FOUR,
    "uint4/group64",
    "uint4/group128",
    "int4/group16",
    "int8/channel",
    "int8/group64",
    "fp8_e4m3/channel",
    "fp8-block",
    "mxfp8",
)
LAYERS = (
    ("fp8_e4m3/channel", "fp8_e4m3/token"), ("fp8_e4m3/channel", "fp8_e4m3/tensor"),
    ("int8/channel", "int8/token"), ("int4/channel", "int4/token"),
    ("int4/channel", "int8/token"), ("int4/group64", "int4/group64/fp32"), ("int4/group64", "int8/token"),
    ("nvfp4", "nvfp4-token"), ("mxfp4", "mxfp4"), ("mxfp8", "mxfp8"), ("fp8-block", "fp8-block-token"),
    ("uint4/group64", None), ("int4/group64", None), ("int4/group128", None), ("nvfp4", None),
    ("fp8_e4m3/channel", None),
)  # fmt: skip
# What E4M3 loses of 4-bit values times a block scale: 2^-4 / sqrt(12) or a little more, of each side.
_SHARE, _COUNT = [0, 1], itertools.count()
LEVEL = {"expand-fp8": 0.04, "expand-fp8-faithful": 0.05}


def mine() -> bool:
    """Whether the next piece of work belongs to this process: compilation takes most of the time on a GPU."""
    return next(_COUNT) % _SHARE[1] == _SHARE[0]


def sample(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed + sum(shape)))


def error(y: torch.Tensor, want: torch.Tensor) -> float:
    """Relative error in float64; infinite where anything is not finite."""
    y, want = y.cpu().to(torch.float64), want.cpu().to(torch.float64)
    return float((y - want).norm() / want.norm().clamp(min=1e-30)) if bool(torch.isfinite(y).all()) else float("inf")


def _same(a: torch.Tensor, b: torch.Tensor) -> bool:
    a, b = a.cpu(), b.cpu()
    return torch.equal(a.view(torch.uint8), b.view(torch.uint8)) if a.element_size() == 1 else torch.equal(a, b)


def expansions(device: str) -> Iterator[str]:
    """E4M3 and INT8 bit for bit; FP16 too (the interpreter truncates where it should round to BF16)."""
    shapes = ((17, 96), (5, 130), (6, 1144)) + (() if device == "cpu" else ((300, 3072), (33, 15360)))
    for text in (*FOUR, "int4/group64/fp32", "uint4/group64"):
        for n, k in shapes:
            if not mine():
                continue
            dense = sample(n, k) * 1e-4
            dense[3] *= 1e-28 if text.endswith("fp32") else 1.0  # and one near the least scale
            dense[1, : k // 2], dense[2] = 0.0, 0.0  # groups and a row of zeros, whose scale is 1
            weight = quantize(dense, QuantSpec.parse(text))
            for rank in (0, 5):
                up = (sample(n, rank) * 3).bfloat16() if rank else None
                width = k + 3 * rank + (-(k + 3 * rank) % 16)
                for dtype in (E4M3, torch.float16, torch.int8):
                    if dtype != E4M3 and (rank or (dtype == torch.int8 and "int4" not in text)):
                        continue
                    if "uint4" in text and dtype != torch.float16:
                        continue
                    lay, (codes, scale, unit) = layout.layout_of(weight.spec), layout.parts(weight)
                    rest = (lay.kind, lay.group, lay.rows, k, width if dtype == E4M3 else k, dtype)
                    want = expand._reference(codes, scale, unit, up, *rest)
                    moved = [None if t is None else t.to(device) for t in (codes, scale, unit, up)]
                    got = expand._launch(*moved, *rest)
                    if not _same(got[0], want[0]) or (dtype == E4M3 and not torch.equal(got[1].cpu(), want[1])):
                        yield f"expand {text} {n}x{k} rank {rank} {dtype}"


def few_rows(device: str) -> Iterator[str]:
    shapes = ((17, 192), (40, 330)) if device == "cpu" else ((17, 192), (40, 330), (1024, 1024), (96, 14336))
    for i, text in enumerate(WEIGHT_ONLY):
        for n, k in shapes:
            if not mine():
                continue
            weight, bias = quantize(sample(n, k) * 0.05, QuantSpec.parse(text)), sample(n)
            there = on_device(weight, device)
            for m in (1, 7, 16) if device != "cpu" else ((1, 7, 16)[i % 3],):
                for dtype in (torch.float16, torch.bfloat16) if device != "cpu" or k == 192 else (torch.float16,):
                    x = sample(m, k).to(dtype)
                    want = x.double() @ weight.dequantize().double().T + bias.double()
                    y = gemv.weight_only(x.to(device), there, bias.to(device))
                    y2 = gemv.weight_only(x.to(device), there, bias.to(device))
                    level = 8e-3 if (device == "cpu" and dtype == torch.bfloat16) else 3e-3
                    if not error(y, want) < level or not torch.equal(y, y2):
                        yield f"weight_only {text} {n}x{k} {m} rows {dtype}: {error(y, want):.2e}"


def one_row(device: str) -> Iterator[str]:
    """A row of x by itself, in both orders of its loads; K of whole steps, and one that ends within a piece."""
    shapes = (
        ((9, 1024), (11, 592)) if device == "cpu" else ((9, 1024), (11, 592), (4096, 4096), (100, 14336), (14336, 4096))
    )
    for i, text in enumerate((*FOUR, "uint4/group64", "uint4/group128", "int4/group256")):
        for j, (n, k) in enumerate(shapes):
            if not mine():
                continue
            dtype, reverse = (torch.float16, torch.bfloat16)[(i + j) % 2], i % 2 == 0
            weight, bias, x = quantize(sample(n, k) * 0.05, QuantSpec.parse(text)), sample(n), sample(1, k).to(dtype)
            own = dict(gemv._habits())
            if device == "cpu":
                gemv._habits().update(REVERSE=reverse)
                gemv._row_plan.cache_clear()
            want = x.double() @ weight.dequantize().double().T + bias.double()
            lay, (codes, scale, _) = layout.layout_of(weight.spec), layout.parts(weight)
            known = gemv._one_row(x, codes, scale, lay, scale.shape[1])
            y = gemv.weight_only(x.to(device), on_device(weight, device), bias.to(device))
            gemv._habits().update(own)
            level = 8e-3 if device == "cpu" and dtype == torch.bfloat16 else 3e-3
            if (not known and text != "mxfp4") or not error(y, want) < level:
                yield f"one row {text} {n}x{k} {dtype}: {known} {error(y, want):.2e}"


def on_device(weight, device: str):
    """A QTensor on another device."""
    parts = {n: getattr(weight, n) for n in ("codes", "scale", "global_scale", "zero_point")}
    return replace(weight, **{n: None if t is None else t.to(device) for n, t in parts.items()})


def products(device: str) -> Iterator[str]:
    """INT8 and FP8, with one scale or groups, over odd sizes."""
    sizes = ((17, 20, 96), (5, 33, 200)) if device == "cpu" else ((1, 33, 200), (127, 640, 3072), (300, 1040, 520))
    for m, n, k in sizes:
        for dtype in (torch.int8, E4M3):
            for group, rows in ((0, 1), (64, 1), (128, 128)):
                if not mine():
                    continue
                a, b = (sample(r, k, seed=r) * 40 for r in (m, n))
                a, b = (
                    t.round().clamp(-127, 127).to(torch.int8) if dtype == torch.int8 else t.to(E4M3) for t in (a, b)
                )
                groups = -(-k // group) if group else 1
                sa, sb, bias = sample(m, groups).abs(), sample(-(-n // rows), groups).abs(), sample(n)
                low, up = ((None, None), (sample(m, 37).half(), sample(n, 37).half()))[group == 64 or m == 17]
                want = gemm._reference(a, b, sa, sb, bias, low, up, group, rows, torch.float32)
                moved = [None if t is None else t.to(device) for t in (a, b, sa, sb, bias, low, up)]
                y = gemm.gemm(*moved[:5], group, rows, torch.float32, *moved[5:])
                # int32 sums are exact; what is left is the order of float32 sums, and Hopper's short FP8 accumulators.
                if not error(y, want) < (1e-6 if dtype == torch.int8 else 2e-3):
                    yield f"gemm {dtype} {m}x{n}x{k} group {group}: {error(y, want):.2e}"


def block_products(device: str) -> Iterator[str]:
    """K that ends within a step of the kernel, and within a word of 16 bytes; low rank; all kinds of second levels."""
    # Elsewhere the compiler widens MX, but no E4M3 scales.
    native = device == "cpu" or torch.cuda.get_device_capability() >= (10, 0)
    shapes = ((17, 20, 64), (5, 33, 176), (3, 18, 352)) if device == "cpu" else ((17, 200, 512), (300, 512, 4176))
    turns = itertools.count()
    for weights, grid in (("nvfp4", "nvfp4-token"), ("mxfp4", "mxfp4"), ("mxfp8", "mxfp8"))[not native :]:
        for m, n, k in shapes:
            if not mine():
                continue
            x, w = (quantize(sample(r, k), SPECS.get(s).spec) for r, s in ((m, grid), (n, weights)))
            lay, by_row = layout.layout_of(w.spec), weights == "nvfp4" and k > 64
            row = None if x.global_scale is None else x.global_scale.reshape(-1).to(device)
            unit = w.global_scale * torch.linspace(1, 2, n) if by_row else w.global_scale
            low, up = ((None, None), (sample(m, 37).half(), sample(n, 37).half()))[next(turns) % 2]
            moved = [None if t is None else t.to(device) for t in (w.codes, w.scale, unit, sample(n), low, up)]
            y = block_scaled.block_scaled(
                x.codes.to(device), x.scale.to(device), row, *moved[:4], lay.kind, lay.group, torch.float32, *moved[4:]
            )
            want = x.dequantize().double() @ w.dequantize().double().T
            want = (want * torch.linspace(1, 2, n) if by_row else want) + sample(n).double()
            want = want if low is None else want + low.double() @ up.double().T
            if not error(y, want) < (1e-6 if device == "cpu" else 3e-3):
                yield f"block_scaled {weights} {m}x{n}x{k}: {error(y, want):.2e}"


def teach_interpreter() -> None:
    """Block-scaled products for Triton's interpreter, which has none before 3.8, and since then takes E4M3 scales for
    exponents. By the formats' definitions: E2M1 two a byte, E4M3, and scales that are E4M3 or 2^(byte - 127)."""
    import numpy as np
    import triton.language as tl
    from triton.runtime import interpreter

    elements = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6], dtype=torch.float64)

    def stored(handle) -> torch.Tensor:
        return torch.from_numpy(np.ascontiguousarray(handle.data).view(np.uint8))

    def side(codes: torch.Tensor, e2m1: bool, scale) -> torch.Tensor:
        if e2m1:
            value = elements[torch.stack([codes & 15, codes >> 4], -1).flatten(-2).int()]
        else:
            value = codes.view(E4M3).double()
        byte = stored(scale)
        exponents = torch.where(byte == 255, torch.nan, 2.0 ** (byte.double() - 127))
        factor = byte.view(E4M3).double() if scale.dtype == tl.float8e4nv else exponents
        return value * factor.repeat_interleave(value.shape[1] // factor.shape[1], 1)

    def product(self, a, sa, form, b, sb, form_b, fast, a_along_k, b_along_k, total):
        e2m1 = "E2M1" in str(form)
        y = side(stored(a), e2m1, sa) @ side(stored(b).T.contiguous(), e2m1, sb).T
        return interpreter.TensorHandle((y.numpy() + total.data).astype(np.float32), tl.float32)

    interpreter.InterpreterBuilder.create_dot_scaled = product


def layer(weights: str, grid: str | None, n: int, k: int, extras: bool) -> QuantizedLinear:
    """A layer with a bias; `extras`: smoothing, rotation and a low-rank branch."""
    smooth = Step("smooth", {"factor": sample(k).abs() + 0.5})
    steps = [smooth, Step("rotate", params={"size": 16})] if k % 16 == 0 else [smooth]
    return QuantizedLinear.build(
        quantize(sample(n, k) * 0.05, QuantSpec.parse(weights)),
        activations=None if grid is None else QuantSpec.parse(grid),
        steps=steps if extras else [],
        side=((sample(8, k) * 0.1).bfloat16(), (sample(n, 8) * 0.1).bfloat16()) if extras else None,
        bias=sample(n).bfloat16(),
        input_scale=torch.full((1, 1), 0.01) if grid is not None and grid.endswith("/tensor") else None,
    )


def defined(x: torch.Tensor, params, grid: str) -> torch.Tensor:
    """The equation of dq.ops in float64 with the activation grid that runs ("16-bit" for none)."""
    q = apply_steps(x.to(torch.float32), params.steps)
    if grid != "16-bit":
        q = fake_quantize(q, QuantSpec.parse(grid)) if params.input_scale is None else pre_quantized(x, params)
    y = q.double() @ params.weight.dequantize().double().T + params.bias.double()
    return y if params.down is None else y + x.double() @ params.down.double().T @ params.up.double().T


def broken_rows(device: str) -> Iterator[str]:
    """A row with a NaN or an infinity does not come out finite, from any backend; the others do."""
    marks = ((0, torch.nan), (4, torch.inf), (6, -torch.inf))
    for i, (weights, grid) in enumerate((*LAYERS, ("int4/group64", "int4/group32/fp16"))):
        if not mine():
            continue
        params = layer(weights, grid, 64, 128, i % 2 == 0).to(device).params
        for backend in BACKENDS:
            if backend.refuse(params, torch.device(device), torch.bfloat16):
                continue
            for m in (1, 7) if device == "cpu" else (1, 7, 33, 300):
                x, told = sample(m, 128).bfloat16(), torch.zeros(m, dtype=torch.bool)
                for row, bad in marks[: 1 if m < 7 or params.input_scale is not None else 3]:  # a given range saturates
                    x[row, 5], told[row] = bad, True
                if device == "cpu" and backend.name == "cublaslt-fp8" and params.input_scale is not None and m > 1:
                    continue  # the interpreter's products have no NaN of E4M3
                hidden = torch.isfinite(backend.run(x.to(device), params)).cpu()
                if hidden[told].any() or not hidden[~told].all():
                    yield f"{backend.name} {weights} {grid}, {m} rows: finite {hidden.float().mean(1).tolist()}"


def _interpreted(name: str, extras: bool, first: bool) -> list[tuple[int, torch.dtype]]:
    """Rows and dtypes for a backend in the interpreter, where a row takes 10 ms and more."""
    half, full = torch.float16, torch.bfloat16
    if name == "expand-fp8":  # few rows run as those of w4a16-gemv
        return [(17, full if extras else half)]
    calls = [(0, half), (7, half)] if extras else [(17, half)]
    many = name == "expand-bf16" or (first and name != "expand-fp8-faithful")
    return [*calls, (127 if many else 1, full)]


def backends(device: str) -> Iterator[str]:
    """Every backend that runs here; rows and sizes that fill no tile, 0 rows, and a view that is not contiguous."""
    sizes = ((64, 96),) if device == "cpu" else ((64, 96), (48, 320), (768, 512), (60, 200))
    ran = set()
    # The interpreter is slow: there, pairs take turns.
    turns = [(i, pair, extras) for i, pair in enumerate(LAYERS) for extras in (False, True)]
    for _, (weights, grid), extras in (t for t in turns if device != "cpu" or t[0] % 2 == t[2]):
        for n, k in sizes:
            if not mine():
                continue
            here = layer(weights, grid, n, k, extras)
            params, moved = here.params, layer(weights, grid, n, k, extras).to(device).params
            for backend in BACKENDS:
                if backend.name == "torch-reference" or backend.refuse(moved, torch.device(device), torch.bfloat16):
                    continue
                calls = [(m, torch.bfloat16) for m in (0, 1, 7, 17, 127, 4608)]
                calls = calls if device != "cpu" else _interpreted(backend.name, extras, backend.name not in ran)
                ran.add(backend.name)
                for m, dtype in calls:
                    x = sample(k, m).to(dtype).T
                    y = backend.run(x.to(device), moved)
                    level = LEVEL.get(backend.name, 4e-3)
                    few = backend.name == "expand-fp8" and m <= gemv.LIMIT
                    grid_that_ran = "16-bit" if few else backend.grid(params).partition(",")[0]
                    level = 4e-3 if few else level
                    if device == "cpu" and dtype == torch.bfloat16:  # its casts to BF16 cut off where a GPU rounds
                        level = max(level, 8e-3)
                    wrong = error(y, defined(x, params, grid_that_ran)) if m else 0.0
                    if y.shape != (m, n) or y.dtype != dtype or not wrong < level:
                        yield f"{backend.name} {weights} {grid} {n}x{k} extras {extras}, {m} rows: {wrong:.2e}"
    missing = {
        "cublaslt-fp8",
        "expand-fp8",
        "expand-fp8-faithful",
        "expand-bf16",
        "w4a16-gemv",
        "int8-mma",
        "fp8-block",
    }
    if missing - ran and _SHARE[1] == 1 and (device == "cpu" or torch.cuda.get_device_capability() >= (8, 9)):
        yield f"never ran: {missing - ran}"


def residual_layers(device: str) -> Iterator[str]:
    """Residual channels, with and without those of the weights, beside low rank: columns of the same product."""
    for dual in (False, True):
        for name in ("expand-fp8", "expand-fp8-faithful", "expand-bf16", "block-scaled-mma"):
            blackwell = device == "cpu" or torch.cuda.get_device_capability() >= (10, 0)
            if not mine() or (name == "block-scaled-mma" and not blackwell):
                continue
            n, k, s, m = 48, 128, 32, 20 if name.startswith("expand") else 3
            grid = QuantSpec.parse("nvfp4-token@sweep" if dual and m == 3 else "nvfp4-token")
            here, moved = (
                LinearParams(
                    on_device(quantize(sample(n, k + s * (1 + dual)) * 0.05, QuantSpec.parse("nvfp4")), where),
                    grid, [], (sample(8, k) * 0.1).bfloat16().to(where),
                    (sample(n, 8) * 0.1).bfloat16().to(where), sample(n).bfloat16().to(where), residual=s, dual=dual,
                )
                for where in ("cpu", device)
            )  # fmt: skip
            x = sample(m, k).to(torch.float16)
            q = pre_quantized(
                x, replace(here, activations=QuantSpec.parse("fp8_e4m3/token")) if name == "expand-fp8" else here
            )
            if name == "expand-bf16":  # nothing is rounded
                q[:, :k], q[:, k : k + s] = x, 0.0
                q[:, k + s :] = x[:, -s:] if dual else q[:, k + s :]
            want = q.double() @ here.weight.dequantize().double().T + here.bias.double()
            want += x.double() @ here.down.double().T @ here.up.double().T
            backend = BACKENDS.get(name)
            # The interpreter is not a GPU with such tensor cores; the layer itself is one that they take.
            why = "" if name == "block-scaled-mma" else backend.refuse(moved, torch.device(device), x.dtype)
            wrong = error(backend.run(x.to(device), moved), want) if not why else 0.0
            if why or not wrong < LEVEL.get(name, 4e-3):
                yield f"{name} with residual channels, dual {dual}: {why} {wrong:.2e}"


PARTS = (expansions, few_rows, one_row, products, block_products, backends, residual_layers, broken_rows)


def main(parts: tuple) -> int:
    """Runs what the command line names; its exit status."""
    if sys.argv[1] == "cpu":
        teach_interpreter()
    _SHARE[:] = [int(i) for i in sys.argv[2:4]] or [0, 1]
    problems = 0
    for problem in itertools.chain.from_iterable(part(sys.argv[1]) for part in parts):
        print(problem, flush=True)
        problems += 1
    print("equal" if not problems else f"{problems} differences")
    return int(problems > 0)


if __name__ == "__main__":
    sys.exit(main(PARTS))
