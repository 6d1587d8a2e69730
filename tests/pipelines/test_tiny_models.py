"""The tiny models that other tests use: they run, depend on their seed, and a batch is its samples."""

import pytest
import torch
from tiny_models import CASES

from dq.records import tensors


@pytest.mark.parametrize("name", CASES)
def test_runs_and_batches(name):
    case = CASES[name]
    model = case.build()
    with torch.no_grad():
        one, again = (tensors(model(**case.inputs())) for _ in range(2))
        two = tensors(model(**case.inputs(batch=2)))
        other = tensors(model(**case.inputs(seed=1)))
    assert all(torch.isfinite(t).all() for t in one) and one[0].std() > 0.1
    assert torch.equal(one[0], again[0]) and not torch.equal(one[0], other[0])
    first = two[0].flatten()[: one[0].numel()]
    torch.testing.assert_close(first, one[0].flatten(), rtol=1e-4, atol=1e-5)


def test_weights_depend_on_the_seed():
    case = CASES["FluxTransformer2DModel"]
    first, same, other = (case.build(seed=s).proj_out.weight for s in (0, 0, 1))
    assert torch.equal(first, same) and not torch.equal(first, other)
    assert case.build(torch.bfloat16).dtype == torch.bfloat16
    assert len(case.build(num_layers=3).transformer_blocks) == 3
