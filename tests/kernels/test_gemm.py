"""Matrix products with quantized weights: equal to their references, traceable, and the ones that layers run on."""

import importlib.util
import os
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from case_scripts import compare

from dq.kernels.gemm import expand, gemm, gemv, layout, rows
from dq.linear import QuantizedLinear
from dq.ops import BACKENDS, choose_backend, reference_qlinear
from dq.qtensor import quantize
from dq.recipe import PRESETS, Recipe
from dq.spec import QuantSpec
from dq.transforms import Step

CASES = Path(__file__).with_name("gemm_cases.py")
SCRIPTS = (CASES, CASES.with_name("few_rows_cases.py"))
_SPEC = importlib.util.spec_from_file_location("dq_tests_gemm_cases", CASES)
gemm_cases = importlib.util.module_from_spec(_SPEC)
_SPEC.loader.exec_module(gemm_cases)
E4M3 = torch.float8_e4m3fn
# backend -> (weights, activations) of a layer that it runs
LAYERS = {
    "cublaslt-fp8": ("fp8_e4m3/channel", "fp8_e4m3/token"),
    "expand-fp8": ("int4/group64", "int4/group64/fp32"),
    "expand-fp8-faithful": ("nvfp4", "nvfp4-token"),
    "int8-mma": ("int4/channel", "int4/token"),
    "w4a16-gemv": ("int4/group64", None),
    "expand-bf16": ("nvfp4", "nvfp4-token"),
    "fp8-block": ("fp8-block", "fp8-block-token"),
    "block-scaled-mma": ("nvfp4", "nvfp4-token"),
}


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: path.stem)
def test_equal_to_the_references_in_the_interpreter(script):
    compare(script, "cpu", TRITON_INTERPRET="1", OMP_NUM_THREADS="1")


@pytest.mark.gpu
@pytest.mark.slow
@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: path.stem)
def test_equal_to_the_references_on_cuda(script):
    compare(script, "cuda", min(12, os.cpu_count() or 1), TRITON_INTERPRET="0")


@pytest.mark.parametrize("name", LAYERS)
def test_compiles_without_a_break(name):
    """`torch.compile(fullgraph=True)` of every backend, on the operators' plain-torch references, for any M."""
    weights, grid = LAYERS[name]
    params = gemm_cases.layer(weights, grid, 64, 128, True).params
    run = BACKENDS.get(name).run
    torch._dynamo.reset()
    compiled = torch.compile(lambda x: run(x, params), backend="aot_eager", fullgraph=True)
    for m in (5, 40):
        x = torch.randn(m, 128).bfloat16()
        assert torch.equal(compiled(x), run(x, params))


@pytest.mark.parametrize("name", ["expand-fp8-faithful", "block-scaled-mma"])
def test_residual_columns_compile(name):
    """ARC's layer of a language model: 32 channels twice on both sides, swept activation scales, sorted channels."""
    params, run = gemm_cases.layer("nvfp4", "nvfp4-token@sweep", 32, 128 + 64, False).params, BACKENDS.get(name).run
    params = replace(params, residual=32, dual=True, steps=[Step("permute", {"order": torch.randperm(128)})])
    torch._dynamo.reset()
    compiled = torch.compile(lambda x: run(x, params), backend="aot_eager", fullgraph=True)
    x = torch.randn(5, 128).bfloat16()
    assert torch.equal(compiled(x), run(x, params))
    assert gemm_cases.error(run(x, params), reference_qlinear(x, params)) < gemm_cases.LEVEL.get(name, 4e-3)


@pytest.mark.parametrize("name", [n for n in LAYERS if n not in ("expand-fp8-faithful", "expand-bf16")])
def test_one_graph_for_any_size(name):
    """With `dynamic=True` a layer, its rotation included, is traced once for few and once for many rows at most."""
    from torch._dynamo.utils import counters

    params, run = gemm_cases.layer(*LAYERS[name], 64, 128, True).params, BACKENDS.get(name).run
    torch._dynamo.reset()
    counters.clear()
    compiled = torch.compile(lambda x: run(x, params), backend="aot_eager", fullgraph=True, dynamic=True)
    for m in (5, 40, 17, 300):
        x = torch.randn(m, 128).bfloat16()
        assert torch.equal(compiled(x), run(x, params))
    assert counters["stats"]["unique_graphs"] <= 2


@pytest.mark.gpu
@pytest.mark.parametrize("name", [n for n in LAYERS if n != "block-scaled-mma"])
def test_inductor_and_graphs_on_cuda(name):
    """Inductor gives what eager gives, and so does a captured graph on inputs that it has not seen."""
    layer = gemm_cases.layer(*LAYERS[name], 256, 512, True).cuda()
    params, run = layer.params, BACKENDS.get(name).run
    if BACKENDS.get(name).refuse(params, torch.device("cuda"), torch.bfloat16):
        pytest.skip(BACKENDS.get(name).refuse(params, torch.device("cuda"), torch.bfloat16))
    torch._dynamo.reset()
    compiled = torch.compile(lambda x: run(x, params), fullgraph=True)
    for m in (1, 300):
        x = torch.randn(m, 512, device="cuda").bfloat16()
        assert gemm_cases.error(compiled(x), run(x, params)) < 5e-3
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            y = run(x, params)
        x.copy_(torch.randn_like(x))
        graph.replay()
        assert torch.equal(y, run(x, params))


@pytest.mark.gpu
def test_remembered_launches_know_alignment():
    """A kernel compiled for aligned rows is not the one that runs on rows that begin anywhere."""
    q = quantize(torch.randn(64, 512, device="cuda"), QuantSpec.parse("int4/group128"))
    x = torch.randn(1025, device="cuda").bfloat16()
    for start in (0, 1, 0, 1, 2):
        row = x[start : start + 512].view(1, 512)
        assert gemm_cases.error(gemv.weight_only(row, q), gemv.weight_only(row.clone(), q)) < 2e-3


def _arguments() -> dict[str, tuple]:
    """Arguments of every operator."""
    w, x = quantize(torch.randn(16, 64), QuantSpec.parse("int4/group64")), torch.randn(3, 64).bfloat16()
    lay, (codes, scale, unit) = layout.layout_of(w.spec), layout.parts(w)
    a, b = (torch.randint(-9, 9, (m, 64), dtype=torch.int8) for m in (3, 16))
    nv = quantize(torch.randn(16, 64), QuantSpec.parse("nvfp4"))
    acts = rows.pack(x, [], QuantSpec.parse("nvfp4-token"))
    return {
        "expand": (codes, scale, unit, torch.randn(16, 4), lay.kind, lay.group, lay.rows, 64, 80, E4M3),
        "weight_only": (x, codes, scale, unit, None, lay.kind, lay.group, lay.rows),
        "gemm8": (a, b, torch.rand(3, 1), torch.rand(16, 1), None, None, None, 0, 1, torch.bfloat16),
        "row8": (x[:1], None, b.float().to(E4M3), torch.rand(16), torch.rand(16), True, torch.bfloat16),
        "block_scaled": (*acts, nv.codes, nv.scale, nv.global_scale, None, None, None, "e2m1", 16, torch.bfloat16),
    }


@pytest.mark.parametrize("name", ["expand", "weight_only", "gemm8", "row8", "block_scaled"])
def test_operators_are_described_right(name):
    """Schemas and shapes without data agree with what runs."""
    # A check of schemas multiplies what it is given: not E4M3.
    tests = ("test_schema", "test_faketensor") if name not in ("row8", "block_scaled") else ("test_faketensor",)
    torch.library.opcheck(getattr(torch.ops.dq, name).default, _arguments()[name], test_utils=tests)


def test_expanded_values():
    """INT4 with one scale per row is exact; a scale per group costs what E4M3 rounds; groups of zeros do not matter."""
    w = torch.randn(32, 256) * 1e-4
    w[3, :64] = 0.0
    for text, level in (("int4/channel", 0.0), ("mxfp4", 0.0), ("int4/group64", 0.03), ("nvfp4", 0.03)):
        q = quantize(w, QuantSpec.parse(text))
        values, base = expand.expand(q, E4M3)
        assert gemm_cases.error(values.float() * base[:, None], q.dequantize()) <= level, text


@pytest.mark.parametrize("size", [0.02, 1.0, 50.0])
def test_low_rank_columns_are_finer_than_bf16(size):
    """(x down^T) up^T as extra columns in two E4M3 stages each: less than the 2.9e-3 of a branch in BF16."""
    g = torch.Generator().manual_seed(0)
    q = quantize(torch.randn(64, 128, generator=g) * 0.05, QuantSpec.parse("nvfp4"))
    up, low = torch.randn(64, 32, generator=g) * size, torch.randn(40, 32, generator=g) * 3
    weight, base = expand.expand(q, E4M3, up, 256)
    codes, scale = rows.activate(torch.randn(40, 128, generator=g), [], rows.FP8, "e4m3", extra=low, width=256)
    y = (codes[:, 128:].double() * scale) @ (weight[:, 128:].double() * base[:, None]).T
    assert gemm_cases.error(y, low.double() @ up.double().T) < 2.9e-3


def test_few_and_many_rows_agree():
    """The same layer above and below the limit of the GEMV."""
    q = quantize(torch.randn(48, 128), QuantSpec.parse("int4/group64"))
    x = torch.randn(gemv.LIMIT + 1, 128).to(torch.float16)
    assert gemm_cases.error(gemv.weight_only(x, q)[:-1], gemv.weight_only(x[:-1], q)) < 1e-3


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
@pytest.mark.parametrize("name", ["cublaslt-fp8", "int8-mma", "fp8-block", "block-scaled-mma"])
def test_a_small_branch_is_kept(name, device):
    """A low-rank branch of 1e-4 of the weight, as a fused LoRA may be: what a layer gives with it less what it gives
    without it, projected on what it should be. Added to a BF16 result, a fifth of it would be left."""
    if name == "block-scaled-mma" and device == "cuda" and torch.cuda.get_device_capability() < (10, 0):
        pytest.skip("no block-scaled tensor cores")
    weights, grid = LAYERS[name]
    g = torch.Generator().manual_seed(0)
    w, x = torch.randn(512, 256, generator=g) * 0.05, torch.randn(200, 256, generator=g).bfloat16()
    down, up = torch.randn(4, 256, generator=g).bfloat16() * 0.05, torch.randn(512, 4, generator=g).bfloat16() * 5e-5
    want, y = (x.double() @ down.double().T) @ up.double().T, []
    for side in (None, (down, up)):
        layer = QuantizedLinear.build(
            quantize(w, QuantSpec.parse(weights)), activations=QuantSpec.parse(grid), side=side
        ).to(device)
        y.append(BACKENDS.get(name).run(x.to(device), layer.params).cpu().double())
    kept = float(((y[1] - y[0]) * want).sum() / want.square().sum())
    assert 0.8 < kept < 1.2, kept


def test_products_of_nothing():
    a, b, one = torch.zeros(0, 32, dtype=torch.int8), torch.zeros(16, 32, dtype=torch.int8), torch.ones(16, 1)
    assert gemm.gemm(a, b, one[:0], one).shape == (0, 16)


@pytest.mark.parametrize(
    ("text", "reason"),
    [("uint4/channel", "zero points"), ("int4/group48", "groups of 48"), ("nf4", "nf4"), ("fp8_e5m2/channel", "e5m2")],
)
def test_refused_weights(text, reason):
    assert reason in layout.why_not(QuantSpec.parse(text))


# What each preset's linears run on: (native, faithful) by compute capability.
CHOICES = {
    (8, 0): {
        "w4a16-awq": ("w4a16-gemv", "w4a16-gemv"), "w4a16-gptq": ("w4a16-gemv", "w4a16-gemv"),
        "fp8": ("expand-bf16", None), "fp8-static": ("expand-bf16", None), "int8": ("int8-mma", "int8-mma"),
        "int8-smooth": ("int8-mma", "int8-mma"), "w4a16": ("w4a16-gemv", "w4a16-gemv"),
        "w4a4-int4": ("int8-mma", "int8-mma"), "w4a4-int4-convrot": ("int8-mma", "int8-mma"),
        "w4a4-int4-svd": ("int8-mma", "int8-mma"), "w4a4-nvfp4": ("expand-bf16", None),
        "w4a4-nvfp4-svd": ("expand-bf16", None), "w4a4-nvfp4-arc": ("expand-bf16", None),
    },
    (9, 0): {
        "w4a8": ("expand-fp8", "expand-fp8-faithful"), "w4a4-mxfp4": ("expand-fp8", "expand-fp8-faithful"),
        "w4a16-awq": ("w4a16-gemv", "w4a16-gemv"), "w4a16-gptq": ("w4a16-gemv", "w4a16-gemv"),
        "fp8": ("cublaslt-fp8", "cublaslt-fp8"), "fp8-static": ("cublaslt-fp8", "cublaslt-fp8"),
        "int8": ("int8-mma", "int8-mma"), "int8-smooth": ("int8-mma", "int8-mma"),
        "w4a16": ("w4a16-gemv", "w4a16-gemv"), "w4a4-int4": ("expand-fp8", "int8-mma"),
        "w4a4-int4-convrot": ("expand-fp8", "int8-mma"),
        "w4a4-int4-svd": ("expand-fp8", "int8-mma"), "w4a4-nvfp4": ("expand-fp8", "expand-fp8-faithful"),
        "w4a4-nvfp4-svd": ("expand-fp8", "expand-fp8-faithful"),
        "w4a4-nvfp4-arc": ("expand-fp8", "expand-fp8-faithful"),
        "w4a4-nvfp4-arc-llm": ("expand-fp8", "expand-fp8-faithful"),
        "w4a4-int4-quarot": ("expand-fp8", "int8-mma"), "w4a4-int4-quarot-gptq": ("expand-fp8", "int8-mma"),
        "w4a4-int4-spinquant": ("expand-fp8", "int8-mma"), "int8-smooth-fold": ("int8-mma", "int8-mma"),
        "w4a16-awq-fold": ("w4a16-gemv", "w4a16-gemv"),
    },
    (12, 0): {
        "fp8": ("cublaslt-fp8", "cublaslt-fp8"), "w4a4-int4": ("expand-fp8", "int8-mma"),
        "w4a4-nvfp4": ("block-scaled-mma", "block-scaled-mma"),
        "w4a4-nvfp4-svd": ("block-scaled-mma", "block-scaled-mma"),
        "w4a4-nvfp4-arc": ("block-scaled-mma", "block-scaled-mma"),
        "w4a4-nvfp4-arc-llm": ("block-scaled-mma", "block-scaled-mma"),
        "w4a4-mxfp4": ("block-scaled-mma", "block-scaled-mma"), "w4a8": ("expand-fp8", "expand-fp8-faithful"),
        "int8": ("int8-mma", "int8-mma"), "w4a16": ("w4a16-gemv", "w4a16-gemv"),
        "w4a4-int4-svd": ("expand-fp8", "int8-mma"),
    },
}  # fmt: skip
CHOICES[8, 9] = CHOICES[9, 0]
CHOICES[10, 0] = CHOICES[12, 0]


MIXTURES = {"w4a4-auto", "w4a4-auto-best", "int8-outliers"}  # their layers are of several kinds, all in other rows
# Inputs that no kernel prepares.
BY_TORCH = {"fp8-static": "static activations"} | dict.fromkeys(("w4a16-awq", "w4a16-awq-fold"), "input steps smooth")


def _pretend(monkeypatch, generation):
    """The choice is a function of layer, device and mode: no GPU is needed to ask for it."""
    from dq.kernels import library

    monkeypatch.setattr(library, "_capability", lambda index: generation)
    monkeypatch.setattr(library, "has_triton", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)


@pytest.mark.parametrize("generation", CHOICES, ids=lambda g: f"sm_{g[0]}{g[1]}")
def test_what_presets_run_on(generation, monkeypatch):
    _pretend(monkeypatch, generation)
    for preset, wanted in CHOICES[generation].items():
        params = _of_preset(preset)
        for mode, name in zip(("native", "faithful"), wanted, strict=True):
            chosen = choose_backend(params, torch.device("cuda"), torch.bfloat16, mode).backend
            assert chosen.name == (name or "torch-reference"), (preset, mode, chosen.name)
            if generation >= (8, 9) and mode == "native":
                why, known = chosen.in_torch(params), BY_TORCH.get(preset, "")
                assert bool(why) == bool(known) and why.startswith(known), (preset, why)


def test_every_preset_has_its_kernel_here():
    """A new preset says here what it runs on, so that none falls back unseen."""
    assert set(CHOICES[9, 0]) | MIXTURES == {p.stem for p in PRESETS.glob("*.toml")}


def test_an_input_that_plain_torch_prepares_is_said(monkeypatch):
    """QuaRot's last linear of an MLP: the kernel runs its product, its Hadamard matrix at run time has none."""
    _pretend(monkeypatch, (9, 0))
    params = gemm_cases.layer("int4/channel", "int4/token", 256, 512, False).params
    params = replace(params, steps=[Step("rotate", params={"size": -1, "kind": "sylvester"})])
    chosen = choose_backend(params, torch.device("cuda"), torch.bfloat16, "native").backend
    assert chosen.name == "expand-fp8" and "rotate (sylvester)" in chosen.in_torch(params)


def _of_preset(preset: str):
    """Parameters of a linear [256, 512] as a preset makes it, but for rules that need calibration."""
    linear = Recipe.load(preset).linear
    weights = linear.weights.with_(scale_rule="floor" if linear.weights.scale_format == "e8m0" else "absmax")
    grid = None if linear.activations is None else str(linear.activations)
    arc = any(t[0] == "arc" for t in linear.transforms)
    layer = gemm_cases.layer(str(weights), grid, 256, 512 + 64 * arc, bool(linear.transforms) and not arc)
    steps = [Step("smooth", {"factor": torch.ones(512)}), Step("permute", {"order": torch.arange(512)})]
    return replace(layer.params, residual=32, dual=True, steps=steps) if arc else layer.params
