"""NVFP4 quantization and GPTQ's columns by Triton: equal to the reference, interpreted and on a GPU; as compiled."""

import os
import re
from pathlib import Path

import pytest
import torch
from case_scripts import compare

from dq.kernels.quantize import columns
from dq.kernels.quantize.nvfp4 import quantize_nvfp4, why_not
from dq.qtensor import quantize
from dq.registry import DQError
from dq.rounding.gptq import Grid
from dq.spec import FORMATS, QuantSpec

CASES = Path(__file__).with_name("quantize_cases.py")
GENERATIONS = (80, 89, 90, 100, 120)


def test_equal_to_the_reference_in_the_interpreter():
    compare(CASES, "cpu", TRITON_INTERPRET="1")


@pytest.mark.gpu
def test_equal_to_the_reference_on_cuda():
    compare(CASES, "cuda", shares=min(8, os.cpu_count() or 1), TRITON_INTERPRET="0")


def _ptx(name: str, generation: int, warps: int = 4, **constants) -> str:
    """PTX of a kernel of jit/nvfp4.py for a generation of GPUs; assembled too, so registers and instructions exist."""
    triton = pytest.importorskip("triton", reason="triton is not installed")
    if os.environ.get("TRITON_INTERPRET") == "1":
        pytest.skip("TRITON_INTERPRET=1: nothing is compiled")
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    from dq.kernels.quantize.jit import columns, nvfp4, pairs, tokens

    place = {"absmax_kernel": pairs, "values_kernel": tokens, "columns_kernel": columns}
    kernel = getattr(place.get(name, nvfp4), name)
    types = dict(x_ptr="*bf16", amax_ptr="*fp32", global_ptr="*fp32", bits_ptr="*i32", codes_ptr="*u8", scale_ptr="*u8")
    types |= {"word_ptr": "*i32", "y_ptr": "*fp32"}
    types |= dict.fromkeys((n for n in kernel.arg_names if n.endswith("_ptr") and n not in types), "*fp32")
    signature = {n: "constexpr" if n in constants else types.get(n, "i32") for n in kernel.arg_names}
    attrs = {(i,): [["tt.divisibility", 16]] for i, n in enumerate(kernel.arg_names) if n in types}
    source = ASTSource(fn=kernel, signature=signature, constexprs=constants, attrs=attrs)
    options = dict(num_warps=warps, enable_fp_fusion=False)
    compiled = triton.compile(source, target=GPUTarget("cuda", generation, 32), options=options)
    assert compiled.asm["cubin"]
    return compiled.asm["ptx"]


@pytest.mark.parametrize("generation", GENERATIONS)
def test_compiles_for(generation, tmp_path, monkeypatch):
    """Without a GPU. Bits depend on it: IEEE division, no multiply-adds fused but those of `divide` (four for each of a
    thread's elements, at each of its uses) and of the bounds, subnormals kept, no FP8 instruction."""
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    _ptx("amax_kernel", generation, TILE=4096, STEPS=8)
    common = dict(TWO_LEVELS=True, FULL=True, FUSED=True)
    plain = _ptx("quantize_kernel", generation, **common, BLOCKS=256, SWEEP=False, E4M3=False, LOW=0, HIGH=0)
    sweep = _ptx("quantize_kernel", generation, **common, BLOCKS=128, SWEEP=True, E4M3=True, LOW=-6, HIGH=10)
    pairs = _ptx("absmax_kernel", generation, TWO_LEVELS=True, FUSED=True, BLOCKS=256)
    values = _ptx("values_kernel", generation, FULL=True, FUSED=True, BLOCKS=128, SWEEP=True, LOW=-6, HIGH=10)
    # Two blocks a thread: eight for their scales and nine for their bounds, beside those of the general path.
    for ptx, fused in (
        (plain, 4 * 256 * 16 // 128),
        (sweep, 3 * 4 * 128 * 16 // 128),
        (pairs, 4 * 256 * 16 // 128 + 2 * (8 + 9)),
        (values, 3 * 4 * 128 * 16 // 128),
    ):
        assert set(re.findall(r"\bdiv\.\S*f\d+", ptx)) == {"div.rn.f32"}
        found = re.findall(r"\bfma\.(\S+)", ptx)
        assert set(found) <= {"rn.f32", "rn.f32x2"}
        assert found.count("rn.f32") + 2 * found.count("rn.f32x2") == fused
        assert not re.search(r"\.ftz|e4m3|e2m1", ptx)
        assert "ld.global.v4.b32" in ptx  # 16 bytes at a time


@pytest.mark.parametrize("generation", GENERATIONS)
def test_columns_compile_for(generation, tmp_path, monkeypatch):
    """A row stays in the registers of one warp; nothing is contracted, division is correctly rounded."""
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    for names, zeros in ((("fp4_e2m1", "fp4_e2m1"), (False, False)), (("uint4",), (True,))):
        constants = columns._constants(names, zeros, 128) | {}
        for option in ("num_warps", "enable_fp_fusion"):
            del constants[option]
        ptx = _ptx("columns_kernel", generation, warps=1, **constants)
        assert set(re.findall(r"\bdiv\.\S*f\d+", ptx)) == {"div.rn.f32"}
        assert not re.search(r"\bfma\.|\.ftz|\.local|\.shared", ptx)
        assert "shfl.sync" in ptx


def test_columns_of_other_formats_are_refused():
    block = torch.zeros(2, 4)
    assert "nf4" in columns.why_not(block, [Grid(block, None, FORMATS.get("nf4_element"))])
    assert "mxint8" in columns.why_not(block, [Grid(block, None, FORMATS.get("mxint8_element"))])


def test_reference_and_reason_elsewhere(monkeypatch):
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    x = torch.randn(4, 32)
    assert "on cpu" in why_not(x, QuantSpec.parse("nvfp4"))
    got, want = quantize_nvfp4(x, "sweep"), quantize(x, QuantSpec.parse("nvfp4@sweep"))
    assert got.spec == want.spec and torch.equal(got.codes, want.codes)


@pytest.mark.parametrize(
    ("text", "reason"),
    [("nvfp4@4over6", "no kernel"), ("nvfp4-token", "only NVFP4"), ("mxfp4", "only NVFP4"), ("nvfp4@mse", "no kernel")],
)
def test_refused_specs(text, reason, monkeypatch):
    pytest.importorskip("triton", reason="triton is not installed")
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    assert reason in why_not(torch.zeros(2, 16), QuantSpec.parse(text))


def test_refused_tensors(monkeypatch):
    pytest.importorskip("triton", reason="triton is not installed")
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    spec = QuantSpec.parse("nvfp4")
    assert "not a filled matrix" in why_not(torch.zeros(0, 16), spec)
    assert "dtype" in why_not(torch.zeros(2, 16, dtype=torch.float64), spec)
    segments = spec.with_(row_segments=(1, 1))
    assert "segments" in why_not(torch.zeros(2, 16), segments)


def test_not_finite():
    with pytest.raises(DQError, match="NaN or Inf"):
        quantize_nvfp4(torch.tensor([[1.0, float("nan")]]))


@pytest.mark.gpu
def test_quantize_takes_the_kernel():
    """`dq.qtensor.quantize` of a CUDA tensor gives what the CPU gives, and refuses NaN by the name of the tensor."""
    x = torch.randn(64, 256, dtype=torch.bfloat16)
    for text in ("nvfp4", "nvfp4@sweep"):
        spec = QuantSpec.parse(text)
        assert not why_not(x.cuda(), spec)
        got, want = quantize(x.cuda(), spec), quantize(x, spec)
        assert got.codes.is_cuda and torch.equal(got.codes.cpu(), want.codes)
        assert torch.equal(got.scale.cpu().view(torch.uint8), want.scale.view(torch.uint8))
    x[3, 5] = float("inf")
    with pytest.raises(DQError, match="layer 7 holds 1 NaN or Inf"):
        quantize(x.cuda(), QuantSpec.parse("nvfp4"), name="layer 7")
