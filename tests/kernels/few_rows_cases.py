"""FP8 of few rows against its references: one row, and products whose tiles several programs share.

A script, as gemm_cases.py, with the same arguments: TRITON_INTERPRET=1 python few_rows_cases.py cpu
"""

import sys
from collections.abc import Iterator
from dataclasses import replace

import torch
from gemm_cases import E4M3, error, main, mine, on_device, sample

from dq.kernels import library
from dq.kernels.gemm import gemm, gemv, row8, rows
from dq.qtensor import quantize
from dq.spec import QuantSpec


def one_row_of_fp8(device: str) -> Iterator[str]:
    """A row rounded on the way, the same row given rounded, and one in 16 bits; zeros; what is not finite."""
    shapes = (
        ((1, 16), (7, 264), (17, 37), (20, 1000)) if device == "cpu" else ((1, 16), (7, 264), (17, 37), (4096, 9000))
    )
    for i, (n, k) in enumerate((*shapes, (33, 2304))):
        if not mine():
            continue
        if device == "cpu":  # both orders of loads
            row8.reversed_lanes = lambda i=i: i % 2 == 0
            row8._plan.cache_clear()
        weight, x = quantize(sample(n, k) * 0.05, QuantSpec.parse("fp8_e4m3/channel")), sample(1, k)
        x[:, :: k // 5] *= 30.0
        for dtype, bias in ((torch.float16, sample(n)), (torch.bfloat16, None), (torch.float32, sample(n).half())):
            x, there, b = x.to(dtype), on_device(weight, device), None if bias is None else bias.to(device)
            want = row8._reference(x, None, weight.codes, weight.scale.reshape(-1), bias, True, torch.float64)
            codes, factor = (t.to(device) for t in rows.by_torch(x, [], rows.FP8, "e4m3"))
            y = row8.rounding(x.to(device).t().contiguous().t(), there.codes, there.scale, b)
            same = row8.of_codes(codes, factor, there.codes, there.scale, b, dtype)
            plain = row8.of_floats(x.to(device), there.codes, there.scale, b, dtype)
            exact = x.double() @ weight.dequantize().double().T + (0.0 if bias is None else bias.double())
            level = {torch.float32: 1e-6, torch.float16: 1e-3}.get(dtype, 8e-3)
            wrong = error(y, want), error(plain, exact)
            if not torch.equal(y, same) or not max(wrong) < level or y.dtype != dtype:
                yield f"one row of FP8 {n}x{k} {dtype}: {wrong}, {torch.equal(y, same)}"
        zero, b = torch.zeros(1, k, dtype=dtype, device=device), sample(n).to(device)
        if not torch.equal(row8.rounding(zero, there.codes, there.scale, b), b.to(dtype)[None]):
            yield f"one row of FP8 {n}x{k}: zeros"
        for bad in (torch.nan, torch.inf, -torch.inf):
            zero[0, k // 2] = bad
            codes, factor = (t.to(device) for t in rows.by_torch(zero.cpu(), [], rows.FP8, "e4m3"))
            ways = (
                row8.rounding(zero, there.codes, there.scale, b),
                row8.of_codes(codes, torch.ones_like(factor), there.codes, there.scale, b, dtype),
                row8.of_floats(zero, there.codes, there.scale, b, dtype),
            )
            if any(bool(torch.isfinite(y).any()) for y in ways):
                yield f"one row of FP8 {n}x{k}: {bad} is lost"


def split_products(device: str) -> Iterator[str]:
    """FP8 of few rows, where programs share a tile: the same bits at every call, counters left at 0."""
    sizes = (
        ((1, 9, 1100), (16, 16, 2080), (5, 20, 520))
        if device == "cpu"
        else ((1, 200, 4100), (16, 4096, 14336), (7, 33, 1040))
    )
    for m, n, k in sizes:
        if not mine():
            continue
        a, b, sa, sb = (
            (sample(m, k) * 40).to(E4M3),
            (sample(n, k) * 40).to(E4M3),
            sample(m, 1).abs(),
            sample(n, 1).abs(),
        )
        low, up, bias = sample(m, 37).half(), sample(n, 37).half(), sample(n)
        for extra in ((None, None, None), (bias, low, up)):
            want = gemm._reference(a, b, sa, sb, *extra, 0, 1, torch.float32)
            there = [None if t is None else t.to(device) for t in (a, b, sa, sb, *extra)]
            y, again = (gemm.gemm(*there[:5], 0, 1, torch.float32, *there[5:]) for _ in range(2))
            _, grid, each = gemm._plan(m, n, k, 0, 1, False, extra[0] is not None, None, there[0].device)
            left = any(bool(t.any()) for t in library._COUNTERS.values())
            if grid[1] < 2 or not error(y, want) < 2e-3 or not torch.equal(y, again) or left:
                yield f"split {m}x{n}x{k} {grid}: {error(y, want):.2e}, {torch.equal(y, again)}, counters left {left}"


def views(device: str) -> Iterator[str]:
    """Weights, scales and biases that are views with steps give what their copies give."""
    for text in ("fp8_e4m3/channel", "int4/group64", "nvfp4"):
        if not mine():
            continue
        whole = on_device(quantize(sample(32, 128), QuantSpec.parse(text)), device)
        part = replace(whole, codes=whole.codes[::2], scale=whole.scale[::2], shape=(16, 128))
        dense = replace(part, codes=part.codes.contiguous(), scale=part.scale.contiguous())
        bias = sample(32).to(device)[::2]
        for m in (1, 3):
            x = sample(m, 256).half().to(device)[:, ::2]
            want = gemv.weight_only(x.contiguous(), dense, bias.contiguous())
            if not torch.equal(gemv.weight_only(x, part, bias), want):
                yield f"views of {text}, {m} rows"
            if text == "fp8_e4m3/channel":
                a, sa = rows.by_torch(x, [], rows.FP8, "e4m3")
                want = gemm.gemm(a, dense.codes, sa, dense.scale, bias.contiguous())
                if not torch.equal(gemm.gemm(a, part.codes, sa, part.scale, bias), want):
                    yield f"views in a product, {m} rows"
                want = row8.rounding(x[:1].contiguous(), dense.codes, dense.scale, bias.contiguous())
                if not torch.equal(row8.rounding(x[:1], part.codes, part.scale, bias), want):
                    yield "views, one row rounded"


if __name__ == "__main__":
    sys.exit(main((one_row_of_fp8, split_products, views)))
