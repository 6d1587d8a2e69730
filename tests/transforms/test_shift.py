"""The shift of bounded inputs: section 3.4 and vector V2c of the methods specification (its codes: tests/formats)."""

import pytest
import torch
from torch import nn

import dq
from dq.qtensor import fake_quantize
from dq.registry import DQError
from dq.spec import QuantSpec
from dq.stats import Stat
from dq.transforms import TRANSFORMS, GroupState, apply_steps
from dq.transforms.shift import CONSTANTS, constant, unsigned

SHIFT = TRANSFORMS.get("shift")
INT4 = "int4/group64/fp32"


def state_of(weights: dict, x: torch.Tensor, act=INT4, **extra) -> GroupState:
    stat = Stat(x.shape[1])
    stat.update(x)
    act = None if act is None else QuantSpec.parse(act)
    return GroupState(
        dict(weights), (tuple(weights),), QuantSpec.parse("int4/group64"), act, {next(iter(weights)): stat}, **extra
    )


def gained(state: GroupState, name: str) -> torch.Tensor:
    """b' - b = -W' pre(0) [N]: takes the constant off that a shift of the input adds to the output."""
    w = state.weights[name].double()
    return -(w @ apply_steps(w.new_zeros(1, state.width), state.steps)[0])


def test_bias_vector():
    """Section 3.4: b = .05 becomes -.1046875, and both forms give y = -.819."""
    g = torch.tensor([[-0.17, -0.05, 0.0, 0.4, 1.3, 2.2, -0.12, 3.0]], dtype=torch.float64)
    w = torch.tensor([[0.2, -0.1, 0.3, 0.4, -0.2, 0.1, 0.5, -0.3]], dtype=torch.float64)
    state = state_of({"a": w}, g)
    SHIFT.fit(state)
    assert state.steps[0].params == {"value": 0.171875} and str(state.act_spec) == "uint4-positive-token"
    assert float(gained(state, "a") + 0.05) == pytest.approx(-0.1046875, abs=1e-15)
    assert float(g @ w.T + 0.05) == pytest.approx(-0.819, abs=1e-12)
    y = apply_steps(g, state.steps) @ state.weights["a"].T + gained(state, "a") + 0.05
    assert float(y) == pytest.approx(-0.819, abs=1e-12)


def test_constants_cover_the_functions():
    """c is above -min f everywhere, so nothing is cut off; and by less than 1/64."""
    x = torch.linspace(-10, 3, 400001, dtype=torch.float64)
    functions = (nn.functional.relu, nn.functional.gelu, nn.functional.silu)
    for c, f in zip(CONSTANTS, functions, strict=True):
        assert 0 <= float(f(x).min()) + c < 1 / 64
        for dtype in (torch.float16, torch.bfloat16):
            assert constant(float(f(x.to(dtype)).min()), 3.0) == c
    tanh = nn.functional.gelu(x, approximate="tanh")
    assert float(tanh.min()) == pytest.approx(-0.170041, abs=1e-6) and tanh.min() > -0.1705


@pytest.mark.parametrize(
    ("low", "top", "c"),
    [
        (-0.17, 3.0, 0.171875), (-0.01, 3.0, 0.171875), (0.0, 3.0, 0.0), (-0.2784, 3.0, 0.28125),
        (-0.3, 3.0, None), (-3.0, 3.0, None), (-0.1, 0.1, None),
    ],
)  # fmt: skip
def test_detection(low, top, c):
    assert constant(low, top) == c


@pytest.mark.parametrize(
    ("grid", "found"),
    [
        ("int4/group64/fp32", "uint4-positive-token"), ("int4/token", "uint4_positive/token"),
        ("int4_full/token", "uint4_positive/token"), ("int8/token", "uint8_positive/token"),
        ("int4/tensor", "uint4_positive/tensor"), ("nvfp4-token", None), ("fp8_e4m3/token", None),
        ("uint4/token", None), ("uint4_positive/token", None), ("int3/token", None),
    ],
)  # fmt: skip
def test_unsigned_grids(grid, found):
    spec = unsigned(QuantSpec.parse(grid))
    assert spec == (None if found is None else QuantSpec.parse(found)) and unsigned(None) is None
    assert spec is None or spec.dynamic == QuantSpec.parse(grid).dynamic


def gelu_rows(n=200, k=128):
    return nn.functional.gelu(2 * torch.randn(n, k), approximate="tanh")


@pytest.mark.parametrize("act", [None, "nvfp4-token", "fp8_e4m3/token"])
def test_other_grids_are_left_alone(act):
    state = state_of({"a": torch.randn(8, 128)}, gelu_rows(), act)
    before = state.act_spec
    SHIFT.fit(state)
    assert state.steps == [] and state.act_spec == before


@pytest.mark.parametrize("x", [torch.randn(50, 128), nn.functional.silu(torch.randn(50, 128)) * torch.randn(128)])
def test_unbounded_inputs_are_left_alone(x):
    state = state_of({"a": torch.randn(8, 128)}, x)
    SHIFT.fit(state)
    assert state.steps == [] and state.act_spec == QuantSpec.parse(INT4)


def test_after_a_relu_only_the_grid_changes():
    state = state_of({"a": torch.randn(8, 128)}, torch.randn(50, 128).relu())
    SHIFT.fit(state)
    assert state.steps == [] and str(state.act_spec) == "uint4-positive-token"


def test_a_value_needs_no_calibration():
    state = GroupState({"a": torch.randn(8, 16)}, (("a",),), QuantSpec.parse("int4/channel"), QuantSpec.parse(INT4))
    with pytest.raises(DQError, match="a shift without a value needs calibration"):
        SHIFT.fit(state)
    SHIFT.fit(state, value=0.25)
    assert state.steps[0].params == {"value": 0.25}


def test_low_rank_branch_reads_the_raw_input():
    """Section 3.4: b'' = b' + L_up L_down (c 1): what left W' must leave the correction."""
    x, w = gelu_rows(), torch.randn(24, 128)
    state = state_of({"a": w}, x, side_dtype=torch.float32)
    for name, params in (("shift", {}), ("smooth", {}), ("lowrank", {"rank": 4})):
        TRANSFORMS.get(name).fit(state, **params)
    down, up = (t.double() for t in state.side["a"])
    expected = -0.171875 * w.double().sum(1) + up @ down @ torch.full((128,), 0.171875, dtype=torch.float64)
    torch.testing.assert_close(gained(state, "a"), expected, rtol=1e-5, atol=1e-5)


def test_shift_halves_the_step():
    """What it is for: outputs after INT4 activations; the weight in full precision, to see them alone."""
    x, w = gelu_rows(), torch.randn(24, 128)
    errors = {}
    for name in ("none", "shift"):
        state = state_of({"a": w}, x)
        if name == "shift":
            SHIFT.fit(state)
        xq = fake_quantize(apply_steps(x, state.steps), state.act_spec)
        errors[name] = float((xq @ w.T + gained(state, "a").float() - x @ w.T).square().sum())
    assert errors["shift"] < 0.4 * errors["none"]


class FeedForward(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(64, 256), nn.Linear(256, 64)

    def forward(self, x):
        return self.down(nn.functional.gelu(self.up(x), approximate="tanh"))


@pytest.mark.parametrize("more", [[], [{"name": "smooth"}, {"name": "lowrank", "rank": 8}]])
def test_a_model(more):
    """Detected where there is a GELU and nowhere else; the layer's bias carries the correction."""
    torch.manual_seed(0)
    x = torch.randn(256, 64)
    models = {}
    for shift in (False, True):
        net = models[shift] = FeedForward()
        net.load_state_dict(models[False].state_dict() if shift else net.state_dict())
    hidden, reference = nn.functional.gelu(models[True].up(x), approximate="tanh"), models[True](x)
    for shift, net in models.items():
        linear = dict(weights="int8/channel", activations="int4/group64/fp32")
        linear["transforms"] = (["shift"] if shift else []) + more
        recipe = dq.Recipe.from_dict(dict(name="x", linear=linear, min_features=16))
        dq.quantize(net, recipe, calibration=[dict(x=x)], progress=False)
    rows = {i.name: i for i in dq.layer_info(models[True])}
    assert "shift" in rows["down"].transforms and "shift" not in rows["up"].transforms
    assert rows["down"].activations == "uint4-positive-token" and rows["up"].activations == "int4/group64/fp32"
    errors = [float((net.down(hidden) - reference).detach().norm()) for net in models.values()]
    assert errors[1] < (0.75 if not more else 0.9) * errors[0]
