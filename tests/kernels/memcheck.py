"""Every kernel once on small, odd shapes: a program for NVIDIA's compute-sanitizer. Without a GPU it runs nothing.

    PYTORCH_NO_CUDA_MEMORY_CACHING=1 compute-sanitizer --tool memcheck --error-exitcode 1 \
        python tests/kernels/memcheck.py [PART ...]

Without torch's cache every tensor is an allocation of its own, so that a step beyond one is seen. PART is a word in the
name of a call; every call prints its name, so that the last one names the kernel that failed. Values are compared
elsewhere (`*_cases.py`); here they only have to be finite.
"""

import sys
from collections.abc import Callable, Iterator
from itertools import product
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).parent))
import gemm_cases

from dq.kernels.activation import api
from dq.kernels.gemm import expand, gemm, gemv, row8
from dq.ops import BACKENDS
from dq.qtensor import QTensor, fake_quantize, quantize
from dq.rounding import gptq
from dq.spec import FORMATS, QuantSpec
from dq.transforms import Step

E4M3 = torch.float8_e4m3fn
Call = tuple[str, Callable[[], Any]]


def _random(*shape: int) -> torch.Tensor:
    return torch.randn(shape, device="cuda")


def _weight(text: str, n: int, k: int) -> QTensor:
    return quantize(_random(n, k) * 0.05, QuantSpec.parse(text))


def activation() -> Iterator[Call]:
    grids = {"fp8_e4m3/token": "e4m3", "int8/token": "int8", "int4/token": "packed", "int4/group64/fp32": "e4m3"}
    grids |= {"nvfp4-token": "e4m3", "nvfp4-token@4over6": "packed", "mxfp4": "packed", "mxfp8@even": "e4m3"}
    grids |= {"fp8-block-token": "e4m3"}
    for (grid, target), (m, k) in product(grids.items(), ((3, 264), (17, 320))):
        x, steps = _random(m, k).bfloat16(), [Step("smooth", {"factor": _random(k).abs() + 0.5})]
        if k % 64 == 0:
            steps.append(Step("rotate", params={"size": 64}))
        run = (api.pack, ()) if target == "packed" else (api.activate, (target,))
        if not api.why_not(steps, QuantSpec.parse(grid), target, k):
            yield (
                f"activation {grid} {m}x{k}",
                lambda x=x, s=steps, g=grid, r=run: r[0](x, s, QuantSpec.parse(g), *r[1]),
            )
    x, low = _random(5, 320).bfloat16(), _random(5, 5).bfloat16()
    for dual in (False, True):
        behind = dict(residual=32, dual=dual, extra=low, width=448)
        yield f"activation residual {dual}", lambda b=behind: api.activate(x, [], QuantSpec.parse("nvfp4-token"), **b)


def rounding() -> Iterator[Call]:
    """Quantization of weights, swept activations, GPTQ's columns."""
    for text, (n, k) in product(("nvfp4", "nvfp4@sweep"), ((5, 40), (33, 264))):
        for dtype in (torch.bfloat16, torch.float32):
            yield f"quantize {text} {n}x{k} {dtype}", lambda t=text, s=(n, k, dtype): _weight(t, *s[:2])
    for text in ("nvfp4-token", "nvfp4-token@sweep"):
        yield f"fake_quantize {text}", lambda t=text: fake_quantize(_random(7, 200), QuantSpec.parse(t))
    for name, zero in (("fp4_e2m1", False), ("uint4", True)):
        step = _random(9, 72).abs() + 0.1
        grid = gptq.Grid(step, torch.full_like(step, 7.0) if zero else None, FORMATS.get(name))
        u = _random(72, 72).triu() * 0.1 + 3 * torch.eye(72, device="cuda")
        for grids in ([grid], [grid, grid]):
            for kernel in gptq.BLOCK_KERNELS:
                job = (_random(9, 72), u, grids, [i % 2 == 0 for i in range(72)])
                yield f"GPTQ {kernel.name} {name} {len(grids)}", lambda r=kernel.run, j=job: r(*j)


def products() -> Iterator[Call]:
    for (m, n, k), dtype, (group, rows) in product(
        ((1, 33, 200), (7, 64, 264), (130, 200, 320)), (torch.int8, E4M3), ((0, 1), (64, 1), (128, 128))
    ):
        a, b = ((_random(r, k) * 40).clamp(-127, 127).round().to(dtype) for r in (m, n))
        groups = -(-k // group) if group else 1
        scales, bias = (_random(m, groups).abs(), _random(-(-n // rows), groups).abs()), _random(n)
        low = (_random(m, 37).half(), _random(n, 37).half()) if m > 1 else (None, None)
        job = (a, b, *scales, bias, group, rows, torch.float32, *low)
        yield f"gemm {dtype} {m}x{n}x{k} group {group}", lambda j=job: gemm.gemm(*j)
    for m, n, k in ((1, 33, 1100), (16, 70, 2056)):  # programs share a tile
        job = ((_random(m, k) * 40).to(E4M3), (_random(n, k) * 40).to(E4M3), _random(m, 1).abs(), _random(n, 1).abs())
        yield f"gemm split {m}x{n}x{k}", lambda j=job: gemm.gemm(*j, dtype=torch.float32)


def few_rows() -> Iterator[Call]:
    """One row by the kernel for it, and more by the other one; K that ends within a step."""
    for text, m, (n, k) in product(gemm_cases.WEIGHT_ONLY, (1, 7), ((17, 192), (9, 592), (40, 330))):
        weight, x = _weight(text, n, k), _random(m, k).bfloat16()
        job = (x, weight, _random(n))
        yield f"gemv {text} {m} rows {n}x{k}", lambda j=job: gemv.weight_only(*j)


def one_row_of_fp8() -> Iterator[Call]:
    """Floats rounded on the way, codes, and floats as they are; K that ends within a step, and within eight columns."""
    for n, k in ((17, 37), (9, 592), (1, 16)):
        weight, x, bias = _weight("fp8_e4m3/channel", n, k), _random(1, k).bfloat16(), _random(n)
        job, codes, factor = (weight.codes, weight.scale, bias), x.to(E4M3), torch.ones(1, 1, device="cuda")
        yield f"row8 rounding {n}x{k}", lambda x=x, j=job: row8.rounding(x, *j)
        yield f"row8 codes {n}x{k}", lambda c=codes, f=factor, j=job: row8.of_codes(c, f, *j, torch.bfloat16)
        yield f"row8 floats {n}x{k}", lambda x=x, j=job: row8.of_floats(x, *j, torch.float16)


def expansions() -> Iterator[Call]:
    """By words (K of whole words) and by values."""
    for text, (n, k), rank in product(gemm_cases.FOUR, ((17, 96), (5, 130), (33, 264)), (0, 5)):
        weight, up = _weight(text, n, k), _random(n, rank).bfloat16() if rank else None
        width = k + 3 * rank + (-(k + 3 * rank) % 16)
        yield f"expand {text} {n}x{k} rank {rank}", lambda j=(weight, E4M3, up, width): expand.expand(*j)
        if not rank:
            yield f"expand {text} {n}x{k} FP16", lambda w=weight: expand.expand(w, torch.float16)


def backends() -> Iterator[Call]:
    """Whole layers, with a low-rank branch and without, by every backend that takes them here."""
    for (weights, grid), extras, (n, k) in product(gemm_cases.LAYERS, (False, True), ((64, 96), (48, 320))):
        params = gemm_cases.layer(weights, grid, n, k, extras).cuda().params
        for backend in BACKENDS:
            if backend.name == "torch-reference" or backend.refuse(params, torch.device("cuda"), torch.bfloat16):
                continue
            for m in (1, 7, 33):
                name = f"{backend.name} {weights} {grid} {n}x{k} {'low rank ' * extras}{m} rows"
                x = _random(m, k).bfloat16()
                yield name, lambda b=backend, x=x, p=params: b.run(x, p)


def main(words: list[str]) -> int:
    if not torch.cuda.is_available():
        print("no GPU: nothing ran")
        return 0
    torch.manual_seed(0)
    count = 0
    for part in (activation, rounding, products, few_rows, one_row_of_fp8, expansions, backends):
        for name, run in part():
            if words and not any(word in name for word in words):
                continue
            print(name, flush=True)
            found = run()
            torch.cuda.synchronize()
            for t in found if isinstance(found, tuple) else (found,):
                if isinstance(t, torch.Tensor) and t.dtype in (torch.float32, torch.bfloat16, torch.float16):
                    whole = bool(torch.isfinite(t).all()) or name.startswith("expand")  # whose base may be unset
                    if not whole:
                        print(f"NOT FINITE: {name}")
                        return 1
            count += 1
    print(f"{count} calls")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
