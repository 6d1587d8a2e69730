"""Every kernel of dq.kernels.gemm compiles for each generation that its backend declares, to the instructions meant."""

import importlib
import importlib.util
import re
from pathlib import Path

import pytest

pytest.importorskip("triton", reason="triton is not installed")

GENERATIONS = (80, 89, 90, 100, 120)
_SPEC = importlib.util.spec_from_file_location("dq_tests_compiling", Path(__file__).with_name("compiling.py"))
compiling = importlib.util.module_from_spec(_SPEC)
_SPEC.loader.exec_module(compiling)
_products = compiling.products


@pytest.fixture(autouse=True)
def _own_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))


def _build(module: str, name: str, generation: int, types: dict, constants: dict, **options):
    kernel = getattr(importlib.import_module(f"dq.kernels.gemm.jit.{module}"), name)
    return compiling.build(kernel, generation, types, constants, **options)


def _ptx(*what, **options) -> str:
    return _build(*what, **options).asm["ptx"]


@pytest.mark.parametrize("generation", GENERATIONS)
def test_expand(generation):
    """To E4M3 by the device's own conversion where it is exact, by integers before Hopper; 16 bytes at a time."""
    types = dict(codes_ptr="*u8", unit_ptr="*fp32", up_ptr="*bf16", base_ptr="*fp32", k="i32*16", stride="i32*16")
    types |= dict(width="i32*16")
    common = dict(UNIT=1, GROUPS=64, RANK=32, EXTRA=128, BN=4, rows_per_scale=1, FP8=generation >= 90)
    for kind, scale, size, pointer in ((0, 0, 32, "*fp16"), (1, 1, 8, "*u8"), (1, 2, 16, "*u8")):
        constants = common | dict(KIND=kind, SCALE=scale, BYTES=size, BG=512 // size, TARGET=0)
        text = _ptx("expand", "expand_kernel", generation, types | dict(scale_ptr=pointer, out_ptr="*u8"), constants)
        assert ("cvt.rn.satfinite.e4m3x2.f32" in text) == (generation >= 90)
        assert "ld.global.v" in text and "st.global.v4.b32" in text
    constants = common | dict(KIND=0, SCALE=0, BYTES=32, BG=16, RANK=0, EXTRA=0)
    zeros = types | dict(scale_ptr="*fp16", out_ptr="*bf16", unit_ptr="*u8")
    _ptx("expand", "expand_kernel", generation, zeros, constants | dict(TARGET=1, UNIT=3))
    for target, pointer in ((1, "*bf16"), (2, "*i8")):
        kinds = types | dict(scale_ptr="*fp16", out_ptr=pointer)
        text = _ptx("expand", "expand_kernel", generation, kinds, constants | dict(TARGET=target))
        assert "e4m3" not in text and "st.global.v4.b32" in text


@pytest.mark.parametrize("generation", GENERATIONS[1:])
@pytest.mark.parametrize("k", [3072, 12288])
def test_expand_words(generation, k):
    """Eight codes at a time: bytes looked up by permutation, one table for a chunk, whose scale is loaded once, without
    integer conversions; a lane loads 8 bytes and stores 16. Shared memory is for the largest scale of a row alone."""
    from dq.kernels.gemm.expand import _plan_words

    types = dict(words_ptr="*i32", unit_ptr="*fp32", up_ptr="*fp32", out_ptr="*u8", out_words_ptr="*i32")
    types |= dict(base_ptr="*fp32", k="i32*16", stride="i32*16", width="i32*16")
    cases = (("int4", 0, 0, "*fp32"), ("int4", 0, 64, "*fp16"), ("e2m1", 1, 16, "*u8"), ("e2m1", 2, 32, "*u8"))
    for kind, scale, group, pointer in cases:
        constants, rows = _plan_words(k, group, kind, scale, 1, generation >= 90, 32, 128, True)
        constants = constants | dict(rows_per_scale=1) | ({} if group else dict(groups=1))
        warps, tiles = constants.pop("num_warps"), constants["TILES"]
        assert (rows, warps, tiles) == {3072: (4, 4, 6), 12288: (1, 4, 6)}[k]
        names = types | dict(scale_ptr=pointer)
        text = _ptx("words", "expand_words_kernel", generation, names, constants, num_warps=warps)
        assert text.count("ld.global.v2.b32") == tiles and text.count("st.global.v4.b32") == tiles
        assert len(re.findall(r"ld\.global\.b(?:8|16)", text)) == (tiles if group else 0)
        tables = (tiles if group else 1) * (5 if kind == "int4" else 4)
        found = len(re.findall(r"cvt\.rn\.satfinite\.e4m3x2\.f32", text)) - 2 * (generation >= 90)  # of `up`
        assert tables <= found <= tables * (1 if rows > 1 else 2)
        assert "prmt.b32" in text and not re.search(r"cvt\.rn\.f32\.s32", text)
        assert len(re.findall(r"ld\.shared", text)) <= 2


@pytest.mark.parametrize("generation", GENERATIONS)
@pytest.mark.parametrize(
    "case",
    [(0, 0, 32, 0, True), (1, 1, 64, 8, False), (2, 0, 64, 0, False), (3, 0, 64, 0, False)],
    ids=["int4", "nvfp4", "int8", "fp8"],
)
def test_gemv(generation, case):
    """16-bit tensor cores, codes copied to shared memory 16 bytes at a time; no FP8 type anywhere."""
    import triton.language as tl

    kind, scale, size, inside, per_step = case
    types = dict(x_ptr="*bf16", w_ptr="*u8", scale_ptr="*u8" if scale else "*fp16", unit_ptr="*fp32", bias_ptr="*bf16")
    types |= dict(out_ptr="*bf16", partial_ptr="*fp32", counter_ptr="*i32", k="i32*16", stride="i32*16", n="i32*16")
    constants = dict(
        KIND=kind, SCALE=scale, UNIT=1, BIAS=True, dtype=tl.bfloat16, ASM=True, EVEN=True, BYTES=size, INSIDE=inside,
        PER_STEP=per_step, rows_per_scale=1,
    )  # fmt: skip
    one = dict(BN=16, BM=1, S=4, UNROLL=1, SPLIT=False)
    more = dict(BN=32, BM=8, S=4, UNROLL=2, SPLIT=True)
    if not scale and kind == 0:  # with zero points
        zeros = types | dict(unit_ptr="*u8")
        _ptx("gemv", "gemv_kernel", generation, zeros, constants | one | dict(UNIT=3), num_warps=4, num_stages=3)
    for tile in (one, more) if generation in (80, 90) else (one,):
        text = _ptx("gemv", "gemv_kernel", generation, types, constants | tile, num_warps=4, num_stages=3)
        assert _products(text) == {"mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32"}
        assert "cp.async.c" in text and "e4m3" not in text and ("atom" in text) == tile["SPLIT"]
        if kind < 2:  # decoded without conversions: they run at a quarter of the rate
            assert not re.search(r"cvt\.rn\.bf16\.s32", text)
        if kind == 0 and tile is one:  # nor is anything subtracted from a code
            assert not re.search(r"fma\.rn\.bf16x2", text)


@pytest.mark.parametrize(
    ("generation", "case"),
    [*((g, c) for g in GENERATIONS for c in ((0, 0, 4, 0), (1, 1, 1, 1))), (90, (0, 0, 8, 3)), (90, (0, 0, 0, 0))],
)
def test_one_row(generation, case):
    """Nothing but the sums at the end passes between lanes or through shared memory: the compiler gave lanes, warps and
    operands what the kernel meant for them."""
    import triton.language as tl

    from dq.kernels.gemm.gemv import _habits

    kind, scale, group, unit = case
    types = dict(x_ptr="*bf16", w_ptr="*i32", scale_ptr="*u8" if scale else "*fp16", bias_ptr="*bf16", out_ptr="*bf16")
    types |= dict(unit_ptr="*u8" if unit == 3 else "*fp32", n="i32*16")
    rows, warps, steps = 8, 4, 2
    constants = dict(
        KIND=kind, SCALE=scale, UNIT=unit, BIAS=True, dtype=tl.bfloat16, ASM=True, EVEN=True, GROUP=group, S=warps,
        R=rows, U=steps, K=4096, GROUPS=256 // max(group, 1), STRIDE=512, OWN=True, ONCE=True, EARLY=True,
        rows_per_scale=1, **_habits(),
    )  # fmt: skip
    text = _ptx("row", "row_kernel", generation, types, constants, num_warps=warps, num_stages=1, maxnreg=96)
    assert _products(text) == {"mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32"}
    assert text.count("shfl.sync") <= rows * 5 + rows * 2 and text.count("bar.sync") <= 5
    assert text.count("ld.global.v2.b32") == rows * steps and text.count("st.shared") <= 4 * warps
    assert text.rindex("ld.global.v2.b32") < text.index("bar.sync") < text.index("mma.sync")  # all are under way first
    assert not re.search(r"cvt\.rn\.bf16\.s32", text)


@pytest.mark.parametrize("generation", GENERATIONS)
@pytest.mark.parametrize("grouped", [False, True], ids=["channel", "group64"])
def test_int8_product(generation, grouped):
    types = dict(a_ptr="*i8", b_ptr="*i8", sa_ptr="*fp32", sb_ptr="*fp32", bias_ptr="*bf16", out_ptr="*bf16")
    types |= dict(n="i32*16", k="i32*16")
    import triton.language as tl

    types |= dict(low_ptr="*bf16", up_ptr="*bf16")
    constants = dict(INTEGER=True, GROUPED=grouped, BLOCK=False, BIAS=True, EVEN=True, BM=128, BN=128, BK=64, BAND=8)
    constants |= dict(LOW=False, dtype=tl.bfloat16, SPLIT=False)
    found = _products(_ptx("gemm", "gemm_kernel", generation, types, constants, num_warps=8, num_stages=3))
    wanted = {90: ("wgmma.mma_async", "s32.s8.s8"), 100: ("tcgen05.mma", "kind::i8")}.get(
        generation, ("mma.sync", "s32.s8.s8.s32")
    )
    assert found and all(wanted[0] in name and wanted[1] in name for name in found), found
    if not grouped:  # a low-rank branch is a 16-bit product more
        constants |= dict(LOW=True)
        more = _products(_ptx("gemm", "gemm_kernel", generation, types, constants, num_warps=8, num_stages=3)) - found
        assert more and all("bf16" in name or "f16" in name for name in more), more


@pytest.mark.parametrize("generation", GENERATIONS[1:])
def test_fp8_block_product(generation):
    types = dict(a_ptr="*fp8e4nv", b_ptr="*fp8e4nv", sa_ptr="*fp32", sb_ptr="*fp32", bias_ptr="*bf16", out_ptr="*bf16")
    types |= dict(n="i32*16", k="i32*16")
    import triton.language as tl

    types |= dict(low_ptr="*bf16", up_ptr="*bf16")
    constants = dict(INTEGER=False, GROUPED=True, BLOCK=True, BIAS=True, EVEN=True, BM=64, BN=128, BK=128, BAND=8)
    constants |= dict(LOW=False, dtype=tl.bfloat16, SPLIT=False)
    found = _products(_ptx("gemm", "gemm_kernel", generation, types, constants, num_warps=8, num_stages=3))
    form = ("mma.sync", ".f32.e4m3.e4m3.f32")  # on sm_120 too: its block-scaled form is for scales of 32
    form = {90: ("wgmma.mma_async", ".f32.e4m3.e4m3"), 100: ("tcgen05.mma", "kind::f8f6f4")}.get(generation, form)
    assert len(found) == 1 and all(name.startswith(form[0]) and form[1] in name for name in found), found


@pytest.mark.parametrize("generation", GENERATIONS[1:])
def test_fp8_of_few_rows(generation, monkeypatch):
    """As a layer 14336 -> 4096 launches it for 16 rows: several programs a tile, copies of 16 bytes behind products,
    one atomic addition, partial sums past the L1."""
    import torch

    from dq.kernels.gemm import gemm

    monkeypatch.setattr(gemm, "capability", lambda device: divmod(device.index, 10))
    monkeypatch.setattr(gemm, "multiprocessors", lambda index: 132)
    there = torch.device("cuda", generation)
    constants, grid, each = gemm._plan(16, 4096, 14336, 0, 1, False, True, None, there)
    assert grid == (64, 4) and each == 28 and constants["SPLIT"] and constants["EVEN"]
    options = {name: constants[name] for name in ("num_warps", "num_stages")}
    constants = {name: value for name, value in constants.items() if name not in options}
    types = dict(a_ptr="*fp8e4nv", b_ptr="*fp8e4nv", sa_ptr="*fp32", sb_ptr="*fp32", bias_ptr="*bf16", out_ptr="*bf16")
    types |= dict(low_ptr="*bf16", up_ptr="*bf16", partial_ptr="*fp32", counter_ptr="*i32", n="i32*16", k="i32*16")
    text = _ptx("gemm", "gemm_kernel", generation, types, constants, **options)
    assert len(_products(text)) == 1 and "cp.async.cg" in text and len(re.findall(r"\batom\.", text)) == 1
    assert "ld.global.cg" in text and "acq_rel" in text


@pytest.mark.parametrize("generation", GENERATIONS[1:])
@pytest.mark.parametrize("given", ["rounding", "codes", "floats"])
def test_one_row_of_fp8(generation, given):
    """E4M3 becomes FP16 two at a time by the device's own conversion and nothing else; a lane loads eight columns at
    once; only sums and a maximum pass between lanes, and W never through shared memory."""
    from dq.kernels.library import reversed_lanes

    rounds, codes = given == "rounding", given == "codes"
    types = dict(
        x_ptr="*u8" if codes else "*bf16", factor_ptr="*fp32", w_ptr="*u8", scale_ptr="*fp32", bias_ptr="*bf16"
    )
    types |= dict(out_ptr="*bf16", n="i32*16", k="i32*16", stride="i32*16")
    rows, warps, steps = 8, 4, 2
    constants = dict(
        ROUND=rounds, FACTOR=codes, BIAS=True, NATIVE=True, HARDWARE=generation >= 90, EVEN=True, R=rows, C=32 * warps,
        U=steps, REVERSE=reversed_lanes(),
    )  # fmt: skip
    text = _ptx("row8", "row8_kernel", generation, types, constants, num_warps=warps, num_stages=1)
    assert not _products(text) and text.count("ld.global.v2.b32") == steps * (rows + codes)
    own = codes or (rounds and generation >= 90)  # those of x
    assert len(re.findall(r"cvt\.rn\.f16x2\.e4m3x2", text)) == steps * 4 * (rows + own)
    to_e4m3 = len(re.findall(r"cvt\.rn\.satfinite\.e4m3x2\.f32", text))
    assert to_e4m3 == (steps * 4 if rounds and generation >= 90 else 0)
    assert text.count("shfl.sync") <= rows * 7 + 8 * rounds and text.count("st.shared") <= 2 * rows
    loop = text[text.index("ld.global.v2.b32") : text.rindex("cvt.rn.f16x2.e4m3x2")]
    assert not re.search(r"\.shared|shfl|bar\.sync", loop)


SHARED = {100: 227 * 1024, 120: 99 * 1024}  # bytes of shared memory that a program can have
TMEM = 512  # columns of sm_100's tensor memory
KINDS = {
    ("e2m1", 16): ("kind::mxf4nvf4.block_scale", "mxf4nvf4.block_scale.scale_vec::4X"),
    ("e2m1", 32): ("kind::mxf4.block_scale", "mxf4nvf4.block_scale.scale_vec::2X"),
    ("e4m3", 32): ("kind::mxf8f6f4.block_scale", "mxf8f6f4.block_scale.scale_vec::1X"),
}


@pytest.mark.parametrize("generation", [100, 120])
@pytest.mark.parametrize(
    ("form", "group", "columns"),
    [*(("e2m1", 16, s) for s in (0, 64, 80, 160)), ("e2m1", 32, 0), ("e4m3", 32, 0)],
    ids=["nvfp4", "nvfp4-64", "nvfp4-80", "nvfp4-160", "mxfp4", "mxfp8"],
)
def test_block_scaled_product(generation, form, group, columns, monkeypatch):
    """As a layer with K = 4096 and residual columns launches it. Both operands go to the tensor cores as they rest,
    nothing is widened; a low-rank branch is one 16-bit product more. Codes and scales are copied while the tensor
    cores work, also where K + S ends within a step of the kernel and within a word; memory on the chip suffices."""
    import torch

    from dq.kernels.gemm import block_scaled

    monkeypatch.setattr(block_scaled, "capability", lambda device: divmod(device.index, 10))
    stride = (4096 + columns) // (2 if form == "e2m1" else 1)
    groups = (4096 + columns) // group
    groups += -groups % 16 if groups % 4 else 0
    half = None if columns == 64 else False
    constants, _ = block_scaled._plan(
        4608, 3072, stride, groups, form, group, True, 1, True, half, torch.device("cuda", generation)
    )
    options = {name: constants[name] for name in ("num_warps", "num_stages")}
    constants = {name: value for name, value in constants.items() if name not in options}
    scale, element = "*fp8e4nv" if group == 16 else "*u8", "*u8" if form == "e2m1" else "*fp8e4nv"
    types = dict(a_ptr=element, b_ptr=element, a_scale_ptr=scale, b_scale_ptr=scale, row_ptr="*fp32", unit_ptr="*fp32")
    types |= dict(bias_ptr="*bf16", low_ptr="*bf16", up_ptr="*bf16", out_ptr="*bf16", n="i32*16", rank="i32*16")
    built = _build("block_scaled", "block_scaled_kernel", generation, types, constants, **options)
    found = _products(built.asm["ptx"])
    scaled = {name for name in found if KINDS[form, group][generation == 120] in name}
    low = {name for name in found if "kind::f16" in name or "bf16.bf16" in name}
    assert scaled and found == scaled | low and bool(low) == (half is not None), found
    assert not re.search(r"ld\.global\.(v\d\.)?b8", built.asm["ptx"]) and "cp.async.c" in built.asm["ptx"]
    assert built.metadata.shared <= SHARED[generation] and (getattr(built.metadata, "tmem_size", 0) or 0) <= TMEM
