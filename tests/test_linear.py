"""`QuantizedLinear` as a module: shapes, copies, casts, state, compilation."""

import copy
import io
import json
import pickle

import pytest
import torch
from torch import nn

from dq.linear import LinearConfig, QuantizedLinear, layer_info, quantized_linears
from dq.ops import reference_qlinear
from dq.qtensor import quantize
from dq.recipe import presets
from dq.registry import DQError
from dq.spec import QuantSpec
from dq.transforms import TRANSFORMS, GroupState, Step

N, K = 40, 64
# weights, activations, transforms
KINDS = {
    "w8a8": ("int8/channel", "int8/token", ()),
    "fp8": ("fp8_e4m3/channel", "fp8_e4m3/token", ()),
    "w4a16": ("int4/group64", None, ()),
    "int4-rotate": ("int4/channel", "int4/token", ("rotate",)),
    "nvfp4": ("nvfp4", "nvfp4-token", ()),
    "all": ("nvfp4", "nvfp4-token", ("smooth", "rotate", "lowrank")),
    "tensor": ("int8/tensor", "int8/token", ()),
    "zero-points": ("uint4/group32", "uint8/token", ()),
    "mx": ("mxfp4", "mxfp8", ()),
    "double": ("nf4-double", None, ()),
    "tiles": ("fp8-block", "fp8-block-token", ()),
    "3-bit": ("int3/group32", None, ("rotate",)),
    "swept": ("nvfp4@sweep", "nvfp4-token@4over6", ()),
}
every_kind = pytest.mark.parametrize("kind", KINDS)


def build(kind, n=N, k=K, bias=True, dtype=torch.float32, seed=0):
    """(layer, the weight it stands for)."""
    weights, activations, names = KINDS[kind]
    g = torch.Generator().manual_seed(seed)
    w = torch.randn(n, k, generator=g) / k**0.5
    acts = None if activations is None else QuantSpec.parse(activations)
    state = GroupState({"a": w}, (("a",),), QuantSpec.parse(weights), acts)
    for name in names:
        if name == "smooth":
            state.add(Step("smooth", {"factor": torch.rand(k, generator=g) + 0.5}))
        else:
            TRANSFORMS.get(name).fit(state)
    b = torch.randn(n, generator=g).to(dtype) if bias else None
    q = quantize(state.weights["a"], state.weight_spec)
    layer = QuantizedLinear.build(q, activations=acts, steps=state.steps, side=state.side.get("a"), bias=b, dtype=dtype)
    return layer, w


def equal_state(a, b):
    a, b = a.state_dict(), b.state_dict()
    same = (a[k].dtype == b[k].dtype and torch.equal(raw(a[k]), raw(b[k])) for k in a)
    return a.keys() == b.keys() and all(same)


def raw(t):
    return t.contiguous().view(torch.uint8)


@every_kind
def test_it_is_a_linear(kind):
    layer, w = build(kind)
    assert isinstance(layer, nn.Linear) and isinstance(layer, QuantizedLinear)
    assert (layer.in_features, layer.out_features) == (K, N)
    x = torch.randn(30, K)
    y, expected = layer(x), x @ w.T + layer.bias
    tolerance = 0.03 if "8" in kind or kind == "tensor" else 0.25
    assert (y - expected).norm() < tolerance * expected.norm()
    assert torch.equal(y, reference_qlinear(x, layer.params))


@every_kind
@pytest.mark.parametrize("shape", [(), (7,), (2, 3), (2, 3, 4), (2, 1, 3, 2), (0,), (2, 0), (0, 3, 4)])
def test_leading_shapes(kind, shape):
    layer, _ = build(kind)
    x = torch.randn(*shape, K)
    y = layer(x)
    assert y.shape == (*shape, N) and y.dtype == x.dtype
    torch.testing.assert_close(y.reshape(-1, N), layer(x.reshape(-1, K)), rtol=1e-5, atol=1e-5)


@every_kind
def test_batch_companions_do_not_matter(kind):
    """A token is quantized by itself: an outlier elsewhere in the batch changes nothing."""
    layer, _ = build(kind)
    x = torch.randn(6, K)
    loud = x.clone()
    loud[3:] *= 1000
    torch.testing.assert_close(layer(loud)[:3], layer(x)[:3], rtol=1e-5, atol=1e-5)
    alone = torch.cat([layer(row[None]) for row in x])
    torch.testing.assert_close(alone, layer(x), rtol=1e-5, atol=1e-5)


@every_kind
def test_any_memory_layout(kind):
    layer, _ = build(kind)
    x = torch.randn(K, 5, 3).permute(1, 2, 0)
    torch.testing.assert_close(layer(x), layer(x.contiguous()), rtol=1e-5, atol=1e-5)


@every_kind
@pytest.mark.parametrize("bias", [True, False])
def test_copies_are_equal_and_independent(kind, bias):
    layer, _ = build(kind, bias=bias)
    x = torch.randn(4, K)
    y = layer(x)  # before copying: a chosen backend must not be in the way
    for other in (copy.deepcopy(layer), pickle.loads(pickle.dumps(layer)), saved(layer)):
        assert type(other) is QuantizedLinear and other.config == layer.config
        assert equal_state(other, layer) and torch.equal(other(x), y)
        other.weight_scale.view(torch.uint8).fill_(1)
        assert torch.equal(layer(x), y)


def saved(layer):
    file = io.BytesIO()
    torch.save(layer, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


@every_kind
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
def test_casts_move_no_weight(kind, dtype):
    """Codes and scales keep their dtypes under `.to(dtype)`; the bias and the reported dtype follow."""
    layer, _ = build(kind)
    before = copy.deepcopy(layer)
    assert layer.to(dtype) is layer
    assert layer.weight.dtype == dtype and layer.bias.dtype == dtype and layer.compute_dtype == dtype
    for name, tensor in layer.named_buffers():
        assert tensor.dtype == before.get_buffer(name).dtype
        assert torch.equal(raw(tensor), raw(before.get_buffer(name)))
    layer.float()
    assert layer.weight.dtype == torch.float32
    assert torch.equal(layer.qtensor.dequantize(), before.qtensor.dequantize())
    assert layer(torch.randn(2, K).to(dtype)).dtype == dtype


def test_casts_through_a_model():
    model = nn.Sequential(build("all")[0], nn.Linear(N, 8))
    scales = copy.deepcopy(dict(model[0].named_buffers()))
    model.bfloat16().half()
    assert model[1].weight.dtype == torch.float16 and model[0].weight.dtype == torch.float16
    assert all(torch.equal(raw(t), raw(scales[n])) for n, t in model[0].named_buffers())
    assert all(t.device.type == "meta" for t in copy.deepcopy(model).to("meta")[0].state_dict().values())


@every_kind
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_weight_holds_no_data(kind, dtype):
    """For code that asks for shape, dtype or device: T5's wo, LoRA shape checks, get_parameter_dtype."""
    layer, _ = build(kind, dtype=dtype)
    w = layer.weight
    assert w.shape == (N, K) and w.dtype == dtype and w.device == layer.qweight.device
    assert w.untyped_storage().nbytes() <= 8
    assert bool(w.isnan().all())  # whoever computes with it learns that it holds nothing
    assert "weight" not in dict(layer.named_parameters()) and "weight" not in layer.state_dict()
    assert not any(p.requires_grad for p in layer.parameters())


@every_kind
@pytest.mark.parametrize("bias", [True, False])
def test_state_round_trip_is_strict(kind, bias):
    layer, _ = build(kind, bias=bias)
    config = LinearConfig.from_dict(json.loads(json.dumps(layer.config.to_dict())))
    assert config == layer.config
    other = QuantizedLinear(K, N, config, bias=bias, dtype=torch.float32)
    assert {n: (tuple(t.shape), t.dtype) for n, t in other.named_buffers()} == config.tensors(N, K)
    other.load_state_dict(layer.state_dict(), strict=True)
    x = torch.randn(5, K)
    assert equal_state(other, layer) and torch.equal(other(x), layer(x))
    for key in layer.state_dict():
        state = layer.state_dict()
        del state[key]
        with pytest.raises(RuntimeError, match=key):
            other.load_state_dict(state, strict=True)


@every_kind
def test_made_empty_on_meta(kind):
    config = build(kind)[0].config
    layer = QuantizedLinear(K, N, config, device="meta")
    assert all(t.is_meta for t in layer.state_dict().values()) and layer.weight.is_meta
    real = layer.to_empty(device="cpu")
    assert {n: (tuple(t.shape), t.dtype) for n, t in real.named_buffers()} == config.tensors(N, K)


@every_kind
def test_dequantized_weight_is_in_the_raw_basis(kind):
    """It stands for W itself, not for the smoothed, rotated residual: what dequantize puts back and a LoRA sees."""
    layer, w = build(kind)
    back = layer.dequantized_weight()
    assert back.dtype == torch.float32 and back.shape == w.shape
    limit = {8: 0.03, 4: 0.2, 3: 0.3}[layer.config.weights.fmt.bits]
    assert (back - w).norm() < limit * w.norm()
    x = torch.randn(20, K)
    layer.config = LinearConfig(layer.config.weights, None, layer.config.steps, layer.config.rank)
    torch.testing.assert_close(layer(x), x @ back.T + layer.bias, rtol=1e-4, atol=1e-4)


def test_layers_of_one_group_share_no_memory():
    """safetensors refuses aliased tensors, and a cast of one layer must not touch another."""
    factor, down = torch.rand(K) + 0.5, torch.randn(8, K).bfloat16()
    layers = [
        QuantizedLinear.build(
            quantize(torch.randn(N, K), QuantSpec.parse("int8/channel")),
            steps=[Step("smooth", {"factor": factor})],
            side=(down.clone(), torch.randn(N, 8).bfloat16()),
        )
        for _ in range(2)
    ]
    one, two = ({t.untyped_storage().data_ptr() for t in layer.buffers()} for layer in layers)
    assert not one & two and factor.untyped_storage().data_ptr() not in one


@every_kind
def test_compiles_without_a_break(kind):
    torch._dynamo.reset()
    layer, _ = build(kind)
    x = torch.randn(3, 5, K)
    expected = layer(x)
    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(x), expected, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(compiled(x[:2]), expected[:2], rtol=1e-5, atol=1e-5)


def test_compiles_inside_a_model_before_any_call():
    torch._dynamo.reset()
    model = nn.Sequential(build("all")[0], nn.GELU(), build("w8a8", 16, N)[0])
    x = torch.randn(4, K)
    y = torch.compile(model, fullgraph=True, backend="aot_eager")(x)
    torch.testing.assert_close(y, model(x), rtol=1e-5, atol=1e-5)


def test_layer_info():
    model = nn.ModuleDict({"a": build("all")[0], "b": nn.Linear(4, 4), "c": build("w4a16", bias=False)[0]})
    assert list(quantized_linears(model)) == ["a", "c"]
    a, c = layer_info(model)
    assert (a.name, a.shape, a.weights, a.activations) == ("a", (N, K), "nvfp4", "nvfp4-token")
    assert a.transforms == "smooth, rotate, low rank 8" and (a.backend, a.grid, a.calls) == ("", "", 0)
    assert c.activations is None and c.transforms == "" and c.nbytes == QuantSpec.parse("int4/group64").nbytes(N, K)
    assert a.nbytes == sum(t.numel() * t.element_size() for t in model["a"].buffers())
    assert a.nbytes_16bit == 2 * N * K
    model["a"](torch.randn(2, K))
    model["a"](torch.randn(2, K))
    model["c"](torch.randn(2, K))
    a, c = layer_info(model)
    assert (a.backend, a.grid, a.calls) == ("torch-reference", "nvfp4-token", 2)
    assert (c.grid, c.calls) == ("16-bit", 1)


def test_mode_is_chosen_anew():
    layer, _ = build("w8a8")
    layer(torch.randn(2, K))
    first = layer._choice
    layer(torch.randn(3, K))
    assert layer._choice is first
    layer.activations_mode = "faithful"
    layer(torch.randn(2, K))
    assert layer._choice is not first and layer._choice[0][2] == "faithful"


def test_repr():
    text = repr(build("all")[0])
    assert "64, 40, weights=nvfp4, activations=nvfp4-token, smooth, rotate, rank=8" in text


def test_layer_info_of_a_pipeline_says_what_to_pass(tiny):
    with pytest.raises(DQError, match=r"layer_info takes a model \(of a pipeline its transformer or unet\), got Flux"):
        layer_info(tiny.flux_pipeline())


def test_layer_info_prints_as_a_table(tiny):
    net = nn.Sequential(tiny.layer("w4a4-nvfp4")[0], tiny.layer("int8", n=32, k=48)[0])
    table = layer_info(net)
    assert isinstance(table, list) and len(table) == 2
    lines = repr(table).splitlines()
    assert str(table) == repr(table) and len(lines) == 3 and lines[0].split()[:2] == ["layer", "N"]
    assert "48 x 64" in lines[1] and "nvfp4-token" in lines[1] and "dB" in lines[1]
    net(torch.randn(2, 64))
    assert "x1" in repr(layer_info(net)).splitlines()[1]
    assert repr(layer_info(nn.Linear(2, 2))).splitlines() == [repr(layer_info(nn.Linear(2, 2)))]


@pytest.mark.parametrize("preset", presets(decoders=False))
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_gradient_is_that_of_the_dequantized_weight(tiny, preset, dtype):
    """Rounding is passed straight through; the frozen layer is unchanged and its output is what inference gives."""
    layer, _ = tiny.layer(preset, dtype=dtype)
    before = {k: v.clone() for k, v in layer.state_dict().items()}
    x = torch.randn(2, 5, 64).to(dtype).requires_grad_()
    y = layer(x)
    with torch.no_grad():
        assert torch.equal(y, layer(x))
    grad = torch.randn(2, 5, 48).to(dtype)
    y.backward(grad)
    expected = grad.double() @ layer.dequantized_weight(torch.float64)
    assert float((x.grad - expected).norm() / expected.norm()) < (1e-5 if dtype == torch.float32 else 1e-2)
    assert x.grad.dtype == dtype and not any(p.requires_grad for p in layer.parameters())
    assert all(torch.equal(v.view(torch.uint8), before[k].view(torch.uint8)) for k, v in layer.state_dict().items())


@pytest.mark.parametrize("preset", ["w4a4-int4-svd", "w4a4-nvfp4-arc"])
def test_gradient_when_compiled(tiny, preset):
    layer, _ = tiny.layer(preset)
    x, grad = torch.randn(6, 64), torch.randn(6, 48)
    eager, compiled = x.clone().requires_grad_(), x.clone().requires_grad_()
    layer(eager).backward(grad)
    torch._dynamo.reset()
    torch.compile(layer, backend="aot_eager", fullgraph=True)(compiled).backward(grad)
    torch.testing.assert_close(compiled.grad, eager.grad, rtol=1e-4, atol=1e-5)


def test_a_weight_that_is_computed_with_does_not_go_unnoticed(tiny):
    """It holds no data: whoever multiplies by it gets NaN, never numbers that look right."""
    layer, _ = tiny.layer("int8")
    assert layer.weight.isnan().all() and (torch.randn(2, 64) @ layer.weight.T).isnan().all()


def test_called_by_the_name_of_its_argument(tiny):
    """As UNetMotionModel of diffusers calls its projections."""
    layer, _ = tiny.layer("int8")
    x = torch.randn(3, 64)
    assert torch.equal(layer(input=x), layer(x))
