"""Scales per part of a concatenated input. Vector V4 itself is in tests/formats; here it is a layer."""

import pytest
import torch

import dq
from dq.qtensor import fake_quantize
from dq.spec import QuantSpec
from dq.transforms import TRANSFORMS, GroupState, apply_steps

KSPLIT = TRANSFORMS.get("ksplit")
DEEP, SKIP = [0.4, -0.3, 0.6, -0.5, 0.2, -0.6], [9, -7.5, 6.2, -11, 4.1, 10.5]


def state_of(weight, parts, weights="int8/channel", act="int8/token") -> GroupState:
    act = None if act is None else QuantSpec.parse(act)
    return GroupState({"a": weight}, (("a",),), QuantSpec.parse(weights), act, k_parts=parts)


def output(state, x):
    xq = fake_quantize(apply_steps(x, state.steps), state.act_spec)
    return xq @ fake_quantize(state.weights["a"], state.weight_spec).T


@pytest.mark.parametrize(
    ("act", "joint", "alone"), [("int8/token", 6.48315e-4, 1.860004e-6), ("int4/token", 0.21, 6.122449e-4)]
)
def test_v4(act, joint, alone):
    """A UNet's shortcut [deep | skip]: INT4 zeroes the deep half under a common scale."""
    x = torch.tensor([[*DEEP, *SKIP]])
    for parts, error in (((), joint), ((6, 6), alone)):
        state = state_of(torch.randn(4, 12), parts, act=act)
        KSPLIT.fit(state)
        deep = fake_quantize(x, state.act_spec)[0, :6]
        assert float((deep - x[0, :6]).square().mean()) == pytest.approx(error, rel=1e-4)


def test_it_is_two_linears():
    """One GEMM with scales per segment is the sum of two quantized linears."""
    x, w = torch.cat([torch.randn(9, 16), 30 * torch.randn(9, 24)], 1), torch.randn(5, 40)
    w[:, 16:] /= 30
    state = state_of(w, (16, 24), "int4/channel", "int8/token")
    KSPLIT.fit(state)
    parts = []
    for i, j in ((0, 16), (16, 40)):
        alone = state_of(w[:, i:j], ())
        alone.weight_spec = QuantSpec.parse("int4/channel")
        parts.append(output(alone, x[:, i:j]))
    torch.testing.assert_close(output(state, x), sum(parts), rtol=1e-5, atol=1e-4)
    whole = state_of(w, (), "int4/channel", "int8/token")
    exact = x @ w.T
    assert (output(state, x) - exact).norm() < 0.7 * (output(whole, x) - exact).norm()


@pytest.mark.parametrize(
    ("weights", "act", "parts", "split"),
    [
        ("int8/channel", "int8/token", (16, 24), (True, True)),
        ("fp8_e4m3/tensor", "fp8_e4m3/tensor", (16, 24), (True, False)),  # a static scale is one number
        ("int4/group8", "int4/group8", (16, 24), (False, False)),
        ("nvfp4", "nvfp4-token", (16, 24), (False, False)),
        ("int8/channel", None, (16, 24), (True, False)),
        ("int8/channel", "int8/token", (40,), (False, False)),
        ("int8/channel", "int8/token", (), (False, False)),
    ],
)
def test_which_grids_are_split(weights, act, parts, split):
    state = state_of(torch.randn(8, 40), parts, weights, act)
    KSPLIT.fit(state)
    assert state.weight_spec.k_segments == (parts if split[0] else None)
    assert act is None or state.act_spec.k_segments == (parts if split[1] else None)
    assert state.steps == [] and not state.side


def test_beside_smoothing_and_rotation():
    """Neither crosses the seam, so the parts stay apart in the transformed basis."""
    x, w = torch.cat([torch.randn(50, 64), 40 * torch.randn(50, 192)], 1), torch.randn(16, 256)
    state = state_of(w, (64, 192))
    KSPLIT.fit(state)
    TRANSFORMS.get("rotate").fit(state)
    x2 = x.clone()
    x2[:, 64:] = torch.randn(50, 192)
    first = [fake_quantize(apply_steps(v, state.steps), state.act_spec)[:, :64] for v in (x, x2)]
    assert torch.equal(*first)


def test_flux_proj_out(tiny):
    """Single blocks read [attention | GELU(mlp)]; only their proj_out is split, and the model runs."""
    model, calls = tiny.flux(), [tiny.flux_inputs(batch=2, seed=s) for s in range(2)]
    with torch.no_grad():
        before = model(**calls[0])[0]
    linear = dict(weights="int8/channel", activations="int8/token", transforms=["ksplit"])
    dq.quantize(
        model, dq.Recipe.from_dict(dict(name="x", linear=linear, min_features=16)), calibration=calls, progress=False
    )
    found = {n: m.config for n, m in model.named_modules() if isinstance(m, dq.QuantizedLinear)}
    split = {n for n, c in found.items() if c.activations.k_segments}
    assert split == {f"single_transformer_blocks.{i}.proj_out" for i in (0, 1)}
    assert all(found[n].activations.k_segments == (64, 256) for n in split)
    with torch.no_grad():
        after = model(**calls[0])[0]
    assert (after - before).norm() < 0.05 * before.norm()
