"""GPTQ's loop as a CUDA graph: the same work for every block gives the bits of the loop that looks at its columns."""

import pytest
import torch

import dq.rounding.gptq as gptq_module
from dq.rounding import Job
from dq.spec import QuantSpec


@pytest.mark.parametrize("spec", ["nvfp4", "int4/group64", "uint4/group64"])
def test_blocks_by_mask(spec):
    g = torch.Generator().manual_seed(0)
    weight, fmt = torch.randn(8, 32, generator=g), QuantSpec.parse(spec).fmt
    upper = torch.randn(32, 32, generator=g).triu() + 3 * torch.eye(32)
    zero = torch.randint(0, 15, (8, 32), generator=g).float() if spec.startswith("u") else None
    grids = [gptq_module.Grid(s * torch.rand(8, 32, generator=g) + 0.1, zero, fmt) for s in (0.5, 0.05)]
    kept = [i % 3 == 0 for i in range(32)]
    for second, flags in ((None, [False] * 32), (grids[1], kept)):
        looked = gptq_module._block(weight.clone(), upper, grids[0], second, flags, None)
        masked = gptq_module._block(weight.clone(), upper, grids[0], second, None, torch.tensor(flags).float())
        assert all(torch.equal(a, b) for a, b in zip(looked, masked, strict=True))
        assert bool(looked[1].any()) == (second is not None)


def test_a_graph_that_errs_is_not_used(monkeypatch):
    """Nor one that cannot be captured: the loop's own result comes back, and the graph is not asked again."""
    g = torch.Generator().manual_seed(0)
    block, u, fmt = torch.randn(4, 8, generator=g), torch.eye(8), QuantSpec.parse("nvfp4").fmt
    grids = [gptq_module.Grid(torch.ones(4, 8), None, fmt)]
    wanted = gptq_module._block(block.clone(), u, grids[0], None, [False] * 8, None)
    calls = []

    class OnCuda:  # a tensor that says it is on a GPU
        is_cuda, device, shape = True, "cuda:0", block.shape
        clone = staticmethod(block.clone)

    def wrong(*call):
        calls.append(call)
        return tuple(t + 1 for t in wanted)

    def refusing(*key):
        calls.append(key)
        raise RuntimeError("operation not permitted when stream is capturing")

    monkeypatch.setattr(gptq_module, "BLOCK_KERNELS", ())
    for make in (lambda *key: wrong, refusing):
        monkeypatch.setattr(gptq_module, "_captured", make)
        monkeypatch.setattr(gptq_module, "_CHECKED", {})
        calls.clear()
        for _ in range(3):
            found = gptq_module._columns(OnCuda(), u, grids, [False] * 8)
            assert all(torch.equal(a, b) for a, b in zip(found, wanted, strict=True))
        assert len(calls) == 1


def test_a_kernel_comes_before_a_graph(monkeypatch):
    """Of those that take the block; what it gives is compared once, and used from then on."""
    g = torch.Generator().manual_seed(0)
    block, u, fmt = torch.randn(4, 8, generator=g), torch.eye(8), QuantSpec.parse("nvfp4").fmt
    grids, calls = [gptq_module.Grid(torch.ones(4, 8), None, fmt)], []

    class OnCuda:
        is_cuda, device, shape = True, "cuda:0", block.shape
        clone = staticmethod(block.clone)

    def run(*call):
        calls.append(call)
        return gptq_module._block(block.clone(), u, grids[0], None, [False] * 8, None)

    kernels = [
        gptq_module.BlockKernel("no", lambda b, g: "not this one", None),
        gptq_module.BlockKernel("yes", lambda b, g: "", run),
    ]
    monkeypatch.setattr(gptq_module, "BLOCK_KERNELS", kernels)
    monkeypatch.setattr(gptq_module, "_CHECKED", {})
    for count in (1, 2, 3):
        gptq_module._columns(OnCuda(), u, grids, [False] * 8)
        assert len(calls) == count and list(gptq_module._CHECKED.values()) == [True]


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("residual", [0, 32])
def test_captured(residual):
    """Two layers after each other through the same graph: as good as on the CPU (sums differ in their last bits)."""
    for seed in (0, 1):
        g = torch.Generator().manual_seed(seed)
        w, x = torch.randn(96, 320, generator=g), torch.randn(2048, 320, generator=g)
        x = x @ torch.randn(320, 320, generator=g)
        h, errors = x.T @ x / len(x), []
        for device in ("cpu", "cuda"):
            amax = w.abs().max().to(device)
            job = Job("w", w.to(device), QuantSpec.parse("nvfp4"), amax=amax, hessian=h.to(device), residual=residual)
            main, rest = gptq_module.gptq(job)
            value = main.dequantize().cpu()
            if rest is not None:
                value[:, -residual:] += rest.dequantize().cpu()
            errors.append(float(((w - value) @ h @ (w - value).T).diagonal().sum()))
        assert errors[1] == pytest.approx(errors[0], rel=0.02)
