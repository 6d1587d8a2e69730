"""Fusing a low-rank delta into a quantized layer: kept to 99 % or refused, codes untouched, undone bit for bit."""

import math

import pytest
import torch

import dq
from dq.fusing import balanced, fuse, retention, unfuse
from dq.recipe import presets

PRESETS = presets(decoders=False)


def factors(n: int = 48, k: int = 64, rank: int = 4, scale: float = 1e-2, seed: int = 3):
    g = torch.Generator().manual_seed(seed)
    return torch.randn(rank, k, generator=g) / k**0.5, torch.randn(n, rank, generator=g) * scale


def bits(layer) -> dict[str, torch.Tensor]:
    return {k: v.detach().clone().view(torch.uint8) for k, v in layer.state_dict().items()}


def same_bits(a, b) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[k], b[k]) for k in a)


@pytest.mark.parametrize("preset", PRESETS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("scale", [1e-6, 1e-2])
def test_fused_weight_is_the_old_one_plus_delta(tiny, preset, dtype, scale):
    """Measured on the raw-basis weight, in float64: |W_fused - W_base - delta| / |delta|."""
    layer, _ = tiny.layer(preset, dtype=dtype)
    before, old, config = bits(layer), layer.dequantized_weight(torch.float64), layer.config
    down, up = factors(scale=scale)
    delta = up.double() @ down.double()
    kept = fuse(layer, down, up)
    side = layer.config.rank - config.rank
    added = layer.lowrank_up[:, config.rank :].double() @ layer.lowrank_down[config.rank :].double()
    lost = float((added - delta).norm() / delta.norm())
    assert side == 4 and kept >= 0.99 and kept == pytest.approx(1 - lost, abs=1e-9)
    assert lost < (1e-6 if dtype == torch.float32 else 5e-3)
    if scale > 1e-3:  # below, float32 weights cannot show it
        whole = layer.dequantized_weight(torch.float64) - old
        assert float((whole - delta).norm() / delta.norm()) < 5e-3
    for name in before.keys() - {"lowrank_down", "lowrank_up"}:
        assert torch.equal(before[name], layer.state_dict()[name].view(torch.uint8)), name
    unfuse(layer, config.rank, config.side_dtype)
    assert layer.config == config and same_bits(bits(layer), before)


@pytest.mark.parametrize("preset", PRESETS)
def test_the_delta_acts_on_the_raw_input(tiny, preset):
    """Whatever the steps inside do: smoothing, rotation, permutation, residual columns."""
    layer, _ = tiny.layer(preset)
    x = torch.randn(32, 64, generator=torch.Generator().manual_seed(1))
    down, up = factors()
    with torch.no_grad():
        old = layer(x)
        fuse(layer, down, up)
        torch.testing.assert_close(layer(x) - old, x @ (up @ down).T, rtol=1e-3, atol=1e-5)


def test_several_fusions_stack_and_unstack(tiny):
    layer, _ = tiny.layer("w4a4-int4-svd", dtype=torch.bfloat16)
    states = [(bits(layer), layer.config)]
    for seed in (1, 2, 3):
        fuse(layer, *factors(rank=seed, seed=seed))
        states.append((bits(layer), layer.config))
    assert [c.rank for _, c in states] == [8, 9, 11, 14]
    for state, config in reversed(states[:-1]):
        unfuse(layer, config.rank, config.side_dtype)
        assert same_bits(bits(layer), state) and layer.config == config


def test_balance_is_exact_and_brings_both_sides_to_one_size():
    down, up = factors(scale=1e-9)
    up[:, 3] = 0
    d, u = balanced(down, up)
    assert torch.equal(u @ d, up.double() @ down.double())
    ratio = d.norm(dim=1)[:3] / u.norm(dim=0)[:3]
    assert (ratio > 0.4).all() and (ratio < 2.6).all()
    assert all(math.frexp(float(v))[0] == 0.5 for v in (d / down)[:, 0])  # powers of two


def test_tiny_deltas_survive_16_bit_floats(tiny):
    """FP16 cannot hold 1e-9: unbalanced, all of it would be rounded to zero."""
    layer, _ = tiny.layer("int8", dtype=torch.float16)
    down, up = factors(scale=1e-9)
    assert not up.half().any()
    assert fuse(layer, down, up) > 0.99


def test_what_would_be_lost_is_refused(tiny):
    layer, _ = tiny.layer("int8", dtype=torch.float16)
    before, config = bits(layer), layer.config
    with pytest.raises(dq.DQError, match=r"^cannot fuse into block\.q: torch\.float16 factors would keep .* of the"):
        fuse(layer, *factors(scale=1e-16), name="block.q")
    with pytest.raises(dq.DQError, match=r"^cannot fuse into the layer: the adapter holds NaN or Inf"):
        fuse(layer, factors()[0], factors()[1] * float("inf"))
    assert same_bits(bits(layer), before) and layer.config == config


def test_retention_of_known_factors():
    down, up = torch.eye(2, 4), torch.eye(3, 2)  # |delta| = sqrt 2
    assert retention(down, up, down, up) == 1.0
    assert retention(down, up, down, up * 0) == pytest.approx(0.0)
    assert retention(down, up, down, up * 0.75) == pytest.approx(0.75)
    assert retention(down * 0, up, down * 0, up) == 1.0  # nothing to keep
    assert retention(down, up, -down, up) == pytest.approx(-1.0)
