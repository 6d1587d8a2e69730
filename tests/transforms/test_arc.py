"""Residual channels against their formulas in numpy float64 (section 3.12 of the core methods' specification)."""

import copy

import numpy as np
import pytest
import torch
from torch import nn

import dq
from dq.ops import pre_quantized
from dq.planning import make_plan
from dq.qtensor import fake_quantize
from dq.recipe import Recipe
from dq.registry import DQError
from dq.spec import QuantSpec
from dq.stats import Stat
from dq.transforms import TRANSFORMS, GroupState
from dq.transforms.arc import auto_channels, reaching_channels

E2M1 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6])


def recipe(channels=16, dual=False, rounding="rtn", weights="nvfp4", acts="nvfp4-token", before=(), after=()):
    arc = dict(name="arc", channels=channels, dual=dual)
    linear = dict(weights=weights, activations=acts, transforms=[*before, arc, *after], rounding=rounding)
    return Recipe.from_dict(dict(name="arc", linear=linear, min_features=16))


def loud(n=200, k=64, channels=5, factor=25.0, seed=3):
    """Inputs [n, K] with a few loud channels at scattered places."""
    g = torch.Generator().manual_seed(seed)
    x = torch.randn(n, k, generator=g)
    x[:, torch.randperm(k, generator=torch.Generator().manual_seed(k))[:channels]] *= factor
    return x


def e2m1(v):
    """Nearest value of the grid, ties to the even code; saturating."""
    a = abs(v)
    away = abs(a[..., None] - E2M1) + 1e-12 * (np.arange(8) % 2)
    return np.sign(v) * E2M1[away.argmin(-1)]


def e4m3(v):
    """Nearest E4M3 value of positive v, within [2^-9, 448]."""
    v = np.clip(v, 2.0**-9, 448)
    quantum = 2.0 ** (np.maximum(np.floor(np.log2(v)), -6) - 3)
    return np.minimum(np.rint(v / quantum) * quantum, 448)


def nvfp4(v, amax=None):
    """Blocks of 16 along the last axis under the second level amax / (6 * 448), of a row or of the whole."""
    amax = abs(v).max(-1, keepdims=True) if amax is None else amax
    unit = np.float64(np.float32(np.maximum(amax, 1e-30) / (6 * 448)))
    blocks = v.reshape(*v.shape[:-1], -1, 16)
    unit = np.broadcast_to(unit, (*v.shape[:-1], 1))
    step = e4m3(abs(blocks).max(-1) / 6 / unit) * unit
    return (e2m1(blocks / step[..., None]) * step[..., None]).reshape(v.shape)


def by_formula(x, w, b, calibration, s, dual):
    """`[Q(X)|Q(R_o)] [Q(W)|Q(W_o)]^T`, dual `[Q(X)|Q(R_o)|Q(X)_o] [Q(W)|Q(W)_o|Q(W_o - Q(W)_o)]^T`."""
    p = np.argsort(abs(calibration).max(0), kind="stable")
    x, w = x[:, p], w[:, p]
    qx, qw = nvfp4(x), nvfp4(w, abs(w).max())
    rest = nvfp4(x[:, -s:] - qx[:, -s:], abs(x).max(-1, keepdims=True))
    left, right = [qx, rest], [qw, qw[:, -s:]]
    if dual:
        left.append(qx[:, -s:])
        right.append(nvfp4(w[:, -s:] - qw[:, -s:], abs(w).max()))
    return np.concatenate(left, 1) @ np.concatenate(right, 1).T + b


def test_the_reference_itself():
    """Vector 3 of the specification: the block B16, one level and two."""
    b16 = [.12, -.85, 2.4, .33, -1.1, .05, -.47, 1.75, .9, -.2, .61, -2.05, .28, 1.3, -.66, .02]  # fmt: skip
    block = np.array(b16)
    assert e4m3(np.array([2.4 / 6])) == 0.40625
    codes = [0.5, -2, 6, 1, -3, 0, -1, 4, 2, -0.5, 1.5, -6, 0.5, 3, -1.5, 0]
    assert e2m1(block / 0.40625).tolist() == codes
    assert ((nvfp4(block) - block) ** 2).mean() == pytest.approx(0.01291875, abs=1e-7)
    assert e2m1(np.array([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5, 9])).tolist() == [0, 1, 1, 2, 2, 4, 4, 6]


@pytest.mark.parametrize("dual", [False, True])
@pytest.mark.parametrize(("k", "s"), [(64, 16), (64, 64), (160, 32)])
def test_formula(tiny, k, s, dual):
    x = loud(k=k)
    layer, source = tiny.layer(recipe(s, dual), n=24, k=k, x=x)
    test = loud(40, k, seed=8)
    expected = by_formula(
        *(t.detach().double().numpy() for t in (test, source.weight, source.bias)), x.double().numpy(), s, dual
    )
    got = layer(test).detach().double().numpy()
    assert np.linalg.norm(got - expected) < 1e-5 * np.linalg.norm(expected)
    wide = layer.qtensor.shape[1]
    assert wide == k + (2 * s if dual else s) and pre_quantized(test, layer.params).shape == (40, wide)


@pytest.mark.parametrize("dual", [False, True])
def test_what_it_is_for(tiny, dual):
    """16 channels 10 to 40 times as loud: their activation error goes, dual their weight error too."""
    g = torch.Generator().manual_seed(0)
    x, held = torch.randn(600, 128, generator=g), torch.randn(300, 128, generator=g)
    size = torch.ones(128).index_fill(0, torch.randperm(128, generator=g)[:16], 25.0)
    x, held = x * size, held * size
    plain = Recipe.from_dict(dict(name="p", linear=dict(weights="nvfp4", activations="nvfp4-token")))
    errors = []
    for r in (plain, recipe(16), recipe(16, True)):
        layer, source = tiny.layer(r, k=128, x=x)
        errors.append(float((layer(held) - source(held)).square().sum() / source(held).square().sum()))
    assert errors[1] < 0.75 * errors[0] and errors[2] < 0.15 * errors[1], errors


@pytest.mark.parametrize("distribution", ["normal", "uniform", "t3", "one loud"])
def test_bounds(distribution):
    """One stage errs by at most .176 of the block's largest value, two by .031 (RNE scales: (9 / 8.5)^2 / 36)."""
    g = torch.Generator().manual_seed(1)
    x = torch.randn(4000, 64, generator=g)
    if distribution == "uniform":
        x = torch.rand(4000, 64, generator=g) * 2 - 1
    elif distribution == "t3":
        x = x / torch.randn(4000, 64, 3, generator=g).square().mean(-1).sqrt()
    elif distribution == "one loud":
        x[:, ::16] *= 50
    spec = QuantSpec.parse("nvfp4-token")
    state = GroupState({"a": torch.zeros(1, 64)}, (("a",),), QuantSpec.parse("nvfp4"), spec, residual=64)
    blocks = lambda t: t.reshape(4000, 4, 16)  # noqa: E731
    top = blocks(x).abs().amax(-1)
    # Below 2^-9 of a row's second level a scale cannot go; blocks that far below their row are no case of the bound.
    far = top > x.abs().amax(1, keepdim=True) * 2**-6
    one = (blocks(fake_quantize(x, spec) - x).abs().amax(-1) / top)[far].max()
    two = (blocks(state.executed(x) - x).abs().amax(-1) / top)[far].max()
    assert one <= 0.1765 and two <= 0.0312
    if distribution != "one loud":
        assert one > 0.15 and two > 0.02  # the bounds are reached nearly: nothing looser is being measured


def test_residual_lies_under_the_same_second_level():
    """A row of one loud block and one quiet: the residual of the quiet one is lost where the row's level says so."""
    x = torch.zeros(1, 32)
    x[0, :16], x[0, 16:] = torch.linspace(-6, 6, 16) * 448, 1.3 * 2.0**-9
    spec = QuantSpec.parse("nvfp4-token")
    state = GroupState({"a": torch.zeros(1, 32)}, (("a",),), QuantSpec.parse("nvfp4"), spec, residual=16)
    q = fake_quantize(x, spec)
    # Level 1: block scale 2^-9, codes of 1.3 -> 1.5; rest -.2 * 2^-9 under a scale of 2^-9 -> 0 by its code.
    assert q[0, 16].item() == pytest.approx(1.5 * 2.0**-9) and torch.equal(state.executed(x), q)
    own = fake_quantize((x - q)[:, 16:], spec)
    assert own.abs().max() > 0  # a second level of its own would have kept it


@pytest.mark.parametrize(
    ("width", "count"),
    [(3072, 64), (768, 16), (1536, 32), (12288, 256), (15360, 320), (64, 16), (32, 16), (1152, 32), (2432, 48)],
)
def test_automatic_count(width, count):
    """K/48 in multiples of 16: 64 at K = 3072, at least one block, at most half of K."""
    assert auto_channels(width) == count
    plan = TRANSFORMS.get("arc").plan((64, width), (width,), {})
    assert (plan.residual, plan.dual, plan.steps) == (count, False, (("permute", {}),))


@pytest.mark.parametrize("dual", [False, True])
def test_bits_per_weight(tiny, dual):
    """4.5 (K + S) / K bits in codes and scales, K + 2 S for dual; the plan knows it beforehand."""
    n, k, s = 32, 192, 48
    layer, _ = tiny.layer(recipe(s, dual), n=n, k=k, x=loud(k=k))
    wide = k + s * (1 + dual)
    bits = 8 * (layer.qweight.numel() + layer.weight_scale.numel()) / (n * k)
    assert bits == pytest.approx(4.5 * wide / k, rel=1e-12)
    stored = sum(t.numel() * t.element_size() for t in layer.buffers())
    assert stored == n * wide * 4.5 / 8 + 4 + 4 * k  # the second level, the order of channels
    model = torch.nn.Sequential(torch.nn.Linear(k, n))
    assert make_plan(model, recipe(s, dual)).quantized[0].nbytes == stored
    net = torch.nn.Sequential(layer)
    row = dq.layer_info(net)[0]
    assert row.nbytes == stored and row.transforms == f"permute, {'dual ' if dual else ''}residual {s}"


def test_weight_columns_are_copies(tiny):
    """Codes and scales of the last S columns appear again, bit by bit, and not rounded anew."""
    for rounding in ("rtn", "gptq"):
        layer, _ = tiny.layer(recipe(32, True, rounding), k=96, x=loud(k=96))
        codes, scale = layer.qweight, layer.weight_scale.view(torch.uint8)
        assert torch.equal(codes[:, 32:48], codes[:, 48:64]) and torch.equal(scale[:, 4:6], scale[:, 6:8])
        assert not torch.equal(codes[:, 48:64], codes[:, 64:])


@pytest.mark.parametrize("before", [(), ("smooth",)], ids=["alone", "smooth"])
@pytest.mark.parametrize("dual", [False, True])
def test_dequantized_weight(tiny, dual, before):
    """The raw-basis weight: the order undone, both stages of dual columns added."""
    layer, source = tiny.layer(recipe(16, dual, before=before), n=24, k=64, x=loud())
    wide = layer.qtensor.dequantize().double().numpy()
    moved = wide[:, :64].copy()
    if dual:
        moved[:, -16:] += wide[:, -16:]
    raw = np.zeros_like(moved)
    raw[:, layer.permute_order.numpy()] = moved
    if before:
        raw /= layer.smooth_factor.double().numpy()
    np.testing.assert_allclose(layer.dequantized_weight(torch.float64), raw, rtol=1e-6, atol=1e-9)
    off = (layer.dequantized_weight() - source.weight).norm() / source.weight.norm()
    assert 0.03 < off < 0.13
    net = torch.nn.Sequential(layer)
    dq.dequantize(net)
    assert torch.equal(net[0].weight, layer.dequantized_weight())


def test_all_consumers_share_the_order(tiny):
    model, calls = tiny.flux(), [tiny.flux_inputs(seed=s) for s in range(2)]
    dq.quantize(model, recipe(0), calibration=calls, progress=False)
    block = model.transformer_blocks[0].attn
    q, k, v = block.to_q, block.to_k, block.to_v
    assert torch.equal(q.permute_order, k.permute_order) and torch.equal(q.permute_order, v.permute_order)
    assert torch.equal(q.weight_global_scale, v.weight_global_scale) and q.config.residual == v.config.residual == 16
    assert not torch.equal(q.permute_order, block.add_q_proj.permute_order)


@pytest.fixture(scope="module", params=[(False, "rtn"), (True, "gptq")], ids=["single", "dual gptq"])
def model(tiny, request):
    """(quantized tiny FLUX.1, its inputs, its output, recipe, calibration)."""
    net, inputs, calls = tiny.flux(), tiny.flux_inputs(batch=2), [tiny.flux_inputs(seed=s) for s in range(2)]
    r = recipe(16, *request.param, after=["lowrank"])
    dq.quantize(net, r, calibration=calls, progress=False)
    with torch.no_grad():
        return net, inputs, net(**inputs)[0], r, calls


def output(net, inputs):
    with torch.no_grad():
        return net(**inputs)[0]


def test_saved_and_loaded(model, tmp_path):
    from diffusers import FluxTransformer2DModel

    net, inputs, y, *_ = model
    net.save_pretrained(tmp_path)
    again = FluxTransformer2DModel.from_pretrained(tmp_path, torch_dtype=torch.float32)
    assert torch.equal(output(again, inputs), y)
    state, other = net.state_dict(), again.state_dict()
    assert state.keys() == other.keys()
    for key, value in state.items():
        assert value.dtype == other[key].dtype and torch.equal(value.view(torch.uint8), other[key].view(torch.uint8))
    assert any(key.endswith("permute_order") for key in state)


def test_copied_and_reloaded(model, tiny):
    net, inputs, y, r, calls = model
    twin = copy.deepcopy(net)
    assert torch.equal(output(twin, inputs), y)
    for value in (*twin.parameters(), *twin.buffers()):
        value.data = torch.zeros_like(value)
    twin.load_state_dict(net.state_dict())
    assert torch.equal(output(twin, inputs), y)


def test_resumed(model, tiny, tmp_path):
    """A second run that finds every block in the folder ends in the same bits."""
    _, inputs, y, r, calls = model
    for _ in range(2):
        net = tiny.flux()
        dq.quantize(net, r, calibration=calls, resume=tmp_path, progress=False)
        assert torch.equal(output(net, inputs), y)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (dict(activations="int4/token"), "groups along K, not int4/token"),
        (dict(weights="int4/channel"), "groups along K, not int4/channel"),
        (dict(activations=None), "groups along K, not 16 bits"),
        (dict(weights="fp8-block", activations="fp8-block-token"), "groups along K"),
        (dict(weights="int4/group64", channels=16), "channels must be whole groups of int4/group64"),
        (dict(channels=80), "80 residual channels do not fit the input width 64 of 0"),
    ],
)
def test_refused(change, message):
    """When the recipe or the plan is made, not after an hour of calibration."""
    target = recipe(change.get("channels", 16)).linear.to_dict() | change
    target = {k: v for k, v in target.items() if v is not None and k != "channels"}
    with pytest.raises(DQError, match=message):
        make_plan(nn.Sequential(nn.Linear(64, 48)), Recipe.from_dict(dict(name="r", linear=target, min_features=1)))


@pytest.mark.parametrize("k", [24, 40, 100])
def test_widths_that_are_no_whole_groups_are_refused(k):
    with pytest.raises(DQError, match=f"16 residual channels do not fit the input width {k} of 0: .* of 16; without"):
        make_plan(nn.Sequential(nn.Linear(k, 48)), recipe(16).with_(min_features=1))


def test_parameters_are_checked():
    for channels in (-16, 8, 24):
        with pytest.raises(DQError, match="channels is a multiple of 16"):
            recipe(channels)
    with pytest.raises(DQError, match="arc"):
        Recipe.from_dict(dict(name="r", linear=dict(weights="nvfp4", transforms=[{"name": "arc", "count": 16}])))


def test_calibration_is_asked_for():
    net = torch.nn.Sequential(torch.nn.Linear(64, 64))
    with pytest.raises(DQError, match="needs calibration"):
        dq.quantize(net, recipe(16), progress=False)


@pytest.mark.parametrize("dual", [False, True])
def test_a_token_does_not_depend_on_the_others(tiny, dual):
    layer, _ = tiny.layer(recipe(16, dual), x=loud())
    x = loud(30, seed=5)
    x[7] *= 1000
    whole = pre_quantized(x, layer.params)
    assert torch.equal(pre_quantized(x[:4], layer.params), whole[:4])
    assert torch.equal(pre_quantized(x[6:7], layer.params), whole[6:7])
    torch.testing.assert_close(layer(x[:3]), layer(x)[:3], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("dual", [False, True])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_16_bit_inputs(tiny, dtype, dual):
    layer, _ = tiny.layer(recipe(16, dual), x=loud(), dtype=dtype)
    x = loud(20, seed=5).to(dtype)
    y, exact = layer(x), layer(x.float())
    assert y.dtype == dtype and torch.equal(y, exact.to(dtype))


@pytest.mark.parametrize("dual", [False, True])
def test_shapes(tiny, dual):
    layer, _ = tiny.layer(recipe(16, dual), x=loud())
    assert layer(torch.zeros(0, 64)).shape == (0, 48) and layer(torch.zeros(2, 0, 64)).shape == (2, 0, 48)
    x = loud(24, seed=5)
    torch.testing.assert_close(layer(x.view(2, 3, 4, 64)), layer(x).view(2, 3, 4, 48), rtol=0, atol=0)
    torch.testing.assert_close(layer(x[0]), layer(x)[0], rtol=1e-5, atol=1e-5)
    assert pre_quantized(x.view(2, 12, 64), layer.params).shape == (2, 12, layer.qtensor.shape[1])
    assert torch.equal(layer(torch.zeros(3, 64)), layer.bias.expand(3, -1))


@pytest.mark.parametrize("dual", [False, True])
def test_compiles(tiny, dual):
    layer, _ = tiny.layer(recipe(16, dual, "gptq"), x=loud())
    x = loud(12, seed=5)
    with torch.no_grad():
        eager = layer(x)
        torch._dynamo.reset()
        assert torch.equal(torch.compile(layer, backend="aot_eager", fullgraph=True)(x), eager)


def test_activation_error_counts_the_residual():
    """`activation_error`: where channels are residual their noise is that of two stages."""
    x = loud(400, 64, channels=16)
    stat = Stat(64)
    stat.update(x)
    act = QuantSpec.parse("nvfp4-token")
    state = GroupState({"a": torch.randn(8, 64)}, (("a",),), QuantSpec.parse("nvfp4"), act, {"a": stat}, k_parts=(64,))
    TRANSFORMS.get("arc").fit(state, channels=16)
    _, noise = state.activation_error("a")
    rows = state.rows("a")
    relative = noise / rows.square().mean(0)
    assert relative[-16:].max() < 3e-4 and relative[:-16].median() > 3e-3


def test_threshold_of_the_source():
    """Channels that reach an eighth of the largest maximum, in whole groups of 16, at most half of K."""
    top = torch.full((128,), 0.1)
    top[:5] = 1.0
    top[5] = 0.125  # exactly an eighth counts
    assert reaching_channels(top) == 16
    top[:20] = 1.0
    assert reaching_channels(top) == 32
    assert reaching_channels(torch.ones(128)) == 64
