"""FP8 of few rows: which kernel runs, and counters of products whose tiles several programs share."""

import importlib.util
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from dq.kernels import library
from dq.kernels.gemm import gemm, layout, row8
from dq.ops import BACKENDS
from dq.qtensor import quantize
from dq.spec import QuantSpec

_SPEC = importlib.util.spec_from_file_location("dq_tests_gemm_cases", Path(__file__).with_name("gemm_cases.py"))
gemm_cases = importlib.util.module_from_spec(_SPEC)
_SPEC.loader.exec_module(gemm_cases)
E4M3 = torch.float8_e4m3fn
DYNAMIC = ("fp8_e4m3/channel", "fp8_e4m3/token")


@pytest.mark.gpu
def test_captured_launches_have_counters_of_their_own():
    """Of two graphs of a product whose tiles programs share the second is replayed first, then both side by side."""
    g = torch.Generator("cuda").manual_seed(0)
    x, w = (torch.randn(m, 4096, generator=g, device="cuda").to(E4M3) for m in (4, 64))
    scales, graphs = (torch.ones(4, 1, device="cuda"), torch.ones(64, device="cuda")), []
    want = gemm.scaled_mm(x, w, *scales, None)
    for _ in range(2):
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            y = gemm.scaled_mm(x, w, *scales, None)
        graphs.append((graph, y))
    for graph, y in reversed(graphs):
        y.zero_()
        graph.replay()
        assert torch.equal(y, want)
    streams = [torch.cuda.Stream() for _ in graphs]
    torch.cuda.synchronize()
    for _ in range(50):
        for stream, (graph, _) in zip(streams, graphs, strict=True):
            with torch.cuda.stream(stream):
                graph.replay()
    torch.cuda.synchronize()
    assert all(torch.equal(y, want) for _, y in graphs)


def test_counters_are_shared_by_nobody(monkeypatch):
    """One set a stream, kept and larger on demand; sets of captured launches lie apart, aligned, and are not found."""
    monkeypatch.setattr(library, "_COUNTERS", {})
    monkeypatch.setattr(library, "_STOCK", {})
    cpu = torch.device("cpu")
    first = library._zeros(cpu, 7, True)  # no stock yet: made within the graph, and kept by nobody
    assert not library._STOCK and first.numel() == 7
    kept = library.counters(cpu, 5)
    assert library.counters(cpu, 9).data_ptr() == kept.data_ptr()
    taken = [library._zeros(cpu, 7, True) for _ in range(3)]
    assert len({t.untyped_storage().data_ptr() for t in (kept, *taken)}) == 1
    assert all(t.data_ptr() % 16 == kept.data_ptr() % 16 for t in taken)
    for t in (kept, *taken):
        assert not t.any()
        t.fill_(1)
    assert library.counters(cpu, 1 << 21).numel() == 1 << 21 and not library.counters(cpu, 1 << 21).any()


def test_what_one_row_of_fp8_runs_on(monkeypatch):
    """The kernel for one row, which rounds x itself, or takes it rounded if that is more than one scale; not with a
    low-rank branch, nor for more rows."""
    ran, operator = [], row8._row8
    monkeypatch.setattr(row8, "_row8", lambda *a: ran.append("rounds" if a[5] else "takes") or operator(*a))
    run = BACKENDS.get("cublaslt-fp8").run
    plain = gemm_cases.layer(*DYNAMIC, 32, 64, False).params
    more = gemm_cases.layer(*DYNAMIC, 32, 64, True).params
    x = torch.randn(2, 64, generator=torch.Generator().manual_seed(0)).bfloat16()
    for params, wanted in (
        (plain, "rounds"),
        (replace(more, down=None, up=None), "takes"),
        (gemm_cases.layer("fp8_e4m3/channel", "fp8_e4m3/tensor", 32, 64, False).params, "takes"),
        (more, ""),
    ):
        ran.clear()
        y = run(x[:1], params)
        assert "".join(ran) == wanted and y.dtype == x.dtype
        assert gemm_cases.error(y, run(x, params)[:1]) < 4e-3 and "".join(ran) == wanted


@pytest.mark.parametrize(
    ("text", "known"),
    [
        ("fp8_e4m3/channel", True),
        ("fp8_e4m3/tensor", False),
        ("fp8-block", False),
        ("mxfp8", False),
        ("int8/channel", False),
    ],
)
def test_weights_of_the_kernel_for_one_row(text, known):
    """E4M3 with a scale for each row; on GPUs that convert it."""
    q = quantize(torch.randn(16, 128), QuantSpec.parse(text))
    lay = layout.layout_of(q.spec)
    assert row8.takes(*layout.parts(q), lay.kind, lay.rows) == known
    with library.as_on((8, 6)):
        assert not row8._converts(torch.device("cuda"))
    with library.as_on((8, 9)):
        assert row8._converts(torch.device("cuda"))
