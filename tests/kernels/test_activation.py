"""The activation kernel: equal to its definition, interpreted and on a GPU; compiles for every generation; reasons."""

import os
import re
from pathlib import Path

import pytest
import torch
from case_scripts import compare

from dq.kernels.activation.api import _constants, _inverse, activate, pack, tiling, why_not
from dq.kernels.activation.front import Front
from dq.kernels.activation.grids import grid_of
from dq.registry import DQError
from dq.spec import QuantSpec
from dq.transforms import Step

CASES = Path(__file__).with_name("activation_cases.py")
GENERATIONS = (80, 89, 90, 100, 120)
GRIDS = ("int8/token", "int4/token", "int4/group64/fp32", "nvfp4-token", "mxfp4", "mxfp8@even", "fp8-block-token")
GRIDS += ("nvfp4-token@4over6", "nvfp4-token@sweep")
FP8 = QuantSpec.parse("fp8_e4m3/token")
NVFP4 = QuantSpec.parse("nvfp4-token")
ROTATE = Step("rotate", params={"size": 256})


def test_equal_to_the_definition_in_the_interpreter():
    compare(CASES, "cpu", TRITON_INTERPRET="1")


@pytest.mark.gpu
def test_equal_to_the_definition_on_cuda():
    compare(CASES, "cuda", shares=8, TRITON_INTERPRET="0")  # most of the time compiles


POINTERS = dict.fromkeys(("x_ptr", "gate_ptr", "extra_ptr", "mod_scale_ptr", "mod_shift_ptr"), "*bf16")
POINTERS |= dict.fromkeys(("weight_ptr", "bias_ptr", "shift_ptr", "inverse_ptr", "scale_ptr"), "*fp32")
POINTERS |= dict(order_ptr="*i64", codes_ptr="*u8", block_ptr="*u8")
PLAIN = dict(
    K=1024, KIND="fp8", TARGET="e4m3", GROUP=0, HALF=False, RULE="", FRONT="", GATE=False, WEIGHT=False, BIAS=False,
    ADALN=False, SHIFT=False, SMOOTH=False, PERMUTE=False, ROTATE=0, RESIDUAL=0, DUAL=False, EXTRA=0, TAIL=0,
    FUSED=True, AHEAD=0,
)  # fmt: skip


def _ptx(generation: int, **constants) -> str:
    """PTX of the kernel for a generation of GPUs; assembled too, so registers and instructions exist."""
    triton = pytest.importorskip("triton", reason="triton is not installed")
    if os.environ.get("TRITON_INTERPRET") == "1":
        pytest.skip("TRITON_INTERPRET=1: nothing is compiled")
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    from dq.kernels.activation.jit.kernel import activate_kernel

    tiles, chunks, warps = tiling(PLAIN["K"])
    constants = {**PLAIN, "TILES": tiles, "C": chunks, "HARDWARE": generation >= 90, "num_warps": warps, **constants}
    options = {n: constants.pop(n) for n in ("num_warps", "maxnreg") if n in constants}
    options["enable_fp_fusion"] = constants.pop("enable_fp_fusion", False)
    names = activate_kernel.arg_names
    scalars = {n: "i32" for n in names if n not in constants} | dict(eps="fp32") | POINTERS
    signature = {n: "constexpr" if n in constants else scalars[n] for n in names}
    aligned = (*POINTERS, "stride", "gate_stride", "width")
    attrs = {(i,): [["tt.divisibility", 16]] for i, n in enumerate(names) if n in aligned}
    source = ASTSource(fn=activate_kernel, signature=signature, constexprs=constants, attrs=attrs)
    compiled = triton.compile(source, target=GPUTarget("cuda", generation, 32), options=options)
    assert compiled.asm["cubin"]
    return compiled.asm["ptx"]


@pytest.mark.parametrize("generation", GENERATIONS)
def test_compiles_for(generation, tmp_path, monkeypatch):
    """Without a GPU. Loads of 16 bytes; a rotation of 256 costs one shuffle for two elements in three of its four
    stages; E4M3 from float32 by the device's own conversion from sm_90 on, by integers before; no matrix product."""
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    rotated, plain = _ptx(generation, ROTATE=256, AHEAD=2112 * (generation >= 90)), _ptx(generation)
    tiles, chunks, warps = tiling(PLAIN["K"])
    each = tiles * chunks * 8 // (32 * warps)  # elements of a thread
    for ptx in (rotated, plain):
        assert len(re.findall(r"ld\.global\S*\.v4\.b32", ptx)) == each // 8
        assert len(re.findall(r"cvt\.rn\.satfinite\.e4m3x2\.f32", ptx)) == (each // 2 if generation >= 90 else 0)
        assert not re.search(r"cvt\S*e4m3", ptx) or generation >= 90
        assert not re.search(r"\bmax\.f32", ptx) and len(re.findall(r"\bmax\.NaN\.f32", ptx)) >= each // 2 - 1
    assert ptx_count(rotated, "shfl") - ptx_count(plain, "shfl") == 3 * each // 2
    assert not re.search(r"\bmma|wgmma|tcgen05", rotated)
    whole = _ptx(generation, ROTATE=256, SMOOTH=True, KIND="int4", TARGET="int8", FRONT="layernorm", ADALN=True)
    assert not re.search(r"cvt\S*e4m3", whole)
    _ptx(generation, KIND="nvfp4", GROUP=16, ROTATE=256, RESIDUAL=256, DUAL=True, EXTRA=32, TAIL=128)
    _ptx(generation, RESIDUAL=128, DUAL=True)
    _ptx(generation, KIND="int4-group", GROUP=64, TARGET="int8")
    packed = _ptx(generation, KIND="nvfp4", GROUP=16, TARGET="packed")
    assert not re.search(r"cvt\S*e4m3", packed) and len(re.findall(r"st\.global", packed)) <= each // 8 * 2 + 2
    if generation >= 100:  # as w4a4-nvfp4-arc-llm makes it for block-scaled tensor cores
        arc = dict(RULE="sweep", RESIDUAL=32, DUAL=True, PERMUTE=True)
        assert "cvt.rn.satfinite" not in _ptx(generation, KIND="nvfp4", GROUP=16, TARGET="packed", **arc)


@pytest.mark.parametrize("size", [0, 256])
def test_rows_of_three_tiles(size, tmp_path, monkeypatch):
    """As it is launched at K = 12288: 16 warps fit on a processor, warps meet for one maximum, not for that of each
    tile; a rotated row is asked for when its processor begins another one."""
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    grid = ("nvfp4", "e4m3", 16, False, "")
    constants = _constants(12288, grid, "", size, 0, False, 0, 12288, (False,) * 9, True, 132)
    assert constants["TILES"] == 3 and constants["AHEAD"] == (528 if size else 0)
    ptx = _ptx(90, **constants)
    assert re.search(r"\.maxnreg\s+128\b", ptx) and ptx.count("bar.sync") <= 2
    assert ("cp.async.bulk.prefetch.L2" in ptx) == bool(size)
    assert "maxnreg" not in _constants(3072, grid, "", size, 0, False, 0, 3072, (False,) * 9, True, 132)
    assert not _constants(12288, grid, "", size, 0, False, 0, 12288, (False,) * 9, False, 132)["AHEAD"]


@pytest.mark.parametrize("text", [*GRIDS, "int4/group64"])
def test_every_grid_compiles(text, tmp_path, monkeypatch):
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    grid = grid_of(QuantSpec.parse(text))
    target = "int8" if grid.kind == "int8" else "e4m3"
    front = dict(FRONT="silu", GATE=True) if grid.kind == "fp8-group" else dict(FRONT="rmsnorm", WEIGHT=True)
    _ptx(90, KIND=grid.kind, GROUP=grid.group, HALF=grid.half, RULE=grid.rule, TARGET=target, PERMUTE=True, **front)


def ptx_count(ptx: str, word: str) -> int:
    """Uses of an instruction."""
    return len(re.findall(rf"\b{word}\.", ptx))


@pytest.mark.parametrize(
    ("steps", "spec", "target", "width", "residual", "reason"),
    [
        ([ROTATE, ROTATE], FP8, "e4m3", 512, 0, "once each"),
        ([Step("rotate", params={"size": 4})], FP8, "e4m3", 512, 0, "rotation by 4"),
        ([Step("whiten")], FP8, "e4m3", 512, 0, "whiten"),
        ([ROTATE], FP8, "e4m3", 320, 0, "of 320 columns"),
        ([], FP8, "int8", 512, 0, "whole numbers"),
        ([], FP8, "packed", 512, 0, "no codes of 4 bits"),
        ([], FP8, "bf16", 512, 0, "unknown target"),
        ([], QuantSpec.parse("int8/token"), "e4m3", 512, 0, "do not fit"),
        ([], QuantSpec.parse("nvfp4"), "e4m3", 512, 0, "no activation kernel"),
        ([], QuantSpec.parse("fp8_e5m2/token"), "e4m3", 512, 0, "no activation kernel"),
        ([], QuantSpec.parse("int8/token@mse"), "int8", 512, 0, "absmax"),
        ([], QuantSpec.parse("nvfp4-token@mse"), "e4m3", 512, 0, "absmax"),
        ([], QuantSpec.parse("nvfp4-token@sweep").with_(rule_params=(("low", -2),)), "e4m3", 512, 0, "parameters"),
        ([], QuantSpec.parse("nvfp4-token@sweep"), "packed", 512, 32, ""),
        ([], QuantSpec.parse("nvfp4-token@4over6"), "e4m3", 512, 32, ""),
        ([], FP8, "e4m3", 40000, 0, "at most 32768"),
        ([], FP8, "e4m3", 512, 16, ""),
        ([], FP8, "e4m3", 512, 513, "residual"),
        ([], QuantSpec.parse("mxfp4"), "e4m3", 512, 32, "residual"),
        ([], NVFP4, "e4m3", 512, 24, "residual"),
        ([], NVFP4, "e4m3", 512, 32, ""),
    ],
)
def test_reasons(steps, spec, target, width, residual, reason):
    found = why_not(steps, spec, target, width, residual)
    assert reason in found and bool(reason) == bool(found)


def test_bad_arguments():
    x = torch.zeros(4, 32)
    with pytest.raises(DQError, match="width 31"):
        activate(x, [], FP8, width=31)
    with pytest.raises(DQError, match="width 15"):
        pack(x, [], NVFP4, width=15)
    with pytest.raises(DQError, match="block scales: use"):
        activate(x, [], NVFP4, "packed")
    with pytest.raises(DQError, match="one row for each of 4"):
        activate(x, [], FP8, extra=torch.zeros(3, 2))
    with pytest.raises(DQError, match="dtype"):
        activate(x.double(), [], FP8)
    with pytest.raises(DQError, match="unknown front"):
        Front("tanh")
    with pytest.raises(DQError, match="adaLN"):
        activate(x, [], FP8, front=Front("layernorm", scale=torch.zeros(3, 32), shift=torch.zeros(3, 32)))


def test_compiles_into_a_graph():
    """Without breaks; the operator has shapes for tensors without data, and runs as its definition on a CPU."""

    def call(x):
        codes, factors = activate(x, [Step("rotate", params={"size": 16})], NVFP4, residual=16, width=128)
        return codes.to(torch.float32) * factors

    x = torch.randn(3, 5, 64)
    got = torch.compile(call, backend="aot_eager", fullgraph=True)(x)
    assert got.shape == (15, 128) and torch.equal(got, call(x))


def test_inverse_follows_its_factor():
    factor = torch.full((4,), 2.0)
    assert _inverse(factor) is _inverse(factor) and torch.equal(_inverse(factor), torch.full((4,), 0.5))
    factor.mul_(2)
    assert torch.equal(_inverse(factor), torch.full((4,), 0.25))
    with torch.inference_mode():
        assert torch.equal(_inverse(torch.ones(4)), torch.ones(4))


def test_operator_is_well_defined():
    x, nothing = torch.randn(3, 64), [None] * 9
    rest = ("nvfp4", "e4m3", 16, False, "", "", 1e-6, 16, 16, True, 128)
    torch.library.opcheck(torch.ops.dq.activate.default, (x, *nothing, *rest))


@pytest.mark.parametrize(
    "step",
    [
        Step("rotate", params={"size": 64, "kind": "sylvester"}),
        Step("shift", params={"value": 0.171875}),
        Step("outliers", {"mask": torch.ones(64)}),
    ],
    ids=lambda step: step.name,
)
def test_variants_of_steps_are_refused(step):
    """A kernel that ran a Sylvester rotation as a regular one would be silently wrong."""
    assert "the kernel takes" in why_not([step], QuantSpec.parse("fp8_e4m3/token"), "e4m3", 64)
