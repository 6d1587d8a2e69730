"""Every backend that runs here against the definition, in float64, at the level of its own format."""

import pytest
import torch

from dq.linear import QuantizedLinear
from dq.ops import BACKENDS, Choice, LinearParams, choose_backend, reference_qlinear
from dq.qtensor import quantize
from dq.spec import QuantSpec
from dq.transforms import Step, apply_steps

PAIRS = [
    ("fp8_e4m3/channel", "fp8_e4m3/token"),
    ("int8/channel", "int8/token"),
    ("int4/channel", "int4/token"),
    ("int4/group64", "int4/group64"),
    ("nvfp4", "nvfp4-token"),
    ("int4/group64", None),
]
ROWS = (0, 1, 7, 17, 127, 300)
DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]


def _layer(weights: str, activations: str | None, n: int, k: int, device: str, side: bool, steps: bool):
    g = torch.Generator().manual_seed(n + k)
    w = torch.randn(n, k, generator=g) * 0.05
    acts = None if activations is None else QuantSpec.parse(activations)
    factors = (torch.randn(8, k, generator=g).bfloat16() * 0.1, torch.randn(n, 8, generator=g).bfloat16() * 0.1)
    pre = [Step("smooth", {"factor": torch.rand(k, generator=g) + 0.5})]
    if k % 16 == 0:
        pre.append(Step("rotate", params={"size": 16}))
    layer = QuantizedLinear.build(
        quantize(w, QuantSpec.parse(weights)),
        activations=acts,
        steps=pre if steps else [],
        side=factors if side else None,
        bias=torch.randn(n, generator=g).bfloat16(),
    )
    return layer.to(device)


def _float64(x: torch.Tensor, layer: QuantizedLinear) -> torch.Tensor:
    """The equation of dq.ops in float64, from the stored codes; the activation codes come from the CPU reference."""
    from dq.qtensor import fake_quantize

    p = layer.to("cpu").params
    q = apply_steps(x.cpu().float(), p.steps)
    q = q if p.activations is None else fake_quantize(q, p.activations)
    y = q.double() @ p.weight.dequantize().double().T + p.bias.double()
    if p.down is not None:
        y += x.cpu().double() @ p.down.double().T @ p.up.double().T
    return y


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("extras", [False, True], ids=["plain", "smooth-rotate-lowrank"])
@pytest.mark.parametrize(("weights", "activations"), PAIRS, ids=lambda v: str(v).replace("/", "-"))
def test_backends_agree_with_the_definition(weights, activations, extras, device):
    """Relative error against float64: bf16 output rounding (2^-9) and accumulation, nothing more, but for the values of
    4-bit grids that run rounded to E4M3. Backends on other grids: gemm_cases.py."""
    for n, k in ((64, 96), (48, 320)):
        layer = _layer(weights, activations, n, k, device, extras, extras)
        for backend in BACKENDS:
            why = backend.available() or backend.refuse(layer.params, torch.device(device), torch.bfloat16)
            if why or not backend.faithful:
                continue
            for rows in ROWS:
                x = torch.randn(rows, k, generator=torch.Generator().manual_seed(rows)).bfloat16()
                y = backend.run(x.to(device), layer.params)
                assert y.shape == (rows, n) and y.dtype == torch.bfloat16
                ref = _float64(x, layer)
                layer.to(device)
                error = (y.cpu().double() - ref).norm() / ref.norm().clamp(min=1e-9)
                assert error < (5e-2 if backend.name == "expand-fp8-faithful" else 4e-3), (
                    backend.name,
                    n,
                    k,
                    rows,
                    float(error),
                )


@pytest.mark.parametrize("device", DEVICES)
def test_non_contiguous_and_3d_inputs(device):
    layer = _layer("fp8_e4m3/channel", "fp8_e4m3/token", 64, 96, device, False, False)
    x = torch.randn(5, 96, 3, device=device).bfloat16().transpose(1, 2)
    assert torch.equal(layer(x), layer(x.contiguous()))
    assert layer(x).shape == (5, 3, 64)


def test_reference_is_chosen_on_cpu_and_reasons_are_given():
    layer = _layer("fp8_e4m3/channel", "fp8_e4m3/token", 64, 96, "cpu", False, False)
    choice = choose_backend(layer.params, torch.device("cpu"), torch.bfloat16)
    assert isinstance(choice, Choice) and choice.backend.run is reference_qlinear
    assert choice.refused["cublaslt-fp8"]


@pytest.mark.gpu
def test_fp8_runs_on_tensor_cores():
    layer = _layer("fp8_e4m3/channel", "fp8_e4m3/token", 64, 96, "cuda", False, False)
    layer(torch.randn(4, 96, device="cuda").bfloat16())
    assert layer._choice[1].backend.name == "cublaslt-fp8"
    odd = _layer("fp8_e4m3/channel", "fp8_e4m3/token", 60, 96, "cuda", False, False)
    odd(torch.randn(4, 96, device="cuda").bfloat16())
    assert odd._choice[1].backend.name == "expand-bf16"
    assert "multiple of 16" in odd._choice[1].refused["cublaslt-fp8"]


def _residual(weights: str, grid: str, k: int, count: int, dual: bool) -> LinearParams:
    g = torch.Generator().manual_seed(k)
    w = torch.randn(24, k + count * (1 + dual), generator=g) * 0.05
    side = torch.randn(4, k, generator=g).bfloat16() * 0.1, torch.randn(24, 4, generator=g).bfloat16() * 0.1
    spec, bias = QuantSpec.parse(grid), torch.randn(24, generator=g)
    return LinearParams(quantize(w, QuantSpec.parse(weights)), spec, [], *side, bias, residual=count, dual=dual)


@pytest.mark.parametrize(
    ("weights", "grid", "k", "count", "dual"),
    [
        ("nvfp4", "nvfp4-token", 96, 16, False),
        ("nvfp4@sweep", "nvfp4-token@sweep", 112, 48, True),
        ("nvfp4", "nvfp4-token@mse", 96, 32, True),  # a rule that the activation kernel does not have
        ("nvfp4", "nvfp4-token", 100, 0, False),
        ("mxfp4", "mxfp4", 96, 32, True),
        ("mxfp8", "mxfp8", 70, 0, False),
    ],
)
def test_block_scaled_layers_of_any_width(weights, grid, k, count, dual, monkeypatch):
    """Residual columns, a low-rank branch and a bias on Blackwell: operands as its kernel gets them, multiplied by
    their definition here; K + S need not fill a tile. 0 and a few rows."""
    from dq.kernels import library

    params = _residual(weights, grid, k, count, dual)
    backend = BACKENDS.get("block-scaled-mma")
    for rows in (0, 5):
        x = torch.randn(rows, k, generator=torch.Generator().manual_seed(1))
        y = backend.run(x, params)
        want = reference_qlinear(x, params)
        # float32 throughout, but for the branch, whose first factor is a BF16 product.
        assert y.shape == want.shape and (not rows or float((y - want).norm() / want.norm()) < 1e-3)
    monkeypatch.setattr(library, "_capability", lambda index: (12, 0))
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(library, "has_triton", lambda: True)
    assert not backend.refuse(params, torch.device("cuda"), torch.bfloat16)
    odd = _residual(weights, grid, k, 8, dual)
    assert "no whole groups" in backend.refuse(odd, torch.device("cuda"), torch.bfloat16)


@pytest.mark.parametrize("dual", [False, True])
def test_packed_by_torch_is_packed_by_the_kernel(dual, monkeypatch):
    """The way around the activation kernel gives its bytes; blocks of zeros have any scale."""
    from dq.kernels.activation import api
    from dq.kernels.gemm import rows

    x, grid = torch.randn(6, 96, generator=torch.Generator().manual_seed(0)), QuantSpec.parse("nvfp4-token@4over6")
    kernel = rows.pack(x, [], grid, 32, dual)
    monkeypatch.setattr(api, "why_not", lambda *args: "not this time")
    for a, b in zip(kernel, rows.pack(x, [], grid, 32, dual), strict=True):
        assert torch.equal(a.float(), b.float())
