"""Layers that get the same input prepare it once; a compiled layer is one call whose inside the compiler can fuse."""

import gc
import weakref

import pytest
import torch
from functorch.compile import aot_function, make_boxed_func
from torch import nn
from torch._dynamo.testing import CompileCounter

import dq
from dq.kernels.backends import expand_fp8, fp8_block, int8_mma, scaled_mm, weight_only
from dq.kernels.gemm import rows
from dq.linear import layer_info, quantized_linears

K, N, TOKENS = 64, 48, 40  # more tokens than the kernels for few rows take


class Attention(nn.Module):
    """Three linears of one input, and one of what they make."""

    def __init__(self, write: bool = False):
        super().__init__()
        self.to_q, self.to_k, self.to_v = (nn.Linear(K, K) for _ in range(3))
        self.to_out, self.write = nn.Linear(K, N), write

    def forward(self, x):
        x = torch.nn.functional.layer_norm(x, (K,))
        q = self.to_q(x)
        x = x.add_(1.0) if self.write else x
        return self.to_out(torch.sigmoid(q) * self.to_k(x) + self.to_v(x))


@pytest.fixture
def native(monkeypatch):
    """The backends of GPUs accept layers on the CPU, where their operators run their own references."""
    for module in (expand_fp8, fp8_block, int8_mma, scaled_mm, weight_only):
        if hasattr(module, "why_not"):
            monkeypatch.setattr(module, "why_not", lambda *args, **kwargs: "")


@pytest.fixture
def prepared(monkeypatch):
    """Inputs that were prepared, in order."""
    seen, activate = [], rows.activate
    monkeypatch.setattr(rows, "activate", lambda *args: seen.append(args[0]) or activate(*args))
    return seen


def build(preset, write=False):
    torch._dynamo.reset()
    model = Attention(write).eval().to(torch.bfloat16)
    dq.quantize(model, dq.Recipe.load(preset).with_(min_features=16), activations="native", progress=False)
    return model


def tokens(count=TOKENS, seed=0):
    return torch.randn(count, K, generator=torch.Generator().manual_seed(seed)).bfloat16()


def apart(model, x):
    """The same with an input of its own for every layer."""
    x = torch.nn.functional.layer_norm(x, (K,))
    q = model.to_q(x.clone())
    x = x.add_(1.0) if model.write else x
    return model.to_out(torch.sigmoid(q) * model.to_k(x.clone()) + model.to_v(x.clone()))


PRESETS = {"fp8": "cublaslt-fp8", "int8": "int8-mma", "w4a4-nvfp4": "expand-fp8", "w4a4-int4-convrot": "expand-fp8"}
presets = pytest.mark.parametrize("preset", PRESETS)


@presets
@torch.no_grad()
def test_one_input_is_prepared_once(native, prepared, preset):
    model, x = build(preset), tokens()
    y = model(x)
    assert [layer.backend for layer in layer_info(model)] == [PRESETS[preset]] * 4
    assert len(prepared) == 2
    assert torch.equal(y, apart(model, x)) and len(prepared) == 6
    assert torch.equal(y, model(x)) and len(prepared) == 8


@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
@torch.no_grad()
def test_a_write_between_two_layers_is_seen(native, compiled):
    model, x = build("fp8", write=True), tokens()
    expected = apart(model, x)
    run = torch.compile(model, backend="aot_eager", fullgraph=True) if compiled else model
    assert torch.equal(run(x), expected)


@torch.no_grad()
def test_a_second_call_prepares_anew(native):
    """A replayed CUDA graph writes to tensors without a trace of it in their version."""
    model, x = build("fp8"), tokens()
    model.to_q(x)
    x.data.copy_(tokens(seed=1))
    model.to_k(x)  # one round with the call before: nothing can have run in between
    assert torch.equal(model.to_q(x), model.to_q(tokens(seed=1)))
    assert torch.equal(model.to_k(x), model.to_k(tokens(seed=1)))


def test_what_was_prepared_ends_with_its_input(native, prepared):
    model, x = build("fp8"), tokens()
    with torch.no_grad():
        model.to_q(x)
    made = [weakref.ref(t) for t in gc.get_objects() if type(t) is torch.Tensor and t.dtype == torch.float8_e4m3fn]
    alive = sum(r() is not None for r in made)
    prepared.clear()
    del x
    assert sum(r() is not None for r in made) == alive - 1


@torch.inference_mode()
def test_inference_mode_shares_nothing(native, prepared):
    """Its tensors count no writes."""
    model = build("fp8")
    model(tokens())
    assert len(prepared) == 4


def graph_of(model, x):
    """Operators that a backend compiler gets."""
    found = []

    def note(graph, inputs):
        found.extend(str(n.target) for n in graph.graph.nodes if n.op == "call_function")
        return make_boxed_func(graph.forward)

    torch.compile(model, backend=lambda graph, inputs: aot_function(graph, note, note), fullgraph=True)(x)
    return found


@presets
@torch.no_grad()
def test_compiled_layers_are_bit_equal_and_share(native, preset):
    """Rounding without a rotation is plain operators then, which a compiler fuses with the norm before it."""
    model, x = build(preset), tokens()
    expected = model(x)
    operators = graph_of(model, x)
    rotated = preset == "w4a4-int4-convrot"
    assert operators.count("dq.activate.default") == (2 if rotated else 0)
    assert operators.count("aten.amax.default") == (0 if rotated else 2)
    torch._dynamo.reset()
    assert torch.equal(torch.compile(model, backend="aot_eager", fullgraph=True)(x), expected)


@torch.no_grad()
def test_wide_inputs_keep_the_kernel(native, monkeypatch):
    """Where a compiler would pass over a row twice, and compute twice what stands before it."""
    monkeypatch.setattr(rows, "_WIDEST", K - 1)
    operators = graph_of(build("fp8"), tokens())
    assert (operators.count("dq.activate.default"), operators.count("aten.amax.default")) == (2, 0)


@presets
@torch.no_grad()
def test_a_compiled_layer_is_one_call(native, preset):
    """Dynamo sees its tensors; in a graph of one call no field of a layer is guarded."""
    model, calls = build(preset), []

    def note(graph, inputs):
        calls.extend(n.target.__name__ for n in graph.graph.nodes if n.op == "call_function")
        return graph.forward

    torch.compile(model, backend=note, fullgraph=True)(tokens())
    assert calls.count("traced") == 4 and len(calls) <= 8
    assert [layer.backend for layer in layer_info(model)] == [PRESETS[preset]] * 4


@presets
@torch.no_grad()
def test_numbers_of_tokens_are_symbols(native, preset):
    model, counter = build(preset), CompileCounter()
    run = torch.compile(model, backend=counter, fullgraph=True)
    for count in (TOKENS, TOKENS + 9, TOKENS + 30, TOKENS + 77):
        assert torch.equal(run(tokens(count)), model(tokens(count)))
    assert counter.frame_count == 2


@torch.no_grad()
def test_a_change_of_mode_or_config_compiles_anew(native):
    model, x = build("w4a4-nvfp4"), tokens()
    run = torch.compile(model, backend="aot_eager", fullgraph=True)
    native_y = run(x)
    for layer in quantized_linears(model).values():
        layer.activations_mode = "faithful"
    assert torch.equal(run(x), model(x)) and not torch.equal(run(x), native_y)


@pytest.mark.gpu
@presets
@torch.no_grad()
def test_inductor_agrees_with_eager(preset):
    """Inside a fused kernel values stay in float32 that eager rounds to 16 bits, so codes differ here and there."""
    model, x = build(preset).cuda(), tokens(300).cuda()
    y = torch.compile(model, fullgraph=True)(x)
    expected = model(x).float()
    assert float((y.float() - expected).norm() / expected.norm()) < 0.03
