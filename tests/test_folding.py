"""Folding of smoothing factors: vector V11 of the methods specification, each kind alone, and FLUX.1 as a whole."""

import copy

import numpy as np
import pytest
import torch
from torch import nn

import dq
from dq.family import Family, Fold, find_family
from dq.folding import divide_vectors, fold_into, fold_model, refusal, smooth_weights
from dq.linear import quantized_linears
from dq.registry import DQError

F64 = torch.float64


def linear(n, k, bias=True, dtype=F64):
    layer = nn.Linear(k, n, bias=bias, dtype=dtype)
    return layer.requires_grad_(False)


def test_v11():
    """Shift and scale of an adaLN as two chunks of one linear: the largest difference is 1.8e-15."""
    rng, parts = np.random.RandomState(2), {}
    c = torch.tensor(rng.randn(3))
    for name in ("scale", "shift"):
        parts[name] = (torch.tensor(rng.randn(4, 3) * 0.2), torch.tensor(rng.randn(4) * 0.1))
    normed, lam = torch.tensor(rng.randn(2, 4)), torch.tensor([2.0, 0.5, 1.25, 4.0], dtype=F64)
    weight = torch.tensor(rng.randn(3, 4))
    layer = linear(8, 3)
    layer.weight.copy_(torch.cat([parts["shift"][0], parts["scale"][0]]))
    layer.bias.copy_(torch.cat([parts["shift"][1], parts["scale"][1]]))

    def y(w):
        shift, scale = layer(c).chunk(2)
        return (normed * (1 + scale) + shift) @ w.T

    before = y(weight)
    fold_into(Fold("modulation", (), (), 2, (0, 1)), layer, lam)
    assert float((y(weight * lam) - before).abs().max()) < 1.8e-15


def test_vectors_of_a_shared_modulation():
    normed, scale, shift = torch.randn(5, 7, 16, dtype=F64), torch.randn(5, 1, 16, dtype=F64), torch.randn(5, 1, 16)
    lam = torch.rand(16, dtype=F64) + 0.5
    multiplier, moved = divide_vectors(scale, shift, lam)
    assert multiplier.shape == (5, 1, 16)
    torch.testing.assert_close(
        normed * multiplier + moved, (normed * (1 + scale) + shift) / lam, rtol=1e-13, atol=1e-13
    )


@pytest.mark.parametrize("kind", ["layer", "rms"])
def test_norms(kind):
    norm = nn.LayerNorm(16, dtype=F64) if kind == "layer" else nn.RMSNorm(16, dtype=F64)
    nn.init.normal_(norm.weight)
    x, lam = torch.randn(9, 16, dtype=F64), torch.rand(16, dtype=F64) + 0.5
    before = norm(x) / lam
    fold_into(Fold("norm", (), ()), norm, lam)
    torch.testing.assert_close(norm(x), before, rtol=1e-13, atol=1e-13)


@pytest.mark.parametrize("half", [0, 1])
def test_linear_half_of_a_glu(half):
    """GEGLU: the first half is linear; FLUX.2's SwiGLU: the second. The gate keeps its rows."""
    layer, x, lam = linear(48, 12), torch.randn(9, 12, dtype=F64), torch.rand(24, dtype=F64) + 0.5

    def product():
        parts = layer(x).chunk(2, -1)
        return parts[half] * nn.functional.gelu(parts[1 - half])

    before = product() / lam
    fold_into(Fold("rows", (), (), 2, (half,)), layer, lam)
    torch.testing.assert_close(product(), before, rtol=1e-13, atol=1e-13)


def test_values_of_an_attention():
    """Softmax mixes tokens, not channels: rows of to_v become channels of what to_out reads."""
    q, k = torch.randn(2, 6, 8, dtype=F64), torch.randn(2, 6, 8, dtype=F64)
    x, value, lam = torch.randn(6, 12, dtype=F64), linear(16, 12), torch.rand(16, dtype=F64) + 0.5

    def attention():
        v = value(x).unflatten(-1, (2, 8)).transpose(0, 1)
        return nn.functional.scaled_dot_product_attention(q, k, v).transpose(0, 1).flatten(1)

    before = attention() / lam
    fold_into(Fold("rows", (), ()), value, lam)
    torch.testing.assert_close(attention(), before, rtol=1e-13, atol=1e-13)


def quantized(spec, n=32, k=16, **more):
    net = nn.Sequential(linear(n, k, dtype=torch.float32))
    recipe = dict(name="x", linear=dict(weights=spec) | more, min_features=1)
    dq.quantize(net, dq.Recipe.from_dict(recipe), progress=False)
    return net[0]


@pytest.mark.parametrize("spec", ["int8/channel", "uint4/channel", "fp8_e4m3/channel"])
def test_rows_of_a_quantized_producer(spec):
    """A float32 scale per row takes the factor; codes stay."""
    layer, x, lam = quantized(spec), torch.randn(5, 16), torch.rand(16) + 0.5
    before, codes = layer(x).clone(), layer.qweight.clone()
    fold_into(Fold("rows", (), (), 2, (1,)), layer, lam)
    torch.testing.assert_close(layer(x), torch.cat([before[:, :16], before[:, 16:] / lam], 1), rtol=1e-5, atol=1e-6)
    assert torch.equal(layer.qweight.view(torch.uint8), codes.view(torch.uint8))


def test_rows_of_a_producer_with_16_bit_scales():
    """Rounded once to their dtype; a factor that takes them out of its range is refused, and changes nothing."""
    layer, x, lam = quantized("int4/group16"), torch.randn(5, 16), torch.rand(16) + 0.5
    before, scale = layer(x).clone(), layer.weight_scale.clone()
    assert scale.dtype == torch.float16
    for bad in (1e5, 1e-8):
        with pytest.raises(DQError, match=r"a factor of .* takes its float16 scales out of range"):
            fold_into(Fold("rows", (), (), 2, (1,)), layer, lam * bad)
        assert torch.equal(layer.weight_scale, scale)
    fold_into(Fold("rows", (), (), 2, (1,)), layer, lam)
    torch.testing.assert_close(layer(x), torch.cat([before[:, :16], before[:, 16:] / lam], 1), rtol=1e-3, atol=1e-3)


def test_what_is_not_exact_is_refused():
    rows, modulation = Fold("rows", (), (), 2, (1,)), Fold("modulation", (), (), 2, (0, 1))
    for fold, module, why in (
        (rows, nn.GELU(), "GELU is no linear"),
        (rows, linear(30, 8), "its 30 rows are not 2 x 16"),
        (modulation, linear(32, 8, bias=False), "no bias to take 1/lambda - 1"),
        (rows, quantized("mxfp4"), "no scale per row in 16 or 32 bits: fold before quantizing"),
        (rows, quantized("nvfp4"), "no scale per row in 16 or 32 bits"),
        (rows, quantized("int8/channel", transforms=["lowrank"]), "low-rank factors rest in 16 bits"),
        (Fold("norm", (), ()), nn.LayerNorm(16, elementwise_affine=False), "no weight of 16 channels"),
        (Fold("norm", (), ()), nn.LayerNorm(8), "no weight of 16 channels"),
    ):
        assert why in refusal(fold, module, 16)
        with pytest.raises(DQError, match=r"cannot fold a smoothing factor into blocks\.0\.norm"):
            fold_into(fold, module, torch.ones(16), "blocks.0.norm")
    assert refusal(rows, linear(32, 8, bias=False), 16) == ""


def random_factors(family, names, model):
    g = torch.Generator().manual_seed(0)
    for fold in family.folds_in(names):
        width = model.get_submodule(fold.consumers[0]).in_features
        yield fold, (torch.rand(width, generator=g, dtype=F64) * 4).exp2() / 4


@pytest.mark.parametrize(("dtype", "limit"), [(F64, 1e-10), (torch.float32, 1e-5)])
def test_flux_smoothed_for_good(tiny, dtype, limit):
    """Every fold that the family names, with factors of 1/4 to 4: the output stays."""
    model, inputs = tiny.flux(dtype), tiny.flux_inputs(dtype, batch=2)
    with torch.no_grad():
        before = model(**inputs)[0]
    names = [n for n, m in model.named_modules() if isinstance(m, nn.Linear)]
    folds = list(random_factors(find_family(model), names, model))
    assert len(folds) == 2 * 5 + 2
    changed = copy.deepcopy(model)
    for fold, lam in folds:
        smooth_weights(changed, fold, lam)
        assert not torch.equal(
            changed.get_submodule(fold.consumers[0]).weight, model.get_submodule(fold.consumers[0]).weight
        )
    with torch.no_grad():
        after = changed(**inputs)[0]
    assert float((after - before).norm() / before.norm()) < limit


def smoothed_flux(tiny, weights="int8/channel", modulation=None, **more):
    model, inputs = tiny.flux(), tiny.flux_inputs(batch=2)
    linear = dict(weights=weights, transforms=["smooth"]) | more
    data = dict(name="x", linear=linear, min_features=16) | (dict(modulation=modulation) if modulation else {})
    calls = [tiny.flux_inputs(batch=2, seed=s) for s in range(2)]
    dq.quantize(model, dq.Recipe.from_dict(data), calibration=calls, progress=False)
    return model, inputs


@pytest.mark.parametrize("modulation", [None, dict(weights="int8/channel")])
def test_flux_quantized(tiny, modulation):
    """The division is gone wherever the family says so, and stays only behind a GELU. Producers may be quantized."""
    model, inputs = smoothed_flux(tiny, modulation=modulation)
    with torch.no_grad():
        before = model(**inputs)[0]
        report = fold_model(model)
        after = model(**inputs)[0]
    dividing = [n for n, m in quantized_linears(model).items() if m.config.steps]
    assert sorted(report.kept) == sorted(dividing)
    assert all(n.endswith(("ff.net.2", "ff_context.net.2", "proj_out")) for n in dividing) and len(dividing) == 6
    assert len(report.layers) == len(set(report.layers)) == 2 * 10 + 2 * 4
    assert float((after - before).norm() / before.norm()) < 1e-5
    assert set(fold_model(model).kept) == set(dividing)  # nothing is folded twice


def test_flux_folded_is_saved(tiny, tmp_path):
    """The artifact is an ordinary one without these steps."""
    model, inputs = smoothed_flux(tiny)
    assert len(dq.fold(model).layers) == 28
    with torch.no_grad():
        before = model(**inputs)[0]
        model.save_pretrained(tmp_path)
        after = type(model).from_pretrained(tmp_path)(**inputs)[0]
    assert torch.equal(before, after)


def test_only_groups_of_one_factor_are_folded(tiny):
    """A consumer in 16 bits, another factor or a branch on the raw input: kept, with the reason, and unchanged."""
    model, inputs = smoothed_flux(tiny)
    model.transformer_blocks[0].attn.to_q.smooth_factor *= 2
    old = model.transformer_blocks[1].ff.net[0].proj
    model.transformer_blocks[1].attn.to_k = linear(64, 64, dtype=torch.float32)
    with torch.no_grad():
        before = model(**inputs)[0]
        report = fold_model(model)
        after = model(**inputs)[0]
    block = "transformer_blocks.{}.attn.{}"
    assert "by different factors" in report.kept[block.format(0, "to_k")]
    assert "to_k reads the same input and is not quantized" in report.kept[block.format(1, "to_v")]
    lines = str(report).split("\n")
    assert lines[0] == f"{len(report.layers)} linears no longer divide their input, {len(report.kept)} still do"
    assert any("attn.to_q and 1 more: " in x and "is not quantized" in x for x in lines)
    assert old.config.steps == () and float((after - before).norm() / before.norm()) < 1e-5


def test_low_rank_branches_keep_the_division(tiny):
    model, _ = smoothed_flux(tiny, transforms=["smooth", {"name": "lowrank", "rank": 4}])
    report = fold_model(model)
    assert report.layers == [] and "low-rank branch" in report.kept["transformer_blocks.0.attn.to_q"]


def test_unquantized_and_unknown_models(tiny):
    with pytest.raises(DQError, match="holds no quantized linear"):
        fold_model(nn.Sequential(linear(4, 4)))
    model, _ = smoothed_flux(tiny)
    report = fold_model(model, Family("other"))
    assert report.layers == [] and "the family other names nothing" in next(iter(report.kept.values()))


def test_smoothing_a_quantized_consumer_is_refused(tiny):
    model, _ = smoothed_flux(tiny)
    fold = next(find_family(model).folds_in(quantized_linears(model)))
    with pytest.raises(DQError, match=r"cannot smooth the weight of transformer_blocks\.0\.attn\.to_q"):
        smooth_weights(model, fold, torch.ones(64))


def test_all_producers_or_none():
    """The second producer cannot take the factor: the first one and the consumers stay as they are."""
    net = nn.ModuleDict({"a": linear(16, 8), "b": linear(15, 8), "out": linear(4, 16)})
    before = copy.deepcopy(net.state_dict())
    with pytest.raises(DQError, match="cannot fold a smoothing factor into b: its 15 rows"):
        smooth_weights(net, Fold("rows", ("out",), ("a", "b")), torch.full((16,), 2.0))
    assert all(torch.equal(t, before[n]) for n, t in net.state_dict().items())
