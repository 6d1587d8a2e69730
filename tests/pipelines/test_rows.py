"""Linears that a file holds as rows of one matrix: joined and split without rounding; every architecture with original
names goes there and back."""

import pytest
import torch
from tiny_models import CASES

import dq
from dq.linear import quantized_linears
from dq.pipelines.exported import Stored
from dq.pipelines.naming import NAMINGS
from dq.pipelines.rows import join, split
from dq.qtensor import quantize
from dq.registry import DQError
from dq.spec import QuantSpec


@pytest.mark.parametrize("swap", [False, True])
@pytest.mark.parametrize(
    "grid", ["int8/channel", "int8/tensor", "int4/group32", "uint4/group32", "nvfp4", "mxfp4", "fp8_e4m3/block16x32"]
)
def test_rows_there_and_back(grid, swap):
    weights = [torch.randn(n, 64) for n in (48, 32, 16)]
    top = torch.cat(weights).abs().amax()
    parts = [Stored(quantize(w, QuantSpec.parse(grid), amax=top)) for w in weights]
    whole = join(parts, swap)
    values = torch.cat([p.weight.dequantize() for p in parts])
    half = torch.cat([values[48:], values[:48]]) if swap else values
    assert whole.weight.shape == (96, 64) and torch.equal(whole.weight.dequantize(), half)
    for one, other in zip(parts, split(whole, (48, 32, 16), swap), strict=True):
        assert torch.equal(one.weight.codes, other.weight.codes)
        assert torch.equal(one.weight.dequantize(), other.weight.dequantize())
    with pytest.raises(DQError, match=r"it has 96 rows, and 48 \+ 16 are expected"):
        split(whole, (48, 16))


CLASSES = sorted(c for n in NAMINGS for c in n.classes)


@pytest.mark.parametrize("name", CLASSES)
def test_architectures_with_original_names(name, tmp_path):
    case = CASES[name]
    model = case.build(torch.bfloat16)
    dq.quantize(model, dq.Recipe.load("int8").with_(min_features=8, conv=None), progress=False)
    back = dq.load_exported(dq.export(model, tmp_path / "out", "comfyui"))
    ours, theirs = quantized_linears(model), quantized_linears(back)
    assert list(ours) == list(theirs)
    for key, tensor in model.state_dict().items():
        assert torch.equal(back.state_dict()[key], tensor), key
    inputs = case.inputs(torch.bfloat16)
    with torch.no_grad():
        a, b = (m(**inputs) for m in (model, back))
    a, b = (x if isinstance(x, torch.Tensor) else x[0] for x in (a, b))
    assert torch.equal(a[0] if isinstance(a, list) else a, b[0] if isinstance(b, list) else b)
