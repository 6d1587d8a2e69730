"""The equation of a quantized linear, and the choice of what runs it."""

import pytest
import torch

from dq import ops
from dq.ops import BACKENDS, Backend, LinearParams, choose_backend, own_grid, pre_quantized, reference_qlinear
from dq.qtensor import fake_quantize, quantize
from dq.registry import DQError
from dq.spec import QuantSpec
from dq.transforms import Step, apply_steps

CPU, CUDA = torch.device("cpu"), torch.device("cuda")


def params_of(n=24, k=64, weights="int8/channel", activations="int8/token", bias=True, side=False, steps=()):
    w = torch.randn(n, k)
    acts = None if activations is None else QuantSpec.parse(activations)
    down, up = (torch.randn(8, k).bfloat16(), torch.randn(n, 8).bfloat16()) if side else (None, None)
    q = quantize(w, QuantSpec.parse(weights))
    return LinearParams(q, acts, list(steps), down, up, torch.randn(n) if bias else None)


def test_w8a8_example():
    """Item 9 of the methods specification: integer products, scales, outputs and the largest error."""
    x = torch.tensor([[0.8, -1.2, 0.5], [2, 0.4, -0.6]])
    w = torch.tensor([[0.3, -0.7, 1.1], [-0.5, 0.9, 0.2]])
    qw, qx = quantize(w, QuantSpec.parse("int8/channel")), quantize(x, QuantSpec.parse("int8/token"))
    assert qw.scale.flatten().tolist() == pytest.approx([0.008661417, 0.007086614], rel=1e-6)
    assert qx.scale.flatten().tolist() == pytest.approx([0.009448819, 0.015748031], rel=1e-6)
    assert qw.codes.tolist() == [[35, -81, 127], [-71, 127, 28]]
    assert qx.codes.tolist() == [[85, -127, 53], [127, 25, -38]]
    products = qx.codes.int() @ qw.codes.int().T
    assert products.tolist() == [[19993, -20680], [-2406, -6906]]
    y = reference_qlinear(x, LinearParams(qw, QuantSpec.parse("int8/token")))
    expected = torch.tensor([[1.63623, -1.384736], [-0.328179, -0.770711]])
    torch.testing.assert_close(y, expected, rtol=0, atol=1e-6)
    torch.testing.assert_close(x @ w.T, torch.tensor([[1.63, -1.38], [-0.34, -0.76]]))
    assert float((y - x @ w.T).abs().max()) == pytest.approx(0.011821, abs=1e-6)


@pytest.mark.parametrize("side", [False, True])
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("activations", ["int8/token", "int4/group16", "nvfp4-token", None])
def test_equation(activations, bias, side):
    """y = Q_X(pre(x)) @ Q_W(W')^T + (x @ down^T) @ up^T + b, against float64; the branch reads the raw x."""
    steps = [Step("smooth", {"factor": torch.rand(64) + 0.5}), Step("rotate", params={"size": 16})]
    p = params_of(activations=activations, bias=bias, side=side, steps=steps)
    x = torch.randn(9, 64)
    turned = apply_steps(x, steps)
    xq = turned if activations is None else fake_quantize(turned, p.activations)
    assert torch.equal(pre_quantized(x, p), xq)
    y = xq.double() @ p.weight.dequantize(torch.float64).T
    if side:
        y += (x.double() @ p.down.double().T) @ p.up.double().T
    if bias:
        y += p.bias.double()
    torch.testing.assert_close(reference_qlinear(x, p).double(), y, rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_result_has_the_dtype_of_the_input(dtype):
    p = params_of()
    x = torch.randn(3, 64).to(dtype)
    y = reference_qlinear(x, p)
    assert y.dtype == dtype and torch.equal(y, reference_qlinear(x.float(), p).to(dtype))
    assert reference_qlinear(x[:0], p).shape == (0, 24)


def test_float16_does_not_overflow_on_the_way():
    """Sums of codes leave the range of float16 long before the scaled result does."""
    w = 0.01 * torch.randn(8, 4096)
    p = LinearParams(quantize(w, QuantSpec.parse("int8/channel")), QuantSpec.parse("int8/token"))
    x = 500 * torch.randn(4, 4096)
    y = reference_qlinear(x.half(), p).float()
    assert torch.isfinite(y).all()
    assert (y - x @ w.T).norm() < 0.02 * (x @ w.T).norm()


def test_grid_names():
    assert own_grid(params_of(activations=None)) == "16-bit"
    assert own_grid(params_of(activations="nvfp4-token")) == "nvfp4-token"


def accept(params, device, dtype):
    return ""


@pytest.fixture
def backends(monkeypatch):
    """Four made-up backends beside the reference; the real ones are out of the way."""
    run = reference_qlinear
    made = [
        BACKENDS.get("torch-reference"),
        Backend("absent", 90, accept, run, own_grid, available=lambda: "no such chip"),
        Backend("coarse", 80, accept, run, lambda p: "fp8_e4m3/token", faithful=False),
        Backend(
            "picky",
            70,
            lambda p, d, t: "" if p.weight.shape[0] % 16 == 0 else "N must be a multiple of 16",
            run,
            own_grid,
        ),
        Backend("gpu-only", 60, lambda p, d, t: "" if d.type == "cuda" else f"the layer is on {d.type}", run, own_grid),
    ]
    monkeypatch.setattr(BACKENDS, "_values", {b.name: b for b in made})


@pytest.mark.parametrize(
    ("n", "device", "mode", "chosen"),
    [
        (32, CPU, "auto", "picky"),  # auto is faithful on a CPU ...
        (32, CUDA, "auto", "coarse"),  # ... and native on a GPU
        (32, CPU, "native", "coarse"),
        (32, CUDA, "faithful", "picky"),
        (24, CUDA, "faithful", "gpu-only"),
        (24, CPU, "faithful", "torch-reference"),
    ],
)
def test_choice(backends, n, device, mode, chosen):
    choice = choose_backend(params_of(n), device, torch.bfloat16, mode)
    assert choice.backend.name == chosen
    reasons = {
        "absent": "no such chip",
        "coarse": "runs the grid fp8_e4m3/token, and faithful activations were asked for",
        "picky": "N must be a multiple of 16",
        "gpu-only": "the layer is on cpu",
    }
    above = [b.name for b in sorted(BACKENDS, key=lambda b: -b.priority) if b.priority > BACKENDS.get(chosen).priority]
    assert choice.refused == {name: reasons[name] for name in above}


def test_no_backend_is_an_error_with_all_reasons(monkeypatch):
    monkeypatch.setattr(
        BACKENDS, "_values", {"absent": Backend("absent", 1, accept, None, own_grid, available=lambda: "gone")}
    )
    with pytest.raises(DQError, match="no backend accepts this layer: absent: gone"):
        choose_backend(params_of(), CPU, torch.float32)


def test_unknown_mode():
    with pytest.raises(DQError, match=r"unknown activations mode 'faithfull'; did you mean 'faithful'"):
        choose_backend(params_of(), CPU, torch.float32, "faithfull")
    assert ops.MODES == ("auto", "faithful", "native")


def test_reference_takes_everything():
    """It is the definition and the last resort: no layer, device or dtype is refused."""
    reference = BACKENDS.get("torch-reference")
    assert reference.priority == min(b.priority for b in BACKENDS) and reference.faithful
    for device in (CPU, CUDA):
        assert reference.refuse(params_of(7, 33, "nvfp4", "nvfp4-token"), device, torch.float64) == ""


@pytest.mark.parametrize("backend", list(BACKENDS), ids=lambda b: b.name)
def test_real_backends_explain_themselves(backend):
    """One line each, and no exception, for a layer they will not take and a machine they cannot run on."""
    assert isinstance(backend.available(), str)
    for weights, activations in (
        ("nvfp4", "nvfp4-token"),
        ("int4/group64", None),
        ("fp8_e4m3/channel", "fp8_e4m3/token"),
    ):
        p = params_of(7, 33, weights, activations)
        why = backend.refuse(p, CPU, torch.float32)
        assert isinstance(why, str) and "\n" not in why
        assert isinstance(backend.grid(p), str)
